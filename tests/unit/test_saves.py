"""No save loses a checkpoint: if killed anywhere, on a full disk, with two runs at once, over an existing one."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import time
from argparse import Namespace
from pathlib import Path

import pytest
from launch import RunFailed, forked
from small_checkpoints import STOCKS, TRACKER, load, one_rank, save, unsealed

from megatron_fp8.checkpoint import saves
from megatron_fp8.checkpoint.seal import SEAL, verify

__all__ = ["load", "one_rank"]
NON_PERSISTENT = "--non-persistent-global-ckpt-dir"


class Killed(BaseException):
    """The process ends here."""


def end_process() -> None:
    """Reset the process state that a killed process would lose."""
    saves._begun.clear()
    while saves._locks:
        os.close(saves._locks.popitem()[1])


@pytest.fixture(autouse=True)
def ended():
    yield
    end_process()


def files_of(folder) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def killed_at(count, monkeypatch, act) -> bool:
    """Kill `act` at its count-th change to the file system, after half a file's bytes; whether it was killed."""
    changes = 0

    def dying(stock, half=False):
        def change(self, *args, **kwargs):
            nonlocal changes
            changes += 1
            if changes == count:
                if half and {*"wx"} & {*(args[0] if args else "")}:
                    stock(self, *args, **kwargs).close()  # empties it
                raise Killed
            return stock(self, *args, **kwargs)

        return change

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink", "mkdir", "rmdir", "touch"):
            patch.setattr(Path, name, dying(getattr(Path, name)))
        patch.setattr(Path, "open", dying(Path.open, half=True))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
        try:
            act()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("which", ["ours", "stock's"])
def test_killed_at_every_point_of_a_save_over_the_only_checkpoint(load, tmp_path, monkeypatch, which):
    """The next run finds the old or the new checkpoint intact."""
    kills = 0
    for count in range(1, 60):
        folder = tmp_path / str(count)
        hook, contents = (None, {}) if which == "ours" else (unsealed, {"content_metadata": STOCKS})
        checkpoint = save(folder, 10, hook, **contents)
        (checkpoint / "notes.txt").write_text("the good one")
        before = files_of(checkpoint)
        if not killed_at(count, monkeypatch, lambda folder=folder: save(folder, 10)):
            break
        kills += 1
        end_process()
        later = 1
        while killed_at(later, monkeypatch, lambda folder=folder: saves.claim(str(folder))):
            later += 1  # the next run is killed while it starts, each time a little later
            end_process()
        assert load(folder) == 10, count
        verify(checkpoint)
        after = files_of(checkpoint)
        assert after.pop("notes.txt") == before.pop("notes.txt")
        assert before.items() <= after.items() or SEAL in after
        assert not (checkpoint / saves.ASIDE).exists() or not any((checkpoint / saves.ASIDE).iterdir()) or SEAL in after
        save(folder, 10)  # and it can be saved over
        assert load(folder) == 10 and not (checkpoint / saves.ASIDE).exists()
    assert 10 < kills < 50


def test_killed_when_it_had_sealed_what_nothing_was_put_aside_for(load, tmp_path):
    """A save over an unfinished one was killed after it had sealed, before it removed its mark."""
    (save(tmp_path, 10) / "unsealed").touch()
    saves.claim(str(tmp_path))
    assert load(tmp_path) == 10


def test_other_ranks_wait_for_what_rank_0_puts_back(one_rank, tmp_path, monkeypatch):
    """With --use-checkpoint-args each rank reads the checkpoint's arguments when it starts."""
    checkpoint = save(tmp_path, 10)
    before, count = files_of(checkpoint), 1
    while (checkpoint / ".metadata").exists():
        assert killed_at(count, monkeypatch, lambda: save(tmp_path, 10))
        end_process()
        count += 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(saves, "_PATIENCE", 0)
    saves.claim(str(tmp_path))
    assert not (checkpoint / ".metadata").exists() and not saves._locks  # it moves nothing, and stops waiting
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            with monkeypatch.context() as patch:
                patch.setenv("RANK", "0")
                saves.claim(str(tmp_path))

    monkeypatch.setattr(saves, "_PATIENCE", 1e9)
    monkeypatch.setattr(saves.time, "sleep", nap)
    saves.claim(str(tmp_path))
    assert len(naps) == 3 and files_of(checkpoint) == before
    saves.claim(str(tmp_path))
    assert len(naps) == 3
    (tmp_path / TRACKER).write_text("garbled")
    naps.clear()
    saves.claim(str(tmp_path))
    assert len(naps) == 3 and (tmp_path / TRACKER).read_text() == "10"
    saves.claim(str(tmp_path / ("a" * 300)))  # refused by rank 0


def test_a_killed_save_is_cleared_away(load, tmp_path):
    """A smaller run saves where a larger one was killed: the new checkpoint has none of the old files."""
    save(tmp_path, 5)
    checkpoint = tmp_path / "iter_0000010"
    checkpoint.mkdir()
    (checkpoint / "__7_0.distcp").write_bytes(b"left over")
    assert load(tmp_path) == 5
    save(tmp_path, 10)
    assert sorted(files_of(checkpoint)) == [".metadata", "__0_0.distcp", SEAL, "metadata.json"]
    assert load(tmp_path) == 10


def full_disc(monkeypatch, at, error=(28, "No space left on device")):
    """Make every write to the file `at` fail."""
    import io

    def no_room(stock):
        def write(path, *args, **kwargs):
            if at in str(path) and {*"wx"} & {*(args[0] if args else kwargs.get("mode", "r"))}:
                stock(path, *args, **kwargs).close()  # the file exists and is empty
                raise OSError(*error)
            return stock(path, *args, **kwargs)

        return write

    monkeypatch.setattr("builtins.open", no_room(open))
    monkeypatch.setattr(io, "open", no_room(io.open))
    monkeypatch.setattr(Path, "open", no_room(Path.open))


@pytest.mark.parametrize("at", ["__0_0.distcp", ".metadata", "metadata.json", SEAL])
@pytest.mark.parametrize("over", [False, True], ids=["a new one", "the only one"])
def test_a_full_disc(load, tmp_path, monkeypatch, at, over):
    checkpoint = save(tmp_path, 10)
    before = files_of(checkpoint)
    monkeypatch.setattr(saves, "get_args", lambda: Namespace(save=str(tmp_path)))
    with monkeypatch.context() as patch:
        full_disc(patch, at)
        with pytest.raises(ValueError) as error:
            saves.lose_nothing(lambda: save(tmp_path, 10 if over else 20))()
    line = str(error.value)
    assert line.startswith(f"--save {tmp_path}: iter_00000{10 if over else 20} could not be written ("), line
    assert line.endswith("GiB were free); fix that and start again, from iter_0000010") and "\n" not in line
    assert files_of(checkpoint) == before and load(tmp_path) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", TRACKER]
    end_process()
    save(tmp_path, 20)
    assert load(tmp_path) == 20


@pytest.mark.parametrize("fails", ["mkdir", "touch", "rename"])
@pytest.mark.parametrize("which", ["ours", "stock's"])
def test_what_cannot_be_put_aside_stays(load, tmp_path, monkeypatch, which, fails):
    """A stock checkpoint has no seal, so its files once counted as an unfinished save's."""
    hook, contents = (None, {}) if which == "ours" else (unsealed, {"content_metadata": STOCKS})
    checkpoint = save(tmp_path, 10, hook, **contents)
    before = files_of(checkpoint)
    monkeypatch.setattr(saves, "get_args", lambda: Namespace(save=str(tmp_path)))
    stock, calls = getattr(Path, fails), []

    def no_inodes(path, *args, **kwargs):
        if path.parent in (checkpoint, checkpoint / saves.ASIDE):
            calls.append(path)
            if fails != "rename" or len(calls) == 2:
                raise OSError(28, "No space left on device")
        return stock(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, fails, no_inodes)
        with pytest.raises(ValueError, match=r"could not be written \(No space left on device"):
            saves.lose_nothing(lambda: save(tmp_path, 10))()
    assert calls and files_of(checkpoint) == before and load(tmp_path) == 10


def test_an_asynchronous_save_that_fails(load, tmp_path, monkeypatch):
    """If Megatron fails later in the save, the begun checkpoint is given up too."""
    save(tmp_path, 10)
    requests = []

    def later(stock):
        def save_later(*args, **kwargs):
            requests.append(saves.seal_saves(stock)(*args, async_sharded_save=True, async_strategy="mcore", **kwargs))

        return save_later

    save(tmp_path, 20, later)
    (tmp_path / TRACKER).write_text("10")
    assert load(tmp_path) == 10
    monkeypatch.setattr(saves, "get_args", lambda: Namespace(save=str(tmp_path)))
    with monkeypatch.context() as patch:
        full_disc(patch, "metadata.json")
        with pytest.raises(ValueError, match=r"iter_0000020 could not be written \(No space left on device, .* free"):
            saves.lose_nothing(requests[0].execute_sync)()
    assert load(tmp_path) == 10 and not (tmp_path / "iter_0000020").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text(""),
        lambda path: path.symlink_to(path.parent / "nowhere/folder"),
        lambda path: path.symlink_to(path),
    ],
    ids=["a file", "a link to nothing", "a link to itself"],
)
def test_folders_that_cannot_be_saved_to(tmp_path, make):
    make(tmp_path / "save")
    for path in (tmp_path / "save", tmp_path / "save/below"):
        line = rf"^--save {path}: cannot be written to \([^)]+\); give another folder$"
        with pytest.raises(ValueError, match=line):
            saves.claim(str(path))
        with pytest.raises(ValueError, match=line.replace("--save", NON_PERSISTENT)):
            saves.claim(str(path), NON_PERSISTENT)


@pytest.mark.parametrize(("error", "why"), [(28, "No space left on device"), (30, "Read-only file system")])
def test_a_folder_without_room(tmp_path, monkeypatch, error, why):
    full_disc(monkeypatch, saves.LOCK, (error, why))
    with pytest.raises(ValueError, match=rf"^--save {tmp_path}/a/b: cannot be written to \({why}\); give another"):
        saves.claim(str(tmp_path / "a/b"))
    assert not list((tmp_path / "a/b").iterdir())


HOLD = "import sys, time; from megatron_fp8.checkpoint import saves; saves.claim(sys.argv[1]); print('held', flush=1)\n"


def test_two_runs_of_one_folder(tmp_path):
    """The second is refused until the first has ended, in any way, even if its child processes still run."""
    reading, writing = os.pipe()
    if not (first := os.fork()):
        with contextlib.suppress(BaseException):
            saves.claim(str(tmp_path))
            subprocess.Popen(["sleep", "60"])
            os.write(writing, b"held")
            time.sleep(60)
        os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 4) == b"held"
        with pytest.raises(ValueError, match=r"another run saves there \(saving.lock is held\); give another folder$"):
            saves.claim(str(tmp_path))
        saves.claim(str(tmp_path / "below"))
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os.close(reading)
    saves.claim(str(tmp_path))
    saves.claim(str(tmp_path))  # Megatron parses its arguments more than once
    (tmp_path / "link").symlink_to(tmp_path / "below")
    saves.claim(str(tmp_path / "link"))


def test_a_run_that_ends_leaves_no_lock(tmp_path):
    """A refused run leaves not even the folders that it made, a finished one its checkpoints, a second run the first
    run's lock."""
    script, log = tmp_path / "run.py", tmp_path / "log"

    def run(then: str) -> int:
        script.write_text(HOLD + then)
        try:
            forked(1, [str(script), str(tmp_path / "a/b")], log, timeout=600)
        except RunFailed as failure:
            return failure.code
        return 0

    assert run("sys.exit(2)") == 2
    assert sorted(tmp_path.iterdir()) == [log, script] and log.read_text().startswith("held\n")
    assert run("import os; os.mkdir(sys.argv[1] + '/iter_0000001')") == 0
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["iter_0000001"]
    saves.claim(str(tmp_path / "a/b"))
    assert run("") == 1 and "another run saves there" in log.read_text() and (tmp_path / "a/b" / saves.LOCK).exists()


def saving_to(folder, elsewhere=None) -> Namespace:
    kind = None if elsewhere is None else "global"
    where = None if elsewhere is None else str(elsewhere)
    return Namespace(save=str(folder), non_persistent_ckpt_type=kind, non_persistent_global_ckpt_dir=where)


def test_where_a_run_saves(tmp_path):
    assert saves.folders_of(saving_to(tmp_path)) == {"--save": str(tmp_path)}
    args = saving_to(tmp_path, tmp_path / "other")
    assert saves.folders_of(args) == {"--save": str(tmp_path), NON_PERSISTENT: str(tmp_path / "other")}
    args.non_persistent_ckpt_type = "local"
    assert saves.folders_of(args) == {"--save": str(tmp_path)}


@pytest.mark.parametrize("flag", ["--save", NON_PERSISTENT])
def test_a_folder_that_only_rank_0_sees(one_rank, tmp_path, monkeypatch, flag):
    args = saving_to(tmp_path / "a", tmp_path / "b")
    for name, claimed in saves.folders_of(args).items():
        saves.claim(claimed, name)
    monkeypatch.setattr(saves, "get_args", lambda: args)
    saves.check_saving()
    monkeypatch.setattr(saves.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(saves, "on_rank_0", lambda act: act())
    saves.check_saving()
    folder = Path(saves.folders_of(args)[flag])
    for spoil in (lambda lock: lock.write_text("another machine's"), lambda lock: lock.unlink()):
        written = (folder / saves.LOCK).read_bytes()
        spoil(folder / saves.LOCK)
        with monkeypatch.context() as patch:
            patch.setattr(saves, "on_rank_0", lambda act, w=written: [(flag, folder / saves.LOCK, w)])
            with pytest.raises(ValueError, match=rf"^{flag} {folder}: rank 3 does not see rank 0's files there"):
                saves.check_saving()


def test_a_run_without_a_level_saves_over_ours(load, tmp_path):
    """Its old seal would be for other files."""
    checkpoint = save(tmp_path, 10)
    save(tmp_path, 10, saves.unseal_saves, content_metadata=STOCKS)
    assert not (checkpoint / SEAL).exists() and load(tmp_path) == 10
    save(tmp_path, 10)
    assert load(tmp_path) == 10


@pytest.mark.parametrize("written", ["", "garbage", "-1", "1e1", "\x00"])
def test_a_tracker_without_a_number_is_mended(load, tmp_path, written):
    """With --save-retain-interval Megatron reads the tracker after a save."""
    for folder in (tmp_path, tmp_path / "non_persistent"):
        save(folder, 10)
        (save(folder, 20) / SEAL).rename(folder / "iter_0000020/unsealed")
        (folder / TRACKER).write_text(written)
    saves.claim(str(tmp_path))
    assert (tmp_path / TRACKER).read_text() == (tmp_path / "non_persistent" / TRACKER).read_text() == "10"
    for good in ("20", "10\n", "release", "0"):
        end_process()
        (tmp_path / TRACKER).write_text(good)
        saves.claim(str(tmp_path))
        assert (tmp_path / TRACKER).read_text() == good
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / TRACKER).write_text(written)
    saves.claim(str(tmp_path / "new"))
    assert not (tmp_path / "new" / TRACKER).exists() and load(tmp_path / "new") is None


def test_the_first_save_beside_a_converted_checkpoint(load, tmp_path):
    """With --save-retain-interval Megatron reads the tracker with int(), and then writes it."""
    save(tmp_path, 0).rename(tmp_path / "release")
    (tmp_path / TRACKER).write_text("release")
    assert load(tmp_path) == 0

    def as_megatron_reads_it(stock):
        def save(*args, **kwargs):
            saves.seal_saves(stock)(*args, **kwargs)
            assert int((tmp_path / TRACKER).read_text()) == 20

        return save

    save(tmp_path, 20, as_megatron_reads_it)
    assert load(tmp_path) == 20 and (tmp_path / "release" / SEAL).exists()


def test_the_newest_whole_non_persistent_checkpoint_is_kept(one_rank, tmp_path):
    """Megatron deletes old checkpoints before it saves, and would keep only the newest, an interrupted save's."""
    import megatron.training.checkpointing as checkpointing

    cleanup = saves.keep_newest_whole(checkpointing.cleanup_old_non_persistent_checkpoint)
    for iteration in (3, 6, 9):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000012").mkdir()
    (tmp_path / "iter_0000012/__0_0.distcp").touch()
    cleanup(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000009", "iter_0000012"]
    save(tmp_path, 12)
    cleanup(tmp_path, leave_ckpt_num=1)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000012"]
    cleanup(tmp_path / "nothing")
