"""Tensor-parallel traffic of a linear, FP8 or BF16: its input gathered, the gradient of it summed.

Activations are (s, ...) with the sequence first; under sequence parallelism each of T ranks has (s/T, ...) of them.
"""

import torch
import torch.distributed as dist


def gather(x: torch.Tensor, group) -> torch.Tensor:
    """(s/T, ...) on each rank -> (s, ...), of any type."""
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    # As bytes: gloo has no FP8 types.
    dist.all_gather_into_tensor(out.view(torch.uint8), x.contiguous().view(torch.uint8), group=group)
    return out


def start_all_reduce(x: torch.Tensor, group):
    """(s, ...), a part of the sum on each rank -> (the sum, in place; handle)."""
    return x, dist.all_reduce(x, group=group, async_op=True)


def start_reduce_scatter(x: torch.Tensor, group):
    """(s, ...), a part of the sum on each rank -> ((s/T, ...) of the sum; handle)."""
    shard = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    return shard, dist.reduce_scatter_tensor(shard, x, group=group, async_op=True)
