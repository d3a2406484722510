"""S3: activations that jump from one batch to the next, which a delayed scale clips.

A delayed scale is made for the largest number of earlier steps (numerics/scaling.py). What is larger saturates. A
margin of m leaves room for a factor 2^m; a history with its maximum remembers the last jump; a tensor's own amax never
clips.

Three ways to see it:

1. Operands. fc2's inputs of a trained model are cast batch by batch with each recipe's scale. In every PERIOD-th batch
   FEW elements become k times the largest number of the batch before. The error is |q(x) W^T - x W^T| / |x W^T|,
   of the worst batch; W is not rounded. k = 1 plants nothing: then what is clipped is chance alone.
2. Gradients. The embedding's, batch by batch of text at a trained state, beside BF16's: the gain over all batches.
   What dgrad clips is lost from the largest gradients.
3. Training. Every PERIOD-th batch is of another kind: random bytes, or one byte over and over. In one step the
   embedding is ten times as large. Compared with BF16 on the same batches: the loss in those that follow a jump.

Judged: the operands' error without planting and at k = 4, the gradients' gain, and the loss after jumps.
"""

import math
from collections.abc import Iterator

import torch

from ...engine.events import Observer
from ...numerics.formats import E4M3, encode
from ...numerics.scaling import DelayedScaling, compute_scale
from .drawing import curves
from .network import TOY, Batch, Training, as_batch, batches, network, size, trained, with_te
from .recipes import AS_PAPER, AS_TE_CURRENT, AS_TE_DELAYED, BF16, BOTH, CURRENT, HISTORY, LONG, MARGIN, O3
from .suite import JUDGED, Found, Point, Stress, gain_and_error, per_cent

ARMS = BF16, O3, MARGIN, HISTORY, BOTH, LONG, CURRENT, AS_TE_DELAYED, AS_TE_CURRENT, AS_PAPER
DIAL = (1, 2, 4, 8, 16, 64)
PERIOD, FEW, AFTER = 8, 4, 3
type Scale = tuple[int, str, int]
SCALES: dict[str, Scale | None] = {  # name: history, algorithm, margin; None: of its own amax
    "O3": (1, "most_recent", 0),
    "O3, margin 1": (1, "most_recent", 1),
    "O3, margin 2": (1, "most_recent", 2),
    "O3, margin 3": (1, "most_recent", 3),
    "O3, history 16, max": (16, "max", 0),
    "O3, history 16, max, margin 1": (16, "max", 1),
    "O3, history 1024, max": (1024, "max", 0),
    "O3, tensorwise": None,
}


class Inputs(Observer):
    """Keeps the inputs of all fc2, step by step."""

    def __init__(self) -> None:
        self.seen: dict[str, list[torch.Tensor]] = {}

    def forward(self, weight, x, read_x, read_w) -> None:
        if weight.path.endswith("linear_fc2"):
            self.seen.setdefault(f"layer {weight.layer_number}", []).append(x.detach().clone())


def errors(inputs: list[torch.Tensor], weight: torch.Tensor, k: float) -> dict[str, float]:
    """{scales: per cent that x W^T is off} in the worst batch x (M, K) after the first; W (N, K) is read as it is.

    k: the plant; 1 leaves the batches as they are.
    """
    delayed = {
        name: scale and DelayedScaling([E4M3], *scale, device=inputs[0].device) for name, scale in SCALES.items()
    }
    worst, before = dict.fromkeys(SCALES, 0.0), inputs[0].abs().amax().float()
    for number, x in enumerate(inputs):
        x, own = x.float(), x.abs().amax().float()
        if k > 1 and number % PERIOD == PERIOD - 1:
            x = x.clone()
            x.view(-1)[:: max(1, x.numel() // FEW)][:FEW] = k * before
        amax, product = x.abs().amax(), x @ weight.T
        for name, state in delayed.items():
            scale = state.slot_scale(0) if state and state.warm else compute_scale(amax, E4M3)
            q = encode(x, E4M3, scale).float() / scale
            if number:
                worst[name] = max(worst[name], 100 * float((q @ weight.T - product).norm() / product.norm()))
            if state:
                state.record(0, amax)
                state.update()
        before = own
    return worst


def operands(seed: int) -> Iterator[Found]:
    """The first way, over all layers; the worst batch counts."""
    weights, look = trained(seed), Inputs()
    with network(BF16, seed, Training(lr=1e-4), weights) as net:
        net.engine.events.subscribe(look)
        net.train(batches(seed + 2000, 4 * PERIOD))
    read = [value.float() for name, value in weights.items() if name.endswith("linear_fc2.weight")]
    for k in DIAL:
        of_layers = [errors(seen, weight, k) for weight, seen in zip(read, look.seen.values(), strict=True)]
        for arm in SCALES:
            worst = max(of_layer[arm] for of_layer in of_layers)
            yield Found(arm, "operands, worst batch", k, "error", worst)
            if k in (1, 4):
                yield Found(arm, "as they come" if k == 1 else "jump of 4", k, JUDGED, worst)


def gradients(seed: int) -> Iterator[Found]:
    """The second way. The first batch only fills the delayed scales."""
    data = batches(seed + 5000, 1 + 2 * PERIOD)
    exact: list[torch.Tensor] = []
    for arm in ARMS:
        with network(arm, seed, weights=trained(seed)) as net:
            found = [gradient.clone() for gradient in net.gradients(data)][1:]
        exact = exact or found
        if arm is not BF16:
            gain, error = gain_and_error(found, exact)
            yield Found(arm.name, "gradients as they come", math.nan, JUDGED, 100 * abs(gain - 1))
            yield Found(arm.name, "gradients as they come", math.nan, "gradients' error", 100 * error)


def jumping(seed: int, steps: int) -> list[Batch]:
    """Batches of text, with one of another kind at the end of each period, the kinds in turn."""
    found, noise = batches(seed + 3000, steps), torch.Generator().manual_seed(seed)
    shape = size().batch, size().length + 1
    for place in range(PERIOD - 1, steps, PERIOD):
        if place // PERIOD % 2:
            sequences = torch.randint(256, shape, generator=noise)
        else:
            sequences = torch.randint(256, (1, 1), generator=noise).expand(shape)
        found[place] = as_batch(sequences)
    return found


def training(seed: int) -> Iterator[Found]:
    """The third way."""
    steps = 24 if size() is TOY else 64
    data, weights, base = jumping(seed, steps), trained(seed), None
    followers = [step for step in range(PERIOD, steps) if step % PERIOD < AFTER]
    for arm in with_te(*ARMS):
        with network(arm, seed, Training(lr=3e-4), weights) as net:
            losses = []
            for step, batch in enumerate(data):
                if step == steps // 2:
                    net.embedding.data *= 10.0  # until the step's end: Adam writes it anew from its master
                losses.append(net.step([batch]))
        if base is None:
            base = losses
        gaps = [per_cent(loss, known) for loss, known in zip(losses, base, strict=True)]
        for step, gap in enumerate(gaps):
            yield Found(arm.name, "training, jumps every 8 steps", step + 1, "gap", gap)
        if arm is not BF16:
            after = [gaps[step] for step in followers]
            yield Found(arm.name, "loss after jumps", math.nan, JUDGED, sum(after) / len(after))


def measure(seed: int) -> Iterator[Found]:
    yield from operands(seed)
    yield from gradients(seed)
    yield from training(seed)


def draw(points: list[Point]):
    return curves(
        "s3", points, "error", ("operands, worst batch",), "size of a few elements, in the last batch's largest",
        "% of the product", "S3: error of fc2's product in the worst batch, over the size of a jump", log_x=True,
        log_y=True, limit=LIMITS["as they come"],
    )  # fmt: skip


LIMITS = {"as they come": 5.0, "jump of 4": 10.0, "gradients as they come": 5.0, "loss after jumps": 1.0}
STRESS = Stress(
    "S3",
    "Jumps",
    "fc2's inputs of a trained model are cast with scales of earlier batches. Judged: the worst batch's error of "
    "the product, as they come (at most 5 %, twice E4M3's rounding) and if four elements become four times the "
    "largest of the batch before (at most 10 %). How far the gain of the embedding's gradients is from 1, over "
    "batches of text (at most 5 %). Then training in which every eighth batch is random bytes or one byte over "
    "and over, and the embedding is ten times as large for a step: the loss above BF16's in the three batches "
    "after a jump; at most 1 %.",
    LIMITS,
    "%",
    measure,
    draw,
)
