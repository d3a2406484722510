"""The reference's log-probabilities in a file: one run scores the data, later runs need no reference model.

    about      JSON: the version, the SHA-256 of each data file that was scored, and numbers of the model's weights
    sample     (n,) int64, `key_of` the sample's tokens, ascending
    first      (n + 1,) int64: the documents of sample i are logp[first[i] : first[i + 1]]
    logp       FP32, log p of each answer, chosen and rejected in turn

It is a file of numpy.savez. A sample is found by its tokens, so the order of the data does not matter, and another
tokenizer or prompt format is noticed. The data files' hashes are compared before a run begins, the model's numbers
(fingerprint.py) at the first pass.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Mapping

import numpy as np

from ..errors import UserError
from ..flags.dpo import HEAD, READ, SCORE
from .fingerprint import differs

VERSION = 1


def key_of(documents: Iterable[tuple[np.ndarray, np.ndarray]]) -> int:
    """A hash, 64 bits with a sign, of a sample's documents: (tokens, targets), integers (t,) each."""
    found = hashlib.blake2b(digest_size=8)
    for arrays in documents:
        for array in arrays:
            values = np.asarray(array, dtype=np.int64)
            found.update(len(values).to_bytes(8, "little"))
            found.update(values.tobytes())
    return int.from_bytes(found.digest(), "little", signed=True)


def check_new(path: str) -> None:
    """Raise UserError if the file cannot be written for the first time."""
    if os.path.exists(path):
        raise UserError(f"{SCORE} {path}: the file exists; remove it, or name another")
    if not os.path.isdir(folder := os.path.dirname(path) or "."):
        raise UserError(f"{SCORE} {path}: no folder {folder}; make it, or name another")


def write(
    path: str, scores: Mapping[int, np.ndarray], data: Iterable[str], model: dict[str, int] | None = None
) -> None:
    """Write {key of a sample: its documents' log-probabilities} of these data files and this model's `fingerprint`."""
    keys = sorted(scores)
    first = np.cumsum([0, *(len(scores[key]) for key in keys)])
    about = json.dumps({"version": VERSION, "data": {_hash_of(file): file for file in data}, "model": model})
    being_written = f"{path}.part"
    with open(being_written, "wb") as file:
        np.savez(
            file,
            about=np.array(about),
            sample=np.array(keys, dtype=np.int64),
            first=first.astype(np.int64),
            logp=np.concatenate([np.zeros(0), *(scores[key] for key in keys)]).astype(np.float32),
        )
    os.replace(being_written, path)


class ScoreFile:
    """A file of scores, read. Raises UserError for a file of another form, or one without these data files' scores.

    model: the numbers of the model that scored; of an older version's file only the LM head's, or none.
    """

    def __init__(self, path: str, data: Iterable[str]):
        self._path = path
        try:
            with np.load(path, allow_pickle=False) as found:
                about = json.loads(str(found["about"]))
                keys, first, self._logp = found["sample"], found["first"], found["logp"]
            version, scored, model = about["version"], about["data"], about.get("model") or {}
            self.model: dict[str, int] = model if isinstance(model, dict) else {HEAD: model}
        except FileNotFoundError:
            raise UserError(f"{READ} {path}: no such file; {SCORE} writes it") from None
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            raise UserError(f"{READ} {path}: not a file of {SCORE}, or damaged; score the data again") from None
        if version != VERSION:
            raise UserError(f"{READ} {path}: of form {version}, this version reads {VERSION}; score the data again")
        if not np.isfinite(self._logp).all():
            raise UserError(f"{READ} {path}: has a score that is not finite; look at the model that scored")
        for file in data:
            if _hash_of(file) not in scored:
                raise UserError(
                    f"{READ} {path}: has no scores of --data-path {file} as it is now; score it with {SCORE}"
                )
        self._spans = {int(key): (a, b) for key, a, b in zip(keys, first[:-1], first[1:], strict=True)}

    def check_model(self, model: dict[str, int]) -> None:
        """Raise UserError if another model scored, as far as the file says which one did."""
        if differs(self.model, model):
            raise UserError(
                f"{READ} {self._path}: another model than this run begins with has scored; begin with that one, or "
                f"score the data again with {SCORE}"
            )

    def __getitem__(self, key: int) -> np.ndarray:
        """The log-probabilities (2 p,) FP32 of a sample's documents."""
        try:
            first, stop = self._spans[key]
        except KeyError:
            raise UserError(
                f"{READ} {self._path}: a sample has other tokens than when it was scored; use the same tokenizer and "
                f"--sft-tokenizer-prompt-format, or score the data again with {SCORE}"
            ) from None
        return self._logp[first:stop]


def _hash_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"--data-path {path}: {error.strerror}; name a file that can be read") from None
