"""A frozen weight: the products of a trained one but for its gradient, which is not made; one E4M3 payload."""

import pytest
import torch
from engine_parts import OneWeight, parts_of

from megatron_fp8 import gemm
from megatron_fp8.checkpoint import compact
from megatron_fp8.engine.events import Events, Observer
from megatron_fp8.engine.frozen_set import freeze
from megatron_fp8.layers.linear import product
from megatron_fp8.layers.parcel import Parcel, carried, plan
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import DelayedScaling

N, K, M = 32, 48, 80


class Frozen(OneWeight):
    """OneWeight, frozen by a script and taken over, as the optimizer does."""

    def __init__(self, values, group, storage="bf16", **kwargs):
        super().__init__(values, group, **kwargs)
        self.weight.param.data = values.clone()  # out of its bucket
        self.weight._scale_inv = self.weight._stored = self.weight.sink = None
        self.weight.storage = storage
        self.weight.param.requires_grad = False
        self.events = Events()
        freeze([self.weight], parts_of(group, self.weight.config, events=self.events))


def values(seed: int = 0) -> torch.Tensor:
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def inputs():
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(M, size, generator=generator).bfloat16() for size in (K, N))
    return x.requires_grad_(), dy


def forward(one, x, group, training=True, **kwargs):
    parcel = Parcel(plan(one.weight, group, False, False, training=training))
    return product(x, torch.zeros(0, requires_grad=True), parcel, **kwargs), parcel


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", [{}, {"wgrad": False}, {"activations": True}, {"emulate": "e4m3"}], ids=str)
def test_forward_and_dgrad_are_those_of_a_trained_one(how, bias, delayed, group, monkeypatch):
    """To the bit, and no product for a gradient of the weight; the amaxes count all the same."""

    def run(kind):
        one = kind(values(), group, **how)
        scaling = DelayedScaling([E4M3, E5M2], 4, "max", 0, "cpu")
        if delayed and "emulate" not in how:
            one.weight.casts.scaling, scaling.warm = scaling, True
        x, dy = inputs()
        b = torch.ones(N, dtype=torch.bfloat16, requires_grad=True) if bias else None
        y, _ = forward(one, x, group, bias=b)
        made.clear()
        y.backward(dy)
        return [y, x.grad, scaling.amax, *([b.grad] if bias else [])], len(made), y.grad_fn

    made, stock = [], gemm.Product.__init__

    def counted(self, *args):
        made.append(1)
        stock(self, *args)

    monkeypatch.setattr(gemm.Product, "__init__", counted)
    (trained, products, _), (frozen, none, _) = run(OneWeight), run(Frozen)
    assert (products, none) == (1, 0)
    assert all(torch.equal(a, b) for a, b in zip(trained, frozen, strict=True))


def test_nothing_of_x_waits_for_the_backward_pass(group):
    """If x needs no gradient there is no backward pass. Scales are kept, but autograd does not watch them."""
    one, (x, _) = Frozen(values(), group), inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        y, _ = forward(one, x, group)
        assert saved == [] and y.requires_grad
        y, _ = forward(one, x.detach(), group)
        assert not y.requires_grad
        saved.clear()
        forward(OneWeight(values(), group), x, group)
        assert saved == [M * K]


def test_a_gradient_that_comes_in_fp8_comes_in_rows_alone(group):
    one, (x, dy) = Frozen(values(), group), inputs()
    y, parcel = forward(one, x, group)
    assert carried(y) is parcel
    ticket = parcel.post(dy, y.shape, dy)
    assert parcel.dy.q.columns is None
    y.backward(ticket)
    expected, (again, _) = x.grad.clone(), inputs()
    forward(one, again, group)[0].backward(dy)
    assert torch.equal(expected, again.grad)


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_an_adapter_that_is_nothing_changes_nothing(storage, group):
    """b = 0: the base's output to the bit, and the gradients of the adapter are those of stock's linears."""
    one, (x, dy) = Frozen(values(), group, storage), inputs()
    a, b = torch.nn.Linear(K, 4, bias=False).bfloat16(), torch.nn.Linear(4, N, bias=False).bfloat16()
    torch.nn.init.zeros_(b.weight)
    base, _ = forward(one, x, group)
    y = forward(one, x, group)[0] + b(a(x))
    assert torch.equal(y, base)
    y.backward(dy)
    assert torch.equal(b.weight.grad, dy.t() @ a(x)) and not a.weight.grad.any()


def test_one_payload_and_its_scale(group):
    one = Frozen(values(), group, "fp8")
    weight = one.weight
    assert weight.param.dtype == E4M3.dtype and weight.param.untyped_storage().nbytes() == N * K
    assert weight.stored.payload.data_ptr() == weight.param.data_ptr()
    exponent = torch.frexp(weight.stored.scale_inv)[0]
    assert exponent == 0.5  # a power of two, the tightest
    assert E4M3.max / 2 < (weight.param.float().abs().max()) <= E4M3.max
    assert ((weight.dense().float() - values().float()).abs() <= values().float().abs() * 2**-4 + 2**-14).all()


def test_what_comes_out_goes_in_as_it_was_and_in_place(group):
    """BF16 values of a checkpoint give the payload again, in the memory that a graph may have recorded."""
    one, other = Frozen(values(), group, "fp8"), Frozen(values(2), group, "fp8")
    places = other.weight.param.data_ptr(), other.weight.stored.scale_inv.data_ptr()
    one.weight.load(one.weight.dense())
    other.weight.load(one.weight.dense())
    for weight in (one.weight, other.weight):
        assert torch.equal(weight.dense(), Frozen(values(), group, "fp8").weight.dense())
    assert places == (other.weight.param.data_ptr(), other.weight.stored.scale_inv.data_ptr())
    x, _ = inputs()
    assert torch.equal(forward(one, x, group)[0], forward(other, x, group)[0])


def test_whoever_looks_on_sees_no_wgrad(group):
    class Looking(Observer):
        seen = ()

        def forward(self, weight, x, read_x, read_w):
            pass

        def backward(self, weight, x, dy, dgrad, wgrad):
            self.seen += ((x, dy, dgrad, wgrad),)

    one, (x, dy), looking = Frozen(values(), group), inputs(), Looking()
    one.weight.events.subscribe(looking)
    forward(one, x, group)[0].backward(dy)
    ((seen_x, seen_dy, dgrad, wgrad),) = looking.seen
    assert torch.equal(seen_x, x) and torch.equal(seen_dy, dy) and wgrad is None and dgrad[0].payload.shape == (M, N)


def test_a_compact_bucket_says_who_is_in_it_where_some_are_frozen(group):
    """Buckets of other weights may have one shape: without frozen ones the layout alone says who is in which."""
    first, second = (OneWeight(values(), group) for _ in range(2))
    second.weight.layer_number = 4

    def keys(one, some_frozen):
        state = compact.sharded_compact_state([one.bucket], some_frozen)["compact"][0]
        return {tensor.key for kinds in state.values() for tensor in kinds.values()}

    assert keys(first, False) == keys(second, False)
    assert keys(first, True).isdisjoint(keys(second, True))
