"""emulate against torch's casts, exact fractions, and the formulas at the top of numerics/emulation.py."""

import itertools
import math
import re
from fractions import Fraction

import pytest
import torch
from exact import INF, NAN, magnitudes, random_floats, same

from megatron_fp8 import ops
from megatron_fp8.numerics import E4M3, E5M2, ScaledTensor, emulation
from megatron_fp8.numerics.emulation import ROUNDINGS, EmulatedFormat, emulate, format_named
from megatron_fp8.numerics.noise import noise_seed, uniform_noise
from megatron_fp8.ops.reference import quantize

MILLIONS = 1 << 22
FINITE = {"E4M3": 448.0, "E3M2": 28.0, "E2M3": 7.5, "E2M1": 6.0}  # maxima of the formats without infinity
SCALINGS = ["tensor", "row", "block:1", "block:5", "block:32"]
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)
every_scaling = pytest.mark.parametrize("scaling", SCALINGS)


@pytest.fixture
def random():
    seed = torch.seed()
    print(f"run seed {seed}")  # shown when the test fails
    return torch.Generator().manual_seed(seed)


def spec(name: str, rounding: str = "nearest", scaling: str = "none") -> EmulatedFormat:
    return EmulatedFormat(format_named(name), rounding, scaling)


def any_seed(random: torch.Generator) -> tuple[int, int]:
    return noise_seed(int(torch.randint(2**40, (), generator=random)))


def any_name(random: torch.Generator) -> str:
    x, y = (int(torch.randint(low, high, (), generator=random)) for low, high in ((2, 9), (0, 24)))
    return f"E{x}M{y}"


# The reference: e(x) in exact fractions, from the format's name.


def parameters(name: str) -> tuple[int, int, Fraction, bool]:
    """(mantissa bits, exponent of the smallest normal, maximum, whether the format has infinity)."""
    x, y = map(int, name[1:].split("M"))
    bias = 2 ** (x - 1) - 1
    ieee = Fraction(2) ** bias * (2 - Fraction(1, 2**y))
    return y, 1 - bias, Fraction(FINITE[name]) if name in FINITE else ieee, name not in FINITE


def octave(magnitude: Fraction) -> int:
    """floor(log2(magnitude))."""
    guess = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return guess if Fraction(2) ** guess <= magnitude else guess - 1


def exact(value: float, name: str, rounding: str, noise: float, k: int = 0) -> float:
    mantissa, lowest, largest, infinity = parameters(name)
    if not math.isfinite(value):
        return value if math.isnan(value) or infinity else NAN
    magnitude = abs(Fraction(value)) / Fraction(2) ** k
    if not magnitude:
        return value
    ulp = Fraction(2) ** (max(octave(magnitude), lowest) - mantissa)
    whole, rest = divmod(magnitude / ulp, 1)
    if rounding == "nearest":
        whole = round(magnitude / ulp)  # a Fraction rounds half to even
    elif rounding == "stochastic":
        whole += max(Fraction(noise), Fraction(1, 2**25)) < rest
    result = whole * ulp
    if result > largest:
        return math.copysign(INF if infinity and rounding != "truncate" else float(largest), value)
    result *= Fraction(2) ** k
    return math.copysign(INF if result >= 2**128 else float(result), value)


def scale(group: list[float], name: str) -> int:
    """The smallest k with max|group| <= max * 2^k, found by trying all."""
    _, lowest, largest, _ = parameters(name)
    finite = [abs(v) if math.isfinite(v) else torch.finfo(torch.float32).max for v in group]
    return next(k for k in range(-lowest - 126, 200) if Fraction(max(finite)) <= largest * Fraction(2) ** k)


def reference(x: torch.Tensor, how: EmulatedFormat, seed: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """emulate for a float32 matrix."""
    name, (rows, columns) = how.format.name.upper(), x.shape
    noise = uniform_noise(x.numel(), seed).tolist()
    block = {"none": 1, "tensor": x.numel(), "row": columns}.get(how.scaling) or int(how.scaling[6:])
    length = x.numel() if how.scaling == "tensor" else columns
    values, result = x.flatten().tolist(), []
    for start in range(0, rows * columns, length):
        for first in range(start, start + length, block):
            last = min(first + block, start + length)
            k = 0 if how.scaling == "none" else scale(values[first:last], name)
            result += [exact(values[i], name, how.rounding, noise[i], k) for i in range(first, last)]
    return torch.tensor(result).view(rows, columns)


def near(centre: float, random: torch.Generator, n: int) -> torch.Tensor:
    """Random values within a few octaves of `centre`, with both signs."""
    octaves = torch.rand(n, generator=random).double() * 8 - 6
    values = centre * 2.0**octaves * torch.randint(-1, 2, (n,), generator=random)
    return values.clamp(-3.4e38, 3.4e38).float()


# Formats


def test_formats():
    assert format_named("e4m3") is E4M3 and format_named("E5M2") is E5M2
    for name, largest in FINITE.items():
        assert format_named(name).max == largest and not format_named(name).has_infinity
    for name, dtype in (("E8M7", torch.bfloat16), ("E5M10", torch.float16), ("E8M23", torch.float32)):
        fmt, info = format_named(name), torch.finfo(dtype)
        assert (fmt.max, fmt.smallest_normal) == (info.max, info.smallest_normal)
        assert fmt.smallest_subnormal == info.smallest_normal * info.eps
    assert (format_named("E3M4").max, format_named("E7M7").max) == (15.5, 2.0**63 * (2 - 2.0**-7))


@pytest.mark.parametrize("name", ["E1M3", "E9M3", "E4M24", "E4M03", "E4", "M3", "E4M-1", "", "FP8", "E4M3fn"])
def test_unknown_formats_are_refused(name):
    with pytest.raises(ValueError, match="ExMy, with 2 to 8 exponent bits x and 0 to 23 mantissa bits y"):
        format_named(name)


def test_every_value_is_left_alone(random):
    for name in ("E4M3", "E5M2", "E3M4", "E2M1", "E2M0", "E6M5"):
        fmt = format_named(name)
        values = torch.tensor([float(value) for value in magnitudes(fmt)])
        if fmt.mantissa_bits and fmt.has_infinity:
            values = values[: 2**fmt.mantissa_bits * (2**fmt.exponent_bits - 1)]
        values = torch.cat([values, -values])
        for rounding in ROUNDINGS:
            assert same(emulate(values, spec(name, rounding), any_seed(random)), values)


# torch's casts


def patterns(random: torch.Generator, largest: float) -> torch.Tensor:
    """Millions of float32 with random bits, and as many around a format's range."""
    x = random_floats(MILLIONS, random)
    scaled = torch.randn(MILLIONS // 2, generator=random) * largest / 2
    return torch.cat([x, scaled, scaled * 2.0 ** -torch.randint(0, 30, scaled.shape, generator=random)])


@pytest.mark.parametrize(("name", "fmt"), [("E4M3", E4M3), ("E5M2", E5M2)])
def test_every_code_of_an_fp8_format(name, fmt):
    values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    for rounding in ROUNDINGS:
        assert same(emulate(values, spec(name, rounding), (1, 2)), values)
    exact_middles = (values[:, None] + values[None, :]) / 2  # they include all midpoints of neighbours
    got, cast = emulate(exact_middles, spec(name)), exact_middles.to(fmt.dtype).float()
    assert same(got, cast)


def test_e5m2_is_torchs_cast(random):
    x = patterns(random, E5M2.max)
    assert same(emulate(x, spec("E5M2")), x.to(torch.float8_e5m2).float())
    edge = torch.tensor([57344.0, 61439.996, 61440.0, INF])
    assert emulate(edge, spec("E5M2")).tolist() == [57344.0, 57344.0, INF, INF]


def test_e4m3_is_torchs_cast_but_saturates(random):
    x = patterns(random, E4M3.max)
    got, cast = emulate(x, spec("E4M3")), x.to(torch.float8_e4m3fn).float()
    saturated = x.isfinite() & (x.abs() > 464)
    assert same(got[~saturated], cast[~saturated])
    assert same(got[saturated], 448 * x[saturated].sign())
    assert same(got, quantize(x, E4M3, torch.tensor(1.0)).float())  # like ops.quantize


def test_e8m7_is_bfloat16():
    """Every bfloat16, and the float32 values around it where the rounding changes."""
    top = torch.arange(1 << 16)[:, None] << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = (top + low).to(torch.int32).view(torch.float32)
    assert same(emulate(x, spec("E8M7")), x.bfloat16().float())


@pytest.mark.parametrize(("name", "dtype"), [("E8M7", torch.bfloat16), ("E5M10", torch.float16), ("E8M23", None)])
def test_wider_formats_are_torchs(name, dtype, random):
    x = patterns(random, min(format_named(name).max, 1e38))
    assert same(emulate(x, spec(name)), x if dtype is None else x.to(dtype).float())


# Exact fractions


@every_rounding
def test_any_format(rounding, random):
    for name in [any_name(random) for _ in range(40)] + [*FINITE, "E8M3", "E7M7", "E2M0", "E8M0", "E8M23", "E2M23"]:
        fmt, seed = format_named(name), any_seed(random)
        ends = torch.tensor([fmt.smallest_subnormal / 2, fmt.smallest_normal, fmt.max])
        ends = torch.cat([ends, ends.nextafter(torch.tensor(INF)), ends.nextafter(torch.tensor(0.0))])
        x = [random_floats(40, random), ends, -ends, torch.tensor([0.0, -0.0, INF, -INF, NAN])]
        x += [near(centre, random, 40) for centre in (fmt.smallest_subnormal, fmt.smallest_normal, 1.0, fmt.max)]
        matrix = torch.cat(x)[None]
        assert same(emulate(matrix, spec(name, rounding), seed), reference(matrix, spec(name, rounding), seed)), name


def test_ties(random):
    """Midpoints of neighbours in every octave of a few formats."""
    for name in ("E4M3", "E3M4", "E2M1", "E2M3", "E6M2", "E4M1", "E3M0"):
        grid = magnitudes(format_named(name))
        x = torch.tensor([float(a + b) / 2 for a, b in itertools.pairwise(grid)])[None]
        for rounding in ROUNDINGS:
            seed = any_seed(random)
            assert same(emulate(x, spec(name, rounding), seed), reference(x, spec(name, rounding), seed)), name


@every_rounding
def test_values_beyond_the_maximum(rounding):
    """IEEE's formats overflow to infinity, unless truncating; OCP's saturate. An infinity never becomes finite."""
    x = torch.tensor([1e9, -1e9, INF, -INF, NAN])
    for name in ("E5M2", "E3M4", "E4M7"):
        beyond = format_named(name).max if rounding == "truncate" else INF
        got = emulate(x, spec(name, rounding), (1, 2))
        assert same(got, torch.tensor([beyond, -beyond, INF, -INF, NAN]))
    for name, largest in FINITE.items():
        got = emulate(x, spec(name, rounding), (1, 2))
        assert same(got, torch.tensor([largest, -largest, NAN, NAN, NAN]))


@every_rounding
@every_scaling
def test_scaling(rounding, scaling, random):
    for name in ["E4M3", "E5M2", "E2M1", "E7M7", "E2M23", "E7M23", any_name(random).replace("E8", "E6")]:
        magnitude = 2.0 ** torch.randint(-140, 126, (4, 1), generator=random)
        x = torch.randn(4, 37, generator=random) * magnitude * 2.0 ** -torch.randint(0, 30, (4, 37), generator=random)
        x[3] = 0.0
        x[3, :9] = torch.tensor([format_named(name).max * 2.0**-3])  # exactly a maximum
        x[3, 10:20] = 2.0**-149
        how, seed = spec(name, rounding, scaling), any_seed(random)
        assert same(emulate(x, how, seed), reference(x, how, seed)), name
        x[1, 5], x[2, 6] = INF, NAN
        x[0, 1] = torch.finfo(torch.float32).max
        assert same(emulate(x, how, seed), reference(x, how, seed)), name


def test_eight_exponent_bits_have_nothing_to_scale(random):
    x = random_floats(1000, random)
    for scaling in SCALINGS:
        assert same(emulate(x, spec("E8M3", "nearest", scaling)), emulate(x, spec("E8M3")))


def test_a_scaled_tensor_is_the_fp8_tensor_of_that_power_of_two(random):
    x = torch.randn(50, 60, generator=random) * 3e-5
    for fmt, name in ((E4M3, "E4M3"), (E5M2, "E5M2")):
        power = 2.0 ** math.floor(math.log2(fmt.max / x.abs().max().item()))
        payload = quantize(x, fmt, torch.tensor(power))
        expected = ScaledTensor(payload, torch.tensor(1 / power)).dequantize()
        assert same(emulate(x, spec(name, "nearest", "tensor")), expected)


@every_scaling
def test_scaling_again_changes_nothing(scaling, random):
    x = torch.randn(20, 70, generator=random) * 10 ** torch.randn(20, 70, generator=random)
    for name, rounding in itertools.product(("E4M3", "E2M1", "E3M4", "E5M0"), ("nearest", "truncate")):
        once = emulate(x, spec(name, rounding, scaling))
        assert same(emulate(once, spec(name, rounding, scaling)), once)


@every_rounding
def test_bfloat16_holds_the_result_of_a_bfloat16(rounding, random):
    x = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    finite = x[x.isfinite()]
    finite = finite[torch.randperm(finite.numel(), generator=random)]
    for name in ("E4M3", "E5M2", "E8M3", "E2M1", "E5M10", "E7M23", any_name(random)):
        for scaling, values in itertools.product(["none", *SCALINGS], (x, finite.sort().values)):
            how, seed = spec(name, rounding, scaling), any_seed(random)
            got, expected = emulate(values, how, seed), emulate(values.float(), how, seed)
            if rounding == "truncate" and scaling == "none" and how.format.mantissa_bits > 7:
                expected[expected.abs() == how.format.max] *= 1 + 2.0**-9  # the maximum, rounded to bfloat16
                expected = expected.bfloat16().float()
            assert got.dtype == torch.bfloat16 and same(got.float(), expected), str(how)


# The gain


def log_uniform_gain(mantissa: int, rounding: str) -> float:
    """The gain of one operand: the sums at the top of emulation.py."""
    n = 2**mantissa
    if rounding == "truncate":
        terms = [1 / k for k in range(n + 1, 2 * n + 1)]
    else:
        terms = [1 / (2 * n + 1), 1 / (4 * n - 1)] + [k / (k * k - 0.25) for k in range(n + 1, 2 * n)]
    return math.fsum(terms) / math.log(2)


def bfloat16_gain(mantissa: int, rounding: str) -> float:
    """The gain of one BF16 operand: a mean over an octave's 128 values, weighted by what rounds to each of them."""
    kept = 2 ** (7 - mantissa)
    above = below = 0.0
    for t in range(128, 257):
        weight = max(t - 0.5, 128) ** -2 - min(t + 0.5, 256) ** -2  # twice the integral of 1/m^3 over the cell
        whole = round(Fraction(t, kept)) if rounding == "nearest" else t // kept
        above += whole * kept * t * weight
        below += t * t * weight
    return above / below


def gain(dtype: torch.dtype, name: str, rounding: str, random: torch.Generator) -> float:
    """The measured gain of a GEMM with random operands."""
    a, b = (torch.randn(400, 800, generator=random).to(dtype) for _ in range(2))
    how = spec(name, rounding)
    rounded = [emulate(t, how, any_seed(random)).double() for t in (a, b)]
    z, z_rounded = a.double() @ b.double().t(), rounded[0] @ rounded[1].t()
    return ((z_rounded * z).sum() / (z * z).sum()).item()


ROWS = re.findall(r"^ +E8M(\d) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", emulation.__doc__, re.MULTILINE)
TABLE = {int(mantissa): gains for mantissa, *gains in ROWS}  # truncate, nearest; any x, BF16 x


@pytest.mark.parametrize("mantissa", [6, 5, 4, 3])
def test_gain_of_a_gemm(mantissa, random):
    roundings = ("truncate", "nearest")
    of_one = itertools.product(roundings, (log_uniform_gain, bfloat16_gain))
    closed = [form(mantissa, rounding) ** 2 for rounding, form in of_one]
    assert [f"{value:.4f}" for value in closed] == TABLE[mantissa]
    kinds = itertools.product(roundings, (torch.float32, torch.bfloat16))
    measured = [gain(dtype, f"E8M{mantissa}", rounding, random) for rounding, dtype in kinds]
    bound = 1.5e-3 * 2 ** (3 - mantissa)  # seven standard deviations or more
    for got, expected in zip(measured, closed, strict=True):
        assert abs(got - expected) < bound
    assert abs(gain(torch.bfloat16, f"E8M{mantissa}", "stochastic", random) - 1) < bound
    if mantissa == 3:
        assert measured[1] == pytest.approx(0.92, abs=2e-3) and measured[3] == pytest.approx(0.998, abs=1e-3)


# Stochastic rounding


def test_stochastic_is_unbiased(random):
    n = 200_000
    for name, x in (("E8M3", 1.03), ("E4M3", -(2.0**-9) * 0.3), ("E5M2", 17.3), ("E2M1", 0.2), ("E3M0", 2.5)):
        many = torch.full((n,), x)
        got = emulate(many, spec(name, "stochastic"), any_seed(random))
        low, high = got.min().item(), got.max().item()
        assert low < many[0] < high and got.unique().numel() == 2
        p = (many[0].item() - low) / (high - low)
        five_sigma = 5 * (high - low) * math.sqrt(p * (1 - p) / n)
        assert abs(got.double().mean().item() - many[0].item()) < five_sigma


def test_stochastic_is_unbiased_with_every_scaling(random):
    x = torch.randn(64, 64, generator=random) * 1e-3
    for scaling in SCALINGS:
        how = spec("E4M3", "stochastic", scaling)
        errors = torch.stack([emulate(x, how, any_seed(random)) - x for _ in range(50)]).double()
        mean, deviation = errors.mean(), errors.std() / math.sqrt(errors.numel())
        if scaling == "block:1":  # every number has its own scale, and is within a factor of two of the maximum
            assert errors.abs().max() <= (x.abs() * 2.0**-3).max()
        assert abs(mean) < 5 * deviation


def test_stochastic_is_reproducible_and_counts_elements(random):
    x, seed = torch.randn(7, 90, generator=random), any_seed(random)
    for scaling in ["none", *SCALINGS]:
        how = spec("E4M3", "stochastic", scaling)
        got = emulate(x, how, seed)
        assert same(got, emulate(x, how, seed)) and not same(got, emulate(x, how, any_seed(random)))
    how = spec("E4M3", "stochastic", "row")
    assert same(emulate(x[:3], how, seed), emulate(x, how, seed)[:3])
    assert not same(emulate(x[3:], how, seed), emulate(x, how, seed)[3:])
    with pytest.raises(ValueError, match="noise_seed"):
        emulate(x, how)


# Shapes


@pytest.mark.parametrize("scaling", ["none", *SCALINGS])
def test_shapes_views_and_the_input_left_alone(scaling, random):
    x, how = torch.randn(6, 5, 40, generator=random), spec("E4M3", "truncate", scaling)
    before, got = x.clone(), emulate(x, how)
    assert same(x, before) and got.shape == x.shape and got.is_contiguous()
    assert same(got, emulate(x.view(30, 40), how).view(6, 5, 40))
    assert same(emulate(x.transpose(0, 1), how), emulate(x.transpose(0, 1).contiguous(), how))
    assert same(emulate(x[2, 3, 4], how), emulate(x[2, 3, 4].view(1, 1), how)[0, 0])
    assert emulate(x[:0], how).shape == (0, 5, 40) and emulate(x[..., :0], how).shape == (6, 5, 0)


def test_rows_and_blocks_have_scales_of_their_own():
    x = torch.tensor([[1.0, 0.3, 1e-4, 0.7e-4], [1e6, 3e5, 17.0, -0.0]])
    parts = [emulate(x[i : i + 1, j : j + 2], spec("E2M1", "nearest", "tensor")) for i in (0, 1) for j in (0, 2)]
    blocks = torch.cat([torch.cat(parts[:2], 1), torch.cat(parts[2:], 1)])
    assert same(emulate(x, spec("E2M1", "nearest", "block:2")), blocks)
    assert (blocks != 0).sum() == 7
    rows = torch.cat([emulate(row[None], spec("E2M1", "nearest", "tensor")) for row in x])
    assert same(emulate(x, spec("E2M1", "nearest", "row")), rows)
    assert same(emulate(x, spec("E2M1", "nearest", "block:4")), rows)
    assert same(emulate(x, spec("E2M1", "nearest", "block:99")), rows)
    assert (rows != 0).sum() == 4


def test_on_the_cpu_ops_has_the_reference(random):
    x = torch.randn(9, 9, generator=random)
    how, seed = spec("E4M3", "stochastic", "row"), any_seed(random)
    assert same(ops.emulate(x, how, seed), emulate(x, how, seed))


# Specifications


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("E8M3", "E8M3:nearest:none"),
        ("e8m3:truncate", "E8M3:truncate:none"),
        ("E5M2:tensor", "E5M2:nearest:tensor"),
        ("E4M3:nearest:row", "E4M3:nearest:row"),
        ("E2M1:stochastic:block:32", "E2M1:stochastic:block:32"),
        ("E2M1:block:16", "E2M1:nearest:block:16"),
        ("E3M4:none", "E3M4:nearest:none"),
    ],
)
def test_parse(text, full):
    how = EmulatedFormat.parse(text)
    assert str(how) == full and EmulatedFormat.parse(full) == how


@pytest.mark.parametrize(
    "text",
    ["", ":", "E8M3:", "E8M3:up", "E8M3:tensor:nearest", "E8M3:block", "E8M3:block:0", "E8M3:nearest:", "E8M3 :row"],
)
def test_parse_refuses(text):
    with pytest.raises(ValueError, match="use"):
        EmulatedFormat.parse(text)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"'up'.*nearest"):
        EmulatedFormat(E4M3, "up")
    with pytest.raises(ValueError, match=r"'block:0'.*block:N"):
        EmulatedFormat(E4M3, "nearest", "block:0")
