"""A report's pictures as SVG: self-contained, and the same byte for byte for the same runs.

Text stays text: small, searchable, in the reader's own sans-serif. Element names are unique over all pictures, because
an HTML page has one name space for all of them.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from ....errors import UserError
from ....metrics import LOSS
from ....packages import needs
from ...palette import looks
from .curves import RULE, smooth
from .document import Picture, counted
from .results import Cell, Result, Results, healthy
from .statistics import mean, mean_band, paired, t_interval, wilson

_SETTINGS: Any = {
    "svg.hashsalt": "megatron_fp8",  # makes the names of elements reproducible
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_SIGNALS = {  # labels; other signals keep their names
    "sharpness": "sharpness (%)",
    "centred": "sharpness, centred (%)",
    "log_z": "log Z (nats)",
    "grad_norm": "gradient norm",
    "update_norm": "update norm",
    "router_entropy": "router entropy (nats)",
    "load_entropy": "entropy of tokens by expert (nats)",
}
_NORMS = "grad_norm", "update_norm"  # span several orders of magnitude
_PAIRS = 3  # with fewer, an interval is so wide that it hides the others
_POINTS = 300  # drawn of a curve
_SMOOTHED = f"a half-life of {RULE.half_life:g} logged steps"
_PANEL = 4.2, 3.0  # inches
_NAMELESS = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def picture(name: str, caption: str, rows: int, columns: int, draw: Callable, panel=_PANEL) -> Picture:
    """A picture of rows x columns panels of `panel` inches; draw(axes) fills the (rows, columns) axes."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"megatron-fp8 lab report {needs('matplotlib')}") from None
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that its own font lacks: the reader's draws them
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
    """Colour and line style of an arm, the same in all pictures."""
    return looks(results.arms)[arm]


def _line(results: Results, arm: str) -> dict[str, Any]:
    """The look of an arm's median. The first arm's line is the widest, so that a line on top of it does not hide it."""
    later = len(results.arms) - 1 - results.arms.index(arm)
    return {**_look(results, arm), "label": _text(arm), "linewidth": 1.2 + 2.4 * later / len(results.arms)}


def _text(name: str) -> str:
    """A name for a picture, with dollars escaped: matplotlib would read mathematics between two of them."""
    return name.replace("$", r"\$")


def _legend(panel) -> None:
    if panel.get_legend_handles_labels()[1]:
        panel.legend(fontsize=8)


def _panels(results: Results, axes) -> Iterator[tuple]:
    """(Axes, data set, learning rate) for each panel: a row for each data set, a column for each learning rate."""
    for row, data in zip(axes, results.data, strict=True):
        for panel, rate in zip(row, results.rates, strict=True):
            names = [data] * (len(results.data) > 1) + [f"learning rate {rate:g}"] * (len(results.rates) > 1)
            panel.set(title=_text(", ".join(names)), xlabel="step")
            yield panel, data, rate


def _thin(count: int) -> np.ndarray:
    """Indices of the points to draw, out of `count`."""
    return np.unique(np.linspace(0, count - 1, min(count, _POINTS)).round().astype(int))


def _drawn(values: np.ndarray, half_life: float) -> np.ndarray:
    """Values (n,), smoothed, up to the last finite one; E would continue after it as if nothing had happened."""
    after = len(values) - np.argmax(np.isfinite(values[::-1])) if np.isfinite(values).any() else 0
    return np.concatenate([smooth(values[:after], half_life), np.full(len(values) - after, math.nan)])


def _median(runs: list[Result], name: str, half_life: float) -> tuple[np.ndarray, np.ndarray]:
    """(Steps, median over runs) of a smoothed quantity. A run counts at a step if it has a finite value there or later.
    """
    series = [run.series[name] for run in runs if name in run.series]
    steps = np.unique(np.concatenate([steps for steps, _ in series])) if series else np.zeros(0)
    table = np.full((len(series), len(steps)), math.nan)
    for row, (own, values) in zip(table, series, strict=True):
        row[np.searchsorted(steps, own)] = _drawn(values, half_life)
    keep = np.isfinite(table).any(0)
    return steps[keep], np.nanmedian(table[:, keep], 0)


def losses(results: Results) -> list[Picture]:
    """The training loss of every run, its onset if it diverged, and each arm's median."""

    def draw(axes) -> None:
        for panel, data, rate in _panels(results, axes):
            initial, lowest, fallen = [], [], []
            for arm in results.arms:
                if not (runs := results.cell(Cell(data, rate, arm))):
                    continue
                look = _look(results, arm)
                for run in runs:
                    steps, values = run.losses
                    at, curve = _thin(len(steps)), _drawn(values, RULE.half_life)
                    panel.plot(steps[at], curve[at], **look, alpha=0.3, linewidth=0.6)
                    initial.append(run.initial)
                    lowest.append(np.fmin.reduce(curve, initial=math.inf))
                    until = curve[(steps <= run.onset) & np.isfinite(curve)]
                    if run.divergence and len(until):
                        fallen.append((run.onset, float(until[-1]), look["color"]))
                steps, median = _median(runs, LOSS, RULE.half_life)
                at = _thin(len(steps))
                panel.plot(steps[at], median[at], **_line(results, arm))
            highest = max((value for value in initial if math.isfinite(value)), default=math.nan)
            top = highest + 0.1 * (highest - min(lowest, default=math.nan))  # cut curves that rise above the first loss
            if math.isfinite(top) and top > highest:
                panel.set_ylim(top=top)
            for onset, loss, colour in fallen:
                panel.plot([onset], [np.fmin(loss, top)], "x", color=colour, markersize=5, clip_on=False)
            panel.set_ylabel("training loss (nats)")
            _legend(panel)

    caption = (
        f"Training loss, smoothed with {_SMOOTHED}. Thin: every run, up to its last finite loss. Thick: each arm's "
        "median. A cross: the onset of a run's divergence."
    )
    return [picture("losses", caption, len(results.data), len(results.rates), draw)]


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
        panel.set_yticks(range(len(cells)), [_text(", ".join(results.named(cell))) for cell, _ in cells])
        panel.set(xlabel="runs that diverged (%)", xlim=(-2, 102), ylim=(len(cells) - 0.5, -0.5))

    caption, inches = "Rates of divergence with Wilson's 95 % intervals.", (7.0, 1 + 0.25 * len(cells))
    return [picture("divergence", caption, 1, 1, draw, inches)]


def gaps(results: Results) -> list[Picture]:
    """Each arm's gap to the baseline over training, with its band."""
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
                label = _text(f"{arm} ({counted(len(differences), 'pair')})")
                panel.plot(steps[at], differences.mean(0)[at], **look, label=label, linewidth=1.2)
                low, high = mean_band(differences[:, at])
                panel.fill_between(steps[at], low, high, color=look["color"], alpha=0.2, linewidth=0)
            panel.set_ylabel(_text(f"loss less {results.baseline}'s (nats)"))
            if not panel.get_legend_handles_labels()[1]:
                panel.set(xlim=(results.start, results.steps), yticks=[])
                panel.text(0.5, 0.6, "no pair without a divergence", transform=panel.transAxes, ha="center")
            _legend(panel)

    caption = (
        f"Training loss minus that of {results.baseline} with the same seed, smoothed with {_SMOOTHED}: mean over "
        "pairs in which neither run diverged, with the bootstrap's 95 % band, which is too narrow for few pairs."
    )
    return [picture("gaps", caption, len(results.data), len(results.rates), draw)]


def _differences(pairs: list[tuple[Result, Result]]) -> tuple[np.ndarray, np.ndarray]:
    """(Steps (n,), differences (pairs, n)) of the smoothed losses, at the steps that all pairs have."""
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
    """Final loss against learning rate, and below it each arm's gap to the baseline.

    Medians lie exactly at their learning rate, so equal ones overlap; therefore the first arm's line is the widest.
    Runs and intervals, which are not joined by lines, lie side by side.
    """
    others = [arm for arm in results.arms if arm != results.baseline]

    def draw(axes) -> None:
        for column, data in zip(axes.T, results.data, strict=True):
            _draw_finals(results, column[0], data)
            for panel in column[1:]:
                _draw_gaps(results, panel, data, others)
            for panel in column:
                panel.set(xscale="log", xlabel="learning rate")
                panel.set_xticks(results.rates, [f"{rate:g}" for rate in results.rates])
                panel.minorticks_off()
                panel.set_xlim(column[0].get_xlim())
            column[0].set_title(_text(data) if len(results.data) > 1 else "")

    caption = (
        f"Final {results.outcome} loss of every run, capped at the first loss; the first loss if there is no finite "
        "final one. A cross: the run diverged. Lines: each arm's median; the first arm's is the widest."
    )
    if others:
        caption += (
            f" Below: the mean gap to {results.baseline}, in % of its loss, with the t-test's 95 % interval, over "
            f"{_PAIRS} or more pairs in which neither run diverged."
        )
    return [picture("learning_rates", caption, 1 + bool(others), len(results.data), draw)]


def _draw_finals(results: Results, panel, data: str) -> None:
    """Each run's final loss, and the line of each arm's medians."""
    for i, arm in enumerate(results.arms):
        medians = {}
        for rate in results.rates:
            runs = results.cell(Cell(data, rate, arm))
            finals = np.array([np.fmin(results.final(run), run.initial) for run in runs])
            fell = np.array([run.divergence is not None for run in runs], bool)
            for which, marker in ((~fell, "o"), (fell, "x")):
                at = np.full(which.sum(), _beside(results, rate, i, len(results.arms)))
                colour = _look(results, arm)["color"]
                panel.plot(at, finals[which], marker, color=colour, alpha=0.4, markersize=3)
            if np.isfinite(finals).any():
                medians[rate] = np.nanmedian(finals)
        if medians:
            panel.plot([*medians], [*medians.values()], **_line(results, arm))
    panel.set_ylabel("final loss (nats)")
    _legend(panel)


def _draw_gaps(results: Results, panel, data: str, arms: list[str]) -> None:
    """Each arm's mean gap to the baseline with its interval, at rates with enough pairs."""
    panel.axhline(0, color="black", linewidth=0.8)
    for i, arm in enumerate(arms):
        for rate in results.rates:
            both = healthy(results.pairs(Cell(data, rate, arm)))
            found = paired(np.array([results.final(other) - results.final(base) for base, other in both]))
            if found.n >= _PAIRS:
                share = 100 / (mean([results.final(base) for base, _ in both]) or math.nan)
                at, colour = _beside(results, rate, i, len(arms)), _look(results, arm)["color"]
                panel.plot([at, at], np.array(t_interval(found)) * share, color=colour, linewidth=1.2)
                panel.plot([at], [found.mean * share], "o", color=colour, markersize=4)
    panel.set_ylabel(_text(f"gap to {results.baseline} (%)"))


def _beside(results: Results, rate: float, place: int, places: int) -> float:
    """The x of arm `place` of `places` around its rate: together they span 0.4 of the closest two rates' distance."""
    closest = min((b / a for a, b in pairwise(results.rates)), default=1.0)
    return rate * closest ** (0.4 * ((place + 0.5) / places - 0.5))


def signals(results: Results, names: list[str]) -> list[Picture]:
    """Each arm's median of each signal over time."""

    def of(name: str) -> Callable:
        def draw(axes) -> None:
            for panel, data, rate in _panels(results, axes):
                for arm in results.arms:
                    steps, median = _median(results.cell(Cell(data, rate, arm)), name, 1)
                    if not len(steps):
                        continue
                    at = _thin(len(steps))
                    panel.plot(steps[at], median[at], **_line(results, arm))
                panel.set(ylabel=_SIGNALS.get(name, name), yscale="log" if name in _NORMS else "linear")
                _legend(panel)

        return draw

    shape = len(results.data), len(results.rates)
    what = "each arm's median over runs, with diverged ones."
    return [picture(f"signal_{name}", f"{_SIGNALS.get(name, name)}: {what}", *shape, of(name)) for name in names]
