"""Times calls on the GPU against each other: in single runs with an empty L2 cache, or under load.

The calls take turns, forward and then backward. With an even number of turns, a GPU that slows down steadily slows all
calls equally. Under load the GPU computes without a pause and is limited by its power, as in training: it lowers its
clock, and more so for a kernel that takes more power. So the fastest in single runs need not be the fastest under load
(docs/performance.md).
"""

import math
import statistics
from collections.abc import Callable, Mapping

import torch

LOAD_MS, TURNS = 150.0, 2  # a turn's length for each call; the number of turns, even
FLUSH = 256 << 20  # bytes: several times the L2 cache
DEVICE = "cuda"  # the current device


def in_turns[Name](calls: Mapping[Name, Callable[[], object]], repetitions: int) -> dict[Name, float]:
    """Each call's median over `repetitions` runs (even), each with an empty L2 cache. Waits for the device."""
    flush = torch.empty(FLUSH, dtype=torch.uint8, device=DEVICE)
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for turn in range(repetitions):
        events = []
        for name in _to_and_fro(calls, turn):
            flush.zero_()
            events.append((name, *_launch(calls[name], 1)))
        torch.cuda.synchronize()
        for name, start, end in events:
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(measured) for name, measured in times.items()}


def under_load[Name](calls: Mapping[Name, Callable[[], object]], bursts: Mapping[Name, float]) -> dict[Name, float]:
    """Each call's mean time when it runs alone for LOAD_MS. bursts: about the milliseconds of one run of each call.

    The first call has an extra turn before the others, because a GPU that was idle is faster. Waits for the device.
    """

    def alone(name: Name) -> float:
        count = math.ceil(LOAD_MS / bursts[name])
        start, end = _launch(calls[name], count)
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count

    alone(next(iter(calls)))
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS):
        for name in _to_and_fro(calls, turn):
            times[name].append(alone(name))
    return {name: statistics.mean(measured) for name, measured in times.items()}


def _to_and_fro[Name](calls: Mapping[Name, Callable[[], object]], turn: int) -> list[Name]:
    return list(calls)[:: -1 if turn % 2 else 1]


def _launch(call: Callable[[], object], count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    return start, end
