"""FP8 on its way between modules, norm to fc1 to activation to fc2 and the gradient back: the bits of casting it later.

In FP32 the values of a Source are what its cast rounds, so that a linear which casts its own input must agree wholly.
"""

import pytest
import torch
from engine_parts import OneWeight

from megatron_fp8 import ops
from megatron_fp8.engine.events import Observer
from megatron_fp8.layers.linear import product
from megatron_fp8.layers.mlp import ActivationCast
from megatron_fp8.layers.norm import NormCast, NormKind
from megatron_fp8.layers.parcel import Parcel, carried, plan
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import DelayedScaling

K, F, M = 32, 48, 80


class Norm(torch.autograd.Function):
    """NormCast's, with its result in memory."""

    @staticmethod
    def forward(ctx, x, weight, bias, kind):
        y, mean, rstd = ops.norm(x, weight, bias, kind.eps, rms=kind.rms, zero_centered=kind.zero_centered)
        ctx.kind = kind
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        kind = ctx.kind
        return *ops.norm_backward(dy, *ctx.saved_tensors, rms=kind.rms, zero_centered=kind.zero_centered), None


class Activation(torch.autograd.Function):
    """ActivationCast's, with its result and its gradient in memory."""

    @staticmethod
    def forward(ctx, h, bias, kind):
        ctx.kind = kind
        ctx.save_for_backward(h, bias)
        return ops.activate(h, kind, bias)

    @staticmethod
    def backward(ctx, dy):
        h, bias = ctx.saved_tensors
        dh = ops.activate_backward(dy, h, ctx.kind, bias)
        return dh, None if bias is None else dh.sum(0), None


class Mlp:
    """Norm, fc1, activation, fc2, with the delayed scales of a step that is not the first."""

    def __init__(self, group, kind: str, norm: NormKind, bias: bool, warm: bool = True, activations: bool = False):
        torch.manual_seed(0)
        width = 2 * F if kind in ("swiglu", "geglu") else F
        self.kind, self.norm, self.anchor = kind, norm, torch.zeros(0, requires_grad=True)
        self.fc1 = OneWeight(torch.randn(width, K).bfloat16(), group, activations=activations)
        self.fc2 = OneWeight(torch.randn(K, F).bfloat16(), group, activations=activations)
        self.scaling = DelayedScaling([E4M3, E5M2] * 2, 4, "max", 0, "cpu")
        self.scaling.scale = torch.tensor([90.0, 3e4, 20.0, 5e4])
        self.scaling.scale_inv = self.scaling.scale.reciprocal()
        self.scaling.warm = warm
        for i, one in enumerate((self.fc1, self.fc2)):
            one.weight.casts.scaling, one.weight.casts.slots = self.scaling, (2 * i, 2 * i + 1)
        self.leaves = [torch.randn(M, K), torch.randn(K) * 0.1, torch.randn(K) * 0.1]
        if norm.rms:
            self.leaves[2] = None
        self.leaves.append(torch.randn(width) if bias else None)
        self.dy = torch.randn(M, K) * 1e-2

    def _parcels(self):
        return (Parcel(plan(one.weight, None, False, False, training=True)) for one in (self.fc1, self.fc2))

    def run(self, handed_over: bool) -> list[torch.Tensor]:
        """y, the leaves' gradients, the weights' gradients and the amaxes."""
        self.scaling.amax.zero_()
        leaves = [None if leaf is None else leaf.clone().requires_grad_() for leaf in self.leaves]
        x, weight, norm_bias, bias = leaves
        one, two = self._parcels()
        if handed_over:
            normed, _ = NormCast.apply(one, x, weight, norm_bias, self.norm)
            assert carried(normed) is one
            h = product(normed, self.anchor, one)
            activated = ActivationCast.apply(two, h, bias, self.kind, carried(h))
            assert carried(activated) is two
            y = product(activated, self.anchor, two)
        else:
            h = product(Norm.apply(x, weight, norm_bias, self.norm), self.anchor, one)
            y = product(Activation.apply(h, bias, self.kind), self.anchor, two)
        y.backward(self.dy)
        assert not any(getattr(parcel, name) for parcel in (one, two) for name in Parcel.__slots__ if name != "call")
        gradients = [leaf.grad for leaf in leaves if leaf is not None]
        for bucket in (self.fc1.bucket, self.fc2.bucket):
            gradients.append(bucket.grads.dense().clone())
            bucket.begin_step(0)
        return [y.detach(), *gradients, self.scaling.amax.clone()]


@pytest.mark.parametrize("warm", [True, False], ids=["delayed", "first step"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("rms", [True, False], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "squared_relu", "swiglu", "geglu"])
def test_the_bits_of_casting_it_later(group, kind, rms, bias, warm):
    mlp = Mlp(group, kind, NormKind(rms, 1e-5, zero_centered=bias), bias, warm)
    later, handed = mlp.run(False), mlp.run(True)
    assert len(later) == len(handed)
    for one, other in zip(later, handed, strict=True):
        assert torch.equal(one, other) and one.abs().sum() > 0


def test_observers_see_the_same_and_change_nothing(group):
    class Looking(Observer):
        def __init__(self):
            self.seen = []

        def cast(self, weight, role, x, q):
            self.seen += [x.clone(), q.dequantize()]

        def forward(self, weight, x, read_x, read_w):
            self.seen.append(x.clone())

        def backward(self, weight, x, dy, dgrad, wgrad):
            self.seen += [x.clone(), dy.clone()]

    mlp = Mlp(group, "swiglu", NormKind(True, 1e-5, False), False)
    bare, seen = mlp.run(True), []
    for handed_over in (False, True):
        looking = Looking()
        for one in (mlp.fc1, mlp.fc2):
            one.events.subscribe(looking)
        watched = mlp.run(handed_over)
        for one in (mlp.fc1, mlp.fc2):
            one.events.unsubscribe(looking)
        assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
        seen.append(looking.seen)
    later, handed = seen
    assert len(later) == len(handed) >= 14

    def key(t):
        return tuple(t.shape), t.float().sum().item()

    assert sorted(map(key, later)) == sorted(map(key, handed))  # the order in which they are cast differs


@pytest.mark.parametrize("warm", [True, False], ids=["delayed", "first step"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("kind", "rms"), [("gelu", False), ("swiglu", True)])
def test_what_is_kept_in_fp8(group, kind, rms, bias, warm):
    """The forward pass has the same bits; the gradients are those of what was kept, whether fc2's comes late, from the
    activation's backward pass, or, where someone looks at the GEMMs, at once."""

    class Looking(Observer):
        def forward(self, weight, x, read_x, read_w):
            pass

    plain, mlp = (Mlp(group, kind, NormKind(rms, 1e-5, bias), bias, warm, activations) for activations in (False, True))
    exact, late = plain.run(True), mlp.run(True)
    assert torch.equal(late[0], exact[0])
    for got, value in zip(late[1:-1], exact[1:-1], strict=True):
        assert 0 < (got - value).norm() < 0.1 * value.norm()
    for one in (mlp.fc1, mlp.fc2):
        one.events.subscribe(Looking())
    assert all(torch.equal(a, b) for a, b in zip(late, mlp.run(True), strict=True))


def test_looking_on_changes_no_bit_of_a_biass_gradient(group):
    """In BF16, where the sum of what a looker sees is not the sum of what was cast."""

    class Looking(Observer):
        def cast(self, weight, role, x, q):
            pass

    mlp = Mlp(group, "gelu", NormKind(False, 1e-5, False), bias=True)
    mlp.leaves, mlp.dy = [leaf.bfloat16() for leaf in mlp.leaves], mlp.dy.bfloat16()
    bare = mlp.run(True)
    for one in (mlp.fc1, mlp.fc2):
        one.events.subscribe(Looking())
    assert all(torch.equal(a, b) for a, b in zip(bare, mlp.run(True), strict=True))


def test_a_second_reader_is_noticed(group):
    mlp = Mlp(group, "gelu", NormKind(True, 1e-5, False), False)
    one, two = mlp._parcels()
    h = product(mlp.leaves[0].clone().requires_grad_(), mlp.anchor, one)
    y = product(ActivationCast.apply(two, h, None, "gelu", carried(h)), mlp.anchor, two)
    with pytest.raises(RuntimeError, match="something else read that result too"):
        (y.sum() + h.sum()).backward()


def test_who_takes_its_gradient_in_fp8(group):
    x, anchor = torch.randn(M, K).bfloat16(), torch.zeros(0, requires_grad=True)
    for how, taken in (({}, True), ({"wgrad": False}, False), ({"emulate": "E4M3"}, False)):
        one = OneWeight(torch.randn(F, K).bfloat16(), group, **how)
        parcel = Parcel(plan(one.weight, None, False, False, training=True))
        assert (carried(product(x, anchor, parcel)) is parcel) == taken
    with torch.no_grad():
        parcel = Parcel(plan(one.weight, None, False, False, training=True))
        assert carried(product(x, anchor, parcel)) is None


@pytest.mark.parametrize("warm", [True, False])
def test_a_bias_and_its_gradient(group, warm):
    """The product with a bias is the product, then the bias; its gradient is dy's sum, of dy as it is."""
    torch.manual_seed(1)
    x, bias, dy = torch.randn(M, K), torch.randn(F), torch.randn(M, F)
    found = []
    for inside in (False, True):
        one = OneWeight(torch.randn(F, K, generator=torch.Generator().manual_seed(2)).bfloat16(), group)
        one.weight.casts.scaling = DelayedScaling([E4M3, E5M2], 4, "max", 0, "cpu")
        one.weight.casts.scaling.warm = warm
        leaves = [t.clone().requires_grad_() for t in (x, bias)]
        parcel = Parcel(plan(one.weight, None, False, False, training=True))
        if inside:
            y = product(leaves[0], torch.zeros(0), parcel, leaves[1])
        else:
            y = product(leaves[0], torch.zeros(0), parcel) + leaves[1]
        y.backward(dy)
        found.append([y.detach(), one.bucket.grads.dense().clone(), *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
