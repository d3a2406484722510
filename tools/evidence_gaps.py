"""A gap: an arm's loss beside another's, seed by seed, as a row of docs/evidence.md."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from make_flags_doc import table

from megatron_fp8.tools.lab.report.statistics import detectable_gap, equivalence_words, paired, t_interval

BOUND = 0.5  # per cent or points: two losses or accuracies that differ by less are called equal
POINTS = "points"  # the unit of gaps between accuracies
LAST = 100  # steps whose training loss is averaged


class Gap(NamedTuple):
    """Losses of two arms, seed by seed: {seed: nats}. unit: of a gap; with POINTS they are shares of right answers."""

    arm: str
    reference: str
    ours: dict[int, float]
    theirs: dict[int, float]
    unit: str = "%"

    def differences(self) -> np.ndarray:
        """Per cent of the reference's mean loss, or points, of the seeds that both have."""
        seeds = sorted(self.ours.keys() & self.theirs.keys())
        base = statistics.mean(self.theirs[seed] for seed in seeds) if seeds else math.nan
        base = 1.0 if self.unit == POINTS else base
        return np.array([100 * (self.ours[seed] - self.theirs[seed]) / base for seed in seeds])

    def row(self) -> list[str]:
        """The cells of the page's table."""
        found = paired(self.differences())
        low, high = t_interval(found)
        between, seen = "-", "-"
        if found.n > 1:
            between = f"{low:+.2f} to {high:+.2f} {self.unit}"
            seen = f"{detectable_gap(found.deviation, found.n):.2f} {self.unit}"
        gap = "-" if math.isnan(found.mean) else f"{found.mean:+.2f} {self.unit}"
        cells = str(found.n), gap, between, seen, *equivalence_words(found, BOUND)
        return [self.arm, self.reference, *cells]

    def said(self) -> str:
        """The same as a sentence's part."""
        _, _, seeds, gap, interval, _, verdict, _ = self.row()
        many = f"{seeds} seed{'s' * (seeds != '1')}"
        return f"{gap} ({f'interval {interval}, ' * (interval != '-')}{many}); within {BOUND:g} {self.unit}: {verdict}"


def gaps(rows: Sequence[Gap]) -> str:
    """A table; rows: of one unit."""
    within = f"within {BOUND:g} {rows[0].unit}"
    heads = ("arm", "compared with", "seeds", "gap", "interval", "seen", within, "needed")
    return table(heads, [gap.row() for gap in rows])
