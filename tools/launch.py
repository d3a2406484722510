"""Runs a training script for the demo and the tests, under torchrun or in forked ranks, and parses its log.

The lab reads numbers from a file (megatron_fp8/metrics.py). Here Megatron's printed lines are parsed: tests compare
them with those of runs that have no plugin or are killed.
"""

import atexit
import contextlib
import functools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_fp8.processes import TorchRun, last_words

ROOT = Path(__file__).resolve().parent.parent
_STEP = re.compile(r"\biteration +(\d+)/ *\d+ \|")
_EVALUATION = re.compile(r" validation\S* loss at iteration \d+(?: on validation set)? \|")


@dataclass(frozen=True)
class Step:
    """Megatron's log line of an iteration (--log-interval 1)."""

    iteration: int
    loss: float  # loss and norm are nan if the iteration was skipped
    grad_norm: float
    skipped: int  # 1 if the iteration was skipped
    milliseconds: float


def parse_step(line: str) -> Step | None:
    """The iteration in a line of Megatron's log; None for any other line."""
    match = _STEP.search(line)
    if match is None:
        return None
    found = _fields(line[match.end() :])
    skipped = int(found["number of skipped iterations"])
    loss = found.get("lm loss", math.nan)
    if skipped and not loss:
        loss = math.nan
    milliseconds = found["elapsed time per iteration (ms)"]
    return Step(int(match[1]), loss, found.get("grad norm", math.nan), skipped, milliseconds)


def parse_validation(line: str) -> float | None:
    """The loss in a line of Megatron's log about an evaluation; None for any other line."""
    match = _EVALUATION.search(line)
    return _fields(line[match.end() :]).get("lm loss value", math.nan) if match else None


def _fields(text: str) -> dict[str, float]:
    """{name: value} of a text with parts "name: value |"."""
    found = {}
    for part in text.split("|")[:-1]:  # another process's line may follow
        name, _, value = part.rpartition(":")
        with contextlib.suppress(ValueError):
            found[name.strip()] = float(value)
    return found


class RunFailed(RuntimeError):
    """A run ended with an error or exceeded its timeout. code: its exit code (negative: the signal)."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def torchrun(
    nproc: int,
    command: list[str],
    log: Path,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> list[str]:
    """Run `command` (a script and its flags, or -m and a module) in `nproc` processes of this machine.

    Args:
        log: file for all output of the processes.
        timeout: seconds until every process of the run is killed.
        env: variables to set in addition to this process's.
        on_line: called with every line as it is printed.

    Returns the printed lines. Raises RunFailed, with the end of the output and the name of the log.
    """
    lines: list[str] = []
    run = TorchRun(command, nproc, log, env or {}, folder=ROOT)
    with contextlib.closing(run):
        code = None
        while code is None and not run.late(timeout):
            run.wait()
            code = run.poll()
            for line in run.lines():
                lines.append(line)
                if on_line is not None:
                    on_line(line)
    if code is None:
        raise RunFailed(f"killed after {timeout:.0f} s\n{last_words(lines)}\nfull log: {log}", -signal.SIGKILL)
    if code != 0:
        raise RunFailed(f"exit code {code}\n{last_words(lines)}\nfull log: {log}", code)
    return lines


@functools.cache
def warm_server(gpus: bool) -> socket.socket:
    """This process's warm server, started at the first use. gpus: the one whose runs see this machine's GPUs."""
    ours, its = socket.socketpair()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools/warm_server.py"), str(its.fileno()), *["--gpus"] * gpus],
        pass_fds=[its.fileno()],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    )
    its.close()

    def close() -> None:
        ours.close()
        process.wait(60)

    atexit.register(close)
    if ours.recv(16) != b"ready\n":
        raise RuntimeError("the warm server did not start; its output is above")
    return ours


def forked(
    nproc: int,
    command: list[str],
    log: Path,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    gpus: bool = False,
) -> list[str]:
    """Like `torchrun`, but in ranks forked from a warm process: it starts seconds sooner. gpus: the ranks see them."""
    log.parent.mkdir(parents=True, exist_ok=True)
    output, written = os.pipe()
    ended, ending = os.pipe()
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, **(env or {})}
    request = {"count": nproc, "command": command, "env": environment, "cwd": str(ROOT), "timeout": timeout}
    try:
        socket.send_fds(warm_server(gpus), [json.dumps(request).encode()], [written, ending])
    finally:
        os.close(written)
        os.close(ending)
    lines: list[str] = []
    with os.fdopen(ended) as result, os.fdopen(output, errors="replace") as printed, log.open("w") as file:
        supervisor = int(result.readline())
        try:
            for line in printed:
                file.write(line)
                file.flush()
                lines.append(line.rstrip("\n"))
                if on_line is not None:
                    on_line(lines[-1])
            code = int(result.readline())
        except BaseException:  # this process was interrupted
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor, signal.SIGTERM)
                result.readline()  # wait until all of the run's processes have ended
            raise
    if code:
        raise RunFailed(f"exit code {code}\n{last_words(lines)}\nfull log: {log}", code)
    return lines
