"""A script that freezes linears, or bypasses the plugin's hooks, ends in one line; evaluations go on working."""

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
        ("lora", "O3", 2, f"the script freezes {PROJECTION}; "),
        pytest.param("lora", "O1", 1, f"the script freezes {PROJECTION}; ", marks=nightly),
        pytest.param("attribute", "O1", 1, f"the script freezes {PROJECTION}; ", marks=nightly),
        pytest.param("method", "O3", 1, f"the script freezes {PROJECTION}; ", marks=nightly),
        pytest.param("module", "O3", 1, f"the script freezes {PROJECTION}; ", marks=nightly),
        pytest.param("chunk", "O3", 2, "the script freezes all 8 linears; ", marks=nightly),
        pytest.param("replaced", "O3", 1, f"the script replaces the weight of {PROJECTION}; ", marks=nightly),
        pytest.param("late", "O1", 1, f"the script has frozen {PROJECTION} since", marks=nightly),
        pytest.param("late", "O3", 2, f"the script has frozen {PROJECTION} since", marks=nightly),
        pytest.param("late-replaced", "O3", 1, f"{PROJECTION} was called with another weight", marks=nightly),
    ],
)
def test_a_frozen_linear(how, level, nproc, words):
    with pytest.raises(RunFailed) as failed:
        run("frozen_linears.py", level, nproc, HOW=how)
    line = line_of(failed)
    assert line.startswith(f"megatron_fp8: --fp8-level {level}: {words}") and "use --fp8-level O0" in line


@nightly
@pytest.mark.parametrize("how", ["thawed", "late-thawed"])
def test_a_linear_that_is_thawed_is_trained(how):
    losses = run_megatron(1, [*TINY_GPT, *THREE, "--fp8-level", "O3"]).losses
    assert run("frozen_linears.py", "O3", HOW=how).losses == losses


@nightly
def test_what_the_line_names_works():
    """Stock trains the adapter, and not its base."""
    trained = run("frozen_linears.py", "O0", HOW="lora")
    moved = [line for line in trained.lines if "linear_proj that changed" in line]
    assert len(trained.losses) == 3 and len(moved) == 3 and all(line.endswith(" 0") for line in moved)


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
