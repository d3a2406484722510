"""Checkpoints are whole, or refused: every file's SHA-256 is written last, and compared before anything is read.

    save     the files of an older checkpoint of this iteration lose their seal
             -> Megatron writes files -> every rank hashes its share of them -> integrity.json -> Megatron's tracker
    load     the tracker's checkpoint, or the newest sealed one where that is incomplete -> every rank hashes its share
             -> equal: Megatron reads it; else one line, and nothing was read

integrity.json is Megatron's own form (`--verify-integrity`) and a hash of itself; Megatron's is made by rank 0 alone,
which a terabyte takes a quarter of an hour.  A run that is killed while it saves leaves a checkpoint without
metadata.json, without a seal, or an empty tracker: all are passed over.  A sealed checkpoint with a damaged file is
refused, not passed over: its owner should know.  Checkpoints of stock Megatron have no seal, and load as stock loads
them.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

SEAL, METADATA = "integrity.json", "metadata.json"
_CHUNK = 2**24  # bytes read at once


def seal(folder: Path) -> None:
    """Hash every file of a complete checkpoint, each rank its share, and write integrity.json; collective."""
    names = _from_rank_0(lambda: sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != SEAL))
    hashes = _merge(_hash_share(folder, names))
    if dist.get_rank() == 0:
        content = {"algorithm": "sha256", "files": hashes, "of_files": _sha256_of(hashes)}
        _write(folder / SEAL, json.dumps(content, indent=2))
    dist.barrier()


def unseal(folder: Path) -> None:
    """Make an older checkpoint in this folder an incomplete one, before it is overwritten; collective."""
    if dist.get_rank() == 0:
        for name in (SEAL, METADATA):
            (folder / name).unlink(missing_ok=True)
    dist.barrier()


def verify(folder: Path) -> None:
    """ValueError in one line, on all ranks, where a sealed checkpoint is not what was sealed; collective."""
    expected = _from_rank_0(lambda: _read_seal(folder / SEAL))
    if isinstance(expected, str):
        raise ValueError(expected)
    if expected is None:
        return
    found = _merge(_hash_share(folder, sorted(expected)))
    damaged = [name for name in expected if found[name] != expected[name]]
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise ValueError(
            f"--load {folder.parent}: {folder.name}/{damaged[0]}{more} is damaged or missing (its SHA-256 is not "
            "that in integrity.json); load another checkpoint with --ckpt-step"
        )


def require_seal(folder: Path) -> None:
    """ValueError where a checkpoint of ours has no seal."""
    if not (folder / SEAL).is_file():
        raise ValueError(
            f"--load {folder.parent}: {folder.name}/{SEAL} is missing, so damage could not be seen; restore it, or "
            "load another checkpoint with --ckpt-step"
        )


def find_complete(load: Path, tracker: Path) -> None:
    """Point the tracker to the newest sealed checkpoint where it is empty or names an incomplete one; collective."""
    if dist.get_rank() == 0 and tracker.is_file() and not _is_complete(load, tracker.read_text().strip()):
        sealed = sorted(path.parent.name for path in load.glob(f"iter_*/{SEAL}"))
        if sealed:
            print(f"[fp8] --load {load}: the last save was interrupted; going back to {sealed[-1]}", flush=True)
            _write(tracker, str(int(sealed[-1].removeprefix("iter_"))))
    dist.barrier()


def one_line(load: str, error: BaseException) -> ValueError:
    """What Megatron says of a checkpoint that does not fit, as a user's mistake."""
    failures = getattr(error, "failures", None)  # torch's, by rank: (exception, traceback)
    error = next(iter(failures.values()))[0] if failures else error
    said = re.sub(r"\s+", " ", str(error)).strip()[:300] or type(error).__name__
    return ValueError(f"--load {load}: the checkpoint does not fit this run: {said}")


MISFITS = (CheckpointingException, CheckpointException, AssertionError, KeyError)


def _is_complete(load: Path, written: str) -> bool:
    if written == "release":
        return True
    folder = load / f"iter_{int(written):07d}" if written.isdecimal() else None
    return folder is not None and folder.is_dir() and ((folder / METADATA).is_file() or any(folder.glob("mp_rank_*")))


def _read_seal(path: Path) -> dict[str, str] | str | None:
    """{file name: SHA-256}; None where there is no seal; a line that says what is wrong with it."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        files = found["files"]
        if found["algorithm"] == "sha256" and found["of_files"] == _sha256_of(files):
            return files
    except (ValueError, KeyError, TypeError):
        pass
    return (
        f"--load {path.parents[1]}: {path.parent.name}/{SEAL} is damaged; load another checkpoint with --ckpt-step"
    )


def _hash_share(folder: Path, names: list[str]) -> dict[str, str]:
    """SHA-256 of this rank's share of the files; empty for one that cannot be read."""
    return {name: _sha256(folder / name) for name in names[dist.get_rank() :: dist.get_world_size()]}


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                total.update(chunk)
    except OSError:
        return ""
    return total.hexdigest()


def _sha256_of(hashes: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _merge(mine: dict[str, str]) -> dict[str, str]:
    every: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {name: hash for share in every for name, hash in share.items()}


def _from_rank_0(read: Callable):
    said = [read() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def _write(path: Path, text: str) -> None:
    """All of the text, or nothing."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
