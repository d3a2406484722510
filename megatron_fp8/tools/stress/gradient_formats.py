"""S4: E5M2 or E4M3 for activation gradients: range against bits.

E5M2 has four times E4M3's error (2^-3 against 2^-4 to nearest, at most) and reaches 2^15 times as far below the largest
number. Which matters depends on how widely gradients are spread. Both are tried from fresh weights and from trained
ones, with delayed scales and with the tensor's own.

1. Gradients of the embedding, which have passed dgrad of every layer, over BATCHES batches. With g BF16's and g' an
   arm's on the same batch and weights: gain sum <g', g> / sum |g|^2, error sqrt(sum |g' - g|^2 / sum |g|^2).
2. Training from fresh weights: the held-out loss above BF16's, after `size().steps` steps.

Judged: the gain, in per cent from 1, and the loss. Delayed scales clip, whatever the format: that is S3's subject.
"""

import math
from collections.abc import Iterator

import torch

from .drawing import bars
from .network import batches, network, size, trained
from .recipes import BF16, O1
from .suite import JUDGED, Found, Point, Stress, gain_and_error, per_cent

ARMS = (
    O1.but("O1, hybrid"),
    O1.but("O1, e4m3", format="e4m3"),
    O1.but("O1, hybrid, tensorwise", recipe="tensorwise"),
    O1.but("O1, e4m3, tensorwise", format="e4m3", recipe="tensorwise"),
)
STATES = ("fresh", "trained")
BATCHES = 8


def measure(seed: int) -> Iterator[Found]:
    data = batches(seed + 4000, 1 + BATCHES)
    for state in STATES:
        exact: list[torch.Tensor] = []
        for arm in (BF16, *ARMS):
            with network(arm, seed, weights=trained(seed) if state == "trained" else None) as net:
                gradients = [gradient.clone() for gradient in net.gradients(data)][1:]
            exact = exact or gradients
            if arm is not BF16:
                gain, error = gain_and_error(gradients, exact)
                yield Found(arm.name, f"error, {state}", math.nan, "shown", 100 * error)
                yield Found(arm.name, f"gain, {state}", math.nan, JUDGED, 100 * abs(gain - 1))
    held_out, steps, base = batches(seed, 8, held_out=True), size().steps // 2, 0.0
    for arm in (BF16, *ARMS):
        with network(arm, seed) as net:
            net.train(batches(seed, steps), warm_up=steps // 10)
            loss = net.loss(held_out)
        if arm is BF16:
            base = loss
        else:
            yield Found(arm.name, "loss", math.nan, JUDGED, per_cent(loss, base))
            yield Found(arm.name, "loss", math.nan, "shown", per_cent(loss, base))


def draw(points: list[Point]):
    caption = "S4: error of the embedding's gradient, in per cent of it, and held-out loss above BF16's, in per cent"
    return bars("s4", points, "shown", "%", caption, LIMITS)


LIMITS = {"gain, fresh": 2.0, "gain, trained": 2.0, "loss": 1.0}
STRESS = Stress(
    "S4",
    "Gradient formats",
    "Activation gradients in E5M2 (hybrid) or E4M3, from fresh weights and from trained ones. Judged: how far the gain "
    "of the embedding's gradient is from 1 (at most 2 %), and the held-out loss above BF16's after training (at most "
    "1 %).",
    LIMITS,
    "%",
    measure,
    draw,
)
