"""Does a number stick out of those before it, or has it been rising? Two detectors on one rolling window.

Through the last n values x_0 .. x_{n-1}, n <= N, least squares lay the line a + b (i - c), with c = (n - 1) / 2:

    a = mean(x)      b = sum_i (i - c) x_i / S      S = n (n^2 - 1) / 12      v = sum_i (x_i - line_i)^2 / (n - 2)

Spike.  The line says where to expect the next value, and s is the standard deviation of that prediction:

    expected = a + b (n - c)        s = sqrt(v (1 + 1/n + (n - c)^2 / S)), at least 0.1 % of |expected|, and `floor`

A value sigma s or more above is a spike. This is OLMo 2's spike score (arXiv 2501.00656: seven standard deviations
from the rolling mean of 1,000 steps), but the window is shorter, and the line takes the trend out: while a loss falls
by half any spike drowns in its rolling deviation, and a gradient norm that warms up looks like a spike itself. With
fewer than LEAST_WINDOW values before it nothing is judged.

A spike enters the window as expected + sigma s, which widens s by about a fifth (N = 128): one spike does not hide the
next, and a level that has shifted for good is taken for normal after some steps. What is not finite is a spike from the
first step on, and does not enter.

Rise.  The slope is many of its own standard deviations, b >= sigma sqrt(v / S), and the line's end is so many times
as high as its beginning, and as where it was last reported or lowest since: twice for shares that should be small and
constant (overflows, underflows), less for a loss, which is no spike if it climbs slowly, since the line climbs with it.

Every rank runs this for itself, so plain floats and exactly rounded sums (math.fsum): the same bits on every machine.
docs/monitoring.md has the false alarms that were measured.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from ..flags.watch import LEAST_WINDOW

_FLAT = 1e-3
DOUBLED = 2.0


class Line(NamedTuple):
    """The line through a window.

    Attributes:
        length: n, values in the window.
        first, last: the line at the oldest value and the newest.
        expected, deviation: of the next value, in its units; the deviation of its prediction.
        slope_deviations: b in its own standard deviations.
    """

    length: int
    first: float
    last: float
    expected: float
    deviation: float
    slope_deviations: float


class Spike(NamedTuple):
    """A value above its `line` by so many `deviations`; neither where the value is not finite."""

    value: float
    line: Line | None = None
    deviations: float = math.nan

    def __str__(self) -> str:
        """As in "loss spike 4.31, 9.2 deviations above the line through its last 128 (3.90)"."""
        if self.line is None:
            return f"spike {self.value}, not finite"
        return (
            f"spike {self.value:.4g}, {self.deviations:.1f} deviations above the line through its last "
            f"{self.line.length} ({self.line.expected:.4g})"
        )


def fit(values: list[float]) -> Line:
    """The line through finite values, oldest first, three at least."""
    n = len(values)
    centre, spread = (n - 1) / 2, n * (n * n - 1) / 12
    mean = math.fsum(values) / n
    slope = math.fsum((i - centre) * x for i, x in enumerate(values)) / spread
    variance = math.fsum((x - mean - slope * (i - centre)) ** 2 for i, x in enumerate(values)) / (n - 2)
    deviation = math.sqrt(variance * (1 + 1 / n + (n - centre) ** 2 / spread))
    error = math.sqrt(variance / spread)
    return Line(
        length=n,
        first=mean - slope * centre,
        last=mean + slope * centre,
        expected=mean + slope * (n - centre),
        deviation=deviation,
        slope_deviations=slope / error if error else math.copysign(math.inf, slope) if slope else 0.0,
    )


@dataclass
class Series:
    """The last values of one quantity.

    Args:
        sigma, window: of the lesson; the window is LEAST_WINDOW values at least.
        floor: the smallest s, in the quantity's units.
    """

    sigma: float
    window: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        self.values: deque[float] = deque(maxlen=self.window)
        self._told = math.inf  # what a rise starts from: the line's end when last reported, or lowest since

    def spike(self, value: float) -> Spike | None:
        """Take the next value; whether it is a spike."""
        if not math.isfinite(value):
            return Spike(value)
        found = None
        if len(self.values) >= LEAST_WINDOW:
            line = fit(list(self.values))
            deviation = max(line.deviation, self.floor, _FLAT * abs(line.expected))
            excess = value - line.expected
            if deviation and excess >= self.sigma * deviation:
                found = Spike(value, line, excess / deviation)
                value = line.expected + self.sigma * deviation
        self.values.append(value)
        return found

    def rise(self, times: float = DOUBLED) -> Line | None:
        """The line through the values so far, if it is a rise, to so many `times`, that has not been reported."""
        if len(self.values) < LEAST_WINDOW:
            return None
        line = fit(list(self.values))
        first, last = max(line.first, self.floor), max(line.last, self.floor)
        self._told = min(self._told, first if math.isinf(self._told) else last)
        if not (0 < last >= times * max(first, self._told) and line.slope_deviations >= self.sigma):
            return None
        self._told = line.last
        return line

    def state(self) -> list[float]:
        """All that `load` needs."""
        return [self._told, *self.values]

    def load(self, state: list[float]) -> None:
        """Restore `state()`; of a longer window, its newest values."""
        self._told, *values = state
        self.values.clear()
        self.values.extend(values)
