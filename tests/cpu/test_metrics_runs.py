"""MEGATRON_FP8_METRICS in Megatron's real loop: the log's numbers with every digit, and nothing else changes."""

import math
from collections import defaultdict

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron, script_path

from megatron_fp8.metrics import DEVICE, LINEARS, VARIABLE, Reader, facts
from megatron_fp8.tools.lab.sweep.runner import Training

EVALUATED = "--split 8,1,1 --eval-iters 1 --eval-interval 2"
MOE = "--num-experts 2 --moe-layer-freq [0,1] --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"


def measured(tmp_path, nproc: int, flags: str, **options):
    """The run, and {name: {step: value}} from its file."""
    file = tmp_path / "run.jsonl"
    env = {VARIABLE: str(file), **options.pop("env", {})}
    run = run_megatron(nproc, [*TINY_GPT, *flags.split()], env=env, **options)
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for step, values in Reader(file).read():
        for name, value in values.items():
            assert step not in found[name], (step, name)  # one rank writes, once
            found[name][step] = value
    return run, found


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (2, "--pipeline-model-parallel-size 2"),
        pytest.param(2, "--fp8-level O2 --use-distributed-optimizer", marks=pytest.mark.slow),
        pytest.param(1, f"--fp8-level O1 {MOE}", marks=pytest.mark.slow),
    ],
)
def test_the_file_is_the_log_with_every_digit(tmp_path, nproc, flags):
    """And the run equals the run without the file, with a level or without."""
    flags = f"{EVALUATED} --train-iters 5 --global-batch-size 4 --log-params-norm {flags}"
    run, found = measured(tmp_path, nproc, flags)
    plain = run_megatron(nproc, [*TINY_GPT, *flags.split()])
    assert plain.losses == run.losses and plain.grad_norms == run.grad_norms
    assert plain.validation_losses == run.validation_losses
    losses = found["loss"]
    assert list(losses) == [1, 2, 3, 4, 5]
    printed = {1: losses[1], 2: (losses[1] + losses[2]) / 2} | {step: losses[step] for step in (3, 4, 5)}
    assert [float(f"{loss:.6E}") for loss in printed.values()] == pytest.approx(run.losses, rel=3e-7)
    assert [float(f"{losses[step]:.6E}") for step in (1, 3, 4, 5)] == [run.losses[i] for i in (0, 2, 3, 4)]
    assert [round(norm, 3) for norm in found["grad_norm"].values()] == run.grad_norms
    assert any(norm != round(norm, 6) for norm in found["grad_norm"].values())
    assert list(found["validation_loss"]) == [2, 4, 5] and list(found["test_loss"]) == [5]
    assert [float(f"{x:.6E}") for x in found["validation_loss"].values()] == run.validation_losses
    for step in run.steps[2:]:
        assert found["elapsed_time_per_iteration_ms"][step.iteration] == pytest.approx(step.milliseconds, abs=0.06)
        assert found["number_of_skipped_iterations"][step.iteration] == 0
    assert ("load_balancing_loss" in found) == (MOE in flags) and len(found["params_norm"]) == 5


def test_our_own_numbers_are_in_the_file_too(tmp_path):
    """And only logged iterations have the log's numbers."""
    flags = "--fp8-level O2 --fp8-log-update-norm --fp8-sharpness-interval 2 --fp8-log-interval 3 --fp8-on-spike log"
    run, found = measured(tmp_path, 1, f"{flags} --train-iters 4 --log-interval 3 --fp8-bf16-layers *.1.*fc2")
    assert facts(tmp_path / "run.jsonl") == {LINEARS: ["decoder.layers.1.mlp.linear_fc2"], DEVICE: "cpu"}
    assert list(found["loss"]) == [1, 3] and list(found["update_norm"]) == [3]
    assert list(found["sharpness_mean"]) == list(found["log_z_q99"]) == [2, 4]
    (line,) = [line for line in run.lines if "update norm" in line]
    assert f"update norm {found['update_norm'][3]:.6g}; update ratio {found['update_ratio'][3]:.6g}" in line
    underflows = found["decoder.layers.0.mlp.linear_fc1_activation_underflows%"]
    assert list(underflows) == [3] and 0 <= underflows[3] < 1


@pytest.mark.slow
def test_a_skipped_step_is_not_a_number(tmp_path):
    env = {"PYTHONPATH": script_path(), "POISON": "nan", "POISONED_RANK": "0", "POISON_AT": "storage"}
    script = str(ROOT / "tests/scripts/poisoned_gradient.py")
    flags = "--fp8-level O1 --fp8-grad-accum fp32 --train-iters 5"
    _, found = measured(tmp_path, 2, flags, script=script, env=env)
    assert [step for step, loss in found["loss"].items() if math.isnan(loss)] == [3]
    assert list(found["number_of_skipped_iterations"].values()) == [0, 0, 1, 0, 0]


def test_the_lab_runs_an_arm_without_a_level(tmp_path, monkeypatch):
    """A stock arm: under torchrun, through the module that loads the plugin into any script. A rank that is forked
    from a warm process, as most tests start theirs, has the same losses."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ["-m", "megatron_fp8", "pretrain_gpt_fp8.py", *TINY_GPT, "--train-iters", "3"]
    training = Training(command, 1, tmp_path / "run", {})
    found = []
    try:
        while training.poll() is None:
            training.wait()
            found += training.read()
        found += training.read()
    finally:
        training.close()
    assert training.poll() == 0, training.end()
    losses = {step: values["loss"] for step, values in found if "loss" in values}
    assert training.loads_plugin and [*losses] == [1, 2, 3]
    _, forked = measured(tmp_path, 1, "--train-iters 3")
    assert forked["loss"] == losses
