"""Arms of configs/lab's plans train at toy size, in the formats that their names stand for."""

import pytest
from launch import ROOT
from megatron_runs import KEPT_ORDER, run_megatron

from megatron_fp8.tools.lab.sweep.plan_file import SweepRun, read_plan

pytestmark = pytest.mark.slow
TOY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --mock-data "
    "--vocab-size 255 --split 8,1,1 --train-iters 4 --lr-warmup-iters 1 --eval-iters 1 --fp8-log-exact"
)
OWN = "weights FP8; moments FP8 and FP16; masters {}; weight gradients FP8, summed over ranks in FP8 blocks"
SENT = "masters 16 bits beside the weight; weight gradients FP8, summed over ranks in {}"
SAID = {  # plan: {arm: part of the line that says the formats}
    "table6": {
        "#1": "0 of 8 linears are in FP8 (--fp8-gemm bf16); weights BF16; moments FP32 and FP32; masters FP32; weight "
        "gradients FP32, summed over ranks in FP32",
        "#2a": OWN.format("FP16"),
        "#2b": OWN.format("BF16"),
        "#3": OWN.format("FP8"),
        "#4": "moments FP8 and FP8; masters FP16",
        "O3": OWN.format("16 bits beside the weight"),
    },
    "grad_scaling": {
        "FP32": SENT.format("FP32"),
        "block": SENT.format("FP8 blocks"),
        **dict.fromkeys(("auto", "pre", "post"), SENT.format("FP8 of one scale")),
    },
}


def toy(run: SweepRun) -> list[str]:
    """A run's flags with a small model and generated data."""
    words = list(run.command[1:])
    for flag in ("--train-data-path", "--valid-data-path"):
        at = words.index(flag)
        del words[at : at + 2]
    return [*words, *TOY.split(), *KEPT_ORDER.split()]


@pytest.mark.parametrize("name", SAID)
def test_arms_train_in_their_formats(name):
    """No two arms of a plan have the same losses, and each run is judged on held-out data at its end."""
    plan = read_plan(ROOT / f"configs/lab/{name}.yaml")
    first = {run.arm: run for run in reversed(plan.runs())}
    losses = {}
    for arm, said in SAID[name].items():
        run = run_megatron(plan.processes, toy(first[arm]))
        (line,) = [line for line in run.lines if "; moments " in line]
        assert said in line and run.validation_losses != [], line
        losses[arm] = tuple(line for line in run.lines if "exact lm loss" in line)
        assert len(losses[arm]) == 4
    assert list(losses) == list(plan.arms) and len(set(losses.values())) == len(losses)
