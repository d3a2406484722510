"""Megatron's tracker: the file of a folder of checkpoints that says which of them a run goes on from.

The folder is shared, so anything may lie there: a pipe, a folder, a link, other bytes.  What is read is a plain file,
and its first bytes alone; opening a pipe to read it would wait without an end.

Imports nothing heavy: `launch` and `convert` read the tracker too.
"""

import errno
import os
import stat
from pathlib import Path

from ..errors import UserError
from ..flags.flag import whole_number

TRACKER = "latest_checkpointed_iteration.txt"
_LONGEST = 64  # bytes; Megatron writes a number of 18 digits at most
_NO_FILE = "\0"  # what is read of a folder or a pipe: nothing that Megatron writes


def folder_name(iteration: int) -> str:
    """As Megatron has it."""
    return f"iter_{iteration:07d}"


def read_tracker(folder: Path) -> str:
    """What the tracker says; empty where there is none. OSError where it may not be read."""
    try:
        file = os.open(folder / TRACKER, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return _NO_FILE if (folder / TRACKER).is_symlink() else ""
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):  # a link to itself, a socket
            return _NO_FILE
        raise  # storage that does not answer for a moment says nothing of the tracker
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
    """Whether there is a tracker, and it names no checkpoint."""
    return os.path.lexists(folder / TRACKER) and not is_tracker(read_tracker(folder))


def tracked(folder: Path) -> str:
    """The name of the checkpoint that the tracker names, "iter_0000005" or "release"; empty where there is no tracker.

    UserError in one line where it names none, or may not be read.
    """
    try:
        written, garbled = read_tracker(folder), is_garbled(folder)
    except OSError as error:
        raise UserError(f"{folder / TRACKER}: cannot be read ({error.strerror}); let this user read it") from None
    if garbled:
        says = f"{folder / TRACKER} {what_it_says(written)}, which names no checkpoint"
        raise UserError(f"{says}; name one checkpoint's own folder, an iter_N in there")
    return folder_name(int(written)) if written.isdecimal() else written


def what_it_says(written: str) -> str:
    """In words, what `read_tracker` returned."""
    if written == _NO_FILE:
        return "is no file"
    return f"says {written[:20]!r}" if written else "is empty"
