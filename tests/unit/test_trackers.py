"""The tracker may be anything: a run prints one line or resumes from an intact checkpoint."""

import os
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest
from small_checkpoints import TRACKER, load, one_rank, save

from megatron_fp8.checkpoint import saves
from megatron_fp8.checkpoint.tracker import is_garbled, read_tracker, tracked

__all__ = ["load", "one_rank"]
NO_NUMBER = {
    "a digit that is none": "²".encode(),
    "another script's digits": "٣".encode(),
    "words": b"garbage",
    "no UTF-8": b"\xff\xfe\x00",
    "5,000 digits": b"9" * 5000,
    "empty": b"",
    "negative": b"-1",
    "a path": b"../../etc",
}
NO_FILE = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path),
}
GARBLED = {name: lambda path, text=text: path.write_bytes(text) for name, text in NO_NUMBER.items()} | NO_FILE
by_name = pytest.mark.parametrize("make", GARBLED.values(), ids=GARBLED.keys())
_FILES = {name: make for name, make in GARBLED.items() if name != "a folder"}  # it has its own test
by_name_but_a_folder = pytest.mark.parametrize("make", _FILES.values(), ids=_FILES.keys())


@pytest.fixture(autouse=True)
def ended():
    yield
    while saves._locks:
        os.close(saves._locks.popitem()[1])


def line_of(act) -> str:
    with pytest.raises(ValueError) as error:
        act()
    assert "\n" not in str(error.value)
    return str(error.value)


@by_name
def test_one_that_names_nothing(load, tmp_path, make, capsys):
    make(tmp_path / TRACKER)
    assert is_garbled(tmp_path) and len(read_tracker(tmp_path)) <= 64
    line = line_of(lambda: tracked(tmp_path))
    assert line.startswith(f"{tmp_path / TRACKER} ") and "names no checkpoint; name one checkpoint's own folder" in line
    line = line_of(lambda: load(tmp_path))
    assert line.startswith(f"--load {tmp_path}: {TRACKER} ") and line.endswith("no checkpoint; give another folder")
    save(tmp_path / "other", 10)
    (tmp_path / "other/iter_0000010").rename(tmp_path / "iter_0000010")
    assert load(tmp_path) == 10 and "going back to iter_0000010" in capsys.readouterr().out


@by_name_but_a_folder
def test_one_that_is_garbled_while_a_run_saves(load, tmp_path, make):
    """With --save-retain-interval Megatron reads it with int() and writes to it: a pipe would block for ever."""
    def as_megatron_does(stock):
        def as_megatron(*args, **kwargs):
            saves.seal_saves(stock)(*args, **kwargs)
            assert int((tmp_path / TRACKER).read_text()) == 20

        return as_megatron

    save(tmp_path, 10)
    (tmp_path / TRACKER).unlink()
    make(tmp_path / TRACKER)
    save(tmp_path, 20, as_megatron_does)
    assert load(tmp_path) == 20


def test_a_folder_in_its_place_ends_a_save_in_one_line(load, tmp_path, monkeypatch):
    save(tmp_path, 10)
    (tmp_path / TRACKER).unlink()
    (tmp_path / TRACKER).mkdir()
    monkeypatch.setattr(saves, "get_args", lambda: Namespace(save=str(tmp_path)))
    line = line_of(saves.lose_nothing(lambda: save(tmp_path, 20)))
    assert "iter_0000020 could not be written (Is a directory" in line, line
    line = line_of(lambda: saves.claim(str(tmp_path)))
    said = "is a link, a pipe or a folder, not a file that a run wrote; remove it"
    assert line == f"--save {tmp_path}: its {TRACKER} {said}"
    (tmp_path / TRACKER).rmdir()
    saves.claim(str(tmp_path))
    assert load(tmp_path) == 20


@by_name_but_a_folder
def test_as_a_run_begins_it_is_mended(load, tmp_path, make):
    save(tmp_path, 10)
    (tmp_path / TRACKER).unlink()
    make(tmp_path / TRACKER)
    saves.claim(str(tmp_path))
    assert (tmp_path / TRACKER).read_text() == "10" and tracked(tmp_path) == "iter_0000010"


def test_the_one_that_megatron_writes(tmp_path):
    assert tracked(tmp_path) == tracked(tmp_path / "not there") == "" and not is_garbled(tmp_path)
    for written, name in {"5": "iter_0000005", "release\n": "release", "12345678": "iter_12345678"}.items():
        (tmp_path / TRACKER).write_text(written)
        assert tracked(tmp_path) == name and not is_garbled(tmp_path)
    assert tracked(tmp_path / TRACKER) == ""  # a file instead of a folder


@pytest.fixture
def unreadable():
    """unreadable(act): the error line of another user's process, which cannot read 0o700."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)

        def run(act) -> str:
            user = os.geteuid()
            if user == 0:
                os.seteuid(65534)
            try:
                return line_of(act)
            finally:
                os.seteuid(user)

        yield Path(folder), run


@pytest.mark.parametrize("what", ["", TRACKER, "iter_0000010", "iter_0000010/integrity.json", "iter_0000010/.metadata"])
def test_what_this_user_may_not_read(load, unreadable, what):
    folder, run = unreadable
    save(folder / "a", 10)
    (folder / "a" / what).chmod(0)
    line = run(lambda: load(folder / "a"))
    (folder / "a" / what).chmod(0o755)
    assert line.startswith(f"--load {folder}/a: "), line
    said = "cannot be read (Permission denied" if what in ("", TRACKER, "iter_0000010") else f"{what} is "
    assert said in line, line
    assert load(folder / "a") == 10


def test_a_tracker_that_this_user_may_not_read(unreadable):
    folder, run = unreadable
    (folder / TRACKER).write_text("5")
    (folder / TRACKER).chmod(0)
    assert run(lambda: tracked(folder)) == (
        f"{folder / TRACKER}: cannot be read (Permission denied); let this user read it"
    )


def test_a_pretrained_checkpoint_that_this_user_may_not_read(one_rank, unreadable):
    """Megatron would find no checkpoint there and start from the other folder."""
    from megatron_fp8.checkpoint.loads import _loaded_from, find_without_tracker

    folder, run = unreadable
    save(folder / "a", 10)
    (folder / "a").chmod(0)
    args = Namespace(load=str(folder / "a"), pretrained_checkpoint=str(folder))
    line = run(lambda: _loaded_from(args))
    assert line == (
        f"--load {folder}/a: cannot be read (Permission denied); let this user read it, or give another folder"
    )
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        assert find_without_tracker(lambda path: False)(str(folder / "a"))
    finally:
        os.seteuid(os.getuid())
        (folder / "a").chmod(0o755)
