"""Reduce random gradients over the GPUs of this machine, in one level and in two, and compare with what must come out.

With four GPUs or more the two levels are nodes of two; with two GPUs one of them is trivial, first the one, then the
other.
Rank 0 prints a line of JSON, {reduction: on how many ranks every bit was as expected}.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8 import ops
from megatron_fp8.comm.reduce import Nodes, node_groups, reduce_blocks
from megatron_fp8.comm.wire import Flight
from megatron_fp8.numerics.blocks import PackedBlocks

N = 64 * 2048  # elements of a shard


def rounded(x: torch.Tensor) -> torch.Tensor:
    """(n,) FP32 as blocks hold it."""
    return ops.quantize_blocks(x).dequantize()


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    """Their FP32 sum, one after the other."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
gradient = torch.randn(ranks * N, device="cuda") * 2.0 ** (rank % 3 - 8)
every = [torch.empty_like(gradient) for _ in range(ranks)]
dist.all_gather(every, gradient)
shards = [rounded(x)[rank * N : (rank + 1) * N] for x in every]

alone = [dist.new_group([r]) for r in range(ranks)][rank]
local = {"trivial across": ranks, "trivial inside": 1}
nodes = {"trivial across": Nodes(group, alone), "trivial inside": Nodes(alone, group)}
if ranks >= 4:
    local["nodes of two"], nodes["nodes of two"] = 2, node_groups(group, 2)
right = {}
for name, levels in {"one level": None, **nodes}.items():
    packed = ops.quantize_blocks(gradient, out=PackedBlocks.empty(ranks, N, gradient.device))
    found = Flight(reduce_blocks(packed, group, True, levels)).land().look()
    expected = added(shards)
    if levels is not None:
        size = local[name]
        expected = added([rounded(added(shards[a : a + size])) for a in range(0, ranks, size)])
    same = torch.tensor([torch.equal(found, expected)], dtype=torch.int32, device="cuda")
    dist.all_reduce(same)
    right[name] = int(same)
if rank == 0:
    print(json.dumps(right), flush=True)
dist.destroy_process_group()
