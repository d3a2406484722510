"""The weight engine: flat buffers for the weights, gradients and master weights of the FP8 linears.

One `Bucket` for some consecutive linears of a model chunk, in backward order, all of one Megatron parameter group
(the same weight decay and learning-rate rules):

    weight     BF16   |  W0  |   W1   | W2 | ... | pad |     each linear's parameter is a view of it
    gradients  1 to 4 bytes, the same layout (gradients.py)
    shards            | rank 0 | rank 1 | ... | rank R-1 |    even cuts, at multiples of 2,048 elements
    master     FP32   this rank's shard only (everything, without the distributed optimizer)

A step: micro-batches add to the gradients; these are summed over data parallelism for the owner of each shard
(`launch`, `advance`, `land`: started, driven on, waited for); the optimizer updates master from that sum; `publish`
rounds master to BF16 into the shard of weight and gathers the rest.  A bucket is the unit of all of it: what is on
the wire, and what the optimizer holds in FP32, is one bucket (or a few) at a time.

The gradient of a parameter has the meaning that Megatron's own buffers give it: the mean over data-parallel
(and context-parallel) ranks, or, with --calculate-per-token-loss, the sum divided by the number of tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

from ..comm import wire
from ..comm.reduce import BlockShards, DenseShard, GatheredShards
from ..comm.shared import ScaledShard
from ..layers.linear import Fp8Weight
from ..numerics.blocks import BLOCK, SHARD_UNIT
from .gradients import GradSlot, GradStore

Reduced = DenseShard | BlockShards | GatheredShards | ScaledShard


class Bucket:
    """The flat buffers of some linears.

    Attributes:
        master: FP32 Parameter of this rank's part.
        spans: (Fp8Weight, start, end) of each weight in the flat buffers, in elements.
        shard: this rank's part of the flat buffers, without the padding at the end, which belongs to nobody.
        reduced: after `land`, the sum of the gradients over data parallelism, for this rank's shard.
        watch: looks at the sum (`reduce`), see monitor/collect.py; None on most steps.
    """

    def __init__(
        self,
        weights: list[Fp8Weight],
        group,
        sharded: bool,
        storage: str,
        reduce: Callable[["Bucket"], wire.Stages],
        identity: Callable[[Fp8Weight], tuple[int, ...]],
    ):
        self.weights, self.group, self._reduce = weights, group, reduce
        self.sharded = sharded and group.size() > 1
        sizes = [w.param.numel() for w in weights]
        numel, unit = sum(sizes), SHARD_UNIT * group.size()
        padded = -(-numel // unit) * unit
        assert all(size % BLOCK == 0 for size in sizes)  # both sides are multiples of 16, by the GEMM's rules
        device = weights[0].param.device
        self.weight = torch.zeros(padded, dtype=weights[0].param.dtype, device=device)
        self.grads = GradStore(group.size(), padded // group.size(), storage, device)
        self.reduced: Reduced | None = None
        self._flight: wire.Flight | None = None
        self.watch: Any = None

        self.spans, start = [], 0
        for weight, size in zip(weights, sizes, strict=True):
            self.spans.append((weight, start, start + size))
            view = self.weight[start : start + size].view_as(weight.param)
            view.copy_(weight.param.detach())
            weight.param.data = view
            weight.grad = GradSlot(self.grads, start, weight.param.shape, identity(weight))
            start += size

        ranks, rank = (group.size(), group.rank()) if self.sharded else (1, 0)
        begin = rank * (padded // ranks)
        self.shard = slice(begin, max(begin, min(begin + padded // ranks, numel)))
        self.master = Parameter(self.weight[self.shard].float())
        self.master.tensor_model_parallel = True  # each tensor-parallel rank has its own part: no duplicate
        for weight, start, end in self.spans:  # what --log-params-norm looks at
            lo, hi = max(start, self.shard.start), min(end, self.shard.stop)
            weight.param.main_param_sharded = self.sharded
            part = slice(lo - self.shard.start, hi - self.shard.start)
            weight.param.main_param = self.master.detach()[part] if lo < hi else None

    def begin_step(self, step: int) -> None:
        """The next gradient of each weight overwrites what is stored."""
        self.reduced = self._flight = self.master.grad = None
        for weight in self.weights:
            weight.grad.begin_step(step)
            weight.pending = 0

    def launch(self) -> None:
        """Start to sum the gradients over data parallelism."""
        for weight in self.weights:
            weight.grad.close()
        used = self.spans[-1][2]
        self.grads.clear(used, self.grads.numel - used)  # what a reduction received may lie in the padding
        stages = self._reduce(self) if self.watch is None else self.watch.reduce(self, self._reduce)
        self._flight = wire.Flight(stages)

    def advance(self) -> None:
        """Start the next stage of the sum, where it has several."""
        if self._flight is not None:
            self._flight.advance()

    def land(self) -> None:
        """Have the current stream wait for the sum: `reduced`."""
        if self._flight is not None:
            self.reduced, self._flight = self._flight.land(), None

    def gradient(self, scale: torch.Tensor | None = None, *, take: bool = False) -> torch.Tensor:
        """The reduced gradient of this rank's shard in FP32; with `take`, scaled, and the last time it is asked for."""
        values = self.reduced.take(scale) if take else self.reduced.look()
        return values[: self.shard.stop - self.shard.start]

    @torch.no_grad()
    def publish(self):
        """Round the master weights into the weight buffer and gather the other ranks' shards -> handle or None."""
        self.weight[self.shard].copy_(self.master)
        for weight in self.weights:
            weight.invalidate()
        return wire.all_gather_weights(self.weight, self.group) if self.sharded else None

    @torch.no_grad()
    def reload_master(self) -> None:
        """Masters from the weights, after these were loaded from a checkpoint."""
        self.master.copy_(self.weight[self.shard])
        for weight in self.weights:
            weight.invalidate()

    @torch.no_grad()
    def unsharded(self, state: torch.Tensor) -> torch.Tensor:
        """A shard's FP32 state -> the state of the whole flat buffer, on every rank (for checkpoints)."""
        full = torch.zeros_like(self.weight, dtype=torch.float32)
        full[self.shard] = state
        if self.sharded:
            shard = wire.own_shard(full, self.group).clone()
            torch.distributed.all_gather_into_tensor(full, shard, group=self.group)
        return full

    def buffers(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor this bucket holds, by kind."""
        copies = [t for w in self.weights for t in w.cached_tensors()]
        return {
            "weight": [self.weight],
            "weight fp8 copy": copies,
            "grad": self.grads.tensors,
            "master": [self.master],
        }


def cut(weights: list[Fp8Weight], bucket_size: int) -> list[list[Fp8Weight]]:
    """Cut weights into runs of at least `bucket_size` elements, as Megatron cuts its own buckets."""
    runs: list[list[Fp8Weight]] = [[]]
    filled = 0
    for weight in weights:
        if filled >= bucket_size:
            runs.append([])
            filled = 0
        runs[-1].append(weight)
        filled += weight.param.numel()
    return [run for run in runs if run]
