"""tools/launch.py: it parses Megatron's log, and ends runs that fail or hang."""

import math
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from lab_runs import gone, wait_for
from launch import RunFailed, Step, parse_step, parse_validation, torchrun

from megatron_fp8 import processes
from megatron_fp8.processes import TorchRun

LINE = (
    " [2026-11-21 12:25:02.319620] iteration       10/      20 | consumed samples:           80 |"
    " elapsed time per iteration (ms): 70.4 | learning rate: 1.000000E-04 | global batch size:     8 |"
    "{} loss scale: 1.0 |{} number of skipped iterations:   {} | number of nan iterations:   0 |"
)


def test_a_step_is_read():
    done = parse_step(LINE.format(" lm loss: 5.016171E+00 | mtp_1 loss: 5.3E+00 |", " grad norm: 0.798 |", 0))
    assert done == Step(10, 5.016171, 0.798, 0, 70.4)
    for loss in ("", " lm loss: 0.000000E+00 |"):  # without the check of the loss, and with it
        skipped = parse_step(LINE.format(loss, "", 1))
        assert skipped is not None and skipped.skipped == 1
        assert math.isnan(skipped.loss) and math.isnan(skipped.grad_norm)


def test_a_validation_is_read_and_not_taken_for_a_step():
    for where in (" on validation set", ""):  # during training, and after it
        line = f" validation loss at iteration 10{where} | lm loss value: 1.829636E+00 | "
        assert parse_validation(line) == 1.829636
    assert parse_step(line) is None
    assert parse_validation(LINE.format("", "", 0)) is None
    assert parse_step("Number of parameters in billions: 0.00") is None


def test_another_process_may_print_into_the_line():
    line = "Number of parameters: 7" + LINE.format(" lm loss: 5.0E+00 |", "", 0) + "Number of parameters in billions: 0"
    assert parse_step(line).loss == 5


def test_the_lines_of_a_real_run_are_read():
    """Compared with Megatron's own source, so that a new version with another format is noticed."""
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


CHILD = re.compile(r"^the child is (\d+)\n", re.M)


@pytest.mark.slow  # as test_processes.py's run that is stopped with all its processes, through another door
def test_a_run_that_hangs_is_killed_with_its_children(tmp_path, monkeypatch):
    script = tmp_path / "hang.py"
    script.write_text(
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(f'the child is {child.pid}', flush=True)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log/hang.log"
    # No limit on the start: on a busy machine it exceeds any bound of a test.
    monkeypatch.setattr(TorchRun, "late", lambda run, timeout: CHILD.search(log.read_text()) is not None)
    monkeypatch.setattr(processes, "_PATIENCE", 1)
    with pytest.raises(RunFailed, match="killed after 100 s") as failure:
        torchrun(1, [str(script)], log, timeout=100)
    assert "full log: " in str(failure.value) and failure.value.code == -9
    child = int(CHILD.search(log.read_text())[1])
    wait_for(lambda: gone(child))


def test_a_run_is_late_after_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LAUNCHER", (sys.executable,))
    (tmp_path / "hang.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(RunFailed, match="killed after 1 s"):
        torchrun(1, [str(tmp_path / "hang.py")], tmp_path / "hang.log", timeout=1)


def test_a_run_that_fails_shows_its_own_words(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("print('before')\nraise SystemExit('the cause')\n")
    seen: list[str] = []
    with pytest.raises(RunFailed) as failure:
        torchrun(1, [str(script)], tmp_path / "fail.log", timeout=600, on_line=seen.append)
    assert failure.value.code == 1
    text = str(failure.value)
    assert "before" in text and "the cause" in text and "ChildFailedError" not in text
    assert "before" in seen
