"""Small collectives over ranks: gather objects, broadcast from rank 0, reduce to the largest; also for one process."""

from typing import Any

import torch
import torch.distributed as dist


def rank() -> int:
    """This process' rank; 0 without a group, and in a fake group (--fake-process-group), which has no other process."""
    return dist.get_rank() if dist.is_initialized() and dist.get_backend() != "fake" else 0


def from_rank_0[T](mine: T) -> T:
    """Rank 0's `mine`, on all ranks. Collective."""
    held = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(held, 0)
    return held[0]


def gathered[T](mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`mine` of all ranks, or of all ranks of a group, in rank order. Collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, mine, group=group)
    return everywhere


def all_reduce_largest(values: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Maximum over the ranks of `values` (float, any shape), in place. Returns all_reduce's handle if async_op.

    NaN counts as infinity: a maximum could drop a NaN, and on some ranks only.
    """
    values.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=async_op)
