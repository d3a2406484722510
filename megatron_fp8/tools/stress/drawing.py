"""A stress's picture: a curve an arm over the plant's dial, a panel a case; the mean over seeds, and their range."""

import math
from collections.abc import Sequence

from ..lab.report.document import Picture
from ..palette import looks
from .suite import Point

_PANEL = 4.2, 3.4  # inches


def curves(
    name: str, points: Sequence[Point], quantity: str, cases: Sequence[str], x: str, y: str, caption: str, *,
    log_x: bool = False, log_y: bool = False, limit: float | None = None, linear_below: float | None = None,
) -> Picture:  # fmt: skip
    """Panels side by side, one for each case that has numbers.

    A curve is broken if a seed's value there is not finite. limit: a line that a robust arm stays below.
    linear_below: y is logarithmic of either sign, and linear around 0.
    """
    from ..lab.report.plots import picture  # scipy: to measure needs none

    found = [point.found for point in points if point.found.quantity == quantity]
    shown = [case for case in cases if any(one.case == case for one in found)]
    arms = list(dict.fromkeys(one.arm for one in found))
    look = looks(arms)

    def draw(axes) -> None:
        for panel, case in zip(axes[0], shown, strict=True):
            for place, arm in enumerate(arms):
                at: dict[float, list[float]] = {}
                for one in found:
                    if (one.arm, one.case) == (arm, case):
                        at.setdefault(one.at, []).append(one.value)
                if not at:
                    continue
                places = sorted(at)
                whole = [all(map(math.isfinite, at[p])) for p in places]  # the mean of the rest would look better
                means = [sum(at[p]) / len(at[p]) if all_ else math.nan for p, all_ in zip(places, whole, strict=True)]
                # The first arm's line is the widest, so that one on top of it does not hide it.
                width = 1.2 + 2 * (len(arms) - 1 - place) / len(arms)
                panel.plot(places, means, **look[arm], label=arm, linewidth=width, marker="o", markersize=3)
                low, high = ([end(at[p]) for p in places] for end in (min, max))
                panel.fill_between(places, low, high, where=whole, color=look[arm]["color"], alpha=0.15, linewidth=0)
            if limit is not None:
                panel.axhline(limit, color="grey", linewidth=0.8, linestyle=":")
            if log_x:
                panel.set_xscale("log", base=10 if min(one.at for one in found) < 1 else 2)
            if log_y:
                panel.set_yscale("log")
            elif linear_below is not None:
                panel.set_yscale("symlog", linthresh=linear_below)
            panel.set(title=case, xlabel=x)
        axes[0][0].set_ylabel(y)
        axes[0][-1].legend(fontsize=7)

    return picture(name, caption, 1, max(1, len(shown)), draw, panel=_PANEL)


def bars(name: str, points: Sequence[Point], quantity: str, y: str, caption: str, limits: dict[str, float]) -> Picture:
    """A panel a case: each arm's values over seeds as dots on its mean, with the case's limit as a line.

    A value that is not finite is a cross at the top, and the arm has no mean then.
    """
    from ..lab.report.plots import picture

    found = [point.found for point in points if point.found.quantity == quantity]
    cases = list(dict.fromkeys(one.case for one in found))
    arms = list(dict.fromkeys(one.arm for one in found))
    look = looks(arms)

    def draw(axes) -> None:
        for panel, case in zip(axes[0], cases, strict=True):
            for place, arm in enumerate(arms):
                values = [one.value for one in found if (one.arm, one.case) == (arm, case)]
                colour, shown = look[arm]["color"], [value for value in values if math.isfinite(value)]
                panel.plot([place] * len(shown), shown, "o", color=colour, markersize=4, alpha=0.6)
                if len(shown) < len(values):
                    panel.plot([place], [1], "x", color=colour, transform=panel.get_xaxis_transform(), clip_on=False)
                elif values:
                    panel.plot([place - 0.3, place + 0.3], [sum(values) / len(values)] * 2, color=colour)
            if case in limits:
                panel.axhline(limits[case], color="grey", linewidth=0.8, linestyle=":")
            panel.set_xticks(range(len(arms)), arms, rotation=60, ha="right", fontsize=7)
            panel.set_title(case)
        axes[0][0].set_ylabel(y)

    return picture(name, caption, 1, max(1, len(cases)), draw, panel=(1.2 + 0.42 * len(arms), 3.6))
