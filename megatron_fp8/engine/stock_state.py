"""The optimizer state of stock's own parameters in the two forms in which checkpoints have it.

    --use-distributed-optimizer    masters are `optimizer.state.param.<weight>`, groups have the step (stock's fully
                                   reshardable form, which a level asks for)
    without                        masters are `optimizer.state.fp32_param.<weight>`, the step is `common_step`

Moments have the same names, and every tensor is whole for its tensor- and pipeline-parallel rank.  So a run loads the
other form by asking for the other name, and puts the step where it looks for it.  Stock's third form, its default, is
cut as its buffers are: only a run of the same layout can read it.
"""

import copy
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

FORM, RESHARDABLE = "distrib_optim_sharding_type", "fully_reshardable"
_MASTERS = "optimizer.state.{}."


def is_distributed(metadata: dict) -> bool:
    """Whether a checkpoint with this content metadata is of a run with the distributed optimizer."""
    return metadata.get(FORM) is not None


def form_to_ask_for(metadata: dict, parts: list[MegatronOptimizer]) -> dict:
    """The content metadata with which these parts say what they would load."""
    if not is_distributed(metadata) and any(isinstance(part, DistributedOptimizer) for part in parts):
        return {**metadata, FORM: RESHARDABLE}
    return metadata


def ask_for_masters(state: Any, metadata: dict) -> None:
    """Give the masters in what is to be loaded the names that they have in the checkpoint."""
    wanted = "param" if is_distributed(metadata) else "fp32_param"
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            for name in ("param", "fp32_param"):
                entry.key = entry.key.replace(_MASTERS.format(name), _MASTERS.format(wanted), 1)


def adopt(part: MegatronOptimizer, state: dict, common: dict) -> dict:
    """A part's loaded state as the part itself would have saved it.

    common: what a run without a level has beside it, whose optimizer is no chain; else empty.
    """
    state = merge(copy.deepcopy(common), state)
    optimizer, step = state["optimizer"], step_of(state)
    if isinstance(part.optimizer, torch.optim.Adam) and not isinstance(part, DistributedOptimizer):
        optimizer["state"]["common_step"] = torch.tensor(float(step))
        return state
    for group in optimizer["param_groups"]:
        group["step"] = step
    if isinstance(part, DistributedOptimizer):
        optimizer.pop("state", None)
        state.setdefault("param_state_sharding_type", RESHARDABLE)
    return state


def step_of(state: dict) -> int:
    """The updates made, of a part's loaded state."""
    optimizer = state["optimizer"]
    steps = [optimizer.get("state", {}).get("common_step"), *(group.get("step") for group in optimizer["param_groups"])]
    return int(next((step for step in steps if step is not None), 0))
