"""A script that changes linears under way, or bypasses the plugin's hooks, ends in one line; evaluations go on."""

import pytest
from launch import ROOT, RunFailed
from megatron_runs import TINY_GPT, run_megatron, script_path

THREE = ["--train-iters", "3", "--lr-decay-iters", "10"]
PROJECTION = "decoder.layers.0.self_attention.linear_proj"
nightly = pytest.mark.slow


def run(script, level, nproc=1, *flags, **env):
    return run_megatron(
        nproc,
        [*TINY_GPT, *THREE, "--fp8-level", level, *flags],
        script=str(ROOT / "tests/scripts" / script),
        env={"PYTHONPATH": script_path(), **env},
    )


def line_of(failed) -> str:
    assert failed.value.code == 2, str(failed.value)
    (line,) = {line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: ")}
    return line


@pytest.mark.parametrize(
    ("how", "level", "nproc", "words"),
    [
        ("late", "O3", 2, f"the script has frozen {PROJECTION} since the optimizer was built; "),
        pytest.param("late", "O1", 1, f"the script has frozen {PROJECTION} since", marks=nightly),
        pytest.param("unfrozen-late", "O3", 1, f"the script has thawed {PROJECTION} since", marks=nightly),
        pytest.param("norms", "O3", 1, "the script freezes the norms and biases of layer 1, and says", marks=nightly),
        pytest.param("replaced", "O3", 1, f"the script replaces the weight of {PROJECTION}; ", marks=nightly),
        pytest.param("late-replaced", "O3", 1, f"{PROJECTION} was called with another weight", marks=nightly),
    ],
)
def test_a_linear_that_is_not_as_it_was(how, level, nproc, words):
    with pytest.raises(RunFailed) as failed:
        run("frozen_linears.py", level, nproc, HOW=how)
    assert line_of(failed).startswith(f"megatron_fp8: --fp8-level {level}: {words}")


@nightly
@pytest.mark.parametrize("how", ["thawed", "late-thawed"])
def test_a_linear_that_is_thawed_is_trained(how):
    losses = run_megatron(1, [*TINY_GPT, *THREE, "--fp8-level", "O3"]).losses
    assert run("frozen_linears.py", "O3", HOW=how).losses == losses


@pytest.mark.parametrize(
    ("bypassed", "words"),
    [
        (
            "optimizer",
            "is about to train, but no FP8 optimizer has its weight: the script builds its",
        ),
        ("arguments", "the script builds a GPTModel and has not called megatron.training.arguments.parse_args"),
    ],
)
def test_a_framework_that_bypasses_a_hook(bypassed, words):
    with pytest.raises(RunFailed) as failed:
        run("own_optimizer.py", "O3", BYPASSED=bypassed)
    assert words in line_of(failed)


@nightly
def test_an_evaluation_needs_no_optimizer(tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "3"]
    evaluates = "--eval-iters 1 --split 8,1,1".split()
    run_megatron(1, [*TINY_GPT, *THREE, "--fp8-level", "O3", *save, *evaluates])
    evaluated = run_megatron(
        1, [*TINY_GPT, *THREE, "--fp8-level", "O3", "--load", str(tmp_path), "--skip-train", *evaluates]
    )
    assert evaluated.validation_losses
