"""A bucket with every format of weight and state: what it holds, steps, saves and loads, against adam_step's oracle."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from engine_parts import OneWeight, parts_of
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fp8.checkpoint.state import STATES
from megatron_fp8.comm.reduce import DenseShard
from megatron_fp8.engine import bucket as weights
from megatron_fp8.engine import bucket_states
from megatron_fp8.engine.bucket import Bucket
from megatron_fp8.engine.grad_store import grad_store
from megatron_fp8.engine.owned_weight import OwnedWeight
from megatron_fp8.flags.level import resolve
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.numerics.scaling import adam_growth, power_of_two_scale
from megatron_fp8.ops.adam import AdamHyper
from megatron_fp8.tools.perf.memory import engine_buckets, engine_bytes

SHAPES = ((48, 32), (16, 16), (64, 80))
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2 + 1 / 128, "fp8": 1 + 1 / 128, "remainder": 2}
FORMATS = [
    ("fp32", "fp32", "fp32", "bf16"),  # O1
    ("fp8", "fp16", "remainder", "bf16"),  # O2
    ("fp8", "fp16", "remainder", "fp8"),  # O3
    ("fp8", "fp16", "fp16", "fp8"),  # the paper's
    ("bf16", "fp8", "bf16", "bf16"),
    ("fp8", "fp8", "fp8", "fp8"),
    ("fp32", "fp32", "fp32", "fp8"),
]


def bucket_of(group, exp_avg, exp_avg_sq, master, weight, partition="even", shapes=SHAPES, size=0.01):
    cells = SimpleNamespace(
        exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, master=master, weight=weight, grad_accum="fp32", gemm="fp8",
        partition=partition, forward_format=E4M3, margin=0, keep_transpose_cache=False, emulate=None, seed=1,
        draws_masters=True,
    )  # fmt: skip
    params = [torch.nn.Parameter(torch.randn(shape).mul(size * 10**i).bfloat16()) for i, shape in enumerate(shapes)]
    weights = [OwnedWeight(param, cells) for param in params]
    before = [param.detach().clone() for param in params]
    return Bucket(weights, parts_of(group, cells, weights, sharded=True)), before


def test_neighbours_of_one_size_are_stepped_together(group, monkeypatch):
    """Not more than fit, and not if a size is no multiple of 2,048."""
    shapes = ((64, 64),) * 5 + ((64, 32),) * 2 + ((48, 32),) * 2 + ((64, 64),)
    monkeypatch.setattr(weights, "_TOGETHER", 3 * 64 * 64)
    bucket, _ = bucket_of(group, "fp8", "fp16", "remainder", "fp8", shapes=shapes)
    runs = bucket._runs()
    assert [range(first, after) for first, after, _, _ in runs] == [
        range(0, 3), range(3, 5), range(5, 7), range(7, 8), range(8, 9), range(9, 10)
    ]  # fmt: skip
    spans = [span[1:] for span in bucket.spans]
    assert [run[2:] for run in runs] == [(spans[i][0], spans[j - 1][1]) for i, j, _, _ in runs]


def values(bucket):
    """What the forward pass sees of each weight."""
    return [weight.dense().float() for weight in bucket.weights]


def step(bucket, number, size=1.0, lr=1e-2):
    """A step on random gradients."""
    gradient = torch.randn(bucket.numel) * size
    for start, stop in bucket.gaps:
        gradient[start:stop] = 0
    bucket._reduced = DenseShard(gradient)
    if bucket.scaling is not None:
        bucket.scaling.begin_step(adam_growth(lr, 0.9, 0.95, number))
    bucket.step(AdamHyper(lr, 0.9, 0.95, 1e-8, 0.1, number), torch.tensor(1.0))
    if bucket.scaling is not None:
        bucket.scaling.end_step()


class Made(TorchDispatchMode):
    """Counts the tensors that operations return, views included."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        self.count += len(found) if isinstance(found, (tuple, list)) else 1
        return found


def test_a_bucket_of_many_weights_is_built_in_linear_time(group):
    """Qwen3-30B-A3B has 12,480 weights; when each weight's load viewed all scales, its build took minutes."""
    counts = []
    for n in (16, 64):
        with Made() as made:
            bucket, _ = bucket_of(group, "fp8", "fp16", "remainder", "fp8", shapes=((16, 16),) * n, size=1e-20)
        with Made() as loading:
            bucket.load(n // 2, torch.randn(16, 16))
        counts.append((made.count / n, loading.count))
    (few, one), (many, other) = counts
    assert many < 1.05 * few
    assert other == one


def test_weights_that_are_taken_over_agree_on_their_amaxes_together(group, monkeypatch):
    """Not one after the other: a rank has thousands of experts' weights. Each has the scale that it would get alone."""
    reduced, reduce = [], torch.distributed.all_reduce
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, **how: reduced.append(len(t)) or reduce(t, **how))
    config = OneWeight(torch.randn(16, 128), group, storage="fp8").weight.config
    values = [torch.randn(16, 128).bfloat16() * 10.0**i for i in range(5)]
    weights = [OwnedWeight(torch.nn.Parameter(each.clone()), config) for each in values]
    reduced.clear()
    bucket = Bucket(weights, parts_of(group, config, weights))
    assert reduced == [5]
    for i, each in enumerate(values):
        alone = OneWeight(each, group, storage="fp8").bucket
        assert torch.equal(bucket.scale_and_amax(i), alone.scale_and_amax(0))
        before = bucket.scale_and_amax(i)
        bucket.load(i, each)
        assert torch.equal(bucket.scale_and_amax(i), before)


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_a_bucket_takes_over_bf16_weights(group, formats):
    bucket, before = bucket_of(group, *formats)
    masters = bucket.masters()
    for (weight, a, b), seen, was in zip(bucket.spans, values(bucket), before, strict=True):
        assert weight.param.data_ptr() == bucket.weight[a:].data_ptr() and weight.param.shape == was.shape
        error = (seen - was.float()).abs()
        if formats[3] == "bf16":
            assert not error.any()
        else:  # E4M3 with the tightest power of two
            amax, scale = was.abs().max().float(), 1 / weight.stored.scale_inv
            assert 224 < amax * scale <= 448 and math.log2(scale).is_integer()
            assert (error <= was.float().abs() / 15 + 2.0**-10 / scale).all()
        lost = {"fp32": 0, "remainder": 0, "fp16": 2.0**-11, "bf16": 0, "fp8": 2.0**-4}[formats[2]]
        if formats[3] == "fp8":  # BF16's own rounding is undone at random
            lost += 2.0**-8
        true = was.float().flatten()
        assert ((masters[a:b] - true).abs() <= lost * (true.abs() + true.abs().max() * 2.0**-13)).all()
    for kind, name in (("master", 2), ("exp_avg", 0), ("exp_avg_sq", 1)):
        assert sum(t.nbytes for t in bucket.buffers()[kind]) == BYTES[formats[name]] * bucket.numel
    assert sum(t.nbytes for t in bucket.buffers()["weight"]) == (1 if formats[3] == "fp8" else 2) * bucket.numel


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("formats", [formats for formats in FORMATS if formats[3] == "bf16"], ids="-".join)
def test_masters_of_loaded_bf16_weights_are_drawn_around_them(group, formats, draws):
    """No bit of a weight changes. First weights are their masters, as stock's."""
    bucket, _ = bucket_of(group, *formats)
    assert torch.equal(bucket.masters(), bucket.weight.float())
    for weight in bucket.weights:
        weight.config.draws_masters = draws
        weight.param.data.copy_(torch.randn(weight.param.shape) * 0.02)
    before = bucket.weight.clone()
    bucket.reload_masters()
    masters, kept = bucket.masters(), formats[2] in ("fp32", "remainder", "fp16")
    assert torch.equal(bucket.weight.view(torch.int16), before.view(torch.int16))
    for _, start, stop in bucket.spans:
        stays = masters[start:stop] == before[start:stop].float()
        assert stays.float().mean() < 0.2 if draws and kept else stays.all() or not kept
    again = masters.clone()
    bucket.reload_masters()
    assert torch.equal(bucket.masters(), again)


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_masters_made_by_pieces_are_those_made_at_once(group, formats, monkeypatch):
    """Pieces of 384 elements: weights of 1536, 256 and 5120 end at their border, before it and behind it."""
    found = []
    for at_once in (1 << 24, 384):
        monkeypatch.setattr(weights, "_AT_ONCE", at_once)
        torch.manual_seed(3)
        bucket, _ = bucket_of(group, *formats)
        found.append((bucket.masters(), bucket.weight.view(torch.uint8).clone()))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_saved_and_loaded_nothing_has_changed(group, formats):
    """After some steps every state through FP32, and the weights through BF16, into another bucket; then a step."""
    bucket, _ = bucket_of(group, *formats)
    for number in (1, 2, 3):
        step(bucket, number)
    other, _ = bucket_of(group, *formats)
    exported = [weight.dense().clone() for weight in bucket.weights]
    for i, dense in enumerate(exported):
        other.load(i, dense)
        if bucket.scaling is not None:
            other.rescale(i, *bucket.scale_and_amax(i))
    for name in STATES.values():
        whole = bucket.read(name)
        for i, lo, hi in bucket.pieces():
            other.write(name, i, lo, hi, whole[lo:hi])
    for more in (False, True):
        if more:
            draw = torch.get_rng_state()
            step(bucket, 4)
            torch.set_rng_state(draw)
            step(other, 4)
        for a, b in zip(values(bucket), values(other), strict=True):
            assert torch.equal(a, b)
        for name in STATES.values():
            assert torch.equal(bucket.read(name), other.read(name)), name


@pytest.mark.parametrize("master", ["remainder", "fp16"])
@pytest.mark.parametrize("lr", [1e-4, 0.3, 30.0])
def test_a_growing_weight_does_not_saturate(group, master, lr):
    """Adam's largest steps, all in one direction: |w| grows by lr a step, to many times what it was."""
    bucket, before = bucket_of(group, "fp32", "fp32", master, "fp8")
    direction = torch.randn(bucket.numel).sign()
    for number in range(1, 20):
        bucket._reduced = DenseShard(direction)
        bucket.scaling.begin_step(adam_growth(lr, 0.9, 0.95, number))
        bucket.step(AdamHyper(lr, 0.9, 0.95, 1e-8, 0.0, number), torch.tensor(1.0))
        bucket.scaling.end_step()
        for i, (_, a, b) in enumerate(bucket.spans):
            true = before[i].float().flatten() - number * lr * direction[a:b]
            got = bucket.weights[i].dense().float().flatten()
            assert ((got - true).abs() <= true.abs() / 15 + true.abs().max() * 2.0**-9).all()
            assert torch.allclose(bucket.scaling.amax[i], true.abs().max(), rtol=1e-2)  # FP16 drifts


def test_the_bound_of_a_step_is_a_bound_and_is_reached():
    """The gradients that Cauchy and Schwarz's equality asks for: g_i proportional to (beta1 / beta2)^(t - i)."""
    for beta1, beta2 in itertools.product((0.0, 0.5, 0.9), (0.91, 0.95, 0.999)):
        for t in (1, 2, 7, 50):
            weights = [(beta1 / beta2) ** (t - i) for i in range(1, t + 1)]
            m = v = 0.0
            for g in weights:
                m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            ratio = (m / (1 - beta1**t)) / math.sqrt(v / (1 - beta2**t))
            rounding = 1.1 * (1 + 2.0**-4 / (1 - beta1))
            assert adam_growth(0.5, beta1, beta2, t) == pytest.approx(0.5 * rounding * ratio, rel=1e-9)


def test_a_weight_without_gradients_comes_to_rest(group):
    """Eight elements of a block whose gradients stop, while others' go on: a moment that stayed would drive them."""
    bucket, _ = bucket_of(group, "fp8", "fp16", "fp32", "bf16")
    dead = slice(256, 264)
    for number in range(1, 400):
        gradient = torch.randn(bucket.numel) * 1e-2
        if number > 50:
            gradient[dead] = 0
        bucket._reduced = DenseShard(gradient)
        before = bucket.masters()[dead]
        bucket.step(AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.0, number), torch.tensor(1.0))
    assert torch.equal(bucket.masters()[dead], before)
    assert not bucket_states.read_average(bucket_states.part(bucket.exp_avg, 256, 384), is_square=False)[:8].any()


@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4])
def test_the_first_update_of_bf16_weights_moves_them_by_the_update(group, lr):
    """One BF16 number in sixteen lies between two E4M3 ones; if it stayed there, this would be 4.5 at 1e-5."""
    bucket, _ = bucket_of(group, "fp32", "fp32", "remainder", "fp8", shapes=((2048, 1024),), size=0.02)
    before, direction = values(bucket)[0].flatten(), torch.randn(bucket.numel).sign()
    bucket._reduced = DenseShard(direction)
    bucket.scaling.begin_step(0.0)
    bucket.step(AdamHyper(lr, 0.9, 0.95, 1e-12, 0.0, 1), torch.tensor(1.0))
    moved = (before - values(bucket)[0].flatten()) * direction
    # a weight moves by an E4M3 ulp, some 1e-3, or not at all
    deviation = moved.std() / moved.numel() ** 0.5
    assert abs(moved.mean() - lr) < 5 * deviation and (deviation < lr / 2 or lr < 1e-5)


def test_powers_of_two():
    amax = torch.tensor([448.0, 448.1, 447.9, 1.0, 0.0, torch.inf, torch.nan, 1e-30, 1e30])
    scale = power_of_two_scale(amax, E4M3, previous=torch.full_like(amax, 4.0))
    assert scale[:4].tolist() == [1.0, 0.5, 1.0, 256.0] and scale[4:7].tolist() == [4.0] * 3
    known = torch.tensor([0, 1, 2, 3, 7, 8])
    assert (amax[known] * scale[known] <= 448).all() and (amax[known] * scale[known] > 223).all()
    assert all(math.log2(s).is_integer() for s in scale.tolist())


def test_parts_are_views():
    for kind in BYTES:
        state = bucket_states.zeros(kind, 1024, "cpu")
        cuts = bucket_states.tensors(bucket_states.part(state, 256, 640))
        for whole, cut in zip(bucket_states.tensors(state).values(), cuts.values(), strict=True):
            assert cut.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert cut.numel() * 1024 == whole.numel() * 384


@pytest.mark.parametrize("partition", ["even", "greedy"])
@pytest.mark.parametrize(("level", "most"), [("O1", 17), ("O2", 10), ("O3", 8)])
def test_the_bytes_are_those_of_the_estimate(group, level, most, partition):
    """`megatron-fp8 memory` computes without a model what is allocated here, every level's limit with it."""
    cells = {**resolve(level, {}), "partition": partition, "grad_accum": "fp8"}
    bucket, _ = bucket_of(group, *(cells[name] for name in ("exp_avg", "exp_avg_sq", "master", "weight")), partition)
    bucket.grads = grad_store(1, bucket.numel, "fp8", "cpu")
    for weight in bucket.weights:
        weight.quantized()
    held = {kind: sum(t.nbytes for t in tensors) for kind, tensors in bucket.buffers().items()}
    sizes = [rows * columns for rows, columns in SHAPES]
    expected = engine_bytes(engine_buckets(sizes, 1, partition), cells)
    assert held == {kind: size for kind, size in expected.items() if kind != "transpose scratch"}
    assert sum(held.values()) <= most * bucket.numel  # stock: 18 bytes a parameter
