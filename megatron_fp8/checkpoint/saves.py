"""How a checkpoint is written so that none is lost.

    a run begins    rank 0 locks the folders it saves to: of two runs that write one checkpoint none has it
    it ends         the lock goes, refused or done, and the folders made for it, where nothing came to lie in them
    save            what iter_N holds is put aside, in iter_N/replaced, and the mark iter_N/unsealed set -> Megatron
                    writes its files -> they are sealed (seal.py) -> the mark goes, then what was put aside -> tracker

So a run that is killed while it saves, or finds no room, loses nothing: what was put aside is put back, at once or
as the next run begins, and what was not finished is passed over (loads.py).  A folder that was empty needs no mark:
nothing names it until it is sealed.

An asynchronous save hashes when it is finished, while training waits: about 1.6 GB/s a rank.
"""

import atexit
import contextlib
import errno
import fcntl
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
_ROOM = 2**20  # bytes that a folder must take when a run begins
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.EMLINK)  # what lies in its place is a link, or a folder
_PATIENCE = 60  # seconds for rank 0, which renames some files of each
_locks: dict[Path, int] = {}  # file descriptors, held while this process lives
_begun: list[Path] = []  # checkpoints being written


def folders_of(args: Namespace) -> dict[str, str]:
    """{flag: folder} of where a run with --save saves; its non-persistent checkpoints may lie elsewhere."""
    elsewhere = args.non_persistent_ckpt_type == "global" and args.non_persistent_global_ckpt_dir
    return {"--save": args.save} | ({"--non-persistent-global-ckpt-dir": elsewhere} if elsewhere else {})


def claim(save: str, flag: str = "--save") -> None:
    """As a run begins: UserError on rank 0 unless the folder takes files, and no other run saves there; locks it.

    The lock ends with the process, however that ends, and its children do not inherit it (POSIX's lockf). Other ranks
    wait until rank 0 has put back what an interrupted save kept: they may read it (--use-checkpoint-args) before there
    is a process group.
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
        raise PassingError(said) from None  # a lock of a node that was lost is held on NFS until that node is back
    except OSError as error:
        raise UserError(f"{flag} {save}: {_refusal(folder, error)}") from None


def _refusal(folder: Path, error: OSError) -> str:
    """Why a folder cannot be saved to, and the remedy."""
    if folder.is_file():
        return "cannot be written to (it is a file); give another folder"
    for place in (folder / LOCK, *(place / TRACKER for place in _places(folder))):
        if error.errno in _NO_FILE and str(place) in (error.filename, error.filename2):
            what = "is a link, a pipe or a folder, and no file that a run wrote; remove it"
            return f"its {place.relative_to(folder)} {what}"
    return f"cannot be written to ({error.strerror}); give another folder"


def _places(folder: Path) -> tuple[Path, Path]:
    return folder, folder / "non_persistent"


def _kept(folder: Path) -> list[Path]:
    """The checkpoints there that a save over them put aside and did not finish."""
    marks = (mark for place in _places(folder) for mark in place.glob(f"iter_*/{MARK}"))
    return [mark.parent for mark in marks if is_kept(mark.parent)]


def _await_rank_0(folder: Path) -> None:
    """Until nothing there is to be put back or mended, or so long that rank 0 will not."""
    until = time.monotonic() + _PATIENCE
    with contextlib.suppress(OSError):  # rank 0 says what is wrong with the folder
        while (_kept(folder) or any(map(is_garbled, _places(folder)))) and time.monotonic() < until:
            time.sleep(0.1)


def _leave(folder: Path, made: list[Path], process: int) -> None:
    """As the process ends, also where Megatron refuses later what it was to do: leave nothing that it only began."""
    if os.getpid() != process:
        return  # a child, which ends earlier
    with contextlib.suppress(OSError):
        if (lock := _locks.pop(Path(os.path.realpath(folder)), None)) is not None:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(lock)  # after that: it might be another's by then
    for place in made:
        with contextlib.suppress(OSError):  # a checkpoint lies there
            place.rmdir()


def _lock(folder: Path) -> int:
    """Lock the folder, and write into the lock what check_saving compares; its file descriptor.

    A link in the lock's place is refused: what is written would go into its target. A file with a second name (a stale
    lock of a folder that was copied by links, or another's file) is left to that name, and a new one is made.
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
            os.fsync(lock)  # NFS would keep it for a while
            return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)  # the run that held it removed it meanwhile
    return _lock(folder)


def _keep_locks() -> None:
    """Before a save: where a lock was removed meanwhile, by hand say, take it again; OSError if another run has it."""
    for folder, lock in list(_locks.items()):
        if not _is_held_at(folder / LOCK, lock):
            try:
                _locks[folder] = _lock(folder)
            except BlockingIOError:
                raise OSError(errno.EBUSY, f"{LOCK} was removed, and another run saves there by now") from None
            os.close(lock)


def _is_held_at(path: Path, lock: int) -> bool:
    try:
        return _is_at(path, os.fstat(lock))
    except OSError as error:
        if error.errno != errno.ESTALE:  # NFS, of a file that another node has removed
            raise
        return False


def _is_at(path: Path, found: os.stat_result) -> bool:
    """Whether the path still leads to the file that was found there."""
    try:
        return os.path.samestat(found, path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _mend_tracker(folder: Path) -> None:
    """Let it name a checkpoint: Megatron reads it with int() after a save, with --save-retain-interval."""
    if is_garbled(folder):
        last, _ = named(folder)
        if last <= 0 and any(map(is_finished, folder.glob("iter_*"))):
            said = f"{TRACKER} names no checkpoint, and those there have no seal; write the step to go on from into it"
            raise UserError(f"--save {folder}: {said}")
        write_whole(folder / TRACKER, str(last)) if last > 0 else (folder / TRACKER).unlink()


def _take_tracker(checkpoint: Path) -> None:
    """Make a tracker that is there a new file that holds a number, before Megatron reads it with int(), as it does with
    --save-retain-interval, and writes to whatever lies there, through a link too."""
    tracker, number = checkpoint.parent / TRACKER, checkpoint.name.removeprefix("iter_")
    if number.isdecimal() and os.path.lexists(tracker):
        written = read_tracker(checkpoint.parent)
        write_whole(tracker, written if is_tracker(written) and written != "release" else str(int(number)))


def check_saving() -> None:
    """Before the first step: UserError on a rank that does not see what rank 0 has written to the folder it claimed,
    and for arguments that would not be read back; collective."""
    args = get_args()
    if not args.save:
        return
    check_arguments(args)

    def written() -> list[tuple[str, Path, bytes]]:
        claimed = {flag: Path(folder).resolve() for flag, folder in folders_of(args).items()}
        return [(flag, at / LOCK, os.pread(_locks[at], 32, 0)) for flag, at in claimed.items() if at in _locks]

    claimed = on_rank_0(written)
    for flag, path, text in claimed if dist.get_rank() else ():  # rank 0 would end its lock by closing the file
        with contextlib.suppress(OSError):
            if path.read_bytes() == text:
                continue
        raise UserError(
            f"{flag} {path.parent}: rank {dist.get_rank()} does not see what rank 0 writes there; give a folder that "
            "all share"
        )


def begin(folder: Path) -> None:
    """Put aside what the folder of a new checkpoint holds, and mark it; collective."""

    def put_aside() -> None:
        _keep_locks()
        if folder.is_symlink():
            raise OSError(errno.ELOOP, f"{folder.name} is a link to another folder, which a save would change")
        _put_back(folder)
        found, aside = _files(folder), folder / ASIDE
        aside.unlink() if aside.is_symlink() else shutil.rmtree(aside, ignore_errors=True)
        if not found and not is_named(folder):
            return
        if is_finished(folder):
            aside.mkdir()  # before the mark, which alone says that there is nothing to put back
        set_mark(folder / MARK)
        try:
            for path in sorted(found, key=lambda path: path.name != SEAL):
                path.rename(aside / path.name) if is_own_folder(aside) else path.unlink()
        except OSError:
            _put_back(folder)
            raise

    on_rank_0(put_aside)
    _begun.append(folder)  # not before: what fails until then leaves what there was


def finish(folder: Path) -> None:
    """Seal a checkpoint that Megatron has written; collective."""

    def say_so() -> None:
        _forget(folder)
        _take_tracker(folder)

    seal(folder)
    on_rank_0(say_so)
    _begun.remove(folder)


def _put_back(folder: Path) -> bool:
    """Undo `begin`, as far as it came, or end what `finish` began; False where there is nothing of either.

    A seal is put aside first and comes back last: where there is one, the files are those that were sealed.
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
                path.unlink()  # of the save that was not finished
    _forget(folder)
    return True


def _forget(folder: Path) -> None:
    """Its mark first, which without what was put aside says that there is nothing to put back."""
    (folder / MARK).unlink(missing_ok=True)
    shutil.rmtree(folder / ASIDE, ignore_errors=True)


def _give_up(folder: Path) -> None:
    """Leave nothing half-written."""
    with contextlib.suppress(OSError):
        if not _put_back(folder) and not is_sealed(folder):
            for path in [*_files(folder), folder / MARK]:
                path.unlink(missing_ok=True)
            folder.rmdir()


def _files(folder: Path) -> list[Path]:
    """The files of a checkpoint, a level's or stock's; what else lies there is left alone."""
    names, kinds = (METADATA, SEAL, ".metadata", "common.pt"), (".distcp", ".tmp", ".partial")
    return [path for path in folder.iterdir() if path.name in names or path.suffix in kinds]


# --- what stands around Megatron's functions (hooks.py)


def seal_saves(stock: Callable) -> Callable:
    """Around dist_checkpointing.save."""

    def save(sharded_state_dict, checkpoint_dir, *args, **kwargs):
        folder = Path(checkpoint_dir)
        begin(folder)
        request = stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        if request is None:
            finish(folder)
        else:  # asynchronous: when it is finished, before Megatron says so in its tracker
            request.finalize_fns.append(lambda: finish(folder))
        return request

    return save


def unseal_saves(stock: Callable) -> Callable:
    """Around dist_checkpointing.save in a run without a level: what it saves over is sealed no longer."""

    def save(sharded_state_dict, checkpoint_dir, *args, **kwargs):
        if dist.get_rank() == 0:
            (Path(checkpoint_dir) / SEAL).unlink(missing_ok=True)
        return stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return save


def keep_newest_whole(stock: Callable) -> Callable:
    """Around checkpointing.cleanup_old_non_persistent_checkpoint, which keeps the newest, finished or not."""

    def cleanup(save_dir, leave_ckpt_num=1, do_async=False):
        newest = next(iter(sealed_iterations(Path(save_dir))), 0)
        later = [path for path in Path(save_dir).rglob("iter_*") if int(path.name[5:]) > newest]
        return stock(save_dir, leave_ckpt_num + len(later), do_async)

    return cleanup


def lose_nothing(stock: Callable) -> Callable:
    """Around training.save_checkpoint and maybe_finalize_async_save: one line where a checkpoint cannot be written."""

    def save(*args, **kwargs):
        with from_one_rank(), _nothing_lost(get_args().save):
            return stock(*args, **kwargs)

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
        rest = f"mend that and start again, {_last(Path(save))}"
        raise PassingError(f"--save {save}: {names} could not be written ({said}); {rest}") from error


def _last(folder: Path) -> str:
    with contextlib.suppress(OSError):
        last, _ = named(folder)
        if last > 0:
            return f"from {folder_name(last)}"
    return "from the beginning"
