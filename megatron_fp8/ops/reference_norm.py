"""LayerNorm and RMSNorm in plain PyTorch, their cast to FP8 and their gradients: the oracle of triton/norm.py.

With x (M, K), sums over K and all arithmetic in float32, and gain = weight, or 1 + weight where it is zero-centred:

    LayerNorm  n = (x - mean(x)) * rstd    rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)    y = n * gain + bias
    RMSNorm    n = x * rstd                rstd = 1 / sqrt(mean(x^2) + eps)                y = n * gain

    with g = dy * gain:    dx = rstd * (g - mean(g) - n * mean(g * n)) + residual      no mean(g) in RMSNorm
                           dweight = sum over rows of dy * n                           dbias = sum over rows of dy

y is rounded once: to x's type, or straight to FP8, which therefore differs from a cast of the BF16 y where the
first rounding made a tie. The residual (the gradient that reaches x past the norm) is added to the rounded dx, and the
sum rounded again: the bits of autograd, which adds in a kernel of its own where this one cannot (an MLP that is
recomputed).

What the backward pass needs of x may be kept in a byte an element: n in E4M3, times `kept_scale(K)`. Whatever x is,
|n| <= sqrt(K): so the scale is a constant, nothing saturates, and LayerNorm's mean is out of it. The error is E4M3's,
at most 2^-4 of n, and 2^-10 / kept_scale(K) of what is small (2^-12 for K of 4096).

A kernel agrees but for the order of sums and fused multiply-adds: float32's, before dx is rounded.
"""

import math

import torch

from ..numerics.formats import E4M3, Format, decode
from .reference import quantize


def _gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def kept_scale(columns: int) -> float:
    """What n is multiplied by where it is kept: the largest power of two with which sqrt(columns) is within E4M3."""
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
    """x (M, K) BF16, FP16 or FP32, weight and bias (K,) of any float type -> y (M, K) in x's type, mean (M,) FP32
    (None for RMSNorm, which takes no bias), rstd (M,) FP32. zero_centered: `weight` is the gain less 1. kept (M, K)
    E4M3, contiguous, becomes the cast of n * kept_scale(K)."""
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
    """`norm` whose float32 y is cast as `quantize` casts it: (payload (M, K), payload_t (K, M), mean, rstd).

    rows and columns, one or both: which of the payloads are wanted; the other is None. amax_out (0-d float32) becomes
    max(amax_out, max|y|), NaN and infinity included.
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
    """The payloads of `norm_quantize` once more, of what it kept: (payload (M, K), payload_t (K, M))."""
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
    """dy (M, K), x, mean and rstd of `norm`, residual (M, K) -> dx (M, K) in dy's type, dweight (K,) in weight's, and
    dbias (K,) in weight's, or None for RMSNorm. In place of x what `norm` kept will do; mean is not read then.

    into: of one type, what float32's dweight and dbias are added to; then neither is returned.
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
