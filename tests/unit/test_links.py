"""Links and pipes in place of our files in a shared folder: no link is followed, and no pipe is waited for."""

import os
from argparse import Namespace

import pytest
from small_checkpoints import CONTENTS, STOCKS, TRACKER, load, one_rank, save, unsealed

from megatron_fp8.checkpoint import saves
from megatron_fp8.checkpoint.files import set_mark, write_whole
from megatron_fp8.checkpoint.seal import ASIDE, MARK, SEAL

__all__ = ["load", "one_rank"]
MINE = "a file of mine, which is longer than the thirty-two bytes of a lock"


@pytest.fixture(autouse=True)
def ended():
    yield
    saves._begun.clear()
    while saves._locks:
        os.close(saves._locks.popitem()[1])


@pytest.fixture
def mine(tmp_path):
    """A file elsewhere that must not change."""
    path = tmp_path / "mine"
    path.write_text(MINE)
    yield path
    assert path.read_text() == MINE


@pytest.mark.parametrize("make", ["link", "pipe", "folder", "link to nothing"])
def test_a_lock_that_is_no_file_of_a_run(tmp_path, mine, make):
    folder = tmp_path / "save"
    folder.mkdir()
    lock = folder / saves.LOCK
    {
        "link": lambda: lock.symlink_to(mine),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
        "link to nothing": lambda: lock.symlink_to(tmp_path / "nothing"),
    }[make]()
    said = "is a link, a pipe or a folder, not a file that a run wrote; remove it"
    with pytest.raises(ValueError, match=rf"^--save {folder}: its {saves.LOCK} {said}$"):
        saves.claim(str(folder))
    assert not (tmp_path / "nothing").exists()
    lock.rmdir() if make == "folder" else lock.unlink()  # do what the line says
    saves.claim(str(folder))
    assert len(lock.read_text()) == 32


def test_a_lock_with_a_second_name_is_left_to_that_name(tmp_path, mine):
    """Another user's file, or a stale lock in a folder copied with links: nothing is written into it."""
    (tmp_path / "save").mkdir()
    lock = tmp_path / "save" / saves.LOCK
    lock.hardlink_to(mine)
    saves.claim(str(tmp_path / "save"))
    assert len(lock.read_text()) == 32 and not lock.samefile(mine)


def test_a_lock_that_was_removed_by_hand(load, tmp_path, monkeypatch):
    """The run takes it again; if another run has taken it meanwhile, this run ends."""
    monkeypatch.setattr(saves, "get_args", lambda: Namespace(save=str(tmp_path)))
    saves.claim(str(tmp_path))
    for iteration in (5, 10):
        save(tmp_path, iteration)
        (tmp_path / saves.LOCK).unlink()
    save(tmp_path, 15)
    assert (tmp_path / saves.LOCK).exists()
    (tmp_path / saves.LOCK).unlink()
    (ours, theirs), (done, end) = os.pipe(), os.pipe()
    if (other := os.fork()) == 0:  # another run, which does not inherit this one's lock
        os.close(end)
        saves._locks.clear()
        saves.claim(str(tmp_path))
        os.write(theirs, b"held")
        os.read(done, 1)
        os._exit(0)
    assert os.read(ours, 4) == b"held"
    line = rf"a checkpoint could not be written \({saves.LOCK} was removed, and another run saves there now, .*"
    with pytest.raises(ValueError, match=line + "start again, from iter_0000015$"):
        saves.lose_nothing(lambda: save(tmp_path, 20))()
    os.close(end)
    os.waitpid(other, 0)
    assert load(tmp_path) == 15


def test_a_link_in_place_of_what_a_run_tries_its_folder_with(tmp_path, mine):
    (tmp_path / f"{saves.LOCK}.{os.getpid()}").symlink_to(mine)
    saves.claim(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", saves.LOCK]


CHECKPOINT = "iter_0000010"
PLACES = [TRACKER, f"{TRACKER}.partial", f"{CHECKPOINT}/{MARK}", f"{CHECKPOINT}/{SEAL}", f"{CHECKPOINT}/{SEAL}.partial"]
PLACES += [f"{CHECKPOINT}/{name}" for name in (".metadata", ".metadata.tmp", "metadata.json", "__0_0.distcp")]


@pytest.mark.parametrize("over", [False, True], ids=["a new one", "over one"])
@pytest.mark.parametrize("place", PLACES)
def test_a_save_writes_through_no_link(load, tmp_path, mine, place, over):
    """Megatron opens its tracker and its files with "w"."""
    folder = tmp_path / "save"
    if over:
        save(folder, 10)
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(mine)
    save(folder, 10)
    assert load(folder) == 10
    assert not any(found.is_symlink() for found in [folder / TRACKER, *(folder / CHECKPOINT).iterdir()])


def test_what_is_put_aside_goes_into_no_other_folder(load, tmp_path, mine):
    """Through a link in that place files would move into its target and out of it."""
    folder, other = tmp_path / "save", tmp_path / "other"
    theirs = save(other, 3)
    before = sorted(path.name for path in theirs.iterdir())
    checkpoint = save(folder, 10)
    for sealed in (True, False):
        (checkpoint / ASIDE).symlink_to(theirs)
        if not sealed:
            (checkpoint / SEAL).unlink()
            (checkpoint / MARK).touch()
            saves.claim(str(folder))
        save(folder, 10)
        assert sorted(path.name for path in theirs.iterdir()) == before and load(other) == 3 and load(folder) == 10
        assert not (checkpoint / ASIDE).exists()


@pytest.mark.parametrize("sealed", [True, False], ids=["ours", "stock's"])
def test_a_checkpoint_that_is_a_link_is_not_saved_over(load, tmp_path, monkeypatch, sealed):
    folder, other = tmp_path / "save", tmp_path / "other"
    save(folder, 5)
    theirs = save(other, 10, *([] if sealed else [unsealed]), content_metadata=CONTENTS if sealed else STOCKS)
    (folder / CHECKPOINT).symlink_to(theirs)
    monkeypatch.setattr(saves, "get_args", lambda: Namespace(save=str(folder)))
    why = rf"{CHECKPOINT} is a link, and a save would change the folder behind it, \S+ GiB were free"
    rest = "fix that and start again, from iter_0000005"
    line = rf"^--save {folder}: a checkpoint could not be written \({why}\); {rest}$"
    with pytest.raises(ValueError, match=line):
        saves.lose_nothing(lambda: save(folder, 10))()
    assert load(other) == 10 and load(folder, ckpt_step=5) == 5
    (folder / CHECKPOINT).unlink()
    saves.lose_nothing(lambda: save(folder, 10))()
    assert load(folder) == 10


def test_files_are_written_whole(tmp_path, mine):
    (tmp_path / "a").symlink_to(mine)
    (tmp_path / "a.partial").symlink_to(mine)
    write_whole(tmp_path / "a", "text")
    (tmp_path / "mark").symlink_to(tmp_path / "nothing")
    set_mark(tmp_path / "mark")
    set_mark(tmp_path / "mark")
    assert (tmp_path / "a").read_text() == "text" and (tmp_path / "mark").read_text() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "mark", "mine"]
