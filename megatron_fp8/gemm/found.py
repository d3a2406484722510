"""The file of search results: for each GEMM, the fastest plan of each maker. There is one file for each model of GPU.

JSON, {problem as text: [{"maker": "cutlass", "version": ..., "name": ..., "ms": ..., ...}, ...]}, in
~/.cache/megatron_fp8/gemm, or under $MEGATRON_FP8_CACHE. A name identifies a plan, not its place in a list, and is
valid only for the same version of the maker's library. The file is replaced atomically, so a reader sees the old or the
new one, and results that another run has saved in between are kept.
"""

import contextlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .cache import cache_folder


@dataclass(frozen=True)
class Choice:
    """The fastest plan of one maker, with its time in milliseconds.

    first_ms: the time of the first choice, which runs without a search. bf16_ms: the time of the GEMM in BF16, or 0 if
    it was not measured.
    """

    maker: str
    version: str
    name: str
    ms: float
    first_ms: float
    bf16_ms: float = 0.0


def path(gpu: str) -> Path:
    """The file for a model of GPU. Raises OSError if there is no cache folder."""
    return cache_folder() / "gemm" / f"{re.sub(r'[^0-9A-Za-z]+', '-', gpu)}.json"


def load(file: Path) -> dict[str, list[Choice]]:
    """The file's contents; empty if there is no file, or if it is not valid."""
    try:
        held = json.loads(file.read_text())
        return {str(problem): [_checked(Choice(**one)) for one in choices] for problem, choices in held.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _checked(choice: Choice) -> Choice:
    if not all(isinstance(text, str) for text in (choice.maker, choice.version, choice.name)):
        raise TypeError(choice)
    if not all(ms > 0 for ms in (choice.ms, choice.first_ms)):
        raise ValueError(choice)
    return choice


def save(file: Path, new: dict[str, list[Choice]]) -> None:
    """Add results to the file, atomically. They replace those of the same problem, maker and version."""
    file.parent.mkdir(parents=True, exist_ok=True)
    held = load(file)
    for problem, choices in new.items():
        theirs = {(one.maker, one.version) for one in choices}
        others = [one for one in held.get(problem, []) if (one.maker, one.version) not in theirs]
        held[problem] = choices + others
    text = json.dumps({problem: [vars(one) for one in choices] for problem, choices in held.items()}, indent=1)
    handle, beside = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.replace(beside, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
