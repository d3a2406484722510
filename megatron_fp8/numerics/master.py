"""Formats that store an optimizer's states in fewer bytes: FP16 in blocks, and a 16-bit remainder of the master weight.

Block16 is FP16 with one power-of-two scale for every 128 elements; 2 + 1/128 bytes a value.

    x[i] ~ payload[i] * 2^(exponents[i // 128] - 127)

The exponent is the smallest e in -127 .. 113 with max|block| <= 65504 * 2^e; 65504 = (2 - 2^-10) * 2^15 is FP16's
maximum. So nothing overflows: max|block| lies in (32752, 65504] * 2^e (or lower, if e is held at -127). FP16's rounding
is the only error: relative 2^-11 for |x| >= 2^-14 * 2^e, else absolute 2^-25 * 2^e, which is < 2^-39 * max|block| (no
error at e = -127, because float32's range ends before FP16's). An infinity or a NaN stays one, and its block's exponent
is 113. |x| >= 32760 * 2^113 = 3.4e38 rounds to 2^128, which is infinite when dequantised.

Adam's v may be stored as BlockScaled of sqrt(v). v is a mean of squares, so its range in octaves is twice the
gradients'. BlockScaled keeps its relative error of 2^-4 down to 2^-6 / 224 > 2^-14 of a block's maximum, and rounds to
zero from 2^-10 / 224 > 2^-18 downwards. If the root is stored, v has a relative error of at most
(1 + 2^-4)^2 - 1 = 2^-3 + 2^-8 down to 2^-27 of its maximum, and becomes zero only below 2^-35 of it.

Rounding to nearest loses a change of less than half an ulp. In one step Adam changes a weight by lr / |w| of itself,
and an average by 1 - beta. The largest relative change that a format may lose (the smallest is half of it):

    BlockScaled 2^-4    BF16 2^-8    Block16 2^-11    remainder to E4M3 2^-20    FP32, remainder to BF16 2^-24

So BF16 and Block16 masters do not move at usual learning rates. A v that is stored as BlockScaled grows but does not
decay if beta2 >= 0.94 (sqrt(beta2) is then within half an ulp of 1); stored as Block16 it decays for beta2 <= 0.9995,
and too slowly from 0.998 on. So Adam rounds a slow v by a draw (ops/adam.py).

Remainder. The forward pass holds a rounded copy of every master weight. It is enough to store beside it the 16 bits
that the rounding dropped.

A BF16 weight is the top half of an FP32, rounded to nearest, ties away from zero:

    weight = (bits(master) + 2^15) >> 16        remainder = bits(master) - (weight << 16)      in -2^15 .. 2^15 - 1

The pair is exact for every finite master, even if the weight rounds up to infinity (remainder < 0), and for infinities
(remainder 0). A NaN gives weight NaN, remainder 0.

An E4M3 weight has a power-of-two scale s; with y = master * s:

    w8 = E4M3(y)        ulp = 2^(max(floor(log2|w8|), -6) - 3)        remainder = round((y - w8) / (ulp * 2^-16))
    master ~ (w8 + remainder * ulp * 2^-16) / s

|y - w8| <= ulp / 2. The difference y - w8 is exact, because y is within a factor of two of w8, or w8 is zero. The
remainder is held within +-(2^15 - 1), so that the decoded y rounds to w8 again: encoding a decoded master gives the
same pair (except for the sign of a zero). The error is at most ulp * 2^-17, or ulp * 2^-16 if the remainder is held at
its limit, half an ulp from w8. In |y| >= 2^-6 every binade has w8 = 8 .. 15 ulp, and only |y| >= 8.5 ulp lies half an
ulp from w8 (the lower neighbour of 8 ulp is 7.5 ulp). So the error of y is

    |error| <= 2^-16 / 8.5 |y| < 2^-19 |y|      at least 19 significant bits, for |y| >= 2^-6
    |error| <= 2^-9 * 2^-16 = 2^-25             below

Decoding is exact: w8 + remainder * ulp * 2^-16 has at most 20 bits, and 1 / s is a power of two. Encoding again with
another power of two s scales ulp and y alike: it loses nothing if |y| >= 2^-6 with both scales, and never more than the
bounds. The range is |y| <= 464 (448 and half an ulp): beyond it the pair saturates, at 464 - 2^-11. NaN, an infinity,
or a y beyond float32 gives weight NaN, remainder 0.

Source: Apex's distributed Adam splits an FP32 master into BF16 and 16 bits (store_param_remainders).
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
        """The values (n,) in float32, exactly payload * 2^(e - 127) if `quantize_block16` made them."""
        return (self.payload.float().view(-1, BLOCK) * block_scales(self.exponents)[:, None]).view(-1)

    def part(self, first: int, count: int) -> "Block16":
        """Views of the elements first .. first + count - 1; `first` and `count` are multiples of 128."""
        stop = first + count
        return Block16(self.payload[first:stop], self.exponents[first // BLOCK : stop // BLOCK])


def quantize_block16(x: torch.Tensor) -> Block16:
    """Quantise x (n,), n a multiple of 128 (else ValueError), of any float type, rounding to nearest even."""
    if x.dim() != 1 or x.numel() % BLOCK:
        raise ValueError(f"quantize_block16 takes (n,), n a multiple of {BLOCK}, not {tuple(x.shape)}")
    blocks = x.float().view(-1, BLOCK)
    # As in quantize_blocks; the sum carries into the exponent if the significand is above 65504's, 2 - 2^-10.
    largest = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1).clamp(max=0x7F800000)
    byte = (((largest + 0x1FFF) >> 23) - 15).clamp_(min=0)
    inverse = ((254 - byte) << 23).view(torch.float32)
    return Block16((blocks * inverse[:, None]).view(-1).half(), byte.to(torch.uint8))


def split_bf16(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split `master` (float32) into the weight (bfloat16) and the remainder (int16), all of one shape."""
    bits = master.view(torch.int32)
    top = (bits + 0x8000) >> 16
    nan = master.isnan()
    top, remainder = top.masked_fill(nan, 0x7FFF), (bits - (top << 16)).masked_fill(nan, 0)
    return top.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join_bf16(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The master (float32) that `split_bf16` split, bit for bit except for NaN's payload."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def _unit(weight: torch.Tensor) -> torch.Tensor:
    """The value of a remainder of 1 beside an E4M3 weight: the weight's ulp * 2^-16, as float32."""
    binade = ((weight.view(torch.uint8).int() >> 3) & 15).clamp(min=1)  # biased by 7; subnormals have binade 1's ulp
    return ((binade + (127 - 7 - 3 - 16)) << 23).view(torch.float32)


def split_e4m3(master: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split `master` (float32) into the weight (float8_e4m3fn) and the remainder (int16), all of one shape.

    scale: the weight's, 0-d float32, a power of two.
    """
    scaled = master * scale
    weight = encode(scaled, E4M3)
    remainder = ((scaled - decode(weight)) / _unit(weight)).round_().clamp_(-_LARGEST_REMAINDER, _LARGEST_REMAINDER)
    return weight, remainder.nan_to_num_(nan=0.0).to(torch.int16)


def join_e4m3(weight: torch.Tensor, remainder: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """The master (float32) of an E4M3 weight, its remainder, and 1 / scale (0-d float32, a power of two)."""
    return (decode(weight) + remainder.float() * _unit(weight)) * scale_inv
