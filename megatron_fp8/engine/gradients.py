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

A NaN or an infinity in dW stays visible in G: in FP8 as a NaN.
"""

from collections.abc import Callable

import torch

from .. import ops
from ..comm.reduce import BlockShards, DenseShard
from ..comm.wire import Stages
from ..numerics.blocks import BlockScaled, PackedBlocks
from ..numerics.noise import noise_seed

Wgrad = Callable[..., torch.Tensor]  # (out=None, accumulate=False, dtype=None) -> dW (N, K)
_DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class GradStore:
    """Flat gradients of one bucket, R shards of m elements, m a multiple of 2,048, in one of the three formats."""

    def __init__(self, shards: int, m: int, storage: str, device):
        self.shards, self.numel, self.storage = shards, shards * m, storage
        self._dense: torch.Tensor | None = None
        self._packed: PackedBlocks | None = None
        if storage == "fp8":
            self._packed = PackedBlocks.zeros(shards, m, device)
        else:
            self._dense = torch.zeros(self.numel, dtype=_DENSE[storage], device=device)

    def add(self, wgrad: Wgrad, start: int, shape: torch.Size, *, first: bool, seed: tuple[int, int]) -> None:
        """Add a weight's gradient (N, K) at `start`, or overwrite what is there if it is the `first` of a step."""
        if self._packed is not None:
            dense = wgrad(dtype=torch.bfloat16).view(-1)
            if first:
                ops.quantize_blocks(dense, out=self._packed, first=start)
            else:
                ops.add_blocks(dense, self._packed, seed, start)
            return
        view = self._dense[start : start + shape.numel()].view(shape)
        if first or self.storage == "fp32":
            wgrad(out=view, accumulate=not first)
        else:
            view.add_(wgrad(dtype=torch.bfloat16))

    def clear(self, start: int, numel: int) -> None:
        """Zero some elements: of padding, or a weight that no micro-batch of this step had a gradient for."""
        if self._packed is not None:
            self._packed.clear(start, numel)
        else:
            self._dense[start : start + numel].zero_()

    def dense(self) -> torch.Tensor:
        """The gradients (n,) in FP32 or BF16: the storage itself, or of FP8 a temporary copy."""
        return self._dense if self._packed is None else self._packed.dequantize()

    def read(self, start: int, numel: int) -> BlockScaled:
        """A copy of some elements of FP8 storage."""
        return self._packed.read(start, numel)

    def local(self) -> Stages:
        """What is stored, as a reduced gradient: of a data-parallel group of one."""
        yield from ()
        return (DenseShard(self._dense) if self._packed is None else BlockShards(self._packed)), []

    def reduce_blocks(self, reduce: Callable[[PackedBlocks, PackedBlocks | None], Stages]) -> Stages:
        """Send the gradients in FP8: `reduce(what to send, where to receive or None)`; the storage holds the result.

        FP8 storage is sent as it is, and what was received takes its place.  FP32 or BF16 is quantised into a
        temporary, and is itself the memory that receives.
        """
        if self._packed is None:
            sent = PackedBlocks.empty(self.shards, self.numel // self.shards, self._dense.device)
            ops.quantize_blocks(self._dense, out=sent)
            room = self._dense.view(torch.uint8)[: sent.data.numel()].view(sent.data.shape)
            return (yield from reduce(sent, PackedBlocks(room)))
        reduced, handles = yield from reduce(self._packed, None)
        if reduced.packed.data.shape == self._packed.data.shape:
            self._packed = reduced.packed
        return reduced, handles

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is allocated."""
        return [self._dense if self._packed is None else self._packed.data]


class GradSlot:
    """A weight's place in a store, counting the step's micro-batches.

    identity: (run seed, data-parallel rank, and what tells the weight from all others), for the noise.
    """

    def __init__(self, store: GradStore, start: int, shape: torch.Size, identity: tuple[int, ...]):
        self.store, self.start, self.shape, self.identity = store, start, shape, identity
        self.step = self.adds = 0
        self.closed = False

    def begin_step(self, step: int) -> None:
        """The next gradient overwrites."""
        self.step, self.adds, self.closed = step, 0, False

    def add(self, wgrad: Wgrad) -> None:
        """Take the gradient of one micro-batch.  RuntimeError if it comes when the step's gradients are on the wire."""
        if self.closed:
            raise RuntimeError(
                "a weight gradient came after its bucket had gone out (a weight that is used several times in a "
                "micro-batch, under recomputation?): train without --overlap-grad-reduce"
            )
        seed = noise_seed(*self.identity, self.step, self.adds)
        self.store.add(wgrad, self.start, self.shape, first=self.adds == 0, seed=seed)
        self.adds += 1

    @property
    def blocks(self) -> BlockScaled:
        """A copy of what is stored, of FP8 storage."""
        return self.store.read(self.start, self.shape.numel())

    def close(self) -> None:
        """No more gradients in this step; make it valid also where no micro-batch gave one."""
        self.closed = True
        if self.adds == 0:
            self.store.clear(self.start, self.shape.numel())
