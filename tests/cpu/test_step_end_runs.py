"""What stock reduces over the model-parallel group after a step is what every rank has, digit by digit."""

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron, script_path

SCRIPT = str(ROOT / "tests/scripts/step_end_beside_stock.py")
STEPS = 3


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--pipeline-model-parallel-size 2", id="pipeline"),
        pytest.param(
            "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", id="both",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_every_rank_knows(flags):
    ranks = 4 if "tensor" in flags else 2
    more = f"--fp8-level O3 --use-distributed-optimizer --log-num-zeros-in-grad --train-iters {STEPS} {flags}"
    run = run_megatron(ranks, [*TINY_GPT, *more.split()], script=SCRIPT, env={"PYTHONPATH": script_path()})
    found = sorted(line for line in run.lines if " compared " in line)
    asked = 4 * STEPS  # whether the step was taken, the norm, zeros; the learning rate
    assert found == [f"rank {rank} compared {asked}" for rank in range(ranks)]
