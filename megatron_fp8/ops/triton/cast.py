"""Triton kernels for the cast to FP8, the transpose and max|x|; any combination reads the input once.

    payload   = cast(x * scale)      (M, K) FP8, saturating
    payload_t = payload^T            (K, M) FP8, contiguous: the K-major operand that a backward GEMM reads
    amax      = max(amax, max|x|)    0-d float32

All three come from one pass: quantise + transpose of BF16 moves 2 + 1 + 1 bytes an element and is bound by memory.

Cast. Hopper's conversion instruction rounds to nearest even and saturates. It saturates infinities too, so the kernel
replaces them: by NaN in E4M3, by infinity in E5M2. NaN stays NaN.

The conversion works around a compiler bug. The ptxas of CUDA 12.8, which comes with Triton 3.6, miscompiles kernels
that separate the bytes of a cvt.e4m3x2 or .e5m2x2: in 8192 x 4096 BF16, 37 % of the transposed payload was wrong, or a
neighbour's, and some variants crash ptxas (H200, 2026-11-21; right with the ptxas of CUDA 13.0). So the two codes leave
the instruction through an exclusive or with `zero`, an argument whose value the compiler does not know, so that it can
fold nothing into the instruction. tests/gpu compares every variant with the reference.

Transpose. A program reads its tile as four tiles of every fourth row. The codes of four rows then make one 32-bit word
in a thread's registers, and the tile is transposed through shared memory word by word instead of byte by byte: this
takes a quarter of the instructions, and no two threads share a word. The rows are written from the same words. If M is
no multiple of 4, the columns are written byte by byte.

Amax. The bits of |x| as an int32 are ordered like |x|, with infinity above all numbers and NaN above infinity. So an
integer maximum, with one atomic a tile, is exact and does not depend on the order.

Views. The host passes FP8 tensors and amax as they are; the kernels reinterpret them as bytes, words and bits
(`as_type`). A view made by torch would cost the host a microsecond, at each of some twenty launches a layer.

The scale is read from device memory, so the host does not wait for the GPU. Offsets are 64-bit.
Agreement with reference.py: bit for bit, except for the sign and payload of NaN.
Source: PTX ISA, cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32.
"""

import torch
import triton
import triton.language as tl

from ...numerics.formats import E4M3, Format
from .launch import cdiv, launched
from .sums import empty_sums, summed

BLOCK, FLAT_WARPS = 8192, 8
TILE_M, TILE_K, TILE_WARPS = 64, 128, 8  # the tile of a transpose
# two float32 $2, $3 -> their two codes $0, $1 as int32; $4 is zero
_ASM = (
    "{{.reg .b16 pair; .reg .b32 word; cvt.rn.satfinite.{}x2.f32 pair, $3, $2; cvt.u32.u16 word, pair; "
    "xor.b32 word, word, $4; and.b32 $0, word, 255; shr.u32 $1, word, 8;}}"
)
_E4M3_ASM, _E5M2_ASM = tl.constexpr(_ASM.format("e4m3")), tl.constexpr(_ASM.format("e5m2"))
# float32 $1, $2 -> their two codes as one 16-bit number, $1's in the low byte; $3 is zero
_PAIR = (
    "{{.reg .b16 pair; .reg .b32 word; cvt.rn.satfinite.{}x2.f32 pair, $2, $1; cvt.u32.u16 word, pair; "
    "xor.b32 $0, word, $3;}}"
)
_E4M3_PAIR, _E5M2_PAIR = tl.constexpr(_PAIR.format("e4m3")), tl.constexpr(_PAIR.format("e5m2"))
# float32 $1 .. $4 -> their four E4M3 codes in one word; $5 (to $8) is zero
_QUAD = tl.constexpr(
    "{.reg .b16 a, b; .reg .b32 word; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
    "mov.b32 word, {a, b}; xor.b32 $0, word, $5;}"
)
# Whether two rows' codes stay in the pair that the instruction makes; this saves 3 instructions an element.
PAIRED = tl.constexpr(True)


@triton.jit
def convert(y, zero, E4M3: tl.constexpr):
    """float32 y -> its E4M3 or E5M2 code as int32: rounded to nearest even; infinities saturate too."""
    asm: tl.constexpr = _E4M3_ASM if E4M3 else _E5M2_ASM
    return tl.inline_asm_elementwise(asm, "=r,=r,r,r,r,r", [y, zero], dtype=tl.int32, is_pure=True, pack=2)


@triton.jit
def fp8_word(x, y, zero, E4M3: tl.constexpr):
    """The saturating FP8 code of float32 y, as int32. x is y, or y before scaling: if x is not finite, neither is the
    code."""
    if E4M3:
        code = convert(tl.fma(x, 0.0, y), zero, E4M3)  # x * 0 is NaN for an infinite x, else zero
    else:
        code = convert(y, zero, E4M3)
        code = tl.where(tl.abs(x) == float("inf"), code + 1, code)  # the code after E5M2's largest is infinity
    return code


@triton.jit
def convert_quad(y, zero):
    """float32 y -> its E4M3 code as uint8, four codes to a word; otherwise like convert."""
    return tl.inline_asm_elementwise(_QUAD, "=r,r,r,r,r,r,r,r,r", [y, zero], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def convert_pair(low, high, zero, E4M3: tl.constexpr):
    """convert for two float32 tensors: (low's code) | (high's code) << 8."""
    asm: tl.constexpr = _E4M3_PAIR if E4M3 else _E5M2_PAIR
    return tl.inline_asm_elementwise(asm, "=r,r,r,r", [low, high, zero], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def fp8_quad(x, y, zero):
    """fp8_code in E4M3, four neighbours to a word; for codes that are stored in the order of x."""
    return convert_quad(tl.fma(x, 0.0, y), zero)


@triton.jit
def fp8_pair(x_0, x_1, scale, zero, E4M3: tl.constexpr):
    """(fp8_word of x_0 * scale) | (fp8_word of x_1 * scale) << 8."""
    y_0, y_1 = x_0 * scale, x_1 * scale
    if PAIRED:
        if E4M3:
            pair = convert_pair(tl.fma(x_0, 0.0, y_0), tl.fma(x_1, 0.0, y_1), zero, E4M3)
        else:
            pair = convert_pair(y_0, y_1, zero, E4M3)
            pair = tl.where(tl.abs(x_0) == float("inf"), pair + 1, pair)
            pair = tl.where(tl.abs(x_1) == float("inf"), pair + 256, pair)
    else:
        pair = fp8_word(x_0, y_0, zero, E4M3) | fp8_word(x_1, y_1, zero, E4M3) << 8
    return pair


@triton.jit
def fp8_code(x, y, zero, E4M3: tl.constexpr):
    """fp8_word's result as uint8."""
    return fp8_word(x, y, zero, E4M3).to(tl.uint8)


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, float32, as an int32: ordered like |x|, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def larger(largest, x_0, x_1):
    """The larger one of magnitude bits `largest` and of those of x_0 and x_1, tiles of the same shape."""
    return tl.maximum(largest, tl.maximum(magnitude_bits(x_0), magnitude_bits(x_1)))


@triton.jit
def as_type(ptr, DTYPE: tl.constexpr):
    """The pointer, reinterpreted to another type."""
    return ptr.to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def raise_amax(amax_ptr, bits):
    """amax (float32) <- max(amax, the largest of `bits`, which are magnitude_bits).

    amax only grows, so a value that does not exceed an earlier amax needs no atomic. Thousands of atomics at one
    address would be slow.
    """
    amax_ptr = as_type(amax_ptr, tl.int32)
    largest = tl.max(bits)
    tl.atomic_max(amax_ptr, largest, mask=largest > tl.load(amax_ptr, cache_modifier=".cg"), sem="relaxed")


@launched
@triton.jit(do_not_specialize=["zero"])
def _flat_kernel(x_ptr, n, scale_ptr, out_ptr, amax_ptr, zero, E4M3: tl.constexpr, BLOCK: tl.constexpr):
    """For n contiguous elements: the cast if there is an out_ptr, amax if there is an amax_ptr."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if out_ptr is not None:
        tl.store(as_type(out_ptr, tl.uint8) + offsets, fp8_code(x, x * tl.load(scale_ptr), zero, E4M3), mask=mask)
    if amax_ptr is not None:
        raise_amax(amax_ptr, magnitude_bits(x))


@triton.jit
def store_codes(word, out_ptr, out_t_ptr, quads, cols, first, M, K, width, WORDS: tl.constexpr):
    """Store `word` (Q, C) int32. Byte i holds the codes of rows 4 q + i of M, q in quads (Q,), columns cols (C,) of K.

    They go to out (M, width) and out_t (width, M), if given, with the columns counted from `first` on. WORDS: out_t is
    written by words (M a multiple of 4, out_t at a multiple of 4 bytes); else by bytes.
    """
    place = cols + first
    if out_ptr is not None:
        out_ptr = as_type(out_ptr, tl.uint8)
        for i in tl.static_range(4):
            rows = 4 * quads + i
            mask = (rows < M)[:, None] & (cols < K)[None, :]
            offsets = rows.to(tl.int64)[:, None] * width + place[None, :]
            tl.store(out_ptr + offsets, (word >> (8 * i)).to(tl.uint8), mask=mask)
    if out_t_ptr is not None:
        if WORDS:
            out_t_ptr = as_type(out_t_ptr, tl.int32)
            mask = (cols < K)[:, None] & (quads < M // 4)[None, :]  # in this form Triton stores 16-byte vectors
            offsets = place.to(tl.int64)[:, None] * (M // 4) + quads[None, :]
            tl.store(out_t_ptr + offsets, tl.trans(word), mask=mask)
        else:
            out_t_ptr = as_type(out_t_ptr, tl.uint8)
            for i in tl.static_range(4):
                rows = 4 * quads + i
                mask = (cols < K)[:, None] & (rows < M)[None, :]
                offsets = place.to(tl.int64)[:, None] * M + rows[None, :]
                tl.store(out_t_ptr + offsets, tl.trans((word >> (8 * i)).to(tl.uint8)), mask=mask)


@triton.jit
def tile_place(columns, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """(tile of rows, quads, cols) of this program in a matrix of `columns` columns; see store_codes."""
    tiles = tl.cdiv(columns, TILE_K)
    tile = tl.program_id(0) // tiles
    quads = tile * (TILE_M // 4) + tl.arange(0, TILE_M // 4)
    return tile, quads, tl.program_id(0) % tiles * TILE_K + tl.arange(0, TILE_K)


@triton.jit
def _load_rows(ptr, rows, cols, M, K):
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * K + cols[None, :], mask=mask, other=0)


@launched
@triton.jit(do_not_specialize=["zero"])
def _tile_kernel(
    x_ptr, M, K, scale_ptr, out_ptr, out_t_ptr, amax_ptr, sums_ptr, zero,
    E4M3: tl.constexpr, WORDS: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Without a scale_ptr: out_t = x^T of an FP8 matrix. With one: x cast into out and out_t, if given.

    With amax_ptr and sums_ptr also amax, and the sum over the rows of this program's TILES tiles, which goes to row
    `tile` of sums (., K).
    """
    if scale_ptr is None:
        x_ptr = as_type(x_ptr, tl.uint8)
    tile, _, cols = tile_place(K, TILE_M * TILES, TILE_K)
    largest = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
    total = tl.zeros((TILE_M // 4, TILE_K), tl.float32)
    for n in range(TILES):
        quads = (tile * TILES + n) * (TILE_M // 4) + tl.arange(0, TILE_M // 4)
        word = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        for i in tl.static_range(2):
            x_0 = _load_rows(x_ptr, 4 * quads + 2 * i, cols, M, K)
            x_1 = _load_rows(x_ptr, 4 * quads + 2 * i + 1, cols, M, K)
            if scale_ptr is not None:
                x_0, x_1 = x_0.to(tl.float32), x_1.to(tl.float32)
                if amax_ptr is not None:
                    largest = larger(largest, x_0, x_1)
                if sums_ptr is not None:
                    total += x_0 + x_1
                pair = fp8_pair(x_0, x_1, tl.load(scale_ptr), zero, E4M3)
            else:
                pair = x_0.to(tl.int32) | x_1.to(tl.int32) << 8
            word |= pair << (16 * i)
        store_codes(word, out_ptr, out_t_ptr, quads, cols, 0, M, K, K, WORDS)
    if sums_ptr is not None:
        tl.store(sums_ptr + tile.to(tl.int64) * K + cols, tl.sum(total, axis=0), mask=cols < K)
    if amax_ptr is not None:
        raise_amax(amax_ptr, largest)


def _launch_flat(x, scale=None, out=None, amax_out=None, fmt=None):
    grid = (cdiv(x.numel(), BLOCK),)
    _flat_kernel[grid](x, x.numel(), scale, out, amax_out, 0, E4M3=fmt == E4M3, BLOCK=BLOCK, num_warps=FLAT_WARPS)


def by_words(out_t: torch.Tensor | None, M: int) -> bool:
    """Whether store_codes may write out_t (K, M) by words."""
    return out_t is not None and M % 4 == 0 and out_t.data_ptr() % 4 == 0


def _launch_tiles(x, out_t, scale=None, out=None, amax_out=None, sums=None, fmt=None, tiles=1):
    M, K = x.shape
    grid = (cdiv(M, TILE_M * tiles) * cdiv(K, TILE_K),)
    _tile_kernel[grid](
        x, M, K, scale, out, out_t, amax_out, sums, 0,
        E4M3=fmt == E4M3, WORDS=by_words(out_t, M), TILE_M=TILE_M, TILE_K=TILE_K, TILES=tiles, num_warps=TILE_WARPS,
    )  # fmt: skip


def empty_payload(x: torch.Tensor, shape: tuple[int, ...], fmt: Format) -> torch.Tensor:
    """An uninitialised payload on x's device."""
    return torch.empty(*shape, dtype=fmt.dtype, device=x.device)  # sizes in a tuple cost 1 us more


def amax(x: torch.Tensor) -> torch.Tensor:
    """See reference.amax. One pass; an empty x gives 0."""
    out = x.new_zeros((), dtype=torch.float32)
    _launch_flat(x.contiguous(), amax_out=out)
    return out


def quantize(
    x: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor,
    *,
    transpose: bool = False,
    rows: bool = True,
    amax_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor | None, torch.Tensor]:
    """See reference.quantize. One pass; amax_out must not be negative, and `out` must be contiguous."""
    x = x.contiguous()
    payload = (empty_payload(x, x.shape, fmt) if out is None else out) if rows else None
    if not transpose:
        _launch_flat(x, scale, payload, amax_out, fmt)
        return payload
    x = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    payload_t = empty_payload(x, x.shape[::-1], fmt)
    _launch_tiles(x, payload_t, scale, payload, amax_out, fmt=fmt)
    return payload, payload_t


def transpose(payload: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See reference.transpose. `out` must be contiguous."""
    if out is None:
        out = payload.new_empty(payload.shape[1], payload.shape[0])
    _launch_tiles(payload.contiguous(), out)
    return out


def quantize_bias_grad(
    dy: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor,
    *,
    rows: bool = True,
    columns: bool = False,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """See reference.quantize_bias_grad. One pass, and a small one over the programs' sums, in a fixed order."""
    dy = dy.contiguous()
    payload = empty_payload(dy, dy.shape, fmt) if rows else None
    payload_t = empty_payload(dy, dy.shape[::-1], fmt) if columns else None
    M, K = dy.shape
    sums, tiles = empty_sums(M, K, TILE_M, TILE_K, K, dy.device)
    _launch_tiles(dy, payload_t, scale, payload, amax_out, sums, fmt, tiles)
    return payload, payload_t, summed(sums, dy.dtype)
