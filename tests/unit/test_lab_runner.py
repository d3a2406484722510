"""One run: what is read of its log, and how it is started and ended."""

import math
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import psutil
from lab_runs import gone, wait_for

from megatron_fp8.lab.sweep import runner
from megatron_fp8.lab.sweep.runner import read_line

LINE = (
    " [2026-11-21 12:25:02.319620] iteration       10/      20 | consumed samples:           80 |"
    " elapsed time per iteration (ms): 70.4 | learning rate: 1.000000E-04 | global batch size:     8 |"
    "{} loss scale: 1.0 |{} params norm: 12.125 | number of skipped iterations:   {} |"
    " number of nan iterations:   0 |"
)


def test_an_iteration_is_read():
    step, values = read_line(LINE.format(" lm loss: 5.016171E+00 | mtp_1 loss: 5.3E+00 |", " grad norm: 0.798 |", 0))
    assert step == 10
    assert values == {
        "elapsed_time_per_iteration_ms": 70.4,
        "learning_rate": 1e-4,
        "loss": 5.016171,
        "mtp_1_loss": 5.3,
        "loss_scale": 1.0,
        "grad_norm": 0.798,
        "params_norm": 12.125,
        "number_of_skipped_iterations": 0,
        "number_of_nan_iterations": 0,
    }


def test_another_process_may_print_into_the_line():
    line = (
        "Number of parameters: 7" + LINE.format(" lm loss: 5.0E+00 |", "", 0) + "Number of parameters in billions: 0.00"
    )
    step, values = read_line(line)
    assert step == 10 and values["loss"] == 5 and not [name for name in values if "parameters" in name]


def test_our_line_may_follow_in_megatrons(tmp_path, monkeypatch):
    """Both are read, of a line and of one alone."""
    monkeypatch.setattr(runner, "LAUNCHER", (sys.executable,))
    joined = LINE.format(" lm loss: 5.0E+00 |", "", 0) + "[fp8] iteration 10: update norm 2"
    script = tmp_path / "train.py"
    script.write_text(f"print({joined!r}); print('[fp8] iteration 11: update norm 3')")
    training = runner.Training([str(script)], 1, tmp_path / "run", {})
    found = []
    while training.poll() is None or not training.silent:
        found += training.read()
    training.close()
    assert [(step, values.get("loss"), values.get("update_norm")) for step, values in found] == [
        (10, 5.0, None),
        (10, None, 2.0),
        (11, None, 3.0),
    ]


def test_a_loss_that_is_not_there_is_nan():
    assert math.isnan(read_line(LINE.format("", "", 0))[1]["loss"])  # Megatron prints no NaN
    assert math.isnan(read_line(LINE.format(" lm loss: 0.000000E+00 |", "", 1))[1]["loss"])  # skipped
    assert read_line(LINE.format(" lm loss: 4.0E+00 |", "", 1))[1]["loss"] == 4  # some of an interval were
    assert read_line(LINE.format(" lm loss: 0.000000E+00 |", "", 0))[1]["loss"] == 0
    assert math.isnan(read_line(LINE.format("", " grad norm: nan |", 0))[1]["grad_norm"])
    assert read_line(LINE.format("", " grad norm: inf |", 0))[1]["grad_norm"] == math.inf


def test_other_lines_are_read():
    line = " validation loss at iteration 10{} | lm loss value: {} | lm loss PPL: 6.2E+00 | "
    assert read_line(line.format(" on validation set", "1.829636E+00")) == (10, {"validation_loss": 1.829636})
    assert read_line(line.format("", "1.7E+00")) == (10, {"validation_loss": 1.7})  # in the midst of training
    assert read_line(line.format(" on test set", "1.5E+00")) == (10, {"test_loss": 1.5})
    assert math.isnan(read_line(line.format(" on validation set", "NAN"))[1]["validation_loss"])
    own = "[fp8] iteration 30: sharpness 0.1625 %; centred -1e-3, log Z 10.5; lowest SNR -inf dB decoder.1.fc2; q95 3."
    assert read_line(own) == (
        30,
        {"sharpness": 0.1625, "centred": -1e-3, "log_z": 10.5, "lowest_snr": -math.inf, "q95": 3},
    )
    for nothing in ("", "[fp8] O1: linears in FP8", "Number of parameters: 7", "[fp8] iteration 3: all is well"):
        assert not (read_line(nothing) or (0, {}))[1]


def test_the_lines_of_a_real_run_are_read():
    """By what Megatron's own source prints, so that a new version that changes it is noticed."""
    text = Path(metadata.distribution("megatron-core").locate_file("megatron/training/training.py")).read_text()
    for piece in (
        "' iteration {:8d}/{:8d} |'",
        "' {}: {:.6E} |'",
        "f' grad norm: {grad_norm:.3f} |'",
        "' number of skipped iterations: {:3d} |'",
        "f' validation{suffix} loss at {prefix} | '",
        "'{} value: {:.6E} | '",
    ):
        assert piece in text


def test_torchrun_starts_every_process_and_its_failure_is_told(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:], flush=True)\n"
        "if os.environ['RANK'] == '0':\n"
        "    open(sys.argv[2], 'w').close()\n"
        "    time.sleep(600)\n"
        "while not os.path.exists(sys.argv[2]):\n"
        "    time.sleep(0.05)\n"
        "sys.exit('the cause')\n"
    )
    command = (str(tmp_path / "train.py"), "--to", "{run}/x")
    training = runner.Training(command, 2, tmp_path / "run", {})
    try:
        while training.poll() is None:
            training.read()
            time.sleep(0.1)
        training.read()
        assert training.poll() == 1
        assert "the cause" in training.end() and "ChildFailedError" not in training.end()
    finally:
        training.close()
    log = (tmp_path / "run/log.txt").read_text()
    for rank in (0, 1):
        assert f"rank {rank} of 2 ['--to', '{tmp_path}/run/x']" in log


def test_a_run_is_stopped_with_all_its_processes(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    training = runner.Training((str(script),), 1, tmp_path / "run", {})
    log = tmp_path / "run/log.txt"

    def started():
        training.read()
        return "child" in log.read_text()

    wait_for(started)
    child = psutil.Process(int(log.read_text().split("child ")[1].split()[0]))
    family = [child, *child.parents()[:2]]  # the script, torchrun
    monkeypatch.setattr(runner, "_PATIENCE", 1)
    training.close()
    for process in family:
        wait_for(lambda process=process: gone(process.pid))


def test_a_living_process_is_told_from_a_later_one():
    with subprocess.Popen(["sleep", "60"]) as process:
        known = runner.identity(process.pid)
        assert runner.living(known).pid == process.pid
        assert runner.living(f"{process.pid}:1000.00") is None
        process.kill()
    for past in (known, "", None, "x:y"):
        assert runner.living(past) is None
