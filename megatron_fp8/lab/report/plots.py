"""A report's pictures, as SVG that is the same byte for byte for the same runs, and needs nothing beside itself.

Text stays text: small, searchable, in the reader's own sans-serif. Element names are made unique over pictures, as an
HTML page has one space of names for all of them.
"""

import io
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...errors import UserError
from ...metrics import LOSS
from .curves import smooth
from .pieces import Picture
from .results import Cell, Result, Results, healthy
from .statistics import mean_band, wilson

_SETTINGS: Any = {
    "svg.hashsalt": "megatron_fp8",  # names of elements
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_POINTS = 300  # of a curve
_PANEL = 4.2, 3.0  # inches
_NAMELESS = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def _picture(name: str, caption: str, rows: int, columns: int, draw: Callable, panel=_PANEL) -> Picture:
    """A picture of rows x columns panels of `panel` inches; draw(axes) fills them, (rows, columns)."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a report's pictures need matplotlib: pip install 'megatron-fp8[lab]'") from None
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(panel[0] * columns, panel[1] * rows), layout="constrained")
        draw(figure.subplots(rows, columns, squeeze=False))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=_NAMELESS)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML declaration and the link to a DTD
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    return Picture(name, caption, svg)


def _colour(results: Results, arm: str) -> str:
    return f"C{results.arms.index(arm) % 10}"


def _legend(panel) -> None:
    if panel.get_legend_handles_labels()[1]:
        panel.legend(fontsize=8)


def _panels(results: Results, axes) -> Iterator[tuple]:
    """(Axes, data set, learning rate) of a panel each: a row a data set, a column a learning rate."""
    for row, data in zip(axes, results.data, strict=True):
        for panel, rate in zip(row, results.rates, strict=True):
            names = [data] * (len(results.data) > 1) + [f"learning rate {rate:g}"] * (len(results.rates) > 1)
            panel.set(title=", ".join(names), xlabel="step")
            yield panel, data, rate


def _thin(count: int) -> np.ndarray:
    """Which of `count` points to draw."""
    return np.unique(np.linspace(0, count - 1, min(count, _POINTS)).round().astype(int))


def _median(runs: list[Result], name: str, half_life: float) -> tuple[np.ndarray, np.ndarray]:
    """(Steps, the runs' median) of a smoothed quantity, over the runs that have it there."""
    series = [run.series[name] for run in runs if name in run.series]
    steps = np.unique(np.concatenate([steps for steps, _ in series])) if series else np.zeros(0)
    table = np.full((len(series), len(steps)), math.nan)
    for row, (own, values) in zip(table, series, strict=True):
        row[np.searchsorted(steps, own)] = smooth(values, half_life)
    keep = np.isfinite(table).any(0)
    return steps[keep], np.nanmedian(table[:, keep], 0)


def losses(results: Results) -> list[Picture]:
    """The training loss of every run, and each arm's median."""

    def draw(axes) -> None:
        for panel, data, rate in _panels(results, axes):
            initial = []
            for arm in results.arms:
                if not (runs := results.cell(Cell(data, rate, arm))):
                    continue
                colour = _colour(results, arm)
                for run in runs:
                    steps, values = run.losses
                    at = _thin(len(steps))
                    panel.plot(steps[at], smooth(values)[at], color=colour, alpha=0.3, linewidth=0.6)
                    initial.append(run.initial)
                steps, median = _median(runs, LOSS, 10)
                at = _thin(len(steps))
                panel.plot(steps[at], median[at], color=colour, label=arm, linewidth=1.5)
            top = max((value for value in initial if math.isfinite(value)), default=math.nan)
            if math.isfinite(top):
                panel.set_ylim(top=1.1 * top)
            panel.set_ylabel("training loss (nats)")
            _legend(panel)

    caption = "Training loss, smoothed over 10 steps: thin, every run; thick, each arm's median."
    return [_picture("losses", caption, len(results.data), len(results.rates), draw)]


def divergence(results: Results) -> list[Picture]:
    """Each cell's rate of divergence, with its interval."""
    cells = list(results.cells())

    def draw(axes) -> None:
        panel = axes[0, 0]
        for i, (cell, runs) in enumerate(cells):
            count = sum(run.divergence is not None for run in runs)
            low, high = wilson(count, len(runs))
            colour = _colour(results, cell.arm)
            panel.plot([100 * low, 100 * high], [i, i], color=colour, linewidth=2)
            panel.plot([100 * count / len(runs)], [i], "o", color=colour)
        panel.set_yticks(range(len(cells)), [", ".join(results.named(cell)) for cell, _ in cells])
        panel.set(xlabel="runs that diverged (%)", xlim=(-2, 102), ylim=(len(cells) - 0.5, -0.5))

    caption, inches = "Rates of divergence with Wilson's 95 % intervals.", (7.0, 1 + 0.25 * len(cells))
    return [_picture("divergence", caption, 1, 1, draw, inches)]


def gaps(results: Results) -> list[Picture]:
    """Each arm's distance from the baseline over training, with its band."""
    others = [arm for arm in results.arms if arm != results.baseline]
    if not others:
        return []

    def draw(axes) -> None:
        for panel, data, rate in _panels(results, axes):
            panel.axhline(0, color="black", linewidth=0.8)
            for arm in others:
                steps, differences = _differences(healthy(results.pairs(Cell(data, rate, arm))))
                if not len(steps):
                    continue
                at, colour = _thin(len(steps)), _colour(results, arm)
                panel.plot(steps[at], differences.mean(0)[at], color=colour, label=arm, linewidth=1.2)
                low, high = mean_band(differences[:, at])
                panel.fill_between(steps[at], low, high, color=colour, alpha=0.2, linewidth=0)
            panel.set_ylabel(f"loss less {results.baseline}'s (nats)")
            _legend(panel)

    caption = (
        f"Training loss less that of {results.baseline} with the same seed, smoothed over 10 steps: mean over pairs of "
        "which neither diverged, with the bootstrap's 95 % band."
    )
    return [_picture("gaps", caption, len(results.data), len(results.rates), draw)]


def _differences(pairs: list[tuple[Result, Result]]) -> tuple[np.ndarray, np.ndarray]:
    """(Steps (n,), differences (pairs, n)) of the smoothed losses, where all pairs have them."""
    if not pairs:
        return np.zeros(0), np.zeros((0, 0))
    steps = pairs[0][0].losses[0]
    for run in (run for pair in pairs for run in pair):
        steps = np.intersect1d(steps, run.losses[0])

    def at(run: Result) -> np.ndarray:
        return smooth(run.losses[1])[np.searchsorted(run.losses[0], steps)]

    differences = np.array([at(other) - at(base) for base, other in pairs])
    keep = np.isfinite(differences).all(0)
    return steps[keep], differences[:, keep]


def learning_rates(results: Results) -> list[Picture]:
    """Final loss against learning rate."""

    def draw(axes) -> None:
        for panel, data in zip(axes[0], results.data, strict=True):
            for arm in results.arms:
                points = []
                for rate in results.rates:
                    for run in results.cell(Cell(data, rate, arm)):
                        points.append((rate, np.fmin(results.final(run), run.initial)))
                if not points:
                    continue
                rates, finals = map(np.array, zip(*points, strict=True))
                colour = _colour(results, arm)
                panel.plot(rates, finals, "o", color=colour, alpha=0.3, markersize=3)
                there = np.unique(rates[np.isfinite(finals)])
                medians = [np.nanmedian(finals[rates == rate]) for rate in there]
                panel.plot(there, medians, color=colour, label=arm, linewidth=1.5)
            title = data if len(results.data) > 1 else ""
            panel.set(xscale="log", xlabel="learning rate", ylabel="final loss (nats)", title=title)
            panel.set_xticks(results.rates, [f"{rate:g}" for rate in results.rates])
            panel.minorticks_off()
            _legend(panel)

    caption = f"Final {results.outcome} loss, capped at the first, of every run, and each arm's median."
    return [_picture("learning_rates", caption, 1, len(results.data), draw)]


def signals(results: Results, names: list[str]) -> list[Picture]:
    """Each arm's median of each signal."""

    def of(name: str) -> Callable:
        def draw(axes) -> None:
            for panel, data, rate in _panels(results, axes):
                for arm in results.arms:
                    steps, median = _median(results.cell(Cell(data, rate, arm)), name, 1)
                    if not len(steps):
                        continue
                    at = _thin(len(steps))
                    panel.plot(steps[at], median[at], color=_colour(results, arm), label=arm, linewidth=1.2)
                panel.set_ylabel(name)
                _legend(panel)

        return draw

    shape = len(results.data), len(results.rates)
    return [_picture(f"signal_{name}", f"{name}: each arm's median over runs.", *shape, of(name)) for name in names]
