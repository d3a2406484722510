"""LayerNorm and RMSNorm in plain PyTorch, their cast to FP8 and their gradients: the oracle of triton/norm.py.

With x (M, K), sums over K and all arithmetic in float32, and gain = weight, or 1 + weight where it is zero-centred:

    LayerNorm  n = (x - mean(x)) * rstd    rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)    y = n * gain + bias
    RMSNorm    n = x * rstd                rstd = 1 / sqrt(mean(x^2) + eps)                y = n * gain

    with g = dy * gain:    dx = rstd * (g - mean(g) - n * mean(g * n)) + residual      no mean(g) in RMSNorm
                           dweight = sum over rows of dy * n                           dbias = sum over rows of dy

y is rounded once: to x's type, or straight to FP8, which therefore differs from a cast of the BF16 y where the
first rounding made a tie. The residual (the gradient that reaches x past the norm) is added to the rounded dx, and the
sum rounded again: the bits of autograd, which adds in a kernel of its own where this one cannot (an MLP that is
recomputed). A kernel agrees but for the order of sums and fused multiply-adds: float32's, before dx is rounded.
"""

import torch

from megatron_fp8.numerics.formats import Format
from megatron_fp8.ops.reference import quantize


def _gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _normalized(x: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor) -> torch.Tensor:
    centred = x.float() if mean is None else x.float() - mean[:, None]
    return centred * rstd[:, None]


def _norm(x, weight, bias, eps, rms, zero_centered):
    """y in float32, mean or None, rstd."""
    mean = None if rms else x.float().mean(1)
    centred = x.float() if rms else x.float() - mean[:, None]
    rstd = centred.square().mean(1).add_(eps).rsqrt_()
    y = _normalized(x, mean, rstd).mul_(_gain(weight, zero_centered))
    return (y if bias is None else y.add_(bias)), mean, rstd


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, rms: bool, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x (M, K) BF16, FP16 or FP32, weight and bias (K,) of any float type -> y (M, K) in x's type, mean (M,) FP32
    (None for RMSNorm, which takes no bias), rstd (M,) FP32. zero_centered: `weight` is the gain less 1."""
    y, mean, rstd = _norm(x, weight, bias, eps, rms, zero_centered)
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
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """`norm` whose float32 y is cast as `quantize` casts it: (payload (M, K), payload_t (K, M), mean, rstd).

    rows and columns, one or both: which of the payloads are wanted; the other is None. amax_out (0-d float32) becomes
    max(amax_out, max|y|), NaN and infinity included.
    """
    y, mean, rstd = _norm(x, weight, bias, eps, rms, zero_centered)
    if columns:
        return *quantize(y, fmt, scale, transpose=True, rows=rows, amax_out=amax_out), mean, rstd
    return quantize(y, fmt, scale, amax_out=amax_out), None, mean, rstd


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dy (M, K), x, mean and rstd of `norm`, residual (M, K) -> dx (M, K) in x's type, dweight (K,) in weight's, and
    dbias (K,) in weight's, or None for RMSNorm."""
    gradient = dy.float()
    normalized = _normalized(x, mean, rstd)
    g = gradient * _gain(weight, zero_centered)
    dx = g - normalized * (g * normalized).mean(1, keepdim=True)
    if not rms:
        dx -= g.mean(1, keepdim=True)
    dx *= rstd[:, None]
    if residual is not None:
        dx = dx.to(x.dtype).float() + residual
    dweight = (gradient * normalized).sum(0).to(weight.dtype)
    return dx.to(x.dtype), dweight, None if rms else gradient.sum(0).to(weight.dtype)
