"""Judge a store's runs one by one, and sort them into cells and pairs.

A cell is a data set, a learning rate and an arm; its runs differ only in the seed. A pair is two runs of one seed, data
set and learning rate, one of them of the baseline arm (the plan's first, or the one asked for). Everything is in the
plan's order and then by seed, never in the order in which runs ended, so the same runs give the same report.
"""

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ....errors import UserError
from ....metrics import LOSS, VALIDATION_LOSS
from ..sweep.rows import ENDED, NOT_FINITE, Row
from ..sweep.store import Store
from .curves import Divergence, began, divergence, final_loss

Series = tuple[np.ndarray, np.ndarray]  # steps, values
_EMPTY = np.zeros(0)


class Cell(NamedTuple):
    """What a cell's runs have in common."""

    data: str
    rate: float
    arm: str


@dataclass(frozen=True, eq=False)
class Result:
    """A run that has ended, either well or because a value was not finite.

    Attributes:
        row: its row of the store.
        series: {name: (steps, values)} of all that it logged.
        divergence: None if it did not diverge.
        training_loss: the mean over its last steps, nats (curves.final_loss).
        validation_loss: after its last step, nats; NaN if there was no evaluation.
    """

    row: Row
    series: dict[str, Series]
    divergence: Divergence | None
    training_loss: float
    validation_loss: float

    @property
    def onset(self) -> float:
        """The step at which it diverged; infinite if it did not."""
        return self.divergence.onset if self.divergence else math.inf

    @property
    def losses(self) -> Series:
        """Its training loss."""
        return self.series[LOSS]

    @property
    def initial(self) -> float:
        """Its first finite loss, nats; NaN if it had none."""
        finite = self.losses[1][np.isfinite(self.losses[1])]
        return float(finite[0]) if len(finite) else math.nan


def _judge(row: Row, series: dict[str, Series], start: int) -> Result:
    if LOSS not in series:  # it ended before its first step
        series = {**series, LOSS: (np.array([start + 1]), np.array([math.nan]))}
    steps, losses = series[LOSS]
    evaluated, values = series.get(VALIDATION_LOSS, (_EMPTY, _EMPTY))
    validation = float(values[-1]) if len(values) and evaluated[-1] >= steps[-1] else math.nan
    return Result(
        row, series, divergence(steps, losses, row.state == NOT_FINITE), final_loss(steps, losses), validation
    )


class Results:
    """The runs of a store.

    Args:
        baseline: the arm that the others are compared with; None: the plan's first.

    Attributes:
        name: the store's, without its suffix.
        rows: all runs, with waiting and failed ones.
        start: the step that the runs began from, 0 or a checkpoint's; the first one if they differ.
        steps: the step at which they should end.
        arms, data, rates: in the plan's order, except that the baseline is the first arm. Names that the plan no longer
            has follow.
        signals: names of all that was logged.
        outcome: which final loss is compared: "validation" if every run that ended well has it, else "training".
    """

    def __init__(self, store: Store, baseline: str | None = None):
        self.name = store.path.stem
        outline = store.outline()
        self.rows = sorted(store.runs(), key=lambda row: (row.data, row.learning_rate, row.arm, row.seed))
        self.steps: int = outline["steps"]
        self.arms: list[str] = _ordered(outline["arms"], {row.arm for row in self.rows})
        if baseline is not None:
            if baseline not in self.arms:
                raise UserError(f"--baseline {baseline}: no such arm; use one of {', '.join(self.arms)}")
            self.arms = [baseline, *(arm for arm in self.arms if arm != baseline)]
        self.data: list[str] = _ordered(outline["data"], {row.data for row in self.rows})
        self.rates = sorted({row.learning_rate for row in self.rows})
        ended = [row for row in self.rows if row.state in ENDED]
        series = {row.id: store.series(row.id) for row in ended}
        self.start = min((began(own[LOSS][0]) for own in series.values() if LOSS in own), default=0)
        self._results = {(_cell(row), row.seed): _judge(row, series[row.id], self.start) for row in ended}
        self.signals = sorted({name for result in self._results.values() for name in result.series})
        well = [result for result in self._results.values() if result.divergence is None]
        validated = bool(well) and all(math.isfinite(result.validation_loss) for result in well)
        self.outcome = "validation" if validated else "training"

    @property
    def baseline(self) -> str:
        """The arm that others are compared with."""
        return self.arms[0]

    @property
    def made(self) -> int:
        """Steps of each run, as planned."""
        return self.steps - self.start

    @property
    def length(self) -> str:
        """The same in words: "400 steps", or "400 steps after step 10000"."""
        return f"{self.made} steps" + f" after step {self.start}" * (self.start > 0)

    def flags(self) -> tuple[list[str], dict[str, list[str]]]:
        """(The flags, with values, that all runs share; {arm: the further flags that its runs share})."""
        of = {arm: [_flags(row.command) for row in self.rows if row.arm == arm] for arm in self.arms}
        own = {arm: [flag for flag in of[arm][0] if all(flag in flags for flags in of[arm])] for arm in self.arms}
        shared = [flag for flag in own[self.arms[0]] if all(flag in flags for flags in own.values())]
        return shared, {arm: [flag for flag in flags if flag not in shared] for arm, flags in own.items()}

    def cells(self) -> Iterator[tuple[Cell, list[Result]]]:
        """Every cell with an ended run, and its ended runs by seed."""
        for cell in self.planned():
            if runs := self.cell(cell):
                yield cell, runs

    def planned(self) -> list[Cell]:
        """Every cell with a run, in whatever state."""
        there = {_cell(row) for row in self.rows}
        every = (Cell(data, rate, arm) for data in self.data for rate in self.rates for arm in self.arms)
        return [cell for cell in every if cell in there]

    def cell(self, cell: Cell) -> list[Result]:
        """The ended runs of a cell, by seed."""
        return [result for (of, _), result in self._results.items() if of == cell]

    def pairs(self, cell: Cell) -> list[tuple[Result, Result]]:
        """(Baseline's run, this cell's run) for every seed for which both have ended."""
        base = {result.row.seed: result for result in self.cell(cell._replace(arm=self.baseline))}
        runs = self.cell(cell)
        return [(base[result.row.seed], result) for result in runs if result.row.seed in base]

    def final(self, result: Result) -> float:
        """The final loss that is compared, nats. NaN for a run that ended itself: its loss until then is not where it
        ended."""
        if result.row.state == NOT_FINITE:
            return math.nan
        return result.validation_loss if self.outcome == "validation" else result.training_loss

    def named(self, cell: Cell) -> list[str]:
        """A cell's labels: its data set and learning rate, if the store has several, and its arm."""
        return [
            *([cell.data] if len(self.data) > 1 else []),
            *([f"{cell.rate:g}"] if len(self.rates) > 1 else []),
            cell.arm,
        ]

    def labels(self) -> list[str]:
        """The heads of `named`'s columns."""
        several = (len(self.data) > 1, "data"), (len(self.rates) > 1, "learning rate")
        return [*(name for is_several, name in several if is_several), "arm"]


def healthy(pairs: list[tuple[Result, Result]]) -> list[tuple[Result, Result]]:
    """The pairs in which neither run diverged."""
    return [(base, other) for base, other in pairs if base.divergence is None and other.divergence is None]


def _flags(command: tuple[str, ...]) -> list[str]:
    """The script, and each flag with its values; if a flag is given twice, the last."""
    parts: list[list[str]] = [[]]
    for word in command:
        if re.match("-{1,2}[a-z]", word) and parts[-1]:
            parts.append([])
        parts[-1].append(word)
    return [*{part[0].partition("=")[0]: shlex.join(part) for part in parts}.values()]


def _cell(row: Row) -> Cell:
    return Cell(row.data, row.learning_rate, row.arm)


def _ordered(planned: list[str], found: set[str]) -> list[str]:
    return [name for name in planned if name in found] + sorted(found - set(planned))
