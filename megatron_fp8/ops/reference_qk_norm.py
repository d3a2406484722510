"""RMSNorm of each head of queries or keys, and their rotary embedding, in plain PyTorch: the reference for
triton/qk_norm.py, and the CPU's implementation.

A head x has hn numbers; the rotation R turns the first d of them, in the pairs of reference_qkv.py. All arithmetic is
float32, and gain = weight, or 1 + weight if it is zero-centred:

    n = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps)        y = R (n * gain)

    with z = R^T dy, g = z * gain:    dx = rstd * (g - n * mean(g * n))        dweight = sum over all heads of z * n

y is rounded once. Megatron rounds n * gain to BF16, then cos, sin and both products. rstd is not kept: the backward
pass reads x, of which it is one sum a head.

The kernel differs only in the order of float32 sums, before a result is rounded.
"""

import torch

from .reference_norm import _gain
from .reference_qkv import _rotated_half


def norm_rotate(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    zero_centered: bool,
    interleaved: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y (s, b, groups * r, hn) in x's type: each head of x normalised, then rotated.

    Args:
        x: (s, b, groups, r, hn), a part of the QKV product: the r heads of a group follow each other in memory.
        weight: (hn,) of any float type.
        cos, sin: (s, d) float32, d even, at least 2 and at most hn.
        zero_centered: whether `weight` is the gain minus 1.
        interleaved: whether the two numbers of a pair are adjacent.
        out: y's memory: the numbers of a head adjacent, the heads equally far apart. None: new, contiguous.
    """
    y, _ = _normalized(x.flatten(2, 3), eps)
    y = y * _gain(weight, zero_centered)
    turned = y[..., : cos.shape[-1]]
    turned.copy_(turned * _table(cos) + _rotated_half(turned, interleaved) * _table(sin))
    return y.to(x.dtype) if out is None else out.copy_(y)


def norm_rotate_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    zero_centered: bool,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx (s, b, groups * r, hn), contiguous, in dy's type; dweight (hn,) in weight's type) of dy (s, b, groups * r,
    hn) of any strides. The other arguments are norm_rotate's."""
    n, rstd = _normalized(x.flatten(2, 3), eps)
    z = dy.float().clone()
    turned = z[..., : cos.shape[-1]]
    # The transpose of _rotated_half, (x2, -x1), is its negative.
    turned.copy_(turned * _table(cos) - _rotated_half(turned * _table(sin), interleaved))
    g = z * _gain(weight, zero_centered)
    dx = (g - n * (g * n).mean(-1, keepdim=True)) * rstd
    return dx.to(dy.dtype).contiguous(), (z * n).sum((0, 1, 2)).to(weight.dtype)


def _normalized(heads: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, rstd) of heads (s, b, heads, hn)."""
    x = heads.float()
    rstd = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x * rstd, rstd


def _table(table: torch.Tensor) -> torch.Tensor:
    return table[:, None, None, :]
