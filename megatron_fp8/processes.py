"""Child processes that are stopped with all that descends from them; a training run as one, under torchrun, which
listens on this machine alone (loopback.py); and Python's multiprocessing, whose children end when their parent is
killed."""

import contextlib
import functools
import multiprocessing.process
import os
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
_PATIENCE = 10  # seconds for a run to end by itself when asked to
_WAIT = 0.5  # seconds to wait for output, and for a signal to be noticed
_TAIL = 25
_MOST = 1 << 20  # bytes read at once; more than a pipe holds, so that of a run that has ended nothing is left


def identity(pid: int) -> str:
    """A process' number and birth: what no later process has."""
    return f"{pid}:{_born(pid)}"


def _born(pid: int) -> str:
    """Clock ticks since the machine's start, field 22 of stat: a step of the clock leaves them as they are. Raises
    OSError without such a process."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()


def living(identity_: str | None) -> psutil.Process | None:
    """The process of an `identity` of this machine, if it still lives."""
    pid, _, born = (identity_ or "").partition(":")
    with contextlib.suppress(psutil.NoSuchProcess, ValueError, OverflowError, OSError):
        process = psutil.Process(int(pid))
        if _born(int(pid)) == born and _lives(process):
            return process
    return None


def _lives(process: psutil.Process) -> bool:
    """Whether it has not ended; one that no process has waited for, as in a container without an init, has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def stop(process: psutil.Process) -> None:
    """End a process and all that descend from it: politely, and after some seconds for good."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.terminate()  # torchrun then ends its workers
        left = _left_of(family)
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        _left_of(left)


def _left_of(family: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Wait for the end of all, some seconds; those that live even so."""
    deadline = time.monotonic() + _PATIENCE
    while (left := [member for member in family if _lives(member)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def end_children_with_parent(start: Callable) -> Callable:
    """In place of multiprocessing.process.BaseProcess.start: children, spawned or forked, end when this process has.

    Killed, a process ends nothing that it has started: a manager, or a worker that waits for its next task, lives on
    for ever.  They look for it once a second, since the kernel's own signal (prctl) would come when the thread that
    started them ends.  What keeps a resource tracker is its users: it ends with the last.
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
    while living(parent):  # not its own parent, where a server forks for it
        time.sleep(1)
    if folder := multiprocessing.process.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)  # a manager's socket lies there
    os._exit(1)


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Make a signal that ends this process a KeyboardInterrupt, so that it closes its runs: in a session of their own
    they do not get it.  What nohup has turned off stays so."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class TorchRun:
    """A command under torchrun, whose output goes to a log.

    Args:
        command: a script, or -m and a module, and flags.
        processes: so many on this machine.
        log: file for everything that they print; its folder is made if need be.
        environment: variables to set beside those of this process.
        folder: where it runs; None: here.
        own_session: a Ctrl-C at the terminal is not for the run but for its parent, which must then close it.

    Attributes:
        silent: whether it can print no more.
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
        """For select: there is something to read."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def lines(self) -> list[str]:
        """What has been printed since the last call: whole lines, but for the last of all.

        Of a run that prints without end a part, or its reader would never look up, not at a Ctrl-C either.
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
        """The exit code, negative: the signal; None while the run lasts. Ask before reading: all is there then."""
        return self._process.poll()

    def wait(self) -> None:
        """Wait a moment for output, or for the end."""
        if self.silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_WAIT)
        else:
            select.select([self], [], [], _WAIT)

    def late(self, timeout: float | None) -> bool:
        """Whether it has taken more than so many seconds; never with None."""
        return timeout is not None and time.monotonic() - self.started > timeout

    def end(self) -> str:
        """The last lines that it printed itself."""
        return last_words([*self._tail, *filter(None, [self._rest.decode(errors="replace")])])

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


def last_words(lines: Sequence[str]) -> str:
    """The last lines before torchrun's own report of a failure, which says nothing of its cause."""
    own = (i for i, line in enumerate(lines) if "torch/distributed/elastic/multiprocessing/api.py" in line)
    return "\n".join(lines[: next(own, len(lines))][-_TAIL:])
