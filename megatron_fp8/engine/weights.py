"""The weight engine: flat buffers for the weights, gradients and master weights of the FP8 linears.

One `WeightGroup` a Megatron parameter group (the same weight decay and learning-rate rules):

    weight   BF16   |  W0  |   W1   | W2 | ... | pad |     each linear's parameter is a view of it
    grad     FP32   |  G0  |   G1   | G2 | ... | pad |     each linear's main_grad is a view of it
    shards          | rank 0 | rank 1 | ... | rank R-1 |    even cuts at multiples of 128 elements
    master   FP32   this rank's shard only (everything, without the distributed optimizer)

A step: micro-batches add into grad; `reduce` sums it over data parallelism into the owner's shard, in place;
the optimizer updates master from that shard; `publish` rounds master to BF16 into the shard of
weight and gathers the rest.

The gradient of a parameter has the meaning that Megatron's own buffers give it: the mean over data-parallel
(and context-parallel) ranks, or, with --calculate-per-token-loss, the sum divided by the number of tokens.
"""

import torch
from torch.nn import Parameter

from ..comm.reduce import ALIGNMENT, REDUCTIONS, all_gather_weights, own_shard
from ..layers.linear import Fp8Weight


class WeightGroup:
    """The flat buffers of one parameter group.

    Attributes:
        master: FP32 Parameter of this rank's part; `master.grad` is a view of the reduced gradient shard.
        spans: (Fp8Weight, start, end) of each parameter in the flat buffers, in elements.
    """

    def __init__(self, weights: list[Fp8Weight], group, sharded: bool, wire: str):
        self.weights, self.group, self.wire = weights, group, wire
        self.sharded = sharded and group.size() > 1
        sizes = [w.param.numel() for w in weights]
        numel = sum(sizes)
        unit = ALIGNMENT * group.size()
        padded = -(-numel // unit) * unit
        device = weights[0].param.device
        self.weight = torch.zeros(padded, dtype=weights[0].param.dtype, device=device)
        self.grad = torch.zeros(padded, dtype=torch.float32, device=device)

        self.spans, start = [], 0
        for weight, size in zip(weights, sizes, strict=True):
            self.spans.append((weight, start, start + size))
            view = self.weight[start : start + size].view_as(weight.param)
            view.copy_(weight.param.detach())
            weight.param.data = view
            weight.main_grad = self.grad[start : start + size].view_as(weight.param)
            start += size

        # The padding at the end belongs to nobody: it must not count among the zeros of a gradient.
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

    def begin_step(self) -> None:
        """The next weight gradient of each parameter overwrites what is in the buffer."""
        for weight in self.weights:
            weight.grad_is_empty = True
        self.master.grad = None

    def reduce(self, scale: float | torch.Tensor) -> None:
        """Sum the gradients over data parallelism, times `scale`, into `master.grad`."""
        for weight in self.weights:
            if weight.grad_is_empty:
                weight.main_grad.zero_()
        if self.group.size() > 1:
            with_shards, without = REDUCTIONS[self.wire]
            (with_shards if self.sharded else without)(self.grad, self.group)
        shard = self.grad[self.shard]
        if isinstance(scale, torch.Tensor) or scale != 1.0:
            shard.mul_(scale)
        self.master.grad = shard

    @torch.no_grad()
    def publish(self) -> None:
        """Round the master weights into the weight buffer and gather the other ranks' shards."""
        self.weight[self.shard].copy_(self.master)
        if self.sharded:
            all_gather_weights(self.weight, self.group)
        for weight in self.weights:
            weight.invalidate()

    @torch.no_grad()
    def reload_master(self) -> None:
        """Masters from the weights, after these were loaded from a checkpoint."""
        self.master.copy_(self.weight[self.shard])
        for weight in self.weights:
            weight.invalidate()

    @torch.no_grad()
    def unsharded(self, state: torch.Tensor) -> torch.Tensor:
        """A shard's FP32 state -> the state of the whole flat buffer, on every rank (for checkpoints)."""
        full = torch.zeros_like(self.grad)
        full[self.shard] = state
        if self.sharded:
            torch.distributed.all_gather_into_tensor(full, own_shard(full, self.group).clone(), group=self.group)
        return full

    def buffers(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor this group holds, by kind."""
        copies = [t for w in self.weights for t in w.cached_tensors()]
        return {"weight": [self.weight], "weight fp8 copy": copies, "grad": [self.grad], "master": [self.master]}
