"""Judge one run's curves: whether and when it diverged, its final loss, its spikes, its steps to a loss.

Losses l_t are in nats, at the logged steps t; NaN stands for a loss that is missing or not finite. The smoothed loss
averages the finite ones, with a half-life of h points:

    E_t = sum_{s <= t} k^(t - s) l_s / sum_{s <= t} k^(t - s),      k = 2^(-1 / h)

Divergence.  A run diverged if one of these holds, and its onset is the first step of the earliest that holds. P is 5 %
of the steps that it made, at least 10. A run from a checkpoint of step 10,000 has made 400 at step 10,400.

    not finite            the last P steps have no finite loss, or the run ended itself because a loss or a gradient was
                          not finite; onset: the first step after the last finite loss
    above initial         the mean of the last P steps is above the first loss; onset: when E last rose above it
    above its own best    E is more than 0.5 nats above its own lowest value so far for P steps on end; onset: the first

A single missing loss, from a skipped step, is not a divergence; nor is a high loss that was never lower.

Final loss: the mean over the last P steps.

Spike score (OLMo 2, arXiv 2501.00656): the share of steps at which a value lies 7 or more standard deviations from the
mean of the 1,000 values before it. The value itself is not among these here (else no value could lie further than 31
deviations out), and steps with fewer than 50 finite values before them are not judged.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ....errors import UserError
from ....packages import needs

try:
    from scipy.signal import lfilter
except ImportError:
    raise UserError(f"megatron-fp8 lab report {needs('scipy')}") from None

NOT_FINITE, ABOVE_INITIAL, ABOVE_BEST = "not finite", "above initial", "above its own best"
CAUSES = (NOT_FINITE, ABOVE_INITIAL, ABOVE_BEST)
_FLAT = 1e-9  # share of the mean: the spread that rounding alone gives equal values


@dataclass(frozen=True)
class Rule:
    """The numbers in the definition of divergence.

    Attributes:
        rise: nats above the run's own best.
        patience: P as a share of the run's steps; `at_least`: the least P, in steps.
        half_life: of E, in points.
    """

    rise: float = 0.5
    patience: float = 0.05
    at_least: int = 10
    half_life: float = 10.0

    def steps(self, logged: np.ndarray) -> float:
        """P for a run that logged these steps (n,), n >= 1."""
        return max(self.at_least, self.patience * (int(logged[-1]) - began(logged)))


RULE = Rule()


def began(logged: np.ndarray) -> int:
    """The step that a run began from, 0 or its checkpoint's, from its logged steps (n,), n >= 1.

    Megatron logs the first step that a run makes, whatever the interval.
    """
    return int(logged[0]) - 1


class Divergence(NamedTuple):
    """Why a run diverged (the first of CAUSES that holds), and since which step."""

    cause: str
    onset: int


def smooth(values: np.ndarray, half_life: float = RULE.half_life) -> np.ndarray:
    """E from the top of the file, (..., n) like `values`; NaN before the first finite value."""
    keep = 2 ** (-1 / half_life)
    finite = np.isfinite(values)
    total = lfilter([1.0], [1.0, -keep], np.where(finite, values, 0.0))
    weight = lfilter([1.0], [1.0, -keep], finite.astype(float))
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / weight


def divergence(steps: np.ndarray, losses: np.ndarray, ended: bool = False, rule: Rule = RULE) -> Divergence | None:
    """Whether a run diverged, by the rule at the top of the file; None if not.

    Args:
        steps: (n,) rising integers, n >= 1.
        losses: (n,) nats.
        ended: whether the run ended itself because a loss or a gradient was not finite.
    """
    finite = np.flatnonzero(np.isfinite(losses))
    patience = rule.steps(steps)
    late = steps > steps[-1] - patience
    onsets = {}
    if ended or not np.isfinite(losses[late]).any():
        after = finite[-1] + 1 if len(finite) else 0
        onsets[NOT_FINITE] = steps[after] if after < len(steps) else steps[-1] + 1
    if len(finite):
        mean, first = smooth(losses, rule.half_life), losses[finite[0]]
        if final_loss(steps, losses, rule) > first:
            below = np.flatnonzero(mean <= first)
            onsets[ABOVE_INITIAL] = steps[min(below[-1] + 1, len(steps) - 1)]
        best = np.minimum.accumulate(np.nan_to_num(mean, nan=math.inf))
        with np.errstate(invalid="ignore"):
            start = _first_stretch(steps, mean > best + rule.rise, patience)
        if start is not None:
            onsets[ABOVE_BEST] = steps[start]
    if not onsets:
        return None
    return Divergence(next(cause for cause in CAUSES if cause in onsets), int(min(onsets.values())))


def _first_stretch(steps: np.ndarray, holds: np.ndarray, patience: float) -> int | None:
    """Index of the first stretch of at least `patience` steps in which `holds` is true; None if there is none."""
    edges = np.diff(np.concatenate([[0], holds.astype(int), [0]]))
    for begin, end in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        before = steps[begin - 1] if begin else began(steps)
        if steps[end - 1] - before >= patience:
            return int(begin)
    return None


def final_loss(steps: np.ndarray, losses: np.ndarray, rule: Rule = RULE) -> float:
    """The mean of the finite losses of the last P steps; NaN if there is none."""
    late = losses[steps > steps[-1] - rule.steps(steps)]
    late = late[np.isfinite(late)]
    return float(late.mean()) if len(late) else math.nan


def before(values: np.ndarray, window: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the finite values among the `window` before each of `values` (n,).

    NaN if fewer than `least` are finite.
    """
    finite = np.isfinite(values)
    if not finite.any():
        return np.full(len(values), math.nan), np.full(len(values), math.nan)
    centre = float(np.median(values[finite]))  # subtracted, because sums of squares far from zero cancel
    x = np.where(finite, values - centre, 0.0)

    def sums(terms: np.ndarray) -> np.ndarray:
        until = np.concatenate([[0.0], np.cumsum(terms)])[:-1]
        return until - np.concatenate([np.zeros(window), until])[: len(terms)]

    count = sums(finite.astype(float))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums(x) / count
        deviation = np.sqrt(np.maximum(sums(x * x) / count - mean * mean, 0.0))
    few = count < least
    return np.where(few, math.nan, mean + centre), np.where(few, math.nan, deviation)


def spike_score(values: np.ndarray, window: int = 1000, deviations: float = 7.0, least: int = 50) -> float:
    """The share of the judged steps of `values` (n,) that are spikes; a value that is not finite is one.

    NaN if no step has `least` finite values before it.
    """
    mean, deviation = before(values, window, least)
    judged = np.isfinite(mean)
    if not judged.any():
        return math.nan
    distance = np.abs(values - mean)
    with np.errstate(invalid="ignore"):
        calm = (distance < deviations * deviation) | (distance <= _FLAT * np.abs(mean))
    return float((~calm)[judged].mean())


def steps_to_loss(steps: np.ndarray, losses: np.ndarray, target: float, rule: Rule = RULE) -> float:
    """The step at which E first reaches `target`, interpolated between two logged steps; NaN if it never does."""
    mean = smooth(losses, rule.half_life)
    reached = np.flatnonzero(mean <= target)
    if not len(reached):
        return math.nan
    i = int(reached[0])
    if i == 0 or not np.isfinite(mean[i - 1]):
        return float(steps[i])
    share = (mean[i - 1] - target) / (mean[i - 1] - mean[i])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def steps_ratio(base: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray], rule: Rule = RULE) -> float:
    """Steps that one run needs over those of another, (steps, losses) each, to reach the higher of their lowest E.

    Multiplied by the ratio of their speeds, this is the loss-matched speed-up of the second run.
    """
    target = max(float(np.nanmin(smooth(losses, rule.half_life))) for _, losses in (base, other))
    made, other_made = (steps_to_loss(*run, target, rule) - began(run[0]) for run in (base, other))
    return made / other_made
