"""Sharpness in Megatron's real loop: nothing else changes, every layout gives the same; and `lab sharpness`."""

import argparse
import json
import re

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron, start_forked

from megatron_fp8.tools.lab import main

BF16 = [*TINY_GPT, "--lr-decay-iters", "10"]  # the same schedule for any number of iterations
FP32 = [flag for flag in BF16 if flag != "--bf16"]
EVALUATED = "--split 8,1,1 --eval-iters 2".split()
EMULATED = "--fp8-emulate E8M3 --fp8-emulate-layers decoder.layers.1.* --fp8-emulate-from-step 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
VALIDATION, TEST = (f"iteration 2 on {name} set" for name in ("validation", "test"))
nightly = pytest.mark.slow


def logged(run) -> dict[int, dict[str, float]]:
    """{Iteration: {name: value} of its line}."""
    lines = [line for line in run.lines if line.startswith("[fp8] iteration")]
    found = {}
    for line in lines:
        names = ("sharpness", "centred", "log Z", "not finite")
        values = {name: float(re.search(rf"{name} ([^; ]+)", line)[1]) for name in names}
        found[int(line.split()[2].removesuffix(":"))] = values
    assert len(found) == len(lines)  # only one rank prints it
    return found


def trained(folder, base: list[str]) -> dict:
    """Train two iterations with evaluations, and save. Returns the evaluations' measurements."""
    files = ["--save", str(folder), "--fp8-sharpness-eval", str(folder / "found.json")]
    run_megatron(1, [*base, *EVALUATED, "--train-iters", "2", "--save-interval", "2", *files])
    return json.loads((folder / "found.json").read_text())


def lab_sharpness(folder, base: list[str], monkeypatch, *options: str) -> dict:
    """The result of `megatron-fp8 lab sharpness` on that checkpoint."""
    monkeypatch.chdir(ROOT)
    start_forked(monkeypatch)
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    command = ["pretrain_gpt_fp8.py", *base, *EVALUATED, "--train-iters", "2", "--load", str(folder)]
    args = ["sharpness", *options, "--json", str(folder / "lab.json"), "--", *command]
    assert main.run(parser.parse_args(args)) == 0
    return json.loads((folder / "lab.json").read_text())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint after two iterations in FP32, without a level, and the measurements of its evaluations."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, trained(folder, FP32)


@pytest.fixture(scope="module")
def third_step(checkpoint):
    """Iteration 3, measured by one process."""
    return resumed(checkpoint[0], 1, "")


def resumed(folder, nproc: int, layout: str):
    flags = f"--load {folder} --no-load-optim --train-iters 3 --split 8,1,1 --fp8-sharpness-interval 3 {layout}"
    return run_megatron(nproc, [*FP32, *flags.split()])


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="no level"),
        pytest.param("--fp8-level O2", id="O2", marks=nightly),
        pytest.param(f"--fp8-level O3 {RECOMPUTE}", id="O3, recompute", marks=nightly),
        pytest.param(EMULATED, id="emulated", marks=nightly),
    ],
)
def test_losses_are_the_same_to_the_last_digit(flags):
    flags = [*TINY_GPT, "--train-iters", "4", *flags.split()]
    plain, measured = run_megatron(1, flags), run_megatron(1, [*flags, "--fp8-sharpness-interval", "2"])
    assert measured.losses == plain.losses and measured.grad_norms == plain.grad_norms
    found = logged(measured)
    assert list(found) == [2, 4] and not logged(plain)
    for values in found.values():
        assert 0.01 < values["sharpness"] < 0.03 and 0.01 < values["centred"] < 0.03  # near the value of equal logits
        assert 5.5 < values["log Z"] < 5.7 and values["not finite"] == 0


@pytest.mark.parametrize(
    ("nproc", "layout"),
    [
        pytest.param(2, "", id="data parallel", marks=nightly),
        pytest.param(2, "--tensor-model-parallel-size 2", id="tensor parallel"),
        pytest.param(2, "--pipeline-model-parallel-size 2", id="pipeline parallel"),
        pytest.param(4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", id="2 x 2", marks=nightly),
    ],
)
def test_every_layout_sees_the_same(checkpoint, third_step, nproc, layout):
    found = logged(resumed(checkpoint[0], nproc, layout))
    assert list(found) == [3] and found[3] == pytest.approx(logged(third_step)[3], rel=1e-5)


@nightly
def test_an_interleaved_pipeline_sees_the_same(tmp_path):
    four = ["--num-layers", "4"]
    trained(tmp_path, [*FP32, *four])
    one = resumed(tmp_path, 1, "--num-layers 4")
    layout = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    assert logged(resumed(tmp_path, 2, layout))[3] == pytest.approx(logged(one)[3], rel=1e-5)


def test_of_a_checkpoint(checkpoint, monkeypatch, capsys):
    """The run's own measurement, and on last tokens the value to which the search converges."""
    folder, in_training = checkpoint
    found = lab_sharpness(folder, FP32, monkeypatch, "--iterations", "20000")
    assert list(found) == list(in_training) == [VALIDATION, TEST]
    assert found[VALIDATION] != found[TEST]
    for name, parts in found.items():
        assert parts["tokens"] == in_training[name]["tokens"] and in_training[name]["last"] is None
        assert parts["tokens"]["loss"]["count"] == 2 * 8 * 64 and parts["last"]["lbfgsb"]["count"] == 2 * 8
        assert parts["last"]["closed_form"]["mean"] == pytest.approx(parts["last"]["lbfgsb"]["mean"], rel=1e-5)
    text = capsys.readouterr().out
    assert f"{VALIDATION}\n1,024 positions, 0 more not finite" in text
    assert f"{found[TEST]['tokens']['sharpness']['mean']:.5g}" in text


@nightly
@pytest.mark.parametrize("flags", ["--fp8-level O3 --fp8-recipe tensorwise", EMULATED, "--fp8-level O2"])
def test_of_a_checkpoint_of_another_kind(tmp_path, monkeypatch, flags):
    """The same forward pass without an optimizer: weights from BF16 copies, emulation by its step and layers.

    Delayed scaling then has no history, so activations are scaled just in time.
    """
    base = [*BF16, *flags.split()]
    in_training = trained(tmp_path, base)[VALIDATION]["tokens"]
    found = lab_sharpness(tmp_path, base, monkeypatch, "--iterations", "0")[VALIDATION]
    assert found["last"] is None
    if "O2" in flags:
        assert found["tokens"]["sharpness"]["mean"] == pytest.approx(in_training["sharpness"]["mean"], rel=0.01)
    else:
        assert found["tokens"] == in_training
