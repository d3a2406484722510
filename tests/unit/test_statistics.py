"""ops.count_cast against a count of one number at a time, from the formats' definition."""

import math

import pytest
import torch

from megatron_fp8.numerics.blocks import BLOCK, block_scales
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import compute_scale
from megatron_fp8.ops import count_cast, reference

pytestmark = pytest.mark.usefixtures("fresh_random_data")
INF, NAN = math.inf, math.nan


def direct_counts(x, fmt, scale):
    """Overflows and underflows of a cast to nearest, one Python float at a time, from the format's definition."""
    overflows = underflows = 0
    products = (x.float() * scale).abs().flatten().tolist()  # in float32, like the cast: it may decide a tie
    for value, size in zip(x.flatten().tolist(), products, strict=True):
        overflows += math.isfinite(value) and abs(value) * scale > fmt.max * (1 + 2**-20)
        underflows += value != 0 and size <= fmt.smallest_subnormal / 2  # a tie goes to zero, which is even
    return overflows, underflows


def counted(x, payload, scale_inv):
    """Counts and extremes of one cast."""
    counts, extremes = torch.zeros(3, dtype=torch.int64), torch.full((3,), -INF)
    assert count_cast(x, payload, scale_inv, counts, extremes) is None
    return counts.tolist(), extremes.tolist()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (129, 65), (333,), (2, 3, 144)], ids=str)
def test_of_one_scale(fmt, dtype, shape):
    spread = math.log2(fmt.max / fmt.smallest_subnormal)
    x = torch.randn(shape).mul(spread * math.log(2) / 2).exp().mul(torch.randn(shape).sign()).to(dtype)
    edges = [0.0, -0.0, fmt.max, -fmt.max, fmt.max * 1.01, fmt.smallest_subnormal / 2, fmt.smallest_subnormal * 0.6]
    edges += [1e-40, 3e38]
    bad = [NAN, INF, -INF]
    if x.numel() > len(edges + bad):
        x.view(-1)[: len(edges)] = torch.tensor(edges).to(dtype)
    for values in (x, x.mT if x.dim() > 1 else x[::3]):
        for scale in (1.0, 2.0**-3, 2.0**5):  # powers of two, so that the product is exact
            payload = reference.quantize(values, fmt, torch.tensor(scale))
            counts, extremes = counted(values, payload, torch.tensor(1 / scale))
            assert counts == [values.numel(), *direct_counts(values, fmt, scale)]
            assert extremes == [max(map(abs, values.flatten().tolist())), 1 / scale, -1 / scale]
    for value in bad if x.numel() > len(bad) else ():
        x.view(-1)[-1] = value
        counts, extremes = counted(x, reference.quantize(x, fmt, torch.tensor(1.0)), torch.tensor(1.0))
        assert counts == [x.numel(), *direct_counts(x, fmt, 1.0)]
        assert str(extremes[0]) == str(abs(value))  # a NaN equals nothing


def test_the_maximum_does_not_overflow_and_the_next_number_does():
    for amax in torch.rand(2000).mul(20).exp().bfloat16():
        scale = compute_scale(amax.float(), E4M3)
        x = torch.stack([amax, (amax.view(torch.int16) + 1).view(torch.bfloat16), -amax])
        assert counted(x, reference.quantize(x, E4M3, scale), scale.reciprocal())[0] == [3, 1, 0]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_the_margin(fmt):
    limit = torch.tensor(fmt.max * (1 + 2**-20))
    assert float(limit) == fmt.max * (1 + 2**-20)
    x = torch.stack([limit, -limit, limit.nextafter(torch.tensor(INF)), (-limit).nextafter(torch.tensor(-INF))])
    assert counted(x, reference.quantize(x, fmt, torch.tensor(1.0)), torch.tensor(1.0))[0] == [4, 2, 0]


def test_of_blocks():
    x = torch.randn(37, BLOCK).mul(6).exp()
    x[3], x[5, :9], x[6, 1], x[7, 7] = 0, 0, NAN, INF
    x[8] = 1e-44  # below half a step of the smallest scale
    blocks = reference.quantize_blocks(x.flatten())
    scales = block_scales(blocks.exponents)
    small = x.double() <= E4M3.smallest_subnormal / 2 * scales[:, None].double()
    underflows = int((small & (x != 0)).sum())
    assert underflows > 2 * BLOCK  # blocks 6 and 7 lost nearly all elements
    counts, extremes = counted(x.flatten(), blocks.payload, scales)
    assert counts == [x.numel(), 0, underflows]
    assert math.isnan(extremes[0]) and extremes[1:] == [2.0**120, -min(s for s in scales.tolist() if s > 2.0**-127)]
    # With scales half as large, values beyond 448 * scale / 2 would have been clipped.
    beyond = (x.double() > 448 * scales[:, None].double() / 2 * (1 + 2**-20)) & x.isfinite()
    assert counted(x.flatten(), blocks.payload, scales / 2)[0][1] == beyond.sum() > 0


def test_blocks_of_zeros_have_no_smallest_scale():
    blocks = reference.quantize_blocks(torch.zeros(3 * BLOCK))
    counts, extremes = counted(torch.zeros(3 * BLOCK), blocks.payload, block_scales(blocks.exponents))
    assert counts == [3 * BLOCK, 0, 0] and extremes == [0.0, 2.0**-127, -INF]


def test_casts_add_up():
    counts, extremes = torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), -INF)
    for amax, scale_inv in ((1.0, 0.5), (3.0, 2.0), (2.0, 0.25)):
        x = torch.tensor([0.0, 1e-9, -amax])
        scale = torch.tensor(scale_inv)
        count_cast(x, reference.quantize(x, E4M3, scale.reciprocal()), scale, counts[1], extremes[1])
    assert counts.tolist() == [[0, 0, 0], [9, 0, 3]]
    assert extremes.tolist() == [[-INF] * 3, [3.0, 2.0, -0.25]]


@pytest.mark.parametrize(
    ("payload", "scale_inv"), [((100,), ()), ((2, BLOCK), (1,)), ((2, BLOCK), (3,)), ((BLOCK, 2), ())], ids=str
)
def test_shapes_that_do_not_fit_are_refused(payload, scale_inv):
    x, untouched = torch.ones(2, BLOCK), torch.zeros(3)
    with pytest.raises(ValueError, match="payload of the same shape"):
        count_cast(x, torch.ones(payload).to(E4M3.dtype), torch.ones(scale_inv), untouched, untouched)
    assert not untouched.any()
