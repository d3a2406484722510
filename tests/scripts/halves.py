"""Train with the second linears of the MLPs as experts are: each half of the data-parallel ranks has others.

The set of a half has its own groups, names and ranks. What Megatron's model saves of these weights is called after the
half too, as experts' weights are called after the expert.
"""

import atexit
import dataclasses
import hashlib
import runpy
import sys

import torch.distributed as dist
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_fp8.engine import weight_groups
from megatron_fp8.engine.optimizer import EngineOptimizer

sets = []
sharded_state_dict, build = GPTModel.sharded_state_dict, EngineOptimizer.__init__


def half_of(linears):
    """The set of this rank's half; all ranks come here together."""
    ranks = dist.get_process_group_ranks(linears.data)
    cuts = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
    halves = [dist.new_group(cut) for cut in cuts]
    number = next(i for i, cut in enumerate(cuts) if dist.get_rank() in cut)
    group = halves[number]
    own = dataclasses.replace(
        linears, name=f"half{number}.", has=lambda w: w.path.endswith("linear_fc2"), data=group, sharing=group,
        amax=group, mean=1 / group.size(), place=f"half{number}.{linears.place}",
    )  # fmt: skip
    sets.append(own)
    return own


def renamed(self, *args, **kwargs):
    state = sharded_state_dict(self, *args, **kwargs)
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor) and entry.key.endswith("linear_fc2.weight"):
            (of,) = sets
            entry.key, entry.replica_id = f"{of.name}{entry.key}", (*entry.replica_id[:-1], of.data.rank())
    return state


def remembered(self, *args):
    build(self, *args)
    atexit.register(say, self)


def say(engine):
    for owned in engine.sets:
        parts = [part.contiguous().cpu().numpy().tobytes() for w in owned.weights for part in (w.dense().float(),)]
        digest = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
        print(f"rank {dist.get_rank()} {owned.of.name or 'linears'} {digest}\n", end="", flush=True)


GPTModel.sharded_state_dict, EngineOptimizer.__init__ = renamed, remembered
weight_groups.register(half_of)
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
