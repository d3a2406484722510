"""--fp8-activations through Megatron's own loop: with every kind of parallelism it trains as without it."""

import pytest
from megatron_runs import TINY_GPT, run_megatron

FLAG = "--fp8-activations"
FEW = "--train-iters 4 --lr-decay-iters 10 --micro-batch-size 4 --global-batch-size 4".split()
COMMON = [*TINY_GPT, *FEW, *"--attention-backend auto --use-distributed-optimizer".split()]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--fp8-level O3 --tensor-model-parallel-size 2 --sequence-parallel", id="tensor and sequence"),
        pytest.param(
            "--fp8-level O1 --pipeline-model-parallel-size 2 --overlap-grad-reduce --overlap-param-gather",
            id="pipeline",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--fp8-level O2 --tensor-model-parallel-size 2 --sequence-parallel", id="gather", marks=pytest.mark.slow
        ),
    ],
)
def test_it_trains_as_without(flags):
    plain, given = (run_megatron(2, [*COMMON, *flags.split(), *more]) for more in ([], [FLAG]))
    assert given.losses[0] == plain.losses[0] and given.losses[1:] != plain.losses[1:]
    assert given.losses == pytest.approx(plain.losses, abs=4e-3)
    assert given.grad_norms == pytest.approx(plain.grad_norms, abs=2e-2)
    assert sum(step.skipped for step in given.steps) == 0
    gathered = "O2" in flags
    assert any(f"{FLAG}: these stay in BF16: norms" in line for line in given.lines) == gathered
