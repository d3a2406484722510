"""The formats against their definition, code by code, and against torch's own description."""

import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from exact import INF, NAN, magnitudes, same

import megatron_fp8
from megatron_fp8.numerics import E4M3, E5M2, FORMATS, by_dtype, decode, encode

ALL_CODES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_every_code_has_the_value_of_the_definition(fmt):
    values = decode(ALL_CODES.view(fmt.dtype)).tolist()
    finite = magnitudes(fmt)
    for code in range(128):
        positive, negative = values[code], values[code + 128]
        if code < len(finite):
            assert Fraction(positive) == finite[code]
            assert negative == -positive and math.copysign(1, negative) == -1
        elif fmt.has_infinity and code == len(finite):
            assert (positive, negative) == (math.inf, -math.inf)
        else:
            assert math.isnan(positive) and math.isnan(negative)
    nan_codes = 1 if fmt is E4M3 else 3
    assert len(finite) + fmt.has_infinity + nan_codes == 128


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_constants_agree_with_torch(fmt):
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max == float(magnitudes(fmt)[-1])
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.smallest_subnormal == float(magnitudes(fmt)[1])
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == info.bits
    assert 2.0**-fmt.mantissa_bits == info.eps


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (7, 3, 5), (8193,)])
def test_decode_is_torchs_own_conversion(fmt, shape):
    payload = torch.randint(0, 256, shape, dtype=torch.uint8).view(fmt.dtype)
    assert same(decode(payload), payload.float())


# Above each maximum: half an ulp beyond it, the next float32, and values that no format here holds.
BEYOND = {E4M3: [449, 464, 464.00003, 480, 65504, 3.4e38], E5M2: [57345, 61440, 61440.004, 65536, 3.4e38]}
# The codes of (maximum, infinity, NaN). Those of torch's casts differ from release to release; these must not.
CODES = {E4M3: (0x7E, 0x7F, {0x7F, 0xFF}), E5M2: (0x7B, 0x7C, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF})}


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [None, 2.0**-126, 0.75, 1.0, 2.0**126], ids=str)
def test_encode_writes_these_bytes_on_every_version_of_torch(fmt, dtype, scale):
    largest, infinity, nan = CODES[fmt]
    factor = None if scale is None else torch.tensor(scale)

    def codes(values):
        found = encode(torch.tensor(values).to(dtype), fmt, factor)
        assert found.dtype == fmt.dtype and found.is_contiguous()
        return found.view(torch.uint8).tolist()

    assert codes([INF, -INF] * 40) == [infinity, infinity | 128] * 40  # longer than a vector register, with a tail
    assert set(codes([NAN, -NAN] * 40)) <= nan
    if scale in (None, 1.0):
        beyond = [value for value in BEYOND[fmt] if value <= torch.finfo(dtype).max]
        assert codes([fmt.max, *beyond] * 9) == [largest] * 9 * (1 + len(beyond))
        assert codes([-fmt.max, *(-value for value in beyond)]) == [largest | 128] * (1 + len(beyond))
        assert codes([0.0, -0.0, 1.0, -1.0]) == [
            0,
            128,
            fmt.bias << fmt.mantissa_bits,
            fmt.bias << fmt.mantissa_bits | 128,
        ]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_a_product_beyond_float32_saturates_for_a_finite_value(fmt):
    codes = encode(torch.tensor([3e38, -3e38, 2.0, INF]), fmt, torch.tensor(2.0**126)).view(torch.uint8).tolist()
    largest, infinity, _ = CODES[fmt]
    assert codes == [largest, largest | 128, largest, infinity]


def test_nothing_else_casts_to_float8():
    """Only our own code is searched. tests/gpu compares the kernels' own conversions."""
    casts = re.compile(r"\.(to|type|_to_copy)\([^()]*(float8|(E4M3|E5M2|fmt|fp8)\.dtype)")
    package = Path(megatron_fp8.__file__).parent
    found = {
        f"{path.relative_to(package)}: {line.strip()}"
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if casts.search(line) and "bitcast=True" not in line
    }
    assert found == {"numerics/formats.py: payload = y.to(fmt.dtype)"}


@pytest.mark.parametrize("shape", [(33, 17), (150, 70)], ids=["few", "many"])
def test_decode_of_a_transposed_and_of_an_offset_view(shape):
    payload = torch.randint(0, 256, shape, dtype=torch.uint8).view(E4M3.dtype)
    assert same(decode(payload.t()), payload.float().t()) and decode(payload.t()).is_contiguous()
    assert same(decode(payload[3:, 1:]), payload.float()[3:, 1:])


def test_look_up():
    assert FORMATS == {"e4m3": E4M3, "e5m2": E5M2}
    assert by_dtype(torch.float8_e4m3fn) is E4M3
    assert by_dtype(torch.float8_e5m2) is E5M2
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*float8_e4m3fn"):
        by_dtype(torch.bfloat16)
