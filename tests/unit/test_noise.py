"""uniform_noise against its definition in plain integers, and statistical tests of the noise.

Unless a test says otherwise, its bound is at six standard errors or more: it fails by chance less than once in 10^7.
"""

import itertools
import math
import struct

import pytest
import torch

from megatron_fp8.numerics.noise import SeedBytes, noise_seed, uniform_noise

N = 1 << 18
ENDS = [(0, 0), (2**32 - 1, 2**32 - 1), (2**31, 2**31 - 1), (0, 1), (1, 0)]


@pytest.fixture
def run_seed():
    seed = torch.seed()
    print(f"run seed {seed}")  # shown when the test fails
    return seed


def hashed(index: int, seed: tuple[int, int]) -> float:
    x = (index + seed[0]) % 2**32
    x = (x ^ x >> 17) * 0xED5AD4BB % 2**32
    x = (x ^ x >> 11 ^ seed[1]) * 0xAC4C1B51 % 2**32
    x = (x ^ x >> 15) * 0x31848BAB % 2**32
    return ((x ^ x >> 14) >> 8) * 2.0**-24


def chi_square(counts: torch.Tensor) -> float:
    """The chi-square statistic of equally likely cells, as standard deviations from its mean."""
    expected = counts.sum().item() / counts.numel()
    degrees = counts.numel() - 1
    statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
    return (statistic - degrees) / math.sqrt(2 * degrees)


def standardised(noise: torch.Tensor) -> torch.Tensor:
    return (noise.double() - 0.5) * math.sqrt(12)


def test_a_seed_of_which_the_first_parts_are_hashed_before(run_seed):
    parts = *noise_seed(run_seed), 0, -3, 1 << 70
    for cut in range(1, len(parts)):
        begun = SeedBytes(*parts[:cut])
        for _ in range(2):
            assert struct.unpack("<2I", begun(*parts[cut:])) == noise_seed(*parts)


# uniform_noise


@pytest.mark.parametrize("first", [0, 5, 2**31 - 100, 2**32 - 100, 2**32, 2**33 + 7])
def test_every_element_is_the_hash_of_its_index(run_seed, first):
    for seed in [noise_seed(run_seed), *ENDS]:
        got = uniform_noise(300, seed, first=first)
        assert got.dtype == torch.float32 and got.shape == (300,)
        assert got.tolist() == [hashed(first + i, seed) for i in range(300)]


def test_a_slice_made_alone_has_the_noise_of_the_whole(run_seed):
    seed = noise_seed(run_seed)
    whole = uniform_noise(1000, seed)
    assert torch.equal(uniform_noise(1000, seed), whole)
    for cut in (1, 128, 999):
        parts = [uniform_noise(cut, seed), uniform_noise(1000 - cut, seed, first=cut)]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(uniform_noise(1000, seed, first=2**32), whole)
    assert uniform_noise(0, seed).shape == (0,)


def test_uniform(run_seed):
    for i in range(8):
        noise = uniform_noise(N, noise_seed(run_seed, i))
        assert noise.min() >= 0 and noise.max() < 1
        z = standardised(noise)
        assert abs(z.mean()) < 6 / math.sqrt(N)
        assert abs(z.square().mean() - 1) < 6 * math.sqrt(0.8 / N)  # the variance of z^2 is 9/5 - 1
        codes = (noise * 2**24).int()
        assert torch.equal(codes.float() * 2.0**-24, noise)
        for shift in (0, 8, 16):  # low, middle and high bits
            assert abs(chi_square(torch.bincount(codes >> shift & 255, minlength=256))) < 8


def pairs_chi_square(a: torch.Tensor, b: torch.Tensor) -> float:
    return chi_square(torch.bincount((a * 16).int() * 16 + (b * 16).int(), minlength=256))


def test_elements_at_a_distance_are_independent(run_seed):
    """With two multiplications instead of three, distance 3072 would fail for one seed in seven."""
    for i in range(16):
        noise = uniform_noise(N, noise_seed(run_seed, i))
        z = standardised(noise)
        for distance in (3, 127, 1000, 3072, *(1 << k for k in range(17))):
            assert abs((z[distance:] * z[:-distance]).mean()) < 6.5 / math.sqrt(N)
            assert abs(pairs_chi_square(noise[distance:], noise[:-distance])) < 10


def strongest_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest correlation over all cyclic shifts of b against a, in standard errors."""
    products = torch.fft.irfft(torch.fft.rfft(standardised(a)) * torch.fft.rfft(standardised(b)).conj(), n=len(a))
    return products.abs().max().item() / math.sqrt(len(a))


def test_neighbouring_seeds_are_independent(run_seed):
    n, steps = 1 << 16, 40
    noise = torch.stack([uniform_noise(n, noise_seed(run_seed, step)) for step in range(steps)])
    correlations = standardised(noise) @ standardised(noise).t() / math.sqrt(n)  # in standard errors
    assert correlations.fill_diagonal_(0).abs().max() < 6.5
    for a, b in itertools.pairwise(noise):
        assert strongest_correlation(a, b) < 8
        assert abs(pairs_chi_square(a, b)) < 8
    shifted = uniform_noise(n, noise_seed(run_seed, 0), first=1000)
    assert strongest_correlation(noise[0], shifted) > 100


def test_the_second_word_alone_makes_other_noise(run_seed):
    """The noise is no shifted copy, and no copy with a constant added modulo 1 (which adding the word would give)."""
    n = 1 << 16
    first = noise_seed(run_seed)[0]
    noise = [uniform_noise(n, (first, noise_seed(run_seed, i)[1])) for i in range(20)]
    for a, b in itertools.pairwise(noise):
        differences = torch.bincount(((a - b) % 1 * 64).int().clamp(max=63), minlength=64)
        assert abs(chi_square(differences)) < 10
        assert abs(pairs_chi_square(a, b)) < 10
        assert strongest_correlation(a, b) < 8  # a copy has 256


# noise_seed


def test_noise_seed_is_the_same_everywhere():
    assert noise_seed(1, 2, 3) == (272184802, 706486128)
    assert noise_seed(True, 2, torch.tensor(3)) == noise_seed(1, 2, 3)


def test_noise_seed_tells_all_parts_apart():
    parts = [(), (0,), (0, 0), (1,), (-1,), (1, 2), (2, 1), (12,), (1, 23), (12, 3), (2**32,), (2**64,), (10**40,)]
    words = [noise_seed(*part) for part in parts]
    assert len(set(words)) == len(words)
    assert all(0 <= word < 2**32 for pair in words for word in pair)


@pytest.mark.parametrize("wrong", [1.0, "1", None])
def test_noise_seed_takes_integers_only(wrong):
    with pytest.raises((ValueError, TypeError)):
        noise_seed(1, wrong)


def test_noise_seed_mixes_consecutive_parts(run_seed):
    count = 4096
    for position in range(3):
        seeds = [noise_seed(*(i if p == position else run_seed for p in range(3))) for i in range(count)]
        words = torch.tensor(seeds)
        for column in words.t():
            assert column.unique().numel() >= count - 3  # 2^23 pairs, each equal with probability 2^-32
        bits = (words[:, :, None] >> torch.arange(32) & 1).view(count, 64)
        bound = 6.5 * 0.5 / math.sqrt(count)
        assert (bits.double().mean(0) - 0.5).abs().max() < bound
        flips = bits[1:] ^ bits[:-1]
        assert (flips.double().mean(0) - 0.5).abs().max() < bound
