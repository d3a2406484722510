"""What searches found, kept in a file a GPU: who runs a GEMM fastest, and how.

JSON, {problem as text: [{"maker": "cutlass", "version": ..., "name": ..., "ms": ..., ...}, ...]}, the best of each
maker, in ~/.cache/megatron_fp8/gemm, or under $MEGATRON_FP8_CACHE. A name says what runs, not where it stands in a
list; it is believed of the same version of the maker's library only. The file is written beside and renamed, so that a
reader finds all of the old or all of the new; what another run has found in between is kept.
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
    """What a search found of one maker; milliseconds.

    first_ms: of the first choice, what runs without a search.  bf16_ms: of the product of BF16 operands; 0: not asked.
    """

    maker: str
    version: str
    name: str
    ms: float
    first_ms: float
    bf16_ms: float = 0.0


def path(gpu: str) -> Path:
    """The file of a GPU. Raises OSError where it has no place."""
    return cache_folder() / "gemm" / f"{re.sub(r'[^0-9A-Za-z]+', '-', gpu)}.json"


def load(file: Path) -> dict[str, list[Choice]]:
    """What a file holds; nothing where there is none, or where it is none of ours."""
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
    """Add to the file, in one step; what it holds of the same makers, in the same versions, is replaced."""
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
