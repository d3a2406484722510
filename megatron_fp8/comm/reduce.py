"""Data-parallel gradient reduction with one byte an element on the wire and one FP32 sum.

A reduce-scatter over R ranks usually runs as a ring: each hop adds, and in FP8 each hop also rounds and may saturate
(comm/shared.py does this, like the FP8-LM paper). Here the same bytes are sent once, by an all-to-all, and added once,
in FP32:

    rank i:   payload_i, exponents_i = BlockScaled(g_i)          1 + 1/128 bytes an element
    wire:     chunk j of both goes to rank j                     (R-1)/R of them leave the rank
    rank j:   shard_j = sum over i of dequantise(chunk j of i)   FP32, in rank order

Each gradient is rounded exactly once. A block's scale is a power of two chosen from its own 128 elements, so nothing
saturates at any R, and the ranks need not agree on scales first. The error is at most 2^-4 of an element that is normal
in its block (half a unit in the last of E4M3's four significant bits), and the R roundings are independent. Without a
distributed optimizer an all-gather follows. Its payload is quantised too, and every rank, including the owner, takes
the dequantised values, so all replicas stay bitwise equal.

The sum is not computed when the bytes arrive. The received bytes, one an element, represent the FP32 sum, and
`BlockShards` computes it when it is read: once for the norm, and once in the optimizer's kernel, which reads the bytes
directly. So a reduced gradient needs no FP32 buffer, and the reduction is communication alone.

Two levels, for clusters (`--fp8-grad-reduce-hierarchy`), with L ranks in each of A nodes, R = A L: the gradients are
reduced inside the node, and their sums across nodes. Each element is rounded twice, both sums are FP32, and 1/L of the
bytes cross a node boundary:

    in the node     (L-1)/L (1 + 1/128) bytes an element        then an FP32 sum of L
    across nodes    (A-1)/A (1 + 1/128)/L bytes an element      then an FP32 sum of A

Source of all-to-all plus local sum: Megatron's reduce_scatter_with_fp32_accumulation (in BF16) and ZeRO++
(arXiv 2306.10209, INT8, two levels).

The ranks send a `PackedBlocks` of R shards of m elements: row j, payload and exponents together, goes to rank j.
"""

import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import ops
from ..errors import UserError
from ..numerics.blocks import BLOCK, PackedBlocks
from ..ops.adam_states import Gradient
from ..ranks import gathered
from . import wire


@dataclass
class DenseShard:
    """A reduced gradient (n,) in FP32 or BF16."""

    values: torch.Tensor

    def look(self) -> torch.Tensor:
        """The gradient (n,) in FP32; do not write to it."""
        return self.values.float()

    def gradient(self, start: int, stop: int) -> Gradient:
        """Elements start .. stop - 1 for adam_step; start and stop are multiples of 128."""
        return self.values[start:stop]

    def square_sum(self) -> torch.Tensor:
        """Sum of squares, 0-d FP32."""
        return torch.linalg.vector_norm(self.values, dtype=torch.float32).square()


@dataclass
class BlockShards:
    """A reduced gradient (m,), stored as the R ranks' contributions: it is their FP32 sum. Row i is rank i's."""

    packed: PackedBlocks

    def look(self) -> torch.Tensor:
        """The gradient (m,) in FP32, a new tensor."""
        payload = self.packed.payload
        out = torch.empty(payload.shape[1], dtype=torch.float32, device=payload.device)
        return ops.sum_blocks(payload, self.packed.exponents, out)

    def gradient(self, start: int, stop: int) -> Gradient:
        """Elements start .. stop - 1 for adam_step, which sums the ranks' contributions; multiples of 128."""
        return self.packed.payload[:, start:stop], self.packed.exponents[:, start // BLOCK : stop // BLOCK]

    def square_sum(self) -> torch.Tensor:
        """Sum of squares, 0-d FP32, in one pass."""
        return ops.square_sum_blocks(self.packed.payload, self.packed.exponents)


@dataclass
class GatheredShards:
    """A whole reduced gradient (R * m,): row j is the shard that rank j summed."""

    packed: PackedBlocks

    def look(self) -> torch.Tensor:
        """The gradient (R * m,) in FP32, a new tensor."""
        return self.packed.dequantize()

    def gradient(self, start: int, stop: int) -> Gradient:
        """A copy of the elements start .. stop - 1 for adam_step; start and stop are multiples of 128."""
        blocks = self.packed.read(start, stop - start)
        return blocks.payload[None], blocks.exponents[None]

    def square_sum(self) -> torch.Tensor:
        """Sum of squares, 0-d FP32."""
        rows = (BlockShards(PackedBlocks(row[None])) for row in self.packed.data)
        return torch.stack([row.square_sum() for row in rows]).sum()


@dataclass(frozen=True)
class Nodes:
    """The two levels of a data-parallel group: this node's ranks, and the ranks at this rank's place in each node."""

    inside: dist.ProcessGroup
    across: dist.ProcessGroup


def reduce_blocks(
    packed: PackedBlocks, group, sharded: bool, nodes: Nodes | None = None, receive: PackedBlocks | None = None
) -> wire.Stages:
    """Sum over the group with FP8 on the wire. The result is BlockShards if sharded, else GatheredShards.

    Args:
        packed: R shards of m elements. A NaN in it makes its sum NaN.
        group: the data-parallel process group, of R ranks.
        sharded: True: each rank gets its own m elements of the sum. False: all of it, rounded once more.
        nodes: reduce in two levels; needs `sharded`.
        receive: buffer for the received shards, of packed's shape; not `packed` itself.
    """
    if nodes is not None:
        return (yield from _reduce_in_two_levels(packed, nodes))
    received, handle = wire.all_to_all(packed.data, group, receive.data if receive else None)
    shards = BlockShards(PackedBlocks(received))
    if sharded:
        return shards, [handle]
    yield [handle]
    summed = _pack(shards.look(), shards=1)
    every, handle = wire.all_gather(summed.data.view(-1), group)
    return GatheredShards(PackedBlocks(every)), [handle]


def _reduce_in_two_levels(packed: PackedBlocks, nodes: Nodes) -> wire.Stages:
    local, count = nodes.inside.size(), nodes.across.size()
    m = packed.payload.shape[1]
    # Rank a * local + l owns row a * local + l. Collect in row l of `sent` the rows of the ranks l of all nodes.
    sent = PackedBlocks.empty(local, count * m, packed.data.device)
    for own, all_ in ((sent.payload, packed.payload), (sent.exponents, packed.exponents)):
        by_rank = all_.view(torch.uint8).unflatten(0, (count, local)).transpose(0, 1)
        own.view(torch.uint8).unflatten(1, (count, -1)).copy_(by_rank)
    inside, handle = wire.all_to_all(sent.data, nodes.inside)
    yield [handle]
    del sent, own, all_, by_rank
    summed = _pack(BlockShards(PackedBlocks(inside)).look(), shards=count)
    del inside
    across, handle = wire.all_to_all(summed.data, nodes.across, kind="grad_reduce_across_nodes")
    return BlockShards(PackedBlocks(across)), [handle]


def _pack(values: torch.Tensor, shards: int) -> PackedBlocks:
    """Quantise values (n,) into `shards` shards."""
    packed = PackedBlocks.empty(shards, values.numel() // shards, values.device)
    ops.quantize_blocks(values, out=packed)
    return packed


def reduce_fp32(values: torch.Tensor, group, sharded: bool) -> wire.Stages:
    """FP32 reduce-scatter (sharded) or all-reduce of `values` (R * n,), in place, for `--fp8-grad-reduce fp32`."""
    yield from ()
    if sharded:
        shard = wire.own_shard(values, group)
        handle = dist.reduce_scatter_tensor(shard, values, group=group, async_op=True)
        wire.count(wire.GRADS, values.nbytes, group)
        return DenseShard(shard), [handle]
    handle = dist.all_reduce(values, group=group, async_op=True)
    wire.count(wire.GRADS, 2 * values.nbytes, group)
    return DenseShard(values), [handle]


def node_groups(group, ranks_per_node: int | None, make: Callable = dist.new_group) -> Nodes | None:
    """Cut every data-parallel group of the run into nodes. Collective over the whole world.

    Args:
        group: this rank's data-parallel group, of R ranks, from Megatron's parallel state.
        ranks_per_node: L, the number of consecutive ranks of a group in a node; None: ranks with the same host name.
        make: makes the process group of a list of ranks.

    Returns None if there would be one level: L = 1 or L = R. UserError, on all ranks, unless each node of each group
    has the same number of consecutive ranks.
    """
    every = gathered((socket.gethostname(), dist.get_process_group_ranks(group)))
    groups = sorted({tuple(ranks) for _, ranks in every})
    if ranks_per_node is None:
        runs = [len(list(run)) for ranks in groups for _, run in itertools.groupby(every[r][0] for r in ranks)]
        if len(set(runs)) > 1:
            raise UserError(
                "--fp8-grad-reduce-hierarchy node: the nodes have different numbers of data-parallel ranks "
                f"({', '.join(map(str, sorted(set(runs))))}); use off"
            )
        ranks_per_node = runs[0]
    size = len(groups[0])
    if size % ranks_per_node:
        raise UserError(
            f"--fp8-grad-reduce-hierarchy {ranks_per_node}: does not divide the data-parallel size {size}; "
            "give the number of data-parallel ranks in a node, or off"
        )
    if ranks_per_node in (1, size):
        return None
    mine: dict[str, dist.ProcessGroup] = {}
    for members in groups:  # it is collective: all ranks make all groups
        starts = range(0, len(members), ranks_per_node)
        cuts = [("inside", members[s : s + ranks_per_node]) for s in starts]
        cuts += [("across", members[i::ranks_per_node]) for i in range(ranks_per_node)]
        for level, cut in cuts:
            made = make(list(cut))
            if dist.get_rank() in cut:
                mine[level] = made
    return Nodes(**mine)
