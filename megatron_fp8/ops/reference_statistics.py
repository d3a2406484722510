"""Counts the overflows and underflows of a cast to FP8, in plain PyTorch: the reference for triton/statistics.py, and
the CPU's implementation.

The cast turned x into payload, x ~ payload * scale_inv. `max` is that of the payload's format. Counted are

    overflows      finite |x| > max * (1 + 2^-20) * scale_inv: they were clipped
    underflows     non-zero x whose payload is zero

The margin of 2^-20 is needed because the scale that maps amax to the maximum is itself rounded: it may put amax a
2^-24th beyond the maximum. Neighbouring BF16 numbers are 2^-8 apart, so nothing else falls into the margin. Infinities
and NaNs are neither overflows nor underflows. max * (1 + 2^-20) has 23 significant bits, so float32 holds it exactly;
the limit, its product with scale_inv, is rounded once.

Counts are integers, so they do not depend on the order of the elements.
"""

import torch

from ..numerics.blocks import BLOCK
from ..numerics.formats import by_dtype

_MARGIN = 1 + 2.0**-20
_SCALE_OF_ZEROS = 2.0**-127  # the scale_inv of a block of zeros (numerics/blocks.py)


def largest_kept(payload: torch.Tensor) -> float:
    """The largest |x| / scale_inv that does not count as clipped, for the payload's format."""
    return by_dtype(payload.dtype).max * _MARGIN


def check_cast(x: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor) -> None:
    """ValueError unless the shapes are those of count_cast."""
    if payload.shape != x.shape or scale_inv.shape not in ((), (x.numel() / BLOCK,)):
        raise ValueError(
            f"a cast of n elements {tuple(x.shape)} has a payload of the same shape and a scale_inv () or "
            f"(n / {BLOCK},), not {tuple(payload.shape)} and {tuple(scale_inv.shape)}"
        )


def count_cast(
    x: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor
) -> None:
    """Add the counts of one cast to `counts`, and include its extremes in `extremes`.

    Args:
        x: the cast's input, bf16, fp16 or fp32, of any shape, not empty.
        payload: the cast's output, E4M3 or E5M2, of the same shape.
        scale_inv: float32, positive; 0-d, or (n/128,) if every 128 consecutive elements have their own scale.
        counts: (3,) int64: elements, overflows, underflows. This cast's are added.
        extremes: (3,) float32: max|x|, largest scale_inv, minus the smallest scale_inv (without blocks of zeros). Each
            becomes the maximum of its old value and this cast's. Start with minus infinity. A NaN or an infinity in x
            stays in max|x|.

    ValueError if the shapes do not match.
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
