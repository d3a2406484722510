"""What ranks know together, what rank 0 tells them, what is the largest of any; a process without ranks is alone."""

from typing import Any

import torch
import torch.distributed as dist


def rank() -> int:
    """0 too in a fake group (--fake-process-group): there is no other process."""
    return dist.get_rank() if dist.is_initialized() and dist.get_backend() != "fake" else 0


def from_rank_0[T](mine: T) -> T:
    held = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(held, 0)
    return held[0]


def gathered[T](mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Of all ranks, or of a group's, in their order."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, mine, group=group)
    return everywhere


def all_reduce_largest(values: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """The largest of all ranks' `values` (any shape, float), in place; returns all_reduce's handle, if async_op.

    NaN counts as infinity: it is no larger than anything, so a reduction may drop it, and differently on each rank.
    """
    values.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=async_op)
