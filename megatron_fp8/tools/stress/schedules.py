"""S8: training under schedules that have hurt FP8 elsewhere.

    no weight decay     weights grow, and with them activations
    beta2 0.999         a second moment that remembers a thousand steps
    10 x the rate       where BF16 itself begins to be unsteady
    4 micro-batches     less sampling noise, which hides rounding
    QK norm             what FOG (arXiv 2505.20524) recommends against large attention logits

Fresh weights, `size().steps` // 2 steps, warm-up and cosine. All arms of a seed see the same batches. Judged is the
held-out loss above BF16's with the same seed and schedule. A loss that is not finite is above any limit: such a run has
fallen.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from .drawing import bars
from .network import Training, batches, network, size, with_te
from .recipes import BF16, CURRENT, MARGIN, O1, O3
from .suite import JUDGED, Found, Point, Stress, per_cent

USUAL = Training()
SCHEDULES = {
    "usual": USUAL,
    "no weight decay": replace(USUAL, weight_decay=0.0),
    "beta2 0.999": replace(USUAL, beta2=0.999),
    "10 x the rate": replace(USUAL, lr=10 * USUAL.lr),
    "4 micro-batches": replace(USUAL, micro_batches=4),
    "QK norm": replace(USUAL, qk_norm=True),
}


def measure(seed: int, case: str) -> Iterator[Found]:
    held_out, steps, how = batches(seed, 8, held_out=True), size().steps // 2, SCHEDULES[case]
    data, base = batches(seed + 8000, steps * how.micro_batches), 0.0
    for arm in with_te(BF16, O1, O3, MARGIN, CURRENT):
        with network(arm, seed, how) as net:
            net.train(data, warm_up=steps // 10)
            loss = net.loss(held_out)
        if arm is BF16:
            base = loss
            yield Found(arm.name, case, math.nan, "loss", loss)
        else:
            yield Found(arm.name, case, math.nan, JUDGED, per_cent(loss, base))


def draw(points: list[Point]):
    return bars("s8", points, JUDGED, "held-out loss above BF16's, %", "S8: loss above BF16's, a dot a seed", LIMITS)


LIMITS = dict.fromkeys(SCHEDULES, 0.5)
STRESS = Stress(
    "S8",
    "Schedules",
    "Training from fresh weights with schedules that have hurt FP8 elsewhere. Judged: the held-out loss above BF16's "
    "with the same seed; at most 0.5 %.",
    LIMITS,
    "% of the loss",
    measure,
    draw,
    cases=tuple(SCHEDULES),
)
