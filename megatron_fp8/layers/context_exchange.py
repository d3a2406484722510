"""How a context-parallel rank gets the other ranks' K and V, and returns what it has of their gradients.

Rank r of N has two chunks of a sequence, the r-th and the r-th from the end. Of the ranks before it all its queries see
the early chunk; of the ranks behind it its late chunk sees both. There are two ways, equal but for rounding:

    Gathered    One all-gather of K and V, beside the own block. Then all earlier ranks' keys are one block, and all
                later ranks' another. Gradients go home in one exchange after the last block.
    Fetched     N - 1 rounds. In round i a rank gets what it sees of rank r - i, from rank r - i itself, and sends what
                rank r + i sees to it. One round is under way while the block of the round before is computed. The
                gradients of a round go home while the next one is computed.

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
    """Own queries from row `first` on, against keys and values (t, b, ng, hn + hv)."""

    first: int
    pairs: torch.Tensor
    causal: bool


class Gathered:
    """pairs (s/N, b, ng, hn + hv): this rank's K and V side by side. One tensor makes one collective. Of two, the
    second waits for the first, and with CUDA_DEVICE_MAX_CONNECTIONS=1 attention, launched after both, waits too.

    `blocks` once; in a backward pass `add` after each of them, in their order, then `sums`.  count: of the blocks.
    """

    def __init__(self, pairs: torch.Tensor, group):
        self.count = 2 + (0 < group.rank() < group.size() - 1)
        self._own, self._group = pairs, group
        self._gradients: list[torch.Tensor] = []

    def blocks(self) -> Iterator[Block]:
        """The own block, while the other ranks' pairs are on their way, and theirs."""
        group = self._group
        ranks, rank, chunk = group.size(), group.rank(), len(self._own) // 2
        flight = wire.Flight(tensor.gather(self._own, group, wire.KEYS))
        yield Block(0, self._own, True)
        del self._own  # it is among what is gathered
        whole = flight.land().unflatten(0, (ranks, 2, chunk))
        if rank > 0:
            yield Block(0, whole[:rank, 0].flatten(0, 1), False)
        if rank < ranks - 1:
            yield Block(chunk, whole[rank + 1 :].flatten(0, 2), False)

    def add(self, gradient: torch.Tensor) -> None:
        """The gradient of the pairs of the block that came last."""
        self._gradients.append(gradient)

    def sums(self) -> torch.Tensor:
        """The gradient of this rank's pairs, in their type."""
        return wire.Flight(_sent_home(self._gradients, self._group)).land()


def _sent_home(parts: list[torch.Tensor], group) -> wire.Stages:
    """A gradient's blocks (t, b, ng, hn + hv), in Gathered's order, which are used up -> the sum over ranks for the own
    tokens."""
    own, others = parts[0], parts[1:]
    ranks, rank, rows = group.size(), group.rank(), len(own)
    chunk = rows // 2
    # An earlier rank is sent what falls on its early chunk, a later one both; so each gets both of the earlier ranks.
    sent = [chunk] * rank + [0] + [rows] * (ranks - 1 - rank)
    expected = [rows] * rank + [0] + [chunk] * (ranks - 1 - rank)
    data = others[0] if len(others) == 1 else torch.cat(others)
    del parts[:], others
    received, handle = wire.pass_rows(data, sent, expected, group, wire.KEYS_GRADS)
    del data
    yield [handle]
    total = own.float()
    both, early = received.split([rank * rows, (ranks - 1 - rank) * chunk])
    total += both.view(rank, *own.shape).sum(0, dtype=torch.float32)
    total[:chunk] += early.view(ranks - 1 - rank, chunk, *own.shape[1:]).sum(0, dtype=torch.float32)
    return total.to(own.dtype), []


class Fetched:
    """As Gathered."""

    def __init__(self, pairs: torch.Tensor, group):
        self.count = group.size()
        self._own, self._group = pairs, group
        self._round = 0
        self._total = pairs.new_empty(0)  # FP32
        self._home: wire.Flight | None = None  # a gradient of the last round

    def blocks(self) -> Iterator[Block]:
        """The own block and each other rank's; while one is computed the next is on its way."""
        ranks, rank, chunk = self._group.size(), self._group.rank(), len(self._own) // 2
        coming = self._fetch(1)
        yield Block(0, self._own, True)
        for i in range(1, ranks):
            self._round, pairs = i, coming.land()
            if i + 1 < ranks:
                coming = self._fetch(i + 1)
            else:
                del coming
            yield Block(0 if i <= rank else chunk, pairs, False)
            del pairs  # round i + 2 may take its memory

    def _seen(self, owner: int, reader: int) -> int:
        """How many of the owner's tokens the reader's queries see."""
        return len(self._own) // (2 if owner < reader else 1)

    def _partners(self, i: int) -> tuple[int, int]:
        """(The rank whose pairs this one reads in round i, the rank that reads this one's)."""
        ranks, rank = self._group.size(), self._group.rank()
        return (rank - i) % ranks, (rank + i) % ranks

    def _fetch(self, i: int) -> wire.Flight:
        rank, (owner, reader) = self._group.rank(), self._partners(i)
        there, here = self._seen(rank, reader), self._seen(owner, rank)
        return self._pass(self._own[:there], reader, owner, here, wire.KEYS)

    def _pass(self, data: torch.Tensor, to: int, source: int, rows: int, kind: str) -> wire.Flight:
        """Send `data` to a rank, while another sends so many rows."""
        sent, expected = [0] * self._group.size(), [0] * self._group.size()
        sent[to], expected[source] = len(data), rows
        return wire.Flight(_started(*wire.pass_rows(data, sent, expected, self._group, kind)))

    def add(self, gradient: torch.Tensor) -> None:
        """As Gathered's."""
        if self._round == 0:
            self._total = gradient.float()
            return
        rank, (owner, reader) = self._group.rank(), self._partners(self._round)
        self._land()
        self._home = self._pass(gradient, owner, reader, self._seen(rank, reader), wire.KEYS_GRADS)

    def _land(self) -> None:
        """Add what has come home since the round before."""
        if self._home is not None:
            received = self._home.land()
            self._total[: len(received)] += received
        self._home = None

    def sums(self) -> torch.Tensor:
        """As Gathered's."""
        self._land()
        return self._total.to(self._own.dtype)


def _started(received: torch.Tensor, handle) -> wire.Stages:
    yield from ()
    return received, [handle]
