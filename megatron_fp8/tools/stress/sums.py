"""S6: what a sum of gradients loses, over micro-batches or ranks, by its format.

Each of n gradients is a common signal and noise of the same size, both standard normal. With S the exact sum and S' an
arm's:

    gain = <S', S> / <S, S>        1 is right; less is lost, and no later step brings it back
    error = |S' - S| / |S|

A sum to nearest in FP8 stalls: from some n on an addend is less than half an ulp of the sum. FP8-LM's ring adds in FP8
at each hop, with a factor mu for all ranks that keeps the sum from saturating; its rule is followed until it rests
(comm/shared.py). Ours keeps each addend's own FP8 and adds once, in FP32 (comm/reduce.py), or rounds stochastically
(engine/grad_store.py). Judged is the gain at the most addends, in per cent from 1.
"""

from collections.abc import Callable, Iterator

import torch

from ... import ops
from ...numerics.blocks import PackedBlocks
from ...numerics.formats import E4M3, decode, encode
from ...numerics.noise import noise_seed
from ...numerics.scaling import compute_scale
from .drawing import curves
from .network import TOY, device, size
from .suite import JUDGED, Found, Point, Stress

_SATURATED = 1e-5  # FP8-LM's rule halves mu above this share


def _bf16(addends: torch.Tensor) -> torch.Tensor:
    total = addends[0].bfloat16()
    for addend in addends[1:]:
        total += addend.bfloat16()
    return total.float()


def _stored(addends: torch.Tensor) -> torch.Tensor:
    """As --fp8-grad-accum fp8: stochastic from the second on."""
    total = PackedBlocks.zeros(1, addends.shape[1], addends.device)
    ops.quantize_blocks(addends[0], out=total)
    for i, addend in enumerate(addends[1:]):
        ops.add_blocks(addend, total, noise_seed(1, i, 7))
    return total.dequantize()


def _nearest(addends: torch.Tensor) -> torch.Tensor:
    total = ops.quantize_blocks(addends[0])
    for addend in addends[1:]:
        total = ops.quantize_blocks(total.dequantize() + addend)
    return total.dequantize()


def _wire(addends: torch.Tensor) -> torch.Tensor:
    """As --fp8-grad-reduce block."""
    return torch.stack([ops.quantize_blocks(addend).dequantize() for addend in addends]).sum(0)


def _ring(addends: torch.Tensor) -> torch.Tensor:
    """As --fp8-grad-reduce shared, after its rule has come to rest; each hop adds in FP16 and rounds."""
    scale = compute_scale(addends.abs().amax(), E4M3)
    mu = len(addends) ** -0.5
    while True:
        payload = encode(addends, E4M3, scale * mu)
        total = decode(ops.ring_sum(payload))
        if (total.abs() >= E4M3.max).float().mean() <= _SATURATED:
            return total / (scale * mu)
        mu /= 2


ARMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "FP32": lambda addends: addends.sum(0),
    "BF16": _bf16,
    "O1 to O3: wire": _wire,
    "O1 to O3: storage in FP8": _stored,
    "FP8 to nearest": _nearest,
    "FP8-LM's ring": _ring,
}


def measure(seed: int) -> Iterator[Found]:
    torch.manual_seed(seed)
    counts = (1, 4, 16, 64) if size() is TOY else (1, 4, 16, 64, 128, 256)
    n = size().elements // 4
    signal = torch.randn(n, device=device())
    every = signal + torch.randn(counts[-1], n, device=device())
    for count in counts:
        exact = every[:count].double().sum(0)
        for arm, add in ARMS.items():
            found = add(every[:count]).double()
            gain, error = float(found @ exact / (exact @ exact)), float((found - exact).norm() / exact.norm())
            yield Found(arm, "gain", count, "sum", 100 * gain)
            yield Found(arm, "error", count, "sum", 100 * error)
            if count == counts[-1]:
                yield Found(arm, "gain", count, JUDGED, 100 * abs(gain - 1))


def draw(points: list[Point]):
    return curves(
        "s6", points, "sum", ("gain", "error"), "gradients added", "% of the exact sum",
        "S6: gain and error of a sum of gradients, by the format in which it is added", log_x=True, log_y=True,
    )  # fmt: skip


STRESS = Stress(
    "S6",
    "Sums of gradients",
    "Gradients of a common signal and as much noise are added, as those of micro-batches or ranks. Judged: how far the "
    "gain of the largest sum is from 1; at most 1 %.",
    {"gain": 1.0},
    "% of the sum",
    measure,
    draw,
)
