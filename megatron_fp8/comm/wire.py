"""The collectives that gradients and weights travel by, each counted.

Payloads travel as bytes: gloo has no FP8 types, and an all-to-all or a gather does not look inside.  `sent_bytes`
counts what left this rank in this step, by kind; a collective over R ranks keeps 1/R of its bytes at home.
"""

from collections import Counter

import torch
import torch.distributed as dist

from ..numerics.blocks import BlockScaled

GRADS, WEIGHTS = "grad_reduce", "weight_gather"
sent_bytes: Counter[str] = Counter()


def count(kind: str, numbytes: int, group) -> None:
    """Count a collective of `numbytes` in all, of which this rank keeps 1/R."""
    sent_bytes[kind] += numbytes * (group.size() - 1) // group.size()


def own_shard(buffer: torch.Tensor, group) -> torch.Tensor:
    """The view of `buffer` (R * n,) that this rank owns."""
    return buffer.chunk(group.size())[group.rank()]


def all_to_all(data: torch.Tensor, group, out: torch.Tensor | None = None, kind: str = GRADS) -> torch.Tensor:
    """Chunk j of `data` (R * n,), one byte an element, goes to rank j -> what the R ranks sent, in rank order."""
    out = torch.empty_like(data) if out is None else out
    dist.all_to_all_single(out.view(torch.uint8), data.view(torch.uint8), group=group)
    count(kind, data.nbytes, group)
    return out


def all_to_all_blocks(blocks: BlockScaled, group, out: BlockScaled | None = None, kind: str = GRADS) -> BlockScaled:
    """all_to_all of a BlockScaled (R * n,), n a multiple of 128, into `out` if given."""
    return BlockScaled(
        all_to_all(blocks.payload, group, out.payload if out else None, kind),
        all_to_all(blocks.exponents, group, out.exponents if out else None, kind),
    )


def all_gather(shard: torch.Tensor, group) -> torch.Tensor:
    """(n,), one byte an element, of every rank -> (R * n,)."""
    gathered = shard.new_empty(shard.numel() * group.size())
    dist.all_gather_into_tensor(gathered.view(torch.uint8), shard.view(torch.uint8), group=group)
    count(GRADS, gathered.nbytes, group)
    return gathered


def all_gather_weights(buffer: torch.Tensor, group):
    """Give every rank all shards of `buffer` (R * n,), in place -> the handle to wait for."""
    count(WEIGHTS, buffer.nbytes, group)
    return dist.all_gather_into_tensor(buffer, own_shard(buffer, group), group=group, async_op=True)
