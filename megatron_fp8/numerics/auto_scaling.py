"""mu, the factor that keeps a sum of N FP8 gradients within the format (FP8-LM, arXiv 2310.18313, section 2.1).

N ranks send E4M3(mu * s_g * g_i). The scale s_g brings the largest gradient of all ranks to the format's maximum.

    post    mu = 1       the sum of N overflows if the gradients agree
    pre     mu = 1/N     the sum always fits; small values underflow, more of them the larger N is
    auto    share of elements at the maximum > threshold (1e-5):   mu <- mu * backoff (1/2)
            else                                                   mu <- mu * 2^(1/window)   (doubles in 1,000 steps)

The paper does not say whether mu is global or per tensor, where saturation is counted, or how mu starts. Here mu is per
tensor, the share is the larger of those before and after the sum, and mu starts at 1/sqrt(N).
"""

from dataclasses import dataclass

import torch

LARGEST_MU = 2.0**16
AUTO, PRE, POST = MODES = ("auto", "pre", "post")


@dataclass(frozen=True)
class ScalingRule:
    """How mu moves.

    Attributes:
        mode: "auto", "pre" or "post". Only "auto" uses the other attributes.
        threshold: mu shrinks if the share of saturated elements exceeds this.
        window: number of steps without saturation in which mu doubles.
        backoff: factor by which mu shrinks.
        initial: mu at the start; None: 1/sqrt(N).
        interval: number of steps between two measurements of saturation.
    """

    mode: str = AUTO
    threshold: float = 1e-5
    window: int = 1000
    backoff: float = 0.5
    initial: float | None = None
    interval: int = 1

    def start(self, ranks: int) -> float:
        """mu before the first step, for N = `ranks`."""
        return {PRE: 1.0 / ranks, POST: 1.0, AUTO: self.initial or ranks**-0.5}[self.mode]

    def next(self, mu: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """The next mu, given the share of saturated elements; both (tensors,) FP32. Returns a new tensor."""
        grow = 2.0 ** (self.interval / self.window)
        return torch.where(share > self.threshold, mu * self.backoff, (mu * grow).clamp(max=LARGEST_MU))
