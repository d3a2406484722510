"""ops.adam.adam_step on CUDA against itself on the CPU, for every combination of formats.

The averages agree bit for bit. The update is within its bound of float64. The stored forms of the new master agree bit
for bit again.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from test_ops_cuda import DEVICE, INTERPRETED, named_parts, same

from megatron_fp8.numerics import BLOCK, E4M3, BlockScaled, ScaledTensor
from megatron_fp8.numerics.blocks import SHARD_UNIT, PackedBlocks
from megatron_fp8.numerics.master import Block16, quantize_block16, split_bf16, split_e4m3
from megatron_fp8.ops import adam, reference
from megatron_fp8.ops.adam import AdamHyper
from megatron_fp8.ops.adam_states import read_master, read_state, write_master

pytestmark = [pytest.mark.usefixtures("fresh_random_data"), *([] if INTERPRETED else [pytest.mark.gpu])]
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


def stored(x: torch.Tensor, kind):
    """x, stored as a state of that kind."""
    if kind is BlockScaled:
        return reference.quantize_blocks(x)
    return quantize_block16(x) if kind is Block16 else x.to(kind)


def states(n: int, m, v, master, weight, scale: float = 2.0**7) -> list:
    """Random exp_avg, exp_avg_sq, master and weight of those kinds, on the CPU, with blocks of many magnitudes."""
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
        return tuple(part.to(DEVICE) for part in state)  # keeps the strides
    return type(state)(**{name: to_device(part) for name, part in named_parts(state)})


def to_view(state, n: int):
    """A view of the state's first n elements."""
    if isinstance(state, torch.Tensor):
        return state[:n]
    return ScaledTensor(state.payload[:n], state.scale_inv) if isinstance(state, ScaledTensor) else state.part(0, n)


def parts(state) -> list[torch.Tensor]:
    return [state] if isinstance(state, torch.Tensor) else [part for _, part in named_parts(state)]


def step(gradient, state, hyper, grad_scale, weight_scale, largest) -> torch.Tensor:
    """Run adam_step on the device; returns its amax_out, which was `largest` before."""
    amax_out = torch.tensor(largest, device=DEVICE)
    scales = [torch.tensor(scale, device=DEVICE) for scale in (grad_scale, weight_scale)]
    adam_step(to_device(gradient), *state, hyper, *scales, amax_out)
    return amax_out


def check_update(w, gradient, state, hyper, grad_scale) -> None:
    """Check w (n,), the kernel's new FP32 masters, against a float64 update with the reference's new averages."""
    before = read_master(*state[2:])
    m, v = (read_state(part).clone() for part in state[:2])
    v = v * v if isinstance(state[1], BlockScaled) else v
    adam.adam_step(gradient, m, v, before.clone(), before.bfloat16(), hyper, torch.tensor(grad_scale))
    if not isinstance(state[1], BlockScaled):
        v[v >= 2.0**104] = INF
    step_size, correction, eps = torch.tensor([hyper.step_size, hyper.root_correction, hyper.eps]).double()
    update = step_size * (m.double() / (v.double().sqrt() * correction + eps))
    decayed = before * (1 - hyper.lr * hyper.weight_decay) if hyper.decoupled else before
    exact = decayed.double() - update
    finite = exact.float().isfinite()
    assert same(w[~finite], exact.float()[~finite])
    error = ((w.double() - exact).abs() - 2.0**-150 - 2.0**-24 * w.double().abs())[finite]
    assert (error <= 2.0**-21 * update[finite].abs()).all(), (error / update[finite].abs()).max()


def check(gradient, state, hyper=HYPER, grad_scale=0.37, weight_scale=2.0**6) -> list:
    """Check a step of the kernel and of the reference from the same state; returns the new state, on the CPU."""
    expected, got = [copy.deepcopy(part) for part in state], [to_device(part) for part in state]
    arguments = (hyper, grad_scale, weight_scale, 0.5)
    largest = step(gradient, got, *arguments)
    if isinstance(w := got[2], torch.Tensor) and w.dtype == FP32:
        w = w.cpu()
    else:  # masters before they are stored: those of a kernel with FP32 masters, from the same state
        w = to_device(read_master(*state[2:]))
        step(gradient, [*map(to_device, state[:2]), w, w.bfloat16()], *arguments)
        w = w.cpu()
    check_update(w, gradient, state, hyper, grad_scale)
    scales = torch.tensor(grad_scale), torch.tensor(weight_scale)
    adam.adam_step(gradient, *expected, hyper, *scales)
    write_master(*expected[2:], w, scales[1])
    for a, b in zip(got, expected, strict=True):
        assert all(same(x, y) for x, y in zip(parts(a), parts(b), strict=True))
    damaged = not read_state(expected[1]).isfinite().all()  # a second moment
    assert same(largest, torch.tensor(torch.nan) if damaged else torch.maximum(torch.tensor(0.5), reference.amax(w)))
    return expected


@the_o2_set
@pytest.mark.parametrize(
    ("m", "v", "master"), [(FP32, FP32, FP32), (BlockScaled, Block16, INT16), (BF16, BlockScaled, Block16)]
)
def test_a_damaged_state_shows_in_amax(m, v, master, weight):
    """One element among many is damaged. (A remainder is always finite.)"""
    n = 3 * BLOCK
    for damaged, value in itertools.product(range(3), (NAN, INF)):
        state = states(n, m, v, master, weight)
        payload = parts(state[damaged])[0]
        if payload.dtype == torch.int16:
            continue
        if payload.dtype.itemsize == 1:  # E4M3 has NaN only
            payload.view(torch.uint8)[BLOCK + 3] = 0x7F
        else:
            payload[BLOCK + 3] = value
        largest = step(torch.randn(n), [*map(to_device, state)], HYPER, 0.37, 2.0**6, 0.5)
        assert not largest.isfinite(), (damaged, value)


@formats
def test_every_combination_of_formats(m, v, master, weight):
    n = 3 * BLOCK
    decoupled = bool(FORMATS.index((m, v, master, weight)) // 2 % 2)  # each pair of master and weight occurs with both
    hyper = AdamHyper(3e-3, 0.9, 0.95, 1e-8, 0.1, 5, decoupled)
    before = states(n, m, v, master, weight)
    after = check(torch.randn(n), before, hyper)
    assert not all(torch.equal(x, y) for x, y in zip(parts(before[0]), parts(after[0]), strict=True))


@the_o2_set
@pytest.mark.parametrize("blocks", [1, 8, pytest.param(19, marks=pytest.mark.smoke)])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_sizes(weight, blocks, dtype):
    n = blocks * BLOCK
    state = states(n, BlockScaled, Block16, INT16, weight)
    for t in (1, 1000):
        hyper = AdamHyper(1e-4, 0.9, 0.999, 0, 0, t)  # eps = 0: in masked lanes, 0 / 0
        state = check(torch.randn(n).to(dtype), state, hyper, weight_scale=2.0**7)


@pytest.mark.parametrize("kinds", [FORMATS[0], (BlockScaled, Block16, INT16, BF16), FORMATS[-1]])
def test_memory_behind_the_end_is_not_written(kinds):
    n, behind = 9 * BLOCK, BLOCK
    whole = [to_device(part) for part in states(n + behind, *kinds)]
    before = copy.deepcopy(whole)
    first = [to_view(part, n) for part in whole]
    step(torch.randn(n), first, HYPER, 1.0, 2.0**6, 0.0)
    for a, b in zip(whole, before, strict=True):
        for x, y in zip(parts(a), parts(b), strict=True):
            assert x.dim() == 0 or same(x[n * len(x) // (n + behind) :], y[n * len(y) // (n + behind) :])
    assert not same(*(torch.cat([part.float() for part in parts(state[0])]) for state in (whole, before)))


@the_o2_set
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("span", [slice(0, None), slice(5 * BLOCK, 17 * BLOCK)], ids=["rows", "parts of rows"])
def test_packed_gradients(weight, ranks, span):
    packed = PackedBlocks.empty(ranks, 2 * SHARD_UNIT, "cpu")
    reference.quantize_blocks(torch.randn(packed.numel), out=packed)
    packed.payload.view(torch.uint8)[:, ::5] = 0x80  # -0; a sum that starts from 0 gives +0
    packed = PackedBlocks(packed.data.to(DEVICE))
    of_blocks = slice(span.start // BLOCK, span.stop and span.stop // BLOCK)
    gradient = packed.payload[:, span], packed.exponents[:, of_blocks]
    assert gradient[0].stride(0) == gradient[1].stride(0) == packed.data.shape[1]
    state = states(gradient[0].shape[1], BlockScaled, Block16, INT16, weight)
    state[0].payload.view(torch.uint8)[::2] = 0x80
    on_cpu = tuple(part.cpu() for part in gradient)
    after = check(on_cpu, state)
    got = [to_device(part) for part in state]
    scales = [torch.tensor(x, device=DEVICE) for x in (0.37, 2.0**6)]
    adam_step(gradient, *got, HYPER, *scales)  # strided on the device too, no amax
    assert all(
        same(x, y) for a, b in zip(got[:3], after[:3], strict=True) for x, y in zip(parts(a), parts(b), strict=True)
    )


@pytest.mark.parametrize("master", [INT16, FP32])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_weights_side_by_side_are_stepped_as_one_by_one(master, beta2):
    n, count, hyper = 2 * SHARD_UNIT, 3, dataclasses.replace(HYPER, beta2=beta2)
    state = states(n * count, BlockScaled, Block16, master, ScaledTensor)
    scales = 2.0 ** torch.randint(4, 7, (count,), device=DEVICE)
    inverses = (2.0 ** -torch.randint(5, 8, (count, 4), device=DEVICE))[:, 0]  # strided, as in engine/bucket.py
    gradient, grad_scale = torch.randn(n * count, device=DEVICE), torch.tensor(0.37, device=DEVICE)
    gradient[n + 5] = NAN
    together, singly = [to_device(part) for part in state], [to_device(part) for part in state]
    largest, each = torch.full((2, count), 0.5, device=DEVICE)
    weight = ScaledTensor(together[3].payload, inverses)
    adam_step(gradient, *together[:3], weight, hyper, grad_scale, scales, largest)
    for i in range(count):
        at = slice(i * n, (i + 1) * n)
        mine = [part[at] if isinstance(part, torch.Tensor) else part.part(i * n, n) for part in singly[:3]]
        weight = ScaledTensor(singly[3].payload[at], inverses[i])
        adam_step(gradient[at], *mine, weight, hyper, grad_scale, scales[i], each[i])
    pairs = [zip(parts(a), parts(b), strict=True) for a, b in zip(together, singly, strict=True)]
    assert all(same(x, y) for pair in pairs for x, y in pair)
    assert same(largest, each) and largest.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "kinds",
    [FORMATS[0], FORMATS[-1], (BF16, Block16, Block16, BF16)]
    + [(BlockScaled, Block16, INT16, weight) for weight in (BF16, ScaledTensor)],
)
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_edge_values(kinds, beta2):
    n, hyper = 16 * BLOCK, dataclasses.replace(HYPER, beta2=beta2)
    special = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-130), 1e-30, 1e17, -3e38, INF, -INF, NAN])
    all_ones = torch.tensor([2**31 - 1, -1]).to(torch.int32).view(FP32)  # NaNs whose bits would carry if rounded up
    special = torch.cat([special, all_ones])
    zeros = [stored(torch.zeros(n), kind) for kind in kinds[:3]]
    w = torch.zeros(n)
    weight = ScaledTensor(w.to(E4M3.dtype), torch.tensor(2.0**-7)) if kinds[3] is ScaledTensor else w.bfloat16()
    for state in ([*zeros, weight], states(n, *kinds)):
        gradient = torch.randn(n)
        for i, value in enumerate(special):
            gradient[(i + 1) * BLOCK + 3 :: n] = value
        gradient[BLOCK * 14 : BLOCK * 15] = 0.0
        after = check(gradient, state, hyper, grad_scale=1.0, weight_scale=2.0**7)
        after = check(torch.randn(n), after, hyper, weight_scale=2.0**7)
        m, v, _, new_weight = after
        new_weight = new_weight.dequantize() if kinds[3] is ScaledTensor else new_weight
        for part in (read_state(m), read_state(v), new_weight):
            assert part[[i * BLOCK + 3 for i in (10, 11, 12)]].isnan().all()


@pytest.mark.parametrize("kind", [FP32, Block16], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-8])
def test_updates_from_averages_of_every_size(kind, eps):
    n = 64 * BLOCK
    magnitude = 2.0 ** torch.linspace(-149, 127.9, n).double()
    m = (magnitude.sqrt() * torch.randn(n)).float()
    v = stored((magnitude * (0.5 + torch.rand(n) / 2)).float(), kind)
    w = torch.randn(n) * torch.randint(2, (n,))  # if w is zero, no rounding hides the update
    hyper = AdamHyper(1e-3, 0.9, 0.95, eps, 0.1, 2)
    check(torch.zeros(n), [m, v, w, w.bfloat16()], hyper)


@pytest.mark.parametrize(("m", "v"), [(BlockScaled, Block16), (BlockScaled, BlockScaled)])
def test_blocks_whose_largest_is_at_the_limit_of_a_format(m, v):
    """With beta1 = beta2 = 0, m is the gradient and v its square."""
    limits = torch.cat([torch.linspace(440, 456, 16), torch.linspace(65470, 65540, 48).sqrt()])
    gradient = 2 * torch.rand(len(limits), BLOCK) - 1
    gradient[:, 17] = 1.0
    zeros = torch.zeros(gradient.numel())
    hyper = AdamHyper(1e-3, 0.0, 0.0, 1e-8, 0.0, 1)
    state = [stored(zeros, m), stored(zeros, v), zeros, zeros.bfloat16()]
    check((gradient * limits[:, None]).flatten(), state, hyper, grad_scale=1.0)


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
    """Without decay, gradient and averages nothing moves: the step only encodes the masters."""
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
            if master is points:  # a remainder keeps only 19 bits of them
                assert same(after[3].payload, split_e4m3(points, torch.tensor(scale))[0])
