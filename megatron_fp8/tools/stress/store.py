"""The suite's numbers as a CSV file: a row a number, appended a Part at a time.

Several processes may share one file: a part that one of them measures, or that the file has, is left to it.
"""

import contextlib
import csv
import fcntl
import io
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import UserError
from .suite import Found, Point, Stress

COLUMNS = ["stress", "seed", *Found._fields, "device", "commit"]


class Part(NamedTuple):
    """What is measured and appended as a whole: a stress and seed; of a stress with cases, one of them ("": all)."""

    stress: Stress
    seed: int
    case: str = ""

    def __str__(self) -> str:
        return f"{self.stress.name} seed {self.seed}{f', {self.case}' if self.case else ''}"

    def measured(self, points: Iterable[Point]) -> bool:
        """Whether the numbers of a store have it."""
        mine = (point for point in points if (point.stress, point.seed) == (self.stress.name, self.seed))
        return any(self.case in ("", point.found.case) for point in mine)

    def measure(self) -> Iterator[Found]:
        """Its numbers."""
        return self.stress.measure(self.seed, *filter(None, [self.case]))


@contextlib.contextmanager
def taken(path: Path, part: Part) -> Iterator[bool]:
    """Whether no other process has this part, which is this process's inside; a process that dies gives it back."""
    beside = path.with_name(f"{path.name}.lock")  # a byte of it a part
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = beside.open("a")
    except OSError as error:
        raise UserError(f"--store {path}: {beside.name}, beside it, cannot be written: {error.strerror}") from None
    with opened as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, zlib.crc32(str(part).encode()))
        except BlockingIOError:
            yield False
        else:
            yield True


def read(path: Path) -> list[Point]:
    """Every number; empty if there is no file. Raises UserError of one line for another file."""
    if not path.exists():
        return []
    points = []
    with path.open(newline="") as file:
        rows = csv.reader(file)
        if next(rows, COLUMNS) != COLUMNS:
            raise UserError(f"--store {path}: its first line is not a stress store's; name another file")
        for number, row in enumerate(rows, 2):
            try:
                stress, seed, arm, case, at, quantity, value, device, commit = row
                found = Found(arm, case, float(at), quantity, float(value))
                points.append(Point(stress, int(seed), found, device, commit))
            except ValueError:
                raise UserError(f"--store {path}: line {number} is damaged; remove it, or take another file") from None
    return points


def append(path: Path, points: Iterable[Point]) -> None:
    """Write numbers at the file's end, in one piece."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for point in points:
        arm, case, at, quantity, value = point.found
        words = [arm, case, f"{at:g}", quantity, f"{value:.6g}"]
        writer.writerow([point.stress, point.seed, *words, point.device, point.commit])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not file.tell():
            file.write(",".join(COLUMNS) + "\n")
        file.write(text.getvalue())
