"""Triton kernels that emulate a format: e(x) of numerics/emulation.py, with one read and one write of x.

All rounding uses integers. The exponent field f and the mantissa of float32's bits give |x| = m * 2^(f - 150), m an
integer of 24 bits (f = 1 for denormals, whose m is smaller). In a format with y mantissa bits, whose smallest normal
has the field s, m must be a multiple of 2^drop:

    drop = max(s - f, 0) + 23 - y,        m = whole * 2^drop + rest,        rest / 2^drop decides whether to round up

The bits of the result are whole * 2^drop + ((f - 1) << 23): a carry increments the field, up to infinity's. Scaling by
2^k only moves the smallest normal: s = 128 - b + k. There is no multiplication, so no denormal is lost.

    scaling none        one flat kernel
    scaling tensor      cast.py's amax first, then the flat kernel
    row, block:N        one kernel: a program owns whole rows or blocks, finds their maxima, and reads them again (from
                        cache) to round

rest / 2^drop is computed in float32, exactly, with drop limited to 50: a rest below 2^-25 of a step, the smallest
noise, is never rounded up. Noise is computed in registers. Offsets are 64-bit; the host does not wait for the GPU.
Agreement with emulation.emulate: bit for bit, except for the sign and payload of NaN.
"""

import torch
import triton
import triton.language as tl

from ...numerics.emulation import SMALLEST_NOISE, EmulatedFormat, largest_carry
from . import cast
from .blocks import _noise
from .cast import magnitude_bits
from .launch import cdiv, launched, next_power_of_2

_SMALLEST_NOISE = tl.constexpr(SMALLEST_NOISE)
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_TILE, _WARPS = 4096, 4


@triton.jit
def _smallest_normal(largest, CARRY: tl.constexpr, FIELD: tl.constexpr, BIAS: tl.constexpr):
    """The exponent field of the scaled format's smallest normal, from the bits of max|x| (int32)."""
    k = ((tl.minimum(largest, 0x7F7FFFFF) + CARRY) >> 23) - FIELD
    return tl.maximum(k + (128 - BIAS), 1)


@triton.jit
def _round(
    x, smallest, offsets, s0, s1,
    MANTISSA: tl.constexpr, ROUNDING: tl.constexpr, LARGEST: tl.constexpr, OVERFLOW: tl.constexpr,
    NOT_FINITE: tl.constexpr,
):  # fmt: skip
    """Round float32 x. A result above the bits LARGEST gets the bits OVERFLOW; infinities and NaN get at least the bits
    NOT_FINITE."""
    bits = magnitude_bits(x)
    field = tl.maximum(bits >> 23, 1)
    below = (field - 1) << 23
    m = bits - below
    drop = tl.maximum(smallest - field, 0) + (23 - MANTISSA)
    shift = tl.minimum(drop, 24)  # m >> 24 is zero
    whole = m >> shift
    if ROUNDING != "truncate":
        rest = m - (whole << shift)
        fraction = rest.to(tl.float32) * ((127 - tl.minimum(drop, 50)) << 23).to(tl.float32, bitcast=True)
        if ROUNDING == "nearest":
            up = (fraction > 0.5) | ((fraction == 0.5) & ((whole & 1) == 1))
        else:
            up = tl.maximum(_noise(offsets.to(tl.uint32), s0, s1), _SMALLEST_NOISE) < fraction
        whole += up.to(tl.int32)
    # If drop > 24, m is less than a step. Only noise rounds it up, to one step, whose exponent field is given here.
    rounded = tl.where(drop > 24, (smallest - MANTISSA) << 23, (whole << shift) + below)
    rounded = tl.where(whole == 0, 0, rounded)
    rounded = tl.where(rounded > LARGEST, OVERFLOW, rounded)
    rounded = tl.where(bits < 0x7F800000, rounded, tl.maximum(bits, NOT_FINITE))
    return (rounded | (x.to(tl.int32, bitcast=True) ^ bits)).to(tl.float32, bitcast=True)


@launched
@triton.jit(do_not_specialize=["s0", "s1"])
def _flat_kernel(
    x_ptr, out_ptr, n, largest_ptr, s0: tl.uint32, s1: tl.uint32,
    CARRY: tl.constexpr, FIELD: tl.constexpr, BIAS: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr,
    LARGEST: tl.constexpr, OVERFLOW: tl.constexpr, NOT_FINITE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Round n contiguous elements; with largest_ptr, the bits of max|x| there give the scale."""
    offsets = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    smallest = 128 - BIAS
    if largest_ptr is not None:
        smallest = _smallest_normal(tl.load(largest_ptr), CARRY, FIELD, BIAS)
    # Compiled code has uint32 words, as annotated; the interpreter turns large ones into int64.
    y = _round(
        x, smallest, offsets, s0.to(tl.uint32), s1.to(tl.uint32), MANTISSA, ROUNDING, LARGEST, OVERFLOW, NOT_FINITE
    )
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


@launched
@triton.jit(do_not_specialize=["s0", "s1"])
def _block_kernel(
    x_ptr, out_ptr, blocks, per_row, K, N, s0: tl.uint32, s1: tl.uint32,
    CARRY: tl.constexpr, FIELD: tl.constexpr, BIAS: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr,
    LARGEST: tl.constexpr, OVERFLOW: tl.constexpr, NOT_FINITE: tl.constexpr,
    COUNT: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Round COUNT blocks of N elements. A row of K has per_row blocks; a block is read in PARTS of SPAN elements."""
    block = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    first = block % per_row * N
    start = block // per_row * K + first
    length = tl.where(block < blocks, tl.minimum(K - first, N), 0)
    largest = tl.zeros((COUNT,), tl.int32)
    for part in range(PARTS):
        columns = part * SPAN + tl.arange(0, SPAN)
        mask = columns[None, :] < length[:, None]
        x = tl.load(x_ptr + start[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(magnitude_bits(x), axis=1))
    smallest = _smallest_normal(largest, CARRY, FIELD, BIAS)[:, None]
    for part in range(PARTS):
        columns = part * SPAN + tl.arange(0, SPAN)
        mask = columns[None, :] < length[:, None]
        offsets = start[:, None] + columns[None, :]
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = _round(
            x, smallest, offsets, s0.to(tl.uint32), s1.to(tl.uint32),
            MANTISSA, ROUNDING, LARGEST, OVERFLOW, NOT_FINITE,
        )  # fmt: skip
        tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


def emulate(x: torch.Tensor, spec: EmulatedFormat, seed: tuple[int, int] | None = None) -> torch.Tensor:
    """See emulation.emulate. One pass, and one more over x for scaling "tensor"."""
    if spec.rounding == "stochastic" and seed is None:
        raise ValueError("stochastic rounding needs a seed: pass noise_seed(...)")
    x = x.contiguous()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    fmt, words = spec.format, seed or (0, 0)
    carry, field = largest_carry(fmt)
    largest = (field << 23) + 0x7FFFFF - carry
    constants = {
        "CARRY": carry,
        "FIELD": field,
        "BIAS": fmt.bias,
        "MANTISSA": fmt.mantissa_bits,
        "ROUNDING": spec.rounding,
        "LARGEST": _INFINITY if spec.scaled else largest,  # with a scale, nothing exceeds the maximum
        "OVERFLOW": _INFINITY if fmt.has_infinity and spec.rounding != "truncate" else largest,
        "NOT_FINITE": _INFINITY if fmt.has_infinity else _NAN,
    }
    if spec.scaled and spec.scaling != "tensor":
        K = x.shape[-1] if x.dim() else 1
        N = min(spec.block(K), K)
        per_row, span = cdiv(K, N), min(next_power_of_2(N), _TILE)
        blocks, count = x.numel() // K * per_row, _TILE // span
        _block_kernel[(cdiv(blocks, count),)](
            x, out, blocks, per_row, K, N, *words, **constants,
            COUNT=count, SPAN=span, PARTS=cdiv(N, span), num_warps=_WARPS,
        )  # fmt: skip
    else:
        amax = cast.amax(x).view(torch.int32) if spec.scaled else None
        _flat_kernel[(cdiv(x.numel(), _TILE),)](
            x, out, x.numel(), amax, *words, **constants, TILE=_TILE, num_warps=_WARPS
        )
    return out
