"""round_to_format against exact fractions, for formats that torch has and others."""

import pytest
import torch
from exact import (
    BF16,
    FP16,
    INF,
    NAN,
    NARROW_FORMATS,
    edges,
    magnitudes,
    neighbours,
    random_floats,
    rounded,
    same,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.numerics import E4M3, E5M2, round_to_format

MODES = ["nearest", "stochastic", "truncate"]
narrow = pytest.mark.parametrize("fmt", NARROW_FORMATS, ids=lambda fmt: fmt.name)
every_mode = pytest.mark.parametrize("mode", MODES)
finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
unit_noise = st.integers(0, 2**24 - 1).map(lambda k: k * 2.0**-24)  # the grid of torch.rand


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference(x: torch.Tensor, fmt, mode: str, noise: torch.Tensor) -> torch.Tensor:
    pairs = zip(x.tolist(), noise.tolist(), strict=True)
    return torch.tensor([rounded(value, fmt, mode, u) for value, u in pairs])


@narrow
@every_mode
def test_every_value_midpoint_and_their_neighbours(fmt, mode):
    x = edges(fmt)
    noise = torch.rand(x.shape, generator=generator())
    assert same(round_to_format(x, fmt, mode, noise), reference(x, fmt, mode, noise))


@narrow
@every_mode
def test_random_bits(fmt, mode):
    x = random_floats(2000, generator())
    x = x[x.isfinite()]
    noise = torch.rand(x.shape, generator=generator(2))
    assert same(round_to_format(x, fmt, mode, noise), reference(x, fmt, mode, noise))


@settings(max_examples=300, deadline=None)
@given(finite_floats, unit_noise, st.sampled_from(NARROW_FORMATS), st.sampled_from(MODES))
def test_any_float(x, noise, fmt, mode):
    got = round_to_format(torch.tensor([x]), fmt, mode, torch.tensor([noise]))
    assert same(got, torch.tensor([rounded(x, fmt, mode, noise)]))


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=lambda fmt: fmt.name)
def test_nearest_is_torchs_cast_unless_it_overflows(fmt):
    x = random_floats(1 << 18, generator())
    scaled = torch.randn(1 << 18, generator=generator()) * fmt.max / 8  # random bits are seldom in range
    x = torch.cat([x, scaled, scaled * 2.0**-8, scaled * fmt.smallest_subnormal / fmt.max * 16])
    cast = x.to(fmt.dtype)
    in_range = ~x.isfinite() | (x.abs() <= fmt.max)
    assert in_range.sum() > x.numel() / 4
    got = round_to_format(x, fmt)
    assert same(got.to(fmt.dtype)[in_range], cast[in_range])
    assert same(got.to(fmt.dtype).float(), got)  # the results are values of the format
    beyond = x.isfinite() & (x.abs() > fmt.max)
    assert same(got[beyond], fmt.max * x[beyond].sign())


@narrow
@every_mode
def test_values_of_the_format_are_left_alone_for_any_noise(fmt, mode):
    values = torch.tensor([float(value) for value in magnitudes(fmt)])
    values = torch.cat([values, -values])
    for noise in (0.0, 0.5, 1 - 2.0**-24):
        assert same(round_to_format(values, fmt, mode, torch.full_like(values, noise)), values)


@every_mode
def test_not_finite_stays_visible(mode):
    x = torch.tensor([INF, -INF, NAN, -NAN])
    noise = torch.zeros(4)
    assert same(round_to_format(x, E5M2, mode, noise), torch.tensor([INF, -INF, NAN, NAN]))
    assert same(round_to_format(x, E4M3, mode, noise), torch.tensor([NAN, NAN, NAN, NAN]))


@every_mode
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_finite_saturates(fmt, mode):
    x = torch.tensor([fmt.max, fmt.max * 1.001, fmt.max * 1.2, 3.4e38])
    x = torch.cat([x, -x])
    assert same(round_to_format(x, fmt, mode, torch.zeros(8)), fmt.max * x.sign())


@narrow
def test_truncate_goes_toward_zero_and_less_than_a_step(fmt):
    x = edges(fmt)
    x = x[x.abs() <= fmt.max]
    got = round_to_format(x, fmt, "truncate")
    assert (got.abs() <= x.abs()).all() and (got.signbit() == x.signbit()).all()
    assert (got.abs() < x.abs()).any()
    for value, low in zip(x.tolist(), got.tolist(), strict=True):
        assert abs(low) == magnitudes(fmt)[neighbours(value, fmt)[0]]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(
    "x", [17.3, -0.99, 200.01, 2.0**-17 * 1.9, -(2.0**-9) * 0.3, 2.0**-6 * 0.999, 1.03], ids=str
)
def test_stochastic_is_unbiased_and_yields_only_the_two_neighbours(fmt, x):
    n = 200_000
    many = torch.full((n,), x)
    got = round_to_format(many, fmt, "stochastic", torch.rand(n, generator=generator()))
    x = many[0].item()  # as float32
    low, fraction = neighbours(x, fmt)
    allowed = {float(value) for value in magnitudes(fmt)[low : low + 2]}
    assert set(got.abs().tolist()) <= allowed
    assert bool((got.signbit() == (x < 0)).all())
    p, step = float(fraction), max(allowed) - min(allowed)
    five_sigma = 5 * step * (p * (1 - p) / n) ** 0.5
    assert 0 < five_sigma < step * min(p, 1 - p)  # rounding always down or always up would fail
    assert abs(got.double().mean().item() - x) <= five_sigma


def test_stochastic_is_reproducible_from_its_noise():
    x = torch.randn(1000, generator=generator())
    noise = torch.rand(1000, generator=generator(2))
    first = round_to_format(x, E4M3, "stochastic", noise)
    assert same(first, round_to_format(x, E4M3, "stochastic", noise))
    assert not same(first, round_to_format(x, E4M3, "stochastic", noise.flip(0)))


def test_shapes_views_and_the_input_left_alone():
    x = torch.randn(6, 10, generator=generator())
    before = x.clone()
    assert same(round_to_format(x.t()[1:, ::2], E4M3), round_to_format(x, E4M3).t()[1:, ::2])
    assert same(round_to_format(x[2, 3], E4M3), round_to_format(x, E4M3)[2, 3])
    assert same(x, before)


def test_wrong_arguments_are_refused():
    x = torch.ones(4)
    with pytest.raises(ValueError, match="float32"):
        round_to_format(x.bfloat16(), E4M3)
    with pytest.raises(ValueError, match=r"'up'.*nearest"):
        round_to_format(x, E4M3, "up")
    with pytest.raises(ValueError, match="noise"):
        round_to_format(x, E4M3, "stochastic")
    with pytest.raises(ValueError, match="noise"):
        round_to_format(x, E4M3, "stochastic", torch.rand(1))
