"""Observers of the engine: they subscribe to events, and the engine calls them.

    class Counting(Observer):
        def cast(self, weight, role, x, q):     # overrides the events it wants
            self.casts += 1

    engine.events.subscribe(Counting())         # until unsubscribe

An event is a method of `Observer`. For each event, `Events` has the bound methods of the observers that override it, in
the order in which they subscribed. Without observers a linear pays for one test of an empty tuple a call. Observers
change nothing: a run's losses are the same to the last bit with and without them. They may use the device and
communicate: all ranks call them alike.
"""

from collections.abc import Callable
from typing import Any

import torch


class Observer:
    """Ignores every event. role: INPUT or GRAD (owned_weight.py); operands: ScaledTensors, or plain if emulated."""

    def begin_step(self) -> None:
        """A step begins: gradients are forgotten."""

    def cast(self, weight, role: int, x: torch.Tensor, q) -> None:
        """x (M, K) was cast to the ScaledTensor q, which has rows in this pass."""

    def forward(self, weight, x: torch.Tensor, read_x, read_w) -> None:
        """y = x W^T: x (M, K) in BF16, whole under sequence parallelism; the GEMM's operands for x and for W (N, K)."""

    def backward(self, weight, x: torch.Tensor, dy: torch.Tensor, dgrad: tuple, wgrad: tuple | None) -> None:
        """dx = dy W and dW = dy^T x: x (M, K) and dy (M, N) in BF16, and what the GEMMs read.

        dgrad: dy (M, N), and W (N, K), or None if there is no dx; wgrad: dy (M, N) and x (M, K), or None if the
        weight is frozen. An operand that a GEMM reads transposed is in its columns (`payload` is then None).
        """

    def gradient(self, weight, product) -> None:
        """A micro-batch's gradient dW (N, K), a gemm.Product that has not run, is about to be added to weight.sink."""

    def gradient_added(self, weight) -> None:
        """The gradient was added."""

    def launched(self) -> None:
        """All that adds a weight's gradient, or those of a bank, is launched. Experts still run together."""

    def reducing(self, bucket, stages):
        """A bucket's gradients go out: the stages of its sum (comm/wire.py), to return or to wrap."""
        return stages

    def updating(self, bucket) -> None:
        """Adam is about to step a bucket."""

    def updated(self, bucket) -> None:
        """Adam has stepped it."""

    def end_step(self) -> None:
        """A step ends, made or skipped."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class Events:
    """The observers of one engine: an attribute for each of EVENTS, a tuple of what is called."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._arrange()

    def subscribe(self, observer: Observer) -> None:
        """Call `observer` at the events that it overrides, after the observers that are there; once each."""
        if observer not in self._observers:
            self._observers.append(observer)
            self._arrange()

    def unsubscribe(self, observer: Observer) -> None:
        """Call it no more; if it was not subscribed, nothing happens."""
        if observer in self._observers:
            self._observers.remove(observer)
            self._arrange()

    def _arrange(self) -> None:
        for name in EVENTS:
            overriding = [o for o in self._observers if getattr(type(o), name) is not getattr(Observer, name)]
            setattr(self, name, tuple(getattr(o, name) for o in overriding))

    def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]:
        raise AttributeError(f"no event {name!r}: there are {', '.join(EVENTS)}")  # all others are set


class Unwatched(Events):
    """For weights without an engine; they all share one."""

    def subscribe(self, observer: Observer) -> None:
        raise AssertionError("an observer subscribes to an engine's events")
