"""A user's training command: how it is read, and what a run of it gives."""

import argparse
import re
import signal
import subprocess
import sys

import pytest
from commands import O1, error_of
from lab_runs import ROOT, TRAINING, gone, wait_for

from megatron_fp8 import processes
from megatron_fp8.errors import UserError
from megatron_fp8.tools.lab.trial.run import (
    TRACKER,
    WRITING,
    Refused,
    add_command,
    check_folder_of,
    curves,
    first_step,
    has_dropout,
    loaded,
    other_micro_batches,
    replicas,
    without,
)


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    add_command(parser)
    return parser.parse_args(argv)


def test_the_command_comes_last():
    flags = ["--steps", "7", "--seed", "-1"]  # the command's own, not the verb's
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
        (["--stpes", "3", "--", __file__], "^3: stands before -- and belongs to no flag there; see --help$"),
        (["--processes", "0", "--", __file__], "^--processes 0: use more than 0$"),
        (["--timeout", "nan", "--", __file__], "^--timeout nan: use more than 0$"),
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


def test_flags_that_write_can_be_left_out(parse, parser):
    """Each is a flag of Megatron or the plugin, and the rest is still a command."""
    switches = ("--async-save", "--fp8-log-grad-snr")
    values = {"--fp8-on-spike": "log", "--fp8-spike-window": "16"}
    flags = [word for flag in WRITING for word in ([flag] if flag in switches else [flag, values.get(flag, "2")])]
    parse(*O1, *flags)
    assert without([*O1, *flags, "--lr", "3"], WRITING) == [*O1, "--lr", "3"]
    saving = {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--save")}
    assert saving <= {*WRITING}


def test_the_first_step(tmp_path):
    here = f"--load={tmp_path}"

    def both(*command):
        return loaded(["train.py", *command]), first_step(["train.py", *command])

    assert both() == both(here) == both("--ckpt-step", "60") == (None, 1)
    assert both(here, "--ckpt-step", "60") == ("60", 61)
    (tmp_path / TRACKER).write_text("120\n")
    assert both("--load", str(tmp_path)) == ("120", 121)
    assert both(here, "--ckpt-step", "60") == ("60", 61)
    assert both(here, "--finetune") == ("120", 1)
    (tmp_path / TRACKER).write_text("release")
    assert both(here) == ("release", 1)
    assert both("--load", "{run}/checkpoint") == (None, 1)  # a run's own folder, which is made later
    for more in ([], ["--finetune"], ["--ckpt-step", "60"]):
        with pytest.raises(UserError, match=re.escape(f"--load {tmp_path}/typo: no such folder; name one that --save")):
            first_step(["train.py", "--load", f"{tmp_path}/typo", *more])


@pytest.mark.parametrize(
    ("command", "processes", "ranks", "expected"),
    [
        ("--micro-batch-size 4 --global-batch-size 16", 1, 1, "2 16"),
        ("--micro-batch-size 3 --global-batch-size 12", 2, 2, "1 12"),
        ("--micro-batch-size 2", 4, 4, "1 8"),
        ("--micro-batch-size 2 --tensor-model-parallel-size 2", 4, 2, "1 4"),
        ("--micro-batch-size=1 --global-batch-size=4", 2, 2, "2 4"),
        ("--micro-batch-size 1 --global-batch-size 6", 2, 2, None),
        ("--micro-batch-size 1 --global-batch-size 1", 1, 1, None),
        ("", 1, 1, None),
    ],
)
def test_other_micro_batches(command, processes, ranks, expected):
    words = ["train.py", *command.split()]
    size, total = expected.split() if expected else ("", "")
    flags = ["--micro-batch-size", size, "--global-batch-size", total] if expected else None
    assert other_micro_batches(words, processes) == flags and replicas(words, processes) == ranks


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("", True),
        ("--attention-dropout 0", True),
        ("--attention-dropout 0.0 --hidden-dropout=0", False),
        ("--attention-dropout 0 --hidden-dropout 0 --hidden-dropout 0.1", True),
    ],
)
def test_has_dropout(flags, has):
    assert has_dropout(["train.py", *flags.split()]) == has


def test_a_folder_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in (None, "found.json", tmp_path / "found.json"):
        check_folder_of("--json", file)
    assert error_of(check_folder_of, "--json", "no/found.json") == (
        "--json no/found.json: no such folder; make it, or name another file"
    )
    assert error_of(check_folder_of, "--json", tmp_path) == f"--json {tmp_path}: is a folder; name a file"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LAUNCHER", (sys.executable,))
    (tmp_path / "train.py").write_text(TRAINING)
    return lambda flags, **options: curves(
        [str(tmp_path / "train.py"), "--lr", "0.1", *flags.split()], 1, tmp_path / "run", **options
    )


def test_curves(run, tmp_path):
    found = run("--train-iters 12")
    assert list(found["loss"]) == list(found["grad_norm"]) == list(range(1, 13))
    assert found["loss"][12] < found["loss"][1]
    assert list(found["sharpness"]) == [5, 10] and list(found["validation_loss"]) == [12]
    assert (tmp_path / "run/log.txt").read_text().startswith("step 1\nstep 2\n")


def test_a_script_that_does_not_load_the_plugin_is_told(tmp_path, run):
    (tmp_path / "train.py").write_text("print(' iteration 1/ 1 | lm loss: 5.0E+00 |')")
    assert "-m megatron_fp8 and the script" in error_of(run, "--train-iters 1")


def test_a_run_is_stopped_when_it_has_made_the_steps(run, tmp_path):
    found = run(f"--train-iters 50 --hang-at 9 --begun {tmp_path}/begun", steps=7)
    assert list(found["loss"]) == list(range(1, 8))
    assert list(run("--train-iters 50", steps=7)["sharpness"]) == [5]  # even if more was printed
    assert gone(int((tmp_path / "begun").read_text().split()[0]))


def test_a_run_that_fails_says_why(run, tmp_path, monkeypatch, capsys):
    """In one line, which used to have the log's end in it with its line breaks escaped."""
    with pytest.raises(ValueError, match=r"^the run in .*/run failed with exit code 1, at step 2: the cause$"):
        run("--train-iters 12 --fail-at 3")
    assert capsys.readouterr().err == "step 1\nstep 2\nthe cause\n"
    # even if the start takes long; the log may lack the line of a step that is in the metrics
    monkeypatch.setattr(processes.TorchRun, "late", lambda run, timeout: timeout is not None and run.last == 3)
    with pytest.raises(ValueError, match=r"^the run in .*/run took more than --timeout 3 s, at step 3: step"):
        run(f"--train-iters 12 --hang-at 4 --begun {tmp_path}/begun", timeout=3)
    assert gone(int((tmp_path / "begun").read_text().split()[0]))


def test_a_mistake_in_the_command_is_said_as_the_run_says_it(run, tmp_path, capsys):
    said = "megatron_fp8: --load there: no checkpoint; give another folder"
    (tmp_path / "train.py").write_text(f"import sys; print('much', 'else', '{said}', sep='\\n'); sys.exit(2)")
    with pytest.raises(Refused, match=r"^--load there: no checkpoint; give another folder$"):
        run("--train-iters 1")
    assert capsys.readouterr().err == ""


def test_all_mistakes_that_a_run_names_are_said(run, tmp_path):
    """Each once, though two ranks say them. Only the first one used to be."""
    said = ["--mtp-num-layers 1: remove it", "--fp16: use --bf16"]
    lines = [f"megatron_fp8: {line}" for line in said * 2]
    (tmp_path / "train.py").write_text(f"import sys; print({chr(10).join(lines)!r}); sys.exit(2)")
    with pytest.raises(Refused) as refused:
        run("--train-iters 1")
    assert refused.value.args == (*said,)


def test_a_line_of_ours_is_no_mistake_if_something_else_ended_the_run(run, tmp_path):
    (tmp_path / "train.py").write_text("print('megatron_fp8: built the GEMMs', flush=True)\n1 / 0")
    with pytest.raises(UserError, match="failed with exit code 1, at step 0: ZeroDivisionError") as error:
        run("")
    assert type(error.value) is UserError


def test_a_mistake_is_known_by_the_rank_that_ended_first(tmp_path, capsys):
    """torchrun's own exit code is 1, and the other rank is ended by a signal."""
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': time.sleep(60)\n"
        "print('megatron_fp8: --lr x: no number', flush=True)\nsys.exit(2)"
    )
    with pytest.raises(Refused, match=r"^--lr x: no number$"):
        curves([str(tmp_path / "train.py")], 2, tmp_path / "run")
    assert capsys.readouterr().err == ""


def test_a_run_that_ends_for_a_nan_has_curves(run):
    assert list(run("--train-iters 12 --nan-at 5")["loss"]) == [1, 2, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_run_too(number, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    program = (
        "import signal, sys; from pathlib import Path\n"
        "from megatron_fp8 import processes; from megatron_fp8.tools.lab.trial import run\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup ignores it
        "processes.LAUNCHER = (sys.executable,)\n"
        "run.curves(sys.argv[1:], 1, Path('run'))"
    )
    flags = ["--lr", "0.1", "--train-iters", "9", "--hang-at", "2", "--begun", "begun"]
    parent = subprocess.Popen(
        [sys.executable, "-c", program, "train.py", *flags],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        stderr=subprocess.DEVNULL,
    )
    log = tmp_path / "run/log.txt"
    wait_for(lambda: log.is_file() and "step 1" in log.read_text())
    parent.send_signal(number)
    assert parent.wait(250) != 0
    pid = int((tmp_path / "begun").read_text().split()[0])
    wait_for(lambda: gone(pid))
