"""What all ranks of a run know together, or rank 0 tells them; in a process without ranks it is alone."""

from typing import Any

import torch.distributed as dist


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


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
