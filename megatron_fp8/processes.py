"""Starts and stops child processes: a training run under torchrun, which is stopped with all its descendants.

Also makes the children of Python's multiprocessing end when their parent is killed. torchrun listens on this machine
alone (loopback.py).
"""

import contextlib
import functools
import multiprocessing.process
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

LAUNCHER = sys.executable, "-m", "megatron_fp8.loopback", "--nproc-per-node", "{processes}"
_PATIENCE = 10  # seconds that a terminated run has to end by itself
_WAIT = 0.5  # seconds to wait for output; a signal is noticed after so long
_TAIL = 25  # lines of output to show of a run that failed
_REPORTED = re.compile(r"^  exitcode  : (-?\d+) \(pid: ", re.MULTILINE)
_MOST = 1 << 20  # bytes read at once; more than a pipe holds, so that one read gets all that an ended run left


def identity(pid: int) -> str:
    """A process' id and start time; no later process has the same."""
    return f"{pid}:{_born(pid)}"


def _born(pid: int) -> str:
    """The start time in clock ticks since the machine's start, field 22 of stat. Setting the clock does not change it.

    Raises OSError if there is no such process.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()


def living(identity_: str | None) -> psutil.Process | None:
    """The process with this `identity` on this machine, or None if it has ended."""
    pid, _, born = (identity_ or "").partition(":")
    with contextlib.suppress(psutil.NoSuchProcess, ValueError, OverflowError, OSError):
        process = psutil.Process(int(pid))
        if _born(int(pid)) == born and _lives(process):
            return process
    return None


def _lives(process: psutil.Process) -> bool:
    """Whether the process has not ended. A zombie has ended; in a container without an init, zombies stay."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def stop(process: psutil.Process) -> None:
    """End a process and all its descendants: by SIGTERM to the process, and after some seconds by SIGKILL to all."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.terminate()  # torchrun then ends its workers
        left = _left_of(family)
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        _left_of(left)


def _left_of(family: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Wait some seconds for all to end; return those that have not."""
    deadline = time.monotonic() + _PATIENCE
    while (left := [member for member in family if _lives(member)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def end_children_with_parent(start: Callable) -> Callable:
    """Replaces multiprocessing.process.BaseProcess.start: children, spawned or forked, end if this process has ended.

    A process that is killed does not end its children: a manager, or a worker that waits for its next task, would live
    for ever. So the children check once a second whether this process lives. The kernel's own signal (prctl) would
    already come when the thread that started them ends. A resource tracker needs no check: it ends with its last user.
    """

    @functools.wraps(start)
    def start_and_watch(self):
        if self._target is not None:
            self._target = functools.partial(_run_watched, identity(os.getpid()), self._target)
        start(self)

    return start_and_watch


def _run_watched(parent: str, target: Callable, /, *args, **kwargs) -> None:
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    target(*args, **kwargs)


def _end_after(parent: str) -> None:
    while living(parent):  # os.getppid() would be wrong: a fork server may be the parent
        time.sleep(1)
    if folder := multiprocessing.process.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)  # it holds a manager's socket
    os._exit(1)


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that this process closes its runs before it ends.

    Runs in a session of their own do not get these signals. A signal that is ignored, as under nohup, stays ignored.
    """
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class TorchRun:
    """A command that runs under torchrun and prints into a log file.

    Args:
        command: a script, or -m and a module, and its flags.
        processes: number of processes, all on this machine.
        log: file for everything that they print; a missing folder is created.
        environment: variables to add to this process' environment.
        folder: working directory; None: the current one.
        own_session: a Ctrl-C at the terminal goes to the parent alone, which must then close the run.

    Attributes:
        silent: whether its output has ended.
        started: time.monotonic() at its start.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        log: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
        own_session: bool = False,
    ):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.silent, self.started = False, time.monotonic()
        self._log, self._rest, self._tail = log.open("wb"), b"", deque[str](maxlen=8 * _TAIL)
        self._process = subprocess.Popen(
            [*(word.replace("{processes}", str(processes)) for word in LAUNCHER), *command],
            cwd=folder,
            env={"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def fileno(self) -> int:
        """The output's file descriptor, for select."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def lines(self) -> list[str]:
        """Lines printed since the last call. Only the very last line may be incomplete.

        One call reads a limited amount, so that a run that prints without end does not block the caller.
        """
        text = b""
        with contextlib.suppress(BlockingIOError):
            while not self.silent and len(text) < _MOST:
                part = os.read(self.fileno(), 1 << 16)
                text += part
                self.silent = not part
        self._log.write(text)
        self._log.flush()
        *whole, self._rest = (self._rest + text).split(b"\n")
        if self.silent and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        lines = [line.decode(errors="replace").rstrip("\r") for line in whole]
        self._tail.extend(lines)
        return lines

    def poll(self) -> int | None:
        """The exit code (negative: minus the signal's number), or None while the run lasts.

        Call it before `lines`: if the run has ended, `lines` then returns the rest of its output.
        """
        return self._process.poll()

    def first_code(self) -> int | None:
        """`poll` of the process that failed first, if torchrun's report at the end of the output says which."""
        found = _REPORTED.findall("\n".join(self._tail))  # the root cause is the report's last
        return int(found[-1]) if found and self.poll() else self.poll()

    def wait(self) -> None:
        """Wait up to half a second for output, or for the run's end."""
        if self.silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_WAIT)
        else:
            select.select([self], [], [], _WAIT)

    def late(self, timeout: float | None) -> bool:
        """Whether it has run for more than `timeout` seconds; False for None."""
        return timeout is not None and time.monotonic() - self.started > timeout

    def end(self) -> str:
        """The last lines that the command printed, without torchrun's own."""
        return last_words([*self._tail, *filter(None, [self._rest.decode(errors="replace")])])

    def close(self) -> None:
        """Stop the run if it has not ended, and close its log."""
        if self._process.poll() is None:
            stop(psutil.Process(self._process.pid))
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


def last_words(lines: Sequence[str]) -> str:
    """The last lines before torchrun's own report of a failure; that report does not tell the cause."""
    own = (i for i, line in enumerate(lines) if "torch/distributed/elastic/multiprocessing/api.py" in line)
    return "\n".join(lines[: next(own, len(lines))][-_TAIL:])
