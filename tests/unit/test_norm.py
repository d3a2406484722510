"""The norms' reference against torch's norms and autograd in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.ops import norm, norm_backward, norm_quantize, reference

pytestmark = pytest.mark.usefixtures("fresh_random_data")
EPS = 1e-5
kinds = pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
gains = pytest.mark.parametrize("zero_centered", [False, True], ids=["gain", "gain-1"])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def inputs(rms: bool, zero_centered: bool, dtype=torch.float32, shape=(37, 150)):
    """(x, weight, bias), with an x whose mean is not zero."""
    weight = 0.3 * torch.randn(shape[1]) + (not zero_centered)
    bias = None if rms else torch.randn(shape[1]).to(dtype)
    return (3 * torch.randn(shape) + torch.randn(shape[0], 1)).to(dtype), weight.to(dtype), bias


def torch_norm(x, weight, bias, rms: bool, zero_centered: bool):
    gain = weight + 1 if zero_centered else weight
    return F.rms_norm(x, gain.shape, gain, EPS) if rms else F.layer_norm(x, gain.shape, gain, bias, EPS)


def close(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `got` is `exact` (float64), up to the errors of float32 sums and of one rounding to `dtype`."""
    limit = torch.finfo(dtype).eps / 2 * exact.abs() + 2e-6 * exact.abs().max()
    return got.dtype == dtype and bool(((got.double() - exact).abs() <= limit).all())


@kinds
@gains
@dtypes
def test_norm_is_torchs(rms, zero_centered, dtype):
    x, weight, bias = inputs(rms, zero_centered, dtype)
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    y, mean, rstd = norm(x, weight, bias, EPS, rms=rms, zero_centered=zero_centered)
    assert close(y, torch_norm(*wide, rms, zero_centered), dtype)
    centred = wide[0] if rms else wide[0] - wide[0].mean(1, keepdim=True)
    assert close(rstd, centred.square().mean(1).add(EPS).rsqrt(), torch.float32)
    assert (mean is None) if rms else close(mean, wide[0].mean(1), torch.float32)


@kinds
@gains
@dtypes
@pytest.mark.parametrize("past", [False, True], ids=["alone", "residual"])
def test_norm_backward_is_autograds(rms, zero_centered, dtype, past):
    x, weight, bias = inputs(rms, zero_centered, dtype)
    dy, residual = torch.randn(x.shape).to(dtype), torch.randn(x.shape).to(dtype) if past else None
    _, mean, rstd = norm(x, weight, bias, EPS, rms=rms, zero_centered=zero_centered)
    got = norm_backward(dy, x, weight, mean, rstd, rms=rms, zero_centered=zero_centered, residual=residual)
    wide = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    torch_norm(*wide, *[None] * rms, rms, zero_centered).backward(dy.double())
    exact = [t.grad for t in wide]
    assert close(got[1], exact[1], dtype)
    if past:  # the residual is added to the rounded dx, as in autograd
        alone = norm_backward(dy, x, weight, mean, rstd, rms=rms, zero_centered=zero_centered)[0]
        assert torch.equal(got[0], alone + residual)
    else:
        assert close(got[0], exact[0], dtype)
    assert (got[2] is None) if rms else close(got[2], exact[2], dtype)
    into = torch.ones_like(weight, dtype=torch.float32), None if rms else torch.ones_like(weight, dtype=torch.float32)
    more = norm_backward(dy, x, weight, mean, rstd, rms=rms, zero_centered=zero_centered, residual=residual, into=into)
    assert torch.equal(more[0], got[0]) and more[1:] == (None, None)
    for total, part in zip(into[: 2 - rms], exact[1:], strict=True):
        torch.testing.assert_close(total.double(), 1 + part, rtol=1e-5, atol=1e-5 * float(part.abs().max()))


@kinds
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_norm_quantize_casts_the_float32_y(rms, fmt):
    """The payload from a BF16 x is the cast of the float32 y, not of the BF16 y; the two differ somewhere."""
    x, weight, bias = inputs(rms, False, torch.bfloat16, (256, 512))
    scale, largest = torch.tensor(fmt.max / 8), torch.tensor(0.0)
    options = {"rms": rms, "zero_centered": False}
    y, *_ = norm(x.float(), weight, bias, EPS, **options)
    expected, expected_t = reference.quantize(y, fmt, scale, transpose=True)

    def bits(payload):
        return payload.view(torch.uint8)

    both = norm_quantize(x, weight, bias, EPS, fmt, scale, columns=True, amax_out=largest, **options)
    assert torch.equal(bits(both[0]), bits(expected)) and torch.equal(bits(both[1]), bits(expected_t))
    assert largest == y.abs().max()
    rows = norm_quantize(x, weight, bias, EPS, fmt, scale, **options)
    columns = norm_quantize(x, weight, bias, EPS, fmt, scale, rows=False, columns=True, **options)
    assert torch.equal(bits(rows[0]), bits(expected)) and rows[1] is None
    assert columns[0] is None and torch.equal(bits(columns[1]), bits(expected_t))
    twice = reference.quantize(y.bfloat16(), fmt, scale)
    assert 0 < (bits(twice) != bits(expected)).float().mean() < 0.1


@kinds
def test_the_non_finite_stays_visible(rms):
    x, weight, bias = inputs(rms, False)
    x[3, 5], x[4, 6] = math.nan, math.inf
    largest = torch.tensor(0.0)
    options = {"rms": rms, "zero_centered": False}
    payload, *_ = norm_quantize(x, weight, bias, EPS, E4M3, torch.tensor(1.0), amax_out=largest, **options)
    assert largest.isnan()
    bad = payload.float().isnan()
    assert bad[3].all() and bad[4].any() and not bad[:3].any() and not bad[5:].any()


@kinds
def test_constant_rows(rms):
    """For a constant row, LayerNorm gives the bias, and RMSNorm a value of the constant's sign, or zero for zeros."""
    x = torch.tensor([0.0, 7.0, -1e4])[:, None].expand(3, 96).contiguous()
    weight, bias = torch.full((96,), 2.0), None if rms else torch.full((96,), 0.5)
    y, _, rstd = norm(x, weight, bias, EPS, rms=rms, zero_centered=False)
    expected = torch.tensor([0.0, 2.0, -2.0])[:, None].expand(3, 96) if rms else bias.expand(3, 96)
    assert torch.allclose(y, expected, atol=1e-5) and rstd.isfinite().all()
