"""Sharpness of the loss in the logits: how far a small change of the logits can raise the cross-entropy.

For a position's logits z (V,) and target t, with CE(z) = log(sum_i e^z_i) - z_t, in % (arXiv 2405.18710, which applies
Keskar et al., arXiv 1609.04836, to language models by perturbing the last token's logits instead of weights):

    phi = 100 * (max of CE(z + d) over |d_i| <= eps (|z_i| + 1),  minus CE(z)) / (1 + CE(z)),        eps = 5e-4

Closed form.  Everywhere in the box dCE/dz_i = p_i > 0 for i != t, and dCE/dz_t = p_t - 1 < 0. So the maximum is the
corner d_i = +eps (|z_i| + 1), d_t = -eps (|z_t| + 1).  If computed as the difference of two losses of some 4 nats, a
rise of some 0.005 keeps 4 of FP32's 7 digits, and none if p_t is nearly 1.  With CE = log(1 + sum_{i != t}
e^(z_i - z_t)) it is instead:

    CE(z + d) - CE(z) = log1p( sum_{i != t} p_i expm1(eps |z_i| + b) ),     b = eps (|z_t| + 2)
                      = log1p( (e^b A + expm1(b) W) / Z ),                  expm1(x + b) = e^b expm1(x) + expm1(b)
    W = sum_{i != t} e^(z_i - m),   A = sum_{i != t} e^(z_i - m) expm1(eps |z_i|),   Z = W + e^(z_t - m),   m = max z

Every term is positive and nothing cancels, so the error is that of a sum: a few 2^-24 in FP32 arithmetic (logits of
lower precision count as exact).  W and A are summed over tensor-parallel shards of the vocabulary.  Values that are not
finite, or beyond eps |z| = 88 in FP32 (|z| = 176,000), give infinity or NaN; `Statistics` counts these separately.

Never read phi alone.  A constant c added to all logits changes phi, but neither loss nor gradient. To first order

    phi = 100 eps (1 - p_t) (mean of |z_i| over the wrong tokens, by p + |z_t| + 2) / (1 + CE(z))

so logits that drift together look like a sharper loss.  Two values are therefore always logged beside it: phi of
z - mean(z), which no shift changes, and log Z = log(sum_i e^z_i), which moves with c.  If phi rises alone and log Z
moves far from its earlier value, the logits drift; the z-loss prevents that.  If both phi rise, the logits really grow
apart.

The paper's method, L-BFGS-B, reaches the same corner by numerical search.  Ten iterations, Keskar's number, stop short
of it by 19, 11, 6 and 2 % (medians of 30 rows, V = 32,000, normal logits of standard deviation 1, 2, 3 and 5). eps is
the smaller of Keskar's two.

Cost.  `closed_form` reads the logits (n, V) three times and makes 15 elementwise passes in FP32 over portions of
AT_ONCE logits: about 110 n V bytes of traffic, and memory for five portions. Tensor parallelism adds one maximum and
two sums of a few n numbers.  The host never waits.  Measured on an H200 with `Statistics` (benchmarks/lab.py): 12.3 ms
for 8,192 positions and V = 32,000, 61 ms for 128,256.  That is 10 % of the 480 ms step of docs/performance.md's slice,
which has four such micro-batches, and under 1 % of the time if every 11th step or fewer are measured.  By L-BFGS-B a
row of V = 32,000 takes one CPU core 0.1 s for ten iterations, and seconds to a minute until it converges.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..errors import UserError
from ..flags.sharpness import PAPER_ITERATIONS, QUANTILES
from ..packages import needs

EPSILON = 5e-4
AT_ONCE = 2**22  # logits whose temporaries exist at the same time
_NOT_FINITE = 2**16  # the counter after those of BF16's values


class Sharpness(NamedTuple):
    """For every position (n,), FP32 or FP64: phi in %, phi of the mean-centred logits in %, log Z and CE in nats."""

    sharpness: torch.Tensor
    centred: torch.Tensor
    log_z: torch.Tensor
    loss: torch.Tensor


@torch.no_grad()
def closed_form(
    logits: torch.Tensor, targets: torch.Tensor, epsilon: float = EPSILON, group: dist.ProcessGroup | None = None
) -> Sharpness:
    """The sharpness of n positions by the closed form, in FP64 for FP64 logits, else in FP32.

    Args:
        logits: (n, V), or this rank's shard (n, V/ranks) of the vocabulary, in the order of ranks; any float type.
        targets: (n,) integers, numbered over the whole vocabulary.
        group: the tensor-parallel group that shares the vocabulary; None if the logits are whole.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    tokens, width = logits.shape
    ranks, first = (1, 0) if group is None else (group.size(), group.rank() * width)
    column = (targets - first).clamp(0, width - 1)[:, None]
    elsewhere = column[:, 0] + first != targets
    own = logits.gather(1, column)[:, 0].double().masked_fill(elsewhere, 0)

    largest = logits.amax(1).to(dtype)
    sums = torch.stack([logits.sum(1, dtype=torch.float64), own])
    if ranks > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        dist.all_reduce(sums, group=group)
    mean, target = sums[0] / (width * ranks), sums[1]
    centre = (mean - largest).to(dtype)  # relative to the largest logit: precise also far from zero

    wrong = torch.empty(3, tokens, dtype=dtype, device=logits.device)  # W, A, and A of the centred logits
    rows = max(1, AT_ONCE // width)
    for start in range(0, tokens, rows):
        part = slice(start, start + rows)
        z = logits[part].to(dtype)
        shifted = z - largest[part, None]
        weight = shifted.exp()
        weight.scatter_(1, column[part], weight.gather(1, column[part]) * elsewhere[part, None])
        wrong[0, part] = weight.sum(1)
        wrong[1, part] = z.abs().mul_(epsilon).expm1_().mul_(weight).sum(1)
        wrong[2, part] = shifted.sub_(centre[part, None]).abs_().mul_(epsilon).expm1_().mul_(weight).sum(1)
    if ranks > 1:
        dist.all_reduce(wrong, group=group)

    below = (target - largest).to(dtype)  # z_t - m
    z_sum = wrong[0] + below.exp()
    loss = z_sum.log() - below

    def percent(weighted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        b = epsilon * (target.abs() + 2)
        return 100 * torch.log1p((b.exp() * weighted + b.expm1() * wrong[0]) / z_sum) / (1 + loss)

    return Sharpness(
        percent(wrong[1], target.to(dtype)),
        percent(wrong[2], (target - mean).to(dtype)),
        z_sum.log() + largest,
        loss,
    )


class Search(NamedTuple):
    """The result of L-BFGS-B: phi in %, the iterations used, and whether it stopped at a maximum by itself."""

    sharpness: float
    iterations: int
    converged: bool


def lbfgsb(
    logits: torch.Tensor, target: int, epsilon: float = EPSILON, iterations: int = PAPER_ITERATIONS
) -> Search:
    """The sharpness of one position by the paper's method, from d = 0, in FP64 on the host.

    Args:
        logits: (V,), the whole vocabulary; the result is NaN if one is not finite.
        target: index of the right token.
        iterations: the most.  No tolerance ends the search early: it continues until every d_i is at its bound, or the
            loss no longer changes in FP64.

    Raises UserError if scipy is missing.
    """
    try:
        from scipy.optimize import minimize
    except ImportError:
        raise UserError(f"sharpness by L-BFGS-B {needs('scipy')}") from None
    z = logits.detach().double().cpu().numpy()
    if not np.isfinite(z).all():
        return Search(math.nan, 0, False)

    def minus_loss(d: np.ndarray) -> tuple[float, np.ndarray]:
        moved = z + d
        weight = np.exp(moved - moved.max())
        gradient = -weight / weight.sum()
        gradient[target] += 1
        return moved[target] - moved.max() - math.log(weight.sum()), gradient

    bound = epsilon * (np.abs(z) + 1)
    loss = -minus_loss(np.zeros_like(z))[0]
    found = minimize(
        minus_loss,
        np.zeros_like(z),
        jac=True,
        method="L-BFGS-B",
        bounds=np.stack([-bound, bound], axis=1),
        options={"maxiter": iterations, "maxfun": 1000 * iterations, "ftol": 0.0, "gtol": 0.0},
    )
    return Search(float(100 * (-found.fun - loss) / (1 + loss)), int(found.nit), bool(found.success))


class Statistics:
    """Count, mean and quantiles of several quantities over any number of values; they add up over batches and ranks.

    A value is counted by its rounding to BF16, in one of 65,536 counters a quantity. So a quantile is within 2^-8 of
    its value over the whole range, and ranks are combined by adding counters (0.5 MiB a quantity).  Means come from
    FP64 sums.  Infinities and NaNs are counted, but enter neither mean nor quantiles.  Everything stays on the device
    until `summary`, and the host does not wait.

    Attributes:
        counts: (quantities, 65,537) int64: values by BF16 code in rising order; the last counter: not finite.
        total: (quantities,) FP64, the sums.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device | str = "cpu"):
        self.names = names
        self.counts = torch.zeros(len(names), _NOT_FINITE + 1, dtype=torch.int64, device=device)
        self.total = torch.zeros(len(names), dtype=torch.float64, device=device)

    def add(self, values: torch.Tensor, valid: torch.Tensor | None = None) -> None:
        """Add n values of each quantity, (quantities, n) of any float type, where `valid` (n,) bool is true."""
        finite = values.isfinite()
        code = values.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
        order = torch.where(code < 0x8000, code + 0x8000, 0xFFFF - code)  # codes of negative numbers count down
        order = order.masked_fill(~finite, _NOT_FINITE).long()
        counted = torch.ones_like(order)
        if valid is not None:
            finite, counted = finite & valid, counted * valid
        self.counts.scatter_add_(1, order, counted)
        self.total += torch.where(finite, values, 0).sum(1, dtype=torch.float64)

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Sum the counters over all ranks of the group, in place on each rank."""
        dist.all_reduce(self.counts, group=group)
        dist.all_reduce(self.total, group=group)

    def summary(self) -> dict[str, dict[str, float]]:
        """{quantity: {"count", "not_finite", "mean" and those of QUANTILES}}; NaN if there is no finite value."""
        finite = self.counts[:, :_NOT_FINITE]
        below, count = finite.cumsum(1), finite.sum(1)
        shares = torch.tensor([*QUANTILES.values()], dtype=torch.float64, device=count.device)
        wanted = (shares * count[:, None]).ceil().long().clamp(min=1)  # rank of the quantile, counted from below
        order = torch.searchsorted(below, wanted)
        code = torch.where(order >= 0x8000, order - 0x8000, 0xFFFF - order)
        found = code.short().view(torch.bfloat16).double()
        found = found.masked_fill((count == 0)[:, None], math.nan)
        table = torch.cat([count[:, None], self.counts[:, _NOT_FINITE:], (self.total / count)[:, None], found], 1)
        columns = ("count", "not_finite", "mean", *QUANTILES)
        return {
            name: dict(zip(columns, row, strict=True)) for name, row in zip(self.names, table.tolist(), strict=True)
        }
