"""Killed ranks leave no process behind: neither the manager of a save's results nor a writer."""

import contextlib
import sys
import time

import psutil
import pytest
from launch import ROOT
from megatron_runs import ASYNCHRONOUS, TINY_GPT, script_path

from megatron_fp8.processes import TorchRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
SAVED = "successfully saved checkpoint"


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(("saves", "kills_all"), [("", False), ("", True), (ASYNCHRONOUS, True)], ids=str)
def test_nothing_lives_on_when_ranks_are_killed(saves, kills_all, tmp_path):
    """One rank is killed, and torchrun ends the other; or torchrun and both are killed."""
    flags = f"--fp8-level O1 --train-iters 100000 --save-interval 2 --use-distributed-optimizer {saves}"
    command = [str(ROOT / "pretrain_gpt_fp8.py"), *TINY_GPT, *flags.split(), "--save", str(tmp_path / "saved")]
    environment = {"PYTHONPATH": script_path(), "CUDA_VISIBLE_DEVICES": ""}
    run, family = TorchRun(command, 2, tmp_path / "log", environment, folder=tmp_path), []
    try:
        while not any(SAVED in line for line in run.lines()):
            assert run.poll() is None, run.end()
            run.wait()
        launcher = psutil.Process(int(run.identity.split(":")[0]))
        ranks, family = launcher.children(), launcher.children(recursive=True)
        assert len(ranks) == 2 and len(family) >= 6, family  # each with a manager and a tracker
        for process in (launcher, *ranks) if kills_all else ranks[:1]:
            process.kill()
        deadline = time.monotonic() + 300  # usually a second; torchrun waits thirty for the other rank
        while left := [process for process in family if lives(process)]:
            assert time.monotonic() < deadline, [" ".join(process.cmdline())[:200] for process in left]
            run.lines()
            time.sleep(0.1)
    finally:
        run.close()
        for process in filter(lives, family):
            process.kill()
    print(f"{len(family)} processes, none left", file=sys.stderr)
