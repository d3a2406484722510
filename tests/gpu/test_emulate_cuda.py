"""ops.emulate on CUDA against emulation.emulate on the CPU, bit for bit, for formats, roundings and scalings.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import itertools
import math

import pytest
import torch
from test_ops_cuda import DEVICE, INTERPRETED, put, random_bits, same

from megatron_fp8 import ops
from megatron_fp8.numerics.emulation import ROUNDINGS, EmulatedFormat, emulate, format_named
from megatron_fp8.numerics.noise import noise_seed, uniform_noise

pytestmark = [pytest.mark.usefixtures("fresh_random_data"), *([] if INTERPRETED else [pytest.mark.gpu])]
if INTERPRETED:
    from megatron_fp8.ops.triton.emulate import emulate as on_device
else:
    on_device = ops.emulate

INF, NAN = math.inf, math.nan
NAMES = ["E4M3", "E5M2", "E8M7", "E8M3", "E8M0", "E8M23", "E7M7", "E3M4", "E2M1", "E2M0", "E5M10", "E6M23", "E7M23"]
SCALINGS = ["none", "tensor", "row", "block:32", "block:24", "block:1"]
SHAPES = [(), (5, 1), (7, 65), (2, 3, 144), (1, 5000), (130, 31)]
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)
every_scaling = pytest.mark.parametrize("scaling", SCALINGS)


def check(x: torch.Tensor, spec: EmulatedFormat, layout: str = "plain") -> None:
    seed = noise_seed(torch.initial_seed()) if spec.rounding == "stochastic" else None
    before = put(x, layout)
    got = on_device(before, spec, seed)
    assert same(got, emulate(x, spec, seed)), str(spec)
    assert got.is_contiguous() and same(before, x)


def spread(shape: tuple[int, ...]) -> torch.Tensor:
    """Values of many magnitudes, different from row to row, with some zeros."""
    x = torch.randn(shape) * 10 ** (2 * torch.randn((*shape[:-1], 1) if shape else ()))
    return x * (torch.rand(shape) > 0.1)


@pytest.mark.parametrize("name", NAMES)
@every_rounding
@pytest.mark.parametrize("scaling", ["none", "tensor", "row", "block:24"])
def test_all_bit_patterns(name, rounding, scaling):
    spec = EmulatedFormat(format_named(name), rounding, scaling)
    x = random_bits(6000, torch.float32)
    check(x.view(-1, 60), spec)
    x[~x.isfinite()] = 0.0
    check(x.sort().values.view(-1, 60), spec)  # the values of a row are near each other


@dtypes
@every_scaling
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_types(dtype, scaling, shape):
    check(spread(shape).to(dtype), EmulatedFormat(format_named("E4M3"), "stochastic", scaling))


@every_scaling
@pytest.mark.parametrize("layout", [pytest.param("offset", marks=pytest.mark.smoke), "transposed"])
def test_layouts(scaling, layout):
    check(spread((37, 150)).bfloat16(), EmulatedFormat(format_named("E3M4"), "stochastic", scaling), layout)


@pytest.mark.parametrize("name", NAMES)
@every_rounding
@pytest.mark.parametrize("scaling", ["none", "tensor", "block:27"])
def test_edges(name, rounding, scaling):
    spec, steps = EmulatedFormat(format_named(name), rounding, scaling), torch.arange(-40, 41) * 0.25
    fmt = spec.format
    x = torch.stack([steps * fmt.smallest_subnormal, steps * fmt.smallest_normal, fmt.max * (1 + steps / 16)])
    x = torch.cat([x, x.nextafter(torch.tensor(INF)), x.nextafter(torch.tensor(-INF))])
    check(x.nan_to_num(), spec)  # the neighbours of float32's maximum include infinities
    check(torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-126), 1.0, -3.4028235e38, INF, -INF, NAN, -NAN]), spec)


def test_every_bfloat16():
    x = random_bits(1 << 16, torch.bfloat16)
    for name, rounding in itertools.product(("E8M3", "E7M7", "E4M3", "E5M2"), ROUNDINGS):
        check(x, EmulatedFormat(format_named(name), rounding))


def test_values_that_only_noise_rounds_up():
    """Elements from 1/2 to 2^-40 of a step that is more than 2^24 times the element's own ulp."""
    x = 2.0 ** -torch.randint(1, 40, (1 << 16,)).float()
    for scaling in ("none", "tensor"):
        check(x, EmulatedFormat(format_named("E2M0"), "stochastic", scaling))


def test_the_smallest_noise():
    """If the hash is zero, fractions above 2^-25 round up."""
    spans = (uniform_noise(1 << 22, (0, 0), first=i << 22) for i in range(1 << 10))
    index = next(i << 22 | int(span.argmin()) for i, span in enumerate(spans) if span.min() == 0)
    spec, seed = EmulatedFormat(format_named("E2M1"), "stochastic"), (index, 0)  # the first element's noise is 0
    step = spec.format.smallest_subnormal
    for fraction, up in ((2.0**-24, 1), (2.0**-25 * (1 + 2.0**-20), 1), (2.0**-25, 0), (2.0**-100, 0), (0.0, 0)):
        x, expected = torch.tensor([fraction * step]), torch.tensor([up * step])
        assert same(on_device(put(x), spec, seed), expected) and same(emulate(x, spec, seed), expected)


@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
@pytest.mark.parametrize("scaling", SCALINGS[:4])
def test_large(scaling):
    x = torch.randn(4099, 4097).bfloat16()
    for name, rounding in (("E4M3", "nearest"), ("E8M3", "truncate"), ("E5M2", "stochastic")):
        check(x, EmulatedFormat(format_named(name), rounding, scaling))


def test_wrong_arguments_are_refused_and_nothing_is_nothing():
    with pytest.raises(ValueError, match="noise_seed"):
        on_device(torch.ones(4, device=DEVICE), EmulatedFormat.parse("E8M3:stochastic"))
    for scaling in SCALINGS:
        empty = torch.empty(0, 5, device=DEVICE)
        assert on_device(empty, EmulatedFormat(format_named("E4M3"), "nearest", scaling)).shape == (0, 5)
