"""Files that are written into a shared folder, in which another user may have laid a link in their place.

What is written is always a new file, which takes the place of what lay there: a link is replaced, and its target is
left alone.  Opening with O_EXCL ("x") follows no link; opening with "w" would.
"""

import os
from pathlib import Path

PARTIAL = ".partial"


def write_whole(path: Path, text: str) -> None:
    """All of the text, or nothing; in a new file, which takes the place of what lay there."""
    partial = path.with_name(path.name + PARTIAL)
    partial.unlink(missing_ok=True)
    with partial.open("x", encoding="utf-8") as file:  # follows no link
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def set_mark(path: Path) -> None:
    """Have an empty file there; a link is replaced."""
    if path.is_symlink():
        path.unlink()
    if not path.exists():
        path.touch(exist_ok=False)


def is_own_folder(path: Path) -> bool:
    """Whether a folder lies there, and no link to another."""
    return path.is_dir() and not path.is_symlink()
