"""Where weights are placed: properties of any placement, balance, and greedy against other ways to its result."""

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.engine.partition import Placement, cut, place
from megatron_fp8.numerics.blocks import BLOCK, SHARD_UNIT

HOWS = ("even", "greedy")
small = st.integers(1, 40).map(BLOCK.__mul__)
large = st.integers(1, 5_000).map(BLOCK.__mul__)
alike = st.sampled_from([BLOCK, 3 * BLOCK, SHARD_UNIT, 3 * SHARD_UNIT, 64 * SHARD_UNIT])
weights = st.lists(small | large | alike, min_size=1, max_size=40)


def rounded(elements) -> int:
    """Up to what a row is a multiple of."""
    return -(-elements // SHARD_UNIT) * SHARD_UNIT


def largest_first(sizes: list[int], ranks: int) -> list[int]:
    """Graham's largest-first, as written down: what each rank has, nothing cut."""
    loads = [0] * ranks
    for size in sorted(sizes, reverse=True):
        loads[loads.index(min(loads))] += size
    return loads


@pytest.mark.parametrize("how", HOWS)
@given(units=st.lists(st.lists(small | alike, min_size=1, max_size=9), min_size=1), ranks=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_banks_are_placed_whole(how, units, ranks):
    """A unit's weights lie back to back where the unit was placed, and every element still has one place."""
    whole = place([sum(unit) for unit in units], ranks, how)
    placed = whole.cut_into(units)
    assert placed.sizes == [size for unit in units for size in unit] and placed.row == whole.row
    spans = iter(placed.spans)
    for (start, stop), unit in zip(whole.spans, units, strict=True):
        mine = [next(spans) for _ in unit]
        assert mine[0][0] == start and mine[-1][1] == stop
        assert all(one[1] == other[0] for one, other in itertools.pairwise(mine))
    assert placed.gaps == whole.gaps
    assert placed.cut_into([[size] for size in placed.sizes]) == placed


def best(sizes: list[int], ranks: int) -> int:
    """The smallest maximum of all ways to deal out whole weights."""
    ways = itertools.product(range(ranks), repeat=len(sizes))
    return min(
        max(sum(s for s, r in zip(sizes, way, strict=True) if r == rank) for rank in range(ranks)) for way in ways
    )


def owners(placed: Placement) -> list[int]:
    """How many elements each rank owns."""
    return [sum(stop - start for _, start, stop in placed.owned(rank)) for rank in range(placed.ranks)]


@pytest.mark.parametrize("how", HOWS)
@given(sizes=weights, ranks=st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_every_element_has_one_place_and_one_owner(how, sizes, ranks):
    placed = place(sizes, ranks, how)
    assert placed.sizes == sizes and placed.ranks == ranks and len(placed.starts) == len(sizes)
    assert placed.row % SHARD_UNIT == 0 and placed.numel == ranks * placed.row
    assert all(start % BLOCK == 0 and start >= 0 for start in placed.starts)
    assert placed.spans == [(start, start + size) for start, size in zip(placed.starts, sizes, strict=True)]

    covered = sorted(placed.spans + placed.gaps)  # weights and gaps tile the buffer
    assert covered[0][0] == 0 and covered[-1][1] == placed.numel
    assert all(one[1] == next_[0] for one, next_ in itertools.pairwise(covered))
    assert all(start < stop for start, stop in placed.gaps) and placed.gaps == sorted(placed.gaps)

    rows = [placed.owned(rank) for rank in range(ranks)]
    for rank, row in enumerate(rows):
        assert all(rank * placed.row <= start < stop <= (rank + 1) * placed.row for _, start, stop in row)
        assert row == sorted(row, key=lambda piece: piece[1])
    for i, span in enumerate(placed.spans):  # the pieces of a weight, rank after rank, are the weight
        pieces = [(start, stop) for row in rows for index, start, stop in row if index == i]
        assert (pieces[0][0], pieces[-1][1]) == span
        assert all(one[1] == next_[0] for one, next_ in itertools.pairwise(pieces))


@given(sizes=weights, ranks=st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_even_is_as_small_as_it_can_be(sizes, ranks):
    placed = place(sizes, ranks, "even")
    assert 0 <= placed.row - Fraction(sum(sizes), ranks) < SHARD_UNIT
    assert placed.starts == [sum(sizes[:i]) for i in range(len(sizes))]
    assert len(placed.gaps) <= 1 and placed.numel - sum(sizes) < ranks * SHARD_UNIT


@given(sizes=weights, ranks=st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_greedy_is_largest_first_and_cuts_only_what_is_larger_than_a_row(sizes, ranks):
    placed = place(sizes, ranks, "greedy")
    fair = place(sizes, ranks, "even").row
    assert fair <= placed.row <= 2 * fair
    if max(sizes) <= fair:  # nothing may be cut: the very loads of the rule
        loads = largest_first(sizes, ranks)
        assert placed.row == rounded(max(loads))
        assert sorted(owners(placed)) == sorted(loads)
    for size, (start, stop) in zip(sizes, placed.spans, strict=True):
        if size <= placed.row:
            assert start // placed.row == (stop - 1) // placed.row  # whole


@given(sizes=st.lists(st.integers(1, 60).map(SHARD_UNIT.__mul__), min_size=1, max_size=7), ranks=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_greedy_is_within_grahams_bound_of_the_best(sizes, ranks):
    placed = place(sizes, ranks, "greedy")
    optimum = best(sizes, ranks)
    assert placed.row <= optimum * (Fraction(4, 3) - Fraction(1, 3 * ranks)) or placed.row == rounded(optimum)
    if max(sizes) <= placed.row:  # whole weights cannot do better than the best of them
        assert placed.row >= optimum


def test_grahams_bound_is_reached():
    """The worst case of largest-first: 2R - 1, 2R - 1, ..., R + 1, R + 1 and three of R."""
    for ranks in (2, 3, 5):
        sizes = [2 * size * SHARD_UNIT for size in range(ranks + 1, 2 * ranks)] * 2 + 3 * [2 * ranks * SHARD_UNIT]
        assert place(sizes, ranks, "greedy").row == (4 * ranks - 1) * 2 * SHARD_UNIT
        assert 3 * ranks * 2 * SHARD_UNIT == place(sizes, ranks, "even").row  # which whole weights reach too


@given(
    sizes=st.lists(st.integers(1, 400).map(BLOCK.__mul__), min_size=1, max_size=12),
    ranks=st.integers(2, 40),
)
@settings(max_examples=60, deadline=None)
def test_greedy_is_never_above_the_papers_rule_nor_twice_the_mean(sizes, ranks):
    """More ranks than weights: where the paper's rule has the largest weight as everybody's row."""
    placed = place(sizes, ranks, "greedy")
    assert placed.row <= rounded(max(largest_first(sizes, ranks)))
    assert placed.row < 2 * (Fraction(sum(sizes), ranks) + SHARD_UNIT)


@pytest.mark.parametrize("how", HOWS)
def test_a_weight_larger_than_a_share_is_cut_and_others_follow_it(how):
    unit = SHARD_UNIT
    placed = place([unit, 5 * unit, unit, unit], 4, how)
    assert placed.row == 2 * unit and placed.gaps == []
    if how == "greedy":
        assert placed.starts == [6 * unit, 0, 5 * unit, 7 * unit]
        assert placed.owned(2) == [(1, 4 * unit, 5 * unit), (2, 5 * unit, 6 * unit)]


@pytest.mark.parametrize("ranks", [1, 2, 9])
@pytest.mark.parametrize("how", HOWS)
def test_one_weight(how, ranks):
    assert place([BLOCK], ranks, how) == Placement(SHARD_UNIT, [0], [BLOCK], ranks)
    size = 9 * SHARD_UNIT
    assert place([size], ranks, how).row == rounded(-(-size // ranks))


def test_one_weight_more_than_ranks_is_what_whole_weights_cannot_share():
    """The lesson's worst case: R + 1 equal weights."""
    for ranks in (2, 4, 9):
        sizes = [ranks * SHARD_UNIT] * (ranks + 1)
        assert place(sizes, ranks, "greedy").row == 2 * ranks * SHARD_UNIT
        assert place(sizes, ranks, "even").row == (ranks + 1) * SHARD_UNIT


def test_greedy_finds_the_smallest_row_for_7b_at_256():
    """32 layers of 4, 4, 1 and 3 times 4096^2 on 256 ranks, a fair share of 1.5: fc1, fc2 and qkv are cut, 352 in all.

    In rows of m they end in the row after 352 // m; the 32 proj of 1, two of which do not fit a row, need 32 rows, of
    which that one can be one: 352 <= 225 m and 352 - 224 m <= m - 1, that is m >= 353 / 225.
    """
    square = 4096**2
    placed = place([4 * square, 4 * square, square, 3 * square] * 32, 256, "greedy")
    assert placed.row == rounded(Fraction(353 * square, 225))


def test_buckets_are_the_shortest_runs_of_the_size():
    draw = random.Random(1)
    for _ in range(300):
        sizes = [draw.randint(1, 40) * BLOCK for _ in range(draw.randint(0, 12))]
        size = draw.choice([0, 1, 256, 5000, 10_000, 10**6])
        runs = [sizes[run] for run in cut(sizes, size, "even")]
        assert [w for run in runs for w in run] == sizes and all(runs)
        assert all(sum(run) >= size for run in runs[:-1])
        assert all(sum(run[:-1]) < size or len(run) == 1 for run in runs)
        assert [sizes[run] for run in cut(sizes, size, "greedy")] == [sizes] * bool(sizes)
