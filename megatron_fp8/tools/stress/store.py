"""The suite's numbers as a CSV file: a row a number, appended a stress and seed at a time.

Several processes may append to one file. What a stress and seed have in the file is not measured again.
"""

import csv
import fcntl
import io
from collections.abc import Iterable
from pathlib import Path

from ...errors import UserError
from .suite import Found, Point

COLUMNS = ["stress", "seed", *Found._fields, "device", "commit"]


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
