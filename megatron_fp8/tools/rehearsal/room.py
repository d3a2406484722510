"""How many ranks of a rehearsal fit on this machine: by its free memory, or by what a container or a job may take.

A rank of a tiny model takes some 90 MB that it does not share, and 73 threads (measured with 8 and 32 ranks); the
figures below have room for checkpoints and for more process groups. Linux limits a group of processes in files
(cgroups): a container's are those of its root, a Slurm job's those of a folder above the process's own.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RANK_BYTES, RANK_THREADS = 150e6, 80
_MOUNT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# (Limit, use, what of the use in memory.stat is given back if need be), of both versions of cgroups.
_MEMORY = ("memory.max", "memory.current", "inactive_file"), (
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)  # fmt: skip
_THREADS = ("pids.max", "pids.current", None), ("pids.max", "pids.current", None)


@dataclass(frozen=True)
class Room:
    """memory: free bytes. threads: how many more may start; None without a limit."""

    memory: float
    threads: float | None = None

    @property
    def ranks(self) -> int:
        by_memory = int(self.memory / RANK_BYTES)
        return by_memory if self.threads is None else min(by_memory, int(self.threads / RANK_THREADS))

    def __str__(self) -> str:
        """What limits `ranks`: "12 GB are free"."""
        by_threads = self.threads is not None and self.threads / RANK_THREADS < self.memory / RANK_BYTES
        return f"{self.threads:.0f} more threads may start" if by_threads else f"{self.memory / 1e9:.0f} GB are free"


def here() -> Room:
    """The room on this machine, for this process's children."""
    import psutil

    memory = min([psutil.virtual_memory().available, *_left("memory", *_MEMORY)])
    return Room(max(0, memory), max(0, min(left)) if (left := [*_left("pids", *_THREADS)]) else None)


def needs(ranks: int) -> str:
    """What so many ranks take: "128 processes, some 19 GB"."""
    return f"{ranks} processes, some {max(1, ranks * RANK_BYTES / 1e9):.0f} GB"


def _left(controller: str, unified: tuple, older: tuple) -> Iterator[int]:
    """What each limit on this process's groups leaves of a resource."""
    with contextlib.suppress(OSError):
        for line in _OWN.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and controller not in controllers.split(","):
                continue
            root, (limit, use, spare) = (_MOUNT, unified) if number == "0" else (_MOUNT / controller, older)
            own = root / path.strip("/")
            for folder in (own, *own.parents) if own.is_relative_to(root) else ():
                with contextlib.suppress(OSError, ValueError):  # no such limit; "max"
                    left = int((folder / limit).read_text()) - int((folder / use).read_text())
                    yield left + (_counted(folder / "memory.stat", spare) if spare else 0)
                if folder == root:
                    break


def _counted(file: Path, name: str) -> int:
    return int(dict(line.split() for line in file.read_text().splitlines()).get(name, 0))
