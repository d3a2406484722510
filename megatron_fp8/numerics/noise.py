"""Noise for stochastic rounding, as a hash of the element's index and two 32-bit seed words; it needs no memory.

    x = index + s0                              all modulo 2^32, shifts logical
    x = (x ^ x >> 17) * 0xed5ad4bb
    x = (x ^ x >> 11 ^ s1) * 0xac4c1b51
    x = (x ^ x >> 15) * 0x31848bab
    noise = (x ^ x >> 14) >> 8, times 2^-24     float32, uniform on the grid of 2^-24 in [0, 1)

An element's noise depends only on its index and the seed. So a kernel computes it in registers, a run is repeatable,
and any slice can be computed alone. Every step is a bijection of the 32-bit integers: over 2^32 consecutive indices
each multiple of 2^-24 occurs exactly 2^8 times. After 2^32 indices the noise repeats.

The second word enters between the multiplications because s0 alone only shifts the sequence: two seeds would give the
same noise, some elements apart. It enters by exclusive or because an addition would pass through the multiplication as
a constant, (x + s1) * c = x * c + s1 * c; an exclusive or adds or subtracts each bit, depending on x. Words that
differ in a single bit are still bad seeds (their noise is correlated), so the words come from `noise_seed`, which mixes
them well.

Quality: an element's noise is uniform, and independent of the same element's noise with other seeds and of the noise
at distances 1 .. 2^16 (every power of two, and four others), as far as correlation and a chi-square of 16 x 16 cells
tell (2^18 elements, 300 seeds; at worst 5.6 standard deviations off). This needs the third multiplication: with two
(lowbias32), 4 % of the seeds were more than 8 standard deviations off at distance 1024, and 14 % at 3072.

Source: the constants and shifts are triple32's, C. Wellons, "Prospecting for hash functions", 2018, public domain
(nullprogram.com/blog/2018/07/31).
"""

import hashlib
import struct

import torch

# Two unsigned 32-bit words; or the same bits in a tensor (2,) int32, which is read when the noise is computed. An
# operation on several tensors at once takes one for each, (E, 2) int32.
type Seed = tuple[int, int] | torch.Tensor


def noise_seed(*parts: int) -> tuple[int, int]:
    """Hash any number of integers of any size, in order, to two unsigned 32-bit words (BLAKE2b).

    The words are the same on every machine; any difference in `parts` gives unrelated words. TypeError or ValueError
    if a part is not an integer.
    """
    text = ",".join(f"{part:d}" for part in parts)
    first, second = struct.unpack("<2I", hashlib.blake2b(text.encode(), digest_size=8).digest())
    return first, second


class SeedBytes:
    """Called with the rest of some parts: the 8 bytes of `noise_seed`'s words, little-endian.

    first: the parts that come before. They are hashed once, so that a call takes a quarter of noise_seed's time.
    """

    def __init__(self, *first: int):
        self._begun = hashlib.blake2b("".join(f"{part:d}," for part in first).encode(), digest_size=8)

    def __call__(self, *rest: int) -> bytes:
        whole = self._begun.copy()
        whole.update(",".join(map(str, rest)).encode())
        return whole.digest()


def uniform_noise(n: int, seed: Seed, device: torch.device | str = "cpu", first: int = 0) -> torch.Tensor:
    """Noise (n,) float32 in [0, 1) for the indices first .. first + n - 1, modulo 2^32.

    seed: from `noise_seed`.
    """
    # int32 wraps like uint32 if the constants are in two's complement; its >> copies the sign, hence the masks.
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
