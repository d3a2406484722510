"""ops.adam.adam_step on CUDA against reference_adam.py on the CPU, bit for bit, for every combination of formats.

tests/unit/test_adam.py runs this file without a GPU too, through Triton's interpreter.
"""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from test_ops_cuda import DEVICE, INTERPRETED, same

from megatron_fp8.numerics import BLOCK, E4M3, BlockScaled, ScaledTensor
from megatron_fp8.numerics.blocks import SHARD_UNIT, PackedBlocks
from megatron_fp8.numerics.master import Block16, quantize_block16, split_bf16, split_e4m3
from megatron_fp8.ops import adam, reference, reference_adam
from megatron_fp8.ops.adam import AdamHyper

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:
    from megatron_fp8.ops.triton.adam import adam_step
else:
    adam_step = adam.adam_step

INF, NAN = math.inf, math.nan
FP32, BF16, INT16 = torch.float32, torch.bfloat16, torch.int16
HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
FORMATS = list(
    itertools.product(
        [FP32, BF16, BlockScaled], [FP32, Block16, BlockScaled], [FP32, INT16, Block16, BF16, BlockScaled],
        [BF16, ScaledTensor],
    )
)  # fmt: skip
formats = pytest.mark.parametrize(("m", "v", "master", "weight"), FORMATS, ids=lambda kind: str(kind)[-13:])
the_o2_set = pytest.mark.parametrize("weight", [BF16, ScaledTensor], ids=["bf16", "e4m3"])


@pytest.fixture(autouse=True)
def fresh_random_data():
    seed = torch.seed() % 2**32
    print(f"torch.manual_seed({seed})")  # shown when the test fails
    torch.manual_seed(seed)


def stored(x: torch.Tensor, kind):
    """x as a state of that kind."""
    if kind is BlockScaled:
        return reference.quantize_blocks(x)
    return quantize_block16(x) if kind is Block16 else x.to(kind)


def states(n: int, m, v, master, weight, scale: float = 2.0**7) -> list:
    """Random exp_avg, exp_avg_sq, master and weight of those kinds, on the CPU, blocks of many magnitudes."""
    magnitude = 10 ** (1.5 * torch.randn(n // BLOCK, 1)).repeat_interleave(BLOCK)
    averages = magnitude * torch.randn(n), (magnitude * torch.randn(n)) ** 2
    root = averages[1].sqrt() if v is BlockScaled else averages[1]
    w = torch.randn(n).clamp(-3, 3)
    w[::7] *= 1e-4
    if weight is BF16:
        pair = split_bf16(w) if master is INT16 else (w.bfloat16(), None)
    else:
        payload, remainder = split_e4m3(w, torch.tensor(scale))
        pair = ScaledTensor(payload, torch.tensor(1 / scale)), remainder
    return [stored(averages[0], m), stored(root, v), pair[1] if master is INT16 else stored(w, master), pair[0]]


def to_device(state):
    """A copy of a tensor, or of the tensors of a dataclass or a tuple, on the device."""
    if isinstance(state, torch.Tensor):
        return state.clone().to(DEVICE)
    if isinstance(state, tuple):
        return tuple(part.to(DEVICE) for part in state)  # not copied: its strides stay
    return type(state)(**{name: to_device(part) for name, part in vars(state).items()})


def parts(state) -> list[torch.Tensor]:
    return [state] if isinstance(state, torch.Tensor) else list(vars(state).values())


def check(gradient, state, hyper=HYPER, grad_scale=0.37, weight_scale=2.0**6) -> list:
    """A step of both from the same state; returns the new state, on the CPU."""
    expected, got = [copy.deepcopy(part) for part in state], [to_device(part) for part in state]
    amaxes = torch.tensor(0.5), torch.tensor(0.5, device=DEVICE)
    scales = torch.tensor(grad_scale), torch.tensor(weight_scale)
    on_device = [scale.to(DEVICE) for scale in scales]
    reference_adam.adam_step(gradient, *expected, hyper, *scales, amaxes[0])
    adam_step(to_device(gradient), *got, hyper, *on_device, amaxes[1])
    if not INTERPRETED and isinstance(expected[3], ScaledTensor):
        expected[3].scale_inv = 1 / scales[1]
    for a, b in zip(got, expected, strict=True):
        assert all(same(x, y) for x, y in zip(parts(a), parts(b), strict=True))
    assert same(amaxes[1], amaxes[0])
    return expected


@formats
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_combination_of_formats(m, v, master, weight, decoupled):
    n = 3 * BLOCK
    hyper = AdamHyper(3e-3, 0.9, 0.95, 1e-8, 0.1, 5, decoupled)
    before = states(n, m, v, master, weight)
    after = check(torch.randn(n), before, hyper)
    assert not all(torch.equal(x, y) for x, y in zip(parts(before[0]), parts(after[0]), strict=True))


@the_o2_set
@pytest.mark.parametrize("blocks", [1, 7, 8, 9, 35])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_sizes(weight, blocks, dtype):
    n = blocks * BLOCK
    state = states(n, BlockScaled, Block16, INT16, weight)
    for step in (1, 2, 1000):
        hyper = AdamHyper(1e-4, 0.9, 0.999, 0, 0, step)  # eps = 0: where there are no elements, 0 / 0
        state = check(torch.randn(n).to(dtype), state, hyper, weight_scale=2.0**7)


@the_o2_set
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("span", [slice(0, None), slice(5 * BLOCK, 17 * BLOCK)], ids=["rows", "parts of rows"])
def test_packed_gradients(weight, ranks, span):
    packed = PackedBlocks.empty(ranks, 2 * SHARD_UNIT, "cpu")
    reference.quantize_blocks(torch.randn(packed.numel), out=packed)
    packed = PackedBlocks(packed.data.to(DEVICE))
    of_blocks = slice(span.start // BLOCK, span.stop and span.stop // BLOCK)
    gradient = packed.payload[:, span], packed.exponents[:, of_blocks]
    assert gradient[0].stride(0) == gradient[1].stride(0) == packed.data.shape[1]
    state = states(gradient[0].shape[1], BlockScaled, Block16, INT16, weight)
    on_cpu = tuple(part.cpu() for part in gradient)
    after = check(on_cpu, state)
    got = [to_device(part) for part in state]
    scales = [torch.tensor(x, device=DEVICE) for x in (0.37, 2.0**6)]
    adam_step(gradient, *got, HYPER, *scales)  # strided on the device too, no amax
    assert all(
        same(x, y) for a, b in zip(got[:3], after[:3], strict=True) for x, y in zip(parts(a), parts(b), strict=True)
    )


@pytest.mark.parametrize(
    "kinds",
    [FORMATS[0], FORMATS[-1], (BF16, Block16, Block16, BF16)]
    + [(BlockScaled, Block16, INT16, weight) for weight in (BF16, ScaledTensor)],
)
def test_edge_values(kinds):
    n = 16 * BLOCK
    special = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-130), 1e-30, 1e15, -3e38, INF, -INF, NAN])
    all_ones = torch.tensor([2**31 - 1, -1]).to(torch.int32).view(FP32)  # of NaN's bits, whose rounding up carries
    special = torch.cat([special, all_ones])
    zeros = [stored(torch.zeros(n), kind) for kind in kinds[:3]]
    w = torch.zeros(n)
    weight = ScaledTensor(w.to(E4M3.dtype), torch.tensor(2.0**-7)) if kinds[3] is ScaledTensor else w.bfloat16()
    for state in ([*zeros, weight], states(n, *kinds)):
        gradient = torch.randn(n)
        for i, value in enumerate(special):
            gradient[(i + 1) * BLOCK + 3 :: n] = value
        gradient[BLOCK * 14 : BLOCK * 15] = 0.0
        after = check(gradient, state, grad_scale=1.0, weight_scale=2.0**7)
        after = check(torch.randn(n), after, weight_scale=2.0**7)
        m, v, _, new_weight = after
        new_weight = new_weight.dequantize() if kinds[3] is ScaledTensor else new_weight
        for part in (reference_adam._read(m), reference_adam._read(v), new_weight):
            assert part[[i * BLOCK + 3 for i in (10, 11, 12)]].isnan().all()


def test_weights_of_any_bits_beside_a_remainder():
    n = 64 * BLOCK
    top = torch.randint(-(2**15), 2**15, (n,)).to(INT16)
    remainder = torch.randint(-(2**15), 2**15, (n,)).to(INT16)
    zeros = torch.zeros(n)
    check(torch.randn(n), [zeros, zeros, remainder, top.view(BF16)])
    codes = torch.randint(0, 256, (n,)).to(torch.uint8).view(E4M3.dtype)
    for scale in (2.0**-3, 1.0, 2.0**3):  # some weights saturate
        weight = ScaledTensor(codes, torch.tensor(1.0))
        check(torch.randn(n), [zeros, zeros, remainder, weight], weight_scale=scale)


def test_masters_at_every_boundary_of_e4m3():
    """Without decay, gradient and averages nothing moves: the masters are encoded as they are."""
    still = dataclasses.replace(HYPER, weight_decay=0.0)
    values = torch.arange(127, dtype=torch.uint8).view(E4M3.dtype).float()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    points = torch.cat([points, points.nextafter(torch.tensor(INF)), points.nextafter(torch.tensor(-INF))])
    points = torch.cat([points, -points, torch.zeros(-2 * len(points) % BLOCK)])
    zeros = torch.zeros(len(points))
    for scale in (0.25, 1.0, 2.0):
        payload, remainder = split_e4m3(points, torch.tensor(1.0))
        for master in (points, remainder):
            state = [zeros, zeros, master, ScaledTensor(payload, torch.tensor(1.0))]
            after = check(zeros, state, still, weight_scale=scale)
            if master is points:  # a remainder has but 19 bits of them
                assert same(after[3].payload, split_e4m3(points, torch.tensor(scale))[0])
