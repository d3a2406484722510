"""E4M3 with one power-of-two scale for every 128 consecutive elements: the form in which tensors are stored and sent.

BlockScaled is a vector in this form:

    x[i] ~ payload[i] * 2^(exponents[i // 128] - 127)

payload float8_e4m3fn (n,), exponents uint8 (n/128,) in E8M0 (a bare biased exponent): 1 + 1/128 bytes a
value. The exponent is the smallest e in -127 .. 120 with max|block| <= 448 * 2^e. Therefore

- nothing saturates: max|block| lies in (224, 448] * 2^e (or lower, if e is held at -127);
- scaling is exact, so E4M3's rounding is the only error: relative 2^-4 for |x| >= 2^-6 * 2^e, else absolute
  2^-10 * 2^e, which is < 2^-17 * max|block| unless e is held at -127;
- a block's bytes depend on its own elements alone: a shard cut at a block boundary has the bytes of the whole;
- quantising the dequantised values gives the same values. The bytes are the same too, with one exception: a maximum
  in (224, 232] * 2^e rounds to 224 * 2^e, and the second time it is written as 448 * 2^(e-1), with all other payloads
  of the block doubled. After that the bytes no longer change.

A block of zeros has exponent byte 0. An infinity or a NaN becomes a NaN payload, and stays NaN when dequantised.
The exponent of such a block is 120, so its finite elements come back coarse or zero (the step is lost in any case).
At the ends of float32: |x| >= 248 * 2^120 = 3.3e38 rounds to 2^128, which is infinity when dequantised; at e = -127
the smallest step is 2^-136, so denormals of at most half of that become zero.

PackedBlocks holds R shards of m elements each in one tensor, one shard a row, so that one collective sends payload and
exponents together:

    row j      payload of shard j, m bytes | its exponents, m/128 bytes        element e of all lies in row e // m

m is a multiple of 2048. Then m/128 is a multiple of 16, every row starts at a multiple of 16 bytes from the first, and
kernels read and write whole 16-byte vectors.

RowBlocks is a matrix in the same form. No block crosses a row's end, so a row's last block may be shorter than 128.

Source: the block format follows OCP Microscaling (MX) v1.0, with 128 in place of 32 elements.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .formats import E4M3, decode

BLOCK = 128
SHARD_UNIT = 16 * BLOCK  # the exponents of so many elements fill 16 bytes
_TWO_TO_MINUS_127 = 0x00400000  # the one scale that is a denormal; every larger one has its byte as exponent field


def block_scales(exponents: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) for uint8 E8M0 bytes of any shape, exactly, as float32; byte 255 gives infinity."""
    return (exponents.int() << 23).clamp(min=_TWO_TO_MINUS_127).view(torch.float32)


@dataclass
class BlockScaled:
    """payload (n,) float8_e4m3fn and exponents (n/128,) uint8, biased by 127; n is a multiple of 128."""

    payload: torch.Tensor
    exponents: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """The values (n,) in float32, exactly payload * 2^(e - 127)."""
        return (decode(self.payload).view(-1, BLOCK) * block_scales(self.exponents)[:, None]).view(-1)

    def part(self, first: int, count: int) -> "BlockScaled":
        """Views of the elements first .. first + count - 1; `first` and `count` are multiples of 128."""
        stop = first + count
        return BlockScaled(self.payload[first:stop], self.exponents[first // BLOCK : stop // BLOCK])


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """payload (M, K) float8_e4m3fn and exponents (M, ceil(K / 128)) uint8, biased by 127."""

    payload: torch.Tensor
    exponents: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device | str) -> "RowBlocks":
        """Uninitialised blocks for a (rows, columns) matrix."""
        payload = torch.empty(rows, columns, dtype=E4M3.dtype, device=device)
        return cls(payload, payload.new_empty(rows, -(-columns // BLOCK), dtype=torch.uint8))

    @property
    def shape(self) -> torch.Size:
        return self.payload.shape

    @property
    def is_cuda(self) -> bool:
        return self.payload.is_cuda

    def dequantize(self) -> torch.Tensor:
        """The values (M, K) in float32, exactly payload * 2^(e - 127)."""
        scales = block_scales(self.exponents).repeat_interleave(BLOCK, 1)[:, : self.shape[1]]
        return decode(self.payload) * scales


@dataclass
class PackedBlocks:
    """BlockScaled values of R shards of m elements: data (R, m + m/128) uint8, m a multiple of 2048.

    Elements are numbered through the shards, 0 .. R * m - 1. A span of `count` elements from `first` on may cross
    rows. ValueError if `first` or `count` is no multiple of 128, or if the span ends outside.
    """

    data: torch.Tensor

    @classmethod
    def empty(cls, shards: int, m: int, device: torch.device | str) -> "PackedBlocks":
        """`shards` uninitialised shards of m elements; ValueError unless m is a multiple of 2048."""
        if m % SHARD_UNIT:
            raise ValueError(f"a shard of PackedBlocks holds a multiple of {SHARD_UNIT} elements, not {m}")
        return cls(torch.empty(shards, m + m // BLOCK, dtype=torch.uint8, device=device))

    @classmethod
    def zeros(cls, shards: int, m: int, device: torch.device | str) -> "PackedBlocks":
        """Like `empty`, but filled with zeros."""
        packed = cls.empty(shards, m, device)
        packed.data.zero_()
        return packed

    @functools.cached_property
    def payload(self) -> torch.Tensor:
        """(R, m) float8_e4m3fn, a view with the stride of `data`."""
        return self.data[:, : self._m].view(E4M3.dtype)

    @functools.cached_property
    def exponents(self) -> torch.Tensor:
        """(R, m/128) uint8, a view with the stride of `data`."""
        return self.data[:, self._m :]

    @property
    def numel(self) -> int:
        """R * m."""
        return self.data.shape[0] * self._m

    @property
    def _m(self) -> int:
        return self.data.shape[1] // (BLOCK + 1) * BLOCK

    def check_span(self, first: int, count: int) -> None:
        """ValueError unless the span consists of whole blocks that all lie in this tensor."""
        if first % BLOCK or count % BLOCK or not 0 <= first <= first + count <= self.numel:
            raise ValueError(
                f"a span of PackedBlocks begins and ends at multiples of {BLOCK} within {self.numel} elements, "
                f"not {count} from {first} on"
            )

    def _parts(self, first: int, count: int) -> Iterator[tuple[int, BlockScaled]]:
        """For each row that the span touches: the offset of its part in the span, and views of that part."""
        self.check_span(first, count)
        done = 0
        while done < count:
            row, start = divmod(first + done, self._m)
            length = min(count - done, self._m - start)
            yield done, BlockScaled(self.payload[row], self.exponents[row]).part(start, length)
            done += length

    def read(self, first: int, count: int) -> BlockScaled:
        """A contiguous copy of the elements first .. first + count - 1."""
        blocks = BlockScaled(self.payload.new_empty(count), self.exponents.new_empty(count // BLOCK))
        for at, mine in self._parts(first, count):
            copy = blocks.part(at, mine.payload.numel())
            copy.payload.copy_(mine.payload)
            copy.exponents.copy_(mine.exponents)
        return blocks

    def write(self, first: int, blocks: BlockScaled) -> None:
        """Copy `blocks` into the elements from `first` on."""
        for at, mine in self._parts(first, blocks.payload.numel()):
            given = blocks.part(at, mine.payload.numel())
            mine.payload.copy_(given.payload)
            mine.exponents.copy_(given.exponents)

    def clear(self, first: int, count: int) -> None:
        """Zero the elements first .. first + count - 1: every byte of their payload and exponents."""
        for _, mine in self._parts(first, count):
            mine.payload.view(torch.uint8).zero_()
            mine.exponents.zero_()

    def dequantize(self) -> torch.Tensor:
        """All values (R * m,) in float32, exactly payload * 2^(e - 127)."""
        payload = decode(self.payload).unflatten(1, (-1, BLOCK))
        return (payload * block_scales(self.exponents)[:, :, None]).flatten()
