"""When a bucket's gradients go out: as soon as its last gradient is there, while the backward pass goes on.

The backward pass finishes the weights in the order in which the buckets hold them.  In the last micro-batch, each
weight that is done asks for its bucket; a bucket whose weights are all done is launched, and the backward's GEMMs and
the wire work at the same time:

    compute   ... dgrad wgrad(L) dgrad wgrad(L-1) dgrad wgrad(L-2) ...        | norm, Adam
    wire                all-to-all(bucket 0)  all-to-all(bucket 1) ...  all-to-all(last)|
                                                                                  ^ all that is waited for

A sum of several stages (two levels, no distributed optimizer, a shared scale) is driven on by one stage whenever the
next bucket is launched: by then what it waits for is long done.  At most IN_FLIGHT buckets are under way: what they
send and receive is held twice until they land.

Buckets of a model chunk go out in their order, never out of turn: collectives must start in the same order on all
ranks.  Which micro-batch is the last is Megatron's business: its schedules open DDP's `no_sync` for all others, and
under a pipeline they say themselves when (`start_grad_sync`, but for --no-align-grad-reduce); a whole chunk goes out
then.  Without --overlap-grad-reduce, and for what is left, everything goes out at the end.
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
        on_gradient: what their weights are to call after each gradient, or None.
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
        """Reduce this one too, after those that are there."""
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
        # A weight that was used several times has its gradient when all uses are done.
        if weight.pending == 0 and self._is_last_microbatch():
            self._done.add(weight)
            while self._launched < len(self.buckets) and self._done.issuperset(self.buckets[self._launched].weights):
                self._launch(IN_FLIGHT)

    def _is_last_microbatch(self) -> bool:
        """Whether stock's buckets expect their last gradient; never if stock has none to ask."""
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
