"""engine.borrowed in Megatron's loop: other weights for a while, then every byte and loss as without."""

import re

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron, script_path

SIX = "--train-iters 6 --lr-decay-iters 10 --attention-backend auto --micro-batch-size 4".split()
slow = pytest.mark.slow
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type none "
EXPERTS += "--fp8-experts --moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
EXPERTS += "--fp8-dispatch both --use-distributed-optimizer"


def train(how, level, nproc, *flags):
    script, env = str(ROOT / "tests/scripts/borrowing.py"), {"PYTHONPATH": script_path(), "BORROW": how}
    return run_megatron(nproc, [*TINY_GPT, *SIX, "--fp8-level", level, *flags], script=script, env=env)


def seen(run) -> tuple[float, float | None, float, bool, int]:
    """The loss of a batch before, meanwhile and after; whether all bytes are the same then; how many were not."""
    (line,) = (line for line in run.lines if line.startswith("losses: "))
    before, meanwhile, after, same, moved = re.match(
        "losses: (.*) (.*) (.*); same bytes: (.*); moved: (.*)", line
    ).groups()
    return float(before), None if meanwhile == "None" else float(meanwhile), float(after), same == "True", int(moved)


@pytest.mark.parametrize(
    ("level", "nproc", "flags"),
    [
        pytest.param("O3", 2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", marks=slow),
        pytest.param("O3", 2, "--tensor-model-parallel-size 2", marks=slow),
        ("O3", 1, "--fp8-recipe tensorwise --keep-fp8-transpose-cache"),
        pytest.param("O3", 2, EXPERTS, marks=slow),
        pytest.param("O2", 1, "", marks=slow),
        pytest.param("O1", 1, "", marks=slow),
    ],
)
def test_other_weights_and_the_same_bytes(level, nproc, flags):
    run, without = (train(how, level, nproc, *flags.split()) for how in ("other", "none"))
    before, meanwhile, after, same, moved = seen(run)
    assert same and moved and before == after and abs(meanwhile - before) > 0.05
    assert run.losses == without.losses and run.grad_norms == without.grad_norms


@pytest.mark.parametrize("level", ["O3", pytest.param("O1", marks=slow)])
def test_its_own_weights_change_nothing(level):
    before, meanwhile, after, same, _ = seen(train("own", level, 1))
    assert same and before == meanwhile == after


@slow
def test_codes_are_refused_and_change_nothing():
    run, without = train("codes", "O3", 1), train("none", "O3", 1)
    assert any("refused: " in line and "codes without their scale" in line for line in run.lines)
    before, meanwhile, after, same, _ = seen(run)
    assert same and meanwhile is None and before == after and run.losses == without.losses
