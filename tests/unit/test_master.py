"""Block16 and the remainders against exact fractions: each property that the top of numerics/master.py states."""

from fractions import Fraction

import pytest
import torch
from exact import FP16, INF, NAN, edges, random_floats, rounded, same
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.numerics import BLOCK, E4M3
from megatron_fp8.numerics.master import Block16, join_bf16, join_e4m3, quantize_block16, split_bf16, split_e4m3
from megatron_fp8.ops.reference import quantize_blocks

pytestmark = pytest.mark.usefixtures("fresh_random_data")
UP, DOWN = torch.tensor(INF), torch.tensor(-INF)
TWO = Fraction(2)


def spread_blocks(count: int, lowest: int = -149, highest: int = 127) -> torch.Tensor:
    """Blocks with maxima from 2^lowest to 2^highest, each spread over up to 2^45, and with some zeros."""
    top, below = torch.randint(lowest, highest, (count, 1)), torch.randint(0, 45, (count, BLOCK))
    x = torch.rand(count, BLOCK).double().add(1).mul(2.0 ** (top - below).double())
    return (x * torch.randint(-1, 2, x.shape)).float().flatten()


# Block16


def exponent16(block: list[float]) -> int:
    """The smallest e in -127 .. 113 with max|block| <= 65504 * 2^e, found by trying all."""
    largest = max(abs(Fraction(value)) for value in block)
    return next(e for e in range(-127, 114) if largest <= 65504 * TWO**e)


def assert_exact16(x: torch.Tensor, got: Block16) -> None:
    assert got.payload.dtype == torch.float16 and got.exponents.dtype == torch.uint8
    for i, block in enumerate(x.float().view(-1, BLOCK).tolist()):
        e = exponent16(block)
        assert got.exponents[i].item() == e + 127
        payload = [rounded(Fraction(value) / TWO**e, FP16) for value in block]
        expected = torch.tensor(payload).copysign(torch.tensor(block))
        assert same(got.payload[i * BLOCK : (i + 1) * BLOCK].float(), expected)
        values = got.part(i * BLOCK, BLOCK).dequantize().tolist()
        assert [Fraction(value) for value in values] == [Fraction(p) * TWO**e for p in payload]


def test_block16_is_exact_at_every_magnitude():
    x = spread_blocks(60)
    assert_exact16(x, quantize_block16(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_block16_of_narrow_types(dtype):
    x = torch.randn(2 * BLOCK).to(dtype)
    assert_exact16(x, quantize_block16(x))


def test_block16_exponent_changes_just_above_65504():
    for e in (-127, -126, -100, 0, 5, 112):
        at = torch.zeros(2 * BLOCK)
        at[7] = at[BLOCK + 7] = -65504 * 2.0**e
        at[BLOCK + 7] = at[BLOCK + 7].nextafter(DOWN)
        got = quantize_block16(at)
        assert got.exponents.tolist() == [e + 127, e + 128]
        assert (got.payload[7].item(), got.payload[BLOCK + 7].item()) == (-65504, -32752)


def test_block16_never_overflows_and_its_error_is_bounded():
    x = spread_blocks(400)
    got = quantize_block16(x)
    step = torch.pow(2.0, got.exponents.double() - 127).repeat_interleave(BLOCK)
    error = (got.dequantize().double() - x.double()).abs()
    assert (error <= torch.maximum(x.abs().double() * 2.0**-11, step * 2.0**-25)).all() and (error > 0).any()
    largest = x.view(-1, BLOCK).abs().amax(1).double().repeat_interleave(BLOCK)
    free = step > 2.0**-127
    assert (error <= torch.maximum(x.abs().double() * 2.0**-11, largest * 2.0**-39)).all()
    assert ((largest <= 65504 * step) & ((largest > 32752 * step) | ~free)).all()
    subnormal = x.abs().double() < step * 2.0**-14
    assert not error[~free & subnormal].any() and error[free & subnormal].any()
    assert same(quantize_block16(got.dequantize()).dequantize(), got.dequantize())


def test_block16_of_zeros_denormals_and_the_non_finite():
    x = torch.zeros(5 * BLOCK)
    x[1], x[BLOCK], x[2 * BLOCK], x[3 * BLOCK] = -0.0, 2.0**-149, INF, NAN
    x[4 * BLOCK], x[4 * BLOCK + 1] = -INF, 3e38
    got = quantize_block16(x)
    assert got.exponents.tolist() == [0, 0, 240, 240, 240]
    assert same(got.dequantize(), quantize_block16(got.dequantize()).dequantize())
    assert same(got.dequantize()[: 4 * BLOCK + 1], x[: 4 * BLOCK + 1])
    top = torch.zeros(2 * BLOCK)
    top[BLOCK] = 32760 * 2.0**113
    top[0] = top[BLOCK].nextafter(DOWN)
    values = quantize_block16(top).dequantize()
    assert values[0].item() == 32752 * 2.0**113 and values[BLOCK].item() == INF


def test_block16_refuses_other_sizes():
    for shape in ((100,), (2, BLOCK)):
        with pytest.raises(ValueError, match="128"):
            quantize_block16(torch.ones(shape))


# The root of v, as BlockScaled


def test_v_as_a_root_keeps_2_to_the_27_of_range():
    v = spread_blocks(300, -60, 60).abs()
    got = quantize_blocks(v.sqrt()).dequantize().double().square()
    largest = v.view(-1, BLOCK).amax(1).double().repeat_interleave(BLOCK)
    error = (got - v).abs() / v.double()
    inside = v >= largest * 2.0**-27
    inside &= v > 0
    assert inside.double().mean() > 0.2 and error[inside].max() <= 2.0**-3 + 2.0**-8
    assert ((got > 0) | (v < largest * 2.0**-35)).all() and ((got == 0) & (v > 0)).any()
    plain = quantize_blocks(v).dequantize()
    assert ((plain == 0) & inside).double().mean() > 0.05  # the reason for storing the root


# Remainders


def bf16_away(x: float) -> Fraction:
    """A finite x rounded to 8 significant bits, ties away from zero, from its exact value."""
    magnitude = abs(Fraction(x))
    if not magnitude:
        return Fraction(0)
    e = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length(), -126)
    e -= e > -126 and magnitude < TWO**e
    ulp = TWO ** (e - 7)
    return (magnitude / ulp + Fraction(1, 2)) // 1 * ulp * (1 if x > 0 else -1)


def test_bf16_weight_and_remainder_are_exact_for_any_bits():
    master = torch.cat([random_floats(200_000, torch.default_generator), torch.randn(1000)])
    ends = torch.tensor([0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x00007FFF, 0x00008000, 1, 0, 0x7F800000, 0x3F808000])
    ends = torch.cat([ends, ends - 2**31]).to(torch.int32).view(torch.float32)
    master = torch.cat([ends, master])
    weight, remainder = split_bf16(master)
    assert weight.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    nan = master.isnan()
    assert torch.equal(join_bf16(weight, remainder)[~nan].view(torch.int32), master[~nan].view(torch.int32))
    assert weight[nan].isnan().all() and not remainder[nan].any() and join_bf16(weight, remainder)[nan].isnan().all()
    infinite = master.isinf()
    assert torch.equal(weight[infinite].float(), master[infinite]) and not remainder[infinite].any()
    up = weight.isinf() & master.isfinite()
    assert up[:2].all() and not up[2] and (remainder[up] < 0).all()
    for part in (slice(3, 7), slice(-1000, None)):
        for value, got in zip(master[part].tolist(), weight[part].tolist(), strict=True):
            assert Fraction(got) == bf16_away(value)
    nearest = master.bfloat16()
    assert ((weight == nearest) | (remainder == -0x8000) | nan).all()  # torch's rounding, except for ties


def test_every_kind_of_nan_is_nan():
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FFF8000, -1, -0x7FFFFF, 0x7FC00000]).to(torch.int32)
    for weight, remainder in (
        split_bf16(bits.view(torch.float32)),
        split_e4m3(bits.view(torch.float32), torch.tensor(4.0)),
    ):
        assert weight.float().isnan().all() and not remainder.any()


def e4m3_masters(count: int) -> torch.Tensor:
    """y = master * scale within the range: every binade, values near every value and midpoint of E4M3, and zeros."""
    y = (1 + torch.rand(count)) * 2.0 ** torch.randint(-30, 9, (count,)) * (torch.randint(0, 2, (count,)) * 2 - 1)
    near = edges(E4M3)
    near = torch.cat([near, near * (1 + 2.0**-19 * torch.randn_like(near)), torch.tensor([464.0, -464.0, 0.0, -0.0])])
    y = torch.cat([y, near])
    return y[y.abs() <= 464]


def assert_e4m3(y: list[float], scale: float, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Check weight, remainder and master against their definitions in fractions, and the error against its bounds."""
    got = join_e4m3(weight, remainder, torch.tensor(1 / scale)).tolist()
    for value, w8, part, back in zip(map(Fraction, y), weight.float().tolist(), remainder.tolist(), got, strict=True):
        assert w8 == rounded(value, E4M3)
        magnitude, ulp = abs(Fraction(w8)), TWO**-9
        while magnitude >= 16 * ulp:
            ulp *= 2
        steps = (value - Fraction(w8)) / (ulp / 2**16)
        assert part == max(-32767, min(32767, round(steps)))  # a Fraction rounds to nearest even
        decoded = Fraction(w8) + part * ulp / 2**16
        assert Fraction(back) == decoded / Fraction(scale)
        error = abs(decoded - value)
        assert error <= ulp / 2**17 or abs(part) == 32767
        assert error <= (abs(value) * TWO**-16 / Fraction(17, 2) if abs(value) >= TWO**-6 else TWO**-25)


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**14, 2.0**100])
def test_e4m3_weight_and_remainder_have_19_bits(scale):
    y = e4m3_masters(3000)
    master = y / scale
    weight, remainder = split_e4m3(master, torch.tensor(scale))
    assert weight.dtype == torch.float8_e4m3fn and remainder.dtype == torch.int16
    assert_e4m3(y.tolist(), scale, weight, remainder)
    back = join_e4m3(weight, remainder, torch.tensor(1 / scale))
    again = split_e4m3(back, torch.tensor(scale))
    assert torch.equal(again[0].float(), weight.float()) and torch.equal(again[1], remainder)


@settings(max_examples=200, deadline=None)
@given(st.floats(-464, 464, width=32))
def test_any_e4m3_master(value):
    weight, remainder = split_e4m3(torch.tensor([value]), torch.tensor(1.0))
    assert_e4m3([value], 1.0, weight, remainder)


def test_the_limit_of_the_remainder_is_reached():
    y = torch.tensor([8.5]).nextafter(DOWN) / 8  # just below the midpoint of 1 and 1.125
    above = torch.tensor([9.5]) / 8  # midpoint of 1.125 and 1.25, which is even
    for value, w8, part in ((y, 1.0, 32767), (above, 1.25, -32767)):
        weight, remainder = split_e4m3(value, torch.tensor(1.0))
        assert (weight.float().item(), remainder.item()) == (w8, part)


@pytest.mark.parametrize("factor", [2.0**-3, 0.5, 2.0, 2.0**5])
def test_another_scale_loses_nothing_outside_the_subnormals(factor):
    y = e4m3_masters(3000)
    y = y[y.abs() * factor <= 464]
    first, other = torch.tensor(1.0), torch.tensor(factor)
    stored = split_e4m3(y, first)
    back = join_e4m3(*stored, first.reciprocal())
    moved = split_e4m3(back, other)
    assert_e4m3((back * factor).tolist(), factor, *moved)
    normal = y.abs() * min(factor, 1) >= 2.0**-6
    assert 0.2 < normal.double().mean() < 1
    assert torch.equal(join_e4m3(*moved, other.reciprocal())[normal], back[normal])
    assert torch.equal(moved[0].float()[normal], stored[0].float()[normal] * factor)
    assert torch.equal(moved[1][normal], stored[1][normal])


def test_e4m3_beyond_its_range():
    y = torch.tensor([465.0, -1e30, INF, -INF, NAN])
    weight, remainder = split_e4m3(y, torch.tensor(1.0))
    assert same(weight.float(), torch.tensor([448.0, -448.0, NAN, NAN, NAN]))
    assert remainder.tolist() == [32767, -32767, 0, 0, 0]
    assert join_e4m3(weight, remainder, torch.tensor(1.0))[:2].tolist() == [464 - 2.0**-11, 2.0**-11 - 464]
    weight, remainder = split_e4m3(torch.tensor([1e30]), torch.tensor(2.0**100))
    assert weight.float().isnan().item() and remainder.item() == 0


# What rounding to nearest loses: the table at the top of numerics/master.py


@pytest.mark.parametrize(
    ("name", "lost"),
    [("BlockScaled", 2.0**-4), ("bf16", 2.0**-8), ("Block16", 2.0**-11), ("e4m3", 2.0**-20), ("fp32", 2.0**-24)],
)
def test_the_largest_change_that_is_lost(name, lost):
    stores = {
        "BlockScaled": lambda x: quantize_blocks(x).dequantize(),
        "bf16": lambda x: x.bfloat16().double(),
        "Block16": lambda x: quantize_block16(x.float()).dequantize(),
        "e4m3": lambda x: join_e4m3(*split_e4m3(x.float(), torch.tensor(1.0)), torch.tensor(1.0)),
        "fp32": lambda x: x.float(),
    }
    x = torch.ones(BLOCK, dtype=torch.float64)  # a power of two is even, so a tie rounds back to it
    assert torch.equal(stores[name](x * (1 + lost)).double(), x)
    assert (stores[name](x * (1 + lost * 1.25)) > 1).all()
