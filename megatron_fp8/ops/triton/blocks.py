"""BlockScaled on the GPU: quantise in one pass, and sum what R ranks sent in one pass.

numerics/blocks.py defines the format. Per block of 128, 1.f * 2^E being max|x|,

    e       = E - 8 where 1.f <= 1.75, else E - 7; at least -127    (448 = 1.75 * 2^8)
    payload = E4M3(x * 2^-e),   exponent byte = e + 127

All of it is integer work on the exponent bits: adding 2^21 - 1 to the bits of max|x| carries into the
exponent exactly where 1.f > 1.75. Powers of two are built as bits, so every product is exact; the only
roundings are the cast to E4M3 (4 significant bits: relative error at most 2^-4) and, in the sum, the float32
additions.

    quantize_blocks   reads 4 (or 2) bytes an element, writes 1 + 1/128; with noise it reads 4 more
    sum_blocks        reads R * (1 + 1/128) bytes an element, writes 4

Stochastic rounding goes up where noise < the fraction of an ulp that truncation would drop
(numerics/rounding.py). Agreement with reference.py: bit for bit, but for the sign and payload of NaN.
"""

import torch
import triton
import triton.language as tl

from megatron_fp8.numerics.blocks import BLOCK, BlockScaled
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.ops.triton.cast import fp8_code, magnitude_bits

_BLOCK = tl.constexpr(BLOCK)
QUANTIZE_BLOCKS, QUANTIZE_WARPS = 16, 4  # blocks of 128 and warps a program
SUM_BLOCKS, SUM_WARPS = 4, 4


@triton.jit
def _stochastic(x, noise):
    """Round float32 x, |x| <= 448, to a value of E4M3 that neighbours it: up where noise < the fraction."""
    bits = magnitude_bits(x)
    # The ulp is 2^(exponent - 3), from 2^-6 (bits 121 << 23) upwards; 2 * 127 - e are the bits of 1 / 2^e.
    ulp = tl.maximum(bits & 0x7F800000, 121 << 23) - (3 << 23)
    steps = bits.to(tl.float32, bitcast=True) * ((254 << 23) - ulp).to(tl.float32, bitcast=True)
    whole = tl.floor(steps)
    whole += (noise < steps - whole).to(tl.float32)
    rounded = (whole * ulp.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return (rounded | (x.to(tl.int32, bitcast=True) ^ bits)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["zero"])
def _quantize_kernel(x_ptr, noise_ptr, payload_ptr, exponents_ptr, blocks, zero, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = rows.to(tl.int64)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = (rows < blocks)[:, None]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    # What is not finite counts as infinity: the exponent then is 120.
    largest = tl.minimum(tl.max(magnitude_bits(x), axis=1), 0x7F800000)
    byte = tl.maximum(((largest + 0x001FFFFF) >> 23) - 8, 0)
    y = x * ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]
    if noise_ptr is not None:
        y = _stochastic(y, tl.load(noise_ptr + offsets, mask=mask, other=0.0))
    tl.store(payload_ptr + offsets, fp8_code(x, y, zero, True), mask=mask)
    tl.store(exponents_ptr + rows, byte.to(tl.uint8), mask=rows < blocks)


@triton.jit
def _sum_kernel(payload_ptr, exponents_ptr, out_ptr, blocks, RANKS: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = rows.to(tl.int64)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = (rows < blocks)[:, None]
    total = tl.zeros((ROWS, _BLOCK), tl.float32)
    for rank in tl.range(0, RANKS, loop_unroll_factor=4):
        first = rank * tl.cast(blocks, tl.int64)
        payload = tl.load(payload_ptr + first * _BLOCK + offsets, mask=mask, other=0.0).to(tl.float32)
        byte = tl.load(exponents_ptr + first + rows, mask=rows < blocks, other=0).to(tl.int32)
        # 2^-127, byte 0, is a denormal: its bits are not byte << 23.
        scale = tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)
        total += payload * scale[:, None]
    tl.store(out_ptr + offsets, total, mask=mask)


def quantize_blocks(
    x: torch.Tensor,
    payload_out: torch.Tensor | None = None,
    exponents_out: torch.Tensor | None = None,
    rounding: str = "nearest",
    noise: torch.Tensor | None = None,
) -> BlockScaled:
    """reference.quantize_blocks in one pass. The outputs, if given, must be contiguous."""
    if x.dim() != 1 or x.numel() % BLOCK:
        raise ValueError(f"quantize_blocks takes (n,), n a multiple of {BLOCK}, not {tuple(x.shape)}")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"quantize_blocks rounding {rounding!r}: use 'nearest' or 'stochastic'")
    if rounding == "stochastic" and (noise is None or noise.shape != x.shape):
        raise ValueError("stochastic rounding needs noise of x's shape: pass torch.rand_like(x)")
    noise = noise.contiguous() if rounding == "stochastic" else None
    blocks = x.numel() // BLOCK
    payload = torch.empty_like(x, dtype=E4M3.dtype) if payload_out is None else payload_out
    exponents = x.new_empty(blocks, dtype=torch.uint8) if exponents_out is None else exponents_out
    grid = (triton.cdiv(blocks, QUANTIZE_BLOCKS),)
    _quantize_kernel[grid](
        x.contiguous(), noise, payload.view(torch.uint8), exponents, blocks, 0,
        ROWS=QUANTIZE_BLOCKS, num_warps=QUANTIZE_WARPS,
    )  # fmt: skip
    return BlockScaled(payload, exponents)


def sum_blocks(payload: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """reference.sum_blocks in one pass. `out` must be contiguous."""
    ranks, blocks = exponents.shape
    payload, exponents = payload.contiguous(), exponents.contiguous()
    grid = (triton.cdiv(blocks, SUM_BLOCKS),)
    # Fused, a product that overflows (|x| >= 3.3e38) could cancel; here it is infinite, as in the reference.
    _sum_kernel[grid](
        payload,
        exponents,
        out,
        blocks,
        RANKS=ranks,
        ROWS=SUM_BLOCKS,
        num_warps=SUM_WARPS,
        enable_fp_fusion=False,
    )
    return out
