"""Tensor-parallel collectives of a linear, in FP8 or BF16: gather rows, and add partial sums.

Activations are (s, ...), sequence first. With sequence parallelism each of T ranks has its part (s/T, ...) of them.
Each function here is a generator of stages (wire.py). A `Flight` starts it and returns its result later, so that GEMMs
run in between.

A sum in FP8 is an all-to-all and one addition. A rank casts the other ranks' parts of its tensor to `BlockScaled` and
sends them. It adds the received parts to its own part, which is not rounded, in FP32. So T - 1 of T contributions are
rounded once, and the result is rounded once, to BF16. Without sequence parallelism the FP32 sums are cast and gathered
in the same format. On the wire an element takes 1 + 1/128 bytes, instead of 2 in BF16. NaN and infinity become NaN.

A sum may start before the rank's own part is computed (`add_early`): the own part is read when the others have arrived.
"""

from collections.abc import Generator

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .. import ops
from ..numerics.blocks import SHARD_UNIT, PackedBlocks
from . import wire

GATHERS, SUMS = "tp_gather", "tp_sum"


def gather(x: torch.Tensor, group, kind: str = GATHERS) -> wire.Stages:
    """All-gather (s/T, ...) of any type -> (s, ...)."""
    yield from ()
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    sent = x.contiguous().view(torch.uint8)  # as bytes, because gloo has no FP8 types
    handle = dist.all_gather_into_tensor(out.view(torch.uint8), sent, group=group, async_op=True)
    wire.count(kind, out.nbytes, group)
    return out, [handle]


def add(x: torch.Tensor, group, scatter: bool, fp8: bool) -> wire.Stages:
    """Sum x (s, ...) over the ranks -> this rank's part (s/T, ...) of the sum, or with scatter=False all of it.

    The whole sum in BF16 is computed in place.
    """
    ranks, rank = group.size(), group.rank()
    if not scatter:
        if fp8:
            return (yield from _add_everywhere(x, group))
        wire.count(SUMS, 2 * x.nbytes, group)
        return x, [dist.all_reduce(x, group=group, async_op=True)]
    if fp8:
        parts = x.view(ranks, -1, *x.shape[1:])
        return (yield from _add_own((parts[:rank], parts[rank + 1 :]), parts[rank], group))
    out = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    wire.count(SUMS, x.nbytes, group)
    return out, [dist.reduce_scatter_tensor(out, x, group=group, async_op=True)]


def add_early(others: torch.Tensor, room: torch.Tensor, group, fp8: bool) -> wire.Stages:
    """Send the other ranks' parts (T-1, s/T, ...), in rank order -> this rank's part (s/T, ...) of the sum.

    room: (1, s/T, ...) for FP8, (T, s/T, ...) for BF16. Its last row is this rank's own part, which may be written
    until `Flight.land`.
    """
    if fp8:
        rank = group.rank()
        return (yield from _add_own((others[:rank], others[rank:]), room[-1], group))
    _, handle = wire.exchange(others, group, SUMS, room[:-1])
    yield [handle]
    return torch.add(*room.unbind()) if room.shape[0] == 2 else room.sum(0), []  # summed in FP32, rounded once


def _add_own(others: tuple[torch.Tensor, torch.Tensor], own: torch.Tensor, group) -> wire.Stages:
    """This rank's part of a sum in FP8. others: (parts of the ranks before this one, parts of those after it)."""
    before, after = (parts.reshape(len(parts), own.numel()) for parts in others)
    total = yield from _add_blocks(before, after, own.view(-1), group, own.dtype)
    return total[: own.numel()].view(own.shape), []


def _add_everywhere(x: torch.Tensor, group) -> wire.Stages:
    """The whole sum, in FP8."""
    ranks, rank = group.size(), group.rank()
    m = _whole_blocks(-(-x.numel() // ranks))
    parts = _padded(x.reshape(-1), ranks * m).view(ranks, m)
    total = yield from _add_blocks(parts[:rank], parts[rank + 1 :], parts[rank], group, torch.float32)
    packed = PackedBlocks.empty(ranks, m, x.device)
    mine = PackedBlocks(packed.data[rank][None])
    ops.quantize_blocks(total, out=mine)
    handle = dist.all_gather_into_tensor(packed.data.view(-1), mine.data.view(-1), group=group, async_op=True)
    wire.count(SUMS, packed.data.nbytes, group)
    yield [handle]
    whole = torch.empty_like(parts)
    for i, out in enumerate(whole):  # exact, because E4M3 times a power of two fits into BF16
        ops.sum_blocks(packed.payload[i : i + 1], packed.exponents[i : i + 1], out)
    return whole.view(-1)[: x.numel()].view(x.shape), []


def _add_blocks(
    before: torch.Tensor, after: torch.Tensor, own: torch.Tensor, group, dtype: torch.dtype
) -> Generator[wire.Handles, None, torch.Tensor]:
    """The sum for this rank's part `own` (n,), padded to whole blocks (m,). before, after: rows (n,) for the others."""
    m = _whole_blocks(own.numel())
    sent = PackedBlocks.empty(group.size() - 1, m, own.device)
    for first, parts in ((0, before), (len(before), after)):
        if len(parts):
            ops.quantize_blocks(_padded(parts, m).view(-1), out=sent, first=first * m)
    data, handle = wire.exchange(sent.data, group, SUMS)
    yield [handle]
    received, start = PackedBlocks(data), _padded(own, m)  # read only now: `own` may be written until here
    return ops.sum_blocks(received.payload, received.exponents, own.new_empty(m, dtype=dtype), start=start)


def _whole_blocks(count: int) -> int:
    return -(-count // SHARD_UNIT) * SHARD_UNIT


def _padded(x: torch.Tensor, m: int) -> torch.Tensor:
    """x (..., n), padded with zeros at the end to (..., m)."""
    return x if x.shape[-1] == m else F.pad(x, (0, m - x.shape[-1]))
