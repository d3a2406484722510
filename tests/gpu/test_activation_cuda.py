"""The fused activations and quantize_bias_grad on CUDA: against float64, and casts against the reference's cast.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import math
import os

import pytest
import torch
from torch.nn import functional

from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.numerics.blocks import RowBlocks
from megatron_fp8.ops import reference, reference_activation
from megatron_fp8.ops.reference_activation import GATED, KINDS, blocks_for
from megatron_fp8.ops.triton import activation, cast

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.usefixtures("fresh_random_data"), *([] if INTERPRETED else [pytest.mark.gpu])]
DEVICE = "cpu" if INTERPRETED else "cuda"

INF, NAN = math.inf, math.nan
ACT = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "squared_relu": lambda x: functional.relu(x) ** 2,
    "swiglu": functional.silu,
    "geglu": lambda x: functional.gelu(x, approximate="tanh"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def name(x) -> str:
    return getattr(x, "name", str(x))


SHAPES = [(1, 1), (66, 130), (132, 144)]
if not INTERPRETED:
    SHAPES += [(3, 5), (16, 16), (64, 128), (127, 129), (70, 8), (2, 300), (333, 1000)]
# Each kind at one shape that all vector widths divide; every shape, and no bias, with one plain and one gated kind.
CASES = [pytest.param(kind, True, (48, 144), marks=pytest.mark.smoke) for kind in KINDS]
CASES += [("gelu", True, shape) for shape in SHAPES]
CASES += [("swiglu", False, shape) for shape in [(66, 130), *SHAPES[-1:]]]
cases = pytest.mark.parametrize(("kind", "with_bias", "shape"), CASES, ids=str)
OPTIONS = ("gelu", "swiglu")  # kinds for tests of each choice of outputs, which does not depend on the kind
# The kernels' float32 values err by at most RELATIVE * |value| + ABSOLUTE * (the function's factor).
RELATIVE, ABSOLUTE = 2**-17, 2**-19


def data(kind, with_bias, M, F, dtype=torch.bfloat16):
    wide = F * (2 if kind in GATED else 1)
    h, dy = (2 * torch.randn(M, wide)).to(dtype), torch.randn(M, F).to(dtype)
    return dy, h, torch.randn(wide).to(dtype) if with_bias else None


def put(x):
    return None if x is None else x.to(DEVICE)


def exact(dy, h, kind, bias):
    """(act, dh, act's error bound, dh's error bound) in float64."""
    x = h.double() if bias is None else h.double() + bias.double()
    one, two = x.chunk(2, -1) if kind in GATED else (x, torch.ones_like(x))
    one.requires_grad_()
    value, dy = ACT[kind](one), dy.double()
    value.sum().backward()
    slope, value = one.grad, value.detach()
    y, dh, error = value * two, dy * slope * two, ABSOLUTE * two.abs()
    error_back = error * dy.abs()
    if kind in GATED:
        dh, error_back = torch.cat([dh, dy * value], -1), torch.cat([error_back, ABSOLUTE * dy.abs()], -1)
    return y, dh, error + RELATIVE * y.abs(), error_back + RELATIVE * dh.abs()


def close(got, expected, error, rounding=0.0) -> bool:
    """Whether |got - expected| <= error, plus `rounding`, the relative error of got's type.

    Also for sums over rows. Their order depends on the kernel's layout, and so on the choice of outputs: only the same
    call gives the same bits (test_the_same_bits_each_time).
    """
    return bool(((got.cpu().double() - expected).abs() <= error + rounding * (expected.abs() + error)).all())


def cast_of_nearly(payload, x, error, fmt, scale) -> bool:
    """Whether payload is the cast of values within `error` of x (float64)."""
    low, high = (reference.quantize(v.float(), fmt, torch.tensor(scale)).double() for v in (x - error, x + error))
    got = payload.cpu().double()
    return payload.shape == x.shape and bool(((low <= got) & (got <= high)).all())


def same(a, b) -> bool:
    a, b = a.cpu().float(), b.cpu().float()
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


@cases
def test_forward(kind, with_bias, shape, fmt=E4M3):
    _, h, bias = data(kind, with_bias, *shape)
    y, _, error, _ = exact(torch.ones(shape), h, kind, bias)
    scale, largest = fmt.max / 4, put(torch.tensor(0.0))
    options = {"bias": put(bias), "amax_out": largest}
    args = put(h), kind, fmt, put(torch.tensor(scale))
    payload, payload_t = activation.activate_quantize(*args, columns=True, **options)
    assert cast_of_nearly(payload, y, error, fmt, scale)
    assert same(payload_t.t(), payload) and payload_t.is_contiguous()
    assert close(largest, y.abs().max(), error.max())
    if kind in OPTIONS:
        rows, none = activation.activate_quantize(*args, **options)
        assert none is None and cast_of_nearly(rows, y, error, fmt, scale)
        none, columns = activation.activate_quantize(*args, rows=False, columns=True, bias=put(bias))
        assert none is None and cast_of_nearly(columns.t(), y, error, fmt, scale)
    assert close(activation.activate(put(h), kind, put(bias)), y, error, 2**-8)


@cases
def test_backward(kind, with_bias, shape, fmt=E5M2):
    dy, h, bias = data(kind, with_bias, *shape)
    _, dh, _, error = exact(dy, h, kind, bias)
    scale, largest = fmt.max / 4, put(torch.tensor(0.0))
    args = put(dy), put(h), kind, fmt, put(torch.tensor(scale))
    payload, payload_t, dbias = activation.activate_backward_quantize(
        *args, bias=put(bias), columns=True, amax_out=largest, bias_grad=True
    )
    assert cast_of_nearly(payload, dh, error, fmt, scale)
    assert same(payload_t.t(), payload) and payload_t.is_contiguous()
    assert close(largest, dh.abs().max(), error.max())
    assert dbias.dtype == h.dtype
    error_sum = error.sum(0) + 1e-6 * dh.abs().sum(0)
    assert close(dbias, dh.sum(0), error_sum, 2**-8)
    if kind in OPTIONS:
        rows, none, no_sum = activation.activate_backward_quantize(*args, bias=put(bias))
        assert none is None and no_sum is None and cast_of_nearly(rows, dh, error, fmt, scale)
        none, columns, again = activation.activate_backward_quantize(
            *args, bias=put(bias), rows=False, columns=True, bias_grad=True
        )
        assert none is None and cast_of_nearly(columns.t(), dh, error, fmt, scale)
        assert close(again, dh.sum(0), error_sum, 2**-8)
    assert close(activation.activate_backward(put(dy), put(h), kind, put(bias)), dh, error, 2**-8)


@pytest.mark.parametrize("kind", ["squared_relu", "geglu"])
def test_the_other_format(kind):
    test_forward(kind, True, (68, 30), E5M2)
    test_backward(kind, True, (68, 30), E4M3)


@kinds
def test_every_bfloat16(kind):
    """All finite bfloat16, as float32, so that the result is not rounded."""
    h = torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    # Beyond this, x^2 overflows, also in stock's formulas.
    h = h[h.abs() < 1e18]
    h = torch.cat([h, h.new_zeros(-len(h) % 128)]).view(-1, 128)
    if kind in GATED:
        h = torch.cat([h, torch.ones_like(h)], -1)
    dy = torch.ones(h.shape[0], 128)
    y, dh, error, error_back = exact(dy, h, kind, None)
    value, slope = activation.activate(put(h), kind), activation.activate_backward(put(dy), put(h), kind)
    assert close(value, y, error + 1e-37) and close(slope, dh, error_back + 1e-37)
    if kind == "gelu":  # the bound stated in ops/triton/activation.py
        inside = h.abs() < 8
        assert (value.cpu().double() - y)[inside].abs().max() < 1.6e-6
        assert (slope.cpu().double() - dh)[inside].abs().max() < 1.6e-6


@pytest.mark.parametrize(
    ("kind", "fmt"), [(kind, E4M3) for kind in KINDS] + [("gelu", E5M2), ("swiglu", E5M2)], ids=name
)
def test_the_non_finite_stays_visible(kind, fmt):
    """If the reference gives NaN or infinity, the kernel does too, in its payload, its columns and amax."""
    wide = 2 if kind in GATED else 1
    h, dy = torch.randn(7, 4 * wide).bfloat16(), torch.randn(7, 4).bfloat16()
    for place, bad in enumerate((INF, -INF, NAN)):
        h[place, place] = bad
        dy[4 + place, place] = bad
    if wide == 2:
        h[3, 4], h[3, 5], h[3, 6] = INF, -INF, NAN
    scale = put(torch.tensor(2.0))
    for got, expected in [
        (activation.activate(put(h), kind), reference_of("activate", h, kind)),
        (activation.activate_backward(put(dy), put(h), kind), reference_of("activate_backward", dy, h, kind)),
    ]:
        assert same(got.isnan(), expected.isnan()) and same(got.isinf(), expected.isinf())
        assert not expected.isfinite().all()
    largest = put(torch.tensor(0.0))
    payload, payload_t = activation.activate_quantize(put(h), kind, fmt, scale, columns=True, amax_out=largest)
    expected = reference_of("activate", h, kind).float()
    assert same(payload.float().isfinite(), expected.isfinite()) and same(payload_t.t(), payload)
    assert not largest.isfinite() and bool(largest.isnan()) == bool(expected.isnan().any())
    largest = put(torch.tensor(0.0))
    payload, payload_t, _ = activation.activate_backward_quantize(
        put(dy), put(h), kind, fmt, scale, columns=True, amax_out=largest
    )
    expected = reference_of("activate_backward", dy, h, kind).float()
    assert same(payload.float().isfinite(), expected.isfinite()) and same(payload_t.t(), payload)
    assert not largest.isfinite()


def reference_of(name, *args):
    return getattr(reference_activation, name)(*args)


def same_blocks(a: RowBlocks, b: RowBlocks) -> bool:
    return same(a.payload, b.payload) and torch.equal(a.exponents.cpu(), b.exponents.cpu())


def kept_of(h, kind, bias) -> tuple[RowBlocks, RowBlocks]:
    """(the blocks of h + bias that the cast keeps, those of the reference). The form without a cast keeps the same."""
    expected = blocks_for(h, kind)
    reference_activation.activate(h, kind, bias, expected)
    kept, again = blocks_for(put(h), kind), blocks_for(put(h), kind)
    activation.activate(put(h), kind, put(bias), again)
    activation.activate_quantize(put(h), kind, E4M3, put(torch.tensor(1.0)), bias=put(bias), kept=kept)
    assert same_blocks(again, kept)
    return kept, expected


@pytest.mark.parametrize(
    ("kind", "with_bias", "shape"),
    [
        ("gelu", True, (66, 130)),
        pytest.param("swiglu", True, (66, 130), marks=pytest.mark.smoke),
        *([] if INTERPRETED else [(kind, False, shape) for kind in KINDS for shape in SHAPES]),
    ],
    ids=str,
)
def test_the_kept_blocks(kind, with_bias, shape):
    """The kept blocks have the reference's bytes. Results computed from them are those of their values."""
    dy, h, bias = data(kind, with_bias, *shape)
    kept, expected = kept_of(h, kind, bias)
    assert same_blocks(kept, expected)
    y, dh, error, error_back = exact(dy, expected.dequantize().view(h.shape), kind, None)
    scale = put(torch.tensor(30.0))
    none, columns = activation.activate_quantize(kept, kind, E4M3, scale, rows=False, columns=True)
    assert none is None and cast_of_nearly(columns.t(), y, error, E4M3, 30.0)
    again = columns.new_empty(columns.shape)
    payload, payload_t, dbias = activation.activate_backward_quantize(
        put(dy), kept, kind, E5M2, scale, columns=True, bias_grad=True, again=(scale, again)
    )
    assert cast_of_nearly(again.t(), y, error, E4M3, 30.0)
    assert cast_of_nearly(payload, dh, error_back, E5M2, 30.0) and same(payload_t.t(), payload)
    assert close(dbias, dh.sum(0), error_back.sum(0) + 1e-6 * dh.abs().sum(0), 2**-8) and dbias.dtype == dy.dtype
    if kind in OPTIONS:
        got = activation.activate_backward(put(dy), kept, kind)
        assert close(got, dh, error_back, 2**-8) and got.dtype == dy.dtype


def test_the_kept_blocks_of_edge_values():
    _, h, _ = data("swiglu", False, 9, 200, torch.float32)
    h[0], h[1, :128], h[2], h[3, 7], h[4, 150], h[5, 9], h[6] = 0.0, 1e-42, 7.0, NAN, -INF, 3e38, 1e-30
    kept, expected = kept_of(h, "swiglu", None)
    assert same_blocks(kept, expected)
    dh = activation.activate_backward(put(torch.ones(9, 200)), kept, "swiglu").cpu()
    assert dh[3].isnan().any() and not dh[4].isfinite().all() and dh[[0, 1, 2, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "dtype", "fmt"),
    [(shape, torch.bfloat16, E5M2) for shape in [*SHAPES, (260, 2)]] + [((132, 144), torch.float32, E4M3)],
    ids=name,
)
def test_quantize_bias_grad(shape, dtype, fmt):
    dy, scale = torch.randn(shape).to(dtype), torch.tensor(fmt.max / 3)
    largest = put(torch.tensor(0.0))
    payload, payload_t, dbias = cast.quantize_bias_grad(put(dy), fmt, put(scale), columns=True, amax_out=largest)
    expected, expected_t = reference.quantize(dy, fmt, scale, transpose=True)
    assert same(payload, expected) and same(payload_t, expected_t)
    assert same(largest, reference.amax(dy)) and dbias.dtype == dtype
    error, rounding = 1e-6 * dy.double().abs().sum(0), 2**-8 if dtype == torch.bfloat16 else 0
    assert close(dbias, dy.double().sum(0), error, rounding)
    rows, none, again = cast.quantize_bias_grad(put(dy), fmt, put(scale))
    assert none is None and same(rows, expected) and close(again, dy.double().sum(0), error, rounding)
    none, columns, again = cast.quantize_bias_grad(put(dy), fmt, put(scale), rows=False, columns=True)
    assert none is None and same(columns, expected_t) and close(again, dy.double().sum(0), error, rounding)


def test_strides_and_offsets():
    """A transposed h, and one at an address that is no multiple of 16 bytes."""
    dy, h, _ = data("swiglu", False, 68, 50)
    _, dh, _, error = exact(dy, h, "swiglu", None)
    scale = put(torch.tensor(3.0))
    strided = put(h.t().contiguous()).t()
    shifted = torch.cat([put(h).flatten()[:1], put(h).flatten()])[1:].view(h.shape)
    for other in (strided, shifted):
        assert same(other, h)
        payload, payload_t, dbias = activation.activate_backward_quantize(
            put(dy), other, "swiglu", E5M2, scale, columns=True, bias_grad=True
        )
        assert cast_of_nearly(payload, dh, error, E5M2, 3.0) and same(payload_t.t(), payload)
        assert close(dbias, dh.sum(0), error.sum(0) + 1e-6 * dh.abs().sum(0), 2**-8)


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_any_number_of_tiles_a_program(kind, monkeypatch):
    """The same numbers, and the same sums except for their order."""
    dy, h, bias = data(kind, True, 555, 72 if INTERPRETED else 200)
    _, dh, _, error = exact(dy, h, kind, bias)
    made = []
    for fewest in (1, 1 << 40):
        monkeypatch.setattr("megatron_fp8.ops.triton.sums.FEWEST_PROGRAMS", fewest)
        how = {"columns": True, "amax_out": put(torch.tensor(0.0))}
        scale = put(torch.tensor(3.0))
        *one, one_sum = activation.activate_backward_quantize(
            put(dy), put(h), kind, E5M2, scale, bias=put(bias), bias_grad=True, **how
        )
        *other, other_sum = cast.quantize_bias_grad(put(dy), E5M2, scale, **how)
        assert close(one_sum, dh.sum(0), error.sum(0) + 1e-6 * dh.abs().sum(0), 2**-8)
        assert close(other_sum, dy.double().sum(0), 1e-6 * dy.double().abs().sum(0), 2**-8)
        made.append([*one, *other, how["amax_out"]])
    assert all(same(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_the_same_bits_each_time(kind):
    dy, h, bias = (put(x) for x in data(kind, True, 4099, 2056))
    scale, first = put(torch.tensor(100.0)), None
    for _ in range(10):
        largest = put(torch.tensor(0.0))
        options = {"columns": True, "amax_out": largest}
        made = activation.activate_backward_quantize(dy, h, kind, E5M2, scale, bias=bias, bias_grad=True, **options)
        made = (*made, *cast.quantize_bias_grad(dy, E5M2, scale, **options))
        made = [largest, *(x.view(torch.uint8) if x.dtype == E5M2.dtype else x for x in made)]
        first = first or made
        assert all(torch.equal(a, b) for a, b in zip(made, first, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_beyond_32_bit_offsets(kind):
    """With more than 2^31 elements, the last rows are right: the same as of these rows alone."""
    rows, wide = 66_000, 32_768
    h = torch.empty(rows, wide, dtype=torch.bfloat16, device=DEVICE)
    h[: rows - 64], h[rows - 64 :] = 0.5, torch.randn(64, wide, dtype=torch.bfloat16, device=DEVICE)
    scale = put(torch.tensor(100.0))
    payload, payload_t = activation.activate_quantize(h, kind, E4M3, scale, columns=True)
    tail, tail_t = activation.activate_quantize(h[rows - 64 :], kind, E4M3, scale, columns=True)
    assert same(payload[rows - 64 :], tail) and same(payload_t[:, rows - 64 :], tail_t)
