"""Partition: where each weight starts in a bucket's flat buffer of R rows. Data-parallel rank j owns row j.

    row 0 | A A A A A A A A |      A weight is one contiguous span of the R * m elements, because its parameter is a
    row 1 | A A A C C . . . |      view of it. It starts at a multiple of 128. A span over a row's end is cut there.
    row 2 | B B B B D D D . |      m is a multiple of 2,048. Elements that no weight covers (.) are gaps: padding.

Every rank holds the whole buffer's weights and gradients, R * m elements, and the states of its own row. So a small m
is good for both. F is the fair share: the smallest multiple of 2,048 that is at least sum(sizes) / R, and m >= F.

even: back to back. m = F < sum(sizes) / R + 2,048: in a bucket the fullest rank is within 2,048 elements of the mean.
The gap, less than R * 2,048, is at the end.

greedy (--fp8-partition greedy, FP8-LM's) is another way, in greedy.py. A way says where weights start, and whether a
model chunk's weights must all be one bucket. No other code asks which way it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from ..numerics.blocks import BLOCK, SHARD_UNIT
from . import greedy


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

    def cut_into(self, parts: list[list[int]]) -> "Placement":
        """The same, each weight being several of the given sizes, back to back."""
        starts = [start + before for start, sizes in zip(self.starts, parts, strict=True)
                  for before in accumulate(sizes[:-1], initial=0)]  # fmt: skip
        return Placement(self.row, starts, [size for sizes in parts for size in sizes], self.ranks)

    def owned(self, rank: int) -> list[tuple[int, int, int]]:
        """The pieces of row `rank`, in order: (index of the weight, start, stop), in the flat buffer."""
        first, last = rank * self.row, (rank + 1) * self.row
        pieces = ((i, max(start, first), min(stop, last)) for i, (start, stop) in enumerate(self.spans))
        return sorted((piece for piece in pieces if piece[1] < piece[2]), key=lambda piece: piece[1])


@dataclass(frozen=True)
class _Way:
    """row_and_starts(sizes, ranks, fair share) -> (m, where each weight starts); one_bucket: for a whole chunk."""

    row_and_starts: Callable[[list[int], int, int], tuple[int, list[int]]]
    one_bucket: bool


def _back_to_back(sizes: list[int], ranks: int, fair: int) -> tuple[int, list[int]]:
    return fair, [0, *accumulate(sizes[:-1])]


_WAYS = {"even": _Way(_back_to_back, one_bucket=False), "greedy": _Way(greedy.row_and_starts, one_bucket=True)}


def place(sizes: list[int], ranks: int, how: str) -> Placement:
    """Place weights of `sizes` elements, positive multiples of 128, on `ranks` rows, "even" or "greedy"."""
    assert sizes and all(size > 0 and size % BLOCK == 0 for size in sizes)
    fair = -(-sum(sizes) // (ranks * SHARD_UNIT)) * SHARD_UNIT
    row, starts = _WAYS[how].row_and_starts(sizes, ranks, fair)
    return Placement(row, starts, sizes, ranks)


def cut(sizes: list[int], at_least: int, how: str) -> list[slice]:
    """The buckets of weights of `sizes` elements: runs of at least that many elements, as Megatron cuts its own."""
    if _WAYS[how].one_bucket:
        return [slice(0, len(sizes))] if sizes else []
    runs: list[slice] = []
    first = filled = 0
    for i, size in enumerate(sizes):
        if filled >= at_least and first < i:
            runs.append(slice(first, i))
            first, filled = i, 0
        filled += size
    return [*runs, slice(first, len(sizes))] if sizes else []


def bucket_size(asked: int | None, count: int | None, numel: int, ranks: int) -> int:
    """Elements: Megatron's rule, but also without --overlap-grad-reduce: a bucket bounds what is in flight.

    asked, count: --ddp-bucket-size and --ddp-num-buckets, or None; numel: of the chunk; ranks: of data parallelism.
    """
    if count is not None:
        return numel // count
    return asked or max(40_000_000, 1_000_000 * ranks)
