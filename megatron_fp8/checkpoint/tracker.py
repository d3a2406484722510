"""Reads Megatron's tracker, the file in a folder of checkpoints that names the one to resume from.

The folder is shared, so the path may be a pipe, a folder, a link or a file with other bytes.  Only a regular file's
first bytes are read; opening a pipe would block.

This module imports nothing heavy: `launch` and `convert` read the tracker too.
"""

import errno
import os
import stat
from pathlib import Path

from ..errors import UserError
from ..flags.flag import whole_number

TRACKER = "latest_checkpointed_iteration.txt"
_LONGEST = 64  # bytes; Megatron writes a number of 18 digits at most
_NO_FILE = "\0"  # stands for the content of a folder or a pipe; Megatron never writes it


def folder_name(iteration: int) -> str:
    """Megatron's name for a checkpoint's folder."""
    return f"iter_{iteration:07d}"


def read_tracker(folder: Path) -> str:
    """The tracker's text; "" if there is none. Raises OSError if it is not readable."""
    try:
        file = os.open(folder / TRACKER, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return _NO_FILE if (folder / TRACKER).is_symlink() else ""
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):  # a link to itself, a socket
            return _NO_FILE
        raise  # storage that fails for a moment tells nothing about the tracker
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return _NO_FILE
        return os.read(file, _LONGEST).decode(errors="replace").strip()
    finally:
        os.close(file)


def is_tracker(written: str) -> bool:
    """Whether Megatron can have written this to its tracker."""
    return written == "release" or whole_number(written) is not None


def is_garbled(folder: Path) -> bool:
    """Whether there is a tracker that names no checkpoint."""
    return os.path.lexists(folder / TRACKER) and not is_tracker(read_tracker(folder))


def tracked(folder: Path) -> str:
    """The folder name of the tracker's checkpoint, "iter_0000005" or "release"; "" if there is no tracker.

    Raises UserError if it names none or is not readable.
    """
    try:
        written, garbled = read_tracker(folder), is_garbled(folder)
    except OSError as error:
        raise UserError(f"{folder / TRACKER}: cannot be read ({error.strerror}); let this user read it") from None
    if garbled:
        says = f"{folder / TRACKER} {what_it_says(written)}, which names no checkpoint"
        raise UserError(f"{says}; name one checkpoint's own folder, an iter_N in it")
    return folder_name(int(written)) if written.isdecimal() else written


def what_it_says(written: str) -> str:
    """What `read_tracker` returned, in words for an error line."""
    if written == _NO_FILE:
        return "is not a file"
    return f"says {written[:20]!r}" if written else "is empty"
