"""The suite's page: verdicts of all recipes first, then a picture and a table a stress."""

from collections.abc import Sequence

from ..lab.report.document import Section, Table, between, counted, number
from .suite import JUDGED, Point, Stress, Verdict, verdicts, worst

_WORDS = (
    "An arm is as good as its worst case. Fragile: the 95 % interval of the mean over seeds is above the limit, or "
    "each of three seeds or more is. Robust: the interval and every seed are below it. Open: neither, more seeds would "
    "tell. Above, below: of one seed. Empty: not measured."
)


def sections(suite: Sequence[Stress], points: Sequence[Point]) -> list[Section]:
    """The page's content, of what has been measured."""
    of = {stress: [point for point in points if point.stress == stress.name] for stress in suite}
    measured = [stress for stress in suite if of[stress]]
    judged = {stress: verdicts(stress, of[stress]) for stress in measured}
    arms = list(dict.fromkeys(verdict.arm for stress in measured for verdict in judged[stress]))
    rows = [[arm, *(_word(judged[stress], arm) for stress in measured)] for arm in arms]
    heads = ["recipe", *(f"{stress.name} {stress.title.lower()}" for stress in measured)]
    summary = Section("Verdicts", [_WORDS, Table(heads, rows, len(heads)), _where(points)])
    return [summary, *(_section(stress, of[stress], judged[stress]) for stress in measured)]


def _word(found: Sequence[Verdict], arm: str) -> str:
    case = worst(verdict for verdict in found if verdict.arm == arm)
    return case.word if case else ""


def _where(points: Sequence[Point]) -> str:
    devices, commits = (sorted({getattr(point, name) for point in points}) for name in ("device", "commit"))
    return f"Measured on {', '.join(devices)}; {', '.join(commits)}."


def _section(stress: Stress, points: list[Point], found: list[Verdict]) -> Section:
    seeds = len({point.seed for point in points if point.found.quantity == JUDGED})
    rows = [
        [v.arm, v.case, str(v.n), number(v.mean, ".3g"), between(v.interval, ".3g"), _limit(stress, v), v.word]
        for v in found
    ]
    heads = ["recipe", "case", "seeds", f"judged, {stress.unit}", "95 % interval", "limit", "verdict"]
    return Section(
        f"{stress.name}: {stress.title}",
        [f"{stress.plant} {counted(seeds, 'seed')}.", stress.draw(points), *stress.more(points), Table(heads, rows, 2)],
    )


def _limit(stress: Stress, verdict: Verdict) -> str:
    limit = stress.limits.get(verdict.case)
    return "-" if limit is None else f"{limit:g}"


def lines(suite: Sequence[Stress], points: Sequence[Point]) -> list[str]:
    """The verdicts for a terminal: a line a stress, arms by word."""
    found = []
    for stress in suite:
        of: dict[str, list[str]] = {}
        every = verdicts(stress, points)
        for arm in dict.fromkeys(verdict.arm for verdict in every):
            of.setdefault(_word(every, arm), []).append(arm)
        words = "; ".join(f"{word}: {', '.join(arms)}" for word, arms in of.items() if word)
        if words:
            found.append(f"{stress.name} {stress.title}: {words}")
    return found


