"""A report's section on which arm's runs diverge first. This is a finer question than whether they diverge.

If most runs of two arms diverge, or few do, their rates hardly differ. But in a pair (one seed, learning rate and data
set) one run may still diverge ("fall") earlier: at a smaller step, or at all if the other does not. If the arms are
alike, either is as likely; the sign test of the pairs that are not tied gives p.

With several learning rates the pairs of one seed are not independent: a seed that falls early at one rate also does so
at the next. So each seed has one vote: + if the arm fell earlier than the baseline at more rates than later. The sign
test is of these votes.
"""

from typing import NamedTuple

from .document import Section, Table, p_value
from .results import Cell, Result, Results
from .statistics import mcnemar


class Order(NamedTuple):
    """Numbers of pairs, or of seeds, that fell earlier than the baseline, later, or neither; p of the sign test."""

    earlier: int
    later: int
    tied: int

    @property
    def p(self) -> float:
        """Two-sided; 1 if all are tied."""
        return mcnemar(self.earlier, self.later)


def _counted(signs: list[int]) -> Order:
    return Order(sum(s > 0 for s in signs), sum(s < 0 for s in signs), sum(s == 0 for s in signs))


def _earlier(pair: tuple[Result, Result]) -> int:
    """1 if the arm's run fell earlier than the baseline's; -1 if later; 0 if at the same step, or if neither fell."""
    base, run = pair
    return (run.onset < base.onset) - (run.onset > base.onset)


def by_cell(results: Results) -> dict[Cell, Order]:
    """{cell: Order of its pairs} for every cell with pairs, without the baseline's."""
    cells = [cell for cell, _ in results.cells() if cell.arm != results.baseline]
    return {cell: _counted(list(map(_earlier, pairs))) for cell in cells if (pairs := results.pairs(cell))}


def by_seed(results: Results) -> dict[tuple[str, str], Order]:
    """{(data set, arm): Order of the seeds' votes over all learning rates}."""
    votes: dict[tuple[str, str], dict[int, int]] = {}
    for cell in by_cell(results):
        of = votes.setdefault((cell.data, cell.arm), {})
        for pair in results.pairs(cell):
            seed = pair[0].row.seed
            of[seed] = of.get(seed, 0) + _earlier(pair)
    return {key: _counted(list(of.values())) for key, of in votes.items()}


def onsets(results: Results) -> Section:
    """The section with both orders."""
    section = Section("Which falls first")
    orders = by_cell(results)
    if not any(order.earlier or order.later for order in orders.values()):
        section.blocks.append("In no pair did one run diverge before the other.")
        return section
    rows = [[*results.named(cell), *_cells("pairs", order)] for cell, order in orders.items()]
    if len(results.rates) > 1:
        for (data, arm), order in by_seed(results).items():
            rows.append([*([data] if len(results.data) > 1 else []), "all", arm, *_cells("seeds", order)])
    section.blocks += [
        f"Earlier: pairs in which the arm's run diverged at an earlier step than {results.baseline}'s, or in which "
        "only the arm's diverged. Later: the opposite. Tied: neither. Over all learning rates each seed has one vote, "
        "because its pairs are not independent: it counts as earlier if the arm fell earlier at more rates than later. "
        "p: sign test of those not tied.",
        Table([*results.labels(), "of", "earlier", "later", "tied", "sign p"], rows, len(results.labels()) + 1),
    ]
    return section


def _cells(of: str, order: Order) -> list[str]:
    return [of, str(order.earlier), str(order.later), str(order.tied), p_value(order.p)]
