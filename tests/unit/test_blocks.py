"""BlockScaled and quantize_blocks against exact fractions; each promise at the top of numerics/blocks.py."""

from fractions import Fraction

import pytest
import torch
from exact import INF, magnitudes, random_floats, rounded, same
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.numerics import BLOCK, E4M3, BlockScaled, block_scales
from megatron_fp8.ops.reference import quantize_blocks

LARGEST = 248 * 2.0**120  # from here on a value rounds to 2^128


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wide_blocks(count: int, seed: int) -> torch.Tensor:
    """Blocks around magnitudes from 2^-149 to 3.2e38, each spread over up to 2^24, zeros among the values."""
    g = generator(seed)
    top = torch.randint(-149, 127, (count, 1), generator=g)
    below = torch.randint(0, 24, (count, BLOCK), generator=g) * (torch.rand(count, 1, generator=g) > 0.3)
    x = torch.rand(count, BLOCK, generator=g).double().add(1).mul(2.0 ** (top - below).double())
    x = x * torch.randint(-1, 2, x.shape, generator=g)
    return x.clamp(-3.2e38, 3.2e38).float().flatten()


def exponent(block: list[float]) -> int:
    """The smallest e in -127 .. 120 with max|block| <= 448 * 2^e, by trying."""
    largest = max(abs(Fraction(value)) for value in block)
    return next(e for e in range(-127, 121) if largest <= 448 * Fraction(2) ** e)


def assert_exact(x: torch.Tensor, got: BlockScaled, mode: str = "nearest", noise: torch.Tensor | None = None):
    assert got.payload.dtype == E4M3.dtype and got.exponents.dtype == torch.uint8
    noise = torch.zeros_like(x) if noise is None else noise
    for i, block in enumerate(x.float().view(-1, BLOCK).tolist()):
        e = exponent(block)
        assert got.exponents[i].item() == e + 127
        scaled = [Fraction(value) / Fraction(2) ** e for value in block]
        assert max(map(abs, scaled)) <= 448
        units = noise[i * BLOCK : (i + 1) * BLOCK].tolist()
        payload = [rounded(value, E4M3, mode, unit) for value, unit in zip(scaled, units, strict=True)]
        expected = torch.tensor(payload).copysign(torch.tensor(block))
        assert same(got.payload[i * BLOCK : (i + 1) * BLOCK].float(), expected)


def same_blocks(a: BlockScaled, b: BlockScaled) -> bool:
    same_bytes = torch.equal(a.payload.view(torch.uint8), b.payload.view(torch.uint8))
    return same_bytes and torch.equal(a.exponents, b.exponents)


def test_every_exponent_byte():
    scales = block_scales(torch.arange(256, dtype=torch.uint8)).tolist()
    assert [Fraction(scale) for scale in scales[:255]] == [Fraction(2) ** (b - 127) for b in range(255)]
    assert scales[255] == INF


def test_dequantize_is_exact():
    codes = torch.randint(0, 256, (256 * BLOCK,), dtype=torch.uint8, generator=generator())
    exponents = torch.arange(256, dtype=torch.uint8)
    values = BlockScaled(codes.view(E4M3.dtype), exponents).dequantize()
    assert values.shape == (256 * BLOCK,) and values.dtype == torch.float32
    grid = magnitudes(E4M3)
    for i in range(0, 247 * BLOCK, 37):  # to byte 246 the largest product is within float32
        code = codes[i].item()
        if code % 128 == 127:
            assert values[i].isnan()
            continue
        product = grid[code % 128] * Fraction(2) ** (i // BLOCK - 127)
        assert abs(Fraction(values[i].item())) == product
        assert values[i].signbit().item() == (code >= 128)


@pytest.mark.parametrize("seed", range(3))
def test_quantize_is_exact_at_every_magnitude(seed):
    x = wide_blocks(30, seed)
    assert_exact(x, quantize_blocks(x))


def test_quantize_is_exact_for_random_bits():
    x = random_floats(20 * BLOCK, generator())
    x = torch.where(x.isfinite(), x, 0.0)
    assert_exact(x, quantize_blocks(x))


@settings(max_examples=60, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, BLOCK - 1))
def test_a_block_with_any_maximum(value, position):
    x = torch.full((BLOCK,), value / 3)
    x[position] = value
    assert_exact(x, quantize_blocks(x))


def test_the_exponent_changes_just_above_448():
    for e in (-127, -126, -100, 0, 5, 119):
        at = torch.zeros(BLOCK)
        at[7] = -448 * 2.0**e
        above = at.nextafter(torch.tensor(-INF)).where(at != 0, 0.0)
        assert quantize_blocks(at).exponents.item() == e + 127
        assert quantize_blocks(at).payload[7].item() == -448
        assert quantize_blocks(above).exponents.item() == e + 128
        assert quantize_blocks(above).payload[7].item() == -224


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_input_types(dtype):
    x = torch.randn(4 * BLOCK, generator=generator()).to(dtype)
    got = quantize_blocks(x)
    assert_exact(x, got)
    assert same_blocks(got, quantize_blocks(x.float()))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_quantising_again_changes_no_value_and_bytes_only_from_224_to_448(seed):
    once = quantize_blocks(wide_blocks(40, seed))
    values = once.dequantize()
    for rounding in ("nearest", "stochastic"):
        twice = quantize_blocks(values, rounding=rounding, noise=torch.rand(values.shape))
        assert same(twice.dequantize(), values)
        largest = once.payload.float().view(-1, BLOCK).abs().amax(1)
        moved = (largest == 224) & (once.exponents > 0)
        assert torch.equal(twice.exponents, once.exponents - moved.byte())
        kept = ~moved.repeat_interleave(BLOCK)
        assert torch.equal(twice.payload.view(torch.uint8)[kept], once.payload.view(torch.uint8)[kept])
        assert same_blocks(quantize_blocks(twice.dequantize()), twice)


def test_quantising_again_where_the_maximum_rounds_down_to_224():
    x = torch.full((BLOCK,), 3.0)
    x[0], x[1] = 230.0, 2.0**-9
    once = quantize_blocks(x)
    twice = quantize_blocks(once.dequantize())
    assert (once.exponents.item(), once.payload[0].item()) == (127, 224)
    assert (twice.exponents.item(), twice.payload[0].item()) == (126, 448)
    assert same(twice.dequantize(), once.dequantize())
    assert same_blocks(quantize_blocks(twice.dequantize()), twice)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_nothing_saturates_and_the_error_is_bounded(seed):
    x = wide_blocks(40, seed)
    got = quantize_blocks(x)
    step = block_scales(got.exponents).repeat_interleave(BLOCK).double()
    error = (got.dequantize().double() - x.double()).abs()
    assert (x.abs().double() <= 448 * step).all()
    assert (error <= torch.maximum(x.abs().double() * 2.0**-4, step * 2.0**-10)).all()
    assert (error > 0).any()
    largest = x.view(-1, BLOCK).abs().amax(1).double()
    free = got.exponents > 0
    assert (largest[free] > 224 * block_scales(got.exponents).double()[free]).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 7), st.integers(0, 2**31))
def test_a_shard_cut_at_a_block_boundary_has_the_bytes_of_the_whole(cut, seed):
    x = wide_blocks(8, seed)
    noise = torch.rand(x.shape, generator=generator(seed))
    for rounding in ("nearest", "stochastic"):
        whole = quantize_blocks(x, rounding=rounding, noise=noise)
        parts = [
            quantize_blocks(x[part], rounding=rounding, noise=noise[part])
            for part in (slice(0, cut * BLOCK), slice(cut * BLOCK, None))
        ]
        payload = torch.cat([part.payload.view(torch.uint8) for part in parts]).view(E4M3.dtype)
        joined = BlockScaled(payload, torch.cat([part.exponents for part in parts]))
        assert same_blocks(joined, whole)


def test_stochastic_is_exact_for_its_noise_and_unbiased():
    x = wide_blocks(20, 5)
    noise = torch.rand(x.shape, generator=generator())
    assert_exact(x, quantize_blocks(x, rounding="stochastic", noise=noise), "stochastic", noise)

    n = 1000 * BLOCK
    many = torch.full((n,), 1.03)
    many[::BLOCK] = 448.0  # fixes every exponent at 0, where 1.03 lies 0.24 of the way from 1 to 1.125
    got = quantize_blocks(many, rounding="stochastic", noise=torch.rand(n, generator=generator()))
    values = got.dequantize().view(-1, BLOCK)[:, 1:].double()
    p, step = (many[1].item() - 1) / 0.125, 0.125
    assert set(values.flatten().tolist()) == {1.0, 1.125}
    five_sigma = 5 * step * (p * (1 - p) / values.numel()) ** 0.5
    assert abs(values.mean().item() - many[1].item()) <= five_sigma < step * p / 10


def test_zeros():
    x = torch.zeros(2 * BLOCK)
    x[BLOCK:] = -0.0
    got = quantize_blocks(x)
    assert got.exponents.tolist() == [0, 0]
    assert same(got.dequantize(), x)


def test_denormals_and_the_ends_of_float32():
    x = torch.zeros(4 * BLOCK)
    x[0] = 2.0**-149  # below half the smallest step
    x[BLOCK], x[BLOCK + 1], x[BLOCK + 2] = 2.0**-136, 2.0**-137 * 1.5, -(2.0**-137)  # a step, over half, half
    x[2 * BLOCK], x[2 * BLOCK + 1] = 2.0**-126, 3e-39
    x[3 * BLOCK], x[3 * BLOCK + 1] = 3e38, -1e38
    got = quantize_blocks(x)
    assert_exact(x, got)
    assert got.exponents.tolist() == [0, 0, 0, 247]
    assert got.dequantize()[0].item() == 0
    assert got.dequantize()[BLOCK : BLOCK + 3].tolist() == [2.0**-136, 2.0**-136, 0.0]
    assert got.dequantize()[2 * BLOCK].item() == 2.0**-126
    assert got.dequantize()[3 * BLOCK].item() == 224 * 2.0**120


def test_the_last_half_step_of_float32_rounds_to_infinity():
    x = torch.zeros(2 * BLOCK)
    x[0], x[BLOCK] = torch.tensor(LARGEST).nextafter(torch.tensor(0.0)), LARGEST
    values = quantize_blocks(x).dequantize()
    assert values[0].item() == 240 * 2.0**120
    assert values[BLOCK].item() == INF


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [0x7F800000, -0x00800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1], ids=hex)
def test_infinities_and_every_kind_of_nan_become_nan_in_their_block_only(bits, rounding):
    x = torch.randn(3 * BLOCK, generator=generator())
    x.view(torch.int32)[BLOCK + 5] = bits
    assert not x[BLOCK + 5].isfinite()
    noise = torch.rand(x.shape, generator=generator())
    got = quantize_blocks(x, rounding=rounding, noise=noise)
    expected = torch.zeros(3 * BLOCK, dtype=torch.bool)
    expected[BLOCK + 5] = True
    assert torch.equal(got.dequantize().isnan(), expected)
    assert got.exponents[1].item() == 247
    x[BLOCK + 5] = 0.0
    clean = quantize_blocks(x, rounding=rounding, noise=noise)
    for i in (0, 2):
        part = slice(i * BLOCK, (i + 1) * BLOCK)
        assert same(got.dequantize()[part], clean.dequantize()[part])


def test_writes_into_what_it_is_given():
    x = wide_blocks(3, 9)
    payload = torch.full((5 * BLOCK,), 7.0).to(E4M3.dtype)
    exponents = torch.full((5,), 7, dtype=torch.uint8)
    got = quantize_blocks(x, payload[BLOCK : 4 * BLOCK], exponents[1:4])
    assert got.payload.data_ptr() == payload[BLOCK:].data_ptr()
    assert got.exponents.data_ptr() == exponents[1:].data_ptr()
    assert same_blocks(BlockScaled(payload[BLOCK : 4 * BLOCK], exponents[1:4]), quantize_blocks(x))
    assert (payload.float()[:BLOCK] == 7).all() and (payload.float()[4 * BLOCK :] == 7).all()
    assert exponents[0] == exponents[4] == 7


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="128"):
        quantize_blocks(torch.ones(100))
    with pytest.raises(ValueError, match="128"):
        quantize_blocks(torch.ones(2, BLOCK))
    with pytest.raises(ValueError, match=r"'truncate'.*stochastic"):
        quantize_blocks(torch.ones(BLOCK), rounding="truncate")
    with pytest.raises(ValueError, match="noise"):
        quantize_blocks(torch.ones(BLOCK), rounding="stochastic")
