"""FP8-LM's partition (--fp8-partition greedy): whole weights, largest first, each to the rank with the least so far.

R, m and F are those of partition.py. If nothing has to be cut,

    m <= (4/3 - 1/(3 R)) * the best that any placement of whole weights reaches        (and then up to 2,048's multiple)

The paper stops there, so its m is at least the largest weight. With more ranks than weights that is far above the
share: 7B at DP 256 has a share of 1.5 * 4096^2 and weights of 4 * 4096^2; R * m is 17.2 G elements for 6.4 G. So here a
weight that is larger than a row is cut. Such weights lie back to back over the first rows. The others are placed
greedily in the room that is left, which includes the rest of the last of these rows. m is found by bisection: the
packing fits in rows of m, and not in rows of 2,048 less. m is never above the paper's, because in rows as large as the
paper's nothing is cut, and

    m <= 2 F

Proof that m = 2 F fits. Let the cut weights have B elements in all. Fewer than R - B/F weights are larger than F and
not cut, and at least that many rows are empty, so each gets its own row. A weight of at most F then goes to the row
with the smallest load, which is below the mean, and the mean is at most F. R + 1 equal weights on R ranks come near 2
F; whole weights cannot avoid that, and `even` does. 7B at DP 256 comes to m = 1.046 F.

Whole weights need one bucket for a model chunk, because few weights balance badly. So greedy loses the use of buckets:
nothing is sent before the chunk's last gradient is there. even has one bucket for each of Megatron's.

Sources: FP8-LM (arXiv 2310.18313) section 2.3; the bound of largest-first: R. L. Graham, Bounds on multiprocessing
timing anomalies, 1969.
"""

import heapq
from bisect import bisect_left

from ..numerics.blocks import SHARD_UNIT


def row_and_starts(sizes: list[int], ranks: int, fair: int) -> tuple[int, list[int]]:
    """(m, where each weight starts) for weights of `sizes` elements on `ranks` rows; fair: F."""
    rows = range(fair, 2 * fair + 1, SHARD_UNIT)
    row = rows[bisect_left(rows, True, key=lambda row: _pack(sizes, ranks, row) is not None)]
    starts = _pack(sizes, ranks, row)
    assert starts is not None  # twice the fair row holds any
    return row, starts


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
