"""Writes checkpoints so that an interrupted save loses nothing, and two runs never save to one folder.

    run starts      rank 0 locks the folders that it saves to: two runs that write one checkpoint would destroy it
    run ends        the lock is removed, and the folders that the run made, if they are empty
    save            move the files of iter_N aside to iter_N/replaced and set the mark iter_N/unsealed -> Megatron
                    writes its files -> seal them (seal.py) -> remove the mark, then iter_N/replaced -> tracker

So a run that is killed while it saves, or that finds the disk full, loses nothing: the files moved aside are moved
back, at once or when the next run starts, and an unfinished checkpoint is skipped (loads.py).  A folder that was empty
needs no mark: the tracker does not name it before it is sealed.

An asynchronous save is hashed when it is finished, while training waits: about 1.6 GB/s per rank.
"""

import atexit
import contextlib
import errno
import fcntl
import functools
import os
import shutil
import stat
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist
from megatron.training.global_vars import get_args
from torch.distributed.checkpoint import CheckpointException

from ..errors import PassingError, UserError
from .failing import from_one_rank
from .files import is_own_folder, set_mark, write_whole
from .loads import is_named, named, sealed_iterations
from .pickles import check_arguments
from .refusals import said_by
from .seal import ASIDE, MARK, METADATA, SEAL, is_finished, is_kept, is_sealed, on_rank_0, seal, sealed_files
from .tracker import TRACKER, folder_name, is_garbled, is_tracker, read_tracker

LOCK = "saving.lock"
_ROOM = 2**20  # bytes that must be free in a folder when a run starts
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.EMLINK)  # the path is a link or a folder
_PATIENCE = 60  # seconds for rank 0 to move files back
_locks: dict[Path, int] = {}  # file descriptors, held while this process lives
_begun: list[Path] = []  # checkpoints being written


def folders_of(args: Namespace) -> dict[str, str]:
    """{flag: folder} that a run with --save saves to; non-persistent checkpoints may have their own folder."""
    elsewhere = args.non_persistent_ckpt_type == "global" and args.non_persistent_global_ckpt_dir
    return {"--save": args.save} | ({"--non-persistent-global-ckpt-dir": elsewhere} if elsewhere else {})


def claim(save: str, flag: str = "--save") -> None:
    """Lock the folder when a run starts. UserError on rank 0 if it is not writable or another run saves there.

    The lock ends with the process, however that ends, and child processes do not inherit it (POSIX's lockf). The other
    ranks wait until rank 0 has moved an interrupted save's old files back: they may read them (--use-checkpoint-args)
    before there is a process group.
    """
    folder = Path(save).absolute()
    if os.environ.get("RANK", "0") != "0":
        _await_rank_0(folder)
        return
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    atexit.register(_leave, folder, made, os.getpid())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{LOCK}.{os.getpid()}"
        probe.unlink(missing_ok=True)
        try:
            with probe.open("xb") as file:
                file.write(bytes(_ROOM))
        finally:
            probe.unlink(missing_ok=True)
        if folder.resolve() not in _locks:
            _locks[folder.resolve()] = _lock(folder)
        for kept in _kept(folder):
            _put_back(kept)
        for place in _places(folder):
            _mend_tracker(place)
    except BlockingIOError:
        said = f"{flag} {save}: another run saves there ({LOCK} is held); give another folder"
        raise PassingError(said) from None  # on NFS a lost node's lock is held until that node is back
    except OSError as error:
        raise UserError(f"{flag} {save}: {_refusal(folder, error)}") from None


def _refusal(folder: Path, error: OSError) -> str:
    """Why a folder cannot be saved to, and the remedy."""
    if folder.is_file():
        return "cannot be written to (it is a file); give another folder"
    for place in (folder / LOCK, *(place / TRACKER for place in _places(folder))):
        if error.errno in _NO_FILE and str(place) in (error.filename, error.filename2):
            what = "is a link, a pipe or a folder, not a file that a run wrote; remove it"
            return f"its {place.relative_to(folder)} {what}"
    return f"cannot be written to ({error.strerror}); give another folder"


def _places(folder: Path) -> tuple[Path, Path]:
    return folder, folder / "non_persistent"


def _kept(folder: Path) -> list[Path]:
    """The checkpoints that an unfinished save over them has moved aside."""
    marks = (mark for place in _places(folder) for mark in place.glob(f"iter_*/{MARK}"))
    return [mark.parent for mark in marks if is_kept(mark.parent)]


def _await_rank_0(folder: Path) -> None:
    """Wait until rank 0 has moved files back and mended the tracker, at most _PATIENCE seconds."""
    until = time.monotonic() + _PATIENCE
    with contextlib.suppress(OSError):  # rank 0 reports errors of the folder
        while (_kept(folder) or any(map(is_garbled, _places(folder)))) and time.monotonic() < until:
            time.sleep(0.1)


def _leave(folder: Path, made: list[Path], process: int) -> None:
    """Remove the lock and empty folders when the process ends, also if Megatron refuses the run later."""
    if os.getpid() != process:
        return  # a child process
    with contextlib.suppress(OSError):
        if (lock := _locks.pop(Path(os.path.realpath(folder)), None)) is not None:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(lock)  # only now: once closed, another run may take it
    for place in made:
        with contextlib.suppress(OSError):  # not empty
            place.rmdir()


def _lock(folder: Path) -> int:
    """Lock the folder and write random bytes into the lock for check_saving. Returns its file descriptor.

    A link in the lock's place is refused: the bytes would go into its target. A file with a second hard link (a stale
    lock in a folder that was copied with links, or another user's file) is unlinked here, and a new file is made.
    """
    path = folder / LOCK
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        found = os.fstat(lock)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK), str(path))
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks
        if found.st_nlink > 1 and _is_at(path, found):
            path.unlink()
        if _is_at(path, found):
            os.pwrite(lock, os.urandom(16).hex().encode(), 0)
            os.fsync(lock)  # NFS would delay it
            return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)  # the run that held it has removed the file meanwhile
    return _lock(folder)


def _keep_locks() -> None:
    """Before a save, take locks again that were removed, by hand for example. OSError if another run has one."""
    for folder, lock in list(_locks.items()):
        if not _is_held_at(folder / LOCK, lock):
            try:
                _locks[folder] = _lock(folder)
            except BlockingIOError:
                raise OSError(errno.EBUSY, f"{LOCK} was removed, and another run saves there now") from None
            os.close(lock)


def _is_held_at(path: Path, lock: int) -> bool:
    try:
        return _is_at(path, os.fstat(lock))
    except OSError as error:
        if error.errno != errno.ESTALE:  # NFS: another node has removed the file
            raise
        return False


def _is_at(path: Path, found: os.stat_result) -> bool:
    """Whether the path is still the same file. found: that file's stat."""
    try:
        return os.path.samestat(found, path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _mend_tracker(folder: Path) -> None:
    """Make a garbled tracker name a checkpoint: with --save-retain-interval Megatron reads it with int() at a save."""
    if is_garbled(folder):
        last, _ = named(folder)
        if last <= 0 and any(map(is_finished, folder.glob("iter_*"))):
            said = f"{TRACKER} names no checkpoint, and none there has a seal; write the step to resume from into it"
            raise UserError(f"--save {folder}: {said}")
        write_whole(folder / TRACKER, str(last)) if last > 0 else (folder / TRACKER).unlink()


def _take_tracker(checkpoint: Path) -> None:
    """Replace an existing tracker by a new file with a number.

    With --save-retain-interval Megatron reads it with int(), and its write would follow a link.
    """
    tracker, number = checkpoint.parent / TRACKER, checkpoint.name.removeprefix("iter_")
    if number.isdecimal() and os.path.lexists(tracker):
        written = read_tracker(checkpoint.parent)
        write_whole(tracker, written if is_tracker(written) and written != "release" else str(int(number)))


def check_saving() -> None:
    """Before the first step, check that all ranks see the claimed folder and that the arguments can be read back.

    UserError on a rank that does not see the bytes that rank 0 wrote into the lock. Collective.
    """
    args = get_args()
    if not args.save:
        return
    check_arguments(args)

    def written() -> list[tuple[str, Path, bytes]]:
        claimed = {flag: Path(folder).resolve() for flag, folder in folders_of(args).items()}
        return [(flag, at / LOCK, os.pread(_locks[at], 32, 0)) for flag, at in claimed.items() if at in _locks]

    claimed = on_rank_0(written)
    for flag, path, text in claimed if dist.get_rank() else ():  # on rank 0, closing the file would end the lock
        with contextlib.suppress(OSError):
            if path.read_bytes() == text:
                continue
        raise UserError(
            f"{flag} {path.parent}: rank {dist.get_rank()} does not see rank 0's files there; give a folder that all "
            "ranks share"
        )


def begin(folder: Path) -> None:
    """Move the files in a new checkpoint's folder aside and mark the folder. Collective."""

    def put_aside() -> None:
        _keep_locks()
        if folder.is_symlink():
            raise OSError(errno.ELOOP, f"{folder.name} is a link, and a save would change the folder behind it")
        _put_back(folder)
        found, aside = _files(folder), folder / ASIDE
        aside.unlink() if aside.is_symlink() else shutil.rmtree(aside, ignore_errors=True)
        if not found and not is_named(folder):
            return
        if is_finished(folder):
            aside.mkdir()  # before the mark: a mark without this folder means that there is nothing to move back
        set_mark(folder / MARK)
        try:
            for path in sorted(found, key=lambda path: path.name != SEAL):
                path.rename(aside / path.name) if is_own_folder(aside) else path.unlink()
        except OSError:
            _put_back(folder)
            raise

    on_rank_0(put_aside)
    _begun.append(folder)  # only now: a failure before leaves the folder as it was


def finish(folder: Path) -> None:
    """Seal a checkpoint that Megatron has written. Collective."""

    def say_so() -> None:
        _forget(folder)
        _take_tracker(folder)

    seal(folder)
    on_rank_0(say_so)
    _begun.remove(folder)


def _put_back(folder: Path) -> bool:
    """Undo an unfinished `begin`, or complete an unfinished `finish`. False if there is neither.

    A seal is moved aside first and moved back last, so a folder with a seal has the sealed files.
    """
    if not is_kept(folder):
        return False
    aside = folder / ASIDE
    if not is_sealed(folder):
        for path in sorted(aside.iterdir(), key=lambda path: path.name == SEAL):
            path.replace(folder / path.name)
        listed = sealed_files(folder)
        for path in _files(folder) if listed else ():
            if path.name not in listed | {SEAL}:
                path.unlink()  # a file of the unfinished save
    _forget(folder)
    return True


def _forget(folder: Path) -> None:
    """Remove the mark, then the files moved aside. A mark alone would mean that there is nothing to move back."""
    (folder / MARK).unlink(missing_ok=True)
    shutil.rmtree(folder / ASIDE, ignore_errors=True)


def _give_up(folder: Path) -> None:
    """Restore the old checkpoint, or remove the half-written new one."""
    with contextlib.suppress(OSError):
        if not _put_back(folder) and not is_sealed(folder):
            for path in [*_files(folder), folder / MARK]:
                path.unlink(missing_ok=True)
            folder.rmdir()


def _files(folder: Path) -> list[Path]:
    """The files of a checkpoint, a level's or stock's. Other files in the folder are not touched."""
    names, kinds = (METADATA, SEAL, ".metadata", "common.pt"), (".distcp", ".tmp", ".partial")
    return [path for path in folder.iterdir() if path.name in names or path.suffix in kinds]


# --- wrappers of Megatron's functions (hooks.py)


def seal_saves(stock: Callable) -> Callable:
    """Wraps dist_checkpointing.save: begin, save, finish."""

    def save(sharded_state_dict, checkpoint_dir, *args, **kwargs):
        folder = Path(checkpoint_dir)
        begin(folder)
        request = stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        if request is None:
            finish(folder)
        else:  # asynchronous: seal when it is finished, before Megatron writes its tracker
            request.finalize_fns.append(lambda: finish(folder))
        return request

    return save


def unseal_saves(stock: Callable) -> Callable:
    """Wraps dist_checkpointing.save in a run without a level: removes the seal of a checkpoint that it overwrites."""

    def save(sharded_state_dict, checkpoint_dir, *args, **kwargs):
        if dist.get_rank() == 0:
            (Path(checkpoint_dir) / SEAL).unlink(missing_ok=True)
        return stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return save


def keep_newest_whole(stock: Callable) -> Callable:
    """Wraps checkpointing.cleanup_old_non_persistent_checkpoint, so that it keeps the newest finished checkpoint too.

    Stock keeps the newest one, finished or not.
    """

    def cleanup(save_dir, leave_ckpt_num=1, do_async=False):
        newest = next(iter(sealed_iterations(Path(save_dir))), 0)
        later = [path for path in Path(save_dir).rglob("iter_*") if int(path.name[5:]) > newest]
        return stock(save_dir, leave_ckpt_num + len(later), do_async)

    return cleanup


def lose_nothing(stock: Callable) -> Callable:
    """Wraps training.save_checkpoint and maybe_finalize_async_save: one line if a checkpoint cannot be written."""

    @functools.wraps(stock)
    def save(*args, **kwargs):
        with from_one_rank(), _nothing_lost(get_args().save):
            return stock(*args, **kwargs)

    return save


def saves_nowhere(stock: Callable) -> Callable:
    """Wraps training.save_checkpoint of a run without --save.

    If a step's result is rejected (core/rerun_state_machine.py), Megatron saves it, so that it can be run again
    elsewhere, and does not ask whether there is a folder.
    """

    @functools.wraps(stock)
    def save(*args, **kwargs):
        raise UserError(
            "--save: not given, and Megatron wants to save this step, whose result it rejects (see above); start again "
            "with --save DIR, or with --no-check-for-nan-in-loss-and-grad to have such a step skipped"
        )

    return save


@contextlib.contextmanager
def _nothing_lost(save: str) -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointException) as error:
        said = said_by(error)
        names = " and ".join(folder.name for folder in _begun) or "a checkpoint"
        with contextlib.suppress(OSError):
            said += f", {shutil.disk_usage(save).free / 2**30:.2f} GiB were free"
        if not dist.is_initialized() or dist.get_rank() == 0:
            for folder in _begun:
                _give_up(folder)
        rest = f"fix that and start again, {_last(Path(save))}"
        raise PassingError(f"--save {save}: {names} could not be written ({said}); {rest}") from error


def _last(folder: Path) -> str:
    with contextlib.suppress(OSError):
        last, _ = named(folder)
        if last > 0:
            return f"from {folder_name(last)}"
    return "from the beginning"
