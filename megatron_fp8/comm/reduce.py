"""Data-parallel gradient reduction: one byte an element on the wire, one FP32 sum.

A reduce-scatter over R ranks usually runs as a ring: each hop adds, and in FP8 each hop rounds again and may
saturate.  The same bytes can be sent once instead (an all-to-all) and added once, in FP32:

    rank i:   payload_i, exponents_i = BlockScaled(g_i)          1 + 1/128 bytes an element
    wire:     chunk j of both goes to rank j                     (R-1)/R of them leave the rank
    rank j:   shard_j = sum over i of dequantise(chunk j of i)   FP32, in rank order

Each gradient is rounded exactly once.  Block scales are powers of two chosen from 128 neighbours, so nothing
saturates at any R and no scale has to be agreed beforehand.  Error: at most 2^-4 of an element that is normal in
its block (half a unit in the last of E4M3's four significant bits), and the R roundings are independent.
Without a distributed optimizer an all-gather follows; its payload is quantised too and every rank, the owner
included, takes the dequantised values, so all replicas stay bitwise equal.

Idea of all-to-all plus local sum: Megatron's reduce_scatter_with_fp32_accumulation (in BF16) and ZeRO++
(arXiv 2306.10209, INT8).  `sent_bytes` counts what left this rank in this
step, by kind.

A buffer here is flat FP32 of R * n elements, n a multiple of 128; rank j owns elements [j*n, (j+1)*n).
"""

from collections import Counter

import torch
import torch.distributed as dist

from .. import ops
from ..numerics.blocks import BLOCK

sent_bytes: Counter[str] = Counter()


def _count(kind: str, numbytes: int, group) -> None:
    """Count a collective of `numbytes` in all, of which this rank keeps 1/R."""
    sent_bytes[kind] += numbytes * (group.size() - 1) // group.size()


def own_shard(buffer: torch.Tensor, group) -> torch.Tensor:
    """The view of `buffer` that this rank owns."""
    return buffer.chunk(group.size())[group.rank()]


def reduce_scatter_blocks(buffer: torch.Tensor, group) -> None:
    """Sum `buffer` over the group into this rank's shard of it, FP8 on the wire.

    Args:
        buffer: (R * n,) FP32 or BF16, n a multiple of 128.  Its own shard receives the sum; the rest is
            left as it was.  A non-finite element makes its sum NaN on the owner.
        group: the data-parallel process group, of R ranks.
    """
    ranks = group.size()
    blocks = ops.quantize_blocks(buffer)
    received = _all_to_all(blocks.payload.view(torch.uint8), group).view(blocks.payload.dtype)
    exponents = _all_to_all(blocks.exponents, group)
    ops.sum_blocks(received.view(ranks, -1), exponents.view(ranks, -1), own_shard(buffer, group))


def all_reduce_blocks(buffer: torch.Tensor, group) -> None:
    """Sum `buffer` over the group on every rank: reduce_scatter_blocks, then an all-gather in FP8."""
    reduce_scatter_blocks(buffer, group)
    blocks = ops.quantize_blocks(own_shard(buffer, group))
    payload = _all_gather(blocks.payload.view(torch.uint8), group).view(blocks.payload.dtype)
    ops.sum_blocks(payload[None], _all_gather(blocks.exponents, group)[None], buffer)


def reduce_scatter_fp32(buffer: torch.Tensor, group) -> None:
    """The plain FP32 reduce-scatter, in place, for comparison (`--fp8-grad-reduce fp32`)."""
    dist.reduce_scatter_tensor(own_shard(buffer, group), buffer, group=group)
    _count("grad_reduce", buffer.nbytes, group)


def all_reduce_fp32(buffer: torch.Tensor, group) -> None:
    """The plain FP32 all-reduce, in place."""
    dist.all_reduce(buffer, group=group)
    _count("grad_reduce", 2 * buffer.nbytes, group)


def all_gather_weights(buffer: torch.Tensor, group) -> None:
    """Give every rank all shards of `buffer`, in place."""
    dist.all_gather_into_tensor(buffer, own_shard(buffer, group), group=group)
    _count("weight_gather", buffer.nbytes, group)


REDUCTIONS = {  # --fp8-grad-reduce: (with the distributed optimizer, without)
    "block": (reduce_scatter_blocks, all_reduce_blocks),
    "fp32": (reduce_scatter_fp32, all_reduce_fp32),
}

ALIGNMENT = BLOCK  # a shard's length is a multiple of this, so that no block crosses two ranks


def _all_to_all(data: torch.Tensor, group) -> torch.Tensor:
    received = torch.empty_like(data)
    dist.all_to_all_single(received, data, group=group)
    _count("grad_reduce", data.nbytes, group)
    return received


def _all_gather(data: torch.Tensor, group) -> torch.Tensor:
    gathered = data.new_empty(data.numel() * group.size())
    dist.all_gather_into_tensor(gathered, data, group=group)
    _count("grad_reduce", gathered.nbytes, group)
    return gathered
