"""S2: outliers of any size, planted so that the model's function stays: the dial k.

Two places can be multiplied by k if the numbers that meet them are divided by k. k is a power of two, so that BF16
computes the same bits at any k:

    SwiGLU    y = W2 (silu(Wg x) * (Wu x)):    row i of Wu times k, column i of W2 by k    outliers in fc2's input
    norm      W1 (g * x / |x|):                g_i times k, column i of W1 by k            outliers in fc1's input

CHANNELS of each layer are planted, and the rest of the layer is in their shadow: one scale a tensor must hold the
outliers and all others. Smooth-SwiGLU (arXiv 2409.12517) is the same identity, used to take outliers out.

Measured at a trained state, without updates (the rate is 0, and two steps fill the delayed scales): the loss on
held-out text above that of BF16 at the same k. Then after STEPS updates, likewise. Judged is the loss before updates at
k = JUDGED_AT: no seed's luck is in it.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from ..lab.report.document import Table, number
from .drawing import curves
from .network import TOY, Training, batches, network, size, trained, with_te
from .recipes import AS_PAPER, AS_TE_CURRENT, AS_TE_DELAYED, BF16, CURRENT, MARGIN, O3, WITHOUT_FC2
from .suite import JUDGED, Found, Point, Stress, per_cent

DIAL = (1, 64, 1024, 4096, 16384, 65536, 262144)
TOY_DIAL = (1, 1024, 65536)
JUDGED_AT = 1024
CHANNELS = 8
STEPS = 10
PLANTS = ("SwiGLU", "norm")


def planted(weights: dict[str, torch.Tensor], plant: str, k: float) -> dict[str, torch.Tensor]:
    """The weights with the dial at k."""
    new = {name: value.clone() for name, value in weights.items()}
    for name in weights:
        if not name.endswith("mlp.linear_fc1.weight"):
            continue
        layer = name.removesuffix("linear_fc1.weight")
        first = new[name]
        if plant == "SwiGLU":
            half = len(first) // 2
            chosen = slice(half, half + CHANNELS)  # of the rows that are not gated
            first[chosen] *= k
            new[f"{layer}linear_fc2.weight"][:, :CHANNELS] /= k
        else:
            new[f"{layer}linear_fc1.layer_norm_weight"][:CHANNELS] *= k
            first[:, :CHANNELS] /= k
    return new


def measure(seed: int) -> Iterator[Found]:
    arms = [BF16, O3, MARGIN, CURRENT, WITHOUT_FC2, AS_TE_DELAYED, AS_TE_CURRENT, AS_PAPER]
    held_out, data = batches(seed, 8, held_out=True), batches(seed + 1000, 2 + STEPS)
    for plant in PLANTS:
        for k in TOY_DIAL if size() is TOY else DIAL:
            weights = planted(trained(seed), plant, k)
            base: tuple[float, float] | None = None
            for arm in with_te(*arms):
                with network(arm, seed, Training(lr=1e-4, weight_decay=0.0), weights) as net:
                    net.set_lr(0.0)
                    net.train(data[:2])
                    before = net.loss(held_out)
                    net.set_lr(1e-4)
                    net.train(data[2:])
                    after = net.loss(held_out)
                if base is None:
                    base = before, after
                    yield Found(arm.name, plant, k, "loss", before)
                gaps = per_cent(before, base[0]), per_cent(after, base[1])
                yield Found(arm.name, plant, k, "gap", gaps[0])
                yield Found(arm.name, f"{plant}, after {STEPS} updates", k, "gap", gaps[1])
                if k == JUDGED_AT and arm is not BF16:
                    yield Found(arm.name, plant, k, JUDGED, gaps[0])


def ratings(points: list[Point]) -> dict[tuple[str, str], float]:
    """{(arm, plant): the k at which the mean loss over seeds is LIMIT above BF16's}; NaN if the dial does not reach it.

    Between two places of the dial, log(gap) is taken for a straight line over log(k).
    """
    gaps: dict[tuple[str, str], dict[float, list[float]]] = {}
    for _, _, found, _, _ in points:
        if found.quantity == "gap" and found.case in PLANTS:
            gaps.setdefault((found.arm, found.case), {}).setdefault(found.at, []).append(found.value)
    rated = {}
    for key, at in gaps.items():
        curve = sorted((k, sum(values) / len(values)) for k, values in at.items())
        rated[key] = math.nan
        for (k, below), (more, above) in pairwise(curve):
            if below < LIMIT <= above:
                share = math.log(LIMIT / max(below, 1e-3)) / math.log(above / max(below, 1e-3))
                rated[key] = k * (more / k) ** share
                break
    return rated


def rating_table(points: list[Point]) -> list[Table]:
    """Each arm's k in both plants, the robustness rating."""
    rated = ratings(points)
    arms = list(dict.fromkeys(arm for arm, _ in rated))
    rows = [[arm, *(number(rated.get((arm, plant), math.nan), ",.0f") for plant in PLANTS)] for arm in arms]
    return [Table(["k at which the loss is 1 % above BF16's", *PLANTS], rows)]


def draw(points: list[Point]):
    return curves(
        "s2", points, "gap", PLANTS, "k", "held-out loss above BF16's, %",
        "S2: loss above BF16's at the same k, over the size of planted outliers", log_x=True, limit=LIMIT,
        linear_below=0.1,
    )  # fmt: skip


LIMIT = 1.0
STRESS = Stress(
    "S2",
    "Outliers that stay",
    f"{CHANNELS} channels of each layer get numbers k times as large, and what they are multiplied with is divided by "
    f"k: the function is the same, and BF16 computes the same bits. Judged at k = {JUDGED_AT}, before any update: the "
    "held-out loss above BF16's; at most 1 %.",
    dict.fromkeys(PLANTS, LIMIT),
    "% of the loss",
    measure,
    draw,
    rating_table,
)
