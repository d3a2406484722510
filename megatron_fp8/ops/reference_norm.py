"""LayerNorm and RMSNorm, their cast to FP8 and their gradients in plain PyTorch: the reference for triton/norm.py, and
the CPU's implementation.

x is (M, K), sums are over K, all arithmetic is float32, and gain = weight, or 1 + weight if it is zero-centred:

    LayerNorm  n = (x - mean(x)) * rstd    rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)    y = n * gain + bias
    RMSNorm    n = x * rstd                rstd = 1 / sqrt(mean(x^2) + eps)                y = n * gain

    with g = dy * gain:    dx = rstd * (g - mean(g) - n * mean(g * n)) + residual      no mean(g) in RMSNorm
                           dweight = sum over rows of dy * n                           dbias = sum over rows of dy

y is rounded once, to x's type or directly to FP8. So the FP8 result may differ from a cast of the BF16 y, which rounds
twice. The residual (the gradient that reaches x past the norm) is added to the rounded dx, and the sum is rounded
again. These are autograd's bits if it adds the residual in a kernel of its own, as it does for an MLP that is
recomputed.

The forward pass may keep n for the backward pass in one byte an element: n * `kept_scale(K)` in E4M3. |n| <= sqrt(K)
for every x, so the scale is a constant and nothing saturates; and n is free of LayerNorm's mean. The error is E4M3's:
at most 2^-4 of n, or absolute 2^-10 / kept_scale(K) for small n (2^-12 for K = 4096).

The kernel differs only in the order of float32 sums and in fused multiply-adds, before dx is rounded.
"""

import math

import torch

from ..numerics.formats import E4M3, Format, decode
from .reference import quantize


def _gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def kept_scale(columns: int) -> float:
    """The factor of n when it is kept: the largest power of two with which sqrt(columns) fits into E4M3."""
    return 2.0 ** math.floor(math.log2(E4M3.max / math.sqrt(columns)))


def _normalized(x: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor | None) -> torch.Tensor:
    if x.dtype == E4M3.dtype:
        return decode(x) / kept_scale(x.shape[1])
    assert rstd is not None
    centred = x.float() if mean is None else x.float() - mean[:, None]
    return centred * rstd[:, None]


def _norm(x, weight, bias, eps, rms, zero_centered, kept):
    """y in float32, mean or None, rstd."""
    mean = None if rms else x.float().mean(1)
    centred = x.float() if rms else x.float() - mean[:, None]
    rstd = centred.square().mean(1).add_(eps).rsqrt_()
    n = _normalized(x, mean, rstd)
    if kept is not None:
        kept.copy_(quantize(n, E4M3, torch.tensor(kept_scale(x.shape[1]))))
    return _affine(n, weight, bias, zero_centered), mean, rstd


def _affine(n, weight, bias, zero_centered):
    y = n * _gain(weight, zero_centered)
    return y if bias is None else y.add_(bias)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    rms: bool,
    zero_centered: bool,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Normalise x: (y (M, K) in x's type, mean (M,) FP32, rstd (M,) FP32). mean is None for RMSNorm.

    Args:
        x: (M, K) BF16, FP16 or FP32.
        weight, bias: (K,) of any float type; bias is None for RMSNorm.
        zero_centered: whether `weight` is the gain minus 1.
        kept: (M, K) E4M3, contiguous; the cast of n * kept_scale(K) is written to it.
    """
    y, mean, rstd = _norm(x, weight, bias, eps, rms, zero_centered, kept)
    return y.to(x.dtype), mean, rstd


def norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    fmt: Format,
    scale: torch.Tensor,
    *,
    rms: bool,
    zero_centered: bool,
    rows: bool = True,
    columns: bool = False,
    amax_out: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """`norm`, with the float32 y cast as `quantize` casts: (payload (M, K), payload_t (K, M), mean, rstd).

    rows, columns: whether to return payload and payload_t, at least one; None stands for one that is not wanted.
    amax_out (0-d float32) becomes max(amax_out, max|y|), NaN and infinity included.
    """
    y, mean, rstd = _norm(x, weight, bias, eps, rms, zero_centered, kept)
    return *_cast(y, fmt, scale, rows, columns, amax_out), mean, rstd


def _cast(y, fmt, scale, rows, columns, amax_out=None):
    if columns:
        return quantize(y, fmt, scale, transpose=True, rows=rows, amax_out=amax_out)
    return quantize(y, fmt, scale, amax_out=amax_out), None


def norm_requantize(
    kept: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    fmt: Format,
    scale: torch.Tensor,
    *,
    zero_centered: bool,
    rows: bool = True,
    columns: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """norm_quantize's payloads, computed again from the n that it kept: (payload (M, K), payload_t (K, M))."""
    return _cast(_affine(_normalized(kept, None, None), weight, bias, zero_centered), fmt, scale, rows, columns)


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    *,
    rms: bool,
    zero_centered: bool,
    residual: torch.Tensor | None = None,
    into: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx (M, K) in dy's type, dweight (K,) in weight's type, dbias (K,) in weight's type). dbias is None for RMSNorm.

    Args:
        dy: (M, K).
        x: norm's input, or the n that `norm` kept, in E4M3; then mean is not read.
        mean, rstd: as `norm` returned them.
        residual: (M, K), added to dx.
        into: (dweight, dbias) of one type; the float32 gradients are added to them, and None is returned for both.
    """
    gradient = dy.float()
    normalized = _normalized(x, mean, rstd)
    g = gradient * _gain(weight, zero_centered)
    dx = g - normalized * (g * normalized).mean(1, keepdim=True)
    if not rms:
        dx -= g.mean(1, keepdim=True)
    dx *= rstd[:, None]
    if residual is not None:
        dx = dx.to(dy.dtype).float() + residual
    dweight, dbias = (gradient * normalized).sum(0), None if rms else gradient.sum(0)
    if into is None:
        return dx.to(dy.dtype), dweight.to(weight.dtype), None if dbias is None else dbias.to(weight.dtype)
    for total, part in zip(into, (dweight, dbias), strict=True):
        if total is not None:
            total.copy_(total.float() + part)
    return dx.to(dy.dtype), None, None
