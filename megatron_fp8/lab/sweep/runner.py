"""One training run as a child process: started by torchrun, read line by line, stopped with all that descends from it.

What is read of a log is {name: value} at a step:

    Megatron's line of an iteration    every field of it that is a number: "loss" (Megatron's "lm loss"), "grad_norm",
                                       "params_norm", "learning_rate", "number_of_skipped_iterations", ...
    its line of an evaluation          "validation_loss", "test_loss"
    [fp8] iteration N: NAME VALUE ...  the number after each name, of items divided by ; or , ("log Z 7.2" is "log_z")

A loss that Megatron does not print, or prints as 0 for an iteration that it skipped, is NaN.
"""

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

# --standalone finds a free port by itself; the default host name need not be one that resolves.
LAUNCHER = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
    *("--nproc-per-node", "{processes}"),
)
LOSS, VALIDATION_LOSS, STEP_MS = "loss", "validation_loss", "elapsed_time_per_iteration_ms"
_RENAMED = {"lm_loss": LOSS}
_SKIPPED = "number_of_skipped_iterations"
_LEFT_OUT = ("consumed_samples", "global_batch_size")  # known before the run
_STEP = re.compile(r"\biteration +(\d+)/ *\d+ \|")
_EVALUATION = re.compile(r" validation\S* loss at iteration (\d+)(?: on (validation|test) set)? \|")
_OWN = re.compile(r"\[fp8\] iteration (\d+): ")
_JOINED = re.compile(r"(?<!^)(?=\[fp8\] iteration \d)")  # Megatron's lines are not ended in the write that makes them
_ITEM = re.compile(r"([^\d;,][^;,]*?)[ :=]+([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan))(?![\w.])", re.IGNORECASE)
# Megatron's words where it ends a run for such a value; so do pretrain_gpt.py's.
_NOT_FINITE = re.compile(r"Unexpected result (tensor\()?(nan|-?inf)|found (NaN|Inf) in", re.IGNORECASE)
_PATIENCE = 10  # seconds for a run to end by itself when asked to
_TAIL = 25


def read_line(line: str) -> tuple[int, dict[str, float]] | None:
    """(Step, {name: value}) of a line of a training log, as the module's text says; None: there is nothing in it."""
    if match := _STEP.search(line):
        found = _fields(line[match.end() :])
        if found.get(_SKIPPED) and not found.get(LOSS):
            found[LOSS] = math.nan
        found.setdefault(LOSS, math.nan)
        return int(match[1]), {name: value for name, value in found.items() if name not in _LEFT_OUT}
    if match := _EVALUATION.search(line):
        value = _fields(line[match.end() :]).get("lm_loss_value", math.nan)
        return int(match[1]), {f"{match[2] or 'validation'}_{LOSS}": value}  # between two steps it names no set
    if match := _OWN.search(line):
        items = (_ITEM.match(item) for item in re.split(r"[;,] +", line[match.end() :]))
        return int(match[1]), {_slug(item[1]): float(item[2]) for item in items if item}
    return None


def _fields(text: str) -> dict[str, float]:
    """The numbers of "name: value |"."""
    found = {}
    for part in text.split("|")[:-1]:  # another process' line may follow
        name, _, value = part.rpartition(":")
        with contextlib.suppress(ValueError):
            number = float(value)
            found[_RENAMED.get(_slug(name), _slug(name))] = number
    return found


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name.lower()).strip("_")


def identity(pid: int) -> str:
    """A process' number and birth: what no later process has."""
    return f"{pid}:{psutil.Process(pid).create_time():.2f}"


def living(identity_: str | None) -> psutil.Process | None:
    """The process of an `identity` of this machine, if it still lives."""
    pid, _, born = (identity_ or "").partition(":")
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):
        process = psutil.Process(int(pid))
        if abs(process.create_time() - float(born)) < 2 and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def stop(process: psutil.Process) -> None:
    """End a process and all that descend from it: politely, and after some seconds for good."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.terminate()  # torchrun then ends its workers
        _, left = psutil.wait_procs(family, timeout=_PATIENCE)
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(left, timeout=_PATIENCE)


class Training:
    """A run in progress.

    Args:
        command: a script, or -m and a module, and flags; "{run}" in it is replaced by `folder`.
        processes: so many on this machine.
        folder: the run's own. What an earlier attempt left there is deleted; everything that is printed goes to
            log.txt in it.
        environment: variables to set beside those of this process.

    Attributes:
        not_finite: whether it said that it ends for a loss or a gradient that is not finite.
        last: the last step that it reported.
        silent: whether it can write no more.
    """

    def __init__(self, command: Sequence[str], processes: int, folder: Path, environment: Mapping[str, str]):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.not_finite, self.last, self.silent, self.started = False, 0, False, time.monotonic()
        self._log = (folder / "log.txt").open("wb")
        self._rest, self._tail = b"", deque[str](maxlen=8 * _TAIL)
        self._process = subprocess.Popen(
            [word.replace("{processes}", str(processes)) for word in LAUNCHER]
            + [word.replace("{run}", str(folder)) for word in command],
            env={"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal is for the sweep, which then stops its runs
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self.identity = identity(self._process.pid)

    def fileno(self) -> int:
        """For select: there is something to read."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """What has been logged since the last call, by `read_line`."""
        found = []
        for line in self._lines():
            self._tail.append(line)
            self.not_finite |= _NOT_FINITE.search(line) is not None
            for part in _JOINED.split(line):
                if values := read_line(part):
                    self.last = max(self.last, values[0])
                    found.append(values)
        return found

    def _lines(self) -> list[str]:
        text = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.fileno(), 1 << 16):
                text += part
            self.silent = True
        self._log.write(text)
        self._log.flush()
        *lines, self._rest = (self._rest + text).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def poll(self) -> int | None:
        """The exit code, negative: the signal; None while the run lasts."""
        return self._process.poll()

    def end(self) -> str:
        """The last lines before torchrun's own report of a failure, which says nothing of its cause."""
        lines = [*self._tail, *filter(None, [self._rest.decode(errors="replace")])]
        own = (i for i, line in enumerate(lines) if "torch/distributed/elastic/multiprocessing/api.py" in line)
        return "\n".join(lines[: next(own, len(lines))][-_TAIL:])

    def close(self) -> None:
        """Stop the run, if it still lasts, and close its log."""
        if self._process.poll() is None:
            stop(psutil.Process(self._process.pid))
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
