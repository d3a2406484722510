"""mu, the factor that keeps a sum of N FP8 gradients within the format (FP8-LM, arXiv 2310.18313, section 2.1).

N ranks send E4M3(mu * s_g * g_i), s_g bringing the largest gradient of all ranks to the format's maximum.

    post    mu = 1       the sum of N overflows where gradients agree
    pre     mu = 1/N     the sum always fits; what is small underflows, more of it the larger N
    auto    share of elements at the maximum > threshold (1e-5):   mu <- mu * backoff (1/2)
            else                                                   mu <- mu * 2^(1/window)   (doubles in 1,000 steps)

The paper leaves open whether mu is global or per tensor, where saturation is counted, and the start.  Here: per tensor;
the larger of the shares before and after the sum; start 1/sqrt(N).
"""

from dataclasses import dataclass

import torch

LARGEST_MU = 2.0**16
AUTO, PRE, POST = MODES = ("auto", "pre", "post")


@dataclass(frozen=True)
class ScalingRule:
    """How mu moves.

    Attributes:
        mode: "auto", "pre" or "post"; the rest is auto's.
        threshold: share of saturated elements beyond which mu shrinks.
        window: steps in which mu doubles otherwise.
        backoff: factor by which mu shrinks.
        initial: mu at the start; None: 1/sqrt(N).
        interval: steps from one look at saturation to the next.
    """

    mode: str = AUTO
    threshold: float = 1e-5
    window: int = 1000
    backoff: float = 0.5
    initial: float | None = None
    interval: int = 1

    def start(self, ranks: int) -> float:
        """mu before the first step, of N = `ranks`."""
        return {PRE: 1.0 / ranks, POST: 1.0, AUTO: self.initial or ranks**-0.5}[self.mode]

    def next(self, mu: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """mu after a look at the share of saturated elements, both (tensors,) FP32, as a new tensor."""
        grow = 2.0 ** (self.interval / self.window)
        return torch.where(share > self.threshold, mu * self.backoff, (mu * grow).clamp(max=LARGEST_MU))
