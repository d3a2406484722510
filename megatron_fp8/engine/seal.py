"""Checkpoints are whole, or refused: every file's SHA-256 is written last, and compared before anything is read.

    save     an older checkpoint in the folder is marked as unsealed -> Megatron writes files -> every rank hashes its
             share of them -> integrity.json, and the mark goes -> Megatron's tracker
    load     the tracker's checkpoint, or the newest sealed one where that is incomplete -> every rank hashes its share
             -> equal: Megatron reads it; else one line, and nothing was read

integrity.json is Megatron's own form (`--verify-integrity`) and a hash of itself; Megatron's is made by rank 0 alone,
which a terabyte takes a quarter of an hour.  A run that is killed while it saves leaves a checkpoint without
metadata.json, a marked one, or an empty tracker: all are passed over.  A sealed checkpoint with a damaged file is
refused, not passed over: its owner should know.  Checkpoints of stock Megatron need no seal.

The folder must be one file system for all ranks.  An asynchronous save hashes when it is finished, while training
waits: about 1.6 GB/s a rank.
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
MARK, PARTIAL = "unsealed", ".partial"
_CHUNK = 2**24  # bytes read at once


def seal(folder: Path) -> None:
    """Hash every file of a complete checkpoint, each rank its share, and write integrity.json; collective."""
    names = _on_rank_0(lambda: sorted(path.name for path in folder.iterdir() if path.is_file() and not _is_ours(path)))
    hashes = _merge(_hash_share(folder, names))

    def write() -> None:
        if unread := [name for name in names if not hashes[name]]:
            raise OSError(f"{folder / unread[0]} cannot be read back")
        content = {"algorithm": "sha256", "files": hashes, "of_files": _sha256_of(hashes)}
        _write(folder / SEAL, json.dumps(content, indent=2))
        (folder / MARK).unlink(missing_ok=True)

    _on_rank_0(write)


def unseal(folder: Path) -> None:
    """Mark what is in this folder as incomplete, before it is overwritten; collective."""

    def mark() -> None:
        (folder / MARK).touch()
        for path in [path for path in folder.iterdir() if _is_ours(path) and path.name != MARK]:
            path.unlink()

    _on_rank_0(mark)


def verify(folder: Path) -> None:
    """ValueError in one line, on all ranks, where a sealed checkpoint is not what was sealed; collective."""
    expected = _on_rank_0(lambda: _read_seal(folder / SEAL))
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
    """Point the tracker to the newest sealed checkpoint where it is empty or names an incomplete one.

    Collective, where there is a process group; before (--use-checkpoint-args) every process does it for itself.
    """

    def find() -> None:
        if tracker.is_file() and not _is_complete(load, tracker.read_text().strip()):
            folders = [path.parent for path in load.glob(f"iter_*/{SEAL}") if not (path.parent / MARK).exists()]
            sealed = max((f.name for f in folders if re.fullmatch(r"iter_\d{7,}", f.name)), key=_iteration, default="")
            if sealed:
                print(f"[fp8] --load {load}: the last save was interrupted; going back to {sealed}", flush=True)
                _write(tracker, str(_iteration(sealed)))

    _on_rank_0(find) if dist.is_initialized() else find()


def one_line(load: str, error: BaseException) -> ValueError:
    """What Megatron says of a checkpoint that does not fit, as a user's mistake."""
    failures = getattr(error, "failures", None)  # torch's, by rank: (exception, traceback)
    error = next(iter(failures.values()))[0] if failures else error
    said = re.sub(r"\s+", " ", str(error)).strip()[:300] or type(error).__name__
    return ValueError(f"--load {load}: the checkpoint does not fit this run: {said}")


MISFITS = (CheckpointingException, CheckpointException, AssertionError, KeyError)


def _iteration(name: str) -> int:
    return int(name.removeprefix("iter_"))


def _is_ours(path: Path) -> bool:
    """Whether a file is the seal's, not the checkpoint's."""
    return path.name in (SEAL, MARK) or path.name.endswith(PARTIAL)


def _is_complete(load: Path, written: str) -> bool:
    if written == "release":
        return True
    folder = load / f"iter_{int(written):07d}" if written.isdecimal() else None
    if folder is None or not folder.is_dir() or (folder / MARK).exists():
        return False
    return (folder / METADATA).is_file() or any(folder.glob("mp_rank_*"))


def _read_seal(path: Path) -> dict[str, str] | None:
    """{file name: SHA-256}; None where there is no seal; ValueError for a damaged one."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        files = found["files"]
        megatrons = found.keys() == {"algorithm", "files"}
        if found["algorithm"] == "sha256" and (megatrons or found["of_files"] == _sha256_of(files)):
            return files
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(
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


def _on_rank_0(act: Callable):
    """What `act` returns on rank 0, or its error, on all ranks."""
    said: list = [None, None]
    if dist.get_rank() == 0:
        try:
            said[0] = act()
        except (OSError, ValueError) as error:
            said[1] = str(error)
    dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise ValueError(said[1])
    return said[0]


def _write(path: Path, text: str) -> None:
    """All of the text, or nothing."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
