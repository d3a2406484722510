"""Runs killed at random moments while they train and save: the latest complete checkpoint loads and goes on."""

import contextlib
import os
import random
import subprocess
import sys
import time

import psutil
import pytest
from launch import ROOT, parse_step
from megatron_runs import TINY_GPT, run_megatron

KILLS = 50
FLAGS = "--fp8-level O3 --use-distributed-optimizer --train-iters 2000 --save-interval 2 --log-interval 1"
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills(tmp_path):
    """Every run prints what an undisturbed one prints for its iterations, from the checkpoint it found."""
    command = [sys.executable, "-u", "pretrain_gpt_fp8.py", *TINY_GPT, *FLAGS.split()]
    command += ["--save", str(tmp_path), "--load", str(tmp_path)]
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # no torchrun: one process
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any that is free when it starts
    printed: dict[int, tuple[float, float]] = {}
    reached, fell_back = 0, 0
    for kill in range(KILLS):
        saved = int((tmp_path / TRACKER).read_text() or 0) if (tmp_path / TRACKER).exists() else 0
        log = tmp_path / "log.txt"
        with log.open("w") as out:
            process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, stdout=out, stderr=out)
            try:
                _until_step(random.randrange(1, 12), process, log)
                time.sleep(random.uniform(0.0, 0.6))  # a save is every other step and most of the time
                assert process.poll() is None, log.read_text()[-3000:]
            finally:
                _kill(process)
        lines = log.read_text().splitlines()
        steps = [step for step in map(parse_step, lines) if step]
        fell_back += any("the last save was interrupted" in line for line in lines)
        assert steps[0].iteration > saved - 2 and steps[0].iteration >= reached - 1, kill
        reached = steps[0].iteration
        for step in steps[2:]:  # stock logs the mean of a resumed run's first two losses
            seen = step.loss, step.grad_norm
            assert printed.setdefault(step.iteration, seen) == seen, (kill, step.iteration)
    whole = run_megatron(1, [*TINY_GPT, *FLAGS.split(), "--exit-interval", str(reached)], timeout=600)
    compared = [step for step in whole.steps if step.iteration in printed]
    assert len(compared) > reached // 4
    for step in compared:
        assert printed[step.iteration] == (step.loss, step.grad_norm)
    print(f"{KILLS} kills, {reached} iterations, {fell_back} interrupted saves passed over")


def _kill(process) -> None:
    """And the helpers of Megatron's checkpoint writer, which would outlive it; one that has ended has none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for member in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def _until_step(count, process, log) -> None:
    deadline = time.monotonic() + 600
    while sum(map(bool, map(parse_step, log.read_text().splitlines()))) < count:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)
