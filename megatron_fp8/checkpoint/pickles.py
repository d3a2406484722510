"""Keeps a checkpoint's pickles from running code: they may contain only data.

torch's .metadata is a pickle, and so are Megatron's arguments and random states in the other files. torch reads them
with weights_only=False, and such a pickle can call any function that it names.  So each is first read by a reader that
accepts only data classes; if that passes, torch reads it as usual.  The accepted classes:

    .metadata        the data classes of torch.distributed.checkpoint
    the other files  those of torch.load(weights_only=True); Megatron's own list (megatron.core.safe_globals); Call and
                     Caller, which that list forgets (Megatron saves them in the middle of a step to rerun a failed
                     check on another GPU); those that a script adds with torch.serialization.add_safe_globals
"""

import contextlib
import dataclasses
import enum
import io
import pathlib
import pickle
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import PosixPath
from typing import Any

import torch
from megatron.core.rerun_state_machine import Call, Caller
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader

from ..errors import UserError

_PACKAGE = "torch.distributed.checkpoint"
_PATHS_OF_3_13 = "pathlib._local"  # where Python 3.13 says that a Path is defined; older ones have no such module


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        if module in ("torch", "pathlib", _PATHS_OF_3_13) or f"{module}.".startswith(f"{_PACKAGE}."):
            found = None
            with contextlib.suppress(AttributeError):
                found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or found in (torch.Size, PosixPath) or _is_data(found):
                return found
        raise _no_data(f"{module}.{name}")


def _no_data(name: str) -> CheckpointException:
    """The error for a class that is not data.

    It is torch's CheckpointException, no subclass of Exception: torch swallows an Exception here, and says that there
    is no metadata.
    """
    error = pickle.UnpicklingError(f"it names {name}, which is not data")
    return CheckpointException(str(error), {0: (error, traceback.StackSummary())})


def _is_data(found) -> bool:
    """Whether this is one of the package's own data classes or enums. A name in a module may come from elsewhere."""
    is_class = isinstance(found, type) and f"{found.__module__}.".startswith(f"{_PACKAGE}.")
    return is_class and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))


def data_only_metadata(stock: Callable) -> Callable:
    """Wraps FileSystemReader.read_metadata; CheckpointException for anything but data."""

    def read_metadata(self, *args, **kwargs):
        with _paths_of_any_python():
            with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
                _DataOnly(file).load()
            return stock(self, *args, **kwargs)

    return read_metadata


@contextlib.contextmanager
def _paths_of_any_python() -> Iterator[None]:
    """Let this Python read a Path that Python 3.13 has pickled."""
    if missing := sys.version_info < (3, 13):
        sys.modules[_PATHS_OF_3_13] = pathlib
    try:
        yield
    finally:
        if missing:
            sys.modules.pop(_PATHS_OF_3_13, None)


def data_only_objects(stock: Callable) -> Callable:
    """Wraps DefaultLoadPlanner.load_bytes; CheckpointException for anything but data."""

    def load_bytes(self, read_item, value):
        try:
            with torch.serialization.safe_globals([Call, Caller]):
                torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))  # the class's name, in a page of advice
            raise (_no_data(named[1]) if named else error) from None
        value.seek(0)
        return stock(self, read_item, value)

    return load_bytes


@contextlib.contextmanager
def data_only() -> Iterator[None]:
    """Install both wrappers for a while."""
    read_metadata, load_bytes = FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes
    FileSystemReader.read_metadata = data_only_metadata(read_metadata)
    DefaultLoadPlanner.load_bytes = data_only_objects(load_bytes)
    try:
        yield
    finally:
        FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes = read_metadata, load_bytes


def check_arguments(args: Namespace) -> None:
    """Raise UserError for an argument of the run that could not be read back from its checkpoints."""
    if _reads_back(vars(args)):
        return
    for name, value in vars(args).items():
        if not _reads_back(value):
            raise UserError(
                f"--save {args.save}: the argument {name} is a {type(value).__module__}.{type(value).__name__}, which "
                "cannot be read back from a checkpoint; make it a number, a string or a list of these, or register "
                "its class with torch.serialization.add_safe_globals"
            )


def _reads_back(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True
