"""A training command of the user's: how it is read, and what running it gives."""

import argparse
import signal
import subprocess
import sys
import time

import psutil
import pytest
from lab_runs import ROOT, TRAINING, wait_for

from megatron_fp8.lab import runner
from megatron_fp8.lab.trial import add_command, curves, without


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    add_command(parser)
    return parser.parse_args(argv)


def test_the_command_comes_last():
    flags = ["--steps", "7", "--seed", "-1"]  # its own, whatever the verb's
    for dashes in ([], ["--"]):
        args = parsed("--steps", "3", "--processes", "2", *dashes, __file__, *flags)
        assert (args.steps, args.processes, args.timeout, args.command) == (3, 2, None, [__file__, *flags])
    assert parsed("--timeout", "9.5", "--", "-m", "pkg.train", "--lr", "1").command == ["-m", "pkg.train", "--lr", "1"]
    assert parsed("--", __file__, "--", "x").command == [__file__, "--", "x"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "^no training command; give it last: -- pretrain_gpt_fp8.py FLAGS...$"),
        (["--steps", "3", "--"], "^no training command"),
        (["--", "--lr", "3"], "^--lr: the command must begin with a script, or -m and a module"),
        (["--", "nowhere.py", "--lr", "3"], "^nowhere.py: no such script here"),
    ],
)
def test_mistakes_are_one_line(argv, message):
    with pytest.raises(ValueError, match=message):
        parsed(*argv)


def test_without():
    command = ["train.py", "--save", "a", "--lr=3", "--save=b", "--data", "x", "y", "--quiet", "--save-interval", "3"]
    assert without(command, ["--save"]) == ["train.py", *command[3:4], *command[5:]]
    assert without(command, ["--data", "--quiet", "--lr"]) == [*command[:3], "--save=b", *command[-2:]]
    assert without(command, []) == command


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "LAUNCHER", (sys.executable,))
    (tmp_path / "train.py").write_text(TRAINING)
    return lambda flags, **options: curves(
        [str(tmp_path / "train.py"), "--lr", "0.1", *flags.split()], 1, tmp_path / "run", **options
    )


def test_curves(run, tmp_path):
    found = run("--train-iters 12")
    assert list(found["loss"]) == list(found["grad_norm"]) == list(range(1, 13))
    assert found["loss"][12] < found["loss"][1]
    assert list(found["sharpness"]) == [5, 10] and list(found["validation_loss"]) == [12]
    assert "validation loss" in (tmp_path / "run/log.txt").read_text()


def test_a_run_is_stopped_when_it_has_made_the_steps(run, tmp_path):
    began = time.monotonic()
    found = run(f"--train-iters 50 --hang-at 9 --begun {tmp_path}/begun", steps=7)
    assert list(found["loss"]) == list(range(1, 8)) and time.monotonic() - began < 60
    assert list(run("--train-iters 50", steps=7)["sharpness"]) == [5]  # whatever more it had printed
    assert not psutil.pid_exists(int((tmp_path / "begun").read_text().split()[0]))


def test_a_run_that_fails_says_why(run, tmp_path):
    with pytest.raises(ValueError, match=r"(?s)^the run in .*/run failed with exit code 1, at step 2\n.*the cause"):
        run("--train-iters 12 --fail-at 3")
    with pytest.raises(ValueError, match=r"(?s)^the run in .*/run took more than --timeout 3 s, at step 3\n"):
        run(f"--train-iters 12 --hang-at 4 --begun {tmp_path}/begun", timeout=3)
    assert not psutil.pid_exists(int((tmp_path / "begun").read_text().split()[0]))


def test_a_run_that_ends_for_a_nan_has_curves(run):
    assert list(run("--train-iters 12 --nan-at 5")["loss"]) == [1, 2, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_run_too(number, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    program = (
        "import sys; from pathlib import Path; from megatron_fp8.lab import runner, trial\n"
        "runner.LAUNCHER = (sys.executable,)\n"
        "trial.curves(sys.argv[1:], 1, Path('run'))"
    )
    flags = ["--lr", "0.1", "--train-iters", "9", "--hang-at", "2", "--begun", "begun"]
    parent = subprocess.Popen(
        [sys.executable, "-c", program, "train.py", *flags],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        stderr=subprocess.DEVNULL,
    )
    log = tmp_path / "run/log.txt"
    wait_for(lambda: log.is_file() and "iteration        1/" in log.read_text())
    parent.send_signal(number)
    assert parent.wait(30) != 0
    pid = int((tmp_path / "begun").read_text().split()[0])
    wait_for(lambda: not psutil.pid_exists(pid))
