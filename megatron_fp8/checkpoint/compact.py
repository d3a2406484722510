"""The compact form of the engine's state in a checkpoint (`--fp8-ckpt-compact`): the states' own bytes.

Each data-parallel rank saves its row of each bucket's states, payload and exponents: 5 bytes a parameter at O2 and O3
(remainder 2, m 1, v 2, and 2/128), beside the model's BF16 weights, 7 in all. Nothing is converted or gathered. The
form depends on the layout: data-parallel rank, bucket, format.  The checkpoint's contents metadata names the layout
(state.py), and a run with another one is refused before anything is loaded.

    optimizer.fp8_compact.pp0.tp1.bucket3.exp_avg.payload      (R * n,) uint8, row j from data-parallel rank j
"""

import zlib

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from ..engine import bucket_states
from ..engine.bucket import Bucket

_NAMES = ("master", "exp_avg", "exp_avg_sq")


def sharded_compact_state(buckets: list[Bucket], some_frozen: bool) -> dict:
    """What to save, or to load into: {"compact": {bucket: {state: {payload or exponents: sharded tensor}}}}.

    some_frozen: whether a script has frozen linears of this rank. The layout then does not determine which weights are
    in a bucket, so the keys contain a hash of their names.
    """
    state: dict[int, dict] = {}
    for i, bucket in enumerate(buckets):
        state[i] = {}
        members = " ".join(weight.key for weight in bucket.weights)
        key = f"{bucket.of.place}.bucket{i}" + (f".{zlib.crc32(members.encode()):08x}" if some_frozen else "")
        for name in _NAMES:
            state[i][name] = {
                kind: _sharded(f"optimizer.fp8_compact.{key}.{name}.{kind}", tensor, bucket)
                for kind, tensor in bucket_states.tensors(getattr(bucket, name)).items()
            }
    return {"compact": state}


def load_compact_state(buckets: list[Bucket], state: dict) -> None:
    """Load what `sharded_compact_state` asked for."""
    for i, bucket in enumerate(buckets):
        for name in _NAMES:
            for kind, tensor in bucket_states.tensors(getattr(bucket, name)).items():
                tensor.view(torch.uint8).copy_(state["compact"][i][name][kind])


def _sharded(key: str, tensor: torch.Tensor, bucket: Bucket) -> ShardedTensor:
    """This rank's row as bytes, or all rows if they are replicated: a copy on the host, which loading overwrites."""
    data = tensor.view(torch.uint8).to("cpu", copy=True)
    rank, ranks = bucket.group.rank(), bucket.group.size()
    offsets = [(0, rank, ranks)] if bucket.sharded else []
    return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=0 if bucket.sharded else rank)
