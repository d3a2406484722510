"""Run a training script and read what it prints, for the demo and the tests: under torchrun, or forked."""

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_fp8.lab.sweep.runner import LOSS, STEP_MS, VALIDATION_LOSS, read_line

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Step:
    """What Megatron logs of an iteration (--log-interval 1)."""

    iteration: int
    loss: float  # nan, as the norm, where the iteration was skipped
    grad_norm: float
    skipped: int  # 1 where the iteration was skipped
    milliseconds: float


def parse_step(line: str) -> Step | None:
    """The iteration that a line of Megatron's log reports, if it is such a line."""
    iteration, found = read_line(line) or (0, {})
    if STEP_MS not in found:
        return None
    norm, skipped = found.get("grad_norm", float("nan")), int(found["number_of_skipped_iterations"])
    return Step(iteration, found[LOSS], norm, skipped, found[STEP_MS])


def parse_validation(line: str) -> float | None:
    """The loss in a line of Megatron's log that reports an evaluation, if it is such a line."""
    return (read_line(line) or (0, {}))[1].get(VALIDATION_LOSS)


class RunFailed(RuntimeError):
    """A run that ended with an error or ran out of time; `code` is its exit code (negative: the signal)."""

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
        log: file for everything that the processes print.
        timeout: seconds, after which every process of the run is killed.
        env: variables to set beside those of this process.
        on_line: called with every line as it comes.

    Returns the lines printed. Raises RunFailed, with the end of the output and the name of the log.
    """
    # --standalone finds a free port by itself; the default host name need not be one that resolves.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    log.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, *launcher, "--nproc-per-node", str(nproc), *command],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    timed_out = threading.Event()

    def give_up() -> None:
        timed_out.set()
        _kill_family(process)

    timer = threading.Timer(timeout, give_up)
    timer.start()
    lines: list[str] = []
    try:
        with log.open("w") as file:
            for line in process.stdout or ():
                file.write(line)
                file.flush()
                lines.append(line.rstrip("\n"))
                if on_line is not None:
                    on_line(lines[-1])
        code = process.wait()
    finally:
        timer.cancel()
        _kill_family(process)  # if it still runs: this process was interrupted
    if timed_out.is_set():
        raise RunFailed(f"killed after {timeout:.0f} s\n{_end(lines)}\nfull log: {log}", code)
    if code != 0:
        raise RunFailed(f"exit code {code}\n{_end(lines)}\nfull log: {log}", code)
    return lines


@functools.cache
def _warm_server() -> socket.socket:
    """Of this process, started at the first use."""
    ours, its = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools/warm_server.py"), str(its.fileno())],
        pass_fds=[its.fileno()],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    its.close()

    def close() -> None:
        ours.close()
        process.wait(60)

    atexit.register(close)
    if ours.recv(16) != b"ready\n":
        raise RuntimeError("the warm server did not start; what it said is above")
    return ours


def forked(
    nproc: int,
    command: list[str],
    log: Path,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> list[str]:
    """As `torchrun`, without a GPU, in ranks that are forked from a warm process: seconds sooner."""
    log.parent.mkdir(parents=True, exist_ok=True)
    output, written = os.pipe()
    ended, ending = os.pipe()
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, **(env or {})}
    request = {"count": nproc, "command": command, "env": environment, "cwd": str(ROOT), "timeout": timeout}
    try:
        socket.send_fds(_warm_server(), [json.dumps(request).encode()], [written, ending])
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
            raise
    if code:
        raise RunFailed(f"exit code {code}\n{_end(lines)}\nfull log: {log}", code)
    return lines


def _kill_family(process: subprocess.Popen) -> None:
    """Kill a process and all that descend from it; torchrun gives each worker its own process group."""
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        for member in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def _end(lines: list[str], count: int = 25) -> str:
    """The last lines before torchrun's own report of the failure, which says nothing of its cause."""
    own = (i for i, line in enumerate(lines) if "torch/distributed/elastic/multiprocessing/api.py" in line)
    return "\n".join(lines[: next(own, len(lines))][-count:])
