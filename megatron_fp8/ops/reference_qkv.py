"""Splits the QKV GEMM's output into rotated queries, keys and values, and joins their gradients, in plain PyTorch: the
reference for triton/qkv.py, and the CPU's implementation.

A row of `mixed`, the GEMM's output, holds the groups one after the other. A group has r query heads, a key head and a
value head:

    q q .. q k v | q q .. q k v | ...        each head hn numbers

The rotary embedding rotates pairs (x1, x2) of the first d numbers of each head of q and k by an angle that depends on
the position in the sequence. The two numbers of a pair are d/2 apart, or adjacent if `interleaved`. In float32, each
product and sum is rounded by itself:

    y1 = x1 cos1 - x2 sin1        dx1 = dy1 cos1 + dy2 sin2
    y2 = x2 cos2 + x1 sin2        dx2 = dy2 cos2 - dy1 sin1

For float32 heads this is Megatron's unfused rotary embedding and its autograd gradient, bit for bit. Under --bf16
Megatron rounds cos, sin and both products to BF16, while here only the result is rounded.

The kernel agrees bit for bit, except for the sign and payload of NaN.
"""

import torch

from ..numerics.formats import Format
from .reference import quantize


def _rotated_half(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x with each pair (x1, x2) replaced by (-x2, x1)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _by_head(table: torch.Tensor) -> torch.Tensor:
    return table[:, None, None, None, :]


def split_qkv(
    mixed: torch.Tensor,
    groups: int,
    heads_per_group: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    paired: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split `mixed` into q (s, b, groups * heads_per_group, hn), k and v (s, b, groups, hn), with q and k rotated.

    Args:
        mixed: (s, b, groups * (heads_per_group + 2) * hn), contiguous. Do not use it afterwards: it may be overwritten.
        cos, sin: (s, d) float32, d even and at most hn. None: nothing is rotated.
        interleaved: whether the two numbers of a pair are adjacent.
        paired: whether each head's v is to follow its k in memory, as in `mixed`; else k and v are contiguous if new.

    With one group, or one query head a group, q, k and v are views of `mixed`, rotated in place: this takes no memory,
    and no time without rotation. Otherwise q cannot be a view. Then all three are new, and `mixed` can be freed.
    """
    s, b, width = mixed.shape
    r = heads_per_group
    heads = mixed.view(s, b, groups, r + 2, width // (groups * (r + 2)))
    in_place = 1 in (groups, r)
    if not in_place:
        heads = heads.clone()
    if cos is not None:
        part = heads[..., : r + 1, : cos.shape[-1]]
        x = part.float()
        part.copy_(x * _by_head(cos) + _rotated_half(x, interleaved) * _by_head(sin))
    q, pairs = heads[..., :r, :].flatten(2, 3), heads[..., r:, :]
    if not in_place:
        q, pairs = q.contiguous(), pairs.contiguous()
    k, v = pairs.unbind(3)
    return (q, k, v) if in_place or paired else (q, k.contiguous(), v.contiguous())


def join_qkv(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    fmt: Format | None = None,
    scale: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = False,
    amax_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradient of `mixed`, (s * b, width) in dq's type, from the gradients of split_qkv's results, of any strides.

    With `fmt` and `scale` (0-d float32) returns (payload (s * b, width), payload_t (width, s * b)) instead: `quantize`
    of the float32 gradient, which is not rounded to dq's type first. rows, columns: whether to return payload and
    payload_t, at least one; None stands for one that is not wanted. amax_out (0-d float32) becomes max(amax_out,
    max|gradient|).
    """
    s, b, heads, hn = dq.shape
    groups = dk.shape[2]
    parts = (dq.reshape(s, b, groups, heads // groups, hn), dk.unsqueeze(3), dv.unsqueeze(3))
    gradient = torch.cat(parts, dim=3).float()
    if cos is not None:
        part = gradient[..., :-1, : cos.shape[-1]]
        # The transpose of _rotated_half, (x2, -x1), is its negative.
        part.copy_(part * _by_head(cos) - _rotated_half(part * _by_head(sin), interleaved))
    gradient = gradient.view(s * b, -1)
    if fmt is None:
        return gradient.to(dq.dtype)
    if columns:
        return quantize(gradient, fmt, scale, transpose=True, rows=rows, amax_out=amax_out)
    return quantize(gradient, fmt, scale, amax_out=amax_out), None
