"""Checkpoints with anything wrong in them are refused, and interrupted saves are passed over."""

import json
import os
import random

import pytest
import torch.distributed as dist

from megatron_fp8.engine.seal import METADATA, SEAL, find_complete, require_seal, seal, unseal, verify


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpoint(load, iteration, sealed=True):
    """Files like those of torch_dist, of random bytes."""
    folder = load / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp", ".metadata"):
        (folder / name).write_bytes(os.urandom(random.randrange(1, 20_000)))
    (folder / METADATA).write_text('{"sharded_backend": "torch_dist"}')
    if sealed:
        seal(folder)
    return folder


def damage(folder):
    """One thing goes wrong in one file; returns what."""
    file = random.choice(sorted(folder.iterdir()))
    data = bytearray(file.read_bytes())
    at = random.randrange(len(data))
    kind = random.choice(["flip", "truncate", "append", "remove", "zero", "swap", "empty"])
    if kind == "flip":
        data[at] ^= 1 << random.randrange(8)
    elif kind == "truncate":
        del data[at:]
    elif kind == "append":
        data += os.urandom(1)
    elif kind == "zero":
        data[at:] = bytes(len(data) - at)
    elif kind == "swap":
        data = bytearray(os.urandom(len(data)))
    elif kind == "empty":
        data = bytearray()
    if file.read_bytes() == data:
        return damage(folder)
    if kind == "remove":
        file.unlink()
    else:
        file.write_bytes(data)
    return f"{kind} of {file.name} at {at}"


def test_two_hundred_damaged_checkpoints_are_refused(tmp_path):
    refused = i = 0
    while refused < 200:
        i += 1
        folder = checkpoint(tmp_path / str(i), 5)
        verify(folder)
        whole = json.loads((folder / SEAL).read_text())
        what = damage(folder)
        if (folder / SEAL).exists() and _reads_as(folder / SEAL, whole):
            continue  # other white space is no damage
        line = rf"^--load {tmp_path}/{i}: iter_0000005/.* (damage|missing)[^\n]*$"
        with pytest.raises(ValueError, match=line) as error:
            verify(folder)
            require_seal(folder)
        assert "--ckpt-step" in str(error.value), what
        refused += 1


def _reads_as(path, whole):
    try:
        return json.loads(path.read_text()) == whole
    except ValueError:
        return False


def test_a_checkpoint_of_stock_has_no_seal(tmp_path):
    verify(checkpoint(tmp_path, 5, sealed=False))


@pytest.mark.parametrize("written", ["", "15", "20", "-1", "1e1", "garbage"])
def test_an_interrupted_save_is_passed_over(tmp_path, written, capsys):
    checkpoint(tmp_path, 5)
    checkpoint(tmp_path, 10)
    unseal(checkpoint(tmp_path, 15))  # begun again, and killed
    checkpoint(tmp_path, 0).rename(tmp_path / "iter_0000099_copy")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text(written)
    find_complete(tmp_path, tracker)
    assert tracker.read_text() == "10"
    assert f"--load {tmp_path}: the last save was interrupted; going back to iter_0000010" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("written", ["5", "release"])
def test_a_good_tracker_is_left_alone(tmp_path, written):
    checkpoint(tmp_path, 5, sealed=False)
    checkpoint(tmp_path, 10)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text(written)
    find_complete(tmp_path, tracker)
    assert tracker.read_text() == written
