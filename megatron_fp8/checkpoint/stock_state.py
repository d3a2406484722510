"""Loads the optimizer state of stock's own parameters from either of its two reshardable forms.

    --use-distributed-optimizer    masters are `optimizer.state.param.<weight>`, groups have the step (stock's fully
                                   reshardable form, which a level switches on)
    without                        masters are `optimizer.state.fp32_param.<weight>`, the step is `common_step`

Moments have the same names in both, and every tensor is whole for its tensor- and pipeline-parallel rank.  So a run
loads the other form by asking for the other name, and stores the step in its own place.  Stock's third form, its
default, is split like its buffers: only a run with the same layout can read it.
"""

import copy
from itertools import zip_longest
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, param_group_identifier_keys
from megatron.training.global_vars import get_args

FORM, RESHARDABLE = "distrib_optim_sharding_type", "fully_reshardable"
_MASTERS = "megatron_fp8_masters"
_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")


def describe(metadata: dict) -> None:
    """Add the masters' name to a checkpoint's content metadata, and the reshardable form if it names no form.

    Stock reads only the form: without it, a run with the distributed optimizer accepts no other layout.
    """
    metadata[_MASTERS] = "fp32_param" if metadata.get(FORM) is None else "param"
    if metadata.get(FORM) is None:
        metadata[FORM] = RESHARDABLE


def ask_for_masters(state: Any, metadata: dict) -> None:
    """Rename the masters to be loaded to the checkpoint's names. For a local checkpoint they keep their names."""
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            for name in ("param", "fp32_param"):
                there = metadata.get(_MASTERS, name)
                entry.key = entry.key.replace(f"optimizer.state.{name}.", f"optimizer.state.{there}.", 1)


def adopt(part: MegatronOptimizer, state: dict, saved: dict) -> dict:
    """A part's loaded state, in the form in which the part itself would have saved it.

    state: its tensors, and the other entries of the part that had its index in the checkpoint. It may be another part:
    a run without a level has no chain, and one with --expert-model-parallel-size 1 has no part for experts.
    saved: the whole loaded state.
    """
    beside = copy.deepcopy({key: value for key, value in saved.items() if not isinstance(key, int)})
    beside.get("optimizer", {}).pop("param_groups", None)  # without a chain it has other parts' groups too
    state = merge(beside, state)
    optimizer, step = state.setdefault("optimizer", {}), step_of(saved)
    params = [group["params"] for group in optimizer.get("param_groups", ()) if "params" in group]
    groups = [_saved_group(group, saved) for group in part.optimizer.param_groups]
    optimizer["param_groups"] = [{**group, "params": at} for group, at in zip_longest(groups, params)]
    if isinstance(part.optimizer, torch.optim.Adam) and not isinstance(part, DistributedOptimizer):
        optimizer["state"]["common_step"] = torch.tensor(float(step))
        return state
    for group in optimizer["param_groups"]:
        group["step"] = step
    if isinstance(part, DistributedOptimizer):
        optimizer.pop("state", None)
        state.setdefault("param_state_sharding_type", RESHARDABLE)
    return state


def take_schedule(parts: list[MegatronOptimizer], saved: dict) -> None:
    """With --use-checkpoint-opt_param-scheduler, give every part's groups the checkpoint's learning rates.

    Stock takes only its scheduler's rates from the checkpoint, but reads the groups' rates.
    """
    if get_args().use_checkpoint_opt_param_scheduler:
        for group in (group for part in parts for group in part.optimizer.param_groups):
            found = [_schedule(other) for other in _groups(saved) if _identity(other) == _identity(group)]
            if found and _schedule(group) not in found:
                if any(other != found[0] for other in found):
                    several = "it has several learning rates for one kind of parameter (--decoupled-lr)"
                    raise CheckpointingException(f"{several}; give its --lr, --min-lr and --decoupled-lr")
                group.update(found[0])


def step_of(saved: dict) -> int:
    """The number of updates made; it is the same for all parts."""
    steps = [optimizer.get("state", {}).get("common_step") for optimizer in _optimizers(saved)]
    steps += [group.get("step") for group in _groups(saved)]
    return int(next((step for step in steps if step is not None), 0))


def _saved_group(group: dict, saved: dict) -> dict:
    """The saved state of a parameter group, from any part. Adam's betas and eps are this run's, as for linears. So is
    its kernel: rank 0 saves the options, and chooses no kernel for a group that is empty on it.

    Stock identifies a group by its learning rates too, so it finds none with --override-opt_param-scheduler.
    """
    own = {key: group[key] for key in ("is_expert_parallel", "betas", "eps", "fused", "foreach") if key in group}
    alike = [found for found in _groups(saved) if _identity(found) == _identity(group)]
    if not alike:
        said = ", ".join(f"{key} {value}" for key, value in _identity(group).items() if value is not None)
        raise CheckpointingException(f"it has no optimizer state for parameters with {said}; add --no-load-optim")
    for found in alike:
        if _schedule(found) == _schedule(group):
            return {**found, **own}
    if not get_args().override_opt_param_scheduler:
        theirs, ours = (", ".join(f"{key} {value}" for key, value in _schedule(g).items()) for g in (alike[0], group))
        remedy = "--override-opt_param-scheduler for this run's, or --use-checkpoint-opt_param-scheduler for its own"
        raise CheckpointingException(f"it has {theirs}, this run {ours}; add {remedy}")
    return {**alike[0], **own, **_schedule(group)}


def _identity(group: dict) -> dict:
    """The keys and values that identify a group, without its part of the chain and its schedule."""
    others = {"is_expert_parallel", *_SCHEDULE}
    return {key: group.get(key) for key in param_group_identifier_keys if key not in others}


def _schedule(group: dict) -> dict:
    return {key: group[key] for key in _SCHEDULE if group.get(key) is not None}


def _groups(saved: dict) -> list[dict]:
    return [group for optimizer in _optimizers(saved) for group in optimizer.get("param_groups", ()) if "lr" in group]


def _optimizers(saved: dict) -> list[dict]:
    parts = [saved, *(part for key, part in saved.items() if isinstance(key, int))]
    return [part["optimizer"] for part in parts if "optimizer" in part]
