"""adam_step against torch's Adam and AdamW, float64 arithmetic, and problems with known results."""

import copy
import dataclasses
import itertools

import pytest
import torch

from megatron_fp8.engine.bucket_states import part
from megatron_fp8.numerics import BLOCK, E4M3, BlockScaled, ScaledTensor
from megatron_fp8.numerics.blocks import SHARD_UNIT
from megatron_fp8.numerics.master import Block16, join_bf16, join_e4m3, quantize_block16, split_bf16, split_e4m3
from megatron_fp8.ops.adam import AdamHyper, adam_step
from megatron_fp8.ops.adam_states import read_state
from megatron_fp8.ops.reference import quantize_blocks

pytestmark = pytest.mark.usefixtures("fresh_random_data")
ONE = torch.tensor(1.0)
FP32, BF16, INT16 = torch.float32, torch.bfloat16, torch.int16
HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)


def stored(x: torch.Tensor, kind):
    if kind is BlockScaled:
        return quantize_blocks(x)
    return quantize_block16(x) if kind is Block16 else x.clone().to(kind)


def pair(w: torch.Tensor, master, weight, scale: float):
    """A master and a weight of those kinds."""
    if weight is BF16:
        payload, remainder = split_bf16(w) if master is INT16 else (w.bfloat16(), None)
    else:
        payload, remainder = split_e4m3(w, torch.tensor(scale))
        payload = ScaledTensor(payload, torch.tensor(1 / scale))
    return (remainder if master is INT16 else stored(w, master)), payload


def values(state) -> torch.Tensor:
    return state.double() if isinstance(state, torch.Tensor) else state.dequantize().double()


def master_values(master, weight) -> torch.Tensor:
    if isinstance(master, torch.Tensor) and master.dtype == INT16:
        joined = join_bf16(weight, master) if isinstance(weight, torch.Tensor) else None
        return (join_e4m3(weight.payload, master, weight.scale_inv) if joined is None else joined).double()
    return values(master)


# Against torch's optimizers


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("lr", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fp32_states_agree_with_torch(decoupled, lr, weight_decay):
    n, steps = 5 * BLOCK, 20
    w = torch.randn(n)
    parameter = torch.nn.Parameter(w.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind([parameter], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    m, v, weight = torch.zeros(n), torch.zeros(n), w.bfloat16()
    for step in range(1, steps + 1):
        gradient = torch.randn(n) * 10 ** torch.randn(n)
        parameter.grad = gradient / 8
        theirs.step()
        hyper = AdamHyper(lr, 0.9, 0.95, 1e-8, weight_decay, step, decoupled)
        adam_step(gradient, m, v, w, weight, hyper, torch.tensor(0.125))
    state = theirs.state[parameter]
    torch.testing.assert_close(m, state["exp_avg"], rtol=1e-5, atol=1e-6 * m.abs().max().item())
    torch.testing.assert_close(v, state["exp_avg_sq"], rtol=1e-5, atol=0)
    # Each step rounds w, by at most 2^-24 of it, and rounds its update (about lr) a few times.
    assert ((w - parameter).abs() <= steps * (w.abs() * 2.0**-23 + 8 * lr * 2.0**-21)).all()
    assert torch.equal(weight, w.bfloat16())


# Against float64, for every combination of formats


def double_step(g, m, v, w, hyper: AdamHyper):
    """One step in float64, written like in the papers (Kingma and Ba; Loshchilov and Hutter)."""
    if not hyper.decoupled:
        g = g + hyper.weight_decay * w
    m = hyper.beta1 * m + (1 - hyper.beta1) * g
    v = hyper.beta2 * v + (1 - hyper.beta2) * g**2
    m_hat, v_hat = m / (1 - hyper.beta1**hyper.step), v / (1 - hyper.beta2**hyper.step)
    decay = hyper.lr * hyper.weight_decay * w if hyper.decoupled else 0
    return m, v, w - decay - hyper.lr * m_hat / (v_hat.sqrt() + hyper.eps)


def block_largest(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)


def error_bound(x: torch.Tensor, kind, average: bool = False) -> torch.Tensor:
    """The error bound of storing x (float64) as `kind`: relative to x, plus relative to the block's maximum.

    An exp_avg may lose a whole unit of its block's subnormals, 2^-9 * 2^e < 2^-16 * max, instead of half of one.
    """
    relative, absolute = {
        FP32: (2.0**-24, 0), BF16: (2.0**-8, 0), BlockScaled: (2.0**-4, 2.0**-17), Block16: (2.0**-11, 2.0**-39),
    }[kind]  # fmt: skip
    if average and kind is BlockScaled:
        absolute *= 2
    return torch.maximum(relative * x.abs(), absolute * block_largest(x))


@pytest.mark.parametrize("weight", [BF16, ScaledTensor], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("master", [FP32, INT16, Block16, BF16, BlockScaled], ids=str)
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_format_against_float64(master, weight, decoupled):
    n, float32 = 20 * BLOCK, 2.0**-20  # room for the float32 roundings before
    hyper = dataclasses.replace(HYPER, step=7, decoupled=decoupled, lr=0.02)
    for m_kind, v_kind in itertools.product([FP32, BF16, BlockScaled], [FP32, Block16, BlockScaled]):
        magnitude = 10 ** torch.randn(n // BLOCK, 1).repeat_interleave(BLOCK)
        m, v = stored(magnitude * torch.randn(n).clamp(-3, 3), m_kind), (magnitude * (0.3 + torch.rand(n))) ** 2
        v = stored(v.sqrt() if v_kind is BlockScaled else v, v_kind)
        w = torch.randn(n).clamp(-3, 3)
        p, t = pair(w, master, weight, 32.0)
        gradient, grad_scale = torch.randn(n), torch.tensor(0.3)
        before = values(v) ** 2 if v_kind is BlockScaled else values(v)
        exact = double_step(gradient.double() * grad_scale.double(), values(m), before, master_values(p, t), hyper)
        largest, scale = torch.tensor(0.0), torch.tensor(64.0)
        adam_step(gradient, m, v, p, t, hyper, grad_scale, scale, largest)

        bound = error_bound(exact[0], m_kind, average=True) + float32 * (1 + magnitude)
        assert ((values(m) - exact[0]).abs() <= bound).all()
        root = exact[1].sqrt() if v_kind is BlockScaled else exact[1]
        assert ((values(v) - root).abs() <= error_bound(root, v_kind) * (1 + 1e-6) + float32 * (0.1 + root)).all()
        slack = float32 * (1 + exact[2].abs())
        if weight is not BF16:
            assert t.scale_inv.item() == 1 / 32  # the caller changes it
            t = ScaledTensor(t.payload, scale.reciprocal())
        got = master_values(p, t)
        if master is not INT16:
            bound = error_bound(exact[2], master) * (1 + 1e-6)
        elif weight is BF16:
            bound = 0
        else:
            bound = torch.maximum(exact[2].abs() * 2.0**-19, 2.0**-25 / scale)
        assert ((got - exact[2]).abs() <= bound + slack).all()
        if weight is BF16:
            assert ((t.double() - exact[2]).abs() <= error_bound(exact[2], BF16) + slack).all()
        else:
            error = (values(t) - exact[2]).abs()
            assert (error <= torch.maximum(2.0**-4 * exact[2].abs(), 2.0**-10 / scale) + slack).all()
        torch.testing.assert_close(largest.double(), exact[2].abs().max(), rtol=1e-5, atol=0)


def test_a_remainder_to_bf16_is_an_fp32_master_bit_for_bit():
    n = 10 * BLOCK
    w = torch.randn(n) * 10 ** torch.randn(n)
    fp32 = [torch.zeros(n), torch.zeros(n), w.clone(), w.bfloat16()]
    remainder, weight = pair(w, INT16, BF16, 1.0)
    split = [torch.zeros(n), torch.zeros(n), remainder, weight]
    for step in range(1, 21):
        gradient, hyper = torch.randn(n), dataclasses.replace(HYPER, step=step)
        for state in (fp32, split):
            adam_step(gradient, *state, hyper, ONE)
        assert torch.equal(join_bf16(weight, remainder), fp32[2])
    assert not torch.equal(fp32[2], w)


def test_packed_gradients_are_summed_then_scaled():
    n, ranks = 6 * BLOCK, 3
    shards = [quantize_blocks(torch.randn(n)) for _ in range(ranks)]
    gradient = torch.stack([shard.payload.view(torch.uint8) for shard in shards]).view(E4M3.dtype)
    exponents = torch.stack([shard.exponents for shard in shards])
    total = (shards[0].dequantize() + shards[1].dequantize() + shards[2].dequantize()) * 0.1
    state = [torch.randn(n), torch.rand(n), torch.randn(n), torch.zeros(n).bfloat16()]
    other = copy.deepcopy(state)
    adam_step((gradient, exponents), *state, HYPER, torch.tensor(0.1))
    adam_step(total, *other, HYPER, ONE)
    for got, expected in zip(state, other, strict=True):
        assert torch.equal(got, expected)


def test_the_scale_of_the_weight_stays_or_changes():
    n = 4 * BLOCK
    w = torch.randn(n)
    for scale in (None, 16.0, 2.0**6):
        remainder, weight = pair(w, INT16, ScaledTensor, 32.0)
        before = join_e4m3(weight.payload, remainder, weight.scale_inv)
        hyper = dataclasses.replace(HYPER, weight_decay=0.0)
        new_scale = None if scale is None else torch.tensor(scale)
        adam_step(torch.zeros(n), torch.zeros(n), torch.zeros(n), remainder, weight, hyper, ONE, new_scale)
        assert weight.scale_inv.item() == 1 / 32  # the step does not write it
        after = join_e4m3(weight.payload, remainder, torch.tensor(1 / (scale or 32)))
        assert torch.equal(after[w.abs() > 0.01], before[w.abs() > 0.01])


def test_amax_is_only_raised_and_shows_nan():
    n = BLOCK
    state = [torch.zeros(n), torch.zeros(n), torch.full((n,), -3.0), torch.zeros(n).bfloat16()]
    quiet = dataclasses.replace(HYPER, weight_decay=0.0)
    for before, gradient, expected in ((0.0, 0.0, 3.0), (7.0, 0.0, 7.0), (0.0, float("nan"), float("nan"))):
        largest = torch.tensor(before)
        adam_step(torch.full((n,), gradient), *state, quiet, ONE, amax_out=largest)
        torch.testing.assert_close(largest, torch.tensor(expected), equal_nan=True)


NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
DAMAGES = [("m", value) for value in NOT_FINITE] + [("v", value) for value in NOT_FINITE[:2]]


@pytest.mark.parametrize("weight", [BF16, ScaledTensor], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(
    ("m", "v", "master", "damages"),
    [
        (FP32, FP32, FP32, [*DAMAGES, *(("master", value) for value in NOT_FINITE)]),
        (BlockScaled, Block16, INT16, DAMAGES),  # a remainder is always finite
        (BF16, BlockScaled, Block16, [*DAMAGES, *(("master", value) for value in NOT_FINITE)]),
    ],
)
def test_amax_shows_a_damaged_state(m, v, master, damages, weight):
    """One element among many is damaged, and the gradient is finite. (An infinite v would only stop its weight.)"""
    n, at = 4 * BLOCK, 2 * BLOCK + 7
    gradient = torch.randn(n)
    for damaged, value in [("nothing", 0.0), *damages]:
        values = {"m": torch.randn(n) * 1e-3, "v": torch.rand(n) * 1e-4, "master": torch.randn(n)}
        p, t = pair(values["master"], master, weight, 32.0)
        if damaged != "nothing":
            values[damaged][at] = value
        if damaged == "master":
            p = stored(values["master"], master)
        largest = torch.zeros(())
        adam_step(gradient, stored(values["m"], m), stored(values["v"], v), p, t, HYPER, ONE, amax_out=largest)
        assert bool(largest.isfinite()) is (damaged == "nothing"), (damaged, value, largest)


@pytest.mark.parametrize("weight", [BF16, ScaledTensor], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("master", [FP32, INT16, Block16, BF16, BlockScaled], ids=str)
@pytest.mark.parametrize("kinds", [(FP32, FP32), (BF16, Block16), (BlockScaled, BlockScaled)])
def test_a_nan_gradient_makes_nan_of_everything_and_stays(master, weight, kinds):
    n = 3 * BLOCK
    m, v = (stored(torch.rand(n), kind) for kind in kinds)
    p, t = pair(torch.randn(n), master, weight, 32.0)
    gradient = torch.randn(n)
    gradient[BLOCK + 5] = float("nan")
    for g in (gradient, torch.zeros(n)):
        adam_step(g, m, v, p, t, HYPER, ONE)
        for got in (values(m), values(v), master_values(p, t), values(t)):
            assert got.isnan().nonzero().flatten().tolist() == [BLOCK + 5]


# What stalls, and what does not


def least_squares(master, weight, steps: int, lr: float) -> tuple[float, float]:
    """Minimise ||A(w - target)||^2, with w about 1 and 100 lr from the minimum, and the exact gradient at the master.

    Returns (the loss after `steps` relative to the first, the share of weights that never moved).
    """
    generator = torch.Generator().manual_seed(torch.initial_seed())
    n = 2 * BLOCK
    a = torch.eye(n) + 0.02 * torch.randn(n, n, generator=generator)
    target = 1 + torch.rand(n, generator=generator)
    w = target + 100 * lr * torch.randn(n, generator=generator).sign()
    m, v = torch.zeros(n), torch.zeros(n)
    p, t = pair(w, master, weight, 64.0)
    start = master_values(p, t)

    def loss(x):
        return (a.double() @ (x - target.double())).square().sum().item()

    for step in range(1, steps + 1):
        gradient = a.double().T @ (a.double() @ (master_values(p, t) - target.double()))
        adam_step(gradient.float(), m, v, p, t, AdamHyper(lr, 0.9, 0.99, 1e-12, 0.0, step), ONE)
    return loss(master_values(p, t)) / loss(w.double()), (master_values(p, t) == start).double().mean().item()


@pytest.mark.parametrize("weight", [BF16, ScaledTensor], ids=["bf16", "e4m3"])
def test_narrow_masters_stall_but_a_remainder_does_not(weight):
    results = {kind: least_squares(kind, weight, 300, 1e-5) for kind in (FP32, INT16, Block16, BF16, BlockScaled)}
    print(results)
    for kind in (FP32, INT16):
        loss, still = results[kind]
        assert loss < 0.01 and still < 0.02
    for kind in (Block16, BF16, BlockScaled):
        loss, still = results[kind]
        assert loss > 0.5 and still == 1.0


def decayed(kind, beta2: float, steps: int = 50) -> torch.Tensor:
    """v after `steps` zero gradients, relative to v before."""
    v = torch.rand(4 * BLOCK) + 0.01
    v = stored(v.sqrt() if kind is BlockScaled else v, kind)
    before = values(v)
    state = [torch.zeros(4 * BLOCK), v, torch.zeros(4 * BLOCK), torch.zeros(4 * BLOCK).bfloat16()]
    for step in range(1, steps + 1):
        adam_step(torch.zeros(4 * BLOCK), *state, dataclasses.replace(HYPER, beta2=beta2, step=step), ONE)
    return (values(v) / before) ** (2 if kind is BlockScaled else 1)


def test_which_v_decays():
    assert (decayed(BlockScaled, 0.94) == 1).all() and (decayed(BlockScaled, 0.999) == 1).all()
    assert (decayed(BlockScaled, 0.85) < 0.1).all()
    torch.testing.assert_close(decayed(Block16, 0.95), torch.full((4 * BLOCK,), 0.95**50).double(), rtol=0.02, atol=0)
    torch.testing.assert_close(decayed(Block16, 0.9999, 200).mean().item(), 0.9999**200, rtol=1e-3, atol=0)


def new_v(gradient: torch.Tensor, step: int, beta2: float = 0.999) -> tuple[torch.Tensor, torch.Tensor]:
    """v (n,) after step number `step` from zero, as float32 computes it and as FP16 in blocks stores it."""
    n, hyper = len(gradient), dataclasses.replace(HYPER, beta2=beta2, step=step)
    kinds = [torch.zeros(n), quantize_block16(torch.zeros(n))]
    for v in kinds:
        adam_step(gradient, torch.zeros(n), v, torch.zeros(n), torch.zeros(n).bfloat16(), hyper, ONE)
    return kinds[0], kinds[1].dequantize()


def test_a_slow_v_is_drawn_up_or_down_with_its_own_mean():
    """Also: the draws of two steps have nothing to do with each other, nor have those of two elements."""
    steps, gradient = 1000, torch.randn(8 * BLOCK) * 10 ** torch.randn(8 * BLOCK).clamp(-1, 1)
    gradient = torch.where(gradient.abs() < 0.01, 0.01, gradient)
    exact = new_v(gradient, 1)[0].double()
    ulp = 2.0 ** (exact.log2().floor() - 10)
    below = (exact / ulp).floor()
    ups = torch.stack([new_v(gradient, step)[1] / ulp - below for step in range(1, steps + 1)])
    assert ups.unique().tolist() == [0, 1]
    share = exact / ulp - below
    deviation = (share * (1 - share)).sqrt()
    assert ((ups.mean(0) - share).abs() <= 6 * deviation / steps**0.5 + 8 / steps).all()
    errors = ((ups - share) / deviation)[:, (share > 0.1) & (share < 0.9)]
    assert (errors[1:] * errors[:-1]).mean().abs() < 0.02 and errors.mean().abs() < 0.02
    assert (errors[:, 1:] * errors[:, :-1]).mean().abs() < 0.02


def test_a_draw_is_the_same_in_any_place_and_company():
    gradient, places = torch.rand(8 * BLOCK) + 0.01, torch.randperm(8 * BLOCK)
    at_home, elsewhere = new_v(gradient, 7)[1], new_v(gradient[places], 7)[1]
    assert torch.equal(at_home[places], elsewhere)
    assert not torch.equal(at_home, new_v(gradient, 8)[1])


@pytest.mark.parametrize(("beta2", "drawn"), [(0.0, False), (0.95, False), (0.99, False), (0.995, True), (0.999, True)])
def test_only_a_slow_v_is_drawn(beta2, drawn):
    exact, got = new_v(torch.randn(8 * BLOCK), 3, beta2)
    assert torch.equal(got, quantize_block16(exact).dequantize()) != drawn


def test_what_a_draw_keeps():
    v = quantize_block16(torch.zeros(BLOCK))
    v.payload[:3] = torch.tensor([0.0, torch.inf, torch.nan])
    v.payload.view(torch.int16)[2] = 0x7FFF  # all bits of this NaN are ones
    state = torch.zeros(BLOCK), v, torch.zeros(BLOCK), torch.zeros(BLOCK).bfloat16()
    for step in range(1, 20):
        adam_step(torch.zeros(BLOCK), *state, dataclasses.replace(HYPER, beta2=0.999, step=step), ONE)
        got = v.dequantize()
        assert not got[0] and got[1] == torch.inf and got[2].isnan() and not got[3:].any()


# Weights side by side


@pytest.mark.parametrize("kinds", [(torch.float32, torch.float32), (BlockScaled, Block16)])
@pytest.mark.parametrize("remainder", [True, False])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_weights_side_by_side_are_stepped_as_one_by_one(kinds, remainder, beta2):
    """Each with its own scales and its own largest magnitude, one of them damaged."""
    n, count, hyper = SHARD_UNIT, 3, dataclasses.replace(HYPER, beta2=beta2)
    w = torch.randn(n * count)
    scales = 2.0 ** torch.randint(4, 7, (2, count))
    inverses = torch.nn.functional.pad((1 / scales[0])[:, None], (0, 3))[:, 0]  # strided, as in engine/bucket.py
    split = [split_e4m3(values, scale) for values, scale in zip(w.split(n), scales[0], strict=True)]
    codes, remainders = map(torch.cat, zip(*split, strict=True))
    averages = [stored(torch.rand(n * count), kind) for kind in kinds]
    gradient = torch.randn(n * count)
    gradient[n + 5] = torch.nan

    def step(places, scale_inv, scale, largest):
        states = [copy.deepcopy(part(average, places.start, places.stop)) for average in averages]
        master = (remainders if remainder else w)[places].clone()
        weight = ScaledTensor(codes[places].clone(), scale_inv)
        adam_step(gradient[places], *states, master, weight, hyper, ONE, scale, largest)
        return [t.view(torch.uint8) for t in (*map(read_state, states), master, weight.payload)]

    together, each = torch.full((count,), 0.25), torch.full((count,), 0.25)
    whole = step(slice(0, n * count), inverses, scales[1], together)
    pieces = [step(slice(i * n, (i + 1) * n), inverses[i], scales[1][i], each[i]) for i in range(count)]
    for one, parts in zip(whole, zip(*pieces, strict=True), strict=True):
        assert torch.equal(one, torch.cat(parts))
    assert torch.equal(together.view(torch.uint8), each.view(torch.uint8))
    assert together.isnan().tolist() == [False, True, False]


# Refusals


def test_wrong_arguments_are_refused():
    n = 2 * BLOCK
    good = dict(
        gradient=torch.ones(n), exp_avg=torch.ones(n), exp_avg_sq=torch.ones(n), master=torch.ones(n),
        weight=torch.ones(n).bfloat16(), hyper=HYPER, grad_scale=ONE,
    )  # fmt: skip
    blocks = quantize_blocks(torch.ones(n))
    for wrong, message in (
        ({"weight": torch.ones(100).bfloat16()}, "128"),
        ({"weight": torch.ones(0).bfloat16()}, "128"),
        ({"weight": torch.ones(n)}, r"weight.*bfloat16.*float32"),
        ({"weight": ScaledTensor(torch.ones(n).to(torch.float8_e5m2), ONE)}, "e4m3"),
        ({"weight": ScaledTensor(torch.ones(n).to(E4M3.dtype), torch.ones(2))}, "multiple of 2048.*not 2 in 256"),
        ({"exp_avg": quantize_block16(torch.ones(n))}, r"exp_avg .*BlockScaled.*Block16"),
        ({"exp_avg_sq": torch.ones(n).bfloat16()}, r"exp_avg_sq.*bfloat16"),
        ({"master": torch.ones(n).half()}, r"master.*float16"),
        ({"master": torch.ones(BLOCK)}, r"master \(256,\).*128"),
        ({"exp_avg": torch.ones(2 * n)[::2]}, r"exp_avg.*contiguous"),
        ({"exp_avg": BlockScaled(blocks.payload, blocks.exponents[:1])}, r"exponents"),
        ({"gradient": torch.ones(BLOCK)}, r"gradient \(256,\)"),
        ({"gradient": torch.ones(n).half()}, r"bfloat16 gradient"),
        ({"gradient": (blocks.payload[None], blocks.exponents)}, r"exponents \(R, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            adam_step(**(good | wrong))
