"""A damaged checkpoint is refused, in one line that names the file and a checkpoint to resume from."""

import json
import os
import random
import re
import shutil

import pytest
import torch.distributed as dist
from small_checkpoints import CONTENTS, STOCKS, TRACKER, load, one_rank, save, unsealed

from megatron_fp8.checkpoint.convert import to_hf
from megatron_fp8.checkpoint.saves import claim
from megatron_fp8.checkpoint.seal import ASIDE, SEAL, Broken, verify

__all__ = ["load", "one_rank"]
FILES = (".metadata", "__0_0.distcp", "metadata.json", SEAL)


@pytest.fixture(scope="module")
def original(one_rank, tmp_path_factory):
    """Iterations 5 and 10, sealed."""
    folder = tmp_path_factory.mktemp("original")
    save(folder, 5)
    save(folder, 10)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


def flip(data, at):
    data[at] ^= 1 << random.randrange(8)


def truncate(data, at):
    del data[at:]


def append(data, at):
    data += os.urandom(1 + at % 3)


def zero(data, at):
    data[at:] = bytes(len(data) - at)


def swap(data, at):
    data[:] = os.urandom(len(data))


def duplicate(data, at):
    data += bytes(data)


def empty(data, at):
    data.clear()


DAMAGES = (flip, truncate, append, zero, swap, duplicate, empty)


def line_of(refused) -> str:
    with pytest.raises(ValueError) as error:
        refused()
    line = str(error.value)
    assert "\n" not in line and len(line) < 600
    return line


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_of_every_file_is_refused(load, folder, name, damage):
    path = folder / "iter_0000010" / name
    whole = path.read_bytes()
    for _ in range(8):
        data = bytearray(whole)
        damage(data, random.randrange(len(data)))
        if data == whole or (name == SEAL and reads_as(data, whole)):
            continue  # a change of white space is not damage
        path.write_bytes(data)
        line = line_of(lambda: load(folder))
        assert line.startswith(f"--load {folder}: iter_0000010/{name} is damaged"), line
        assert line.endswith("; iter_0000005 is intact: add --ckpt-step 5")
        assert load(folder, ckpt_step=5) == 5
    path.write_bytes(whole)
    assert load(folder) == 10


def reads_as(data: bytes, whole: bytes) -> bool:
    try:
        return json.loads(data) == json.loads(whole)
    except ValueError:
        return False


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("instead", ["nothing", "a folder", "a pipe", "a link to nothing"])
def test_every_missing_file_is_refused(load, folder, name, instead):
    path = folder / "iter_0000010" / name
    path.unlink()
    if instead == "a folder":
        path.mkdir()
    elif instead == "a pipe":
        os.mkfifo(path)
    elif instead == "a link to nothing":
        path.symlink_to("nothing")
    line = line_of(lambda: load(folder))
    assert re.match(rf"--load {folder}: iter_0000010/{re.escape(name)} is (missing|damaged)", line), line
    assert line.endswith("; iter_0000005 is intact: add --ckpt-step 5")


def test_of_a_seal_without_an_end_only_the_beginning_is_read(load, folder):
    path = folder / "iter_0000010" / SEAL
    os.truncate(path, 2**42)  # a sparse file: read whole, it would not fit in memory
    line = line_of(lambda: load(folder))
    assert line.startswith(f"--load {folder}: iter_0000010/{SEAL} is damaged"), line


def test_without_seal_and_metadata_it_is_no_interrupted_save(load, folder):
    """The tracker names it, so it was finished."""
    for name in (SEAL, "metadata.json"):
        (folder / "iter_0000010" / name).unlink()
    assert "iter_0000010/metadata.json is missing; iter_0000005 is intact: add" in line_of(lambda: load(folder))


HASH = "0" * 64


@pytest.mark.parametrize(
    "content",
    [
        {"algorithm": "sha256", "files": {}},
        {"algorithm": "sha256", "files": []},
        {"algorithm": "sha256", "files": ["metadata.json"]},
        {"algorithm": "sha256", "files": "metadata.json"},
        {"algorithm": "sha256", "files": None},
        {"algorithm": "sha256", "files": {"__0_0.distcp": HASH}},
        {"algorithm": "sha256", "files": {"metadata.json": 5}},
        {"algorithm": "sha256", "files": {"metadata.json": None}},
        {"algorithm": "sha256", "files": {"metadata.json": [HASH]}},
        {"algorithm": "sha256", "files": {"metadata.json": HASH.replace("0", "A")}},
        {"algorithm": "sha256", "files": {"metadata.json": ""}},
        {"algorithm": "sha256", "files": {"metadata.json": HASH, "../iter_0000005/metadata.json": HASH}},
        {"algorithm": "sha256", "files": {"metadata.json": HASH, "/etc/passwd": HASH}},
        {"algorithm": "sha256", "files": {"metadata.json": HASH, "..": HASH}},
        {"algorithm": "sha256", "files": {"metadata.json": HASH, "": HASH}},
        {"algorithm": "sha256", "files": {"metadata.json": HASH, SEAL: HASH}},
        {"algorithm": "md5", "files": {"metadata.json": HASH}},
        {"algorithm": ["sha256"], "files": {"metadata.json": HASH}},
        {"files": {"metadata.json": HASH}},
        {"algorithm": "sha256"},
        {"algorithm": "sha256", "files": {"metadata.json": HASH}, "of_files": 3},
        [],
        [1, 2],
        "sha256",
        7,
        None,
    ],
    ids=json.dumps,
)
def test_a_seal_that_says_nothing_verifies_nothing(load, folder, content):
    (folder / "iter_0000010" / SEAL).write_text(json.dumps(content))
    line = line_of(lambda: load(folder))
    assert f"iter_0000010/{SEAL} is damaged; iter_0000005 is intact: add --ckpt-step 5" in line


@pytest.mark.parametrize("text", ["[" * 100_000, '{"algorithm":' * 50_000, "NaN", "\x00", "1e999999"])
def test_a_seal_that_is_no_json(load, folder, text):
    (folder / "iter_0000010" / SEAL).write_text(text)
    assert f"iter_0000010/{SEAL} is damaged" in line_of(lambda: load(folder))
    (folder / "iter_0000010" / SEAL).write_bytes(b"\xff\xfe{}")
    assert f"iter_0000010/{SEAL} is damaged" in line_of(lambda: load(folder))


def test_files_that_were_not_sealed(load, folder):
    """A file that Megatron would read instead of a sealed one is refused; other extra files are ignored."""
    (folder / "iter_0000010/notes.txt").write_text("the good one")
    (folder / "iter_0000010/__7_0.distcp").write_bytes(b"left over")
    (folder / "iter_0000010/hf").mkdir()
    assert load(folder) == 10
    (folder / "iter_0000010/common.pt").write_bytes(b"other arguments")
    line = line_of(lambda: load(folder))
    said = f"common.pt was not there when the checkpoint was sealed (not in {SEAL}): remove it"
    assert f"iter_0000010/{said}; iter_0000005 is intact" in line
    (folder / "iter_0000010/common.pt").unlink()
    assert load(folder) == 10


def test_stocks_own_seal_and_none(load, folder):
    """Megatron's --verify-integrity writes the same file; a stock checkpoint needs none."""
    checkpoint = save(folder, 15, unsealed, verify_integrity=True, content_metadata=STOCKS)
    assert load(folder) == 15
    data = bytearray((checkpoint / "__0_0.distcp").read_bytes())
    flip(data, 100)
    (checkpoint / "__0_0.distcp").write_bytes(data)
    assert "iter_0000015/__0_0.distcp is damaged" in line_of(lambda: load(folder))
    (checkpoint / SEAL).unlink()
    (checkpoint / "__0_0.distcp").write_bytes(bytes(data[:50]))
    assert f"--load {folder}: iter_0000015 cannot be read: " in line_of(lambda: load(folder))
    save(folder, 20, unsealed, content_metadata=STOCKS)
    assert load(folder) == 20


def test_no_other_is_whole(load, folder):
    for name in ("iter_0000005", "iter_0000010"):
        (folder / name / "metadata.json").write_text("{}")
    assert line_of(lambda: load(folder)).endswith("; no other checkpoint there is intact: restore it from a copy")


def test_a_file_newer_than_the_seal(load, folder):
    """A stock run has saved over one of our checkpoints; its own checkpoint stays readable."""
    save(folder, 10, unsealed, content_metadata=STOCKS)
    seal = folder / "iter_0000010" / SEAL
    os.utime(seal, (1, 1))
    assert f"if a run without --fp8-level saved over the checkpoint, remove {SEAL}; " in line_of(lambda: load(folder))
    seal.unlink()
    assert load(folder) == 10


def test_what_is_asked_for_is_refused_too(load, folder):
    assert "iter_0000007 does not exist; iter_0000010 is intact: add --ckpt-step 10" in line_of(
        lambda: load(folder, ckpt_step=7)
    )
    (folder / "iter_0000005/.metadata").unlink()
    assert "iter_0000005/.metadata is missing, or cannot be read; iter_0000010 is intact" in line_of(
        lambda: load(folder, ckpt_step=5)
    )
    (folder / "iter_0000010/unsealed").touch()
    assert "iter_0000010 is not finished: its save was interrupted; a save over" in line_of(
        lambda: load(folder, ckpt_step=10)
    )


def test_a_release(load, folder):
    (folder / "iter_0000010").rename(folder / "release")
    (folder / TRACKER).write_text("release\n")
    assert load(folder) == 10
    (folder / "release/metadata.json").write_text("[]")
    assert "release/metadata.json is damaged" in line_of(lambda: load(folder))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_non_persistent_checkpoints(load, folder, tmp_path, elsewhere):
    other = tmp_path / "elsewhere" if elsewhere else folder / "non_persistent"
    flags = {"non_persistent_ckpt_type": "global", "non_persistent_global_ckpt_dir": str(other) if elsewhere else None}
    assert load(folder, **flags) == 10
    save(other, 7)
    assert load(folder, **flags) == 10
    checkpoint = save(other, 12)
    assert load(folder, **flags) == 12
    line = line_of(lambda: load(folder, ckpt_step=10, **flags))
    assert line.endswith(f"resumes from {checkpoint}, which is newer; move that away")
    other.rename(tmp_path / "away")
    assert load(folder, ckpt_step=10, **flags) == 10
    (tmp_path / "away").rename(other)
    (checkpoint / "metadata.json").write_text("{")
    line = line_of(lambda: load(folder, **flags))
    assert "iter_0000012/metadata.json is damaged: its SHA-256 is not that in integrity.json" in line
    assert line.endswith("; iter_0000010 is intact: remove --non-persistent-ckpt-type") and load(folder) == 10
    (checkpoint / "unsealed").touch()  # a save over it was interrupted
    (other / TRACKER).write_text("\x00")
    assert load(folder, **flags) == 10
    (folder / "iter_0000010/.metadata").unlink()
    assert "iter_0000010/.metadata is missing" in line_of(lambda: load(folder, **flags))


def test_before_there_is_a_process_group(load, folder, monkeypatch):
    """With --use-checkpoint-args every process verifies for itself."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert load(folder) == 10
    for name in FILES[:3]:
        path = folder / "iter_0000010" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert f"iter_0000010/{name} is damaged" in line_of(lambda: load(folder)), name
        path.write_bytes(whole)
    monkeypatch.setattr("megatron_fp8.checkpoint.seal._CHUNK", 1000)
    (folder / "iter_0000010/__0_0.distcp").write_bytes(bytes(5000))  # large: hashed only in a process group
    verify(folder / "iter_0000010", everything=False)
    with pytest.raises(Broken, match=r"/__0_0\.distcp is damaged"):
        verify(folder / "iter_0000010")
    line = line_of(lambda: load(folder))
    assert line.startswith(f"--load {folder}: iter_0000010 cannot be read: ")
    (folder / "iter_0000010/__0_0.distcp").unlink()
    assert line_of(lambda: load(folder)).endswith("; iter_0000005 is sealed: add --ckpt-step 5")


def test_ours_without_a_seal(load, folder):
    save(folder, 15, unsealed, content_metadata=CONTENTS)
    line = line_of(lambda: load(folder))
    assert f"iter_0000015/{SEAL} is missing, so damage cannot be detected; iter_0000010 is intact" in line


@pytest.mark.parametrize("written", ["", "15", "20", "-1", "1e1", "garbage", "\x00" * 8, "٣", "9" * 5000, None])
def test_an_interrupted_save_is_passed_over(load, folder, written, capsys):
    (save(folder, 15) / "unsealed").touch()  # a save over it was killed
    shutil.copytree(folder / "iter_0000005", folder / "iter_0000099_copy")
    shutil.copytree(folder / "iter_0000005", folder / "iter_00000098")
    tracker = folder / TRACKER
    tracker.unlink() if written is None else tracker.write_text(written)
    before = sorted(path.name for path in folder.iterdir())
    assert load(folder) == 10
    assert f"--load {folder}: the last save was interrupted; going back to iter_0000010" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == before  # loading writes nothing
    (folder / "iter_0000010/metadata.json").write_text("{")
    assert "iter_0000010/metadata.json is damaged" in line_of(lambda: load(folder))  # refused, not skipped


def test_an_empty_folder_and_one_where_nothing_is_left(load, tmp_path):
    assert load(tmp_path) is None
    assert load(tmp_path / "not there") is None
    (tmp_path / TRACKER).write_text("30")
    assert f"{TRACKER} says '30', but there is no checkpoint" in line_of(lambda: load(tmp_path))
    (tmp_path / "iter_0000030").mkdir()
    line = "iter_0000030/metadata.json is missing; no other checkpoint there is intact"
    assert line in line_of(lambda: load(tmp_path))


@pytest.mark.parametrize("name", ["iter_0000005", "latest", "release"])
def test_one_checkpoints_own_folder(load, folder, name):
    """convert accepts such a folder; Megatron would start anew."""
    own = folder / name
    if name == "latest":
        own.symlink_to(folder / "iter_0000005")
    elif name == "release":
        (folder / "iter_0000005").rename(own)
    mistake = f"this is the folder of one checkpoint; give the folder above it, {folder}"
    mistake += "" if name == "release" else " and --ckpt-step 5"
    assert line_of(lambda: load(own)) == f"--load {own}: {mistake}"
    assert line_of(lambda: load(own, ckpt_step=5)) == f"--load {own}: iter_0000005 does not exist; {mistake}"
    assert name == "release" or load(folder, ckpt_step=5) == 5
    (own / "unsealed").touch()
    assert line_of(lambda: load(own)) == f"--load {own}: {mistake}"


def test_a_file_is_no_folder_of_checkpoints(load, folder):
    line = line_of(lambda: load(folder / TRACKER))
    assert line == f"--load {folder / TRACKER}: it is a file; give the folder that --save wrote"


@pytest.mark.parametrize(("where", "tracker"), [("", True), ("", False), ("non_persistent", True), ("elsewhere", True)])
def test_what_an_interrupted_save_has_put_aside(load, tmp_path, where, tracker):
    """It is complete, and a run that saves there restores it: another run must not start anew beside it."""
    saved = tmp_path / where
    checkpoint = save(saved, 10)
    (checkpoint / "unsealed").touch()
    (checkpoint / ASIDE).mkdir()
    for name in FILES:
        (checkpoint / name).rename(checkpoint / ASIDE / name)
    if not tracker:
        (saved / TRACKER).unlink()
    flags = {"non_persistent_ckpt_type": "global", "non_persistent_global_ckpt_dir": str(saved)} if where else {}
    says = f"a save over {checkpoint} was interrupted, and it still contains a complete checkpoint; a training run "
    says += f"with --save {saved} restores it when it starts"
    assert line_of(lambda: load(tmp_path, **flags)) == f"--load {tmp_path}: {says}"
    if not where:
        assert line_of(lambda: load(tmp_path, ckpt_step=10)).endswith(f"its save was interrupted; {says}")
        line = line_of(lambda: to_hf(str(checkpoint if not tracker else tmp_path), str(tmp_path / "hf")))
        assert line.endswith(f": {says}")
    claim(str(saved))
    assert load(tmp_path, **flags) == 10


def test_folders_that_are_links_or_read_only(load, folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    (folder / "iter_0000010").rename(tmp_path / "elsewhere")
    (folder / "iter_0000010").symlink_to(tmp_path / "elsewhere")
    for path in (folder, folder / "iter_0000010"):
        path.chmod(0o555)
    assert load(tmp_path / "link") == 10
    for path in (folder, folder / "iter_0000010"):
        path.chmod(0o755)


def test_a_run_without_a_level(load, folder):
    """It may load a level's weights if they are intact, but no optimizer state."""
    from argparse import Namespace

    from megatron_fp8.checkpoint.loads import refuse_levels

    def read(**flags):
        given = {"load": str(folder), "finetune": False, "no_load_optim": False} | flags
        state = {"args": Namespace(), "iteration": 10, "content_metadata": CONTENTS}
        stock = refuse_levels(lambda load_dir, args, rank0: (state, str(folder / "iter_0000010"), False, None))
        return stock(str(folder), Namespace(**given), rank0=True)

    line = line_of(read)
    assert line == (
        f"--load {folder}: the optimizer state of a run with --fp8-level does not load without one; add --fp8-level, "
        "or --no-load-optim (weights and iteration are kept) or --finetune"
    )
    assert read(finetune=True) and read(no_load_optim=True)
    (folder / "iter_0000010/metadata.json").write_text("{")
    assert "iter_0000010/metadata.json is damaged" in line_of(lambda: read(finetune=True))


def test_without_tracker_a_pretrained_checkpoint_is_not_begun_with_again(folder, tmp_path):
    from megatron_fp8.checkpoint.loads import find_without_tracker

    exists = find_without_tracker(lambda path: path is not None and (folder / TRACKER).exists())
    assert exists(str(folder)) and not exists(None)
    (folder / TRACKER).unlink()
    assert exists(str(folder)) and not exists(str(tmp_path))
    assert exists(str(folder / "iter_0000005"))  # loading it then reports the mistake


def test_a_flag_is_named_by_its_whole_folder(folder):
    from argparse import Namespace

    from megatron_fp8.checkpoint.refusals import naming_its_flag
    from megatron_fp8.errors import UserError

    own = f"{folder}/iter_0000005"
    args = Namespace(load=own, pretrained_checkpoint=str(folder))
    for given, flag in (own, "--load"), (str(folder), "--pretrained-checkpoint"):
        with pytest.raises(ValueError, match=rf"^{flag} {given}: "), naming_its_flag(str(folder), args):
            raise UserError(f"--load {given}: it is not right")
