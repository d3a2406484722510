"""`megatron-fp8 lab sweep PLAN.yaml --store FILE`: train the plan's runs, as many at once as fit.

    megatron-fp8 lab sweep plan.yaml --store sweep.sqlite                 on this machine
    megatron-fp8 lab sweep plan.yaml --store sweep.sqlite --jobs 4        four runs at once
    megatron-fp8 lab sweep plan.yaml --store sweep.sqlite --minutes 20    as many runs as fit into the time
    megatron-fp8 lab sweep plan.yaml --store sweep.sqlite --arms BF16 O1  the runs of these arms alone
    megatron-fp8 lab sweep plan.yaml --store sweep.sqlite --slurm print --sbatch="--gpus=1 --time=4:00:00"

If the sweep ends for any reason (Ctrl-C, a lost connection, a power cut), the same command continues it: finished runs
stay finished, and an interrupted run starts over. You may add runs to the plan. Several sweeps may work on one store at
once. A task of a Slurm array is such a sweep with one job; it takes runs until none waits. Slurm's nodes need the
store, the data and this environment at the same paths; a run stays on one node.

By default as many runs train at once as the machine has GPUs, or processors, for their processes. With more runs, GPUs
are shared. Each process has one thread unless OMP_NUM_THREADS says otherwise. Logs are in FILE's name with .runs
instead of its suffix.
"""

import contextlib
import math
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .... import __version__
from ....errors import UserError
from ....flags import sbatch
from ....flags.flag import whole_number
from ....metrics import LOSS
from .orphans import end_left_behind, mark
from .plan_file import ELSEWHERE, SweepPlan, flag_value, read_plan, split_words
from .progress import Progress
from .rows import DONE, FAILED, NOT_FINITE, RUNNING, WAITING, Row
from .runner import NOT_LOADED, Training
from .store import Store, TakenAway

_BEAT = 5.0  # seconds between two looks at the store, and between two writes to it for a run
_WAIT = 0.5  # seconds to wait for output, after which a signal is noticed
_MOST_TASKS = 1000  # Slurm's default limit for an array
_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_INTERRUPTED = 130  # a shell's exit code for Ctrl-C


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 lab sweep`."""
    parser.add_argument("plan", help="the plan; docs/lab.md lists its keys")
    parser.add_argument("--store", required=True, help="SQLite file of the runs and curves; made if it is missing")
    parser.add_argument("--jobs", type=int, help="runs at once, or with --slurm tasks (default: what fits; all runs)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many; begin only what should fit")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="run these arms alone (default: all of the plan)")
    parser.add_argument("--retry-failed", action="store_true", help="run failed runs again")
    parser.add_argument("--slurm", choices=("print", "submit"), help="print a job array's script, or submit it")
    parser.add_argument("--sbatch", default="", metavar="OPTIONS", help='Slurm options of a task: --sbatch="--gpus=1"')


def run(args: Namespace) -> int:
    """Run a sweep. Returns 0 if all runs have ended well, 1 if some failed, 130 if interrupted."""
    plan = read_plan(args.plan)
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: use 1 or more")
    if not args.minutes > 0:
        raise UserError(f"--minutes {args.minutes:g}: use a number above 0")
    if args.slurm and args.minutes < math.inf:
        raise UserError(f"--minutes {args.minutes:g}: has no effect with --slurm; give the tasks a --time in --sbatch")
    for arm in args.arms or ():
        if arm not in plan.arms:
            raise UserError(f"--arms {arm}: no arm of {args.plan}; it has {', '.join(plan.arms)}")
    split_words("--sbatch", args.sbatch)
    sbatch.check_options(args.sbatch)
    if args.sbatch and not args.slurm:
        raise UserError(f"--sbatch {args.sbatch!r}: has an effect only with --slurm; add that, or remove it")
    if args.slurm:
        for what, path in (("--store", Path(args.store).resolve()), ("the current folder", Path.cwd())):
            sbatch.check_path(what, path)
    script = plan.command[0]
    if script != "-m" and not Path(script).is_file():
        raise UserError(f"{args.plan}: command: {script}: no such script here; {ELSEWHERE}")
    store = Store(args.store, create=True, shared=bool(args.slurm))
    try:
        end_left_behind(store.path)
        store.recover()
        store.add(plan, args.arms)
        if args.retry_failed:
            store.retry(args.arms)
        if args.slurm:
            return _slurm(args, store)
        jobs = args.jobs or _fitting(plan.processes)
        return _Sweep(store, plan, jobs, _gpus(plan.processes), 60 * args.minutes, args.arms).run()
    finally:
        store.close()


def _gpus(processes: int) -> list[str]:
    """This machine's GPUs, named as in CUDA_VISIBLE_DEVICES; raises UserError if a run needs more."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    import torch

    count = torch.cuda.device_count()
    if 0 < count < processes:
        raise UserError(f"processes: {processes}: this machine has {count} GPUs; use fewer, or CUDA_VISIBLE_DEVICES=''")
    return visible.split(",")[:count] if visible else [str(i) for i in range(count)]


def _fitting(processes: int) -> int:
    """How many runs fit on this machine's GPUs, or processors if it has none."""
    return max(1, (len(_gpus(processes)) or len(os.sched_getaffinity(0))) // processes)


def code_version() -> str:
    """The commit of the current folder, with "-dirty" if files were changed; else the installed version."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return f"megatron_fp8 {__version__}"


@dataclass
class _Active:
    """A run in progress, its place, and the points not yet written to the store."""

    row: Row
    training: Training
    place: int
    points: list[tuple[int, str, float]] = field(default_factory=list)
    written: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.monotonic)


class _Sweep:
    """seconds: the time that there is. No run begins if the longest one of this sweep would not end in it; what still
    runs at its end waits again.  arms: whose runs are counted; those that the store gives out."""

    def __init__(
        self,
        store: Store,
        plan: SweepPlan,
        jobs: int,
        gpus: list[str],
        seconds: float = math.inf,
        arms: Sequence[str] | None = None,
    ):
        self.store, self.plan, self.gpus, self.arms = store, plan, gpus, arms
        self.end, self.longest, self.spent = time.monotonic() + seconds, 0.0, False
        self.folder = store.path.resolve().with_suffix(".runs")
        self.places = list(range(jobs))[::-1]  # the free ones
        self.active: list[_Active] = []
        self.stopping = False
        self.look_again = 0.0  # when to look for waiting runs again, after there were none
        self.counts, self.counted = store.counts(arms), time.monotonic()
        self.code = code_version()

    def run(self) -> int:
        """Work until no run waits, the time is spent, or a signal comes."""
        under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [number for number in _SIGNALS if number != signal.SIGHUP or not under_nohup]
        before = {number: signal.signal(number, self._stop) for number in heard}
        try:
            with Progress() as progress:
                while not self.stopping and (self._start() or self.active):
                    self._follow(progress)
                    self._show(progress)
                    if time.monotonic() >= self.end:
                        self.spent = True
                        break
                if self.stopping or (self.spent and self.active):
                    progress.say(f"stopping {len(self.active)} runs; the same command continues")
        except BrokenPipeError:  # the reader of this output has gone, such as head
            raise
        except OSError as error:  # such as no space for a run's folder or log
            raise UserError(f"{self.folder}: {error.strerror}; mend that, and the same command continues") from None
        finally:
            self._abandon()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._conclude()

    def _stop(self, number, frame) -> None:
        # Do not raise: an exception could come between a run's start and its entry in the list.
        self.stopping = True

    def _start(self) -> bool:
        """Start waiting runs while there are free places. Returns whether one was started."""
        started = False
        while self.places and not self.stopping and time.monotonic() >= self.look_again:
            if time.monotonic() + self.longest >= self.end:
                self.spent = True
                break
            row = self.store.claim(self.code)
            if row is None:
                self.look_again = time.monotonic() + _BEAT
                break
            if row.attempt > 1:  # the run of a sweep that died, perhaps after this one began
                end_left_behind(self.store.path)
            place = self.places.pop()
            folder = self.folder / _folder_name(row)
            command = (*row.command, *self.plan.faster.get(row.arm, ()))
            training = Training(command, self.plan.processes, folder, self._environment(place))
            self.active.append(_Active(row, training, place))
            started = True
        return started

    def _environment(self, place: int) -> dict[str, str]:
        ours = mark(self.store.path)
        if self.gpus:
            first, count = place * self.plan.processes, self.plan.processes
            gpus = (self.gpus[i % len(self.gpus)] for i in range(first, first + count))
            ours["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return ours

    def _follow(self, progress: Progress) -> None:
        """Wait a moment for output, read it, and handle the runs that have ended."""
        open_ = [active.training for active in self.active if not active.training.silent]
        if open_:
            select.select(open_, [], [], _WAIT)
        else:
            self.active[0].training.wait()  # all are silent, so wait for an end
        for active in list(self.active):
            code = active.training.poll()  # before reading, so that the read includes all output until the end
            for step, values in active.training.read():
                active.points += [(step, name, value) for name, value in values.items()]
            now = time.monotonic()
            try:
                if code is not None or active.training.late(self.plan.timeout):
                    self._finish(active, code, progress)
                elif now - active.written > _BEAT:
                    self._write(active)
            except TakenAway as error:
                progress.say(str(error))
                self._remove(active)

    def _write(self, active: _Active) -> None:
        self.store.write(active.row, active.points)
        active.points, active.written = [], time.monotonic()

    def _finish(self, active: _Active, code: int | None, progress: Progress) -> None:
        """Write an ended run to the store. code: its exit code; None if it ran out of time."""
        row, training = active.row, active.training
        self._write(active)
        error = None
        if code == 0 and training.last > self.plan.steps - _interval(row) and LOSS in self.store.series(row.id):
            state = DONE
            self.longest = max(self.longest, time.monotonic() - active.began)
        elif training.not_finite:
            state, error = NOT_FINITE, training.end()
        else:
            reason = f"exit code {code}" if code else "ended early" if training.loads_plugin else NOT_LOADED
            if code is None:
                reason = f"killed after {self.plan.timeout:g} s"
            state, error = FAILED, f"{reason}, at step {training.last} of {self.plan.steps}\n{training.end()}"
        self.store.finish(row, state, code, error)
        self.counted = 0.0  # the counts are out of date
        self._remove(active)
        said = {DONE: "done", NOT_FINITE: "ended by itself: not finite"}.get(state, f"FAILED: {(error or '').strip()}")
        progress.say(f"{row.name}: {said}")

    def _remove(self, active: _Active) -> None:
        active.training.close()
        self.places.append(active.place)
        self.active.remove(active)

    def _abandon(self) -> None:
        """Stop the runs in progress, and let them wait again.

        Every run is stopped, even if the store cannot be written. A run that the store still calls running then belongs
        to a dead worker.
        """
        for active in list(self.active):
            with contextlib.suppress(OSError):
                self._remove(active)
            with contextlib.suppress(TakenAway, UserError):
                self.store.release(active.row)

    def _show(self, progress: Progress) -> None:
        if time.monotonic() - self.counted > _BEAT:
            self.counts, self.counted = self.store.counts(self.arms), time.monotonic()
        counts = self.counts
        ended = counts[DONE] + counts[FAILED] + counts[NOT_FINITE]
        steps = ended * self.plan.steps + sum(min(a.training.last, self.plan.steps) for a in self.active)
        runs = sum(counts.values())  # another sweep may have added some
        text = f"{ended}/{runs} runs, {len(self.active)} running"
        progress.update(steps, runs * self.plan.steps, text + (f", {counts[FAILED]} failed" if counts[FAILED] else ""))

    def _conclude(self) -> int:
        counts = self.store.counts(self.arms)
        print(", ".join(f"{count} {state}" for state, count in counts.items() if count), flush=True)
        if counts[RUNNING]:
            print("the running ones belong to another sweep", flush=True)
        if counts[WAITING] and self.spent:
            print("the time is spent: the same command goes on")
        elif counts[WAITING] and not self.stopping:
            print("the waiting ones are not in this plan: start a sweep with the plan that has them", flush=True)
        if counts[FAILED]:
            print("failed runs: `megatron-fp8 lab report` shows the ends of their logs; --retry-failed runs them again")
        return _INTERRUPTED if self.stopping else 1 if counts[FAILED] else 0


def _interval(row: Row) -> int:
    """Steps between two lines of the log; 1 if the command gives none. (A value that is no number ends its run.)"""
    return whole_number(flag_value(row.command, "--log-interval") or "") or 1


def _folder_name(row: Row) -> str:
    words = f"{row.id:04} {row.arm[:60]} {row.learning_rate:g} {row.data[:60]} {row.seed}"  # at most 255 bytes
    return re.sub(r"[^\w.+-]+", "-", words, flags=re.ASCII)


def _slurm(args: Namespace, store: Store) -> int:
    """Print or submit the script of a job array whose tasks work on the store."""
    waiting = store.counts(args.arms)[WAITING]
    tasks = min(args.jobs or waiting, _MOST_TASKS)
    if not tasks:
        remedy = "--retry-failed runs failed ones again"
        raise UserError(f"--slurm {args.slurm}: no run of {args.store} waits, nothing to submit; {remedy}")
    script = slurm_script(Path(args.plan).resolve(), store.path.resolve(), tasks, args.sbatch, args.arms or ())
    if args.slurm == "print":
        print(script, end="")
        return 0
    try:
        return subprocess.run(["sbatch"], input=script, text=True).returncode
    except FileNotFoundError:
        line = "--slurm submit: no sbatch here; use --slurm print, and submit it on a machine that has sbatch"
        raise UserError(line) from None


def slurm_script(plan: Path, store: Path, tasks: int, options: str, arms: Sequence[str] = ()) -> str:
    """The script of a job array of `tasks` sweeps with one job each. Paths are absolute; options are sbatch's; arms:
    the only ones that run, or () for all."""
    folder = store.with_suffix(".runs")
    folder.mkdir(exist_ok=True)  # Slurm opens its output files there
    directives = [
        f'--job-name="{store.stem}"',
        f"--array=0-{tasks - 1}",
        "--nodes=1",
        "--ntasks=1",
        f'--chdir="{Path.cwd()}"',
        sbatch.output(folder, "slurm-%A_%a.txt"),
        "--signal=B:TERM@60",  # a minute before the time limit, so that the run can be released
        *([options] if options else []),
    ]
    sweep = ["megatron_fp8.cli", "lab", "sweep", str(plan), "--store", str(store), "--jobs", "1"]
    sweep += ["--arms", *arms] if arms else []
    command = shlex.join([sys.executable, "-m", *sweep])
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in directives), f"exec {command}"]) + "\n"
