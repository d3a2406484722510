"""Which processes a sweep that was killed has left behind: those that carry its mark themselves.

A run's processes inherit an environment variable of three parts: the namespace that process numbers are of, the sweep's
own process, and the file of its store. A sweep of the same store ends what bears such a mark of a sweep that no longer
lives. The store is not asked: a user who can write to it could name any process of this user.
"""

import os
from pathlib import Path

import psutil

from ....processes import identity, living, stop

MARK = "MEGATRON_FP8_SWEEP"


def mark(store: Path) -> dict[str, str]:
    """The variable for the runs that this process starts of a store."""
    return {MARK: f"{_namespace()} {identity(os.getpid())} {store.resolve()}"}


def end_left_behind(store: Path) -> None:
    """End what dead sweeps of a store have left running on this machine."""
    file, here = str(store.resolve()), _namespace()
    found = {}
    for process in psutil.process_iter():
        try:
            namespace, sweep, its_file = process.environ().get(MARK, "").split(" ", 2)
        except (psutil.Error, OSError, ValueError):  # another user's, ended, or without a mark
            continue
        if (namespace, its_file) == (here, file) and living(sweep) is None:
            found[process.pid] = process
    for process in found.values():
        try:
            if process.ppid() in found:
                continue  # ends with its parent: the launcher first, which then ends its ranks in peace
        except psutil.Error:
            continue
        stop(process)


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
