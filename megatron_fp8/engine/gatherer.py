"""When weights are gathered: after a step every rank has encoded its own shard, and lacks the others'.

Without --overlap-param-gather all buckets are gathered at the end of the step.  With it they are gathered during the
next forward pass, in the order in which it needs them: the first use of one of a bucket's weights waits for the bucket,
and then the next one starts.

    compute   Adam | embedding  layers of bucket 0   layers of bucket 1   ...
    wire           | gather 0 | gather 1           | gather 2           | ...

Only one is under way ahead of the one in use: under CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one hardware queue,
and a gather that waits for another holds up the compute behind it.

Our code asks for a weight before it reads it (`OwnedWeight.arrive`), checkpoints too. Before stock reads weights it
calls `prepare_model_params_for_param_sync`.  Gathers of a chunk start in the same order on all ranks.
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
        early: whether the first gather starts at the end of the step; else it starts at the first use, inside the
            graph of a step.
    """

    def __init__(self, buckets: list[Bucket], overlap: bool):
        self.buckets, self.overlap, self.early = buckets, overlap, True
        self._started = self._arrived = len(buckets)

    def begin(self) -> None:
        """Start: this rank's shards are all written."""
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
        """A function that notes that all weights are here, after a step that a graph made."""
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
        """Have the first `count` buckets, and start `ahead` more after them."""
        while self._arrived < count:
            self._start(self._arrived + 1 + ahead)
            self.buckets[self._arrived].land_weights()
            self._arrived += 1
