"""The figures of `compare --figure` and `table --figure`. A level has the same colour in both (tools/palette.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..palette import looks
from .output import save

_HOLLOW: Any = {"linewidth": 1.2, "fill": False, "linestyle": "--"}  # the model's bars


@dataclass(frozen=True)
class Bar:
    """Two values of one case: the known one (published or measured), and the model's. system: chooses the colour.

    ends: the least and the most measured, if there are several measurements.
    """

    name: str
    system: str
    known: float | None
    model: float | None
    ends: tuple[float, float] | None = None


def curves(path: str, losses: Mapping[str, Mapping[int, float]], gaps: Mapping[str, Mapping[int, float]]) -> None:
    """Save the losses, {run: {step: loss}}, and below them their gaps, {run: {step: loss minus the first run's}}."""
    from matplotlib.figure import Figure

    look, (first, *_) = looks(losses), losses
    figure = Figure(figsize=(7, 6 if gaps else 3.5), layout="constrained")
    above, *below = figure.subplots(1 + bool(gaps), sharex=True, squeeze=False)[:, 0]
    for name, steps in losses.items():
        above.plot(*zip(*steps.items(), strict=True), **look[name], label=name, linewidth=1)
    above.set(title="Training loss", ylabel="loss (nats)")
    above.legend(fontsize=8)
    for panel in below:
        panel.axhline(0, **look[first], linewidth=1)
        for name, steps in gaps.items():
            panel.plot(list(steps), list(steps.values()), **look[name], linewidth=1)
        panel.set(title=f"Training loss less that of {first}", ylabel="difference (nats)")
    for panel in (above, *below):
        panel.grid(alpha=0.3)
    (below or [above])[-1].set_xlabel("step")
    save(figure, path)


def bars(path: str, panels: Mapping[str, Sequence[Bar]], known: str, label: str) -> None:
    """Save panels of horizontal bars, {title: bars}. known: the legend's name for the known values."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [max(1, len(shown)) for shown in panels.values()]
    figure = Figure(figsize=(7, 0.9 * len(panels) + 0.42 * sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    look = looks(dict.fromkeys(bar.system for shown in panels.values() for bar in shown))
    for axes, (title, shown) in zip(all_axes, panels.items(), strict=True):
        for i, bar in enumerate(shown):
            colour = look[bar.system]["color"]
            if bar.known is not None:
                axes.barh(i, bar.known, height=0.4, align="edge", color=colour)
            if bar.model is not None:
                axes.barh(i + 0.4, bar.model, height=0.4, align="edge", edgecolor=colour, **_HOLLOW)
            if bar.ends is not None:
                axes.plot(bar.ends, [i + 0.2, i + 0.2], color="gray", marker="|", linewidth=1.5)
        axes.set_yticks([i + 0.4 for i in range(len(shown))], [bar.name for bar in shown], fontsize=8)
        axes.margins(y=0.01)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10)
    all_axes[-1].set_xlabel(label)
    marks = [Patch(color="gray", label=known), Patch(edgecolor="gray", label="model", **_HOLLOW)]
    figure.legend(handles=marks, loc="outside lower center", ncols=2, fontsize=8)
    save(figure, path)
