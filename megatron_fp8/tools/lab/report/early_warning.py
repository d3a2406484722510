"""Does a signal show, before a run diverges, that it will? Level and rise, AUROC at a lead, alarms and lead times.

A signal (sharpness, gradient norm, ...) of a run is x_t at its logged steps t. The run diverged at its onset T, or
never (curves.py). A signal is viewed in two ways:

    level   x_t as it is, against other runs' at the same step
    rise    r_t = (x_t - m) / s, m and s the mean and standard deviation of the run's own last WINDOW values before t
            (s: at least 0.1 % of |m|): this can be seen live in one run. |r_t| for log Z, which may drift either way

AUROC at lead L.  Over all pairs of a run that diverged, at T, and one that never did: how often the diverging run has
the higher signal at step T - L; ties count half. 0.5: the signal shows nothing; 1: it is always higher. Both runs are
compared at the same step, so neither a run's length nor the effect of training on all runs counts. Nothing from after
T - L is used (incident cases, static controls: Heagerty and Zheng, Biometrics 2005). Pairs may be restricted to strata,
such as runs of one arm and learning rate: across strata a signal may only tell the arms apart.

Alarms.  The threshold of the rise is the highest value of any healthy run of the tuning seeds, so there are no false
alarms among these. On the held-out seeds, count how many diverging runs crossed it before T, how long before, and how
many healthy runs crossed it. Seeds are held out, not runs, because arms of one seed share weights and data: every
second seed in rising order.

The AUROC's band: seeds are drawn with replacement, as in statistics.py.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .curves import before
from .statistics import CONFIDENCE, Interval, draws

WINDOW, LEAST = 50, 10
_FLAT = 1e-3
ENOUGH = 3  # with fewer diverged or healthy runs an AUROC gets no band


@dataclass(frozen=True, eq=False)
class Signal:
    """A signal of one run.

    Attributes:
        steps, values: (n,) rising steps, and the signal at them.
        onset: the step at which the run diverged; infinite if it did not.
        seed: the run's.
        stratum: only runs with the same stratum may be compared.
    """

    steps: np.ndarray
    values: np.ndarray
    onset: float
    seed: int
    stratum: Hashable = None

    def at(self, step: float) -> float:
        """The last value logged at `step` or before; NaN if there is none."""
        i = int(np.searchsorted(self.steps, step, side="right")) - 1
        return float(self.values[i]) if i >= 0 else math.nan


def rise(values: np.ndarray, either_way: bool = False) -> np.ndarray:
    """r_t from the top of the file, (n,) like `values`; NaN if fewer than LEAST values came before."""
    mean, deviation = before(values, WINDOW, LEAST)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (values - mean) / np.maximum(deviation, _FLAT * np.abs(mean))
    return np.abs(found) if either_way else found


def held_out(seeds: Sequence[int]) -> set[int]:
    """Every second of the distinct seeds in rising order; the others are for tuning."""
    return set(sorted(set(seeds))[1::2])


class Auroc(NamedTuple):
    """AUROC, its band, and the numbers of diverged and of healthy runs that had a pair."""

    value: float
    band: Interval
    diverged: int
    healthy: int


def auroc(signals: Sequence[Signal], lead: float) -> Auroc:
    """The AUROC at `lead` steps before the onset; NaN without a pair; no band with fewer than ENOUGH of either kind."""
    cases = [signal for signal in signals if math.isfinite(signal.onset)]
    controls = [signal for signal in signals if not math.isfinite(signal.onset)]
    wins = np.full((len(cases), len(controls)), math.nan)
    for i, case in enumerate(cases):
        when = case.onset - lead
        value = case.at(when)
        for j, control in enumerate(controls):
            other = control.at(when)
            if case.stratum == control.stratum and math.isfinite(value) and math.isfinite(other):
                wins[i, j] = 0.5 * ((value > other) + (value >= other))
    pairs = np.isfinite(wins)
    diverged, healthy = int(pairs.any(1).sum()), int(pairs.any(0).sum())
    if not pairs.any():
        return Auroc(math.nan, Interval(math.nan, math.nan), 0, 0)
    won = np.where(pairs, wins, 0.0)
    band = Interval(math.nan, math.nan)
    if min(diverged, healthy) >= ENOUGH:
        seeds = sorted({signal.seed for signal in signals})
        drawn = draws(len(seeds))
        by_case = drawn[:, [seeds.index(case.seed) for case in cases]]
        by_control = drawn[:, [seeds.index(control.seed) for control in controls]]
        with np.errstate(invalid="ignore"):  # a draw without a pair is left out
            again = ((by_case @ won) * by_control).sum(1) / ((by_case @ pairs) * by_control).sum(1)
        tail = (1 - CONFIDENCE) / 2
        band = Interval(*np.nanquantile(again, [tail, 1 - tail]).tolist())
    return Auroc(float(won.sum() / pairs.sum()), band, diverged, healthy)


class Alarms(NamedTuple):
    """The effect of a threshold on held-out seeds.

    Attributes:
        threshold: of the rise.
        warned, diverged: how many diverging runs had an alarm before their onset, and how many there are.
        false, healthy: how many healthy runs had an alarm, and how many there are.
        leads: steps from the first alarm to the onset, for the warned runs, rising.
    """

    threshold: float
    warned: int
    diverged: int
    false: int
    healthy: int
    leads: list[float]


def threshold(rises: Sequence[Signal]) -> float:
    """The highest value of any healthy run; NaN if there is none."""
    highest = [float(np.nanmax(s.values)) for s in rises if math.isinf(s.onset) and np.isfinite(s.values).any()]
    return max(highest, default=math.nan)


def alarms(rises: Sequence[Signal], limit: float) -> Alarms:
    """The Alarms of runs' rises above `limit`."""
    leads, diverged, false, healthy = [], 0, 0, 0
    for signal in rises:
        above = signal.steps[signal.values > limit]
        if math.isinf(signal.onset):
            healthy += 1
            false += len(above) > 0
        else:
            diverged += 1
            if len(above) and above[0] < signal.onset:
                leads.append(float(signal.onset - above[0]))
    return Alarms(limit, len(leads), diverged, false, healthy, sorted(leads))
