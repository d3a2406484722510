"""Real checkpoints in milliseconds: Megatron's own writer and reader, with the plugin's hooks, in one gloo rank."""

import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fp8 import cpu

TRACKER = "latest_checkpointed_iteration.txt"
CONTENTS = {"megatron_fp8": {"version": 1, "compact": ""}, "distrib_optim_sharding_type": "fully_reshardable"}
STOCKS = {"distrib_optim_sharding_type": "fully_reshardable"}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group, Megatron on the CPU, and our wrappers of Megatron's functions."""
    if cpu.needed():
        cpu.install()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    cpu.uninstall()


@pytest.fixture
def load(one_rank, monkeypatch):
    """Read the part of a checkpoint that every rank reads first, as at a level. Returns the iteration, or None."""
    import megatron.training.checkpointing as checkpointing

    from megatron_fp8.checkpoint import loads

    monkeypatch.setattr(checkpointing, "read_metadata", loads.name_finished(checkpointing.read_metadata))
    hooked = loads.load_whole(object())(checkpointing._load_base_checkpoint)

    def load(folder: Path, **flags) -> int | None:
        args = Namespace(
            load=str(folder),
            save=str(folder),
            ckpt_step=None,
            non_persistent_ckpt_type=None,
            non_persistent_global_ckpt_dir=None,
            exit_on_missing_checkpoint=False,
            finetune=True,
            no_load_optim=False,
        )
        vars(args).update(flags)
        state, *_ = hooked(str(folder), args, rank0=True)
        assert args.ckpt_step == flags.get("ckpt_step")
        return state and state["iteration"]

    return load


def save(folder: Path, iteration: int, hook=None, more: dict | None = None, **how) -> Path:
    """Write a checkpoint and Megatron's tracker.

    hook: a wrapper of Megatron's save; by default it seals. more: {key: tensor}, added or replacing others.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from megatron_fp8.checkpoint.saves import seal_saves

    checkpoint = folder / f"iter_{iteration:07d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    state = {
        "args": Namespace(num_layers=2),
        "iteration": iteration,
        "weight": ShardedTensor.from_rank_offsets("weight", torch.randn(16, 16)),
        "extra": ShardedObject("extra", {"a": [1]}, (1,), (0,)),
    }
    state |= {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in (more or {}).items()}
    how.setdefault("content_metadata", CONTENTS)
    (hook or seal_saves)(dist_checkpointing.save)(state, str(checkpoint), **how)
    (folder / TRACKER).write_text(str(iteration))
    return checkpoint


def unsealed(stock):
    """A wrapper for `save` that does nothing."""
    return stock
