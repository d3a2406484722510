"""Every operation of ops/reference.py on CUDA against the CPU.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import dataclasses
import math
import os
from types import SimpleNamespace

import pytest
import torch

from megatron_fp8 import gemm, ops
from megatron_fp8.numerics import BLOCK, E4M3, E5M2, BlockScaled
from megatron_fp8.numerics.blocks import SHARD_UNIT, PackedBlocks
from megatron_fp8.numerics.noise import noise_seed, uniform_noise
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops import reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.usefixtures("fresh_random_data"), *([] if INTERPRETED else [pytest.mark.gpu])]
on_gpu_only = pytest.mark.skipif(INTERPRETED, reason="not a Triton kernel, or too large to interpret")
if INTERPRETED:
    from megatron_fp8.ops.triton import blocks, cast

    DEVICE = "cpu"
    ops = SimpleNamespace(
        amax=cast.amax,
        quantize=cast.quantize,
        transpose=cast.transpose,
        quantize_blocks=blocks.quantize_blocks,
        add_blocks=blocks.add_blocks,
        sum_blocks=blocks.sum_blocks,
        square_sum_blocks=blocks.square_sum_blocks,
    )
else:
    DEVICE = "cuda"

INF, NAN = math.inf, math.nan
formats = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
SHAPES = [(1, 1), (16, 16), (3, 5), (128, 64), (127, 65), (1, 300), (260, 2), (2, 3, 144)]
smoke = pytest.mark.smoke
LAYOUTS = [(shape, "plain") for shape in SHAPES]
LAYOUTS += [(shape, layout) for shape in [(128, 64), (37, 150)] for layout in ("offset", "transposed")]
# Types differ only in how elements are read: all shapes with one type, and two shapes with each of the others, one that
# is a multiple of wide loads and one that is not.
layouts = pytest.mark.parametrize(
    ("dtype", "shape", "layout"),
    [pytest.param(torch.bfloat16, (130, 70), "plain", marks=smoke)]
    + [(torch.bfloat16, *case) for case in LAYOUTS]
    + [(dtype, *case) for dtype in (torch.float16, torch.float32) for case in (LAYOUTS[3], LAYOUTS[-2])],
    ids=str,
)
# For blocks of 128: any number of blocks and shards in BF16, and every type.
BLOCKS = [(torch.bfloat16, blocks, "plain", shards) for blocks, shards in ((1, 1), (3, 3), (16, 4), (67, 1))]
BLOCKS += [(torch.bfloat16, 67, "offset", 3), (torch.float16, 67, "plain", 3), (torch.float32, 67, "offset", 4)]


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether shape, dtype and bits are equal; all NaNs count as equal."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    a, b = got.cpu().double(), expected.cpu().double()
    return bool(((a.isnan() & b.isnan()) | ((a == b) & (a.signbit() == b.signbit()))).all())


def named_parts(state) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of what a dataclass of tensors holds."""
    held = [(field.name, getattr(state, field.name)) for field in dataclasses.fields(state)]
    return [(name, part) for name, part in held if part is not None]


def put(x: torch.Tensor, layout: str = "plain") -> torch.Tensor:
    """x on the device: plain, at an offset that prevents wide loads, or with its last two strides swapped."""
    if layout == "offset":
        return torch.cat([x.new_empty(1), x.flatten()]).to(DEVICE)[1:].view(x.shape)
    if layout == "transposed":
        return x.mT.contiguous().to(DEVICE).mT
    return x.to(DEVICE)


def random_bits(n: int, dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of a 16-bit dtype, or random ones of float32, with denormals, infinities and NaN."""
    if dtype == torch.float32:
        return torch.randint(-(2**31), 2**31, (n,)).to(torch.int32).view(dtype)
    patterns = torch.cat([torch.randperm(1 << 16), torch.randint(0, 1 << 16, (max(n - (1 << 16), 0),))])
    return patterns.to(torch.uint16).view(dtype)


def random_codes(*shape: int, fmt=E4M3) -> torch.Tensor:
    """A random finite payload."""
    largest = torch.tensor(fmt.max).to(fmt.dtype).view(torch.uint8)
    codes = torch.randint(0, int(largest) + 1, shape) + 128 * torch.randint(0, 2, shape)
    return codes.to(torch.uint8).view(fmt.dtype)


def check_quantize(x: torch.Tensor, fmt, scale: float, layout: str = "plain") -> None:
    scale = torch.tensor(scale)
    on_device, device_scale = put(x, layout), put(scale)
    expected, expected_t = reference.quantize(x, fmt, scale, transpose=True)
    largest, one_pass = put(torch.tensor(0.0)), put(torch.tensor(0.0))
    assert same(ops.quantize(on_device, fmt, device_scale), expected)
    assert same(ops.quantize(on_device, fmt, device_scale, amax_out=largest), expected)
    payload, payload_t = ops.quantize(on_device, fmt, device_scale, transpose=True, amax_out=one_pass)
    assert same(payload, expected) and same(payload_t, expected_t)
    assert payload.is_contiguous() and payload_t.is_contiguous()
    assert same(largest, reference.amax(x)) and same(one_pass, reference.amax(x))
    for amax_out in (None, put(torch.tensor(0.0))):
        none, columns = ops.quantize(on_device, fmt, device_scale, transpose=True, rows=False, amax_out=amax_out)
        assert none is None and same(columns, expected_t)
        assert amax_out is None or same(amax_out, reference.amax(x))
    payload, payload_t = ops.quantize(on_device, fmt, device_scale, transpose=True)
    assert same(payload, expected) and same(payload_t, expected_t)


# amax


@layouts
def test_amax(dtype, shape, layout):
    x = torch.randn(shape).to(dtype)
    assert same(ops.amax(put(x, layout)), reference.amax(x))


@dtypes
@pytest.mark.parametrize("n", [1, 127, 20_000])
def test_amax_shows_the_non_finite(dtype, n):
    x = torch.randn(n).to(dtype)
    for bad in (INF, -INF, NAN, -NAN):
        x[torch.randint(n, ())] = bad
        assert same(ops.amax(put(x)), reference.amax(x))


def test_amax_of_zeros_and_of_denormals():
    assert same(ops.amax(put(torch.full((5,), -0.0))), torch.tensor(0.0))
    assert ops.amax(put(torch.tensor([0.0, -(2.0**-149)]))).item() == 2.0**-149


# quantize


@formats
@layouts
def test_quantize(fmt, dtype, shape, layout):
    x = (torch.randn(shape) * 10 ** torch.randn(shape)).to(dtype)
    check_quantize(x, fmt, fmt.max / 30, layout)


@formats
@dtypes
@pytest.mark.parametrize("scale", [0.37, 2.0**-120, 2.0**126])
def test_quantize_any_bits(fmt, dtype, scale):
    check_quantize(random_bits(1 << 16, dtype).view(256, 256), fmt, scale)


@formats
def test_quantize_at_every_value_and_midpoint_of_the_format(fmt):
    values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    values = values[values.isfinite()].sort().values
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([1.01, -1.04, 1.2]) * fmt.max])
    up, down = torch.tensor(INF), torch.tensor(-INF)
    check_quantize(torch.cat([points, points.nextafter(up), points.nextafter(down)]), fmt, 1.0)


@formats
def test_quantize_only_raises_amax(fmt):
    x = torch.randn(100, 80)
    for before in (1e9, INF, NAN):
        amax = put(torch.tensor([0.0, before, 0.0]))
        ops.quantize(put(x), fmt, put(torch.tensor(1.0)), amax_out=amax[1])
        ops.quantize(put(x), fmt, put(torch.tensor(1.0)), transpose=True, amax_out=amax[1])
        assert same(amax, torch.tensor([0.0, before, 0.0]))


@formats
def test_quantize_into_a_part_of_memory(fmt):
    x, scale = torch.randn(3, 48, 32), torch.tensor(fmt.max / 8)
    out = put(torch.zeros(3, 48, 32)).to(fmt.dtype)
    made = ops.quantize(put(x[1]), fmt, put(scale), out=out[1])
    assert made.data_ptr() == out[1].data_ptr()
    codes, expected = out.cpu().view(torch.uint8), reference.quantize(x[1], fmt, scale).view(torch.uint8)
    assert torch.equal(codes[1], expected) and not codes[0].any() and not codes[2].any()


@formats
def test_quantize_nothing(fmt):
    payload, payload_t = ops.quantize(put(torch.empty(0, 32)), fmt, put(torch.tensor(1.0)), transpose=True)
    assert payload.shape == (0, 32) and payload_t.shape == (32, 0)


@on_gpu_only
def test_more_than_2_to_the_31_elements():
    rows, cols = 2**16 + 3, 2**15 + 16
    x = torch.randn(rows, cols, dtype=torch.bfloat16, device=DEVICE)
    x[-1, -1] = 1000
    scale, largest = torch.tensor(100.0, device=DEVICE), torch.zeros((), device=DEVICE)
    payload, payload_t = ops.quantize(x, E4M3, scale, transpose=True, amax_out=largest)
    tail = reference.quantize(x[-500:].cpu(), E4M3, scale.cpu())
    assert same(payload[-500:], tail) and same(payload_t[:, -500:], tail.t()) and largest.item() == 1000
    flat = ops.quantize(x, E4M3, scale).view(torch.uint8)
    assert torch.equal(flat, payload.view(torch.uint8)) and ops.amax(x).item() == 1000
    assert torch.equal(flat.t(), payload_t.view(torch.uint8))


# transpose


@formats
@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (128, 64), (37, 1), (1, 37), (129, 259)], ids=str)
@pytest.mark.parametrize("layout", ["plain", "offset", "transposed"])
def test_transpose(fmt, shape, layout):
    payload = torch.randint(0, 256, shape).to(torch.uint8)
    on_device = put(payload, layout).view(fmt.dtype)
    expected = payload.view(fmt.dtype).t().contiguous()
    assert same(ops.transpose(on_device), expected)
    scratch = torch.zeros(payload.numel() + 5, dtype=torch.uint8, device=DEVICE)
    out = scratch[:-5].view(fmt.dtype).view(expected.shape)
    assert ops.transpose(on_device, out=out) is out and same(out, expected)
    assert not scratch[-5:].any()


# blocks


def check_quantize_blocks(x: torch.Tensor, layout: str = "plain") -> None:
    noise = torch.rand(x.shape)
    noise[::2] = (16 * noise[::2]).floor() / 16  # often equal to the fraction of a bf16 x
    for options in ({}, {"rounding": "stochastic", "noise": noise}):
        expected = reference.quantize_blocks(x, **options)
        options = {key: put(value) if key == "noise" else value for key, value in options.items()}
        got = ops.quantize_blocks(put(x, layout), **options)
        assert same(got.payload, expected.payload) and same(got.exponents, expected.exponents)


@pytest.mark.parametrize(("dtype", "blocks", "layout"), [case[:3] for case in BLOCKS], ids=str)
def test_quantize_blocks(dtype, blocks, layout):
    spread = 10 ** (5 * torch.randn(blocks, 1) if dtype != torch.float16 else torch.zeros(1, 1))
    check_quantize_blocks((torch.randn(blocks, BLOCK) * spread).to(dtype).flatten(), layout)


@dtypes
def test_quantize_blocks_any_bits(dtype):
    check_quantize_blocks(random_bits(1 << 16, dtype))


@smoke
def test_quantize_blocks_at_every_exponent_and_its_boundary():
    largest = (448 * 2.0 ** torch.arange(-158, 120, dtype=torch.float64)).float()
    up, down = torch.tensor(INF), torch.tensor(-INF)
    largest = torch.cat(
        [largest, largest.nextafter(up), largest.nextafter(down), torch.tensor([0.0, 3.4e38])]
    )
    x = (torch.rand(len(largest), BLOCK) * 2 - 1) * largest[:, None]
    x[:, 77] = largest
    check_quantize_blocks(x.flatten())


def random_packed(shards: int, n: int) -> tuple[PackedBlocks, int]:
    """(PackedBlocks with random bytes on the CPU, larger than n elements; a first element for n elements in it)."""
    m = -(-(n + 5 * BLOCK) // (shards * SHARD_UNIT)) * SHARD_UNIT
    packed = PackedBlocks.empty(shards, m, "cpu")
    packed.data.random_(256)
    return packed, BLOCK * int(torch.randint((packed.numel - n) // BLOCK + 1, ()))


def same_packed(got: PackedBlocks, expected: PackedBlocks) -> bool:
    return same(got.payload, expected.payload) and same(got.exponents, expected.exponents)


@pytest.mark.parametrize(("dtype", "blocks", "layout", "shards"), BLOCKS, ids=str)
def test_quantize_blocks_into_packed(dtype, blocks, layout, shards):
    x, noise = torch.randn(blocks * BLOCK).to(dtype), torch.rand(blocks * BLOCK)
    for options in ({}, {"rounding": "stochastic", "noise": noise}):
        expected, first = random_packed(shards, x.numel())
        print(f"first {first} of {expected.payload.shape}")
        got = PackedBlocks(put(expected.data.clone()))
        reference.quantize_blocks(x, **options, out=expected, first=first)
        options = {key: put(value) if key == "noise" else value for key, value in options.items()}
        assert ops.quantize_blocks(put(x, layout), **options, out=got, first=first) is got
        assert same_packed(got, expected)


BEYOND = [(64, BLOCK), (-BLOCK, BLOCK), (2 * SHARD_UNIT, BLOCK), (BLOCK, 2 * SHARD_UNIT)]


@pytest.mark.parametrize(("first", "count"), BEYOND)
def test_spans_outside_a_packed_are_refused(first, count):
    packed, x = PackedBlocks.zeros(2, SHARD_UNIT, DEVICE), put(torch.ones(count))
    with pytest.raises(ValueError, match="128"):
        ops.quantize_blocks(x, out=packed, first=first)
    with pytest.raises(ValueError, match="128"):
        ops.add_blocks(x, packed, (1, 2), first)
    assert not packed.data.any()


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (torch.zeros(100), {}),
        (torch.zeros(2, BLOCK), {}),
        (torch.zeros(BLOCK), {"rounding": "up"}),
        (torch.zeros(BLOCK), {"rounding": "stochastic"}),
    ],
)
def test_quantize_blocks_refuses(x, options):
    with pytest.raises(ValueError):
        ops.quantize_blocks(put(x), **options)


def random_blocks(n: int) -> BlockScaled:
    """Random finite payloads, with random exponents that quantize_blocks can give."""
    return BlockScaled(random_codes(n), torch.randint(0, 248, (n // BLOCK,)).to(torch.uint8))


def check_add_blocks(x: torch.Tensor, stored: BlockScaled, layout: str = "plain", seed=None, shards: int = 3) -> None:
    """Check adding x to `stored`, somewhere in a PackedBlocks whose other bytes must not change."""
    seed = noise_seed(torch.initial_seed()) if seed is None else seed
    expected, first = random_packed(shards, x.numel())
    print(f"first {first} of {expected.payload.shape}")
    expected.write(first, stored)
    got = PackedBlocks(put(expected.data.clone()))
    reference.add_blocks(x, expected, seed, first)
    there = put(seed) if isinstance(seed, torch.Tensor) else seed
    assert ops.add_blocks(put(x, layout), got, there, first) is None
    assert same_packed(got, expected)


@pytest.mark.parametrize(("dtype", "blocks", "layout", "shards"), BLOCKS, ids=str)
def test_add_blocks(dtype, blocks, layout, shards):
    spread = 10 ** (5 * torch.randn(blocks, 1) if dtype != torch.float16 else torch.zeros(1, 1))
    x = (torch.randn(blocks, BLOCK) * spread).to(dtype).flatten()
    start = reference.quantize_blocks(torch.randn(blocks * BLOCK) * x.abs().float() * 10 ** torch.randn(x.shape))
    check_add_blocks(x, start, layout, shards=shards)


@dtypes
def test_add_blocks_any_bits(dtype):
    x = random_bits(1 << 16, dtype)
    check_add_blocks(x, random_blocks(1 << 16))
    check_add_blocks(torch.where(x.isfinite(), x, 0.0), random_blocks(1 << 16))
    start = random_blocks(1 << 16)
    start.payload.view(torch.uint8)[torch.randint(1 << 16, (100,))] = 0x7F
    check_add_blocks(torch.randn(1 << 16).to(dtype), start)


@pytest.mark.parametrize("seed", [(0, 0), (1, 16), (2**31, 2**31 - 1), (2**32 - 1, 2**32 - 1)], ids=str)
def test_add_blocks_any_seed(seed):
    check_add_blocks(torch.randn(5 * BLOCK), reference.quantize_blocks(torch.randn(5 * BLOCK)), seed=seed)


@smoke
@pytest.mark.parametrize("step", [2, 4])
def test_add_blocks_to_tensors_each_with_its_seed(step):
    """The seeds lie as they are made for one pass (2), or as for a recorded step (4 words apart)."""
    seeds = torch.tensor([noise_seed(torch.initial_seed(), i) for i in range(3)]).to(torch.int32)
    memory = torch.full((3, step), -1, dtype=torch.int32)
    memory[:, :2] = seeds
    each = 19 * BLOCK  # more than a program's, and not a multiple of them
    x, start = torch.randn(3 * each).bfloat16(), reference.quantize_blocks(torch.randn(3 * each))
    check_add_blocks(x, start, seed=memory[:, :2])
    together, apart = (PackedBlocks.zeros(1, 32 * SHARD_UNIT, "cpu") for _ in range(2))
    for packed in (together, apart):
        packed.write(0, start)
    reference.add_blocks(x, together, seeds)
    for i, seed in enumerate(seeds):
        reference.add_blocks(x[i * each : (i + 1) * each], apart, (int(seed[0]), int(seed[1])), i * each)
    assert same_packed(together, apart)


@smoke
def test_add_blocks_of_zeros_of_negatives_and_of_overflows():
    values = reference.quantize_blocks(torch.randn(6 * BLOCK))
    x = -values.dequantize()
    x[BLOCK:] = 0.0
    check_add_blocks(x, values)
    check_add_blocks(torch.zeros(6 * BLOCK), reference.quantize_blocks(torch.zeros(6 * BLOCK)))
    largest = BlockScaled(random_codes(6 * BLOCK), torch.full((6,), 247, dtype=torch.uint8))
    check_add_blocks(torch.randn(6 * BLOCK).sign() * 3.4e38, largest)


def test_add_blocks_repeats_itself_and_differs_from_seed_to_seed():
    start, x = put(torch.randn(40 * BLOCK)), put(torch.randn(40 * BLOCK).bfloat16())
    sums = []
    for seed in (noise_seed(1), noise_seed(1), noise_seed(2)):
        sums.append(ops.quantize_blocks(start, out=PackedBlocks.zeros(3, SHARD_UNIT, DEVICE)))
        ops.add_blocks(x, sums[-1], seed)
    assert torch.equal(sums[0].data, sums[1].data)
    a, c = (stored.read(0, 40 * BLOCK).payload.view(torch.uint8) for stored in (sums[0], sums[2]))
    assert 0.1 < (a != c).float().mean() < 0.6


@pytest.mark.parametrize("shape", [(100,), (2, BLOCK), ()], ids=str)
def test_add_blocks_refuses(shape):
    with pytest.raises(ValueError, match="128"):
        ops.add_blocks(put(torch.ones(shape)), PackedBlocks.zeros(1, SHARD_UNIT, DEVICE), (1, 2))


@on_gpu_only
@dtypes
def test_add_blocks_of_millions(dtype):
    n = 23_437 * BLOCK
    check_add_blocks(torch.randn(n).to(dtype), reference.quantize_blocks(torch.randn(n)))


@on_gpu_only
def test_add_blocks_beyond_2_to_the_32_elements():
    n, tail = 2**32 + 3 * BLOCK, 7 * BLOCK
    stored = PackedBlocks.zeros(4, 2**30 + SHARD_UNIT, DEVICE)
    x = torch.zeros(n, dtype=torch.bfloat16, device=DEVICE)
    x[-tail:] = torch.randn(tail)
    seed = noise_seed(torch.initial_seed())
    ops.add_blocks(x, stored, seed)
    noise = uniform_noise(tail, seed, first=n - tail)
    expected = reference.quantize_blocks(x[-tail:].cpu(), rounding="stochastic", noise=noise)
    got = stored.read(n - tail, tail)
    assert same(got.payload, expected.payload) and same(got.exponents, expected.exponents)
    stored.clear(n - tail, tail)
    assert not stored.data.any()


@pytest.mark.parametrize(
    ("ranks", "blocks"), [(1, 3), (2, 1), (3, 64), pytest.param(5, 3, marks=smoke), (8, 64)]
)
def test_sum_blocks(ranks, blocks):
    payload = random_codes(ranks, blocks * BLOCK)
    exponents = torch.randint(0, 248, (ranks, blocks)).to(torch.uint8)
    exponents[:, 0] = 130  # equal on all ranks, so that the sum's order matters
    exponents[:, -1] = 247  # products overflow
    exponents[:, 1:2] = 0  # the power of two is a denormal
    expected = reference.sum_blocks(payload, exponents, torch.empty(blocks * BLOCK))
    memory = torch.full((blocks * BLOCK + 7,), NAN, device=DEVICE)
    out = memory[3:-4]
    assert ops.sum_blocks(put(payload), put(exponents), out) is out and same(out, expected)
    assert memory[:3].isnan().all() and memory[-4:].isnan().all()
    scale = torch.rand(())
    expected = reference.sum_blocks(payload, exponents, torch.empty(blocks * BLOCK), scale)
    assert ops.sum_blocks(put(payload), put(exponents), out, put(scale)) is out and same(out, expected)
    assert memory[:3].isnan().all() and memory[-4:].isnan().all()


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=smoke), torch.float32], ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_sum_blocks_from_a_start_on(ranks, dtype):
    blocks = 67
    payload = random_codes(ranks, blocks * BLOCK)
    exponents = torch.randint(110, 140, (ranks, blocks)).to(torch.uint8)
    start = (torch.randn(blocks * BLOCK) * 100).to(dtype)
    expected = reference.sum_blocks(payload, exponents, torch.empty_like(start), start=start)
    got = ops.sum_blocks(put(payload), put(exponents), torch.empty_like(start, device=DEVICE), start=put(start))
    assert same(got, expected)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("layout", ["packed", "transposed"])
def test_sums_of_shards_in_place(ranks, layout):
    packed = PackedBlocks(torch.empty(ranks, 3 * SHARD_UNIT * (BLOCK + 1) // BLOCK, dtype=torch.uint8))
    packed.payload.copy_(random_codes(ranks, 3 * SHARD_UNIT))
    packed.exponents.random_(110, 140)
    expected = reference.sum_blocks(packed.payload, packed.exponents, torch.empty(3 * SHARD_UNIT))
    if layout == "packed":
        packed = PackedBlocks(put(packed.data))
        shards = packed.payload, packed.exponents
    else:
        shards = put(packed.payload, layout), put(packed.exponents, layout)
    assert not shards[0].is_contiguous() or ranks == 1
    assert same(ops.sum_blocks(*shards, torch.empty(3 * SHARD_UNIT, device=DEVICE)), expected)
    exact = expected.double().square().sum().item()
    assert abs(ops.square_sum_blocks(*shards).item() - exact) <= exact * 60 * 2.0**-24


@pytest.mark.parametrize(
    ("ranks", "blocks"), [(1, 3), (2, 1), (5, 3), (8, 64), pytest.param(8, 30_001, marks=on_gpu_only)]
)
def test_square_sum_blocks(ranks, blocks):
    payload = random_codes(ranks, blocks * BLOCK)
    exponents = torch.randint(110, 140, (ranks, blocks)).to(torch.uint8)
    total = reference.sum_blocks(payload, exponents, torch.empty(blocks * BLOCK))
    exact = total.double().square().sum().item()
    payload, exponents = put(payload), put(exponents)
    got = ops.square_sum_blocks(payload, exponents)
    assert got.shape == () and got.dtype == torch.float32 and got.device == payload.device
    assert abs(got.item() - exact) <= exact * 60 * 2.0**-24  # roundings of the square and of some tens of partial sums
    for _ in range(3):
        assert ops.square_sum_blocks(payload, exponents).item() == got.item()


def test_square_sum_blocks_shows_the_non_finite():
    payload = torch.ones(2, 9 * BLOCK).to(E4M3.dtype)
    exponents = torch.full((2, 9), 127, dtype=torch.uint8)
    assert ops.square_sum_blocks(put(payload), put(exponents)).item() == 4 * 9 * BLOCK
    exponents[1, 5] = 247
    assert ops.square_sum_blocks(put(payload), put(exponents)).item() == INF
    payload.view(torch.uint8)[0, 3] = 0xFF
    assert ops.square_sum_blocks(put(payload), put(exponents)).isnan()


def test_sum_blocks_keeps_nan():
    payload = random_codes(2, BLOCK)
    payload.view(torch.uint8)[1, 5] = 0x7F
    exponents = torch.full((2, 1), 127, dtype=torch.uint8)
    out = ops.sum_blocks(put(payload), put(exponents), put(torch.empty(BLOCK)))
    assert out.isnan().nonzero().flatten().tolist() == [5]


# gemm


@on_gpu_only
@pytest.mark.parametrize("a_format", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("b_format", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("shape", [(16, 16, 16), pytest.param((48, 80, 112), marks=smoke), (512, 384, 1040)], ids=str)
def test_gemm(a_format, b_format, fast_accum, shape):
    m, n, k = shape
    a = reference.quantize(torch.randn(m, k), a_format, torch.tensor(20.0))
    b = reference.quantize(torch.randn(n, k), b_format, torch.tensor(3.0))
    scales = torch.tensor(0.05), torch.tensor(1 / 3.0)
    operands = ScaledTensor(put(a), put(scales[0])), ScaledTensor(put(b), put(scales[1]))
    if a_format is b_format is E5M2:
        with pytest.raises(ValueError, match="E4M3"):
            gemm.gemm(*operands)
        return
    exact = (a.double() @ b.double().t()) * scales[0].double() * scales[1].double()

    def error(got, expected=exact):
        return ((got.cpu().double() - expected).norm() / expected.norm()).item()

    assert error(reference.gemm(a, b, *scales, out_dtype=torch.float32)) < 1e-6
    y = gemm.gemm(*operands, fast_accum=fast_accum)
    assert y.dtype == torch.bfloat16 and y.shape == (m, n) and error(y) < 5e-3
    y = gemm.gemm(*operands, fast_accum=fast_accum, epilogue=gemm.Epilogue(dtype=torch.float32))
    assert y.dtype == torch.float32 and error(y) < 3e-3
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((m, n), NAN, dtype=dtype, device=DEVICE)
        assert gemm.gemm(*operands, gemm.Epilogue(into=out), fast_accum=fast_accum) is out and error(out) < 5e-3
    before = torch.randn(m, n)
    out = put(before)
    assert gemm.gemm(*operands, gemm.Epilogue(into=out, accumulate=True), fast_accum=fast_accum) is out
    assert error(out, before + exact) < 3e-3
