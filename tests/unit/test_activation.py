"""The reference of the fused activations against autograd in float64."""

import pytest
import torch
from torch.nn import functional

from megatron_fp8 import ops
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.ops.reference_activation import GATED, KINDS

EXACT = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "squared_relu": lambda x: functional.relu(x) ** 2,
    "swiglu": lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "geglu": lambda x: functional.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
}
kinds = pytest.mark.parametrize("kind", KINDS)
biases = pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])


def exact(dy, h, kind, bias):
    """(act, dh) in float64."""
    x = h.double() if bias is None else h.double() + bias.double()
    x.requires_grad_()
    y = EXACT[kind](x)
    y.backward(dy.double())
    return y.detach(), x.grad


def data(kind, with_bias, rows=37, width=24):
    wide = width * (2 if kind in GATED else 1)
    h, dy = (2 * torch.randn(rows, wide)).bfloat16(), torch.randn(rows, width).bfloat16()
    return dy, h, torch.randn(wide).bfloat16() if with_bias else None


@kinds
@biases
def test_the_reference_is_autograd_of_the_formula(kind, with_bias):
    dy, h, bias = data(kind, with_bias)
    y, dh = exact(dy, h, kind, bias)
    for got, expected in [(ops.activate(h, kind, bias), y), (ops.activate_backward(dy, h, kind, bias), dh)]:
        assert got.dtype == h.dtype
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-5)


@kinds
@biases
def test_the_cast_is_one_rounding_of_float32(kind, with_bias):
    """The payload is ops.quantize of the float32 values, amax is theirs, and dbias is their sum over rows."""
    dy, h, bias = data(kind, with_bias)
    y, dh = exact(dy, h, kind, bias)
    one, scale = torch.tensor(0.0), torch.tensor(3.0)
    payload, payload_t = ops.activate_quantize(h, kind, E4M3, scale, bias=bias, columns=True, amax_out=one)
    torch.testing.assert_close(one.double(), y.abs().max(), rtol=1e-6, atol=0)
    # Half an ulp; for subnormals a whole one, because float32's own error may decide a tie.
    torch.testing.assert_close(payload.double() / 3, y, rtol=2**-4 + 1e-5, atol=2**-9 / 3 + 1e-6)
    assert torch.equal(payload.t().float(), payload_t.float()) and payload_t.is_contiguous()
    two = torch.tensor(0.0)
    got, got_t, dbias = ops.activate_backward_quantize(
        dy, h, kind, E5M2, scale, bias=bias, columns=True, amax_out=two, bias_grad=True
    )
    torch.testing.assert_close(two.double(), dh.abs().max(), rtol=1e-6, atol=0)
    torch.testing.assert_close(got.double() / 3, dh, rtol=2**-3 + 1e-5, atol=2**-16 / 3 + 1e-6)
    assert torch.equal(got.t().float(), got_t.float()) and got_t.is_contiguous()
    assert dbias.dtype == h.dtype and dbias.shape == h.shape[1:]
    torch.testing.assert_close(dbias.double(), dh.sum(0), rtol=2**-8, atol=1e-5)


def test_payloads_that_are_not_wanted_are_none():
    dy, h, _ = data("swiglu", False)
    scale = torch.tensor(1.0)
    assert ops.activate_quantize(h, "swiglu", E4M3, scale)[1] is None
    assert ops.activate_quantize(h, "swiglu", E4M3, scale, rows=False, columns=True)[0] is None
    payload, columns, dbias = ops.activate_backward_quantize(dy, h, "swiglu", E5M2, scale)
    assert payload.shape == h.shape and columns is None and dbias is None


def test_the_bias_gradient_of_a_cast():
    dy, largest = torch.randn(50, 12).bfloat16(), torch.tensor(0.0)
    payload, payload_t, dbias = ops.quantize_bias_grad(dy, E5M2, torch.tensor(8.0), columns=True, amax_out=largest)
    expected, expected_t = ops.quantize(dy, E5M2, torch.tensor(8.0), transpose=True)
    assert torch.equal(payload.float(), expected.float()) and torch.equal(payload_t.float(), expected_t.float())
    assert torch.equal(dbias, dy.float().sum(0).bfloat16()) and largest == dy.abs().max()


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"'relu6'.*gelu"):
        ops.activate(torch.ones(2, 2), "relu6")
