"""Formats and rounding in exact fractions, from their definitions, for tests to compare with."""

import bisect
import itertools
import math
from fractions import Fraction
from functools import cache

import torch

from megatron_fp8.numerics import E4M3, E5M2, Format

E2M1 = Format("e2m1", 2, 1, bias=1, max=6.0, has_infinity=False)
E3M2 = Format("e3m2", 3, 2, bias=3, max=28.0, has_infinity=False)
LARGE_E4M3 = Format("large", 4, 3, bias=-2, max=2.0**17 * 1.75, has_infinity=False)
SMALL_E4M3 = Format("small", 4, 3, bias=127, max=2.0**-112 * 1.75, has_infinity=True)
FP16 = Format("fp16", 5, 10, bias=15, max=65504.0, has_infinity=True, dtype=torch.float16)
BF16 = Format("bf16", 8, 7, bias=127, max=2.0**127 * (2 - 2**-7), has_infinity=True, dtype=torch.bfloat16)
NARROW_FORMATS = [E4M3, E5M2, E2M1, E3M2, LARGE_E4M3, SMALL_E4M3]

INF, NAN = math.inf, math.nan


@cache
def magnitudes(fmt: Format) -> list[Fraction]:
    """All finite values >= 0 of `fmt`, ascending. A value's index is its code."""
    steps = 2**fmt.mantissa_bits
    subnormals = [Fraction(m, steps) * Fraction(2) ** (1 - fmt.bias) for m in range(steps)]
    normals = [
        Fraction(steps + m, steps) * Fraction(2) ** (e - fmt.bias)
        for e in range(1, 2**fmt.exponent_bits)
        for m in range(steps)
    ]
    return [value for value in subnormals + normals if value <= Fraction(fmt.max)]


def neighbours(x: float | Fraction, fmt: Format) -> tuple[int, Fraction]:
    """For finite x: (index of the largest magnitude <= |x|, |x|'s position between it and the next one, 0 .. 1)."""
    grid, magnitude = magnitudes(fmt), abs(Fraction(x))
    low = bisect.bisect_right(grid, magnitude) - 1
    if low == len(grid) - 1:
        return low, Fraction(0)  # at the maximum, or beyond it: saturated
    return low, (magnitude - grid[low]) / (grid[low + 1] - grid[low])


def rounded(x: float | Fraction, fmt: Format, mode: str = "nearest", noise: float = 0.0) -> float:
    """round_to_format for one finite x, by the definition."""
    low, fraction = neighbours(x, fmt)
    if mode == "nearest":
        up = fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and low % 2 == 1)  # a tie at an odd code
    elif mode == "stochastic":
        up = Fraction(noise) < fraction
    else:
        up = False
    return math.copysign(float(magnitudes(fmt)[low + up]), x)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and bits are equal; all NaNs count as equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.double(), b.double()
    nan = a.isnan() & b.isnan()
    return bool((nan | ((a == b) & (a.signbit() == b.signbit()))).all())


def random_floats(n: int, generator: torch.Generator) -> torch.Tensor:
    """n float32 with uniformly random bits: every exponent, denormals, infinities and NaN."""
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def edges(fmt: Format) -> torch.Tensor:
    """Every value of `fmt`, every midpoint, and their float32 neighbours, with both signs."""
    grid = [float(value) for value in magnitudes(fmt)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(grid)]
    points = torch.tensor(grid + middles, dtype=torch.float64)
    points = torch.cat([points.float(), torch.tensor([fmt.max * 1.01, 3.4e38, 2.0**-149, 2.0**-127])])
    up, down = torch.tensor(INF), torch.tensor(-INF)
    points = torch.cat([points, points.nextafter(up), points.nextafter(down)])
    points = points[points.isfinite()]
    return torch.cat([points, -points])
