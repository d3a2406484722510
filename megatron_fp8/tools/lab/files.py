"""Write into folders that other users may write to, without following a link of theirs."""

import os
import shutil
import stat
from pathlib import Path

from ...errors import UserError


def refuse_link_of_others(folder: Path) -> None:
    """Raise UserError for a link that another user made, since it could lead to other files of this user."""
    try:
        found = folder.lstat()
    except OSError:
        return
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.geteuid(), 0):
        remedy = "remove it, or take another folder"
        raise UserError(f"{folder}: is another user's link (user {found.st_uid}) to {os.readlink(folder)!a}; {remedy}")


def make_empty(folder: Path) -> None:
    """Make an empty folder. Delete what has its name; of a link, delete only the link."""
    refuse_link_of_others(folder.parent)
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
