"""The two entry points, through Megatron's own training loop on the CPU."""

import math
import os
import subprocess
import sys

import pytest
from launch import ROOT, RunFailed, forked
from megatron_runs import TINY_GPT, run_megatron

from megatron_fp8.tools.lab.sweep.plan_file import read_plan

nightly = pytest.mark.slow
OTHER_MODEL = "tests/scripts/other_model.py"
UNEVEN = "--num-layers 3 --pipeline-model-parallel-size 2 --fp8-level O1"
BIASED = [flag for flag in TINY_GPT if flag != "--disable-bias-linear"]


def test_trains_alike_in_one_and_two_processes():
    one = run_megatron(1, TINY_GPT)
    two = run_megatron(2, [*TINY_GPT, "--use-distributed-optimizer"])
    assert [step.iteration for step in one.steps] == list(range(1, 11))
    assert one.losses[0] == pytest.approx(math.log(256), abs=0.1)  # the vocabulary is padded to 256
    assert one.losses[-1] < one.losses[0] - 0.3
    assert two.losses == pytest.approx(one.losses, abs=2e-3)
    assert two.grad_norms == pytest.approx(one.grad_norms, abs=2e-2)
    assert sum(step.skipped for step in two.steps) == 0


def test_any_script_runs_through_the_launcher(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys, runpy, beside\nrunpy.run_path(beside.SCRIPT, run_name=__name__)\n")
    (tmp_path / "beside.py").write_text(f"SCRIPT = {str(ROOT / 'pretrain_gpt_fp8.py')!r}\n")
    direct = run_megatron(1, [*TINY_GPT, "--train-iters", "4"])
    launched = run_megatron(1, [*TINY_GPT, "--train-iters", "4"], script=["-m", "megatron_fp8", str(script)])
    assert launched.losses == direct.losses
    assert launched.grad_norms == direct.grad_norms


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-m", "megatron_fp8", "nowhere/train.py"], "nowhere/train.py: no such script"),
        (["pretrain_gpt_fp8.py", *TINY_GPT, "--fp8-levle", "O1"], "unrecognized arguments: --fp8-levle"),
        (["pretrain_gpt_fp8.py", *TINY_GPT, "--fp8-level", "O1", "--fp16"], "--fp16"),
        (["pretrain_gpt_fp8.py", *TINY_GPT, "--logits-load-dir", "x"], "--logits-load-dir x is not supported here"),
        (["pretrain_gpt_fp8.py", *TINY_GPT, "--attention-backend", "foo"], "--attention-backend foo: no such value"),
        (["-m", "megatron_fp8", OTHER_MODEL, *TINY_GPT, "--fp8-level", "O1"], "the script trains a T5Model"),
    ],
)
def test_a_mistake_is_one_line(words, expected, tmp_path):
    with pytest.raises(RunFailed) as failure:
        forked(1, words, tmp_path / "log", timeout=600, env={"CUDA_VISIBLE_DEVICES": ""})
    assert failure.value.code == 2
    assert expected in the_one_line((tmp_path / "log").read_text())


def the_one_line(printed: str) -> str:
    assert "Traceback" not in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("megatron_fp8: ")]
    return line


def test_a_mistake_in_a_process_without_a_launcher_is_one_line(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, runpy\n"
        "for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):\n"
        "    del os.environ[name]\n"
        "runpy.run_path('pretrain_gpt_fp8.py', run_name='__main__')\n"
    )
    with pytest.raises(RunFailed) as failure:
        forked(1, [str(script), *TINY_GPT, "--fp8-level", "O7"], tmp_path / "log", timeout=600)
    assert failure.value.code == 2
    assert "--fp8-level O7" in the_one_line((tmp_path / "log").read_text())


@pytest.mark.parametrize(
    ("nproc", "flags", "expected"),
    [  # found in validation, when the model and the optimizer are built, and in the first step
        (2, [*TINY_GPT, *UNEVEN.split()], "--num-layers 3, --pipeline-model-parallel-size 2: Number of layers"),
        pytest.param(
            1,
            [*TINY_GPT, "--transformer-impl", "transformer_engine"],
            "Megatron has no TESpecProvider here: Transformer Engine is not installed",
            marks=nightly,
        ),
        pytest.param(
            1,
            [*TINY_GPT, *read_plan(ROOT / "configs/lab/evidence_l0.yaml").arms["TE FP8"]],
            "Megatron has no TESpecProvider here: Transformer Engine is not installed",
            marks=nightly,
        ),
        pytest.param(
            1,
            [*TINY_GPT, "--train-iters", "2", "--fp8-level", "O1"],
            "--lr-warmup-iters 2, --global-batch-size 8: Megatron needs lr_warmup_steps < lr_decay_steps",
            marks=nightly,
        ),
        pytest.param(
            2,
            [*BIASED, "--num-experts", "2", "--fp8-level", "O1"],
            "Bias is not supported for weighted swiglu fusion",
            marks=nightly,
        ),
    ],
    ids=["arguments", "model", "an arm of a plan", "optimizer", "first step"],
)
def test_a_check_of_megatrons_is_one_line(nproc, flags, expected):
    with pytest.raises(RunFailed) as failure:
        run_megatron(nproc, flags)
    said = [line for line in str(failure.value).splitlines() if line.startswith("megatron_fp8: ")]
    assert said and said[0].startswith(f"megatron_fp8: {expected}")
    assert "; Megatron c" in said[0]


def test_a_mistake_under_torchrun_is_said_once():
    with pytest.raises(RunFailed) as failure:
        run_megatron(2, [*TINY_GPT, "--fp8-level", "O7"])
    said = [line for line in str(failure.value).splitlines() if line.startswith("megatron_fp8: ")]
    assert len(said) == 1 and "--fp8-level O7" in said[0]


def test_help_shows_our_flags(tmp_path):
    warm = forked(1, ["pretrain_gpt_fp8.py", "--help"], tmp_path / "log", timeout=600)
    assert any("--fp8-level" in line for line in warm) and sum(line.startswith("  ") for line in warm) > 1000


@nightly
def test_help_is_the_same_in_a_process_of_its_own(tmp_path):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "pretrain_gpt_fp8.py", "--help"]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-500:]
    assert "--fp8-level" in result.stdout
    warm = forked(1, ["pretrain_gpt_fp8.py", "--help"], tmp_path / "log", timeout=600)
    help_lines = [line for line in result.stdout.splitlines() if line.startswith("  ")]
    assert len(help_lines) > 1000 and set(help_lines) <= set(warm)
