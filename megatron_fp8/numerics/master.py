"""How an optimizer's states are stored in fewer bytes: FP16 in blocks, and the low half of the master weight.

Block16: FP16 with one power-of-two scale for every 128 elements; 2 + 1/128 bytes a value.

    x[i] ~ payload[i] * 2^(exponents[i // 128] - 127)

The exponent is the smallest e in -127 .. 113 with max|block| <= 65504 * 2^e, 65504 = (2 - 2^-10) * 2^15 being FP16's
maximum. So nothing overflows: max|block| lies in (32752, 65504] * 2^e (lower where e is held at -127), and the error
is FP16's alone: relative 2^-11 for |x| >= 2^-14 * 2^e, else absolute 2^-25 * 2^e, which is < 2^-39 * max|block| (none
at e = -127, where float32 ends before FP16 does). An infinity or a NaN stays one, and its block's exponent is 113.
|x| >= 32760 * 2^113 = 3.4e38 rounds to 2^128, which is infinite when dequantised.

BlockScaled of sqrt(v): Adam's v is a mean of squares, whose range in octaves is twice the gradients'. BlockScaled has
its relative error 2^-4 down to 2^-6 / 224 > 2^-14 of a block's maximum, and zeros from 2^-10 / 224 > 2^-18 downwards.
Stored as its root, v has a relative error of at most (1 + 2^-4)^2 - 1 = 2^-3 + 2^-8 down to 2^-27 of its maximum, and
becomes zero only below 2^-35 of it.

Rounding to nearest loses a change of less than half an ulp. As parts of the stored value x, the largest change that may
be lost (the smallest is half of it) and what Adam asks for in a step, lr / |w| for weights, 1 - beta for averages:

    BlockScaled 2^-4    BF16 2^-8    Block16 2^-11    remainder to E4M3 2^-20    FP32, remainder to BF16 2^-24

So BF16 and Block16 masters stand still at usual learning rates. And a v that is stored as BlockScaled grows but does
not decay when beta2 >= 0.94 (sqrt(beta2) is then within half an ulp of 1); as Block16 it decays for beta2 <= 0.9995.

Remainder: the forward pass holds a rounded copy of every master weight. What the rounding dropped, 16 bits, is all
that needs to be stored beside it.

BF16 weight, the top half of an FP32 with what is nearest:

    weight = (bits(master) + 2^15) >> 16        remainder = bits(master) - (weight << 16)      in -2^15 .. 2^15 - 1

Nearest, ties away from zero. Exact for every finite master, also where the weight rounds up to infinity (remainder
< 0), and for infinities (remainder 0). NaN: weight NaN, remainder 0.

E4M3 weight with a power-of-two scale s, y = master * s:

    w8 = E4M3(y)        ulp = 2^(max(floor(log2|w8|), -6) - 3)        remainder = round((y - w8) / (ulp * 2^-16))
    master ~ (w8 + remainder * ulp * 2^-16) / s

|y - w8| <= ulp / 2, and y - w8 is exact, for y is within a factor of two of w8, or w8 is zero. The remainder is held
within +-(2^15 - 1), so that its y rounds to its own w8: what was decoded is encoded again as it was (but for the sign
of a zero). The error is at most ulp * 2^-17, or ulp * 2^-16 at that limit, half an ulp from w8; in |y| >= 2^-6, where
every binade has w8 = 8 .. 15 ulp, that far lies only |y| >= 8.5 ulp (8 ulp's lower neighbour is 7.5 ulp). So, of y,

    |error| <= 2^-16 / 8.5 |y| < 2^-19 |y|      at least 19 significant bits, for |y| >= 2^-6
    |error| <= 2^-9 * 2^-16 = 2^-25             below

Decoding is exact: w8 + remainder * ulp * 2^-16 has at most 20 bits, and 1 / s is a power of two. Another power of two
for s moves ulp and y alike: encoding again loses nothing where |y| >= 2^-6 with both, and never more than the bounds.
|y| <= 464 is the range (448 and half an ulp): beyond it the pair saturates, at 464 - 2^-11. NaN, infinities, and
y beyond float32 have the weight NaN and the remainder 0.

Source: splitting an FP32 master into BF16 and 16 bits is known from Apex's distributed Adam (store_param_remainders).
"""

from dataclasses import dataclass

import torch

from .blocks import BLOCK, block_scales
from .formats import E4M3, decode, encode

_LARGEST_REMAINDER = 2**15 - 1


@dataclass
class Block16:
    """payload (n,) float16 and exponents (n/128,) uint8, biased by 127; n is a multiple of 128."""

    payload: torch.Tensor
    exponents: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """The values (n,) in float32, exactly payload * 2^(e - 127) for what `quantize_block16` made."""
        return (self.payload.float().view(-1, BLOCK) * block_scales(self.exponents)[:, None]).view(-1)

    def part(self, first: int, count: int) -> "Block16":
        """Views of `count` elements from element `first` on, both multiples of 128."""
        stop = first + count
        return Block16(self.payload[first:stop], self.exponents[first // BLOCK : stop // BLOCK])


def quantize_block16(x: torch.Tensor) -> Block16:
    """Block16 of x (n,), n a multiple of 128 (else ValueError), any float type, rounded to nearest even."""
    if x.dim() != 1 or x.numel() % BLOCK:
        raise ValueError(f"quantize_block16 takes (n,), n a multiple of {BLOCK}, not {tuple(x.shape)}")
    blocks = x.float().view(-1, BLOCK)
    # As in quantize_blocks; the sum carries into the exponent where the significand is above 65504's, 2 - 2^-10.
    largest = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1).clamp(max=0x7F800000)
    byte = (((largest + 0x1FFF) >> 23) - 15).clamp_(min=0)
    inverse = ((254 - byte) << 23).view(torch.float32)
    return Block16((blocks * inverse[:, None]).view(-1).half(), byte.to(torch.uint8))


def split_bf16(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight (bfloat16) and the remainder (int16) of `master` (float32), all of one shape."""
    bits = master.view(torch.int32)
    top = (bits + 0x8000) >> 16
    nan = master.isnan()
    top, remainder = top.masked_fill(nan, 0x7FFF), (bits - (top << 16)).masked_fill(nan, 0)
    return top.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join_bf16(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The master (float32) that `split_bf16` split, bit for bit but for NaN's payload."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def _unit(weight: torch.Tensor) -> torch.Tensor:
    """What a remainder of 1 is worth beside an E4M3 weight: its ulp * 2^-16, as float32."""
    binade = ((weight.view(torch.uint8).int() >> 3) & 15).clamp(min=1)  # biased by 7; subnormals have binade 1's ulp
    return ((binade + (127 - 7 - 3 - 16)) << 23).view(torch.float32)


def split_e4m3(master: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight (float8_e4m3fn) of `scale` (0-d float32, a power of two) and the remainder (int16) of `master`
    (float32), all of one shape."""
    scaled = master * scale
    weight = encode(scaled, E4M3)
    remainder = ((scaled - decode(weight)) / _unit(weight)).round_().clamp_(-_LARGEST_REMAINDER, _LARGEST_REMAINDER)
    return weight, remainder.nan_to_num_(nan=0.0).to(torch.int16)


def join_e4m3(weight: torch.Tensor, remainder: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """The master (float32) of an E4M3 weight, its remainder, and 1 / scale (0-d float32, a power of two)."""
    return (decode(weight) + remainder.float() * _unit(weight)) * scale_inv
