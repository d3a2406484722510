"""When a bucket's gradients go out: as soon as its last gradient is there, while the backward pass goes on.

The backward pass finishes the weights in the order in which the buckets hold them.  In the last micro-batch, each
weight that is done asks for its bucket; a bucket that is complete is reduced, on a stream of its own, so that the
backward's GEMMs and the wire work at the same time:

    compute   ... dgrad wgrad(L) dgrad wgrad(L-1) ...            | norm, Adam
    stream              all-to-all(bucket 0)  all-to-all(bucket 1) ...|
                                                                      ^ waits only for the last bucket

Buckets of a model chunk go out in their order, never out of turn: collectives must start in the same order on all
ranks.  Which micro-batch is the last is Megatron's business: its schedules open DDP's `no_sync` for all others, and
with --align-grad-reduce under a pipeline they say themselves when (`start_grad_sync`).  Without
--overlap-grad-reduce, and for what is left, everything goes out at the end.

Memory: what the stream reads was written on the compute stream before `launch` (the stream waits for it), and what
it allocates it alone frees.
"""

import contextlib

import torch

from .weights import Bucket


class ChunkReducer:
    """Reduces the buckets of one model chunk.

    Args:
        chunk: the chunk's DistributedDataParallel.
        buckets: the chunk's buckets, in backward order.
        stream: where to reduce; None: on the current stream.
        overlap: whether buckets go out during the backward pass.
    """

    def __init__(self, chunk, buckets: list[Bucket], stream, overlap: bool):
        self.chunk, self.buckets, self.stream = chunk, buckets, stream
        self._next = 0
        if overlap:
            for bucket in buckets:
                for weight in bucket.weights:
                    weight.on_grad = self._arrived
            self._launch_when_stock_does()

    def begin_step(self, step: int) -> None:
        """Start over."""
        self._next = 0
        for bucket in self.buckets:
            bucket.begin_step(step)

    def launch_rest(self) -> None:
        """Reduce every bucket that has not gone out."""
        while self._next < len(self.buckets):
            self._launch()

    def _arrived(self) -> None:
        """A weight has a new gradient."""
        if all(group.is_last_microbatch for group in self.chunk.bucket_groups):
            while self._next < len(self.buckets) and self.buckets[self._next].complete:
                self._launch()

    def _launch(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), on(self.stream):
            self.buckets[self._next].reduce()
        self._next += 1

    def _launch_when_stock_does(self) -> None:
        stock = self.chunk.start_grad_sync

        def start_grad_sync(*args):
            stock(*args)
            if all(bucket.complete for bucket in self.buckets[self._next :]):
                self.launch_rest()

        self.chunk.start_grad_sync = start_grad_sync  # read by Megatron when training begins


def on(stream):
    """The context of a stream; of None, no context."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
