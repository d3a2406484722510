"""Reading a checkpoint never runs code from it."""

import os
import pickle
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from small_checkpoints import STOCKS, load, one_rank, save, unsealed
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fp8.checkpoint.pickles import check_arguments, data_only

__all__ = ["load", "one_rank"]


class Runs:
    """A pickle that writes a file when it is read."""

    def __init__(self, path, of=os.mkdir):
        self.path, self.of = path, of

    def __reduce__(self):
        return self.of, (str(self.path),)


def test_a_real_one_is_data(load, tmp_path):
    save(tmp_path, 5)
    with data_only():
        assert load(tmp_path) == 5
        assert isinstance(FileSystemReader(tmp_path / "iter_0000005").read_metadata(), Metadata)


@pytest.mark.parametrize("of", [os.mkdir, eval, Path.mkdir, FileSystemReader, pickle.loads], ids=lambda of: of.__name__)
def test_metadata_that_runs(load, tmp_path, of):
    path = save(tmp_path, 5) / ".metadata"
    (path.parent / "integrity.json").unlink()
    whole = pickle.loads(path.read_bytes())
    whole.planner_data = Runs(tmp_path / "ran", of)
    path.write_bytes(pickle.dumps(whole))
    line = rf"^--load {tmp_path}: iter_0000005 cannot be read: it names \S+, which is not data; restore it from a copy$"
    with data_only(), pytest.raises(ValueError, match=line):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        b"torch.distributed.checkpoint.filesystem\nos.system\n",  # a name in a module may come from another module
        b"torch.distributed.checkpoint.filesystem\nos.mkdir\n",
        b"torch.distributed.checkpoint.metadata\ndataclass\n",
        b"torch.distributed.checkpoint_of_mine\nx\n",
        b"torch\nload\n",
        b"torch\nos.mkdir\n",
        b"torch.serialization\nload\n",
        b"pathlib\nPath\n",
        b"pathlib\nos.mkdir\n",
        b"pathlib._local\nPath\n",
        b"pathlib._local\nos.mkdir\n",
        b"this\nc\n",
    ],
)
@pytest.mark.parametrize("protocol", [0, 4])
def test_names_that_are_no_data(tmp_path, name, protocol, capsys):
    module, attribute = name.decode().split()
    pieces = [b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, attribute)]
    body = b"c" + name if protocol == 0 else b"\x80\x04" + b"".join(pieces) + b"\x93"
    (tmp_path / ".metadata").write_bytes(body + b"(V" + str(tmp_path / "ran").encode() + b"\ntR.")
    with data_only(), pytest.raises(CheckpointException, match="which is not data"):
        FileSystemReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists() and not capsys.readouterr().out  # `import this` prints


def test_a_path_that_python_3_13_wrote(tmp_path):
    """It says that the class is pathlib._local's, a module that older Pythons lack."""
    written = pickle.dumps(Metadata({}, planner_data=Path("/a/b")), protocol=2)
    assert b"PosixPath\n" in written
    (tmp_path / ".metadata").write_bytes(written.replace(b"cpathlib\n", b"cpathlib._local\n"))
    with data_only():
        assert FileSystemReader(tmp_path).read_metadata().planner_data == Path("/a/b")
    assert sys.version_info >= (3, 13) or "pathlib._local" not in sys.modules


def test_arguments_that_run(load, tmp_path):
    """Like the random states, they are an object in the checkpoint's files."""
    import torch.distributed.checkpoint as dcp

    from megatron_fp8.checkpoint.pickles import _DataOnly

    checkpoint = save(tmp_path, 5, unsealed, content_metadata=STOCKS)
    metadata = FileSystemReader(checkpoint).read_metadata()
    key = next(name for name in metadata.state_dict_metadata if name.startswith("common_state"))
    with data_only():
        assert load(tmp_path) == 5
    content = {"args": Namespace(num_layers=Runs(tmp_path / "ran")), "iteration": 5}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({key: [content]}, storage_writer=dcp.FileSystemWriter(checkpoint), planner=planner, no_dist=True)
    with (checkpoint / ".metadata").open("rb") as file:
        _DataOnly(file).load()
    line = r"cannot be read: it names (posix|os)\.mkdir, which is not data; restore it from a copy$"
    with data_only(), pytest.raises(ValueError, match=line):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


class Custom:
    pass


def test_arguments_that_would_not_be_read_back():
    fine = {"save": "x", "layers": [1, 2], "dtype": torch.bfloat16, "path": Path("x"), "nothing": None, "rate": 1e-3}
    check_arguments(Namespace(**fine))
    for value in (Custom(), Custom, [Custom()], lambda: 1, os.mkdir):
        line = r"^--save x: the argument mine is a \S+, which cannot be read back from a checkpoint; make it [^\n]+$"
        with pytest.raises(ValueError, match=line):
            check_arguments(Namespace(**fine, mine=value))
    torch.serialization.add_safe_globals([Custom])
    check_arguments(Namespace(**fine, mine=Custom()))
