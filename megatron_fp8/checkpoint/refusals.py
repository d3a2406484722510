"""Turns exceptions that Megatron or torch raises while it reads a checkpoint into one line, if the user can fix it."""

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

# Functions that look a part up in what was loaded, and the ends of their files' names.
_LOOK_UP = {
    "load_checkpoint": os.path.join("megatron", "training", "checkpointing.py"),
    "load_state_dict": os.path.join("megatron", "core", "optimizer", "optimizer.py"),
}
_PARTS = {"optimizer", "opt_param_scheduler", "state", "param_groups", "fp32_from_fp16", "optimizer_state_dict"}


@contextlib.contextmanager
def readable(load: str | Path) -> Iterator[None]:
    """Turn an OSError into a UserError: this process cannot read the folder."""
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
    """Raise UserError instead of an exception for which `is_mistake` is true, or of an exit with code 0.

    what: what failed, for the line. remedy: makes the line's last part.
    """
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
        elif lacks := re.search(r"([\w.]+) from model not in state dict", said):  # then all names that it has
            begin = "--dist-ckpt-strictness log_unexpected, which begins adapters anew"
            if lacks[1].startswith("optimizer."):
                begin = "add --no-load-optim or --finetune"
            said = f"it has no {lacks[1]}; use the flags of the saved model, or {begin}"
        elif re.fullmatch(r"'[\w.]+'", said):  # a KeyError: a name that torch looked up
            said = f"the checkpoint or this run's model lacks {said}; use the flags of the saved model"
        elif re.search("(?i)(shape|size) mismatch", said):
            said += "; use the flags of the saved model"
        elif isinstance(error, FileNotFoundError):  # Megatron's check of --pretrained-checkpoint
            said += "; give a folder that --save wrote"
        if said.startswith("OptimizerParamScheduler"):
            said += "; add --override-opt_param-scheduler or --use-checkpoint-opt_param-scheduler"
        rest = f"; {remedy()}" if remedy else ""
        raise UserError(f"--load {load}: {what}: {said}{rest}") from error


def _why_ended(ended: SystemExit, remedy: Callable[[], str] | None) -> str:
    """Why Megatron ended the process with exit code 0, with a remedy.

    It does so if a file of --ckpt-format torch cannot be read, and if the random states or the iteration are missing;
    the exit is raised while the exception that tells the reason is handled.
    """
    frames = [frame for frame, _ in traceback.walk_tb(ended.__traceback__)]
    file, cause = frames[-1].f_locals.get("checkpoint_name", "the checkpoint"), ended.__context__
    if not isinstance(cause, KeyError):
        said = said_by(cause).split(". ")[0] if cause else "Megatron ended while it read it"
        return f"{file} cannot be read: {said}; {remedy() if remedy else 'try an older one, with --ckpt-step'}"
    if cause.args == ("total_iters",):
        return f"{file} does not contain its iteration; add --finetune"
    return f"{file} has no random states that this run can load; add --no-load-rng or --finetune"


def is_misfit(error: BaseException) -> bool:
    """Whether an exception means that the checkpoint does not fit this run."""
    if isinstance(error, CheckpointException):
        return not is_bug(error)
    if isinstance(error, CheckpointingException):
        return True
    if isinstance(error, FileNotFoundError):  # --pretrained-checkpoint has no checkpoint
        return is_check(error)
    return _lacks_part(error) or (isinstance(error, KeyError | AssertionError) and is_check(error))


def _lacks_part(error: BaseException) -> bool:
    """Whether Megatron missed a part in the loaded dict, such as "optimizer": the checkpoint was saved without it.

    Another name, or one that the dict has, was looked up elsewhere: that is no mistake of the user's.
    """
    if not isinstance(error, KeyError) or not _PARTS.intersection(error.args):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    looks_up = frame.f_code.co_filename.endswith(_LOOK_UP.get(frame.f_code.co_name, "none"))
    return looks_up and error.args[0] not in frame.f_locals["state_dict"]


def said_by(error: BaseException) -> str:
    """An exception's innermost message in one line: torch wraps a rank's exception, and Megatron wraps that."""
    while failures := getattr(error, "failures", None):  # by rank: (exception, traceback)
        error = next(iter(failures.values()))[0]
    said = getattr(error, "strerror", None) or str(error)
    return re.sub(r"\s+", " ", said).strip()[:300] or type(error).__name__


@contextlib.contextmanager
def naming_its_flag(folder: str, args: Namespace) -> Iterator[None]:
    """Replace --load by --pretrained-checkpoint in a UserError's line if that flag named the folder."""
    try:
        yield
    except UserError as error:
        if folder != getattr(args, "pretrained_checkpoint", None) or folder == args.load:
            raise
        said = str(error).replace(f"--load {folder}:", f"--pretrained-checkpoint {folder}:", 1)
        raise UserError(said) from error
