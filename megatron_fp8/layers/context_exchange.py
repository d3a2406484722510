"""How a context-parallel rank gets the other ranks' K and V, and returns what it has of their gradients.

Rank r of N has two chunks of a sequence, the r-th and the r-th from the end. Of the ranks before it all its queries see
the early chunk; of the ranks behind it its late chunk sees both. There are two ways, equal but for rounding:

    Gathered    One all-gather of K and V, beside the own block. Then all earlier ranks' keys are one block, and all
                later ranks' another. Gradients go home in one exchange after the last block.
    Fetched     N - 1 rounds. In round i a rank gets what it sees of rank r - i, from rank r - i itself, and sends what
                rank r + i sees to it. Two rounds are under way while a block is computed. The gradients of a round go
                home while the next one is computed.

                                                           Gathered        Fetched
    K and V that are held besides the own ones             N times those   2 times
    K and V that are sent                                  N - 1           3/4 (N - 1) in the mean
    blocks, each merged by a pass over an FP32 output      3               N

Stock's p2p is a ring (Ring Attention, arXiv 2310.01889), which passes K and V on from neighbour to neighbour. It must
pass on both chunks, because a later neighbour may see both. Behind a switch all ranks are neighbours.

Both ways send gradients rounded to BF16, as kernels give them, and the keys' owner adds them up in FP32. It is the sum
of an FP32 reduce-scatter, or of FP32 sums that travel round a ring, for 3/8 of their bytes or less.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..comm import tensor, wire


class Block(NamedTuple):
    """Own queries from row `first` on, against keys (t, b, ng, hn) and values (t, b, ng, hv)."""

    first: int
    keys: torch.Tensor
    values: torch.Tensor
    causal: bool


class Gathered:
    """k (s/N, b, ng, hn), v (s/N, b, ng, hv): this rank's. `blocks` once; in a backward pass `add` after each of them,
    in their order, then `sums`.  count: of the blocks."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, group):
        self.count = 2 + (0 < group.rank() < group.size() - 1)
        self._own, self._group = (k, v), group
        self._gradients: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def blocks(self) -> Iterator[Block]:
        """The own block, while the other ranks' K and V are on their way, and theirs."""
        group = self._group
        ranks, rank, chunk = group.size(), group.rank(), len(self._own[0]) // 2
        flights = [wire.Flight(tensor.gather(t, group, wire.KEYS)) for t in self._own]
        yield Block(0, *self._own, True)
        keys, values = (flight.land().unflatten(0, (ranks, 2, chunk)) for flight in flights)
        if rank > 0:
            yield Block(0, keys[:rank, 0].flatten(0, 1), values[:rank, 0].flatten(0, 1), False)
        if rank < ranks - 1:
            yield Block(chunk, keys[rank + 1 :].flatten(0, 2), values[rank + 1 :].flatten(0, 2), False)

    def add(self, *gradients: torch.Tensor) -> None:
        """dk (t, b, ng, hn) and dv (t, b, ng, hv) of the block that came last."""
        for parts, gradient in zip(self._gradients, gradients, strict=True):
            parts.append(gradient)

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of this rank's tokens, in the type of k and v."""
        flights = [wire.Flight(_sent_home(parts, self._group)) for parts in self._gradients]
        dk, dv = (flight.land() for flight in flights)
        return dk, dv


def _sent_home(parts: list[torch.Tensor], group) -> wire.Stages:
    """A gradient's blocks (t, b, ng, hn), in Gathered's order, which are used up -> the sum over ranks for the own
    tokens."""
    own, others = parts[0], parts[1:]
    ranks, rank, rows = group.size(), group.rank(), len(own)
    chunk = rows // 2
    # An earlier rank is sent what falls on its early chunk, a later one both; so each gets both of the earlier ranks.
    sent = [chunk] * rank + [0] + [rows] * (ranks - 1 - rank)
    expected = [rows] * rank + [0] + [chunk] * (ranks - 1 - rank)
    data = torch.empty(sum(sent), *own.shape[1:], dtype=own.dtype, device=own.device)
    torch.cat(others, out=data)
    del parts[:], others
    received, handle = wire.pass_rows(data, sent, expected, group, wire.KEYS_GRADS)
    yield [handle]
    total = own.to(torch.float32, memory_format=torch.contiguous_format)
    both, early = received.split([rank * rows, (ranks - 1 - rank) * chunk])
    total += both.view(rank, *own.shape).sum(0, dtype=torch.float32)
    total[:chunk] += early.view(ranks - 1 - rank, chunk, *own.shape[1:]).sum(0, dtype=torch.float32)
    return total.to(own.dtype), []


class Fetched:
    """As Gathered."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, group):
        self.count = group.size()
        self._own, self._group = (k.contiguous(), v.contiguous()), group
        self._round = 0
        self._totals: tuple[torch.Tensor, ...] = ()  # FP32
        self._home: list[wire.Flight] = []  # gradients of the last round

    def blocks(self) -> Iterator[Block]:
        """The own block and each other rank's."""
        ranks, rank, chunk = self._group.size(), self._group.rank(), len(self._own[0]) // 2
        coming = deque(self._fetch(i) for i in range(1, min(3, ranks)))
        yield Block(0, *self._own, True)
        for i in range(1, ranks):
            self._round = i
            keys, values = (flight.land() for flight in coming.popleft())
            yield Block(0 if i <= rank else chunk, keys, values, False)
            del keys, values  # round i + 2 may take their memory
            if i + 2 < ranks:
                coming.append(self._fetch(i + 2))

    def _seen(self, owner: int, reader: int) -> int:
        """How many of the owner's tokens the reader's queries see."""
        return len(self._own[0]) // (2 if owner < reader else 1)

    def _partners(self, i: int) -> tuple[int, int]:
        """(The rank whose keys this one reads in round i, the rank that reads this one's)."""
        ranks, rank = self._group.size(), self._group.rank()
        return (rank - i) % ranks, (rank + i) % ranks

    def _fetch(self, i: int) -> list[wire.Flight]:
        rank, (owner, reader) = self._group.rank(), self._partners(i)
        there, here = self._seen(rank, reader), self._seen(owner, rank)
        return [self._pass(t[:there], reader, owner, here, wire.KEYS) for t in self._own]

    def _pass(self, data: torch.Tensor, to: int, source: int, rows: int, kind: str) -> wire.Flight:
        """Send `data` to a rank, while another sends so many rows."""
        sent, expected = [0] * self._group.size(), [0] * self._group.size()
        sent[to], expected[source] = len(data), rows
        return wire.Flight(_started(*wire.pass_rows(data, sent, expected, self._group, kind)))

    def add(self, *gradients: torch.Tensor) -> None:
        """As Gathered's."""
        if self._round == 0:
            self._totals = tuple(t.to(torch.float32, memory_format=torch.contiguous_format) for t in gradients)
            return
        rank, (owner, reader) = self._group.rank(), self._partners(self._round)
        here = self._seen(rank, reader)
        self._land()
        self._home = [self._pass(t.contiguous(), owner, reader, here, wire.KEYS_GRADS) for t in gradients]

    def _land(self) -> None:
        """Add what has come home since the round before."""
        for total, flight in zip(self._totals, self._home, strict=False):
            received = flight.land()
            total[: len(received)] += received
        self._home = []

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As Gathered's."""
        self._land()
        dk, dv = (total.to(own.dtype) for total, own in zip(self._totals, self._own, strict=True))
        return dk, dv


def _started(received: torch.Tensor, handle) -> wire.Stages:
    yield from ()
    return received, [handle]
