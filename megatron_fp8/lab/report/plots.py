"""A report's pictures, as SVG that is the same byte for byte for the same runs, and needs nothing beside itself.

Text stays text: small, searchable, in the reader's own sans-serif. Element names are made unique over pictures, as an
HTML page has one space of names for all of them. Colours are Okabe and Ito's, which colour-blind readers tell apart.
"""

import io
import math
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from ...errors import UserError
from ...metrics import LOSS
from .curves import RULE, smooth
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
_COLOURS = "#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"
_LINES = "-", "--", ":", "-."  # after so many arms colours come again
_SIGNALS = {  # labels; the others have their names
    "sharpness": "sharpness (%)",
    "centred": "sharpness, centred (%)",
    "log_z": "log Z (nats)",
    "grad_norm": "gradient norm",
    "update_norm": "update norm",
}
_NORMS = "grad_norm", "update_norm"  # over several orders of magnitude
_POINTS = 300  # of a curve
_SMOOTHED = f"a half-life of {RULE.half_life:g} logged steps"
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


def _look(results: Results, arm: str) -> dict[str, Any]:
    """Colour and line of an arm, the same in all pictures."""
    again, place = divmod(results.arms.index(arm), len(_COLOURS))
    return {"color": _COLOURS[place], "linestyle": _LINES[again % len(_LINES)]}


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


def _drawn(values: np.ndarray, half_life: float) -> np.ndarray:
    """Values (n,), smoothed, up to the last finite one: E would go on from there as if nothing had happened."""
    after = len(values) - np.argmax(np.isfinite(values[::-1])) if np.isfinite(values).any() else 0
    return np.concatenate([smooth(values[:after], half_life), np.full(len(values) - after, math.nan)])


def _median(runs: list[Result], name: str, half_life: float) -> tuple[np.ndarray, np.ndarray]:
    """(Steps, the runs' median) of a smoothed quantity, over the runs that have it, and finite, there or later."""
    series = [run.series[name] for run in runs if name in run.series]
    steps = np.unique(np.concatenate([steps for steps, _ in series])) if series else np.zeros(0)
    table = np.full((len(series), len(steps)), math.nan)
    for row, (own, values) in zip(table, series, strict=True):
        row[np.searchsorted(steps, own)] = _drawn(values, half_life)
    keep = np.isfinite(table).any(0)
    return steps[keep], np.nanmedian(table[:, keep], 0)


def losses(results: Results) -> list[Picture]:
    """The training loss of every run, where it diverged, and each arm's median."""

    def draw(axes) -> None:
        for panel, data, rate in _panels(results, axes):
            initial, fallen = [], []
            for arm in results.arms:
                if not (runs := results.cell(Cell(data, rate, arm))):
                    continue
                look = _look(results, arm)
                for run in runs:
                    steps, values = run.losses
                    at, curve = _thin(len(steps)), _drawn(values, RULE.half_life)
                    panel.plot(steps[at], curve[at], **look, alpha=0.3, linewidth=0.6)
                    initial.append(run.initial)
                    until = curve[(steps <= run.onset) & np.isfinite(curve)]
                    if run.divergence and len(until):
                        fallen.append((run.onset, float(until[-1]), look["color"]))
                steps, median = _median(runs, LOSS, RULE.half_life)
                at = _thin(len(steps))
                panel.plot(steps[at], median[at], **look, label=arm, linewidth=1.5)
            top = 1.1 * max((value for value in initial if math.isfinite(value)), default=math.nan)
            if math.isfinite(top):
                panel.set_ylim(top=top)
            for onset, loss, colour in fallen:
                panel.plot([onset], [np.fmin(loss, top)], "x", color=colour, markersize=5, clip_on=False)
            panel.set_ylabel("training loss (nats)")
            _legend(panel)

    caption = (
        f"Training loss, smoothed with {_SMOOTHED}: thin, every run, up to its last finite loss; thick, each arm's "
        "median of those; a cross: from here on a run counts as diverged."
    )
    return [_picture("losses", caption, len(results.data), len(results.rates), draw)]


def divergence(results: Results) -> list[Picture]:
    """Each cell's rate of divergence, with its interval."""
    cells = list(results.cells())

    def draw(axes) -> None:
        panel = axes[0, 0]
        for i, (cell, runs) in enumerate(cells):
            count = sum(run.divergence is not None for run in runs)
            low, high = wilson(count, len(runs))
            look = _look(results, cell.arm)
            panel.plot([100 * low, 100 * high], [i, i], **look, linewidth=2)
            panel.plot([100 * count / len(runs)], [i], "o", color=look["color"])
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
                at, look = _thin(len(steps)), _look(results, arm)
                label = f"{arm} ({len(differences)} pair{'s' * (len(differences) > 1)})"
                panel.plot(steps[at], differences.mean(0)[at], **look, label=label, linewidth=1.2)
                low, high = mean_band(differences[:, at])
                panel.fill_between(steps[at], low, high, color=look["color"], alpha=0.2, linewidth=0)
            panel.set_ylabel(f"loss less {results.baseline}'s (nats)")
            if not panel.get_legend_handles_labels()[1]:
                panel.set(xlim=(results.start, results.steps), yticks=[])
                panel.text(0.5, 0.6, "no pair without a divergence", transform=panel.transAxes, ha="center")
            _legend(panel)

    caption = (
        f"Training loss less that of {results.baseline} with the same seed, smoothed with {_SMOOTHED}: mean over pairs "
        "of which neither diverged, with the bootstrap's 95 % band, which is too narrow with few of them."
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
    """Final loss against learning rate, arms side by side."""
    closest = min((b / a for a, b in pairwise(results.rates)), default=1.0)

    def draw(axes) -> None:
        for panel, data in zip(axes[0], results.data, strict=True):
            for i, arm in enumerate(results.arms):
                points = []
                for rate in results.rates:
                    for run in results.cell(Cell(data, rate, arm)):
                        points.append((rate, np.fmin(results.final(run), run.initial), run.divergence is not None))
                if not points:
                    continue
                rates, finals, fell = map(np.array, zip(*points, strict=True))
                rates = rates * closest ** (0.5 * ((i + 0.5) / len(results.arms) - 0.5))
                look = _look(results, arm)
                for which, marker in ((~fell, "o"), (fell, "x")):
                    panel.plot(rates[which], finals[which], marker, color=look["color"], alpha=0.4, markersize=4)
                there = np.unique(rates[np.isfinite(finals)])
                medians = [np.nanmedian(finals[rates == rate]) for rate in there]
                panel.plot(there, medians, **look, label=arm, linewidth=1.5)
            title = data if len(results.data) > 1 else ""
            panel.set(xscale="log", xlabel="learning rate", ylabel="final loss (nats)", title=title)
            panel.set_xticks(results.rates, [f"{rate:g}" for rate in results.rates])
            panel.minorticks_off()
            _legend(panel)

    caption = (
        f"Final {results.outcome} loss, capped at the first, of every run (a cross: it diverged; without a finite loss "
        "at the end, the first), and each arm's median."
    )
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
                    panel.plot(steps[at], median[at], **_look(results, arm), label=arm, linewidth=1.2)
                panel.set(ylabel=_SIGNALS.get(name, name), yscale="log" if name in _NORMS else "linear")
                _legend(panel)

        return draw

    shape = len(results.data), len(results.rates)
    what = "each arm's median over runs, diverged ones too."
    return [_picture(f"signal_{name}", f"{_SIGNALS.get(name, name)}: {what}", *shape, of(name)) for name in names]
