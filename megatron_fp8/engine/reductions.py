"""How the gradients of a bucket are summed over data parallelism: one class for each way, each with one `start`.

    Local     a group of one: what is stored is the sum
    Block     FP8 on the wire, one FP32 sum (`--fp8-grad-reduce block`, comm/reduce.py)
    Fp32      the plain FP32 reduce-scatter or all-reduce (`fp32`)
    Shared    the paper's: one scale for all ranks, summed in FP8, moved by mu (`shared`, comm/shared.py)

A bucket calls `start` once a step, when its last gradient is there (reducer.py). The weights of a set share one
reduction. Only `Shared` remembers something from step to step, mu; no other way pays for it.
"""

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core.parallel_state import create_group

from ..comm.reduce import Nodes, node_groups, reduce_blocks, reduce_fp32
from ..comm.shared import SharedScale
from ..comm.wire import Stages
from ..flags.config import Fp8Config
from ..numerics.auto_scaling import AUTO
from .owned_weight import OwnedWeight
from .weight_groups import WeightGroups

if TYPE_CHECKING:
    from .bucket import Bucket


class Reduction:
    """The interface of all ways, with nothing to remember.

    Attributes:
        shared: the state of the paper's reduction, or None.
        adapts: whether mu moves with the gradients; then a resumed run takes mu from its checkpoint.
    """

    shared: SharedScale | None = None
    adapts = False

    def start(self, bucket: "Bucket") -> Stages:
        """Sum the bucket's gradients: stages that end in a shard for the optimizer to read (`bucket.Reduced`)."""
        raise NotImplementedError

    def begin_step(self) -> None:
        """A step begins. The step before may have been skipped."""

    def end_step(self, step: int) -> None:
        """Step 1, 2, ... is made."""

    def mu(self, weights: int, device: torch.device) -> torch.Tensor:
        """mu (weights,) FP32 of the set's weights, to save; 0: a weight has none."""
        return torch.zeros(weights, device=device)

    def load_mu(self, mu: torch.Tensor) -> None:
        """Take mu from a checkpoint, if it adapts."""


class Local(Reduction):
    """For a data-parallel group of one."""

    def start(self, bucket: "Bucket") -> Stages:
        return bucket.grads.local()


class Block(Reduction):
    """In FP8 blocks, in one level or two.

    nodes: the two levels, or None.
    """

    def __init__(self, nodes: Nodes | None = None):
        self.nodes = nodes

    def start(self, bucket: "Bucket") -> Stages:
        sent, room = bucket.grads.to_send()
        reduced, handles = yield from reduce_blocks(sent, bucket.group, bucket.sharded, self.nodes, room)
        bucket.grads.keep_received(reduced.packed)
        return reduced, handles


class Fp32(Reduction):
    """In FP32, as stock."""

    def start(self, bucket: "Bucket") -> Stages:
        return reduce_fp32(bucket.grads.dense().float(), bucket.group, bucket.sharded)


class Shared(Reduction):
    """The paper's. A weight's place in `shared` is its place in `weights`; a bucket's places are consecutive."""

    shared: SharedScale

    def __init__(self, shared: SharedScale, weights: list[OwnedWeight]):
        self.shared, self._place = shared, {weight: i for i, weight in enumerate(weights)}

    @property
    def adapts(self) -> bool:  # type: ignore[override]
        return self.shared.rule.mode == AUTO

    def start(self, bucket: "Bucket") -> Stages:
        spans = [(start, stop, self._place[weight]) for weight, start, stop in bucket.spans]
        return self.shared.reduce(bucket.grads.dense(), spans)

    def begin_step(self) -> None:
        self.shared.forget_step()

    def end_step(self, step: int) -> None:
        self.shared.end_step(step)

    def mu(self, weights: int, device: torch.device) -> torch.Tensor:
        return self.shared.mu.clone()

    def load_mu(self, mu: torch.Tensor) -> None:
        self.shared.mu = torch.where(mu > 0, mu, self.shared.mu)


def reduction(
    fp8: Fp8Config, weights: list[OwnedWeight], of: WeightGroups, sharded: bool, device: torch.device
) -> Reduction:
    """The reduction that flags ask for. weights: a set's, in its buckets' order. Collective over the world."""
    if fp8.grad_reduce == "shared":
        sizes = [weight.param.numel() for weight in weights]
        return Shared(SharedScale(fp8.grad_scaling, sizes, of.data, of.sharing, sharded, device), weights)
    if of.data.size() == 1:
        return Local()
    return Fp32() if fp8.grad_reduce == "fp32" else Block(_nodes(fp8, of))


def _nodes(fp8: Fp8Config, of: WeightGroups) -> Nodes | None:
    """The two levels that --fp8-grad-reduce-hierarchy asks for."""
    hierarchy = fp8.grad_reduce_hierarchy
    if hierarchy == "off":
        return None
    # Megatron's function also lists the groups for --distributed-timeout-seconds-after-init.
    make = partial(create_group, timeout=timedelta(minutes=fp8.timeout_minutes), group_desc="FP8_GRAD_REDUCE")
    nodes = node_groups(of.data, None if hierarchy == "node" else int(hierarchy), make)
    levels = f"in {nodes.across.size()} nodes of {nodes.inside.size()}" if nodes else "in one level"
    if torch.distributed.get_rank() == 0:
        print(f"[fp8] gradients are reduced over {of.data.size()} data-parallel ranks {levels}", flush=True)
    return nodes
