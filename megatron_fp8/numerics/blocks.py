"""BlockScaled: E4M3 with one power-of-two scale for every 128 consecutive elements; what is stored or sent.

    x[i] ~ payload[i] * 2^(exponents[i // 128] - 127)

payload float8_e4m3fn (n,), exponents uint8 (n/128,) in E8M0 (a bare biased exponent): 1 + 1/128 bytes a
value. The exponent is the smallest e in -127 .. 120 with max|block| <= 448 * 2^e, so that

- nothing saturates: max|block| lies in (224, 448] * 2^e (or lower, where e is held at -127);
- scaling is exact, and so the error is E4M3's alone: relative 2^-4 for |x| >= 2^-6 * 2^e, else absolute
  2^-10 * 2^e, which is < 2^-17 * max|block| unless e is held at -127;
- no number but the block's own decides its bytes: a shard cut at a block boundary has the bytes of the whole;
- quantising what was dequantised gives the same values. (The same bytes too, but for one case: a maximum in
  (224, 232] * 2^e rounds to 224 * 2^e, and the second time is written as 448 * 2^(e-1), all other payloads
  doubled with it. From then on the bytes stay.)

A block of zeros has exponent byte 0. An infinity or a NaN becomes a NaN payload, which no exponent can
undo; such a block's exponent is 120, so its finite neighbours come back coarse or zero (the step is lost in
any case). Ends of float32: |x| >= 248 * 2^120 = 3.3e38 rounds to 2^128, which is infinity when dequantised;
at e = -127 the smallest step is 2^-136, so float32's denormals of at most half of that become zero.

PackedBlocks: the same bytes for R shards of m elements each, in one tensor, a shard a row, so that one collective
sends payload and exponents together:

    row j      payload of shard j, m bytes | its exponents, m/128 bytes        element e of all lies in row e // m

m is a multiple of 2048: then m/128 is one of 16, every row starts at a multiple of 16 bytes from the first, and
kernels read and write whole 16-byte vectors in each.

RowBlocks: a matrix in the same form, a block within a row: the last of a row may be shorter than 128.

Source: the block format follows OCP Microscaling (MX) v1.0, with 128 in place of 32 elements.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .formats import E4M3, decode

BLOCK = 128
SHARD_UNIT = 16 * BLOCK  # elements whose exponents fill 16 bytes
_TWO_TO_MINUS_127 = 0x00400000  # float32 writes it as a denormal, every higher power as its exponent field


def block_scales(exponents: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) as float32, exactly, of uint8 E8M0 bytes (any shape); byte 255 gives infinity."""
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
        """Views of `count` elements from element `first` on, both multiples of 128."""
        stop = first + count
        return BlockScaled(self.payload[first:stop], self.exponents[first // BLOCK : stop // BLOCK])


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """payload (M, K) float8_e4m3fn and exponents (M, ceil(K / 128)) uint8, biased by 127."""

    payload: torch.Tensor
    exponents: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device | str) -> "RowBlocks":
        """Unwritten."""
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

    Elements are counted through the shards, 0 .. R * m - 1. Spans of them, given as `first` and `count`, are
    multiples of 128 and may cross rows; ValueError for others, and for what lies outside.
    """

    data: torch.Tensor

    @classmethod
    def empty(cls, shards: int, m: int, device: torch.device | str) -> "PackedBlocks":
        """`shards` shards of m elements, unwritten; ValueError unless m is a multiple of 2048."""
        if m % SHARD_UNIT:
            raise ValueError(f"a shard of PackedBlocks holds a multiple of {SHARD_UNIT} elements, not {m}")
        return cls(torch.empty(shards, m + m // BLOCK, dtype=torch.uint8, device=device))

    @classmethod
    def zeros(cls, shards: int, m: int, device: torch.device | str) -> "PackedBlocks":
        """As `empty`, of zeros."""
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
        """ValueError unless `count` elements from `first` on are whole blocks, all of them here."""
        if first % BLOCK or count % BLOCK or not 0 <= first <= first + count <= self.numel:
            raise ValueError(
                f"a span of PackedBlocks is made of multiples of {BLOCK} within {self.numel} elements, "
                f"not {count} from {first} on"
            )

    def _parts(self, first: int, count: int) -> Iterator[tuple[int, BlockScaled]]:
        """For each row that the span touches: where in the span its part begins, and views of that part."""
        self.check_span(first, count)
        done = 0
        while done < count:
            row, start = divmod(first + done, self._m)
            length = min(count - done, self._m - start)
            yield done, BlockScaled(self.payload[row], self.exponents[row]).part(start, length)
            done += length

    def read(self, first: int, count: int) -> BlockScaled:
        """A contiguous copy of `count` elements from element `first` on."""
        blocks = BlockScaled(self.payload.new_empty(count), self.exponents.new_empty(count // BLOCK))
        for at, mine in self._parts(first, count):
            copy = blocks.part(at, mine.payload.numel())
            copy.payload.copy_(mine.payload)
            copy.exponents.copy_(mine.exponents)
        return blocks

    def write(self, first: int, blocks: BlockScaled) -> None:
        """Copy `blocks` to the elements from `first` on."""
        for at, mine in self._parts(first, blocks.payload.numel()):
            given = blocks.part(at, mine.payload.numel())
            mine.payload.copy_(given.payload)
            mine.exponents.copy_(given.exponents)

    def clear(self, first: int, count: int) -> None:
        """Make zeros of `count` elements from `first` on: every byte of their payload and exponents."""
        for _, mine in self._parts(first, count):
            mine.payload.view(torch.uint8).zero_()
            mine.exponents.zero_()

    def dequantize(self) -> torch.Tensor:
        """All values (R * m,) in float32, exactly payload * 2^(e - 127)."""
        payload = decode(self.payload).unflatten(1, (-1, BLOCK))
        return (payload * block_scales(self.exponents)[:, :, None]).flatten()
