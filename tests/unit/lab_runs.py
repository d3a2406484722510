"""Sweeps for tests: a training script that only logs numbers, like the plugin, and plans that run it."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from megatron_fp8.tools.lab import main
from megatron_fp8.tools.lab.sweep.plan_file import SweepPlan

ROOT = Path(__file__).resolve().parents[2]
# Behaves like the plugin: FILE exists from the start, and gets a line for each call.
LOGS = """
import json, os

def log(step=None, **values):
    with open(os.environ["MEGATRON_FP8_METRICS"], "a") as file:
        file.write(json.dumps(values if step is None else {"step": step, **values}) + "\\n")

open(os.environ["MEGATRON_FP8_METRICS"], "a").close()
"""
# A run depends on its flags alone. --begun FILE gets a line for each run that begins. With --gate FILE, runs of other
# seeds than 1 stop half-way, add a line to FILE.waiting, and continue when FILE exists.
TRAINING = (
    LOGS
    + """
import argparse, math, random, sys, time

parser = argparse.ArgumentParser()
for flag in ("--lr", "--gap", "--sleep"):
    parser.add_argument(flag, type=float, default=0.0)
for flag in ("--seed", "--train-iters", "--hang-at", "--nan-at", "--fail-at", "--stop-at"):
    parser.add_argument(flag, type=int, default=0)
parser.add_argument("--diverge", type=int, nargs="*", default=[])
parser.add_argument("--begun")
parser.add_argument("--gate")
args, _ = parser.parse_known_args()
if args.begun:
    with open(args.begun, "a") as file:
        file.write(f"{os.getpid()} {args.seed} {args.gap} {args.lr}\\n")
data = random.Random(args.seed)
own = random.Random(f"{args.seed} {args.gap} {args.lr}")
for step in range(1, args.train_iters + 1):
    loss = 2 + 3 * math.exp(-step * args.lr) + args.gap + 0.02 * data.gauss(0, 1) + 0.005 * own.gauss(0, 1)
    sharpness = 0.1 + 0.002 * own.gauss(0, 1)
    if args.seed in args.diverge:
        sharpness += 0.01 * max(0, step - 30)
        loss += 0.2 * max(0, step - 60)
    if step == args.fail_at:
        sys.exit("the cause")
    if step == args.nan_at:
        sys.exit("RuntimeError: Rank 0, node a, iteration 7: Unexpected result nan (message='found NaN in local')")
    if step == args.stop_at:
        sys.exit()
    if step == args.hang_at:
        time.sleep(600)
    if args.gate and args.seed != 1 and step == args.train_iters // 2:
        with open(f"{args.gate}.waiting", "a") as file:
            file.write("here\\n")
        while not os.path.exists(args.gate):
            time.sleep(0.05)
    time.sleep(args.sleep)
    log(step, elapsed_time_per_iteration_ms=20 * own.uniform(0.9, 1.1), loss=loss, grad_norm=own.uniform(0.5, 1))
    print("step", step, flush=True)
    if step % 5 == 0:
        log(step, sharpness_mean=sharpness, log_z_mean=7 + sharpness)
log(step, validation_loss=loss + 0.1)
"""
)
# The lab's command line, with runs started directly: torchrun takes seconds to do so.
LAB = """
import argparse, sys
from megatron_fp8.flags.usage import one_line_errors
from megatron_fp8 import processes
import psutil
from megatron_fp8.tools.lab import main
from megatron_fp8.tools.lab.sweep import main as sweep
processes.LAUNCHER = (sys.executable,)
sweep._BEAT = 0.2
parser = argparse.ArgumentParser()
main.add_arguments(parser)
with one_line_errors():
    sys.exit(main.run(parser.parse_args()))
"""
PLAN = """
command: train.py --lr 0.1
steps: 100
seeds: 3
arms:
  BF16: ""
  E8M3: --gap 0.05
"""


def write(folder: Path, plan: str = PLAN) -> None:
    """Put the script and plan.yaml into a folder."""
    (folder / "train.py").write_text(TRAINING)
    (folder / "plan.yaml").write_text(plan)


def small_plan(seeds=(1, 2), arms=("BF16", "E8M3"), steps=10, flags=()) -> SweepPlan:
    """A plan for a store in which nothing runs: two learning rates."""
    words = ("train.py", "--lr", "1e-3", *flags)
    return SweepPlan(words, steps, seeds, {arm: () for arm in arms}, (1e-3, 3e-3), {"d": ()})


def lab(folder: Path, *argv: str, **options) -> subprocess.Popen:
    """Start `megatron-fp8 lab ARGV` in a folder, with its output as text in stdout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", LAB, *argv], cwd=folder, env=environment, **pipes, **options)


def done(folder: Path, *argv: str, code: int = 0) -> str:
    """Run `megatron-fp8 lab ARGV` to its end. Returns its output."""
    process = lab(folder, *argv)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == code, output
    return output


def reports(folder: Path) -> dict[str, str]:
    """The files of `lab report` for sweep.sqlite, by name; runs.* may differ from sweep to sweep."""
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    assert main.run(parser.parse_args(["report", str(folder / "sweep.sqlite"), "--out", str(folder / "out")])) == 0
    files = sorted(path for path in (folder / "out").rglob("*") if path.is_file())
    return {str(path.relative_to(folder / "out")): path.read_text() for path in files}


def gone(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not waited for it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], bool], seconds: float = 250) -> None:
    """Wait until a condition holds; a busy machine may take long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
