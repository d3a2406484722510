"""Find out in two steps whether the GPU waits for its host.

A host that is ahead of its GPU has launched layers of work that the GPU has not begun. So each time that the host has
launched a weight's gradient in the backward pass, it asks whether the GPU has finished everything up to the gradient
before:

    host ahead     launches ........ grad L | grad L-1 ? no      the GPU is layers behind
    GPU waits      launches ........ grad L | grad L-1 ? yes     it is done before more comes

This costs one event a linear in two steps, and one for experts that run together. The share of queries that find the
GPU done is not the share of time that the GPU waits. The step time under a CUDA graph, which the log has, shows that.
"""

from collections.abc import Callable

import torch

from ..engine.events import Events, Observer
from ..flags.graphs import WAITS

FIRST, LAST = 3, 4  # steps, from 1: the first two compile kernels


class HostWait(Observer):
    """Observes steps FIRST to LAST of this process.

    Args:
        then: called once, after the last observation, with the share of events that the GPU had already passed, 0 .. 1.

    Attributes:
        share: that share; None before.
    """

    def __init__(self, events: Events, then: Callable[[float], None]):
        self._events, self._then = events, then
        self.share: float | None = None
        self._step = self._looks = self._done = 0
        self._last: torch.cuda.Event | None = None
        events.subscribe(self)

    def wanted(self) -> bool:
        """Whether this rank's GPU waits for its host."""
        return self.share is not None and self.share > WAITS

    def begin_step(self) -> None:
        self._step, self._last = self._step + 1, None

    def launched(self) -> None:
        if self._step < FIRST:
            return
        if self._last is not None:
            self._looks += 1
            self._done += self._last.query()
        self._last = torch.cuda.Event()
        self._last.record()

    def end_step(self) -> None:
        if self._step >= LAST:  # >=: Megatron may repeat a step, which calls begin_step again
            self._events.unsubscribe(self)
            self._last, self.share = None, self._done / max(1, self._looks)
            self._then(self.share)
