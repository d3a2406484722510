"""The colours of every figure: a level has the same colour in all of them.

The colours are Okabe and Ito's ("Color Universal Design", 2008), which colour-blind readers can tell apart. Two of the
spare ones are Paul Tol's ("Colour Schemes", 2021), made for the same purpose.
"""

import re
from collections import Counter
from collections.abc import Iterable

COLOURS = {
    "O0": "#000000",
    "BF16": "#000000",  # stock, like O0
    "O1": "#0072b2",
    "O2": "#009e73",
    "O3": "#d55e00",
    "TE": "#cc79a7",  # Transformer Engine's FP8
    "FP32": "#56b4e9",
}
_SPARE = "#e69f00", "#332288", "#999933"  # no level has these
_LINES = "-", "--", ":", "-."  # for names that share a colour
_LEVELS = {level.lower(): level for level in COLOURS}


def level_in(name: str) -> str | None:
    """The first word of a run's name that is a key of COLOURS, spelled as there; None if there is none."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((_LEVELS[word] for word in words if word in _LEVELS), None)


def looks(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """{name: colour and line style}, the keywords of matplotlib's plot, for the runs or arms of one figure.

    A name that contains a level gets the level's colour. Others get, in turn, the spare colours, then those of levels
    not drawn here. A line style tells apart names that share a colour.
    """
    names = list(dict.fromkeys(names))
    levels = {name: level_in(name) for name in names}
    taken = {COLOURS[level] for level in levels.values() if level}
    free = [colour for colour in dict.fromkeys((*_SPARE, *COLOURS.values())) if colour not in taken]
    found: dict[str, dict[str, str]] = {}
    others, drawn = 0, Counter[str]()
    for name, level in levels.items():
        colour = COLOURS[level] if level else free[others % len(free)]
        others += level is None
        found[name] = {"color": colour, "linestyle": _LINES[drawn[colour] % len(_LINES)]}
        drawn[colour] += 1
    return found
