"""Noise for stochastic rounding that needs no memory: a hash of (element index, two 32-bit seed words).

    x = index + s0                              all modulo 2^32, shifts logical
    x = (x ^ x >> 17) * 0xed5ad4bb
    x = (x ^ x >> 11 ^ s1) * 0xac4c1b51
    x = (x ^ x >> 15) * 0x31848bab
    noise = (x ^ x >> 14) >> 8, times 2^-24     float32, uniform on the grid of 2^-24 in [0, 1)

An element's noise depends on nothing but its index and the seed, so a kernel makes it where it needs it, a
run repeats itself, and any slice of it can be made alone. Every step is a bijection of the 32-bit integers:
over 2^32 consecutive indices each multiple of 2^-24 comes exactly 2^8 times. After 2^32 it repeats.

Why the second word enters between the multiplications. s0 alone only shifts the sequence: two seeds would give
the same noise, some elements apart. And why by exclusive or: an addition passes through the multiplication as a
constant, (x + s1) * c = x * c + s1 * c; an exclusive or adds or subtracts each bit as x has it. Words that differ
in one bit alone are still bad seeds (their noise is correlated), so the words come from `noise_seed`, which mixes
them well.

How good it is. Each element's noise is uniform, and independent of the same element's under other seeds and of that
of the elements at distances 1 .. 2^16 (every power of two, and four others), as far as correlation and a chi-square
of 16 x 16 cells tell (2^18 elements, 300 seeds; at worst 5.6 standard deviations off). That takes the third
multiplication: with two (lowbias32) 4 % of the seeds were more than 8 off at distance 1024, and 14 % at 3072.

Source: the constants and shifts are triple32's, C. Wellons, "Prospecting for hash functions", 2018, public domain
(nullprogram.com/blog/2018/07/31).
"""

import hashlib
import struct

import torch

# Two unsigned 32-bit words; or the same bits in a tensor (2,) int32, which is read when the noise is made.
type Seed = tuple[int, int] | torch.Tensor


def noise_seed(*parts: int) -> tuple[int, int]:
    """Two unsigned 32-bit words from integers of any size and number, in their order; TypeError or ValueError
    for what is no integer.

    The same on every machine. Parts that differ in anything give unrelated words (BLAKE2b).
    """
    text = ",".join(f"{part:d}" for part in parts)
    first, second = struct.unpack("<2I", hashlib.blake2b(text.encode(), digest_size=8).digest())
    return first, second


def uniform_noise(n: int, seed: Seed, device: torch.device | str = "cpu", first: int = 0) -> torch.Tensor:
    """Noise (n,) float32 in [0, 1) of the indices first .. first + n - 1, modulo 2^32.

    seed: from `noise_seed`.
    """
    # int32 arithmetic wraps as uint32's does, with the constants' two's complement; its >> copies the sign.
    x = (torch.arange(first, first + n, device=device) + seed[0]).to(torch.int32)
    x ^= (x >> 17) & 0x7FFF
    x *= 0xED5AD4BB - (1 << 32)
    x ^= (x >> 11) & 0x1FFFFF
    x ^= torch.as_tensor(seed[1]).to(torch.int32)
    x *= 0xAC4C1B51 - (1 << 32)
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x31848BAB
    x ^= (x >> 14) & 0x3FFFF
    return ((x >> 8) & 0xFFFFFF).float() * 2.0**-24
