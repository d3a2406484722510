"""When a bucket's gradients are sent: as soon as its last gradient is there, while the backward pass goes on.

The backward pass finishes the weights in the order in which the buckets hold them.  In the last micro-batch, when all
of a bucket's weights have their gradient, the bucket is launched.  So the backward pass's GEMMs and the network work at
the same time:

    compute   ... dgrad wgrad(L) dgrad wgrad(L-1) dgrad wgrad(L-2) ...        | norm, Adam
    wire                all-to-all(bucket 0)  all-to-all(bucket 1) ...  all-to-all(last)|
                                                                                  ^ all that is waited for

Some sums have several stages (two levels, no distributed optimizer, a shared scale).  Each launch of a bucket starts
the next stage of the buckets before it: by then the stage before has long ended.  At most IN_FLIGHT buckets are under
way, because until they land they hold both the bytes that they send and those that they receive.

A model chunk's buckets go out in their order only: collectives must start in the same order on all ranks.  Megatron
decides which micro-batch is the last: its schedules open DDP's `no_sync` for all others. Under a pipeline they also say
when (`start_grad_sync`, unless --no-align-grad-reduce is given), and then a whole chunk goes out. Buckets that are
left, and all of them without --overlap-grad-reduce, go out at the end.
"""

import torch

from ..rebind import Hook, When
from .bucket import Bucket
from .owned_weight import OwnedWeight

IN_FLIGHT = 4
_START_GRAD_SYNC = Hook(
    *("megatron.core.distributed.DistributedDataParallel", "start_grad_sync", "engine.reducer", "self unused"),
    When("when the engine is built, with --overlap-grad-reduce"),
    "Sends our buckets when a pipeline schedule calls for it; Megatron reads the name when training begins.",
    of_object=True,
)
HOOKS = (_START_GRAD_SYNC,)


class ChunkReducer:
    """Reduces the buckets of one model chunk.

    Args:
        chunk: the chunk's DistributedDataParallel.
        overlap: whether buckets go out during the backward pass.

    Attributes:
        buckets: the chunk's buckets, in backward order.
        on_gradient: their weights call it after each gradient; None: nothing is to be called.
    """

    def __init__(self, chunk, overlap: bool):
        self.chunk = chunk
        self.buckets: list[Bucket] = []
        self._launched = 0
        self._done: set[OwnedWeight] = set()  # weights that have the last micro-batch's gradient
        self.on_gradient = self._arrived if overlap else None
        if overlap:
            self._launch_when_stock_does()

    def add(self, bucket: Bucket) -> None:
        """Reduce this bucket too, after those that are there."""
        self.buckets.append(bucket)

    def begin_step(self, step: int) -> None:
        """Start over."""
        self._launched = 0
        self._done.clear()
        for bucket in self.buckets:
            bucket.begin_step(step)

    def launch_rest(self, in_flight: int = IN_FLIGHT) -> None:
        """Launch every bucket that has not gone out."""
        while self._launched < len(self.buckets):
            self._launch(in_flight)

    def land(self) -> None:
        """Wait for all buckets."""
        for bucket in self.buckets:
            bucket.land()

    def _arrived(self, weight: OwnedWeight) -> None:
        """`weight` has a new gradient."""
        # A weight that was used several times has its whole gradient when all uses are done.
        if weight.pending == 0 and self._is_last_microbatch():
            self._done.add(weight)
            while self._launched < len(self.buckets) and self._done.issuperset(self.buckets[self._launched].weights):
                self._launch(IN_FLIGHT)

    def _is_last_microbatch(self) -> bool:
        """Whether stock's buckets expect their last gradient; False if stock has no bucket."""
        stock = self.chunk.bucket_groups + self.chunk.expert_parallel_bucket_groups
        return bool(stock) and all(group.is_last_microbatch for group in stock)

    @torch.no_grad()
    def _launch(self, in_flight: int) -> None:
        self.buckets[self._launched].launch()
        self._launched += 1
        oldest = max(0, self._launched - in_flight)
        if oldest:
            self.buckets[oldest - 1].land()
        for bucket in self.buckets[oldest : self._launched - 1]:
            bucket.advance()

    def _launch_when_stock_does(self) -> None:
        stock = self.chunk.start_grad_sync

        def start_grad_sync(*unused):  # Megatron's own name: another set's reducer wraps this one
            stock(*unused)
            self.launch_rest(in_flight=len(self.buckets))  # to land some here would hold up other chunks' compute

        _START_GRAD_SYNC.on(self.chunk, start_grad_sync)
