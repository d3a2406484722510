"""S1: does a master weight take in updates that are far below its last bit?

Post-training's rates are 5e-7 to 1e-5. Adam moves each weight by about the rate a step, if its gradients agree. A BF16
weight of 0.02 has an ulp of 1.2e-4, and an FP16 one of 1.5e-5. Rounding to nearest drops any update below half of that,
in every step anew (numerics/master.py has the table).

Weights N(0, 0.02), rounded to BF16 as from a checkpoint, take STEPS steps of Adam. Gradients are a constant signal and
noise of the same size. With d the way that the FP32 master goes, and d' the way of an arm's:

    share = <d', d> / <d, d>        of the master, and of the weight that the forward pass reads

Judged is the master's, as the per cent that it lacks or has too much.
"""

from collections.abc import Iterator

import torch

from ... import ops
from ...numerics.dither import dithered
from ...numerics.formats import E4M3
from ...numerics.master import quantize_block16, split_bf16, split_e4m3
from ...numerics.scaled import ScaledTensor
from ...numerics.scaling import adam_growth, power_of_two_scale
from ...ops.adam import AdamHyper, adam_step
from ...ops.adam_states import State, read_master
from .drawing import curves
from .network import device, size
from .suite import JUDGED, Found, Point, Stress

STEPS = 200
RATES = (5e-7, 2e-6, 1e-5, 1e-4)
JUDGED_RATES = RATES[:3]
SPREAD = 0.02
ARMS = {  # name: format of the master, of the weight
    "O1": ("fp32", "bf16"),
    "O2": ("remainder", "bf16"),
    "O3": ("remainder", "fp8"),
    "O2 as FP8-LM": ("fp16", "bf16"),
    "BF16 master": ("bf16", "bf16"),
    "FP8 master": ("fp8", "bf16"),
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Kept:
    """A weight in an arm's formats, with Adam's moments in FP32 so that the master alone differs."""

    def __init__(self, values: torch.Tensor, master: str, weight: str, hyper: AdamHyper):
        growth = STEPS * adam_growth(hyper.lr, hyper.beta1, hyper.beta2, STEPS)
        self.scale = power_of_two_scale(values.float().abs().amax() + growth, E4M3)
        start = dithered(values, (1, 2, 3), self.scale) if weight == "fp8" else values.float()
        self.moments = torch.zeros_like(start), torch.zeros_like(start)
        self.weight: torch.Tensor | ScaledTensor = start.bfloat16()
        self.master: State
        if weight == "fp8":
            payload, remainder = split_e4m3(start, self.scale)
            self.weight = ScaledTensor(payload, self.scale.reciprocal())
        elif master == "remainder":
            self.weight, remainder = split_bf16(start)
        match master:
            case "remainder":
                self.master = remainder
            case "fp16":
                self.master = quantize_block16(start)
            case "fp8":
                self.master = ops.quantize_blocks(start)
            case _:
                self.master = start.to(_DTYPES[master], copy=True)
        self.began = self.read()

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Master and weight, FP64."""
        weight = self.weight.dequantize() if isinstance(self.weight, ScaledTensor) else self.weight
        return read_master(self.master, self.weight).double(), weight.double()

    def step(self, gradient: torch.Tensor, hyper: AdamHyper, one: torch.Tensor) -> None:
        scale = self.scale if isinstance(self.weight, ScaledTensor) else None
        adam_step(gradient, *self.moments, self.master, self.weight, hyper, one, scale)

    def ways(self) -> list[torch.Tensor]:
        """How far master and weight have come."""
        return [now - then for now, then in zip(self.read(), self.began, strict=True)]


def measure(seed: int) -> Iterator[Found]:
    torch.manual_seed(seed)
    where, n = device(), size().elements
    values = (SPREAD * torch.randn(n, device=where)).bfloat16()
    signal, one = torch.randn(n, device=where), torch.ones((), device=where)
    for rate in RATES:
        hypers = [AdamHyper(rate, 0.9, 0.95, 1e-8, 0.0, step) for step in range(1, STEPS + 1)]
        kept = {arm: Kept(values, *formats, hypers[0]) for arm, formats in ARMS.items()}
        for hyper in hypers:
            gradient = signal + torch.randn_like(signal)
            for state in kept.values():
                state.step(gradient, hyper, one)
        whole = kept["O1"].ways()[0]
        for arm, state in kept.items():
            shares = [float((way @ whole) / (whole @ whole)) for way in state.ways()]
            yield Found(arm, "master", rate, "share of the update", 100 * shares[0])
            yield Found(arm, "weight", rate, "share of the update", 100 * shares[1])
            if rate in JUDGED_RATES:
                yield Found(arm, f"rate {rate:g}", rate, JUDGED, 100 * abs(shares[0] - 1))


def draw(points: list[Point]):
    return curves(
        "s1", points, "share of the update", ("master", "weight"), "learning rate", "% of the FP32 master's way",
        "S1: how much of 200 small updates the master has taken in, and the weight that is read", log_x=True,
    )  # fmt: skip


STRESS = Stress(
    "S1",
    "Small learning rates",
    f"{STEPS} steps of Adam from BF16 weights, at rates of post-training. Moments are FP32 in all arms: masters alone "
    "differ. Judged: the per cent of the FP32 master's way that a master lacks, or has too much; at most 10 %.",
    {f"rate {rate:g}": 10.0 for rate in JUDGED_RATES},
    "% of the update",
    measure,
    draw,
)
