"""Experts that gather x by the cast and add up their results (as on a GPU), against rows that are gathered before, cut
after, and summed in float32 by a function of the test's own: all bits are equal, and all undefined memory is NaN.
"""

import pytest
import torch
from test_weighted_experts import HIDDEN, Layer

from megatron_fp8.gemm import grouped
from megatron_fp8.layers import grouped_experts, local_dispatch

# tokens, top, experts, which of these are chosen from
ROUTED = [(100, 3, 5, range(5)), (70, 1, 3, [1]), (45, 2, 6, [0, 2, 5]), (128, 1, 1, [0]), (130, 1, 4, range(4))]


def sums(rows, token, tokens):
    return rows.new_zeros(tokens, rows.shape[1], dtype=torch.float32).index_add_(0, token, rows.float()).to(rows.dtype)


class Rows(torch.autograd.Function):
    """x (T, h) -> x[token] (R, h)"""

    @staticmethod
    def forward(ctx, x, token):
        ctx.how = token, x.shape[0]
        return x[token]

    @staticmethod
    def backward(ctx, dx):
        return sums(dx, *ctx.how), None


class Sums(torch.autograd.Function):
    """y (R, h) -> (T, h)"""

    @staticmethod
    def forward(ctx, y, token, tokens):
        ctx.token = token
        return sums(y, token, tokens)

    @staticmethod
    def backward(ctx, dy):
        return dy[ctx.token], None, None


def passed(layer, x, probs, dy, counts, token, added: bool) -> list[torch.Tensor]:
    layer.scaling.amax.zero_()
    for bank in layer.banks:
        for weight in bank.weights:
            weight.sink.begin_step(1)
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    rows = (local_dispatch.Gathered if added else Rows).apply(x, token)
    y = grouped_experts.experts_together(layer.like, *layer.banks, rows, counts, probs, True)
    y = y if added else Sums.apply(y, token, x.shape[0])
    y.backward(dy)
    dws = [store.dense().clone() for store in layer.stores]
    return [y.detach(), x.grad, probs.grad, *dws, layer.scaling.amax.clone()]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    rows = grouped.rows
    monkeypatch.setattr(grouped, "rows", lambda a, w, out, **how: rows(a, w, out.fill_(torch.nan), **how))


@pytest.mark.parametrize(("tokens", "top", "experts", "chosen"), ROUTED, ids=str)
@pytest.mark.parametrize("weighs", [True, False])
def test_bit_for_bit(tokens, top, experts, chosen, weighs, monkeypatch):
    layer = Layer(experts)
    picks = torch.tensor(list(chosen))[torch.rand(tokens, len(chosen)).argsort(1)[:, :top]]
    chosen_by = torch.zeros(experts, tokens, dtype=torch.bool)
    chosen_by[picks.T, torch.arange(tokens)] = True
    token, counts = chosen_by.nonzero()[:, 1], chosen_by.sum(1)
    x, dy = (torch.randn(tokens, HIDDEN).bfloat16() for _ in range(2))
    given = layer, x, torch.rand(tokens * top), dy, counts, token
    monkeypatch.setattr(grouped_experts, "_weighs", lambda *_: weighs)
    apart = passed(*given, False)
    monkeypatch.setattr(grouped_experts, "adds_up", lambda x: True)
    added = passed(*given, True)
    for mine, other in zip(added, apart, strict=True):
        assert torch.equal(mine, other) and mine.abs().max() > 0
    with torch.no_grad():
        rows = local_dispatch.Gathered.apply(x, token)
        y = grouped_experts.experts_together(layer.like, *layer.banks, rows, counts, given[2], True)
    assert torch.equal(y, apart[0])


def test_a_gradient_that_was_replaced_is_found(monkeypatch):
    """By a hook on the rows, which would be given no values."""
    layer, token = Layer(2), torch.arange(40) % 20
    monkeypatch.setattr(grouped_experts, "adds_up", lambda x: True)
    rows = local_dispatch.Gathered.apply(torch.randn(20, HIDDEN).bfloat16().requires_grad_(), token)
    rows.register_hook(lambda dx: dx + 0)
    y = grouped_experts.experts_together(layer.like, *layer.banks, rows, torch.tensor([20, 20]), torch.rand(40), True)
    with pytest.raises(RuntimeError, match="were changed between the dispatcher and the experts"):
        y.sum().backward()


def test_what_adds_up():
    """A GPU's experts. The CPU's leave the sums to stock, whose bits they are compared with."""
    assert not grouped_experts.adds_up(torch.empty(1))
    assert grouped_experts.adds_up(type("OnGPU", (), {"is_cuda": True})())
