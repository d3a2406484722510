"""When the weights come back: after a step every rank has encoded its own shard, and lacks the others'.

Without --overlap-param-gather all buckets are gathered at the end of the step.  With it they are gathered while the
next forward pass goes on, in the order in which it needs them: a bucket is waited for at the first use of one of its
weights, and then the next one starts.

    compute   Adam | embedding  layers of bucket 0   layers of bucket 1   ...
    wire           | gather 0 | gather 1           | gather 2           | ...

One is under way ahead of the one in use, no more: under CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one queue of
the hardware, where a gather that waits for another holds up the compute behind it.

Whatever reads a weight asks for it first (`OwnedWeight.arrive`), checkpoints too; stock's own readers are preceded by
`prepare_model_params_for_param_sync`.  Gathers of a chunk start in one order on all ranks.
"""

import functools
from collections.abc import Callable

from .bucket import Bucket


class ChunkGather:
    """Gathers the weights of one model chunk.

    Args:
        buckets: the chunk's, in forward order.
        overlap: whether they are gathered during the forward pass.

    Attributes:
        early: whether the first starts at the end of the step; else at its first use, inside the graph of a step.
    """

    def __init__(self, buckets: list[Bucket], overlap: bool):
        self.buckets, self.overlap, self.early = buckets, overlap, True
        self._started = self._arrived = len(buckets)

    def begin(self) -> None:
        """All own shards are written: start."""
        self._started = self._arrived = 0
        for count, bucket in enumerate(self.buckets, 1):
            for weight in bucket.weights:
                weight.await_gather(functools.partial(self._need, count))
        if not self.overlap:
            self.finish()
        elif self.early:
            self._start(1)

    def finish(self) -> None:
        """Have everything."""
        self._need(len(self.buckets))

    def land(self) -> None:
        """Have what has started."""
        self._need(self._started, ahead=0)

    def remember(self) -> Callable[[], None]:
        """What puts back that all is here, after a step that a graph made."""
        return self._have_all

    def _have_all(self) -> None:
        self._started = self._arrived = len(self.buckets)
        for bucket in self.buckets:
            bucket.land_weights()

    def _start(self, count: int) -> None:
        for bucket in self.buckets[self._started : count]:
            bucket.gather()
        self._started = max(self._started, min(count, len(self.buckets)))

    def _need(self, count: int, ahead: int = 1) -> None:
        """Have the first `count` buckets; start as many as `ahead` after them."""
        while self._arrived < count:
            self._start(self._arrived + 1 + ahead)
            self.buckets[self._arrived].land_weights()
            self._arrived += 1
