"""What a stress is, what it measures, and when a recipe counts as fragile.

A stress plants one trouble and measures every arm under it, for one seed at a time. All arms of a seed begin with the
same numbers and see the same data. What it measures are Points. Those of the quantity JUDGED are compared with a limit:

    fragile    the 95 % interval of the mean over seeds lies above the limit, or every one of three seeds or more does
    robust     the interval lies below the limit, and every seed does
    open       neither: more seeds would tell

With one seed there is no interval, and the verdict is "above" or "below", of the seed's value alone. A case is one
way to plant; an arm is as good as its worst case.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..lab.report.document import Picture, Table

JUDGED = "judged"
FRAGILE, ROBUST, OPEN, ABOVE, BELOW = "fragile", "robust", "open", "above", "below"
_WORST_FIRST = (FRAGILE, ABOVE, OPEN, BELOW, ROBUST)
_ALL_ABOVE = 3  # so many seeds, each above, make an arm fragile without an interval


class Found(NamedTuple):
    """One number. at: where on the plant's dial; NaN if it has none."""

    arm: str
    case: str
    at: float
    quantity: str
    value: float


class Point(NamedTuple):
    """A number in the store, with where it comes from."""

    stress: str
    seed: int
    found: Found
    device: str
    commit: str


@dataclass(frozen=True, eq=False)
class Stress:
    """One plant, its measure and its picture.

    Attributes:
        name: S1 to S8.
        title: in the page.
        plant: sentences: what is planted, and what is measured.
        limits: {case: the largest judged value of a robust arm}; a case without a limit is shown and not judged.
        unit: of judged values.
        measure: (seed) -> the numbers of all arms; of a stress with `cases`: (seed, case).
        draw: (points of this stress) -> its picture.
        more: (points of this stress) -> what else the page says of it.
        cases: those that are measured and stored one by one, because each trains its own networks.
    """

    name: str
    title: str
    plant: str
    limits: dict[str, float]
    unit: str
    measure: Callable[..., Iterator[Found]]
    draw: Callable[[list[Point]], Picture]
    more: Callable[[list[Point]], list[Table]] = lambda points: []
    cases: tuple[str, ...] = ()


class Verdict(NamedTuple):
    """Of one arm in one case: its values over seeds, their mean's interval (low, high), and the word."""

    arm: str
    case: str
    n: int
    mean: float
    interval: tuple[float, float]
    word: str


def verdicts(stress: Stress, points: Iterable[Point]) -> list[Verdict]:
    """Of every arm and case that is judged, in the order in which the store has them."""
    values: dict[tuple[str, str], list[float]] = {}
    for point in points:
        if point.stress == stress.name and point.found.quantity == JUDGED:
            values.setdefault((point.found.arm, point.found.case), []).append(point.found.value)
    return [judged(arm, case, found, stress.limits.get(case, math.nan)) for (arm, case), found in values.items()]


def judged(arm: str, case: str, values: list[float], limit: float) -> Verdict:
    """The verdict of values over seeds. A value that is not finite is above any limit."""
    from ..lab.report.statistics import paired, t_interval  # scipy: to measure needs none

    n, above = len(values), [not value <= limit for value in values]
    if not all(map(math.isfinite, values)):
        mean, low, high = math.inf, math.nan, math.nan
    else:
        test = paired(np.array(values))
        mean, (low, high) = test.mean, t_interval(test)
    if math.isnan(limit):
        word = ""
    elif n == 1:
        word = ABOVE if above[0] else BELOW
    elif low > limit or (all(above) and n >= _ALL_ABOVE):
        word = FRAGILE
    elif high <= limit and not any(above):
        word = ROBUST
    else:
        word = OPEN
    return Verdict(arm, case, n, mean, (low, high), word)


def worst(found: Iterable[Verdict]) -> Verdict | None:
    """An arm's worst case: by its word, then by what is judged; None if none is judged."""
    of_words = [verdict for verdict in found if verdict.word]
    return max(of_words, key=lambda v: (-_WORST_FIRST.index(v.word), v.mean), default=None)


def per_cent(value: float, reference: float) -> float:
    """How far `value` lies above `reference`, in per cent of it; a loss that is not finite is infinitely far."""
    return 100 * (value / reference - 1) if math.isfinite(value) else math.inf


def gain_and_error(found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> tuple[float, float]:
    """Over all pairs g', g: gain sum <g', g> / sum |g|^2, error sqrt(sum |g' - g|^2 / sum |g|^2)."""
    within = square = off = 0.0
    for one, known in zip(found, exact, strict=True):
        within += float(one @ known)
        square += float(known @ known)
        off += float((one - known).square().sum())
    return within / square, math.sqrt(off / square)
