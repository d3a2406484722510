"""The formats against their definition, code by code, and against torch's own description."""

import math
from fractions import Fraction

import pytest
import torch
from exact import magnitudes, same

from megatron_fp8.numerics import E4M3, E5M2, FORMATS, by_dtype, decode

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
