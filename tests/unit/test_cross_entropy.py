"""The cross-entropy against torch's in FP64 and against stock's bits; and when the gradient overwrites the logits."""

import math

import pytest
import torch
import torch.distributed as dist
from launch import ROOT, forked

from megatron_fp8 import cpu, ops
from megatron_fp8.layers import cross_entropy as layer
from megatron_fp8.layers.cross_entropy import cross_entropy

pytestmark = pytest.mark.usefixtures("fresh_random_data")
INF, NAN = torch.inf, torch.nan
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(scope="module")
def group():
    if cpu.needed():
        cpu.install()  # before Megatron is imported, so that its functions are not compiled
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
    cpu.uninstall()


def example(dtype, columns=257, scale=3.0):
    """(logits, target, dloss) for (6, 4) positions, a third of them masked."""
    logits = (torch.randn(6, 4, columns) * scale).to(dtype)
    dloss = torch.rand(6, 4) * (torch.rand(6, 4) < 0.7)
    return logits, torch.randint(columns, (6, 4)), dloss


# The values


@dtypes
@pytest.mark.parametrize("columns", [1, 2, 257, 5003])
@pytest.mark.parametrize("scale", [0.3, 3.0, 40.0])
def test_is_torchs_in_fp64(dtype, columns, scale, group):
    logits, target, dloss = example(dtype, columns, scale)
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact.flatten(0, 1), target.flatten(), reduction="none").view(6, 4)
    expected.backward(dloss.double())
    logits.requires_grad_()
    loss = cross_entropy(logits, target, group)
    loss.backward(dloss)
    assert loss.dtype == torch.float32 and logits.grad.dtype == dtype
    assert torch.allclose(loss.double(), expected, rtol=1e-6, atol=1e-6)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 0}[dtype]
    smallest = 2**-24 if dtype == torch.float16 else 0
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=rounding + 1e-5, atol=1e-6 + smallest)
    assert not logits.grad[dloss == 0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_are_those_of_both_stock_losses(dtype, group):
    """Stock's fused loss gives BF16 gradients even for FP32 logits, which do not occur at any level."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    logits, target, dloss = example(dtype, 1000)
    target[0, 0] = -1

    def of(loss_of):
        x = logits.clone().requires_grad_()
        loss = loss_of(x * 1, target)  # stock overwrites FP32 logits in the forward pass
        loss.backward(dloss)
        return loss, x.grad

    ours = of(lambda *given: cross_entropy(*given, group))
    unfused = of(lambda *given: vocab_parallel_cross_entropy(*given, tp_group=group))
    assert torch.equal(ours[0], unfused[0]) and torch.equal(ours[1], unfused[1])
    with torch.compiler.set_stance("force_eager"):  # otherwise the order of imports decides whether it is compiled
        fused = of(lambda *given: fused_vocab_parallel_cross_entropy(*given, group))
    assert torch.equal(ours[0], fused[0]) and torch.equal(ours[1].bfloat16(), fused[1].bfloat16())


@dtypes
def test_extremes(dtype, group):
    logits, target = torch.zeros(1, 9, 20).to(dtype), torch.full((1, 9), 3)
    big = min(torch.finfo(dtype).max, 3e38)
    logits[0, 0, 3] = 200.0  # certain and right
    logits[0, 1, 4] = 200.0  # certain and wrong
    logits[0, 2] = big
    logits[0, 3] = -big
    logits[0, 4, 5:] = -INF
    logits[0, 5, 3] = -INF
    logits[0, 6, 5] = INF
    logits[0, 7] = -INF
    logits[0, 8, 9] = NAN
    logits.requires_grad_()
    loss = cross_entropy(logits, target, group)
    loss.sum().backward()
    expected = [0.0, 200.0, math.log(20), math.log(20), math.log(5), INF]
    assert loss[0, :6].tolist() == pytest.approx(expected, rel=1e-6)
    assert loss[0, 6:].isnan().all() and logits.grad[0, 6:].isnan().all()
    assert not logits.grad[0, 0].any()
    assert logits.grad[0, 1].nonzero().flatten().tolist() == [3, 4] and logits.grad[0, 1, 3] == -1
    assert logits.grad[0, 2].float().sum().abs() < 1e-2 and logits.grad[0, 2, 3] == torch.tensor(-0.95).to(dtype)
    assert logits.grad[0, 5].float().tolist() == pytest.approx([*[1 / 19] * 3, -1, *[1 / 19] * 16], rel=4e-3)


@pytest.mark.parametrize("name", ["cross_entropy_statistics", "cross_entropy_loss", "cross_entropy_gradient"])
def test_targets_are_contiguous_for_the_kernels(name, group, monkeypatch):
    """A kernel reads the targets from their first address on and ignores strides, so they must be contiguous."""
    logits, target, dloss = example(torch.float32)
    spread = torch.stack([target, target + 1], -1).flatten(1)[:, ::2]
    assert not spread.reshape(-1).is_contiguous()
    made, seen = getattr(ops, name), []

    def kernel(x, labels, *rest, **how):
        seen.append(labels)
        return made(x, labels, *rest, **how)

    monkeypatch.setattr(ops, name, kernel)
    cross_entropy(logits.requires_grad_(), spread, group).backward(dloss)
    (labels,) = seen
    assert labels.is_contiguous() and torch.equal(labels, target.flatten())


def test_a_masked_row_is_zero_for_any_logits(group):
    logits, target = torch.full((1, 4, 10), NAN), torch.zeros(1, 4, dtype=torch.int64)
    logits[0, 3] = 0
    logits.requires_grad_()
    cross_entropy(logits, target, group).backward(torch.tensor([[0.0, -0.0, 1.0, NAN]]))
    assert not logits.grad[0, :2].any() and logits.grad[0, 2:].isnan().all()


def test_shards_make_the_whole():
    logits, target = torch.randn(50, 90) * 5, torch.randint(-1, 92, (50,))  # some outside the vocabulary
    logits[3, :30], logits[4, 30:], logits[5] = -INF, -INF, -INF
    whole, normalizer = ops.cross_entropy_loss(ops.cross_entropy_statistics(logits, target, 0)[None], target, 90)
    shards = [part.contiguous() for part in logits.split(30, 1)]
    statistics = [ops.cross_entropy_statistics(part, target, 30 * rank) for rank, part in enumerate(shards)]
    loss, shared = ops.cross_entropy_loss(torch.stack(statistics), target, 90)
    assert torch.allclose(loss, whole, rtol=1e-6, atol=1e-6, equal_nan=True) and torch.equal(shared[0], normalizer[0])
    assert loss.isnan().nonzero().flatten().tolist() == [5]
    gradient, dloss = torch.empty_like(logits), torch.rand(50)
    ops.cross_entropy_gradient(logits, target, 0, normalizer, dloss, gradient)
    parts = [torch.empty_like(part) for part in shards]
    for rank, (part, out) in enumerate(zip(shards, parts, strict=True)):
        ops.cross_entropy_gradient(part, target, 30 * rank, shared, dloss, out)
    assert torch.allclose(torch.cat(parts, 1), gradient, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_over_tensor_parallel_ranks(ranks, tmp_path):
    script = str(ROOT / "tests/scripts/shared_vocabulary.py")
    lines = forked(ranks, [script], tmp_path / "log", timeout=250, env={"CUDA_VISIBLE_DEVICES": ""})
    assert sum("as one" in line for line in lines) == ranks


# Whose memory


class Head:
    """Logits from a GEMM, as in a model. `run` computes a loss, checks its gradient, and returns whether the gradient
    overwrote the logits."""

    def __init__(self, group, dtype=torch.bfloat16):
        self.group = group
        self.x, self.w = torch.randn(6, 4, 16).to(dtype), torch.randn(257, 16).to(dtype)
        self.target, self.dloss = torch.randint(257, (6, 4)), torch.rand(6, 4)

    def logits(self, make=lambda z: z):
        x = self.x.clone().requires_grad_()
        return x, make(x @ self.w.t())

    def expected(self, make=lambda z: z):
        x, logits = self.logits(make)
        out = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), self.target.flatten(), reduction="none")
        out.backward(self.dloss.flatten())
        return x.grad

    def run(self, make=lambda z: z, keep=lambda z: None, **how):
        x, logits = self.logits(make)
        address, found = logits.data_ptr(), []
        logits.register_hook(lambda gradient: found.append(gradient.data_ptr()))
        kept = keep(logits)
        loss = cross_entropy(logits, self.target, self.group)
        del logits
        before = None if kept is None else kept.detach().clone()
        loss.backward(self.dloss, **how)
        assert torch.allclose(x.grad.float(), self.expected(make).float(), rtol=0.02, atol=0.02)
        assert kept is None or torch.equal(kept, before)
        return found == [address]


@dtypes
def test_logits_without_other_users_become_their_gradient(dtype, group):
    assert Head(group, dtype).run() is True


def squared(z):
    return z.square()


@pytest.mark.parametrize(
    ("make", "keep"),
    [
        pytest.param(lambda z: z, lambda z: z, id="kept"),
        pytest.param(lambda z: z, lambda z: z.detach(), id="kept detached"),
        pytest.param(lambda z: z, lambda z: z[2:3], id="a view kept"),
        pytest.param(lambda z: z, lambda z: [z] and z.detach()[0], id="a view of a detached one kept"),
        pytest.param(torch.tanh, lambda z: None, id="made by what saved it"),
        pytest.param(lambda z: z.view(6, 4, 257)[:], lambda z: None, id="itself a view"),
    ],
)
def test_logits_with_other_users_are_kept(make, keep, group):
    assert Head(group).run(make, keep) is False


def test_logits_that_were_copied_are_not_overwritten(group):
    """Logits that are not contiguous are copied in the forward pass, and are not overwritten."""
    head = Head(group)
    x = torch.randn(4, 6, 16).requires_grad_()
    logits = (x @ head.w.float().t()).transpose(0, 1)
    before = logits.detach().clone()
    cross_entropy(logits, head.target, group).backward(head.dloss)
    assert torch.equal(logits, before)
    exact = x.detach().clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        (exact @ head.w.float().t()).transpose(0, 1).reshape(24, -1), head.target.flatten(), reduction="none"
    )
    loss.backward(head.dloss.flatten())
    assert torch.allclose(x.grad, exact.grad, rtol=1e-4, atol=1e-5)


def test_a_leaf_stays(group):
    logits, target, dloss = example(torch.float32)
    before = logits.clone()
    logits.requires_grad_()
    cross_entropy(logits, target, group).backward(dloss)
    assert torch.equal(logits, before) and logits.grad.data_ptr() != logits.data_ptr()


def test_a_retained_graph_gives_its_gradient_twice(group):
    head = Head(group)
    x, logits = head.logits()
    loss = cross_entropy(logits, head.target, group)
    del logits
    loss.backward(head.dloss, retain_graph=True)
    first = x.grad.clone()
    loss.backward(head.dloss)
    assert torch.equal(x.grad, first + first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward(head.dloss)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_second_loss_on_the_same_logits(ours_first, group):
    """The loss that is made last runs first in the backward pass."""
    head = Head(group, torch.float32)
    x, logits = head.logits()
    losses = [lambda z: cross_entropy(z, head.target, group), lambda z: 1e-2 * z.square().sum(2)]
    a, b = (make(logits) for make in (losses if ours_first else losses[::-1]))
    del logits
    (a + b).backward(head.dloss)
    exact, logits = head.logits()
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), head.target.flatten(), reduction="none")
    (flat.view(6, 4) + 1e-2 * logits.square().sum(2)).backward(head.dloss)
    assert torch.allclose(x.grad, exact.grad, rtol=1e-4, atol=1e-5)


def test_a_user_that_the_count_misses_raises(group, monkeypatch):
    monkeypatch.setattr(layer, "_only_ours", lambda logits: True)
    head = Head(group)
    _, logits = head.logits()
    other = logits.square().sum(2)  # made first, so its backward comes last
    loss = other + cross_entropy(logits, head.target, group)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(head.dloss)


def test_there_is_no_second_derivative(group):
    head = Head(group)
    x, logits = head.logits()
    (gradient,) = torch.autograd.grad(cross_entropy(logits, head.target, group).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()
