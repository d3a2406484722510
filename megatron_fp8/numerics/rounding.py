"""Rounding a float32 to the values of a format, in float32 arithmetic that is exact at every step.

ulp(x) = 2^(max(floor(log2|x|), 1-b) - M) is a power of two. So the quotient |x| / ulp is exact in float32, and the
format's values are the whole multiples of the ulp:

    nearest      round-half-even(|x| / ulp) * ulp                  error <= ulp/2
    truncate     floor(|x| / ulp) * ulp                            error <  ulp, toward zero
    stochastic   (floor(q) + [noise < q - floor(q)]) * ulp         error <  ulp, E[result] = x
                 with q = |x| / ulp

floor(log2|x|) comes from x's exponent bits. Subnormals need no case of their own, because the binade is held at the
smallest normal's or above. A result that reaches the next binade needs none either, because that binade starts at a
multiple of this ulp.

Stochastic rounding compares the noise with the fraction. Adding the noise before the floor would be wrong: the float32
sum q + noise rounds, and would now and then move a value that is already the format's. Noise that is a multiple of
2^-24, such as torch.rand's, leaves a bias below 2^-24 ulp.

Saturation: a finite x beyond the format's maximum becomes +-max, in every mode. NaN stays NaN. An infinity stays one if
the format has infinity, else it becomes NaN, so that an overflow is never hidden.
"""

import torch

from .formats import Format

ROUNDINGS = ("nearest", "truncate", "stochastic")
_EXPONENT_BITS = 0x7F800000


def round_to_format(
    x: torch.Tensor, fmt: Format, mode: str = "nearest", noise: torch.Tensor | None = None
) -> torch.Tensor:
    """Round float32 `x` (any shape) to values of `fmt`, returned as float32 of the same shape.

    mode: "nearest" (ties to even), "truncate" (toward zero) or "stochastic" (up or down, with probabilities whose mean
    is x). "stochastic" needs `noise`, float32 of x's shape, uniform in [0, 1); the caller makes it, so that a run can
    be repeated. The sign of zero is kept. ValueError for another dtype or mode, or if noise is missing.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"round_to_format takes float32, not {x.dtype}: convert with .float() first")
    rounded = round_magnitude(x, fmt, mode, noise).clamp_(max=fmt.max)
    if fmt.has_infinity:
        rounded.masked_fill_(x.isinf(), torch.inf)
    else:
        rounded.add_(x, alpha=0.0)  # makes an infinity NaN
    return rounded.copysign_(x)


def round_magnitude(x: torch.Tensor, fmt: Format, mode: str, noise: torch.Tensor | None = None) -> torch.Tensor:
    """|x| rounded to whole multiples of the ulp, as if fmt's exponent had no upper bound; may return infinity.

    The result is a new tensor. Steps are in place if possible, which matters for speed on a CPU. x, mode, noise: as in
    round_to_format.
    """
    magnitude = x.abs()
    binade = (magnitude.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)  # 2^floor(log2|x|)
    # The ulp is held finite, so that an infinite x is infinitely many ulps and stays infinite.
    ulp = binade.clamp_(fmt.smallest_normal, 2.0**127).mul_(2.0**-fmt.mantissa_bits)
    steps = magnitude.div_(ulp)
    if mode == "nearest":
        whole = steps.round_()
    elif mode == "truncate":
        whole = steps.floor_()
    elif mode == "stochastic":
        if noise is None or noise.shape != x.shape:
            raise ValueError("stochastic rounding needs noise of x's shape: pass torch.rand_like(x)")
        whole = steps.floor()
        whole += noise < steps.sub_(whole)
    else:
        raise ValueError(f"rounding mode {mode!r}: use {', '.join(ROUNDINGS)}")
    return whole.mul_(ulp)
