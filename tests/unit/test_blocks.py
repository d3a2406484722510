"""BlockScaled, PackedBlocks, quantize_blocks and add_blocks against exact fractions and plain bytes.

There is a test for each property that the top of numerics/blocks.py states.
"""

from fractions import Fraction

import pytest
import torch
from exact import INF, NAN, magnitudes, random_floats, rounded, same
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.numerics import BLOCK, E4M3, BlockScaled, block_scales
from megatron_fp8.numerics.blocks import SHARD_UNIT, PackedBlocks
from megatron_fp8.numerics.noise import noise_seed, uniform_noise
from megatron_fp8.ops.reference import add_blocks, quantize_blocks

LARGEST = 248 * 2.0**120  # from here on a value rounds to 2^128


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wide_blocks(count: int, seed: int) -> torch.Tensor:
    """Blocks with magnitudes from 2^-149 to 3.2e38, each spread over up to 2^24, and with some zeros."""
    g = generator(seed)
    top = torch.randint(-149, 127, (count, 1), generator=g)
    below = torch.randint(0, 24, (count, BLOCK), generator=g) * (torch.rand(count, 1, generator=g) > 0.3)
    x = torch.rand(count, BLOCK, generator=g).double().add(1).mul(2.0 ** (top - below).double())
    x = x * torch.randint(-1, 2, x.shape, generator=g)
    return x.clamp(-3.2e38, 3.2e38).float().flatten()


def exponent(block: list[float]) -> int:
    """The smallest e in -127 .. 120 with max|block| <= 448 * 2^e, found by trying all."""
    largest = max(abs(Fraction(value)) for value in block)
    return next(e for e in range(-127, 121) if largest <= 448 * Fraction(2) ** e)


def assert_exact(x: torch.Tensor, got: BlockScaled, mode: str = "nearest", noise: torch.Tensor | None = None):
    assert got.payload.dtype == E4M3.dtype and got.exponents.dtype == torch.uint8
    noise = torch.zeros_like(x) if noise is None else noise
    for i, block in enumerate(x.float().view(-1, BLOCK).tolist()):
        e = exponent(block)
        assert got.exponents[i].item() == e + 127
        scaled = [Fraction(value) / Fraction(2) ** e for value in block]
        assert max(map(abs, scaled)) <= 448
        units = noise[i * BLOCK : (i + 1) * BLOCK].tolist()
        payload = [rounded(value, E4M3, mode, unit) for value, unit in zip(scaled, units, strict=True)]
        expected = torch.tensor(payload).copysign(torch.tensor(block))
        assert same(got.payload[i * BLOCK : (i + 1) * BLOCK].float(), expected)


def same_blocks(a: BlockScaled, b: BlockScaled) -> bool:
    same_bytes = torch.equal(a.payload.view(torch.uint8), b.payload.view(torch.uint8))
    return same_bytes and torch.equal(a.exponents, b.exponents)


def test_every_exponent_byte():
    scales = block_scales(torch.arange(256, dtype=torch.uint8)).tolist()
    assert [Fraction(scale) for scale in scales[:255]] == [Fraction(2) ** (b - 127) for b in range(255)]
    assert scales[255] == INF


def test_dequantize_is_exact():
    codes = torch.randint(0, 256, (256 * BLOCK,), dtype=torch.uint8, generator=generator())
    exponents = torch.arange(256, dtype=torch.uint8)
    values = BlockScaled(codes.view(E4M3.dtype), exponents).dequantize()
    assert values.shape == (256 * BLOCK,) and values.dtype == torch.float32
    grid = magnitudes(E4M3)
    for i in range(0, 247 * BLOCK, 37):  # up to byte 246 the largest product fits into float32
        code = codes[i].item()
        if code % 128 == 127:
            assert values[i].isnan()
            continue
        product = grid[code % 128] * Fraction(2) ** (i // BLOCK - 127)
        assert abs(Fraction(values[i].item())) == product
        assert values[i].signbit().item() == (code >= 128)


@pytest.mark.parametrize("seed", range(3))
def test_quantize_is_exact_at_every_magnitude(seed):
    x = wide_blocks(30, seed)
    assert_exact(x, quantize_blocks(x))


def test_quantize_is_exact_for_random_bits():
    x = random_floats(20 * BLOCK, generator())
    x = torch.where(x.isfinite(), x, 0.0)
    assert_exact(x, quantize_blocks(x))


@settings(max_examples=60, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, BLOCK - 1))
def test_a_block_with_any_maximum(value, position):
    x = torch.full((BLOCK,), value / 3)
    x[position] = value
    assert_exact(x, quantize_blocks(x))


def test_the_exponent_changes_just_above_448():
    for e in (-127, -126, -100, 0, 5, 119):
        at = torch.zeros(BLOCK)
        at[7] = -448 * 2.0**e
        above = at.nextafter(torch.tensor(-INF)).where(at != 0, 0.0)
        assert quantize_blocks(at).exponents.item() == e + 127
        assert quantize_blocks(at).payload[7].item() == -448
        assert quantize_blocks(above).exponents.item() == e + 128
        assert quantize_blocks(above).payload[7].item() == -224


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_input_types(dtype):
    x = torch.randn(4 * BLOCK, generator=generator()).to(dtype)
    got = quantize_blocks(x)
    assert_exact(x, got)
    assert same_blocks(got, quantize_blocks(x.float()))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_quantising_again_changes_no_value_and_bytes_only_from_224_to_448(seed):
    once = quantize_blocks(wide_blocks(40, seed))
    values = once.dequantize()
    for rounding in ("nearest", "stochastic"):
        twice = quantize_blocks(values, rounding=rounding, noise=torch.rand(values.shape))
        assert same(twice.dequantize(), values)
        largest = once.payload.float().view(-1, BLOCK).abs().amax(1)
        moved = (largest == 224) & (once.exponents > 0)
        assert torch.equal(twice.exponents, once.exponents - moved.byte())
        kept = ~moved.repeat_interleave(BLOCK)
        assert torch.equal(twice.payload.view(torch.uint8)[kept], once.payload.view(torch.uint8)[kept])
        assert same_blocks(quantize_blocks(twice.dequantize()), twice)


def test_quantising_again_where_the_maximum_rounds_down_to_224():
    x = torch.full((BLOCK,), 3.0)
    x[0], x[1] = 230.0, 2.0**-9
    once = quantize_blocks(x)
    twice = quantize_blocks(once.dequantize())
    assert (once.exponents.item(), once.payload[0].item()) == (127, 224)
    assert (twice.exponents.item(), twice.payload[0].item()) == (126, 448)
    assert same(twice.dequantize(), once.dequantize())
    assert same_blocks(quantize_blocks(twice.dequantize()), twice)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_nothing_saturates_and_the_error_is_bounded(seed):
    x = wide_blocks(40, seed)
    got = quantize_blocks(x)
    step = block_scales(got.exponents).repeat_interleave(BLOCK).double()
    error = (got.dequantize().double() - x.double()).abs()
    assert (x.abs().double() <= 448 * step).all()
    assert (error <= torch.maximum(x.abs().double() * 2.0**-4, step * 2.0**-10)).all()
    assert (error > 0).any()
    largest = x.view(-1, BLOCK).abs().amax(1).double()
    free = got.exponents > 0
    assert (largest[free] > 224 * block_scales(got.exponents).double()[free]).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 7), st.integers(0, 2**31))
def test_a_shard_cut_at_a_block_boundary_has_the_bytes_of_the_whole(cut, seed):
    x = wide_blocks(8, seed)
    noise = torch.rand(x.shape, generator=generator(seed))
    for rounding in ("nearest", "stochastic"):
        whole = quantize_blocks(x, rounding=rounding, noise=noise)
        parts = [
            quantize_blocks(x[part], rounding=rounding, noise=noise[part])
            for part in (slice(0, cut * BLOCK), slice(cut * BLOCK, None))
        ]
        payload = torch.cat([part.payload.view(torch.uint8) for part in parts]).view(E4M3.dtype)
        joined = BlockScaled(payload, torch.cat([part.exponents for part in parts]))
        assert same_blocks(joined, whole)


def test_stochastic_is_exact_for_its_noise_and_unbiased():
    x = wide_blocks(20, 5)
    noise = torch.rand(x.shape, generator=generator())
    assert_exact(x, quantize_blocks(x, rounding="stochastic", noise=noise), "stochastic", noise)

    n = 1000 * BLOCK
    many = torch.full((n,), 1.03)
    many[::BLOCK] = 448.0  # fixes every exponent at 0, where 1.03 lies 0.24 of the way from 1 to 1.125
    got = quantize_blocks(many, rounding="stochastic", noise=torch.rand(n, generator=generator()))
    values = got.dequantize().view(-1, BLOCK)[:, 1:].double()
    p, step = (many[1].item() - 1) / 0.125, 0.125
    assert set(values.flatten().tolist()) == {1.0, 1.125}
    five_sigma = 5 * step * (p * (1 - p) / values.numel()) ** 0.5
    assert abs(values.mean().item() - many[1].item()) <= five_sigma < step * p / 10


def test_zeros():
    x = torch.zeros(2 * BLOCK)
    x[BLOCK:] = -0.0
    got = quantize_blocks(x)
    assert got.exponents.tolist() == [0, 0]
    assert same(got.dequantize(), x)


def test_denormals_and_the_ends_of_float32():
    x = torch.zeros(4 * BLOCK)
    x[0] = 2.0**-149  # below half the smallest step
    x[BLOCK], x[BLOCK + 1], x[BLOCK + 2] = 2.0**-136, 2.0**-137 * 1.5, -(2.0**-137)  # a step, 3/4 of it, half of it
    x[2 * BLOCK], x[2 * BLOCK + 1] = 2.0**-126, 3e-39
    x[3 * BLOCK], x[3 * BLOCK + 1] = 3e38, -1e38
    got = quantize_blocks(x)
    assert_exact(x, got)
    assert got.exponents.tolist() == [0, 0, 0, 247]
    assert got.dequantize()[0].item() == 0
    assert got.dequantize()[BLOCK : BLOCK + 3].tolist() == [2.0**-136, 2.0**-136, 0.0]
    assert got.dequantize()[2 * BLOCK].item() == 2.0**-126
    assert got.dequantize()[3 * BLOCK].item() == 224 * 2.0**120


def test_the_last_half_step_of_float32_rounds_to_infinity():
    x = torch.zeros(2 * BLOCK)
    x[0], x[BLOCK] = torch.tensor(LARGEST).nextafter(torch.tensor(0.0)), LARGEST
    values = quantize_blocks(x).dequantize()
    assert values[0].item() == 240 * 2.0**120
    assert values[BLOCK].item() == INF


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [0x7F800000, -0x00800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1], ids=hex)
def test_infinities_and_every_kind_of_nan_become_nan_in_their_block_only(bits, rounding):
    x = torch.randn(3 * BLOCK, generator=generator())
    x.view(torch.int32)[BLOCK + 5] = bits
    assert not x[BLOCK + 5].isfinite()
    noise = torch.rand(x.shape, generator=generator())
    got = quantize_blocks(x, rounding=rounding, noise=noise)
    expected = torch.zeros(3 * BLOCK, dtype=torch.bool)
    expected[BLOCK + 5] = True
    assert torch.equal(got.dequantize().isnan(), expected)
    assert got.exponents[1].item() == 247
    x[BLOCK + 5] = 0.0
    clean = quantize_blocks(x, rounding=rounding, noise=noise)
    for i in (0, 2):
        part = slice(i * BLOCK, (i + 1) * BLOCK)
        assert same(got.dequantize()[part], clean.dequantize()[part])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="128"):
        quantize_blocks(torch.ones(100))
    with pytest.raises(ValueError, match="128"):
        quantize_blocks(torch.ones(2, BLOCK))
    with pytest.raises(ValueError, match=r"'truncate'.*stochastic"):
        quantize_blocks(torch.ones(BLOCK), rounding="truncate")
    with pytest.raises(ValueError, match="noise"):
        quantize_blocks(torch.ones(BLOCK), rounding="stochastic")


# PackedBlocks

SHARDS, M = 4, 2 * SHARD_UNIT
SPANS = [  # (first, count) in blocks; a row has 32
    (0, SHARDS * M // BLOCK), (0, 1), (5, 3), (31, 1), (31, 2), (32, 32), (30, 40), (1, 126), (63, 65), (128, 0),
    (17, 0),
]  # fmt: skip
spans = pytest.mark.parametrize(("first", "count"), [(BLOCK * a, BLOCK * n) for a, n in SPANS])
BEYOND = [(64, BLOCK), (-BLOCK, BLOCK), (SHARDS * M, BLOCK), (BLOCK, SHARDS * M), (SHARDS * M + BLOCK, 0)]


def random_blocks(n: int) -> BlockScaled:
    payload, exponents = torch.randint(0, 256, (n,)), torch.randint(0, 256, (n // BLOCK,))
    return BlockScaled(payload.byte().view(E4M3.dtype), exponents.byte())


def packed_bytes(blocks: BlockScaled, shards: int) -> torch.Tensor:
    """The layout that numerics/blocks.py draws: each shard's payload followed by its exponents."""
    payload, exponents = blocks.payload.view(torch.uint8).chunk(shards), blocks.exponents.chunk(shards)
    return torch.stack([torch.cat(row) for row in zip(payload, exponents, strict=True)])


def random_packed() -> tuple[BlockScaled, PackedBlocks]:
    """The same random blocks, flat and packed."""
    blocks = random_blocks(SHARDS * M)
    return blocks, PackedBlocks(packed_bytes(blocks, SHARDS))


def replaced(blocks: BlockScaled, first: int, by: BlockScaled) -> BlockScaled:
    """`blocks`, with `by` in place of the elements from `first` on."""
    payload, exponents, stop = blocks.payload.view(torch.uint8), blocks.exponents, first + by.payload.numel()
    payload = torch.cat([payload[:first], by.payload.view(torch.uint8), payload[stop:]]).view(E4M3.dtype)
    return BlockScaled(payload, torch.cat([exponents[: first // BLOCK], by.exponents, exponents[stop // BLOCK :]]))


def test_packed_rows_are_payload_then_exponents():
    blocks, packed = random_packed()
    assert packed.numel == SHARDS * M and packed.payload.dtype == E4M3.dtype
    assert torch.equal(packed.payload.view(torch.uint8), blocks.payload.view(torch.uint8).view(SHARDS, M))
    assert torch.equal(packed.exponents, blocks.exponents.view(SHARDS, M // BLOCK))
    assert same(packed.dequantize(), blocks.dequantize())
    packed.payload.view(torch.uint8).fill_(7)
    packed.exponents.fill_(9)
    assert packed.data.tolist() == SHARDS * [M * [7] + M // BLOCK * [9]]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("units", [0, 1, 3])
def test_packed_shapes_and_the_alignment_of_rows(shards, units):
    m = units * SHARD_UNIT
    for packed in (PackedBlocks.zeros(shards, m, "cpu"), PackedBlocks.empty(shards, m, "cpu")):
        assert packed.data.shape == (shards, m + m // 128) and packed.data.dtype == torch.uint8
        assert packed.payload.shape == (shards, m) and packed.exponents.shape == (shards, m // 128)
        assert packed.numel == shards * m == packed.dequantize().numel()
        assert packed.data.shape[1] % 16 == 0
    assert not PackedBlocks.zeros(shards, m, "cpu").data.any()
    assert PackedBlocks.empty(shards, m, "meta").data.device.type == "meta"


@pytest.mark.parametrize("m", [1, 128, SHARD_UNIT - 128, SHARD_UNIT + 16])
def test_packed_shards_of_other_sizes_are_refused(m):
    for make in (PackedBlocks.zeros, PackedBlocks.empty):
        with pytest.raises(ValueError, match=f"2048.*{m}"):
            make(2, m, "cpu")


@spans
def test_packed_read_write_and_clear(first, count):
    blocks, packed = random_packed()
    before = packed.data.clone()
    got = packed.read(first, count)
    assert same_blocks(got, blocks.part(first, count))
    assert got.payload.is_contiguous() and got.exponents.is_contiguous()
    got.payload.view(torch.uint8).fill_(7)  # `read` returned a copy
    assert torch.equal(packed.data, before)

    new = random_blocks(count)
    packed.write(first, new)
    assert torch.equal(packed.data, packed_bytes(replaced(blocks, first, new), SHARDS))
    packed.clear(first, count)
    zeros = BlockScaled(torch.zeros(count).to(E4M3.dtype), torch.zeros(count // BLOCK, dtype=torch.uint8))
    assert torch.equal(packed.data, packed_bytes(replaced(blocks, first, zeros), SHARDS))


@pytest.mark.parametrize(("first", "count"), BEYOND)
def test_packed_refuses_spans_that_are_not_whole_blocks_inside(first, count):
    _, packed = random_packed()
    before = packed.data.clone()
    for act in (
        lambda: packed.read(first, count),
        lambda: packed.write(first, random_blocks(count)),
        lambda: packed.clear(first, count),
        lambda: quantize_blocks(torch.ones(count), out=packed, first=first),
        lambda: add_blocks(torch.ones(count), packed, noise_seed(1), first),
    ):
        with pytest.raises(ValueError, match="128"):
            act()
    with pytest.raises(ValueError, match="128"):
        packed.read(0, 100)
    assert torch.equal(packed.data, before)


@spans
def test_quantize_into_packed(first, count):
    x = wide_blocks(max(count // BLOCK, 1), 9)[:count]
    for options in ({}, {"rounding": "stochastic", "noise": torch.rand(count)}):
        blocks, packed = random_packed()
        assert quantize_blocks(x, **options, out=packed, first=first) is packed
        expected = replaced(blocks, first, quantize_blocks(x, **options))
        assert torch.equal(packed.data, packed_bytes(expected, SHARDS))


@spans
def test_add_into_packed_takes_its_noise_from_the_first_of_x(first, count):
    stored, x = quantize_blocks(torch.randn(SHARDS * M)), torch.randn(count)
    packed, words = PackedBlocks(packed_bytes(stored, SHARDS)), noise_seed(first, count)
    add_blocks(x, packed, words, first)
    total = float32_sum(stored.part(first, count), x)
    new = quantize_blocks(total, "stochastic", uniform_noise(count, words))
    assert torch.equal(packed.data, packed_bytes(replaced(stored, first, new), SHARDS))


# add_blocks


def added(x: torch.Tensor, blocks: BlockScaled, words: tuple[int, int]) -> BlockScaled:
    """`blocks` with x added; they are at the start of a PackedBlocks."""
    n = blocks.payload.numel()
    packed = PackedBlocks.zeros(1, -(-n // SHARD_UNIT) * SHARD_UNIT, "cpu")
    packed.write(0, blocks)
    assert add_blocks(x, packed, words) is None
    return packed.read(0, n)


def float32_sum(blocks: BlockScaled, x: torch.Tensor) -> torch.Tensor:
    """Stored values + x, rounded to float32. The float64 sum of two float32 rounds to the right float32."""
    powers = 2.0 ** (blocks.exponents.double() - 127)
    stored = (blocks.payload.double().view(-1, BLOCK) * powers[:, None]).flatten()
    return (stored + x.double()).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_add_is_one_float32_sum_rounded_stochastically(dtype, seed):
    blocks = quantize_blocks(wide_blocks(30, seed) / 4)
    ratio = 10 ** (3 * torch.randn(30 * BLOCK, generator=generator(seed)))
    x = (blocks.dequantize() * torch.randn(30 * BLOCK, generator=generator(seed)) * ratio).clamp(-1e38, 1e38).to(dtype)
    x = torch.where(x.isfinite(), x, 0.0)
    total, words = float32_sum(blocks, x), noise_seed(seed, 1)
    assert not torch.equal(total, x.float()) and not torch.equal(total, blocks.dequantize())
    before = x.clone()
    got = added(x, blocks, words)
    assert same(x, before)
    assert_exact(total, got, "stochastic", uniform_noise(30 * BLOCK, words))


def test_add_repeats_itself_and_differs_from_seed_to_seed():
    start = quantize_blocks(torch.randn(20 * BLOCK, generator=generator(1)))
    x = torch.randn(20 * BLOCK, generator=generator(2))
    sums = [added(x, start, words) for words in (noise_seed(1), noise_seed(1), noise_seed(2))]
    assert same_blocks(sums[0], sums[1])
    differing = sums[0].payload.view(torch.uint8) != sums[2].payload.view(torch.uint8)
    assert 0.1 < differing.double().mean() < 0.6


def test_the_mean_over_many_seeds_is_the_exact_sum_though_rounding_to_nearest_stalls():
    """The same x is added 40 times. Each of its 400 copies has its own noise."""
    additions, copies, seed = 40, 400, torch.seed()
    print(f"seed {seed}")
    x = torch.randn(BLOCK, generator=generator(seed)).bfloat16()
    exact = additions * x.double()
    zeros = torch.zeros(copies * BLOCK)
    stochastic, nearest = quantize_blocks(zeros), quantize_blocks(zeros[:BLOCK])
    for i in range(additions):
        stochastic = added(x.repeat(copies), stochastic, noise_seed(seed, i))
        nearest = quantize_blocks(nearest.dequantize() + x)
    results = stochastic.dequantize().view(copies, BLOCK).double()
    error = (results.mean(0) - exact) / (results.std(0) / copies**0.5)  # in standard errors
    assert error.abs().max() < 6.5
    assert error.square().mean() < 2

    def bias(total):
        return ((total - exact) @ exact / (exact @ exact)).item()

    assert abs(bias(results.mean(0))) < 0.01
    assert bias(nearest.dequantize().double()) < -0.2
    last = nearest.dequantize()
    for _ in range(3):  # rounded to nearest, most elements never change
        nearest = quantize_blocks(nearest.dequantize() + x)
    assert (nearest.dequantize() == last).double().mean() > 0.5


def test_add_of_zeros_and_of_negatives():
    start = quantize_blocks(torch.randn(3 * BLOCK, generator=generator()))
    blocks = added(-start.dequantize(), start, noise_seed(1))
    assert blocks.exponents.tolist() == [0, 0, 0]
    assert same(blocks.dequantize(), torch.zeros(3 * BLOCK))
    blocks = added(torch.zeros(3 * BLOCK), blocks, noise_seed(2))
    assert blocks.exponents.tolist() == [0, 0, 0] and not blocks.payload.view(torch.uint8).any()
    got = added(torch.zeros(3 * BLOCK), start, noise_seed(3))  # stored values need no rounding
    assert same(got.dequantize(), start.dequantize())


def test_add_keeps_denormals():
    start = torch.zeros(BLOCK)
    start[:2] = torch.tensor([2.0**-136, 2.0**-134])
    blocks = quantize_blocks(start)
    x = torch.full((BLOCK,), 2.0**-136)
    blocks = added(x, blocks, noise_seed(1))
    assert blocks.exponents.item() == 0 and same(blocks.dequantize(), start + x)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_add_shows_the_non_finite_of_either_side_and_the_overflow(bad, dtype):
    expected = torch.zeros(4 * BLOCK, dtype=torch.bool)
    expected[BLOCK + 5] = expected[2 * BLOCK + 7] = True
    start = torch.randn(4 * BLOCK, generator=generator())
    start[BLOCK + 5] = bad
    x = torch.randn(4 * BLOCK, generator=generator(2)).to(dtype)
    x[2 * BLOCK + 7] = bad
    blocks = added(x, quantize_blocks(start), noise_seed(1))
    assert torch.equal(blocks.dequantize().isnan(), expected)
    assert blocks.exponents[1:3].tolist() == [247, 247]
    ends = torch.tensor([0, 3]).repeat_interleave(BLOCK) * BLOCK + torch.arange(BLOCK).repeat(2)
    clean = added(torch.where(expected, 0.0, x), quantize_blocks(start), noise_seed(1))
    assert same(blocks.dequantize()[ends], clean.dequantize()[ends])
    blocks = added(torch.zeros(4 * BLOCK), blocks, noise_seed(2))  # NaN stays
    assert torch.equal(blocks.dequantize().isnan(), expected)


def test_a_sum_beyond_float32_becomes_nan():
    blocks = quantize_blocks(torch.full((BLOCK,), 3e38))
    x = torch.full((BLOCK,), -3e38)
    x[9] = 3e38
    blocks = added(x, blocks, noise_seed(1))
    assert blocks.dequantize().isnan().nonzero().flatten().tolist() == [9]


@pytest.mark.parametrize("shape", [(100,), (2, BLOCK), (SHARD_UNIT + BLOCK,), ()])
def test_add_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match="128"):
        add_blocks(torch.ones(shape), PackedBlocks.zeros(1, SHARD_UNIT, "cpu"), noise_seed(1))
