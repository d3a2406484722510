"""End the processes that a killed sweep has left behind. They carry a mark in their own environment.

A run's processes inherit an environment variable with three parts: the PID namespace, the sweep's own process, and the
file of its store. A sweep of the same store ends processes with the mark of a sweep that no longer lives. The store
itself is not asked: another user who can write to it could name any process of this user.
"""

import os
from pathlib import Path

import psutil

from ....processes import identity, living, stop

MARK = "MEGATRON_FP8_SWEEP"


def mark(store: Path) -> dict[str, str]:
    """The environment variable for the runs of a store that this process starts."""
    return {MARK: f"{_namespace()} {identity(os.getpid())} {store.resolve()}"}


def end_left_behind(store: Path) -> None:
    """End what dead sweeps of a store have left running on this machine."""
    file, here = str(store.resolve()), _namespace()
    found = {}
    for process in psutil.process_iter():
        try:
            namespace, sweep, its_file = process.environ().get(MARK, "").split(" ", 2)
        except (psutil.Error, OSError, ValueError):  # it is another user's, has ended, or has no mark
            continue
        if (namespace, its_file) == (here, file) and living(sweep) is None:
            found[process.pid] = process
    for process in found.values():
        try:
            if process.ppid() in found:
                continue  # it ends with its parent; the launcher is ended first and then ends its ranks cleanly
        except psutil.Error:
            continue
        stop(process)


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
