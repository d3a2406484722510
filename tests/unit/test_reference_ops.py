"""ops/reference.py against exact arithmetic. Other tests compare the kernels with these functions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import FP16, INF, NAN, edges, magnitudes, random_floats, rounded, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp8.numerics import BLOCK, E4M3, E5M2
from megatron_fp8.numerics.blocks import SHARD_UNIT, PackedBlocks
from megatron_fp8.ops import reference
from megatron_fp8.ops.reference import (
    add_blocks,
    amax,
    gemm,
    quantize,
    quantize_blocks,
    ring_sum,
    square_sum_blocks,
    sum_blocks,
    transpose,
)

formats = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
ONE = torch.tensor(1.0)


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def payload(shape, fmt, seed: int = 1) -> torch.Tensor:
    """Random finite codes, of all magnitudes."""
    finite = torch.tensor([float(value) for value in magnitudes(fmt)])
    finite = torch.cat([finite, -finite])
    return finite[torch.randint(0, len(finite), shape, generator=generator(seed))].to(fmt.dtype)


# amax


@dtypes
@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (1000,)])
def test_amax_is_the_largest_magnitude_as_float32(dtype, shape):
    x = torch.randn(shape, generator=generator()).to(dtype)
    got = amax(x)
    assert got.shape == () and got.dtype == torch.float32
    assert got.item() == max(abs(value) for value in x.flatten().tolist())


@dtypes
@pytest.mark.parametrize("position", [0, 50, 98])
def test_amax_shows_the_non_finite(dtype, position):
    x = torch.randn(99, generator=generator()).to(dtype)
    for bad, expected in ((INF, INF), (-INF, INF), (NAN, NAN)):
        x[position] = bad
        assert same(amax(x), torch.tensor(expected))
    x[(position + 1) % 99] = INF
    assert amax(x).isnan()


def test_amax_of_negative_values_of_zeros_and_of_denormals():
    assert amax(torch.tensor([-3.0, -5.0])).item() == 5
    assert same(amax(torch.tensor([-0.0, -0.0])), torch.tensor(0.0))
    assert amax(torch.tensor([0.0, -(2.0**-149)])).item() == 2.0**-149


# quantize


@formats
def test_quantize_rounds_every_edge_to_nearest_even(fmt):
    x = edges(fmt)
    expected = torch.tensor([rounded(value, fmt) for value in x.tolist()])
    got = quantize(x, fmt, ONE)
    assert got.dtype == fmt.dtype
    assert same(got.float(), expected)


@formats
@settings(max_examples=200, deadline=None)
@given(
    x=st.floats(width=32, allow_nan=False, allow_infinity=False),
    scale=st.floats(2.0**-126, 2.0**126, width=32),
)
def test_quantize_any_float_at_any_scale(fmt, x, scale):
    got = quantize(torch.tensor([x]), fmt, torch.tensor(scale))
    product = torch.tensor(x) * torch.tensor(scale)  # rounded to float32, infinite if it overflows
    expected = rounded(product.item(), fmt) if product.isfinite() else fmt.max
    assert same(got.float(), torch.tensor([expected]).copysign(torch.tensor(x)))


@formats
def test_quantize_is_torchs_cast_in_range(fmt):
    x = torch.randn(1 << 16, generator=generator()) * fmt.max / 3
    x = torch.cat([x, x * fmt.smallest_subnormal / fmt.max])
    inside = x.abs() <= fmt.max
    assert not inside.all()
    assert same(quantize(x, fmt, ONE)[inside], x[inside].to(fmt.dtype))


@formats
@dtypes
@pytest.mark.parametrize("scale", [1.0, 2.0**-126, 2.0**120, 0.37])
def test_quantize_keeps_the_non_finite_visible_and_saturates_the_rest(fmt, dtype, scale):
    largest = torch.finfo(dtype).max
    x = torch.tensor([INF, -INF, NAN, largest, -largest, 0.0, -0.0, 1.0]).to(dtype)
    got = quantize(x, fmt, torch.tensor(scale)).float()
    infinity = INF if fmt is E5M2 else NAN
    assert same(got[:3], torch.tensor([infinity, -infinity, NAN]))
    assert same(got[5:7], torch.tensor([0.0, -0.0]))
    expected = torch.tensor([largest * scale, -largest * scale, scale], dtype=torch.float64)
    expected = [rounded(value, fmt) for value in expected.tolist()]
    assert got[[3, 4, 7]].tolist() == expected


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize_scales_narrow_inputs_in_float32(fmt, dtype):
    x = torch.randn(1000, generator=generator()).to(dtype)
    scale = torch.tensor(33.3)
    got = quantize(x, fmt, scale)
    assert same(got, quantize(x.float(), fmt, scale))
    assert not same(got, quantize((x * scale.to(dtype)).float(), fmt, ONE))


@formats
@pytest.mark.parametrize("shape", [(16, 32), (5, 3), (2, 3, 7), (4,), (1, 1)])
def test_quantize_with_transpose(fmt, shape):
    x = torch.randn(shape, generator=generator())
    scale = torch.tensor(50.0)
    got, got_t = quantize(x, fmt, scale, transpose=True)
    assert same(got, quantize(x, fmt, scale))
    rows = x.reshape(-1, shape[-1])
    assert got_t.is_contiguous() and got_t.shape == (shape[-1], rows.shape[0])
    assert same(got_t, quantize(rows, fmt, scale).t())


def test_quantize_a_view_and_leave_the_input_alone():
    x = torch.randn(8, 9, generator=generator())
    before = x.clone()
    got, got_t = quantize(x[1:, ::2].t(), E4M3, ONE, transpose=True)
    assert got.is_contiguous() and got.shape == (5, 7)
    assert same(got, quantize(x, E4M3, ONE)[1:, ::2].t())
    assert same(got_t, got.t())
    assert same(x, before)


@dtypes
def test_quantize_takes_the_amax_on_the_way(dtype):
    x = torch.tensor([1.0, -3.0, 2.0]).to(dtype)
    running = torch.tensor(2.0)
    assert same(quantize(x, E4M3, ONE, amax_out=running), quantize(x, E4M3, ONE))
    assert running.item() == 3
    quantize(x / 4, E4M3, ONE, amax_out=running)
    assert running.item() == 3
    quantize(torch.tensor([1.0, -INF]).to(dtype), E4M3, ONE, amax_out=running)
    assert running.item() == INF
    quantize(torch.tensor([1.0, NAN]).to(dtype), E4M3, ONE, amax_out=running)
    assert running.isnan()
    quantize(x, E4M3, ONE, amax_out=running)
    assert running.isnan()


# transpose


@formats
@pytest.mark.parametrize("shape", [(16, 32), (1, 7), (33, 5)])
def test_transpose(fmt, shape):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator())
    got = transpose(codes.view(fmt.dtype))
    assert got.is_contiguous() and got.dtype == fmt.dtype
    assert torch.equal(got.view(torch.uint8), codes.t())
    out = torch.empty(shape[::-1], dtype=fmt.dtype)
    assert transpose(codes.view(fmt.dtype), out) is out
    assert torch.equal(out.view(torch.uint8), codes.t())


# gemm


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_gemm_is_the_exact_sum_within_the_float32_bound(formats):
    m, n, k = 3, 5, 48
    a, b = payload((m, k), formats[0], 1), payload((n, k), formats[1], 2)
    got = gemm(a, b, torch.tensor(0.5), torch.tensor(3.0), out_dtype=torch.float32)
    assert got.shape == (m, n) and got.dtype == torch.float32
    a_rows, b_rows = a.float().tolist(), b.float().tolist()
    for i in range(m):
        for j in range(n):
            terms = [Fraction(p) * Fraction(q) for p, q in zip(a_rows[i], b_rows[j], strict=True)]
            bound = (k + 1) * Fraction(2) ** -24 * sum(map(abs, terms)) * Fraction(3, 2)
            assert abs(Fraction(got[i, j].item()) - sum(terms) * Fraction(3, 2)) <= bound


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 70), st.integers(0, 2**31))
def test_gemm_of_small_integers_is_exact(m, n, k, seed):
    a = torch.randint(-8, 9, (m, k), generator=generator(seed)).float()
    b = torch.randint(-4, 5, (n, k), generator=generator(seed + 1)).float()
    scales = torch.tensor(0.25), torch.tensor(2.0)
    got = gemm(a.to(E4M3.dtype), b.to(E5M2.dtype), *scales, out_dtype=torch.float32)
    assert torch.equal(got, 0.5 * (a.double() @ b.double().t()).float())


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gemm_scales_in_float32_and_rounds_once(out_dtype):
    a, b = payload((4, 32), E4M3, 1), payload((6, 32), E4M3, 2)
    scales = torch.tensor(0.0123), torch.tensor(0.00321)
    exact = gemm(a, b, *scales, out_dtype=torch.float32)
    assert same(exact, (a.float() @ b.float().t()) * (scales[0] * scales[1]))
    got = gemm(a, b, *scales, out_dtype=out_dtype)
    assert same(got, exact.to(out_dtype))
    out = torch.full((4, 6), 9.0, dtype=out_dtype)
    assert gemm(a, b, *scales, out=out) is out
    assert same(out, exact.to(out_dtype))


def test_gemm_is_bfloat16_unless_told():
    a, b = payload((4, 32), E4M3, 1), payload((6, 32), E4M3, 2)
    assert gemm(a, b, ONE, ONE).dtype == torch.bfloat16


def test_gemm_shows_the_non_finite():
    a, b = payload((2, 16), E5M2, 1), torch.ones(3, 16).to(E4M3.dtype)
    a[1, 3] = INF
    assert gemm(a, b, ONE, ONE).isfinite().tolist() == [[True] * 3, [False] * 3]


# sum_blocks and square_sum_blocks (quantize_blocks and add_blocks: test_blocks.py)


def stacked(ranks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = [quantize_blocks(x) for x in ranks]
    codes = torch.stack([block.payload.view(torch.uint8) for block in blocks]).view(E4M3.dtype)
    return codes, torch.stack([block.exponents for block in blocks])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_sum_blocks_adds_in_rank_order_in_float32(ranks):
    n = 6 * BLOCK
    spread = torch.randint(-20, 20, (ranks, n // BLOCK, 1), generator=generator()).float().exp2()
    x = (torch.randn(ranks, n // BLOCK, BLOCK, generator=generator()) * spread).view(ranks, n)
    codes, exponents = stacked(list(x))
    out = torch.full((n,), NAN)
    assert sum_blocks(codes, exponents, out) is out
    expected = np.zeros(n, dtype=np.float32)
    for r in range(ranks):
        expected = expected + quantize_blocks(x[r]).dequantize().numpy()
    assert torch.equal(out, torch.from_numpy(expected))
    scale = torch.rand((), generator=generator())
    assert sum_blocks(codes, exponents, out, scale) is out  # the finished sum is multiplied once
    assert torch.equal(out, torch.from_numpy(expected * np.float32(scale.item())))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_sums_of_packed_shards_in_place(ranks):
    x = torch.randn(ranks, SHARD_UNIT, generator=generator())
    packed = quantize_blocks(x.flatten(), out=PackedBlocks.zeros(ranks, SHARD_UNIT, "cpu"))
    where_they_lie, alone = (packed.payload, packed.exponents), stacked(list(x))
    total = sum_blocks(*alone, torch.empty(SHARD_UNIT))
    assert torch.equal(sum_blocks(*where_they_lie, torch.empty(SHARD_UNIT)), total)
    assert torch.equal(square_sum_blocks(*where_they_lie), square_sum_blocks(*alone))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sum_blocks_from_a_start_on_is_rounded_once(dtype):
    x, start = torch.randn(3, BLOCK, generator=generator()), torch.randn(BLOCK, generator=generator()).to(dtype)
    expected = start.float().numpy()
    for row in x:
        expected = expected + quantize_blocks(row).dequantize().numpy()
    out = sum_blocks(*stacked(list(x)), torch.empty(BLOCK, dtype=dtype), start=start)
    assert torch.equal(out, torch.from_numpy(expected).to(dtype))


def test_sum_blocks_order_is_the_ranks():
    big, small = torch.full((BLOCK,), 2.0**24), torch.full((BLOCK,), 1.0)
    for order, expected in (([big, small, -big], 0.0), ([big, -big, small], 1.0)):
        out = sum_blocks(*stacked(order), torch.empty(BLOCK))
        assert set(out.tolist()) == {expected}


def test_sum_blocks_shows_the_non_finite_and_takes_random_bits():
    x = random_floats(4 * BLOCK, generator()).view(2, -1)
    x = torch.where(x.abs() < 1e38, x, 0.0)
    x[1, 5] = INF
    codes, exponents = stacked(list(x))
    out = sum_blocks(codes, exponents, torch.empty(2 * BLOCK))
    assert out.isnan().nonzero().tolist() == [[5]]
    alone = [quantize_blocks(row).dequantize() for row in x]
    assert same(out, alone[0] + alone[1] + 0.0)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("blocks", [1, 9, 64])
def test_square_sum_blocks_is_the_square_of_the_norm(ranks, blocks):
    codes, exponents = stacked(list(torch.randn(ranks, blocks * BLOCK) * 10 ** torch.randn(ranks, 1)))
    total = sum_blocks(codes, exponents, torch.empty(blocks * BLOCK)).tolist()
    exact = sum(Fraction(value) ** 2 for value in total)
    got = square_sum_blocks(codes, exponents)
    assert got.shape == () and got.dtype == torch.float32
    # The roundings of a square and of some tens of partial sums.
    assert abs(Fraction(got.item()) - exact) <= exact * 40 * Fraction(2) ** -24


def test_square_sum_blocks_shows_the_non_finite():
    ones = torch.ones(3 * BLOCK)
    assert square_sum_blocks(*stacked([ones, -ones])).item() == 0
    assert square_sum_blocks(*stacked([ones, 2 * ones])).item() == 9 * 3 * BLOCK
    assert square_sum_blocks(*stacked([ones, 3e38 * ones])).item() == INF
    codes, exponents = stacked([ones, ones])
    codes.view(torch.uint8)[1, 200] = 0x7F
    assert square_sum_blocks(codes, exponents).isnan()


# ring_sum


def hop(a: float, b: float) -> float:
    """a + b rounded to FP16, then to E4M3, saturating."""
    return NAN if math.isnan(a + b) else rounded(rounded(a + b, FP16), E4M3)


def test_ring_sum_of_every_pair():
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = torch.cartesian_prod(codes, codes).t().contiguous().view(E4M3.dtype)
    got = ring_sum(pairs)
    assert got.dtype == E4M3.dtype and got.shape == (256 * 256,)
    sums = [str(a + b) for a, b in zip(*pairs.float().tolist(), strict=True)]  # as text 0.0 is not -0.0
    of_sum = {text: hop(float(text), -0.0) for text in {*sums}}
    assert same(got.float(), torch.tensor([of_sum[text] for text in sums]))
    # FP16's rounding does not change the result.
    assert all(text == "nan" or value == rounded(float(text), E4M3) for text, value in of_sum.items())


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 33])
def test_ring_sum_rounds_and_saturates_at_every_hop(ranks):
    shards = torch.randn(ranks, 300) * 10 ** (2 * torch.rand(1, 300))
    shards = quantize(shards, E4M3, ONE)
    shards.view(torch.uint8)[-1, 7] = 0xFF
    expected = []
    for column in shards.float().t().tolist():
        total = column[0]
        for value in column[1:]:
            total = hop(total, value)
        expected.append(total)
    before = shards.clone()
    got = ring_sum(shards)
    assert same(got.float(), torch.tensor(expected)) and got[7].isnan()
    got.view(torch.uint8).zero_()
    assert same(shards, before)


def test_ring_sum_is_not_the_rounded_sum():
    for column, expected in (([448, 448, -448], 0), ([448, -448, 448], 448), ([16] + 20 * [0.5], 16), ([NAN, 1], NAN)):
        shards = torch.tensor(column, dtype=torch.float32)[:, None].to(E4M3.dtype)
        assert same(ring_sum(shards).float(), torch.tensor([float(expected)]))


# no host synchronisation


def test_nothing_is_read_by_the_host():
    with FakeTensorMode():  # raises if code reads a value
        x = torch.randn(BLOCK, BLOCK)
        q, q_t = quantize(x, E4M3, amax(x), transpose=True, amax_out=torch.zeros(()))
        gemm(q, q_t, amax(x), amax(x), out=torch.empty(BLOCK, BLOCK))
        blocks = PackedBlocks.zeros(2, BLOCK * BLOCK // 2, "cpu")
        quantize_blocks(x.flatten(), rounding="stochastic", noise=torch.rand(BLOCK * BLOCK), out=blocks)
        add_blocks(x.flatten(), blocks, (1, 2))
        shards = blocks.payload, blocks.exponents
        out = sum_blocks(*shards, torch.empty(BLOCK * BLOCK // 2), square_sum_blocks(*shards))
        ring_sum(q)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            reference.amax(out).item()
