"""ScaledTensor: its values, and their error bound."""

from fractions import Fraction

import pytest
import torch
from exact import INF, NAN, rounded, same
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.numerics import E4M3, E5M2, ScaledTensor, compute_scale
from megatron_fp8.ops import reference

formats = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def quantized(x: torch.Tensor, fmt) -> ScaledTensor:
    scale = compute_scale(reference.amax(x), fmt)
    return ScaledTensor(reference.quantize(x, fmt, scale), scale.reciprocal())


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_multiplies_in_float32_and_rounds_once(fmt, dtype):
    payload = torch.randint(0, 256, (16, 16), dtype=torch.uint8).view(fmt.dtype)
    scale_inv = torch.tensor(0.0123)
    values = ScaledTensor(payload, scale_inv).dequantize(dtype)
    assert values.dtype == dtype
    for got, code in zip(values.flatten(), payload.flatten(), strict=True):
        assert same(got, (code.float() * scale_inv).to(dtype))


@formats
def test_format_and_default_dtype(fmt):
    tensor = quantized(torch.randn(3, 5), fmt)
    assert tensor.format is fmt
    assert tensor.dequantize().dtype == torch.float32
    assert tensor.dequantize().shape == (3, 5)


@formats
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), magnitude=st.integers(-80, 80), spread=st.floats(0.1, 6))
def test_error_bound(fmt, seed, magnitude, spread):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, generator=generator).mul(spread).exp() * torch.randn(64, generator=generator).sign()
    x = x * 2.0**magnitude
    tensor = quantized(x, fmt)
    error = (tensor.dequantize() - x).abs().double()
    half_ulp = 2.0 ** -(fmt.mantissa_bits + 1) * x.abs().double()
    half_step = fmt.smallest_subnormal / 2 * tensor.scale_inv.double()
    assert (error <= torch.maximum(half_ulp, half_step) * (1 + 1e-6)).all()
    assert (error > 0).any()
    assert tensor.payload.float().abs().max() == fmt.max


@formats
def test_payload_is_the_exact_rounding_of_the_scaled_value(fmt):
    x = torch.randn(500)
    scale = compute_scale(reference.amax(x), fmt)
    expected = [rounded(Fraction(v), fmt) for v in (x * scale).tolist()]
    assert same(quantized(x, fmt).payload.float(), torch.tensor(expected).copysign(x))


@formats
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_not_finite_stays_visible(fmt, bad):
    values = quantized(torch.tensor([1.0, bad, -3.0]), fmt).dequantize()
    assert values.isfinite().tolist() == [True, False, True]


@formats
def test_zeros(fmt):
    assert same(quantized(torch.tensor([0.0, -0.0]), fmt).dequantize(), torch.tensor([0.0, -0.0]))
