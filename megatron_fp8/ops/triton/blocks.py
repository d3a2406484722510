"""Triton kernels for BlockScaled and PackedBlocks: quantise, add to stored blocks, sum the blocks of R ranks; one pass
each.

numerics/blocks.py defines the format. For a block of 128 with max|x| = 1.f * 2^E:

    e       = E - 8 if 1.f <= 1.75, else E - 7; at least -127    (448 = 1.75 * 2^8)
    payload = E4M3(x * 2^-e),   exponent byte = e + 127

e is computed with integers, from the exponent bits: adding 2^21 - 1 to the bits of max|x| carries into the exponent
exactly if 1.f > 1.75. Powers of two are built as bits, so every product is exact. Only the cast to E4M3 (4 significant
bits: relative error at most 2^-4) and, in the sum, the float32 additions round.

    quantize_blocks     reads 4 (or 2) bytes an element, writes 1 + 1/128; with noise it reads 4 more
    add_blocks          reads 1 + 1/128 and 2 (or 4) bytes an element, writes 1 + 1/128; its noise is computed
    sum_blocks          reads R * (1 + 1/128) bytes an element, writes 4 (or 2); with a start it reads 2 (or 4) more
    square_sum_blocks   reads R * (1 + 1/128) bytes an element, writes 4 a program

The offsets of block b of a PackedBlocks, with per_row = m/128 blocks a row and pitch = m + m/128 bytes a row:

    payload at (b // per_row) * pitch + (b % per_row) * 128,   exponent at (b // per_row) * pitch + b % per_row

each from the first payload or exponent. m is a multiple of 2048, so pitch is a multiple of 16. Triton sees this in the
argument, and moves the payload as 16-byte vectors instead of bytes. A BlockScaled is one row. Offsets are 64-bit.

Stochastic rounding goes up if noise < the fraction of an ulp that truncation would drop (numerics/rounding.py). A
program owns whole blocks and reads them before it writes, so adding in place needs no copy. The sum of squares is one
number a program, and torch sums these numbers. There are no atomics, so order and result are the same every time.

A product that overflows (|payload * 2^e| >= 3.3e38) is infinite in the reference. Fused with the addition, it could
become finite again. Hence enable_fp_fusion=False in kernels that add products.
Agreement with reference.py: bit for bit, except for the sign and payload of NaN; the sum of squares has another order.
"""

import torch
import triton
import triton.language as tl

from ...numerics.blocks import BLOCK, BlockScaled, PackedBlocks
from ...numerics.formats import E4M3
from ...numerics.noise import Seed
from .cast import fp8_quad, magnitude_bits
from .launch import cdiv, launched

_BLOCK = tl.constexpr(BLOCK)
QUANTIZE_BLOCKS, QUANTIZE_WARPS = 32, 4  # blocks of 128 and warps a program
ADD_BLOCKS, ADD_WARPS = 16, 4
SUM_BLOCKS, SUM_WARPS = 16, 4


@triton.jit
def _stochastic(x, noise):
    """Round float32 x, |x| <= 448, to a neighbouring value of E4M3: up if noise < the fraction."""
    bits = magnitude_bits(x)
    # ulp = 2^(e - 3) with e >= -6 (bits 121 << 23). (254 << 23) - its bits are those of 1 / ulp.
    ulp = tl.maximum(bits & 0x7F800000, 121 << 23) - (3 << 23)
    steps = bits.to(tl.float32, bitcast=True) * ((254 << 23) - ulp).to(tl.float32, bitcast=True)
    whole = tl.floor(steps)
    whole += (noise < steps - whole).to(tl.float32)
    rounded = (whole * ulp.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return (rounded | (x.to(tl.int32, bitcast=True) ^ bits)).to(tl.float32, bitcast=True)


@triton.jit
def _noise(index, s0, s1):
    """The noise of numerics/noise.py, float32 in [0, 1), for uint32 indices and two uint32 words."""
    x = index + s0
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11) ^ s1) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return ((x ^ (x >> 14)) >> 8).to(tl.float32) * 2.0**-24


@triton.jit
def _places(block, per_row, pitch):
    """Offsets of the payload (ROWS, 128) and of the exponents (ROWS,) of these blocks (ROWS,) of a PackedBlocks."""
    start = (block // per_row).to(tl.int64) * pitch
    column = (block % per_row).to(tl.int64)
    return (start + column * _BLOCK)[:, None] + tl.arange(0, _BLOCK)[None, :], start + column


@triton.jit
def _load_blocks(payload_ptr, exponents_ptr, values, scales, inside):
    """Blocks as float32, exactly. values (ROWS, 128), scales (ROWS,): offsets of payload and exponents.

    Rows that are not `inside` (ROWS,) are zeros.
    """
    payload = tl.load(payload_ptr + values, mask=inside[:, None], other=0.0).to(tl.float32)
    byte = tl.load(exponents_ptr + scales, mask=inside, other=0).to(tl.int32)
    return payload * block_scale(byte)[:, None]


@triton.jit
def scaled_to_blocks(x):
    """float32 x (ROWS, 128), one block a row -> (x * 2^-e, the exponents' bytes (ROWS,) as int32)."""
    # NaN counts as infinity; the exponent is 120 for both.
    largest = tl.minimum(tl.max(magnitude_bits(x), axis=1), 0x7F800000)
    byte = tl.maximum(((largest + 0x001FFFFF) >> 23) - 8, 0)
    return x * ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None], byte


@triton.jit
def block_scale(byte):
    """An exponent's byte, int32 -> 2^(byte - 127), float32."""
    # Byte 0 stands for 2^-127, a denormal, whose bits are not byte << 23.
    return tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def _store_blocks(x, noise, payload_ptr, exponents_ptr, values, scales, inside, zero):
    """Quantise float32 x (ROWS, 128), stochastically if there is noise (ROWS, 128), and store it; see _load_blocks."""
    y, byte = scaled_to_blocks(x)
    if noise is not None:
        y = _stochastic(y, noise)
    tl.store(payload_ptr + values, fp8_quad(x, y, zero), mask=inside[:, None])
    tl.store(exponents_ptr + scales, byte.to(tl.uint8), mask=inside)


@launched
@triton.jit(do_not_specialize=["first", "zero"])
def _quantize_kernel(
    x_ptr, noise_ptr, payload_ptr, exponents_ptr, blocks, first, per_row, pitch, zero, ROWS: tl.constexpr
):  # fmt: skip
    """Quantise x's `blocks` blocks into the blocks from `first` on."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = rows.to(tl.int64)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = rows < blocks
    x = tl.load(x_ptr + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    noise = None
    if noise_ptr is not None:
        noise = tl.load(noise_ptr + offsets, mask=inside[:, None], other=0.0)
    values, scales = _places(first + rows, per_row, pitch)
    _store_blocks(x, noise, payload_ptr, exponents_ptr, values, scales, inside, zero)


@launched
@triton.jit(do_not_specialize=["first", "s0", "s1", "each", "seed_step", "zero"])
def _add_kernel(
    x_ptr, payload_ptr, codes_ptr, exponents_ptr, blocks, first, per_row, pitch, s0: tl.uint32, s1: tl.uint32, seed_ptr,
    each, seed_step, zero, ROWS: tl.constexpr,
):  # fmt: skip
    """blocks <- blocks + x, from block `first` on.

    codes_ptr is payload_ptr as bytes: the kernel reads FP8 and writes fp8_quad's bytes. The seed is s0 and s1. If
    seed_ptr is given, each tensor of `each` blocks has its two words there, seed_step apart.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = rows.to(tl.int64)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = rows < blocks
    values, scales = _places(first + rows, per_row, pitch)
    total = _load_blocks(payload_ptr, exponents_ptr, values, scales, inside)
    total += tl.load(x_ptr + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    # Compiled code has uint32 words, as annotated; the interpreter turns large ones into int64.
    if seed_ptr is not None:
        tensor = rows // each
        index = offsets - tensor.to(tl.int64)[:, None] * each * _BLOCK
        w0 = tl.load(seed_ptr + tensor * seed_step, mask=inside, other=0).to(tl.uint32)[:, None]
        w1 = tl.load(seed_ptr + tensor * seed_step + 1, mask=inside, other=0).to(tl.uint32)[:, None]
        noise = _noise(index.to(tl.uint32), w0, w1)
    else:
        noise = _noise(offsets.to(tl.uint32), s0.to(tl.uint32), s1.to(tl.uint32))
    _store_blocks(total, noise, codes_ptr, exponents_ptr, values, scales, inside, zero)


@launched
@triton.jit
def _sum_kernel(
    payload_ptr, exponents_ptr, start_ptr, out_ptr, scale_ptr, squares_ptr, blocks, payload_pitch, exponents_pitch,
    RANKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """total = (start + sum over ranks of their blocks) * scale. start and scale are optional.

    With out_ptr, stores total. With squares_ptr, stores the sum of the program's total^2 in squares[program]. The
    pitches are the distances between one rank's payload, or exponents, and the next rank's.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = rows.to(tl.int64)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = rows < blocks
    total = tl.zeros((ROWS, _BLOCK), tl.float32)
    if start_ptr is not None:
        total = tl.load(start_ptr + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    for rank in tl.range(0, RANKS, loop_unroll_factor=4):
        payload = payload_ptr + rank * tl.cast(payload_pitch, tl.int64)
        exponents = exponents_ptr + rank * tl.cast(exponents_pitch, tl.int64)
        total += _load_blocks(payload, exponents, offsets, rows, inside)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr)
    if out_ptr is not None:
        tl.store(out_ptr + offsets, total, mask=inside[:, None])
    if squares_ptr is not None:
        tl.store(squares_ptr + tl.program_id(0), tl.sum(total * total))


def quantize_blocks(
    x: torch.Tensor,
    rounding: str = "nearest",
    noise: torch.Tensor | None = None,
    out: PackedBlocks | None = None,
    first: int = 0,
) -> BlockScaled | PackedBlocks:
    """See reference.quantize_blocks. One pass."""
    if x.dim() != 1 or x.numel() % BLOCK:
        raise ValueError(f"quantize_blocks takes (n,), n a multiple of {BLOCK}, not {tuple(x.shape)}")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"quantize_blocks rounding {rounding!r}: use 'nearest' or 'stochastic'")
    if rounding == "stochastic" and (noise is None or noise.shape != x.shape):
        raise ValueError("stochastic rounding needs noise of x's shape: pass torch.rand_like(x)")
    noise = noise.contiguous() if rounding == "stochastic" else None
    blocks = x.numel() // BLOCK
    if out is None:
        target = BlockScaled(x.new_empty(x.numel(), dtype=E4M3.dtype), x.new_empty(blocks, dtype=torch.uint8))
        per_row, pitch = blocks, 0
    else:
        out.check_span(first, x.numel())
        target, per_row, pitch = out, out.exponents.shape[1], out.data.stride(0)
    _quantize_kernel[(cdiv(blocks, QUANTIZE_BLOCKS),)](
        x.contiguous(), noise, target.payload.view(torch.uint8), target.exponents, blocks, first // BLOCK,
        per_row, pitch, 0, ROWS=QUANTIZE_BLOCKS, num_warps=QUANTIZE_WARPS,
    )  # fmt: skip
    return target


def add_blocks(x: torch.Tensor, blocks: PackedBlocks, seed: Seed, first: int = 0) -> None:
    """See reference.add_blocks. One pass."""
    if x.dim() != 1:
        raise ValueError(f"add_blocks takes (n,), n a multiple of {BLOCK}, not {tuple(x.shape)}")
    blocks.check_span(first, x.numel())
    count, payload, exponents = x.numel() // BLOCK, blocks.payload, blocks.exponents
    if not isinstance(seed, torch.Tensor):
        words = *seed, None, count, 0
    elif seed.dim() == 1:
        words = 0, 0, seed, count, 0
    else:
        words = 0, 0, seed, count // len(seed), seed.stride(0)
    _add_kernel[(cdiv(count, ADD_BLOCKS),)](
        x.contiguous(), payload, payload.view(torch.uint8), exponents, count, first // BLOCK,
        exponents.shape[1], blocks.data.stride(0), *words, 0,
        ROWS=ADD_BLOCKS, num_warps=ADD_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _rows(shards: torch.Tensor) -> torch.Tensor:
    """`shards` (R, n), copied only if its rows are not contiguous."""
    return shards if shards.stride(1) == 1 else shards.contiguous()


def _launch_sum(payload, exponents, start=None, out=None, scale=None, squares=None):
    payload, exponents = _rows(payload), _rows(exponents)
    ranks, blocks = exponents.shape
    _sum_kernel[(cdiv(blocks, SUM_BLOCKS),)](
        payload, exponents, start, out, scale, squares, blocks, payload.stride(0), exponents.stride(0),
        RANKS=ranks, ROWS=SUM_BLOCKS, num_warps=SUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def sum_blocks(
    payload: torch.Tensor,
    exponents: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """See reference.sum_blocks. One pass; `out` and `start` must be contiguous."""
    _launch_sum(payload, exponents, start, out, scale)
    return out


def square_sum_blocks(payload: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """See reference.square_sum_blocks. One pass, without the (n,) sums in memory."""
    programs = cdiv(exponents.shape[1], SUM_BLOCKS)
    squares = payload.new_empty(programs, dtype=torch.float32)
    _launch_sum(payload, exponents, squares=squares)
    return squares.sum()
