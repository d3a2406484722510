"""Runs killed at random moments while they train and save: the latest complete checkpoint loads and goes on."""

import random
import subprocess
import sys
import time

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
    printed: dict[int, tuple[float, float]] = {}
    reached, fell_back = 0, 0
    for kill in range(KILLS):
        saved = int((tmp_path / TRACKER).read_text() or 0) if (tmp_path / TRACKER).exists() else 0
        log = tmp_path / "log.txt"
        with log.open("w") as out:
            process = subprocess.Popen(command, cwd=ROOT, env={**_environment(), **env}, stdout=out, stderr=out)
            try:
                _until_training(process, log)
                time.sleep(random.uniform(0.0, 1.5))  # some 30 steps and 15 saves
                assert process.poll() is None, log.read_text()[-3000:]
            finally:
                process.kill()
                process.wait()
        lines = log.read_text().splitlines()
        steps = [step for step in map(parse_step, lines) if step]
        fell_back += any("the last save was interrupted" in line for line in lines)
        assert steps[0].iteration > saved - 2 and steps[0].iteration >= reached - 1, kill
        reached = steps[0].iteration
        for step in steps[2:]:  # stock logs the mean of a resumed run's first two losses
            seen = step.loss, step.grad_norm
            assert printed.setdefault(step.iteration, seen) == seen, (kill, step.iteration)
    whole = run_megatron(1, [*TINY_GPT, *FLAGS.split(), "--exit-interval", str(reached)], timeout=600)
    for step in whole.steps:
        assert printed.get(step.iteration, (step.loss, step.grad_norm)) == (step.loss, step.grad_norm)
    print(f"{KILLS} kills, {reached} iterations, {fell_back} interrupted saves passed over")


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}


def _until_training(process, log) -> None:
    deadline = time.monotonic() + 120
    while not any(map(parse_step, log.read_text().splitlines())):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)
