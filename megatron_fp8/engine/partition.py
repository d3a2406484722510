"""Who owns what: where each weight starts in a bucket's flat buffer of R rows, row j being data-parallel rank j's.

    row 0 | A A A A A A A A |      A weight is one contiguous span of the R * m elements, for its parameter is a view
    row 1 | A A A C C . . . |      of it, and starts at a multiple of 128. A span over the end of a row is cut there.
    row 2 | B B B B D D D . |      m is a multiple of 2,048. What no weight covers (.) is a gap: padding.

Every rank holds the whole buffer's weights and gradients, R * m elements, and the states of its own row, so both want a
small m. F is the fair share: the smallest multiple of 2,048 that is at least sum(sizes) / R, and m >= F.

even: back to back. m = F < sum(sizes) / R + 2,048: the fullest rank is within 2,048 elements of the mean, in a
bucket. The gap, less than R * 2,048, is at the end.

greedy, FP8-LM's: whole weights, largest first, each to the rank with the least so far. Where nothing has to be cut,

    m <= (4/3 - 1/(3 R)) * the best that any placement of whole weights reaches        (and then up to 2,048's multiple)

The paper stops there, so m is at least the largest weight. With more ranks than weights that is far above the share:
7B at DP 256 has a share of 1.5 * 4096^2 and weights of 4 * 4096^2; R * m is 17.2 G elements for 6.4 G. So here a weight
that is larger than a row is cut: such weights lie back to back over the first rows, and the rest is greedy over what
is left, the last of these rows included. m is found by bisection: the packing fits there, and not in rows of 2,048
less. It is never above the paper's m, from which on nothing is cut, and

    m <= 2 F

Proof, that m = 2 F fits, with cut weights of B elements in all: fewer than R - B/F weights are larger than F and not
cut, and at least that many rows are empty, so each has its own; a weight of at most F then goes to the row with the
least, which is below the mean, and that is at most F. Near 2 are R + 1 equal weights on R ranks, which whole weights
cannot avoid: even can. 7B at DP 256 comes to m = 1.046 F.

Whole weights need one bucket for a model chunk (few weights balance badly), so greedy gives up what buckets are for:
with it nothing is sent before the chunk's last gradient is there. even has one bucket for each of Megatron's.

Sources: FP8-LM (arXiv 2310.18313) section 2.3; the bound of largest-first: R. L. Graham, Bounds on multiprocessing
timing anomalies, 1969.
"""

import heapq
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from ..numerics.blocks import BLOCK, SHARD_UNIT


@dataclass(frozen=True)
class Placement:
    """Where each weight of a bucket lies. All in elements of the flat buffer, `ranks` * `row` of them.

    Attributes:
        row: m, of one rank; a multiple of 2,048.
        starts: of each weight, in the order of `sizes`; multiples of 128.
        sizes: of the weights.
        ranks: R, how many rows.
    """

    row: int
    starts: list[int]
    sizes: list[int]
    ranks: int

    @property
    def numel(self) -> int:
        """Of the flat buffer."""
        return self.ranks * self.row

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(start, stop) of each weight."""
        return [(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True)]

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """(start, stop) of what no weight covers, in order."""
        edges = [0, *(edge for span in sorted(self.spans) for edge in span), self.numel]
        return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]

    def owned(self, rank: int) -> list[tuple[int, int, int]]:
        """The pieces of row `rank`, in order: (index of the weight, start, stop), in the flat buffer."""
        first, last = rank * self.row, (rank + 1) * self.row
        pieces = ((i, max(start, first), min(stop, last)) for i, (start, stop) in enumerate(self.spans))
        return sorted((piece for piece in pieces if piece[1] < piece[2]), key=lambda piece: piece[1])


def place(sizes: list[int], ranks: int, how: str) -> Placement:
    """Place weights of `sizes` elements, positive multiples of 128, on `ranks` rows, "even" or "greedy"."""
    assert sizes and all(size > 0 and size % BLOCK == 0 for size in sizes) and how in ("even", "greedy")
    fair = -(-sum(sizes) // (ranks * SHARD_UNIT)) * SHARD_UNIT
    if how == "even":
        return Placement(fair, [0, *accumulate(sizes[:-1])], sizes, ranks)
    rows = range(fair, 2 * fair + 1, SHARD_UNIT)
    row = rows[bisect_left(rows, True, key=lambda row: _pack(sizes, ranks, row) is not None)]
    starts = _pack(sizes, ranks, row)
    assert starts is not None  # twice the fair row holds any
    return Placement(row, starts, sizes, ranks)


def _pack(sizes: list[int], ranks: int, row: int) -> list[int] | None:
    """Greedy starts in rows of `row` elements, at least the fair share; None if one of the rows would overflow."""
    starts = [0] * len(sizes)
    largest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    filled = 0
    while largest_first and sizes[largest_first[0]] > row:
        i = largest_first.pop(0)
        starts[i], filled = filled, filled + sizes[i]
    loads = [(max(filled - rank * row, 0), rank) for rank in range(filled // row, ranks)]
    heapq.heapify(loads)
    for i in largest_first:
        if not loads or loads[0][0] + sizes[i] > row:
            return None
        load, rank = loads[0]
        starts[i] = rank * row + load
        heapq.heapreplace(loads, (load + sizes[i], rank))
    return starts
