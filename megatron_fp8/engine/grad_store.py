"""Storage of weight gradients while micro-batches add to them: in FP32, BF16 or FP8 (`--fp8-grad-accum`).

    fp32    G <- G + dW                       4 bytes an element
    bf16    G <- BF16(G + dW)                 2
    fp8     G <- SR(G + BF16(dW))             1 + 1/128: BlockScaled, E4M3 with a power of two for 128 elements

The first micro-batch of a step overwrites, the others add.  In FP32 and BF16 the GEMM adds its FP32 sums to G.  If a
backend cannot, dW is rounded to G's type first; some of cuBLASLt's kernels do so too (docs/decisions.md).

In E4M3 an addition rounds to 4 significant bits.  Rounded to nearest, a contribution below 1/16 of the stored value
would vanish, and the sum would stall.  SR, stochastic rounding, goes up or down with the probabilities that make the
mean right.  So small contributions survive in expectation.  The price is noise, which grows with the number of
micro-batches (docs/gradients.md has both, measured).  The first write rounds to nearest: it cannot stall, and its error
is smaller.

The noise is a hash of the element's index and of a seed. The seed is made of the run's seed, the step, the micro-batch,
the data-parallel rank and the weight. So a run that restarts from a checkpoint draws the same noise.

A NaN or an infinity in dW stays visible in G: in FP8 as a NaN.

A `GradSink` is a weight's place in a store. It takes dW as a gemm.Product, a GEMM that has not run. The store decides
how it runs: into the store's memory, accumulating there, or into memory of its own, to be added in FP8.
"""

import functools
import struct
from collections.abc import Callable, Iterable, Sequence

import torch

from .. import gemm, ops
from ..comm.reduce import BlockShards, DenseShard
from ..comm.wire import Stages
from ..numerics.blocks import BlockScaled, PackedBlocks
from ..numerics.noise import Seed, SeedBytes

_DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DenseStore:
    """Flat gradients (n,) of one bucket in FP32 or BF16, R shards of m elements."""

    def __init__(self, shards: int, m: int, storage: str, device):
        self.shards, self.numel, self.storage = shards, shards * m, storage
        self._values = torch.zeros(self.numel, dtype=_DENSE[storage], device=device)

    def add(self, product: gemm.Product | gemm.Computed, sink: "GradSink") -> None:
        """Add a gradient in the GEMM, or overwrite what is there with the first of a step."""
        product.compute(into=self.place(sink), accumulate=sink.adds > 0)

    def place(self, sink: "GradSink") -> torch.Tensor:
        """The sink's elements, as a GEMM writes or adds them."""
        if sink.place is None:
            sink.place = self._values[sink.start : sink.start + sink.shape.numel()].view(sink.shape)
        return sink.place

    def clear(self, start: int, numel: int) -> None:
        """Zero some elements: padding, or a weight that got no gradient in this step."""
        self._values[start : start + numel].zero_()

    def dense(self) -> torch.Tensor:
        """The gradients (n,) in FP32 or BF16: the storage itself."""
        return self._values

    def local(self) -> Stages:
        """The stored gradients as a reduced gradient, for a data-parallel group of one."""
        yield from ()
        return DenseShard(self._values), []

    def remember(self) -> Callable[[], None]:
        """A function that puts back the present place of the gradients."""
        return lambda: None

    def to_send(self) -> tuple[PackedBlocks, PackedBlocks | None]:
        """The gradients in FP8, and where to receive: a temporary, and the storage itself."""
        sent = PackedBlocks.empty(self.shards, self.numel // self.shards, self._values.device)
        ops.quantize_blocks(self._values, out=sent)
        room = self._values.view(torch.uint8)[: sent.data.numel()].view(sent.data.shape)
        return sent, PackedBlocks(room)

    def keep_received(self, received: PackedBlocks) -> None:
        """Gradients in FP8 have come from all ranks. They lie in the storage, or in memory of their own."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are allocated."""
        return [self._values]


class BlockStore:
    """The same in FP8, BlockScaled; m is a multiple of 2,048."""

    storage = "fp8"

    def __init__(self, shards: int, m: int, device):
        self.shards, self.numel = shards, shards * m
        self._packed = PackedBlocks.zeros(shards, m, device)

    def add(self, product: gemm.Product | gemm.Computed, sink: "GradSink") -> None:
        """Add a gradient, rounded to BF16, with the sink's noise. A step's first overwrites, to nearest."""
        gradient = product.compute(dtype=torch.bfloat16).view(-1)
        if sink.adds:
            ops.add_blocks(gradient, self._packed, sink.seed(), sink.start)
        else:
            ops.quantize_blocks(gradient, out=self._packed, first=sink.start)

    def add_beside(self, gradients: torch.Tensor, sinks: Sequence["GradSink"]) -> None:
        """`add` to each of the sinks its (N, K) of gradients (E, N, K) BF16, in one pass. The sinks are neighbours, in
        order, and have taken as many gradients."""
        first = sinks[0]
        if first.adds:
            ops.add_blocks(gradients.view(-1), self._packed, seeds(sinks), first.start)
        else:
            ops.quantize_blocks(gradients.view(-1), out=self._packed, first=first.start)

    def place(self, sink: "GradSink") -> None:
        """None: no GEMM adds to what is stored."""

    def clear(self, start: int, numel: int) -> None:
        """As DenseStore's."""
        self._packed.clear(start, numel)

    def dense(self) -> torch.Tensor:
        """The gradients (n,) in FP32, a temporary copy."""
        return self._packed.dequantize()

    def read(self, start: int, numel: int) -> BlockScaled:
        """A copy of some elements."""
        return self._packed.read(start, numel)

    def local(self) -> Stages:
        """As DenseStore's."""
        yield from ()
        return BlockShards(self._packed), []

    def remember(self) -> Callable[[], None]:
        """As DenseStore's."""
        return functools.partial(setattr, self, "_packed", self._packed)

    def to_send(self) -> tuple[PackedBlocks, PackedBlocks | None]:
        """The gradients as they are. Those that are received have memory of their own."""
        return self._packed, None

    def keep_received(self, received: PackedBlocks) -> None:
        """The received gradients replace those that were sent, if they have the same size."""
        if received.data.shape == self._packed.data.shape:
            self._packed = received

    @property
    def tensors(self) -> list[torch.Tensor]:
        """As DenseStore's."""
        return [self._packed.data]


type GradStore = DenseStore | BlockStore


def grad_store(shards: int, m: int, storage: str, device) -> GradStore:
    """Zeros for R shards of m elements, in the format that `--fp8-grad-accum` names."""
    return BlockStore(shards, m, device) if storage == "fp8" else DenseStore(shards, m, storage, device)


class GradSink:
    """Takes one weight's gradients: its elements of a store. `adds` counts the step's micro-batches.

    identity: (run seed, data-parallel rank, and numbers that only this weight has), for the noise.
    place: a view of these elements in a store in FP32 or BF16, made once.
    recorded: while a step is recorded, the memory from which its additions read their seeds; else None.
    """

    def __init__(self, store: GradStore, start: int, shape: torch.Size, identity: tuple[int, ...]):
        self.store, self.start, self.shape, self._seed_bytes = store, start, shape, SeedBytes(*identity)
        self.place: torch.Tensor | None = None
        self.recorded: RecordedSeeds | None = None
        self.step = self.adds = 0
        self.closed = False

    def begin_step(self, step: int) -> None:
        """The next gradient overwrites."""
        self.step, self.adds, self.closed = step, 0, False

    def take(self, product: gemm.Product | gemm.Computed) -> None:
        """Take the gradient of one micro-batch. RuntimeError as `check_open`."""
        self.check_open()
        self.store.add(product, self)
        self.adds += 1

    def check_open(self) -> None:
        """RuntimeError if the step's gradients have already been sent."""
        if self.closed:
            raise RuntimeError(
                "a weight gradient came after its bucket had gone out: begin each step with optimizer.zero_grad(), and "
                "sum the gradients once, after its last backward pass; if a weight is used several times in a "
                "micro-batch, under recomputation, train without --overlap-grad-reduce"
            )

    def room(self) -> torch.Tensor | None:
        """Where a GEMM may write the micro-batch's gradient (N, K), or add it if `adds` is not 0; the caller counts it
        in `adds`. None: the store does not take it so. RuntimeError as `check_open`."""
        self.check_open()
        return self.store.place(self)

    def seed(self) -> Seed:
        """The seed of the next addition's noise."""
        if self.recorded is not None:
            return self.recorded.next([self])[0]
        first, second = struct.unpack("<2I", self.seed_of(self.adds))
        return first, second

    def seed_of(self, adds: int) -> bytes:
        """The 8 bytes of the seed of the noise of the step's addition number `adds`."""
        return self._seed_bytes(self.step, adds)

    def close(self) -> None:
        """No more gradients come in this step. If none came, the stored gradient becomes zero."""
        self.closed = True
        if self.adds == 0:
            self.store.clear(self.start, self.shape.numel())


class RecordedSeeds:
    """The seeds of a step's additions, in memory that its kernels read. So a graph can run the step again.

    Inside `with seeds:` each addition of the sinks is told where to read its seed; `fill` writes a step's seeds. The
    memory is allocated before the recording: memory that is allocated during it may have served others earlier in the
    step, and each replay would overwrite it.

    Args:
        room: for how many additions; None: each seed is written when it is asked for, one by one. That serves the step
            before the recorded one, which compiles kernels, because a recording may load none; `count` has their
            number.
    """

    def __init__(self, sinks: Iterable[GradSink], room: int | None = None):
        self._sinks, self._room = list(sinks), room
        self._additions: list[tuple[GradSink, int]] = []
        device = self._sinks[0].store.tensors[0].device if self._sinks else "cpu"
        self._memory = torch.empty(room or 0, 4, dtype=torch.int32, device=device)  # two of four: all are aligned alike

    def __enter__(self) -> "RecordedSeeds":
        for sink in self._sinks:
            sink.recorded = self
        return self

    def __exit__(self, *error) -> None:
        for sink in self._sinks:
            sink.recorded = None

    @property
    def count(self) -> int:
        """How many additions have asked."""
        return len(self._additions)

    @property
    def replayed(self) -> bool:
        """Whether the step is recorded."""
        return self._room is not None

    def next(self, sinks: Sequence[GradSink]) -> torch.Tensor:
        """The place (E, 2) int32 from which the sinks' next additions read their seeds. RuntimeError if no room is
        left."""
        at = self.count
        self._additions += [(sink, sink.adds) for sink in sinks]
        if self._room is None:
            return _on_device([sink.seed_of(sink.adds) for sink in sinks], self._memory.device)
        if self.count > self._room:
            raise RuntimeError(f"more than {self._room} additions of gradients in FP8, as many as the step before had")
        return self._memory[at : self.count, :2]

    def fill(self) -> None:
        """Write the seeds of the sinks' present step."""
        if self._additions:
            seeds = [sink.seed_of(adds) for sink, adds in self._additions]
            self._memory[: self.count, :2].copy_(_on_device(seeds, self._memory.device))


def take_beside(sinks: Sequence[GradSink], gradients: torch.Tensor) -> None:
    """Take for each open sink its (N, K) of gradients (E, N, K) BF16, as one after the other would.

    At once, if they lie in FP8 and are neighbours, as a bank's are.
    """
    first, numel = sinks[0], gradients[0].numel()
    mine = ((first.store, first.start + i * numel, first.adds) for i in range(len(sinks)))
    if isinstance(first.store, BlockStore) and [(s.store, s.start, s.adds) for s in sinks] == list(mine):
        first.store.add_beside(gradients, sinks)
        for sink in sinks:
            sink.adds += 1
    else:
        for sink, gradient in zip(sinks, gradients, strict=True):
            sink.take(gemm.Computed(gradient))


def seeds(sinks: Sequence[GradSink]) -> torch.Tensor:
    """The seeds (E, 2) int32 of the sinks' next additions, on their device."""
    first = sinks[0]
    if first.recorded is not None:
        return first.recorded.next(sinks)
    return _on_device([sink.seed_of(sink.adds) for sink in sinks], first.store.tensors[0].device)


def _on_device(seeds: Sequence[bytes], device: torch.device) -> torch.Tensor:
    words = torch.frombuffer(bytearray().join(seeds), dtype=torch.int32).view(-1, 2)
    # torch keeps pinned memory for the next call, but not before an event says that the copy has read it.
    return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words
