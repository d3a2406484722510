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

Source: the block format follows OCP Microscaling (MX) v1.0, with 128 in place of 32 elements.
"""

from dataclasses import dataclass

import torch

from megatron_fp8.numerics.formats import decode

BLOCK = 128
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
