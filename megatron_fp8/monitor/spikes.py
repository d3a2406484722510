"""Two detectors on one rolling window: does a value stick out of those before it (spike), or has it risen (rise)?

Least squares fit the line a + b (i - c), c = (n - 1) / 2, to the last n values x_0 .. x_{n-1}, n <= N:

    a = mean(x)      b = sum_i (i - c) x_i / S      S = n (n^2 - 1) / 12      v = sum_i (x_i - line_i)^2 / (n - 2)

Spike.  The line predicts the next value, and s is the standard deviation of that prediction:

    expected = a + b (n - c)        s = sqrt(v (1 + 1/n + (n - c)^2 / S)), at least 0.1 % of |expected|, and `floor`

A value at least sigma s above the prediction is a spike. This is OLMo 2's spike score (arXiv 2501.00656: seven standard
deviations from the rolling mean of 1,000 steps) with a shorter window and a line that takes the trend out. Without the
line, any spike would drown in the rolling deviation while a loss falls by half, and a gradient norm that warms up would
look like a spike itself. With fewer than LEAST_WINDOW values nothing is judged.

A spike enters the window as expected + sigma s, which widens s by about a fifth (N = 128). So one spike does not hide
the next, and a level that has shifted for good becomes normal after some steps. A value that is not finite is a spike
from the first step on, and does not enter the window.

Rise.  The slope is many of its own standard deviations, b >= sigma sqrt(v / S), and the line's end is `times` as high
as its beginning, and as the point where a rise was last reported or the line was lowest since. `times` is 2 for shares
that should be small and constant (overflows, underflows). It is less for a loss: if a loss climbs slowly, the line
climbs with it, and there is no spike.

Every rank runs this for itself, with plain floats and exactly rounded sums (math.fsum), so every machine computes the
same bits. docs/monitoring.md has the measured false alarms.
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
        expected, deviation: the predicted next value, and the standard deviation of the prediction, in its units.
        slope_deviations: b in its own standard deviations.
    """

    length: int
    first: float
    last: float
    expected: float
    deviation: float
    slope_deviations: float


class Spike(NamedTuple):
    """A value that is `deviations` above its `line`; for a value that is not finite, line is None."""

    value: float
    line: Line | None = None
    deviations: float = math.nan

    def __str__(self) -> str:
        """For example "loss spike 4.31, 9.2 deviations above the line through its last 128 (3.90)"."""
        if self.line is None:
            return f"spike {self.value}, not finite"
        return (
            f"spike {self.value:.4g}, {self.deviations:.1f} deviations above the line through its last "
            f"{self.line.length} ({self.line.expected:.4g})"
        )


def fit(values: list[float]) -> Line:
    """The line through at least three finite values, oldest first."""
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
        sigma, window: see the top of the file; the window is at least LEAST_WINDOW values.
        floor: the smallest s, in the quantity's units.
    """

    sigma: float
    window: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        self.values: deque[float] = deque(maxlen=self.window)
        self._told = math.inf  # the start of a rise: the line's end when last reported, or lowest since

    def spike(self, value: float) -> Spike | None:
        """Add the next value. Returns a Spike if it is one."""
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
        """The line through the values so far, if it rose by the factor `times` and this was not reported; else None."""
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
        """The values that `load` needs."""
        return [self._told, *self.values]

    def load(self, state: list[float]) -> None:
        """Restore `state()`; keeps the newest values if the saved window was longer."""
        self._told, *values = state
        self.values.clear()
        self.values.extend(values)
