"""S5: does Adam's second moment follow gradients that become smaller, or larger?

Rounding to nearest drops a change of less than half an ulp, and v changes by 1 - beta2 of itself a step. So an FP8 v
grows and never decays (numerics/master.py). One in FP16 blocks would decay too slowly at a beta2 of 0.999, and is
rounded by a draw there (ops/adam.py). If data become easy, a v that stands still makes all later updates too small.

Gradients are N(0, 1) for a while, then N(0, 1/30) or N(0, 30), as long as v needs to follow: 5 / (1 - beta2) steps. If
they stay N(0, 1), v wanders around 1, and rounding may pull it to one side.

Judged is the norm of the last update beside that of an arm with v in FP32: the per cent that it lacks or has too much.
"""

from collections.abc import Iterator

import torch

from ... import ops
from ...numerics.master import quantize_block16
from ...ops.adam import AdamHyper, adam_step
from .drawing import curves
from .network import device, size
from .suite import JUDGED, Found, Point, Stress

FACTOR = 30.0
ARMS = {"O1": "fp32", "O2 and O3": "fp16", "O2 with v in FP8": "fp8"}
BETAS = (0.95, 0.999)
PLANTS = {"steady": 1.0, "easier": 1 / FACTOR, "harder": FACTOR}
_MADE = {"fp32": lambda zeros: zeros, "fp16": quantize_block16, "fp8": lambda zeros: ops.quantize_blocks(zeros)}
_SHOWN = 24  # points of a curve


def measure(seed: int) -> Iterator[Found]:
    torch.manual_seed(seed)
    where, n = device(), max(size().elements // 8, 1 << 10)
    one = torch.ones((), device=where)
    for beta2 in BETAS:
        for plant, factor in PLANTS.items():
            case = f"{plant}, beta2 {beta2:g}"
            before, after = round(2 / (1 - beta2)), round(5 / (1 - beta2))
            zeros = torch.zeros(n, device=where)
            states = {
                arm: (zeros.clone(), _MADE[form](zeros.clone()), zeros.clone(), zeros.bfloat16())
                for arm, form in ARMS.items()
            }
            looked = {before + round((i + 1) * after / _SHOWN) - 1 for i in range(_SHOWN)}
            for step in range(before + after):
                gradient = torch.randn(n, device=where) * (1.0 if step < before else factor)
                hyper = AdamHyper(1e-3, 0.9, beta2, 1e-8, 0.0, step + 1)
                norms = {}
                for arm, state in states.items():
                    began = state[2].clone() if step in looked else None
                    adam_step(gradient, *state, hyper, one)
                    if began is not None:
                        norms[arm] = float((state[2] - began).norm())
                for arm, norm in norms.items():
                    share = 100 * norm / norms["O1"]
                    yield Found(arm, case, step + 1 - before, "update", share)
                    if step == before + after - 1:
                        yield Found(arm, case, step + 1 - before, JUDGED, abs(share - 100))


CASES = [f"{plant}, beta2 {beta2:g}" for beta2 in BETAS for plant in PLANTS]


def draw(points: list[Point]):
    return curves(
        "s5", points, "update", CASES, "steps after the change", "% of the update with v in FP32",
        "S5: the size of updates after gradients have become 30 times smaller, or larger", log_x=True, log_y=True,
    )  # fmt: skip


STRESS = Stress(
    "S5",
    "Second moment",
    f"Gradients stay as they are, or become {FACTOR:g} times smaller or larger from one step to the next. All other "
    "states are FP32. Judged: how far the update's norm is from that of an FP32 second moment when that has followed; "
    "at most 10 %.",
    dict.fromkeys(CASES, 10.0),
    "% of the update",
    measure,
    draw,
)
