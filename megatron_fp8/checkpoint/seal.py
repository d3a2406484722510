"""A checkpoint's seal: the SHA-256 of every file, written when it is complete and verified before it is read.

integrity.json has the format of Megatron's `--verify-integrity`, plus a hash of its own entries. In Megatron rank 0
alone hashes, a quarter of an hour for a terabyte; here each rank hashes its share.  All ranks must see the folder on
one file system.  A checkpoint without a seal, such as stock Megatron's, is read unverified.

A seal detects damage, not malice: a user who can change a file can write a new seal.  pickles.py keeps a checkpoint
from running code.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..ranks import gathered
from .files import PARTIAL, is_own_folder, write_whole

SEAL, MARK, METADATA = "integrity.json", "unsealed", "metadata.json"  # MARK: a save into the folder is in progress
_INDEX = ".metadata"  # torch's index of tensors: without it nothing can be read
ASIDE = "replaced"  # folder for the old files during that save
# Megatron prefers this file to the others. If it was not there when the checkpoint was sealed, it does not belong to
# it. Other extra files in the folder are never read.
_OLD_COMMON = "common.pt"
_CHUNK = 2**24  # bytes read at once; also the largest file that is hashed before there is a process group
_LONGEST = 2**24  # most bytes of a seal, which has about 100 for each file
_LARGE = "not hashed"


class Broken(Exception):
    """What is wrong with a checkpoint. The text continues its folder's name: "/metadata.json is missing"."""


def seal(folder: Path) -> None:
    """Hash every file of a complete checkpoint and write integrity.json. Collective."""
    ours = (SEAL, MARK, SEAL + PARTIAL)
    names = on_rank_0(lambda: sorted(p.name for p in folder.iterdir() if p.is_file() and p.name not in ours))
    hashes = _merge(_hash_share(folder, names))

    def write() -> None:
        if unread := [name for name in names if not hashes[name]]:
            raise OSError(f"{folder / unread[0]} cannot be read back")
        with (folder / METADATA).open("rb") as file:
            os.fsync(file.fileno())  # Megatron syncs all files but this one
        content = {"algorithm": "sha256", "files": hashes, "of_files": _sha256_of(hashes)}
        write_whole(folder / SEAL, json.dumps(content, indent=2))

    on_rank_0(write)


def is_sealed(folder: Path) -> bool:
    """Whether the folder has a seal, right or wrong."""
    return (folder / SEAL).exists()


def is_finished(folder: Path) -> bool:
    """Whether a folder has a checkpoint, ours or stock Megatron's, and no save into it is in progress."""
    kinds = (METADATA, SEAL, "mp_rank_*")
    return folder.is_dir() and not (folder / MARK).exists() and any(any(folder.glob(kind)) for kind in kinds)


def is_kept(folder: Path) -> bool:
    """Whether an interrupted save left a complete checkpoint: the old one moved aside, or the new one sealed."""
    return (folder / MARK).exists() and (is_own_folder(folder / ASIDE) or is_sealed(folder))


def how_to_put_back(folder: Path) -> str:
    """The remedy for a checkpoint that `is_kept`; "" for any other."""
    said = f"a save over {folder} was interrupted, and it still contains a complete checkpoint"
    return f"{said}; a training run with --save {folder.parent} restores it when it starts" if is_kept(folder) else ""


def require_finished(folder: Path) -> None:
    """Raise Broken if the checkpoint is not finished."""
    if not folder.is_dir():
        raise Broken(" does not exist")
    if (folder / MARK).exists():
        raise Broken(" is not finished: its save was interrupted")
    if not is_finished(folder):
        raise Broken(f"/{METADATA} is missing")
    if (folder / METADATA).is_file() and not (folder / _INDEX).is_file():
        raise Broken(f"/{_INDEX} is missing, or cannot be read")


def verify(folder: Path, everything: bool = True) -> None:
    """Raise Broken, on all ranks, if a sealed checkpoint differs from its seal. Collective.

    Without a process group every process verifies for itself and, unless `everything`, skips large files: they are
    verified later, before they are read.
    """
    expected = on_rank_0(lambda: _read_seal(folder))
    if expected is None:
        return
    limit = None if everything or dist.is_initialized() else _CHUNK
    found = _merge(_hash_share(folder, sorted(expected), limit))
    damaged = [name for name in expected if found[name] not in (expected[name], _LARGE)]
    if damaged:
        first, more = damaged[0], f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        if not found[first]:
            raise Broken(f"/{first}{more} is missing, or cannot be read")
        over = f", and it is newer: if a run without --fp8-level saved over the checkpoint, remove {SEAL}"
        is_newer = on_rank_0(lambda: (folder / first).stat().st_mtime > (folder / SEAL).stat().st_mtime + 1)
        raise Broken(f"/{first}{more} is damaged: its SHA-256 is not that in {SEAL}{over if is_newer else ''}")


def sealed_files(folder: Path) -> set[str]:
    """The file names in the seal; none if there is no seal or it is damaged."""
    try:
        return set(_read_seal(folder) or ())
    except Broken:
        return set()


def on_rank_0[T](act: Callable[[], T]) -> T:
    """Run `act` on rank 0 and return its result, or raise its Broken or OSError, on all ranks.

    Without a process group, and in a fake one (--fake-process-group), `act` runs on this rank.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return act()
    said: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            said[0] = act()
        except (OSError, Broken) as error:
            said[1] = type(error)(*error.args, *filter(None, [getattr(error, "filename", None)]))
    dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise said[1]
    return said[0]


def _read_seal(folder: Path) -> dict[str, str] | None:
    """{file name: SHA-256}; None without a seal. Raises Broken for a damaged or empty one."""
    if not is_sealed(folder):
        return None
    try:
        found = json.loads(_beginning(folder / SEAL).decode())  # strict UTF-8: json alone would guess the encoding
        files = found["files"]
        megatrons = found.keys() == {"algorithm", "files"}
        right = found["algorithm"] == "sha256" and (megatrons or found["of_files"] == _sha256_of(files))
        if right and METADATA in files and all(map(_is_entry, files.items())):
            if _OLD_COMMON not in files and (folder / _OLD_COMMON).exists():
                raise Broken(f"/{_OLD_COMMON} was not there when the checkpoint was sealed (not in {SEAL}): remove it")
            return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise Broken(f"/{SEAL} is damaged")


def _beginning(path: Path) -> bytes:
    """The first _LONGEST bytes of a file; b"" if the path is not a file: opening a pipe would block."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(_LONGEST)


def _is_entry(entry: tuple[Any, Any]) -> bool:
    """Whether this is the name of a file in the folder itself and a SHA-256."""
    name, hash = entry
    is_plain = os.path.basename(name) == name and name not in ("", ".", "..", SEAL)
    return is_plain and bool(re.fullmatch("[0-9a-f]{64}", hash))


def _hash_share(folder: Path, names: list[str], limit: int | None = None) -> dict[str, str]:
    """{name: SHA-256} of this rank's share of the files; "" for an unreadable file, _LARGE for one above the limit."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {name: _sha256(folder / name, limit) for name in names[rank::ranks]}


def _sha256(path: Path, limit: int | None) -> str:
    total = hashlib.sha256()
    try:
        if not path.is_file():  # opening a pipe would block
            return ""
        with path.open("rb") as file:
            if limit is not None and os.fstat(file.fileno()).st_size > limit:
                return _LARGE
            while chunk := file.read(_CHUNK):
                total.update(chunk)
    except OSError:
        return ""
    return total.hexdigest()


def _sha256_of(hashes: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _merge(mine: dict[str, str]) -> dict[str, str]:
    return {name: hash for share in gathered(mine) for name, hash in share.items()}
