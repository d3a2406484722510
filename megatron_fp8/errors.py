"""What tells a user's mistake from a bug: a UserError is one line on stderr (flags/usage.py), all else a traceback.

Where files of unknown make are read, almost any exception may say that they are damaged, and which one tells nothing.
There the place does: what fails in a statement of this package is a bug (`is_bug`).
"""

import difflib
import os
import traceback
from collections.abc import Iterable

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class UserError(ValueError):
    """A flag, a file or a model that a run cannot take: one line that names flag, value and remedy."""


class PassingError(UserError):
    """No mistake in the command: another start may not meet it, as storage that fails for a moment."""


class NoSuchFile(UserError):
    """A file that a flag names is not on this machine; it may be on the job's."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """", did you mean ...?" for a word that is none of the known ones and close to one; else nothing."""
    found = difflib.get_close_matches(word, list(known), 1)
    return f", did you mean {found[0]}?" if found else ""


def is_bug(error: BaseException, frames: traceback.StackSummary | None = None) -> bool:
    """Whether what failed is a statement of this package, and no UserError of it.

    Of torch's CheckpointException, what failed on any rank. frames: the error's, where it has lost its traceback.
    """
    if failures := getattr(error, "failures", None):  # by rank: (exception, its frames)
        return any(is_bug(*failure) for failure in failures.values())
    frames = traceback.extract_tb(error.__traceback__) if frames is None else frames
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE) and not isinstance(error, UserError)
