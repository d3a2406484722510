"""What the lab writes into folders that others may write to as well: nothing through a link of theirs."""

import os
import shutil
import stat
from pathlib import Path

from ...errors import UserError


def refuse_link_of_others(folder: Path) -> None:
    """Raise UserError for a link that another user made: it says where this user's files would be changed."""
    try:
        found = folder.lstat()
    except OSError:
        return
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.geteuid(), 0):
        remedy = "remove it, or take another folder"
        raise UserError(f"{folder}: is another user's link (user {found.st_uid}) to {os.readlink(folder)!a}; {remedy}")


def make_empty(folder: Path) -> None:
    """Make a folder anew; what is there under its name goes, but of a link the link alone."""
    refuse_link_of_others(folder.parent)
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
