"""Tells a user's mistake from a bug: a UserError prints one line on stderr (flags/usage.py), a bug a traceback.

A damaged file can raise almost any exception while it is read, so there the type does not tell. The place does: if a
statement of this package failed, it is a bug (`is_bug`).
"""

import difflib
import os
import traceback
from collections.abc import Iterable

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class UserError(ValueError):
    """A flag, a file or a model that a run cannot use: a line that names flag, value and remedy; a line for each of
    several."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


def check_all(mistakes: Iterable[str]) -> None:
    """Raise UserError with all of the mistakes, each once; none if there is none."""
    if found := list(dict.fromkeys(mistakes)):
        raise UserError(*found)


class PassingError(UserError):
    """A failure that a restart may not meet, such as storage that fails for a moment. The command is not at fault."""


class NoSuchFile(UserError):
    """A file that a flag names does not exist on this machine; it may exist on the job's."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """", did you mean ...?" if an unknown word is close to a known one; else ""."""
    without_dashes = {name.lstrip("-"): name for name in known}  # the dashes would make any two short flags alike
    found = difflib.get_close_matches(word.lstrip("-"), list(without_dashes), 1)
    return f", did you mean {without_dashes[found[0]]}?" if found else ""


def is_bug(error: BaseException, frames: traceback.StackSummary | None = None) -> bool:
    """Whether a statement of this package failed, other than by a UserError.

    For torch's CheckpointException: whether one failed on any rank. frames: the error's, if it has no traceback.
    """
    if failures := getattr(error, "failures", None):  # by rank: (exception, its frames)
        return any(is_bug(*failure) for failure in failures.values())
    frames = traceback.extract_tb(error.__traceback__) if frames is None else frames
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE) and not isinstance(error, UserError)
