"""Triton kernel that counts the overflows and underflows of a cast: one read of its input and payload.

    BF16   2 + 1 bytes an element      FP32   4 + 1      + 4/128 if each block of 128 has its own scale

All comparisons are of bits, as integers. The bits of |x| as an int32 are ordered like |x|, with infinity above all
numbers and NaN above infinity. So with limit = max * (1 + 2^-20) * scale_inv, rounded to float32 as in the reference,

    overflow   bits(limit) < bits(|x|) < bits(infinity)        underflow   bits(|x|) != 0 and code & 0x7f == 0

A program takes BLOCKS blocks of 128 elements. Its two counts are at most 2^13 each, so one int32 holds both; atomics on
int64 add them to the totals, exactly and in any order. The maxima are atomics on float32's bits as int32. This is right
for numbers that are not negative, and for minus infinity, the start value, which is a negative int32. Minus the
smallest scale is negative, and negative floats have the opposite order as int32: hence an atomic minimum.

The host neither waits nor copies: the kernel adds the number of elements too. Offsets are 64-bit.
Agreement with reference_statistics.py: bit for bit, except for the sign and payload of NaN.
"""

import torch
import triton
import triton.language as tl

from ...numerics.blocks import BLOCK
from ..reference_statistics import check_cast, largest_kept
from .cast import magnitude_bits
from .launch import cdiv, launched

_BLOCK = tl.constexpr(BLOCK)
_INFINITY = tl.constexpr(0x7F800000)
_SCALE_OF_ZEROS = tl.constexpr(0x00400000)  # the bits of 2^-127
_SIGN = tl.constexpr(-(2**31))
BLOCKS, WARPS = 64, 8  # blocks of 128 elements, and warps, a program


# Counts and scales are rows of larger tensors, so their alignment varies. One compiled kernel serves all.
@launched
@triton.jit(do_not_specialize=["scale_inv_ptr", "counts_ptr", "extremes_ptr"])
def _count_cast_kernel(
    x_ptr, codes_ptr, n, scale_inv_ptr, largest, counts_ptr, extremes_ptr, SCALES: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Count n contiguous elements. SCALES: each block has its own scale. extremes_ptr: the extremes' bits as int32."""
    rows = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = offsets < n
    size = magnitude_bits(tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32))
    code = tl.load(codes_ptr + offsets, mask=inside, other=0)
    if SCALES:
        scale_inv = tl.load(scale_inv_ptr + rows, mask=rows * _BLOCK < n, other=0.0)
        limit = magnitude_bits(scale_inv * largest)[:, None]
    else:
        scale_inv = tl.load(scale_inv_ptr)
        limit = magnitude_bits(scale_inv * largest)
    overflow = (size > limit) & (size < _INFINITY)
    underflow = (size != 0) & ((code & 0x7F) == 0)
    both = tl.sum(overflow.to(tl.int32) + (underflow.to(tl.int32) << 16))
    tl.atomic_add(counts_ptr + 1, (both & 0xFFFF).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts_ptr + 2, (both >> 16).to(tl.int64), sem="relaxed")
    tl.atomic_max(extremes_ptr, tl.max(size), sem="relaxed")
    first = tl.program_id(0) == 0
    if first:
        tl.atomic_add(counts_ptr, tl.cast(n, tl.int64), sem="relaxed")
    if SCALES or first:
        scale = magnitude_bits(scale_inv)
        smallest = tl.where(scale > _SCALE_OF_ZEROS, scale, _INFINITY)
        if SCALES:
            scale, smallest = tl.max(scale), tl.min(smallest)
        tl.atomic_max(extremes_ptr + 1, scale, sem="relaxed")
        tl.atomic_min(extremes_ptr + 2, smallest | _SIGN, sem="relaxed")


def count_cast(
    x: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor
) -> None:
    """See reference_statistics.count_cast. One pass; `extremes` must hold minus infinity or the extremes of casts."""
    check_cast(x, payload, scale_inv)
    n = x.numel()
    _count_cast_kernel[(cdiv(n, BLOCKS * BLOCK),)](
        x.contiguous(), payload.contiguous().view(torch.uint8), n, scale_inv.contiguous(), largest_kept(payload),
        counts, extremes.view(torch.int32), SCALES=scale_inv.dim() > 0, BLOCKS=BLOCKS, num_warps=WARPS,
    )  # fmt: skip
