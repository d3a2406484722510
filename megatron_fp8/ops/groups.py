"""Groups: the rows of several experts in one matrix, and the tables by which kernels find them.

    given    (R, K)    sorted by expert, as a dispatcher hands them over
    padded   (R', K)   each expert's rows, then rows of zeros up to a multiple of 128; R' <= R + 127 E

                        tile     0       1       2       3       4      5
    first[e]  = 0 2 2 5          |  expert 0     |       expert 2       | rows that no expert has
    expert[m] = 0 0 2 2 2 2      |  a a a . |          b b b b b .      |

So a tile of 128 rows belongs to one expert, and an expert without a row has no tile. R' is a bound that needs the sum
of the counts only, which is R: the tables are made on the device of the counts, and the host waits for nothing. What
lies in rows beyond first[E] is undefined, and is read by no GEMM.

If only the device knows that sum too (layers/gathered_dispatch.py), R' is a bound for all that could come
(`groups_of_chosen`). A row that is given then has the number t E + e, of its token t and expert e, and most numbers
have no row.

Padding to the tile is DeepGEMM's "contiguous layout" (github.com/deepseek-ai/DeepGEMM).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

TILE = 128


@dataclass(frozen=True, eq=False)
class Groups:
    """See the top of the file. All tensors are on one device.

    Attributes:
        counts: (E,) int32, each expert's rows.
        first: (E + 1,) int32, the tile that each expert's rows begin with, and the number of all tiles.
        expert: (R' / 128,) int32, each tile's expert; beyond the last tile any.
        source: (R',) int32, the given row that each row is, or -1 for padding.
        place: (R,) int64, where each given row lies; None if the host does not know R.
        known: the counts, if the host has them.
        table: (T, k) int32, where each of T tokens' k rows lie, if results are to be added up (reference_combine.py).
    """

    counts: torch.Tensor
    first: torch.Tensor
    expert: torch.Tensor
    source: torch.Tensor
    place: torch.Tensor | None
    known: tuple[int, ...] | None
    table: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """R'."""
        return self.source.numel()

    @property
    def bound(self) -> bool:
        """Whether R' is a bound for all rows that could have come, and the host does not know how many have."""
        return self.place is None

    def reading(self, source: torch.Tensor, tokens: int | None = None) -> "Groups":
        """The same groups, of rows that are given as x[source] of some x; source (R,).

        tokens: the number of x's rows, if each is given as often as all others: then `table` is made, with a token's
        rows in the order in which they are given.

        x must not have R' rows, which would be read as padded; no x of R or fewer rows has, with two experts or more.
        """
        assert self.place is not None
        source = source.int()
        read, table = torch.full_like(self.source, -1), None
        read[self.place] = source
        if tokens is not None:
            table = self.place[source.argsort(stable=True)].view(tokens, -1).int()
        return replace(self, source=read, table=table)

    @functools.cached_property
    def parts(self) -> list[slice]:
        """Each expert's own rows. Waits for the device, if the host does not know the counts."""
        found, begin = [], 0
        for count in self.counts.tolist() if self.known is None else self.known:
            found.append(slice(begin, begin + count))
            begin += -(-count // TILE) * TILE
        return found


def groups_of(counts: torch.Tensor, rows: int, device: torch.device) -> Groups:
    """The Groups of experts with these counts (E,), integers, which sum to `rows` > 0."""
    known = tuple(counts.tolist()) if counts.device.type == "cpu" else None
    counts = counts.to(device, torch.int64, non_blocking=True)
    experts = counts.numel()
    ends = ((counts + (TILE - 1)) // TILE).cumsum(0)
    first = torch.cat([ends.new_zeros(1), ends])
    tiles = torch.arange((rows + (TILE - 1) * experts) // TILE, device=device)
    expert = torch.searchsorted(ends, tiles, right=True).clamp_(max=experts - 1)
    row, last = torch.arange(rows, device=device), counts.cumsum(0)
    place = row + (first[:-1] * TILE - (last - counts))[torch.searchsorted(last, row, right=True)]
    source = torch.full((tiles.numel() * TILE,), -1, dtype=torch.int32, device=device)
    source[place] = row.int()
    return Groups(counts.int(), first.int(), expert.int(), source, place, known)


def groups_of_chosen(chosen: torch.Tensor, most: int) -> tuple[Groups, Groups]:
    """The Groups of the rows that some of T tokens have with some of E experts: as probabilities (T, E) are given, and
    as rows of x (T, K), with a `table` for their sums. The host waits for nothing.

    chosen: (T, E) bool, of which no token has more than `most`. A token's rows are added up in the order of experts.
    """
    (tokens, experts), device = chosen.shape, chosen.device
    most = min(most, experts)
    tiles = (tokens * most + (TILE - 1) * experts) // TILE
    tiles += tiles * TILE == tokens  # else x would be read as padded
    nowhere = tiles * TILE
    by_expert = chosen.t().contiguous()
    number = by_expert.view(-1).cumsum(0).view(experts, tokens)  # of each row, from 1
    last = number[:, -1]
    counts = last.diff(prepend=last.new_zeros(1))
    ends = ((counts + (TILE - 1)) // TILE).cumsum(0)
    # Without a row there is a tile of padding nevertheless: no kernel gets a problem without a tile.
    first = torch.cat([ends.new_zeros(1), ends[:-1], ends[-1:].clamp(min=1)])
    expert = torch.searchsorted(ends, torch.arange(tiles, device=device), right=True).clamp_(max=experts - 1)
    shift = first[:-1] * TILE - (last - counts) - 1
    place = torch.where(by_expert, number + shift[:, None], nowhere)
    given = torch.arange(tokens * experts, dtype=torch.int32, device=device).view(tokens, experts)
    source = torch.full((nowhere + 1,), -1, dtype=torch.int32, device=device)
    source = source.scatter_(0, place.view(-1), given.t().reshape(-1))[:nowhere]
    table = torch.full((tokens, most + 1), -1, dtype=torch.int32, device=device)
    table.scatter_(1, torch.where(chosen, chosen.cumsum(1) - 1, most), place.t().int())
    known = tuple(counts.tolist()) if device.type == "cpu" else None
    as_given = Groups(counts.int(), first.int(), expert.int(), source, None, known)
    of_token = source.div(experts, rounding_mode="floor")  # -1 stays
    return as_given, replace(as_given, source=of_token, table=table[:, :most].contiguous())


@dataclass(frozen=True, eq=False)
class Made:
    """Padded rows that are not in memory: `cast(*of, groups, format, scale (E,), rows=, columns=, amax_out=)` casts
    them as ops.quantize_groups would."""

    cast: Callable[..., tuple[torch.Tensor | None, torch.Tensor | None]]
    of: tuple[torch.Tensor, ...]
