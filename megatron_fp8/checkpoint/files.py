"""Writes files into a shared folder in which another user may have put a link in a file's place.

Every write makes a new file and moves it into place: a link is replaced, its target is not touched.  Opening with
O_EXCL ("x") follows no link; opening with "w" would.
"""

import os
from pathlib import Path

PARTIAL = ".partial"


def write_whole(path: Path, text: str) -> None:
    """Write all of the text or nothing, as a new file that replaces what is there."""
    partial = path.with_name(path.name + PARTIAL)
    partial.unlink(missing_ok=True)
    with partial.open("x", encoding="utf-8") as file:  # follows no link
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def set_mark(path: Path) -> None:
    """Make an empty file if there is none. A link is replaced."""
    if path.is_symlink():
        path.unlink()
    if not path.exists():
        path.touch(exist_ok=False)


def is_own_folder(path: Path) -> bool:
    """Whether the path is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()
