"""--fp8-log-update-norm in Megatron's real loop: the norm of the change between checkpoints, in any layout."""

import re
from pathlib import Path

import pytest
import torch
from launch import ROOT
from megatron_runs import TINY_GPT, Run, run_megatron, script_path
from test_checkpoints import DISTRIBUTED, LAYOUTS, tensors

nightly = pytest.mark.slow
LOG = "--fp8-log-update-norm"
FP32 = [flag for flag in TINY_GPT if flag != "--bf16"]
SGD = "--optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0 --lr-decay-style constant --lr-warmup-iters 0"
MOE = "--num-experts 2 --moe-layer-freq [0,1] --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather"
_LINE = re.compile(r"\[fp8\] iteration (\d+): update norm (\S+); update ratio (\S+)$")


def logged(run: Run) -> dict[int, tuple[float, float]]:
    """{Iteration: (update norm, update ratio)}."""
    found = [(int(line[1]), (float(line[2]), float(line[3]))) for line in filter(None, map(_LINE.match, run.lines))]
    assert len(found) == len(dict(found))  # only one rank prints it
    return dict(found)


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (2, "--tensor-model-parallel-size 2"),
        pytest.param(1, "", marks=nightly),
        pytest.param(2, "--pipeline-model-parallel-size 2", marks=nightly),
        pytest.param(2, "", marks=nightly),
        pytest.param(2, MOE, marks=nightly),  # two parts, one of them over other ranks
    ],
)
def test_gradient_descent_moves_by_its_rate_times_the_gradient(nproc, flags):
    """The gradient's norm is stock's, which counts replicas and weights that two stages share once."""
    base = [flag for flag in FP32 if flag != "--untie-embeddings-and-output-weights"]
    run = run_megatron(nproc, [*base, *SGD.split(), *flags.split(), "--train-iters", "4", LOG, "--fp8-log-exact"])
    exact = [float(line.split()[-1]) for line in run.lines if "exact grad norm" in line]
    found = logged(run)
    assert sorted(found) == [1, 2, 3, 4]
    for norm, (update, _) in zip(exact, found.values(), strict=True):
        assert update == pytest.approx(1e-3 * norm, rel=1e-4)  # w - lr g, rounded to FP32


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (2, f"--fp8-level O3 {DISTRIBUTED} --overlap-param-gather --overlap-grad-reduce"),
        pytest.param(1, "--fp8-level O2", marks=nightly),
        pytest.param(2, f"--fp8-level O1 {DISTRIBUTED}", marks=nightly),
        pytest.param(2, "--fp8-level O3 --fp8-master fp16", marks=nightly),
        pytest.param(2, f"--fp8-level O3 {LAYOUTS['tp2'][1]}", marks=nightly),
        pytest.param(2, DISTRIBUTED, marks=nightly),
    ],
)
def test_what_moved_between_two_checkpoints(nproc, flags, tmp_path):
    few = "--micro-batch-size 4 --train-iters 3 --dist-ckpt-optim-fully-reshardable"
    every = [*TINY_GPT, *flags.split(), *few.split()]
    run = run_megatron(nproc, [*every, LOG, "--save", str(tmp_path), "--save-interval", "1"])
    before, after = (masters(tmp_path, iteration) for iteration in (2, 3))
    moved = sum((after[name].double() - before[name].double()).square().sum() for name in before).sqrt()
    weights = sum(master.double().square().sum() for master in before.values()).sqrt()
    assert logged(run)[3] == pytest.approx((float(moved), float(moved / weights)), rel=1e-5)


@nightly
@pytest.mark.parametrize("flags", ["", "--fp8-level O3"])
def test_nothing_else_is_another(flags):
    """And only every --log-interval-th iteration is logged."""
    every = [*TINY_GPT, *flags.split(), "--train-iters", "4"]
    run, rare = (run_megatron(1, [*every, LOG, "--log-interval", interval]) for interval in ("1", "3"))
    assert run.losses == run_megatron(1, every).losses
    assert logged(rare) == {3: logged(run)[3]}


def masters(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """The master weights of a checkpoint, for every parameter."""
    found = tensors(folder, iteration)
    names = [name for name in found if name.startswith("optimizer.state.param.") or ".fp32_param." in name]
    assert len(names) == len([name for name in found if ".exp_avg." in name]) > 5
    return {name: found[name] for name in names}


@nightly
def test_a_skipped_step_says_nothing():
    """The third step's gradient is not finite."""
    flags = f"--fp8-level O1 --fp8-grad-accum fp32 --train-iters 5 {LOG}".split()
    env = {"PYTHONPATH": script_path(), "POISON": "nan", "POISONED_RANK": "0", "POISON_AT": "storage"}
    run = run_megatron(2, [*TINY_GPT, *flags], script=str(ROOT / "tests/scripts/poisoned_gradient.py"), env=env)
    assert sorted(logged(run)) == [1, 2, 4, 5]
