"""Where weight gradients are while micro-batches add to them: in FP32, BF16 or FP8 (`--fp8-grad-accum`).

    fp32    G <- G + dW                       4 bytes an element
    bf16    G <- BF16(G + BF16(dW))           2
    fp8     G <- SR(G + BF16(dW))             1 + 1/128: BlockScaled, E4M3 with a power of two for 128 elements

The first micro-batch of a step overwrites, the others add.  In E4M3 an addition rounds to 4 significant bits: with
rounding to nearest, a contribution below 1/16 of what is there would vanish, and the sum would stall.  SR, stochastic
rounding, goes up or down with the probability that makes the mean right, so small contributions survive in
expectation; its noise is the price, and it grows with the number of micro-batches (docs/gradients.md has both,
measured).  The first write rounds to nearest: nothing is there to stall on, and the error is smaller.

The noise is a hash of the element's index and of a seed made of the run's seed, the step, the micro-batch, the
data-parallel rank and the weight: a run that restarts from a checkpoint draws the same.

A NaN or an infinity in dW is a NaN in G in every format.
"""

from collections.abc import Callable

import torch

from .. import ops
from ..comm.reduce import BlockShards, DenseShard
from ..comm.wire import Stages
from ..numerics.blocks import BLOCK, BlockScaled
from ..numerics.formats import E4M3
from ..numerics.noise import noise_seed

Wgrad = Callable[..., torch.Tensor]  # (out=None, accumulate=False, dtype=None) -> dW (N, K)
_DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class GradStore:
    """Flat gradients of one bucket, n elements, n a multiple of 128, in one of the three formats."""

    def __init__(self, numel: int, storage: str, device):
        self.numel, self.storage = numel, storage
        self._dense, self._blocks = None, None
        if storage == "fp8":
            payload = torch.zeros(numel, dtype=torch.uint8, device=device).view(E4M3.dtype)
            self._blocks = BlockScaled(payload, payload.new_zeros(numel // BLOCK, dtype=torch.uint8))
        else:
            self._dense = torch.zeros(numel, dtype=_DENSE[storage], device=device)

    def add(self, wgrad: Wgrad, start: int, shape: torch.Size, *, first: bool, seed: tuple[int, int]) -> None:
        """Add a weight's gradient (N, K) at `start`, or overwrite what is there if it is the `first` of a step."""
        if self.storage == "fp8":
            span = self._span(start, shape.numel())
            dense = wgrad(dtype=torch.bfloat16).view(-1)
            if first:
                ops.quantize_blocks(dense, span.payload, span.exponents)
            else:
                ops.add_blocks(dense, span, seed)
            return
        view = self._dense[start : start + shape.numel()].view(shape)
        if first or self.storage == "fp32":
            wgrad(out=view, accumulate=not first)
        else:
            view.add_(wgrad(dtype=torch.bfloat16))

    def clear(self, start: int, numel: int) -> None:
        """Zero a weight's gradient: no micro-batch of this step had one."""
        if self.storage == "fp8":
            span = self._span(start, numel)
            span.payload.view(torch.uint8).zero_()
            span.exponents.zero_()
        else:
            self._dense[start : start + numel].zero_()

    def _span(self, start: int, numel: int) -> BlockScaled:
        blocks = slice(start // BLOCK, (start + numel) // BLOCK)
        return BlockScaled(self._blocks.payload[start : start + numel], self._blocks.exponents[blocks])

    def dense(self) -> torch.Tensor:
        """The gradients (n,) in FP32 or BF16: the storage itself, or of FP8 a temporary copy."""
        return self._dense if self._blocks is None else self._blocks.dequantize()

    def local(self) -> Stages:
        """What is stored, as a reduced gradient: of a data-parallel group of one."""
        yield from ()
        return (DenseShard(self._dense) if self._blocks is None else BlockShards.of(self._blocks, 1)), []

    def reduce_blocks(self, reduce: Callable[[BlockScaled, BlockScaled | None], Stages]) -> Stages:
        """Send the gradients in FP8: `reduce(what to send, where to receive or None)`; the storage holds the result.

        FP8 storage is sent as it is, and what was received takes its place.  FP32 or BF16 is quantised into a
        temporary, and is itself the memory that receives.
        """
        if self._blocks is None:
            room = self._dense.view(torch.uint8)
            receive = BlockScaled(
                room[: self.numel].view(E4M3.dtype), room[self.numel : self.numel + self.numel // BLOCK]
            )
            return (yield from reduce(ops.quantize_blocks(self._dense), receive))
        reduced, handles = yield from reduce(self._blocks, None)
        if reduced.payload.numel() == self.numel:
            self._blocks = BlockScaled(reduced.payload.view(-1), reduced.exponents.view(-1))
        return reduced, handles

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is allocated."""
        return [self._dense] if self._blocks is None else [self._blocks.payload, self._blocks.exponents]


class GradSlot:
    """A weight's place in a store, counting the step's micro-batches.

    identity: (run seed, data-parallel rank, and what tells the weight from all others), for the noise.
    """

    def __init__(self, store: GradStore, start: int, shape: torch.Size, identity: tuple[int, ...]):
        self.store, self.start, self.shape, self.identity = store, start, shape, identity
        self.step = self.adds = 0

    def begin_step(self, step: int) -> None:
        """The next gradient overwrites."""
        self.step, self.adds = step, 0

    def add(self, wgrad: Wgrad) -> None:
        """Take the gradient of one micro-batch."""
        seed = noise_seed(*self.identity, self.step, self.adds)
        self.store.add(wgrad, self.start, self.shape, first=self.adds == 0, seed=seed)
        self.adds += 1

    @property
    def blocks(self) -> BlockScaled:
        """What is stored, of FP8 storage: views."""
        return self.store._span(self.start, self.shape.numel())

    def complete(self) -> None:
        """Make the gradient valid also where no micro-batch gave one."""
        if self.adds == 0:
            self.store.clear(self.start, self.shape.numel())
