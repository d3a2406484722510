"""ops.norm, ops.norm_quantize and ops.norm_backward on CUDA against reference_norm.py on the CPU.

A result must lie between the roundings (to BF16, FP16 or FP8) of v - e and v + e. v is the reference's float32 value,
and e a few units in the last place of float32 at the row's largest magnitude. tests/unit/test_triton_interpreter.py
runs this file without a GPU too, through Triton's interpreter.
"""

import math

import pytest
import torch
from test_ops_cuda import DEVICE, INTERPRETED, on_gpu_only, put, same

from megatron_fp8 import ops
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.ops import reference_norm

pytestmark = [pytest.mark.usefixtures("fresh_random_data"), *([] if INTERPRETED else [pytest.mark.gpu])]
if INTERPRETED:
    from megatron_fp8.ops.triton.norm import norm, norm_backward, norm_quantize, norm_requantize
else:
    norm, norm_backward, norm_quantize = ops.norm, ops.norm_backward, ops.norm_quantize
    norm_requantize = ops.norm_requantize

INF, NAN, EPS = math.inf, math.nan, 1e-5
UNITS = 4e-6  # e relative to the row's largest magnitude; float32's unit is 1.2e-7
kinds = pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
# Each K is compiled separately.
SHAPES = [(1, 1), (3, 5), (33, 300), (65, 768), (5, 1501), (2, 2501 if INTERPRETED else 9001)]
shapes = pytest.mark.parametrize(  # RMSNorm does a part of what LayerNorm does: two shapes
    ("rms", "shape"), [*((False, shape) for shape in SHAPES), (True, (33, 300)), (True, SHAPES[-1])], ids=str
)
types = pytest.mark.parametrize(
    ("rms", "zero_centered", "dtype"),
    [
        (False, True, torch.float16),
        (False, False, torch.float32),
        (True, False, torch.float16),
        (True, True, torch.float32),
    ],
    ids=str,
)


def inputs(shape, dtype, rms: bool, zero_centered: bool):
    """(x, weight, bias) on the CPU, with an x whose mean is not zero."""
    x = (3 * torch.randn(shape) + torch.randn(shape[0], 1)).to(dtype)
    weight = (0.3 * torch.randn(shape[1]) + (not zero_centered)).to(dtype)
    return x, weight, None if rms else torch.randn(shape[1]).to(dtype)


def on_device(*tensors):
    return [None if t is None else put(t) for t in tensors]


def largest(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    return x.abs().amax(dim, keepdim=True)


def between(got: torch.Tensor, value: torch.Tensor, noise: torch.Tensor, rounded=None) -> bool:
    """Whether `got` is the rounding of a number within `noise` of `value` (float32), or NaN if `value` is NaN."""
    dtype = got.dtype
    rounded = rounded or (lambda x: x.to(dtype))
    got, noise = got.cpu().float(), noise.nan_to_num(0.0, 0.0)
    low, high = rounded(value - noise).float(), rounded(value + noise).float()
    inside = (low <= got) & (got <= high)
    return bool(torch.where(value.isnan(), got.isnan(), inside).all())


def noise_of_y(x, weight, bias, mean, rstd, zero_centered) -> torch.Tensor:
    gain = (weight.float() + zero_centered).abs().max()
    level = 0 if mean is None else mean[:, None].abs()
    return UNITS * (gain * (largest(x.float()) + level) * rstd[:, None] + (0 if bias is None else bias.abs().max()))


def agree_statistics(got, expected, x) -> bool:
    """Whether means agree to float32 units of the largest |x|, and rstd to its own units plus the loss from x's mean.

    If a value is not finite, `got` may be NaN or infinite.
    """
    got, expected = ([None if s is None else s.where(s.isfinite(), NAN) for s in pair] for pair in (got, expected))
    mean, rstd, level = expected[0], expected[1], largest(x.float())[:, 0]
    tolerance = UNITS * rstd * (1 + (0 if mean is None else UNITS * (level * rstd) ** 2))
    right = between(got[1], rstd, tolerance)
    return right and (got[0] is None if mean is None else between(got[0], mean, UNITS * level))


def check_forward(x, weight, bias, fmt=E4M3, *, rms=False, zero_centered=False, scale=20.0, layout="plain") -> None:
    """Check `norm`, and `norm_quantize` with each choice of outputs."""
    options = {"rms": rms, "zero_centered": zero_centered}
    y, mean, rstd = reference_norm.norm(x.float(), weight, bias, EPS, **options)
    noise = noise_of_y(x, weight, bias, mean, rstd, zero_centered)
    arguments = [put(x, layout), *on_device(weight, bias), EPS]
    got, *statistics = norm(*arguments, **options)
    assert got.dtype == x.dtype and between(got, y, noise) and agree_statistics(statistics, (mean, rstd), x)
    scale = torch.tensor(scale)

    def cast(value):
        return ops.quantize(value, fmt, scale)

    for rows, columns, before in ((True, False, 0.0), (True, True, 0.0), (False, True, None), (True, True, 1e30)):
        amax_out = None if before is None else put(torch.tensor(before))
        payload, payload_t, *statistics = norm_quantize(
            *arguments, fmt, put(scale), rows=rows, columns=columns, amax_out=amax_out, **options
        )
        assert (payload is not None) == rows and (payload_t is not None) == columns
        assert payload is None or (payload.dtype == fmt.dtype and between(payload, y, noise, cast))
        if payload_t is not None:
            assert payload_t.shape == x.shape[::-1] and payload_t.is_contiguous()
            assert between(payload_t.t(), y, noise, cast)
        assert payload is None or payload_t is None or same(payload_t.t(), payload)
        assert agree_statistics(statistics, (mean, rstd), x)
        if amax_out is not None:
            assert between(amax_out, y.abs().max().clamp(min=before), noise.max())  # clamp keeps NaN


def check_backward(shape, dtype, rms, zero_centered, past, layout="plain") -> None:
    options = {"rms": rms, "zero_centered": zero_centered}
    x, weight, bias = inputs(shape, dtype, rms, zero_centered)
    dy, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype) if past else None
    _, mean, rstd = reference_norm.norm(x, weight, bias, EPS, **options)
    wide = [None if t is None else t.float() for t in (dy, x, weight, mean, rstd)]
    dx, dweight, dbias = reference_norm.norm_backward(*wide, **options)
    got = norm_backward(
        put(dy, layout), put(x, layout), *on_device(weight, mean, rstd), **options,
        residual=None if residual is None else put(residual, layout),
    )  # fmt: skip
    into = torch.ones_like(weight, dtype=torch.float32), None if rms else torch.ones_like(weight, dtype=torch.float32)
    into = on_device(*into)
    more = norm_backward(
        put(dy, layout), put(x, layout), *on_device(weight, mean, rstd), **options,
        residual=None if residual is None else put(residual, layout), into=into,
    )  # fmt: skip
    assert same(more[0], got[0]) and more[1:] == (None, None)
    for total, part in zip(into, got[1:], strict=True):
        assert part is None or torch.allclose(total - 1, part.float(), rtol=1e-2, atol=1e-5 * shape[0] + 1e-2)
    normalized = (x.float() - (0 if rms else mean[:, None])) * rstd[:, None]
    g = dy.float() * (weight.float() + zero_centered)
    noise = rstd[:, None] * largest(g) * (1 + largest(normalized))

    def rounded(dx):
        return dx.to(dtype) if residual is None else dx.to(dtype) + residual

    assert got[0].dtype == dtype and between(got[0], dx, UNITS * noise, rounded)
    level = 0 if rms else (mean * rstd)[:, None].abs()
    assert got[1].dtype == dtype
    assert between(got[1], dweight, UNITS * (dy.float().abs() * (normalized.abs() + level)).sum(0))
    assert (got[2] is None) if rms else between(got[2], dbias, UNITS * dy.float().abs().sum(0))


@shapes
def test_forward_of_all_shapes(rms, shape):
    check_forward(*inputs(shape, torch.bfloat16, rms, False), rms=rms)


@types
def test_forward_of_all_types(rms, zero_centered, dtype):
    fmt = E5M2 if zero_centered else E4M3
    check_forward(*inputs((35, 300), dtype, rms, zero_centered), fmt, rms=rms, zero_centered=zero_centered)


@pytest.mark.parametrize(("rms", "fmt"), [(False, E4M3), (True, E5M2)], ids=["layernorm-e4m3", "rmsnorm-e5m2"])
def test_edge_values(rms, fmt):
    """Rows of zeros, of a constant, of the smallest numbers; with a NaN, an infinity or a huge value, early or late."""
    x, weight, bias = inputs((12, 300), torch.float32, rms, False)
    x[0], x[1], x[2] = 0.0, 7.0, 1e-42
    x[3, 5], x[4, 2], x[5, -2], x[6, 1], x[7, -1], x[8, -3] = NAN, INF, -INF, 1e30, -1e30, 3e4
    x[9, :150] += 1e3
    for finite in (False, True):
        rows = [0, 1, 2, 6, 7, 8, 9, 10, 11] if finite else slice(None)
        check_forward(x[rows], weight, bias, fmt, rms=rms, scale=300.0)
        check_forward(x[rows], weight, bias, fmt, rms=rms, scale=1e38)


@kinds
def test_infinite_bias_and_weight(rms):
    """An infinite y is NaN in E4M3 and infinity in E5M2; amax is infinite."""
    x, weight, bias = inputs((5, 300), torch.float32, rms, False)
    weight[3] = INF
    for fmt in (E4M3, E5M2):
        payload, payload_t, *_ = norm_quantize(
            *on_device(x, weight, bias), EPS, fmt, put(torch.tensor(1.0)),
            rms=rms, zero_centered=False, columns=True, amax_out=(amax := put(torch.tensor(0.0))),
        )  # fmt: skip
        assert amax.isinf() and same(payload, payload_t.t())
        column = payload.cpu().float()[:, 3]
        assert (column.isnan() if fmt is E4M3 else column.isinf()).all()


@pytest.mark.parametrize("layout", [pytest.param("offset", marks=pytest.mark.smoke), "transposed"])
def test_layouts(layout):
    x, weight, bias = inputs((35, 300), torch.bfloat16, False, False)
    check_forward(x, weight, bias, layout=layout)
    check_backward((35, 300), torch.bfloat16, False, False, True, layout)


def test_a_mean_far_from_zero():
    """x = 1000 + noise: the variance is summed around the row's mean, not around zero."""
    x, weight, bias = inputs((9, 2000), torch.float32, False, False)
    check_forward(x + 1000, weight, bias)
    *_, rstd = norm_quantize(
        *on_device(x + 1000, weight, bias), EPS, E4M3, put(torch.tensor(20.0)),
        rms=False, zero_centered=False, columns=True, amax_out=put(torch.tensor(0.0)),
    )  # fmt: skip
    exact = ((x + 1000).double().var(1, unbiased=False) + EPS).rsqrt()
    assert ((rstd.cpu().double() - exact).abs() <= 1e-6 * exact).all()


def test_columns_beyond_k_are_not_seen():
    """With a gain of 0, y is the bias. A masked column with gain 1 and x = 0 would give a far larger y."""
    x, weight, bias = inputs((9, 300), torch.float32, False, True)
    check_forward(x + 1000, torch.full_like(weight, -1.0), bias, zero_centered=True)


@shapes
def test_backward_of_all_shapes(rms, shape):
    check_backward(shape, torch.bfloat16, rms, False, past=False)


@types
def test_backward_of_all_types(rms, zero_centered, dtype):
    check_backward((35, 300), dtype, rms, zero_centered, past=True)


def check_kept(x, weight, bias, rms: bool, zero_centered: bool) -> None:
    """Check the kept n, and the results computed from it."""
    options = {"rms": rms, "zero_centered": zero_centered}
    ones = torch.ones(x.shape[1])
    normalized, mean, rstd = reference_norm.norm(
        x.float(), ones, None if rms else 0 * ones, EPS, rms=rms, zero_centered=False
    )
    noise, factor = noise_of_y(x, ones, None, mean, rstd, False), torch.tensor(reference_norm.kept_scale(x.shape[1]))
    arguments, scale = [put(x), *on_device(weight, bias), EPS], torch.tensor(20.0)
    kept, again, third = (torch.empty(x.shape, dtype=E4M3.dtype, device=DEVICE) for _ in range(3))
    norm(*arguments, **options, kept=kept)
    norm_quantize(*arguments, E4M3, put(scale), **options, kept=again)
    norm_quantize(*arguments, E4M3, put(scale), rows=False, columns=True, **options, kept=third)
    assert same(kept, again) and same(kept, third)
    assert between(kept, normalized, noise, lambda n: ops.quantize(n, E4M3, factor))
    n = kept.cpu()
    y = n.float() / factor * (weight.float() + zero_centered) + (0 if rms else bias.float())
    noise = UNITS * largest(y)
    for rows, columns in ((True, False), (False, True), (True, True)):
        payload, payload_t = norm_requantize(
            kept, *on_device(weight, bias), E4M3, put(scale), zero_centered=zero_centered, rows=rows, columns=columns
        )
        assert (payload is not None) == rows and (payload_t is not None) == columns
        for got in (payload, None if payload_t is None else payload_t.t()):
            assert got is None or between(got, y, noise, lambda value: ops.quantize(value, E4M3, scale))
    dy, residual = torch.randn(x.shape).to(x.dtype), torch.randn(x.shape).to(x.dtype)
    dx, dweight, dbias = reference_norm.norm_backward(dy.float(), n, weight.float(), None, rstd, **options)
    got = norm_backward(*on_device(dy, kept, weight, None, rstd), **options, residual=put(residual))
    g, n = dy.float() * (weight.float() + zero_centered), n.float() / factor
    noise = rstd[:, None] * largest(g) * (1 + largest(n))
    assert got[0].dtype == x.dtype
    assert between(got[0], dx, UNITS * noise, lambda dx: dx.to(x.dtype) + residual)
    assert between(got[1], dweight, UNITS * (dy.float().abs() * n.abs()).sum(0))
    assert (got[2] is None) if rms else between(got[2], dbias, UNITS * dy.float().abs().sum(0))


KEPT = [(False, (33, 300)), (True, (65, 130)), (False, (2, 9001))]


@pytest.mark.parametrize(
    ("rms", "shape"),
    [pytest.param(*KEPT[0], marks=pytest.mark.smoke), *KEPT[1:], *([] if INTERPRETED else [(True, (2048, 4096))])],
    ids=str,
)
def test_the_kept_rows(rms, shape):
    check_kept(*inputs(shape, torch.bfloat16, rms, rms), rms, zero_centered=rms)


def test_the_kept_rows_of_edge_values():
    """A mean far from zero, a huge value and constant rows cause only E4M3's error; a NaN stays in its row."""
    x, weight, bias = inputs((7, 300), torch.float32, False, False)
    x[0] += 1000
    x[1, 5], x[2], x[3] = 1e18, 0.0, 7.0
    check_kept(x[:5], weight, bias, False, False)
    x[5, 3] = NAN
    kept = torch.empty(x.shape, dtype=E4M3.dtype, device=DEVICE)
    norm(*on_device(x, weight, bias), EPS, rms=False, zero_centered=False, kept=kept)
    bad = kept.cpu().float().isnan()
    assert bad[5].all() and not bad[:5].any() and not bad[6].any()


@kinds
def test_a_nan_reaches_its_row_and_the_sums(rms):
    x, weight, bias = inputs((9, 300), torch.bfloat16, rms, False)
    options = {"rms": rms, "zero_centered": False}
    _, mean, rstd = reference_norm.norm(x, weight, bias, EPS, **options)
    dy = torch.randn(x.shape).to(x.dtype)
    dy[4, 7] = NAN
    dx, dweight, dbias = norm_backward(*on_device(dy, x, weight, mean, rstd), **options)
    bad = dx.cpu().isnan()
    assert bad[4].all() and bad.sum() == 300
    assert dweight.isnan().nonzero().tolist() == [[7]] and (rms or dbias.isnan().nonzero().tolist() == [[7]])


def bits(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.reshape(-1).view(torch.uint8)


@on_gpu_only
@pytest.mark.parametrize(
    ("rms", "shape"),
    [(False, (2048, 4096)), (True, (8191, 768)), (False, (515, 12288)), (True, (1025, 5120))],
    ids=str,
)
def test_large_and_the_same_each_time(rms, shape):
    check_forward(*inputs(shape, torch.bfloat16, rms, False), rms=rms)
    check_backward(shape, torch.bfloat16, rms, False, True)
    x, weight, bias = on_device(*inputs(shape, torch.bfloat16, rms, False))
    dy, residual, scale = torch.randn_like(x), torch.randn_like(x), put(torch.tensor(20.0))
    options, first = {"rms": rms, "zero_centered": False}, None
    for _ in range(20):
        amax = put(torch.tensor(0.0))
        out = [amax, *norm_quantize(x, weight, bias, EPS, E4M3, scale, columns=True, amax_out=amax, **options)]
        out += [*norm(x, weight, bias, EPS, **options)]
        out += [*norm_backward(dy, x, weight, out[-2], out[-1], residual=residual, **options)]
        out = [bits(x) for x in out]
        first = first or out
        for a, b in zip(first, out, strict=True):
            assert a is b is None or torch.equal(a, b)


@on_gpu_only
def test_offsets_beyond_32_bits():
    x = torch.randn(1, 4096, dtype=torch.bfloat16, device=DEVICE).expand(2**19 + 40, 4096).contiguous()
    weight, bias = torch.ones_like(x[0]), torch.zeros_like(x[0])
    options, scale = {"rms": False, "zero_centered": False}, put(torch.tensor(20.0))
    payload, payload_t, mean, rstd = norm_quantize(x, weight, bias, EPS, E4M3, scale, columns=True, **options)
    for row in (0, 2**19 - 1, 2**19 + 39):
        assert same(payload[row], payload[1]) and same(payload_t[:, row], payload[1])
    dx, *_ = norm_backward(x, x, weight, mean, rstd, **options)
    assert same(dx[-1], dx[0])
