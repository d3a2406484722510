"""1,092 damaged checkpoints are refused, each in one line with a remedy; 45 resealed ones execute nothing.

They are made from one small checkpoint in this process. Some of each kind always run, all of them with the slow tests.
"""

import functools
import logging
import os
import pickle
import random
import runpy
import shutil
import socket
import subprocess
import tempfile
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_checkpoints import load, one_rank
from test_seal import DAMAGES, FILES, folder, line_of, original, reads_as
from torch.distributed.checkpoint import CheckpointException

from megatron_fp8.checkpoint.pickles import data_only
from megatron_fp8.checkpoint.seal import SEAL, seal

__all__ = ["folder", "load", "one_rank", "original"]
ROUNDS = 37  # of the seven damages, with fourteen replacements, of four files: 1,092


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)
    os.chdir(here)


def fill(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("")


def older(path: Path) -> Path:
    """The same file in the previous checkpoint."""
    return path.parent.parent / "iter_0000005" / path.name


def beside(path: Path) -> Path:
    """Another file of the same checkpoint."""
    return path.with_name(FILES[FILES.index(path.name) - 1])


REPLACEMENTS = {
    "nothing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a folder that is not empty": fill,
    "a pipe": lambda path: os.mkfifo(path),
    "a socket": bind,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a folder": lambda path: path.symlink_to(path.parent),
    "a link to what never ends": lambda path: path.symlink_to("/dev/zero"),
    "the older one's": lambda path: shutil.copy(older(path), path),
    "a link to the older one's": lambda path: path.symlink_to(older(path)),
    "a second name of the older one's": lambda path: path.hardlink_to(older(path)),
    "another file": lambda path: shutil.copy(beside(path), path),
    "a link to another file": lambda path: path.symlink_to(beside(path)),
}


def damage_bytes(path: Path, kind: int, round: int) -> None:
    draw, data = random.Random(f"{path.name} {kind} {round}"), bytearray(path.read_bytes())
    before = bytes(data)
    random.seed(draw.random())
    DAMAGES[kind](data, draw.randrange(len(data)))
    if bytes(data) == before or (path.name == SEAL and reads_as(data, before)):  # zeros zeroed, or white space
        data[0] ^= 1
    path.write_bytes(data)


def replace(path: Path, kind: str) -> None:
    path.unlink()
    REPLACEMENTS[kind](path)


def is_refused(load, folder: Path, name: str, damage) -> None:
    path = folder / "iter_0000010" / name
    with tempfile.TemporaryDirectory() as kept:
        shutil.copy(path, kept)
        try:
            damage(path)
            if path.is_file() and path.stat().st_size < 10**6 and path.read_bytes() == (Path(kept) / name).read_bytes():
                assert load(folder) == 10 and name == "metadata.json"  # that file is equal in both
                return
            line = line_of(lambda: load(folder))
            assert line.startswith(f"--load {folder}: iter_0000010/"), line
            assert line.endswith("; iter_0000005 is intact: add --ckpt-step 5"), line
            assert load(folder, ckpt_step=5) == 5
        finally:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            shutil.copy(Path(kept) / name, path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("rounds", [1, pytest.param(ROUNDS, marks=pytest.mark.slow)])
def test_damaged_files(load, folder, name, rounds):
    cases = [functools.partial(damage_bytes, kind=k, round=r) for k in range(len(DAMAGES)) for r in range(rounds)]
    cases += [functools.partial(replace, kind=kind) for kind in REPLACEMENTS]
    for case in cases:
        is_refused(load, folder, name, case)
    assert load(folder) == 10
    assert rounds != ROUNDS or len(cases) * len(FILES) == 1092


class Runs:
    """A pickle that calls a function when it is read."""

    def __init__(self, function, *given):
        self.call = function, given

    def __reduce__(self):
        return self.call


def pickled(path: Path) -> bytes:
    return pickle.dumps(Runs(os.mkdir, path))


def script(path: Path) -> Path:
    """A script that makes the file."""
    file = path.with_name("script.py")
    file.write_text(f"import os; os.mkdir({str(path)!r})")
    return file


CALLS = {  # pickles that make the file or folder `path` when they are read
    "os.mkdir": lambda path: Runs(os.mkdir, str(path)),
    "os.system": lambda path: Runs(os.system, f"mkdir {path}"),
    "eval": lambda path: Runs(eval, f"__import__('os').mkdir({str(path)!r})"),
    "exec": lambda path: Runs(exec, f"import os; os.mkdir({str(path)!r})"),
    "open": lambda path: Runs(open, str(path), "w"),
    "subprocess": lambda path: Runs(subprocess.check_call, ["mkdir", str(path)]),
    "Path.mkdir": lambda path: Runs(Path.mkdir, path),
    "shutil": lambda path: Runs(shutil.copyfile, __file__, str(path)),
    "runpy": lambda path: Runs(runpy.run_path, str(script(path))),
    "logging": lambda path: Runs(logging.FileHandler, str(path)),
    "pickle": lambda path: Runs(pickle.loads, pickled(path)),
    "torch.save": lambda path: Runs(torch.save, {}, str(path)),
    "os.symlink": lambda path: Runs(os.symlink, "/", str(path)),
    "zipfile": lambda path: Runs(zipfile.ZipFile, str(path), "w"),
    "dcp": lambda path: Runs(dcp.FileSystemWriter(str(path)).fs.mkdir, path),
}


def into_metadata(checkpoint: Path, harm) -> None:
    path = checkpoint / ".metadata"
    whole = pickle.loads(path.read_bytes())
    whole.planner_data = harm
    path.write_bytes(pickle.dumps(whole))


def into(name: str, content) -> None:
    """Makes a function that replaces the checkpoint's object whose name begins so."""

    def put(checkpoint: Path, harm) -> None:
        metadata = dcp.FileSystemReader(checkpoint).read_metadata()
        key = next(found for found in metadata.state_dict_metadata if found.startswith(name))
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        writer = dcp.FileSystemWriter(checkpoint)
        dcp.save({key: [content(harm)]}, storage_writer=writer, planner=planner, no_dist=True)

    return put


PLACES = {
    "what lies where": into_metadata,
    "arguments": into("common_state", lambda harm: {"args": Namespace(num_layers=harm), "iteration": 10}),
    "states": into("extra", lambda harm: {"a": [harm]}),
}


def read_states(checkpoint: Path) -> None:
    """Read the objects beside tensors as Megatron does when it knows the arguments."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    key = next(found for found in metadata.state_dict_metadata if found.startswith("extra"))
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load({key: [None]}, storage_reader=dcp.FileSystemReader(checkpoint), planner=planner, no_dist=True)


ALWAYS = ("os.mkdir", "torch.save")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", [pytest.param(c, marks=[pytest.mark.slow] * (c not in ALWAYS)) for c in CALLS])
def test_resealed_ones_execute_nothing(load, folder, tmp_path, call, place):
    """A user who can change a file can write a new seal."""
    checkpoint, ran = folder / "iter_0000010", tmp_path / "ran"
    PLACES[place](checkpoint, CALLS[call](ran))
    (checkpoint / SEAL).unlink()
    seal(checkpoint)
    assert not ran.exists()
    with data_only():
        if place == "states":
            with pytest.raises(CheckpointException, match="which is not data"):
                read_states(checkpoint)
        else:
            assert "which is not data; iter_0000005 is sealed: add --ckpt-step 5" in line_of(lambda: load(folder))
        assert load(folder, ckpt_step=5) == 5
    assert not ran.exists()


@pytest.mark.parametrize("call", CALLS)
def test_each_would_execute(tmp_path, call):
    """Without the check the calls run: the previous test can fail."""
    pickle.loads(pickle.dumps(CALLS[call](tmp_path / "ran")))
    assert (tmp_path / "ran").exists()
