"""What a cast to FP8 did, counted: the oracle for ops/triton/statistics.py, and what runs on the CPU.

A cast takes x to payload, x ~ payload * scale_inv. Of its elements are counted

    overflows      finite |x| > max * (1 + 2^-20) * scale_inv: they were clipped; max is the payload's format's
    underflows     non-zero x whose payload is zero

Why a margin of 2^-20: the scale that brings amax to the maximum is itself rounded, and may put amax a 2^-24th beyond
it. Neighbouring BF16 numbers are 2^-8 apart, so nothing else falls into the margin. Infinities and NaNs are neither
overflows nor underflows. max * (1 + 2^-20) has 23 significant bits: float32 holds it exactly, and the limit, its
product with scale_inv, is rounded once.

Counts are integers, so they do not depend on the order in which elements are seen.
"""

import torch

from ..numerics.blocks import BLOCK
from ..numerics.formats import by_dtype

_MARGIN = 1 + 2.0**-20
_SCALE_OF_ZEROS = 2.0**-127  # of a block of zeros (numerics/blocks.py)


def largest_kept(payload: torch.Tensor) -> float:
    """The largest |x| / scale_inv that is not clipped, margin included, of the payload's format."""
    return by_dtype(payload.dtype).max * _MARGIN


def check_cast(x: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor) -> None:
    """ValueError unless the shapes are those of count_cast."""
    if payload.shape != x.shape or scale_inv.shape not in ((), (x.numel() / BLOCK,)):
        raise ValueError(
            f"a cast of {tuple(x.shape)} has a payload of that shape and a scale_inv () or, of n elements, "
            f"(n / {BLOCK},), not {tuple(payload.shape)} and {tuple(scale_inv.shape)}"
        )


def count_cast(
    x: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor
) -> None:
    """Count a cast, as the top of the file defines it, into `counts` and `extremes`.

    Args:
        x: what was cast, bf16, fp16 or fp32, of any shape, not empty.
        payload: what became of it, E4M3 or E5M2, of the same shape.
        scale_inv: float32, positive; 0-d, or (n/128,) where each 128 consecutive elements have their own.
        counts: (3,) int64: elements, overflows, underflows; these are added.
        extremes: (3,) float32: max|x|, largest scale_inv, minus the smallest (blocks of zeros aside); each becomes
            the larger of what it was and what this cast has. Start with minus infinity. A NaN or an infinity of x
            stays in max|x|.

    ValueError where the shapes do not fit.
    """
    check_cast(x, payload, scale_inv)
    size, code = x.float().abs().flatten(), payload.view(torch.uint8).flatten() & 0x7F
    limit = scale_inv * largest_kept(payload)
    if scale_inv.dim():
        limit = limit.repeat_interleave(BLOCK)
    counts[0] += x.numel()
    counts[1] += ((size > limit) & (size < torch.inf)).sum()
    counts[2] += ((size != 0) & (code == 0)).sum()
    smallest = torch.where(scale_inv > _SCALE_OF_ZEROS, scale_inv, torch.inf).min()
    torch.maximum(extremes, torch.stack([size.max(), scale_inv.max(), -smallest]), out=extremes)
