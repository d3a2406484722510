"""How a context-parallel rank gets the other ranks' K and V, and returns what it has of their gradients.

Rank r of N has two chunks of a sequence, the r-th and the r-th from the end. Of the ranks before it all its queries see
the early chunk; of the ranks behind it its late chunk sees both. There are two ways, equal but for rounding:

    Gathered    One all-gather of K and V. Then all earlier ranks' keys are one block, and all later ranks' another.
                Gradients go home in one exchange after the last of these blocks.
    Fetched     N - 1 rounds. In round i a rank gets what it sees of rank r - i, from rank r - i itself, and sends what
                rank r + i sees to it. The next round is under way while a block is computed. The gradients of a round
                go home while the next one is computed.

The own block needs nothing of this. So the rank computes it when it would wait for the exchange (context_parallel.py):

    forward     own block, while K and V come                    the other blocks
    backward    the linear before it, while K and V come         the other blocks        own block, while gradients go

                                                           Gathered        Fetched
    K and V that are held besides the own ones             N times those   2 times
    K and V that are sent                                  N - 1           3/4 (N - 1) in the mean
    blocks, each merged by a pass over an FP32 output      3               N

Stock's p2p is a ring (Ring Attention, arXiv 2310.01889), which passes K and V on from neighbour to neighbour. It must
pass on both chunks, because a later neighbour may see both. Behind a switch all ranks are neighbours.

Both ways send gradients rounded to BF16, as kernels give them, and the keys' owner adds them up in FP32. It is the sum
of an FP32 reduce-scatter, or of FP32 sums that travel round a ring, for 3/8 of their bytes or less.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..comm import tensor, wire


class Block(NamedTuple):
    """Own queries from row `first` on, against another rank's keys and values (t, b, ng, hn + hv), all of them seen.

    chunks: of the sequence, whose tokens these are, in their order; () if they are several ranks'.
    """

    first: int
    pairs: torch.Tensor
    chunks: tuple[int, ...] = ()


def own_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """The two of 2 N chunks of a sequence that a rank has, in their order."""
    return rank, 2 * ranks - 1 - rank


class Gathered:
    """pairs (s/N, b, ng, hn + hv): this rank's K and V side by side. One tensor makes one collective. Of two, the
    second waits for the first, and with CUDA_DEVICE_MAX_CONNECTIONS=1 attention, launched after both, waits too.

    The other ranks' are on their way from the start. `blocks` once; in a backward pass `send` after each of them, in
    their order, then `add_received`.  count: of the blocks.
    """

    def __init__(self, pairs: torch.Tensor, group):
        self.count = 1 + (0 < group.rank() < group.size() - 1)
        self._group, self._rows = group, len(pairs)
        self._coming: wire.Flight | None = wire.Flight(tensor.gather(pairs, group, wire.KEYS))
        self._gradients: list[torch.Tensor] = []
        self._home: wire.Flight | None = None

    def blocks(self) -> Iterator[Block]:
        """All earlier ranks' pairs, then all later ranks'. Of the last block only the caller holds the memory."""
        ranks, rank, chunk = self._group.size(), self._group.rank(), self._rows // 2
        assert self._coming is not None
        whole, self._coming = self._coming.land().unflatten(0, (ranks, 2, chunk)), None
        blocks = []
        if rank > 0:
            blocks.append(Block(0, whole[:rank, 0].flatten(0, 1)))
        if rank < ranks - 1:
            blocks.append(Block(chunk, whole[rank + 1 :].flatten(0, 2)))
        del whole
        while blocks:
            yield blocks.pop(0)

    def send(self, gradients: list[torch.Tensor]) -> None:
        """Start to send the last block's dk (t, b, ng, hn) and dv (t, b, ng, hv), which are used up, to its owners."""
        self._gradients.append(torch.cat(gradients, -1))
        gradients.clear()
        if len(self._gradients) == self.count:
            self._home = wire.Flight(_sent_home(self._gradients, self._rows, self._group))

    def add_received(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add to the gradients of this rank's keys and values, in place, what the other ranks have of them."""
        assert self._home is not None
        _add(dk, dv, self._home.land())


def _sent_home(parts: list[torch.Tensor], rows: int, group) -> wire.Stages:
    """A gradient's blocks (t, b, ng, hn + hv), in Gathered's order, which are used up -> the sum over the other ranks
    for this rank's first tokens: in FP32, or one rank's as it is."""
    ranks, rank, chunk = group.size(), group.rank(), rows // 2
    # An earlier rank is sent what falls on its early chunk, a later one both; so each gets both of the earlier ranks.
    sent = [chunk] * rank + [0] + [rows] * (ranks - 1 - rank)
    expected = [rows] * rank + [0] + [chunk] * (ranks - 1 - rank)
    data = parts[0] if len(parts) == 1 else torch.cat(parts)
    parts.clear()
    received, *handles = wire.pass_rows(data, sent, expected, group, wire.KEYS_GRADS)
    del data
    yield handles
    if ranks == 2:
        return received, []
    of_both, of_early = rank, ranks - 1 - rank
    both, early = received.split([of_both * rows, of_early * chunk])
    stacks = [part.unflatten(0, (count, -1)) for part, count in ((both, of_both), (early, of_early)) if count]
    total, *more = (stack.sum(0, dtype=torch.float32) for stack in stacks)
    for part in more:
        total[: len(part)].add_(part)
    return total, []


def _add(dk: torch.Tensor, dv: torch.Tensor, total: torch.Tensor) -> None:
    """Add total (t, b, ng, hn + hv), BF16 or FP32, to the first t rows of dk and dv; each sum is rounded once."""
    for gradient, part in zip((dk, dv), total.split((dk.shape[3], dv.shape[3]), -1), strict=True):
        gradient[: len(part)].add_(part)


class Fetched:
    """As Gathered."""

    def __init__(self, pairs: torch.Tensor, group):
        self.count = group.size() - 1
        self._group, self._rows = group, len(pairs)
        self._own: torch.Tensor | None = pairs.contiguous()  # while another rank waits for them
        self._round = 0
        self._coming: wire.Flight | None = self._fetch(1)
        self._home: wire.Flight | None = None  # gradients of the last round
        self._total: torch.Tensor | None = None

    def blocks(self) -> Iterator[Block]:
        """The pairs of each other rank; while one block is computed the next is on its way."""
        ranks, rank, chunk = self._group.size(), self._group.rank(), self._rows // 2
        for i in range(1, ranks):
            self._round = i
            owner, _ = self._partners(i)
            first, chunks = (0, (owner,)) if owner < rank else (chunk, own_chunks(owner, ranks))
            yield Block(first, self._landed(), chunks)

    def _landed(self) -> torch.Tensor:
        """The round's pairs, held by none but the caller; the next round starts."""
        assert self._coming is not None
        pairs, self._coming = self._coming.land(), None
        if self._round < self.count:
            self._coming = self._fetch(self._round + 1)
        return pairs

    def _seen(self, owner: int, reader: int) -> int:
        """How many of the owner's tokens the reader's queries see."""
        return self._rows // (2 if owner < reader else 1)

    def _partners(self, i: int) -> tuple[int, int]:
        """(The rank whose pairs this one reads in round i, the rank that reads this one's)."""
        ranks, rank = self._group.size(), self._group.rank()
        return (rank - i) % ranks, (rank + i) % ranks

    def _fetch(self, i: int) -> wire.Flight:
        rank, (owner, reader) = self._group.rank(), self._partners(i)
        there, here = self._seen(rank, reader), self._seen(owner, rank)
        assert self._own is not None
        own, self._own = self._own[:there], self._own if i < self.count else None
        return self._pass(own, reader, owner, here, wire.KEYS)

    def _pass(self, data: torch.Tensor, to: int, source: int, rows: int, kind: str) -> wire.Flight:
        """Send `data` to a rank, while another sends so many rows."""
        sent, expected = [0] * self._group.size(), [0] * self._group.size()
        sent[to], expected[source] = len(data), rows
        return wire.Flight(_started(*wire.pass_rows(data, sent, expected, self._group, kind)))

    def send(self, gradients: list[torch.Tensor]) -> None:
        """As Gathered's."""
        rank, (owner, reader) = self._group.rank(), self._partners(self._round)
        gradient = torch.cat(gradients, -1)
        gradients.clear()
        self._land()
        self._home = self._pass(gradient, owner, reader, self._seen(rank, reader), wire.KEYS_GRADS)

    def _land(self) -> None:
        """Add what has come home since the round before, in FP32; of one other rank it is the sum as it is."""
        if self._home is None:
            return
        received, self._home = self._home.land(), None
        if self.count == 1:
            self._total = received
            return
        if self._total is None:
            self._total = received.new_zeros(self._rows, *received.shape[1:], dtype=torch.float32)
        self._total[: len(received)].add_(received)

    def add_received(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """As Gathered's."""
        self._land()
        assert self._total is not None
        _add(dk, dv, self._total)


def _started(received: torch.Tensor, handle) -> wire.Stages:
    yield from ()
    return received, [handle]
