"""The gradient reduction of the FP8-LM paper (arXiv 2310.18313, section 2.1): all ranks share one scale and sum in FP8.

For each tensor, with N ranks and g_i the gradient of rank i:

    s'_i      = 448 / max|g_i|                     would fill E4M3's range on rank i
    s_g       = min over i of s'_i                 shared: one all-reduce for all tensors of a bucket
    payload_i = E4M3(mu * s_g * g_i)               saturating
    sum       = payloads added hop by hop, each hop rounded to E4M3 and saturating
    gradient  = sum / (mu * s_g)                   the sum over ranks; its mean is sum / (N mu s_g)

numerics/auto_scaling.py adapts mu to the saturation, which is counted on the payload before the sum and on the owner's
shard of the sum after it. The counts stay on the device and are summed over the ranks in one all-reduce a step; the
host does not wait.

On GPUs NCCL adds in FP8 (from sm_90 on). gloo cannot: there the payloads go by all-to-all, and are added in the order
of NCCL's ring. Chunk j starts at rank j+1 and ends at rank j; each hop adds in FP16 and rounds to E4M3. The result was
bit for bit equal to NCCL 2.28's on four H200s.

NaN stays NaN through cast and sum; an infinity becomes NaN. If a tensor's maximum is not finite on a rank, that rank
enters 1 into the minimum, and the sum becomes NaN. A rank whose gradient is zero enters the largest scale.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import ops
from ..numerics.auto_scaling import AUTO, ScalingRule
from ..numerics.formats import E4M3, decode
from ..numerics.scaling import LARGEST_SCALE, compute_scale
from . import wire

_AT_MAXIMUM = 0x7E  # the code of 448 without its sign; 0x7F is NaN


@dataclass
class ScaledShard:
    """A reduced gradient (n,) in E4M3. The piece of tensor t is payload[start:stop] * inverse[t].

    pieces: (start, stop, t) for each tensor's piece of the shard. inverse: (T,) FP32.
    """

    payload: torch.Tensor
    pieces: list[tuple[int, int, int]]
    inverse: torch.Tensor

    def look(self) -> torch.Tensor:
        """The gradient (n,) in FP32, a new tensor."""
        return self.gradient(0, self.payload.numel())

    def gradient(self, start: int, stop: int) -> torch.Tensor:
        """Elements start .. stop - 1 in FP32, for adam_step."""
        values = decode(self.payload[start:stop])
        for a, b, t in self.pieces:
            values[max(a - start, 0) : max(b - start, 0)] *= self.inverse[t]
        return values

    def square_sum(self) -> torch.Tensor:
        """Sum of squares, 0-d FP32."""
        return torch.linalg.vector_norm(self.look()).square()


class SharedScale:
    """The reduction for all tensors of a model. Its state is mu (tensors,) FP32.

    Args:
        sizes: elements of each tensor.
        group: the data-parallel process group, of N ranks.
        counting_group: the ranks that share mu: data and tensor parallelism.
        sharded: True: each rank gets its own shard of the sum. False: all of it.
    """

    def __init__(self, rule: ScalingRule, sizes: list[int], group, counting_group, sharded: bool, device):
        self.rule, self.group, self.counting_group, self.sharded = rule, group, counting_group, sharded
        self.mu = torch.full((len(sizes),), rule.start(group.size()), device=device)
        self._saturated = torch.zeros(2, len(sizes), device=device)  # elements at +-448: before the sum, after it
        self._sizes = torch.tensor(sizes, dtype=torch.float32, device=device)

    def reduce(self, values: torch.Tensor, spans: list[tuple[int, int, int]]) -> wire.Stages:
        """Sum a bucket over the group -> ScaledShard.

        Args:
            values: (N * n,) FP32 or BF16, the bucket's gradients; not changed.
            spans: (start, stop, t) of each tensor in it, with consecutive t. Elements outside all spans are sent as 0.
        """
        first_tensor = spans[0][2]
        amax = torch.stack([ops.amax(values[a:b]) for a, b, _ in spans])
        shared = compute_scale(amax, E4M3, previous=torch.where(amax == 0, LARGEST_SCALE, 1.0))
        if self.group.size() > 1:
            handle = dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=self.group, async_op=True)
            wire.count("grad_scales", 2 * shared.nbytes, self.group)
            yield [handle]
        factor = (shared * self.mu[first_tensor : first_tensor + len(spans)]).clamp(max=LARGEST_SCALE)
        payload = torch.zeros_like(values, dtype=torch.uint8).view(E4M3.dtype)
        for i, (a, b, t) in enumerate(spans):
            payload[a:b] = ops.quantize(values[a:b], E4M3, factor[i])
            self._saturated[0, t] += at_maximum(payload[a:b])
        del values  # with FP8 storage it is a copy in FP32
        summed, first = yield from self._sum(payload)
        pieces = [(max(a - first, 0), min(b - first, summed.numel()), i) for i, (a, b, _) in enumerate(spans)]
        pieces = [(a, b, i) for a, b, i in pieces if a < b]
        for a, b, i in pieces:
            self._saturated[1, first_tensor + i] += at_maximum(summed[a:b])
        return ScaledShard(summed, pieces, factor.reciprocal()), []

    def _sum(self, payload: torch.Tensor) -> wire.Stages:
        """(the FP8 sum of this rank's shard, or of everything; the index of its first element)."""
        group, ranks = self.group, self.group.size()
        if ranks == 1:
            return payload, 0
        if payload.is_cuda:
            shard = torch.empty_like(wire.own_shard(payload, group))
            yield [dist.reduce_scatter_tensor(shard, payload, group=group, async_op=True)]
            wire.count(wire.GRADS, payload.nbytes, group)
        else:
            received, handle = wire.all_to_all(payload.view(torch.uint8).view(ranks, -1), group)
            yield [handle]
            order = [(group.rank() + 1 + hop) % ranks for hop in range(ranks)]
            shard = ops.ring_sum(received[order].view(payload.dtype))
        if self.sharded:
            return shard, group.rank() * shard.numel()
        gathered, handle = wire.all_gather(shard.view(torch.uint8), group)
        yield [handle]
        return gathered.view(-1).view(payload.dtype), 0

    def end_step(self, step: int) -> None:
        """Adapt mu to the counted saturation every `interval` steps, by one all-reduce. step: 1, 2, ..."""
        if self.rule.mode != AUTO or step % self.rule.interval:
            self.forget_step()
            return
        if self.counting_group.size() > 1:
            dist.all_reduce(self._saturated, group=self.counting_group)
            wire.count("grad_scales", 2 * self._saturated.nbytes, self.counting_group)
        # `whole` counts all tensor-parallel shards of a tensor. Before the sum each of the N ranks counted its own copy
        # of a shard. After it, the owners counted every element once; without a distributed optimizer all N ranks did.
        ranks = self.group.size()
        whole = self._sizes * (self.counting_group.size() // ranks)
        before = self._saturated[0] / (whole * ranks)
        after = self._saturated[1] / (whole if self.sharded else whole * ranks)
        self.mu = self.rule.next(self.mu, torch.maximum(before, after))
        self.forget_step()

    def forget_step(self) -> None:
        """Zero the counts, after a step that was skipped or does not adapt mu."""
        self._saturated.zero_()


def at_maximum(payload: torch.Tensor) -> torch.Tensor:
    """The number of elements of an E4M3 payload that are +-448, 0-d int64."""
    return ((payload.view(torch.uint8) & 0x7F) == _AT_MAXIMUM).sum()
