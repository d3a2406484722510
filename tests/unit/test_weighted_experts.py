"""Experts whose SwiGLU is part of the casts, against experts whose SwiGLU is a function of its own: all bits are equal.

The function of its own is the reference's, so that the two round alike.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import mlp
from torch.nn import functional

from megatron_fp8 import ops
from megatron_fp8.engine.bank import Bank
from megatron_fp8.engine.events import Events
from megatron_fp8.engine.grad_store import DenseStore, GradSink
from megatron_fp8.engine.owned_weight import OwnedWeight, Scratch
from megatron_fp8.layers import grouped_experts
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import DelayedScaling

CPU = torch.device("cpu")
HIDDEN, FFN = 64, 48
COUNTS = [[0, 1, 127, 128, 129, 0, 40], [0, 33, 0], [300]]


class OfItsOwn(torch.autograd.Function):
    """Stock's weighted_swiglu, rounded once."""

    @staticmethod
    def forward(ctx, h, bias, probs, fp8_store):
        ctx.save_for_backward(h, probs)
        return (ops.activate(h.float(), "swiglu") * probs).to(h.dtype)

    @staticmethod
    def backward(ctx, dy):
        h, probs = (x.float() for x in ctx.saved_tensors)
        dh = ops.activate_backward(dy.float() * probs, h, "swiglu").to(dy.dtype)
        return dh, None, (ops.activate(h, "swiglu") * dy.float()).sum(1, keepdim=True), None


class Layer:
    """Experts of random weights and scales."""

    def __init__(self, experts: int):
        config = SimpleNamespace(
            forward_format=E4M3, grad_format=E5M2, margin=0, gemm="fp8", weight="fp8", emulate=None, wgrad=True,
            keep_transpose_cache=False, activations=False, level="O3", seed=1,
        )  # fmt: skip
        self.scaling = DelayedScaling([E4M3, E5M2] * (2 * experts), 1, "most_recent", 0, CPU)
        self.scaling.amax.uniform_(1, 4)
        self.scaling.update()
        self.stores, self.banks, self.events, self.scratch = [], [], Events(), Scratch()
        for which, (n, k) in enumerate([(2 * FFN, HIDDEN), (HIDDEN, FFN)]):
            codes = ops.quantize(torch.randn(experts, n, k) / k**0.5, E4M3, torch.tensor(64.0))
            store, weights = DenseStore(1, codes.numel(), "bf16", CPU), []
            for e in range(experts):
                weight = OwnedWeight(torch.nn.Parameter(codes[e], requires_grad=False), config)
                weight.param.requires_grad = True
                weight.changed(torch.tensor(1 / 64))
                weight.sink = GradSink(store, e * n * k, torch.Size((n, k)), (1,))
                weight.events, weight.scratch = self.events, self.scratch
                weight.casts.scaling, weight.casts.slots = self.scaling, tuple(4 * e + 2 * which + i for i in range(2))
                weights.append(weight)
            self.stores.append(store)
            self.banks.append(Bank(weights))
        self.like = SimpleNamespace(
            activation_func=functional.silu,
            config=SimpleNamespace(
                use_te_activation_func=False, bias_activation_fusion=True, activation_func_fp8_input_store=False,
                gated_linear_unit=True, activation_func=functional.silu, activation_func_clamp_value=None,
                glu_linear_offset=0.0,
            ),
        )  # fmt: skip

    def passed(self, x, probs, dy, counts) -> list[torch.Tensor]:
        """y, the gradients of x, probs and the weights, and the amaxes."""
        self.scaling.amax.zero_()
        for bank in self.banks:
            for weight in bank.weights:
                weight.sink.begin_step(1)
        x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
        y = grouped_experts.experts_together(self.like, *self.banks, x, torch.tensor(counts), probs, True)
        y.backward(dy)
        dws = [store.dense().clone() for store in self.stores]
        return [y.detach(), x.grad, probs.grad, *dws, self.scaling.amax.clone()]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_bit_for_bit(counts, monkeypatch):
    layer, rows = Layer(len(counts)), sum(counts)
    x, dy = (torch.randn(rows, HIDDEN).bfloat16() for _ in range(2))
    probs, calls = torch.rand(rows), []
    monkeypatch.setattr(mlp, "weighted_bias_swiglu_impl", lambda *given: calls.append(1) or OfItsOwn.apply(*given))
    own = layer.passed(x, probs, dy, counts)
    assert calls == [1]  # the CPU runs stock's
    monkeypatch.setattr(grouped_experts, "_weighs", lambda *_: True)
    fused = layer.passed(x, probs, dy, counts)
    assert calls == [1]
    for mine, other in zip(fused, own, strict=True):
        assert torch.equal(mine, other) and mine.abs().max() > 0
    with torch.no_grad():
        y = grouped_experts.experts_together(layer.like, *layer.banks, x, torch.tensor(counts), probs, True)
    assert torch.equal(y, own[0])


def test_what_weighs():
    """SwiGLU on a GPU, as stock's function computes it; nothing else."""
    config, rows = vars(Layer(1).like.config), SimpleNamespace(is_cuda=True)

    def weighs(**other):
        return grouped_experts._weighs(SimpleNamespace(config=SimpleNamespace(**config | other)), rows)

    assert weighs()
    for other in (
        {"activation_func_fp8_input_store": True}, {"activation_func_clamp_value": 7.0}, {"glu_linear_offset": 1.0},
        {"gated_linear_unit": False}, {"use_te_activation_func": True}, {"activation_func": functional.gelu},
    ):  # fmt: skip
        assert not weighs(**other)
    rows.is_cuda = False
    assert not weighs()
