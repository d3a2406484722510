"""What reading a checkpoint ends in, in one line: exceptions of Megatron's and torch's that are a user's mistake."""

import contextlib
import os
import re
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from ..errors import UserError, is_bug
from ..flags.stock_errors import is_check

_CHECKPOINTING = os.path.join("megatron", "training", "checkpointing.py")


@contextlib.contextmanager
def readable(load: str | Path) -> Iterator[None]:
    """UserError in one line where this process may not read what lies there."""
    try:
        yield
    except OSError as error:
        at = f" of {error.filename}" if error.filename and str(error.filename) != str(load) else ""
        said = f"cannot be read ({error.strerror or error}{at}); let this user read it, or give another folder"
        raise UserError(f"--load {load}: {said}") from error


@contextlib.contextmanager
def one_line(
    load: str, what: str, is_mistake: Callable[[BaseException], bool], remedy: Callable[[], str] | None = None
) -> Iterator[None]:
    """UserError where `is_mistake` says so of an exception, and where Megatron ends the process with exit code 0."""
    try:
        yield
    except SystemExit as ended:
        if ended.code:
            raise
        raise UserError(f"--load {load}: {_why_ended(ended, remedy)}") from ended
    except (Exception, CheckpointException) as error:
        if isinstance(error, UserError) or not is_mistake(error):
            raise
        said = said_by(error)
        if _lacks_part(error):
            said = f"it has no {said}; add --no-load-optim or --finetune"
        elif re.fullmatch(r"'[\w.]+'", said):  # a name, which torch looked up
            said = f"the checkpoint or this run's model lacks {said}; give the flags of the model that was saved"
        if said.startswith("OptimizerParamScheduler"):
            said += "; add --override-opt_param-scheduler or --use-checkpoint-opt_param-scheduler"
        rest = f"; {remedy()}" if remedy else ""
        raise UserError(f"--load {load}: {what}: {said}{rest}") from error


def _why_ended(ended: SystemExit, remedy: Callable[[], str] | None) -> str:
    """What Megatron printed before it ended the process with exit code 0, as if nothing were wrong; with a remedy.

    It does where a file of --ckpt-format torch cannot be read, and where the random states or the iteration are not
    there; each is raised within the exception that says so.
    """
    frames = [frame for frame, _ in traceback.walk_tb(ended.__traceback__)]
    file, cause = frames[-1].f_locals.get("checkpoint_name", "the checkpoint"), ended.__context__
    if not isinstance(cause, KeyError):
        said = said_by(cause).split(". ")[0] if cause else "Megatron ended as it read it"
        return f"{file} cannot be read: {said}; {remedy() if remedy else 'try an older one, with --ckpt-step'}"
    if cause.args == ("total_iters",):
        return f"{file} does not say of which iteration it is; add --finetune"
    return f"{file} has no random states that this run can take; add --no-load-rng or --finetune"


def is_misfit(error: BaseException) -> bool:
    """Whether Megatron or torch says so, or the checkpoint lacks a part."""
    if isinstance(error, CheckpointException):
        return not is_bug(error)
    if isinstance(error, CheckpointingException):
        return True
    if isinstance(error, FileNotFoundError):  # --pretrained-checkpoint has none
        return is_check(error)
    return _lacks_part(error) or (isinstance(error, KeyError | AssertionError) and is_check(error))


def _lacks_part(error: BaseException) -> bool:
    """Whether Megatron looked for "optimizer", say, in what it had loaded: the checkpoint was saved without."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_there = last.name == "load_checkpoint" and last.filename.endswith(_CHECKPOINTING)
    return isinstance(error, KeyError) and is_there


def said_by(error: BaseException) -> str:
    """An exception's own words in one line: torch wraps what a rank met, and Megatron wraps that."""
    while failures := getattr(error, "failures", None):  # by rank: (exception, traceback)
        error = next(iter(failures.values()))[0]
    said = getattr(error, "strerror", None) or str(error)
    return re.sub(r"\s+", " ", said).strip()[:300] or type(error).__name__


@contextlib.contextmanager
def naming_its_flag(folder: str, args: Namespace) -> Iterator[None]:
    """What says --load says --pretrained-checkpoint where that one named the folder."""
    try:
        yield
    except UserError as error:
        if folder != getattr(args, "pretrained_checkpoint", None) or folder == args.load:
            raise
        said = str(error).replace(f"--load {folder}:", f"--pretrained-checkpoint {folder}:", 1)
        raise UserError(said) from error
