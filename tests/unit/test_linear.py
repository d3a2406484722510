"""The FP8 linear, what can be tested of it without a model."""

from types import SimpleNamespace

import pytest
import torch
from engine_parts import OneWeight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron_fp8 import ops
from megatron_fp8.comm import tensor
from megatron_fp8.engine.owned_weight import GRAD, in_forward_order
from megatron_fp8.layers.linear import product
from megatron_fp8.layers.parcel import Parcel, plan
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.numerics.scaling import DelayedScaling, compute_scale

N, K, M = 32, 48, 16


def test_weights_in_the_order_of_the_forward_pass():
    def weight(path, layer):
        return SimpleNamespace(path=path, layer_number=layer, bank=None)

    attention, mlp = "decoder.layers.self_attention", "decoder.layers.mlp"
    registered = [f"{attention}.linear_proj", f"{attention}.linear_qkv", f"{mlp}.linear_fc1", f"{mlp}.linear_fc2"]
    forward = [registered[1], registered[0], *registered[2:]]
    weights = [weight(path, layer) for layer in (1, 2) for path in registered]
    assert [(w.path, w.layer_number) for w in in_forward_order(weights)] == [(p, n) for n in (1, 2) for p in forward]


# --- scales belong to micro-batches


class SharedScale(torch.autograd.Function):
    """The known defect: x waits for the backward pass in FP8, its scale in the module, where the next x leaves its."""

    @staticmethod
    def forward(ctx, x, module):
        scale = compute_scale(ops.amax(x), E4M3)
        ctx.x, ctx.module, module.scale_inv = ops.quantize(x, E4M3, scale), module, scale.reciprocal()
        return x @ module.w.T

    @staticmethod
    def backward(ctx, dy):
        x = ScaledTensor(ctx.x, ctx.module.scale_inv).dequantize(torch.bfloat16)
        ctx.module.dw += dy.T @ x
        return dy @ ctx.module.w, None


def micro_batches():
    """(x, dy) of two that differ a hundredfold, in both."""
    torch.manual_seed(0)
    return [((torch.randn(M, K) * size).bfloat16(), (torch.randn(M, N) / size).bfloat16()) for size in (1, 100)]


def gradients(forward, order: str) -> list[torch.Tensor]:
    """The gradients of both x, in the order F0 B0 F1 B1 or, as a pipeline has it, F0 F1 B0 B1."""
    xs, dys = zip(*micro_batches(), strict=True)
    xs, ys = [x.requires_grad_() for x in xs], {}
    for step, i in zip(order[::2], map(int, order[1::2]), strict=True):
        if step == "F":
            ys[i] = forward(xs[i])
        else:
            ys.pop(i).backward(dys[i])
    return [x.grad for x in xs]


ALONE, PIPELINE = "F0B0F1B1", "F0F1B0B1"


def test_a_scale_in_the_module_is_the_defect():
    def dw(order):
        module = SimpleNamespace(w=torch.randn(N, K).bfloat16(), dw=torch.zeros(N, K))
        gradients(lambda x: SharedScale.apply(x, module), order)
        return module.dw

    exact = sum(dy.float().T @ x.float() for x, dy in micro_batches())
    assert (dw(ALONE) - exact).norm() / exact.norm() < 0.05
    assert (dw(PIPELINE) - exact).norm() / exact.norm() > 10


@pytest.mark.parametrize("scaling", ["tensorwise", "delayed, first step", "delayed"])
@pytest.mark.parametrize("wgrad", [True, False], ids=["", "wgrad in BF16"])
@pytest.mark.parametrize("gather", [None, "bf16", "fp8"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_every_scale_belongs_to_its_micro_batch(group, kind, gather, wgrad, scaling):
    """Also where the forward pass is computed again in the backward pass; amax counts once."""

    def run(order, again=False):
        torch.manual_seed(1)
        one = OneWeight(torch.randn(N, K).bfloat16(), group, wgrad=wgrad)
        one.weight.config.tp_gather = gather
        if scaling != "tensorwise":
            one.weight.casts.scaling = state = DelayedScaling([E4M3, E5M2], 4, "max", 0, "cpu")
            state.warm = scaling == "delayed"
        row = kind == "row"

        def forward(x):
            call = plan(one.weight, group, gather is not None, False, training=True, sum_y=row)
            return product(x, torch.zeros(0, requires_grad=True), Parcel(call))

        dx = gradients((lambda x: checkpoint(forward, x, use_reentrant=False)) if again else forward, order)
        amax = [] if scaling == "tensorwise" else [state.amax.clone()]
        return [*dx, *amax, one.bucket.grads.dense()[: N * K].clone()]

    alone = run(ALONE)
    for other in (run(PIPELINE), run(PIPELINE, again=True)):
        assert len(other) == len(alone) and all(map(torch.equal, other, alone))
    if scaling != "delayed":  # whose scale of one is no scale for these
        exact = sum(dy.float().T @ x.float() for x, dy in micro_batches())
        assert (alone[-1].view(N, K) - exact).norm() / exact.norm() < 0.1


# --- memory


@pytest.mark.parametrize("kind", ["column", "row"])
def test_rows_are_freed_when_they_have_served(group, kind, monkeypatch):
    """Those of q(dy), the rank's own and all, when dgrad is done; of what was gathered nothing waits for wgrad."""
    one = OneWeight(torch.randn(N, K).bfloat16(), group)
    one.weight.config.tp_gather = "fp8"
    rows, alive = {}, []

    def watch(name, payload):
        rows[name] = StorageWeakRef(payload.untyped_storage())

    def look(at):
        alive.append((at, [name for name, ref in rows.items() if not ref.expired()]))

    cast, gather, transpose, take = one.weight.cast, tensor.gather, ops.transpose, one.weight.take_gradient

    def watched_cast(x, role, *args, **how):
        q, scale = cast(x, role, *args, **how)
        if role == GRAD:
            watch("own q(dy)", q.payload)
        return q, scale

    def watched_gather(x, group):
        out, handles = yield from gather(x, group)
        watch("gathered", out)
        return out, handles

    def watched_transpose(payload, **how):
        look("W^T" if payload.shape == (N, K) else "transposed")
        return transpose(payload, **how)

    def watched_take(given):
        look("wgrad")
        take(given)

    x, dy = (torch.randn(M, n).bfloat16() for n in (K, N))
    call = plan(one.weight, group, True, False, training=True, sum_y=kind == "row")
    monkeypatch.setattr(tensor, "gather", watched_gather)
    y = product(x.requires_grad_(), torch.zeros(0, requires_grad=True), Parcel(call))
    look("forward")
    monkeypatch.setattr(one.weight, "cast", watched_cast)
    monkeypatch.setattr(one.weight, "take_gradient", watched_take)
    monkeypatch.setattr(ops, "transpose", watched_transpose)
    y.backward(dy)
    both = ["gathered", "own q(dy)"] if kind == "column" else ["own q(dy)", "gathered"]
    assert alive == [("forward", []), ("W^T", both), ("transposed", ["gathered"]), ("wgrad", [])]
