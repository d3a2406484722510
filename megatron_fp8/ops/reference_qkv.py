"""Queries, keys and values out of one product, rotated, and their gradients into one: the oracle of triton/qkv.py.

Rows of `mixed` hold the groups one after the other, and a group its r heads of queries, one of keys, one of values:

    q q .. q k v | q q .. q k v | ...        each head hn numbers

Rotary embedding turns pairs (x1, x2) of the first d numbers of each head of q and k by an angle that its place in the
sequence gives. A pair is d/2 apart, or `interleaved`: side by side. In float32, each product and sum rounded by itself:

    y1 = x1 cos1 - x2 sin1        dx1 = dy1 cos1 + dy2 sin2
    y2 = x2 cos2 + x1 sin2        dx2 = dy2 cos2 - dy1 sin1

which for float32 heads is, bit for bit, Megatron's unfused rotary embedding and what autograd makes of it. (That one
rounds cos, sin and both products to BF16 under --bf16, where the result is rounded once here.)

A kernel agrees bit for bit, but for the sign and payload of NaN.
"""

import torch

from ..numerics.formats import Format
from .reference import quantize


def _rotated_half(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(-x2, x1) in the places of (x1, x2)."""
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixed (s, b, groups * (heads_per_group + 2) * hn), contiguous, which is used up
    -> q (s, b, groups * heads_per_group, hn), k and v (s, b, groups, hn).

    cos, sin: (s, d) float32, d even and at most hn; None: nothing is rotated.

    With one group, or one head of queries a group, q, k and v are views of `mixed`, rotated where they lie: no other
    memory, and nothing to do without rotation. Else q cannot be a view, so all three are new, and `mixed` can be freed.
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
    parts = heads[..., :r, :].flatten(2, 3), heads[..., r, :], heads[..., r + 1, :]
    return parts if in_place else tuple(part.contiguous() for part in parts)


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
    """The gradient of `mixed` from those of split_qkv's results, of any strides: (s * b, width) in dq's type.

    With `fmt` and `scale` (0-d float32) instead (payload, payload_t), (s * b, width) and (width, s * b), as `quantize`
    casts the float32 gradient, without the rounding to dq's type in between. rows and columns: which of the two are
    wanted, one at least; the other is None. amax_out (0-d float32) becomes max(amax_out, max|gradient|).
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
