"""Grouped products by the loop, against sums in float64; which weights lie side by side."""

from types import SimpleNamespace

import pytest
import torch

from megatron_fp8 import ops
from megatron_fp8.engine.bank import Bank
from megatron_fp8.engine.build import parted_banks
from megatron_fp8.engine.owned_weight import OwnedWeight, in_forward_order, whole_banks
from megatron_fp8.gemm import grouped
from megatron_fp8.gemm.cutlass import Cutlass, GroupedKernel
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops.groups import groups_of

CPU = torch.device("cpu")
COUNTS = [[0, 1, 127, 128, 129, 0, 40], [0, 33, 0], [300], [16, 0]]


def cast(values, groups, fmt):
    scale = 1 + torch.rand(groups.counts.numel()) * 50
    payload, columns = ops.quantize_groups(values, groups, fmt, scale, rows=True, columns=True)
    return grouped.GroupedTensor(groups, scale.reciprocal(), payload, columns)


def exact(q, e, part):
    return q.payload[part].double() * q.scale_inv[e].double()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows(counts):
    groups = groups_of(torch.tensor(counts), sum(counts), CPU)
    x = cast(torch.randn(sum(counts), 48), groups, E4M3)
    codes = [torch.randn(32, 48).to(E4M3.dtype) for _ in counts]
    weights = [ScaledTensor(payload, torch.rand(())) for payload in codes]
    y = torch.full((groups.rows, 32), torch.nan, dtype=torch.bfloat16)
    grouped.rows(x, grouped.GroupedWeights.of(weights), y, fast_accum=True)
    for e, part in enumerate(groups.parts):
        expected = exact(x, e, part) @ (weights[e].payload.double() * weights[e].scale_inv.double()).t()
        torch.testing.assert_close(y[part].double(), expected, rtol=2**-8, atol=1e-4)
        rest = slice(part.stop, part.stop + -(part.stop - part.start) % 16)
        assert (y[rest] == 0).all()
    assert y[sum(-(-n // 128) * 128 for n in counts) :].isnan().all()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums(counts, dtype):
    groups = groups_of(torch.tensor(counts), sum(counts), CPU)
    x, dy = (cast(torch.randn(sum(counts), width), groups, fmt) for width, fmt in ((48, E4M3), (32, E5M2)))
    into = torch.full((len(counts), 32, 48), torch.nan, dtype=dtype)
    grouped.sums(dy, x, into.unbind())
    expected = torch.stack([exact(dy, e, part).t() @ exact(x, e, part) for e, part in enumerate(groups.parts)])
    torch.testing.assert_close(into.double(), expected, rtol=2**-8, atol=1e-2)
    assert all((into[e] == 0).all() for e, count in enumerate(counts) if not count)
    once = into.clone()
    grouped.sums(dy, x, into.unbind(), accumulate=True)
    torch.testing.assert_close(into.double(), 2 * expected, rtol=2**-7, atol=2e-2)
    assert all(torch.equal(into[e], once[e]) for e, count in enumerate(counts) if not count)


def test_the_kernel_that_wastes_least():
    """Of those of the types: whole clusters of tiles lie along N; of two that waste alike the pair."""

    def kernel(index, cluster, promote, a=E5M2.dtype, sums=False):
        types = {"a": a, "b": E4M3.dtype, "out": torch.bfloat16}
        shape = {"tile": (128, 256), "cluster": cluster, "pingpong": False}
        return GroupedKernel(index=index, **types, promote=promote, **shape, sums=sums)

    made = Cutlass()
    made.grouped = (
        kernel(0, (1, 2), 0, E4M3.dtype), kernel(1, (1, 1), 256), kernel(2, (1, 2), 256),
        kernel(3, (2, 1), 256, sums=True),
    )  # fmt: skip

    def chosen(n, a=E5M2.dtype, sums=False, fast=False):
        found = made.grouped_kernel(a, E4M3.dtype, torch.bfloat16, n, sums=sums, fast_accum=fast)
        return found and found.index

    assert [chosen(n) for n in (144, 272, 768, 1408, 2048, 2816)] == [1, 2, 1, 2, 2, 1]
    assert chosen(144, sums=True) == 3 and chosen(144, E4M3.dtype, fast=True) == 0
    assert chosen(144, E4M3.dtype) is None and chosen(144, fast=True) == 1


def test_what_tma_cannot_read():
    whole = torch.zeros(4, 32, 48, dtype=E4M3.dtype)
    assert grouped._whole(whole, whole[:, :20], whole[1:])
    wide = torch.zeros(32, 56, dtype=E4M3.dtype)
    for odd in (wide, wide[:, :48], whole.view(-1)[8:56].view(1, 48)):
        assert not grouped._whole(whole, odd)


def test_matrices_at_equal_distances_are_one():
    memory = torch.arange(1000, dtype=torch.int32)
    at = lambda *starts: [memory[start : start + 12].view(3, 4) for start in starts]  # noqa: E731
    for starts in ((0, 12, 24), (5, 20, 35, 50), (7,)):
        assert torch.equal(grouped.spaced(at(*starts)), torch.stack(at(*starts)))
    for starts in ((0, 12, 25), (24, 12, 0), (0, 11, 22), (0, 0)):
        assert grouped.spaced(at(*starts)) is None
    assert grouped.spaced([torch.zeros(3, 4), torch.zeros(3, 4)]) is None


@pytest.mark.parametrize("kept", [False, True])
def test_a_bank_has_its_copies_in_one_memory(kept):
    """So no product copies them; each is what its weight makes alone, also when one of them has changed."""
    config = SimpleNamespace(
        gemm="fp8", weight="bf16", emulate=None, forward_format=E4M3, margin=0, keep_transpose_cache=kept
    )
    params = [torch.nn.Parameter(torch.randn(32, 48).bfloat16() * 10**i, requires_grad=False) for i in range(3)]
    bank, alone = (Bank([OwnedWeight(param, config) for param in params]) for _ in range(2))
    for _ in range(2):
        singly = [weight.quantized() for weight in alone.weights]
        w = bank.quantized()
        again, w_t = bank.quantized(), bank.transposed(w)
        own = bank.weights[0].quantized().payload.data_ptr()
        assert again.payload.data_ptr() == w.payload.data_ptr() == own
        assert bank.transposed(again).payload.data_ptr() == w_t.payload.data_ptr()
        for one, mine, turned in zip(singly, w.each, w_t.each, strict=True):
            assert torch.equal(mine.payload.view(torch.uint8), one.payload.view(torch.uint8))
            assert torch.equal(turned.payload.view(torch.uint8), one.payload.view(torch.uint8).t())
            assert mine.scale_inv == one.scale_inv == turned.scale_inv
        params[1].detach().mul_(3)
        for weight in (bank.weights[1], alone.weights[1]):
            weight.invalidate()


class Weight(SimpleNamespace):
    __hash__, __eq__ = object.__hash__, object.__eq__


def weight(path, layer, expert=None, together=True):
    bank = (path.replace(f".local_experts.{expert}.", "."), layer) if expert is not None and together else None
    return Weight(path=path, layer_number=layer, expert=expert, bank=bank, param=torch.empty(4, 4))


def test_banks_that_are_parted_are_named():
    """In two buckets, or partly frozen: one line, with the first one's name and shape."""
    fc1 = "decoder.layers.mlp.experts.local_experts.{}.linear_fc1"
    one, other = ([weight(fc1.format(e), layer, e) for e in range(3)] for layer in (1, 2))
    dense = [weight("decoder.layers.self_attention.linear_qkv", 1)]
    for w in (*one, *other):
        w.name = f"layer {w.layer_number} expert {w.expert}"
    assert parted_banks([*one, *other, *dense], [one, [*other, *dense]]) == ""
    assert parted_banks([*one, *other], [other]) == ""  # a frozen one
    for runs in ([one[:1], one[1:], other], [one[:2], other]):
        line = parted_banks([*one, *other], runs)
        assert "of layer 1 expert 0 (3 x 4 x 4) do not lie together" in line
        assert "train them all or none, with the same optimizer settings" in line
    assert "(3 x 4 x 4), and 1 more do not" in parted_banks([*one, *other], [one[:2], other[:1], other[1:]])


@pytest.mark.parametrize("together", [False, True])
def test_banks_lie_side_by_side(together):
    """In the order of the backward pass a bank's experts ascend, and no bank is cut; else nothing is another order."""
    fc = "decoder.layers.mlp.experts.local_experts.{}.linear_fc{}"
    of_layer = ["decoder.layers.self_attention.linear_proj", "decoder.layers.self_attention.linear_qkv"]
    weights = []
    for layer in (1, 2):
        weights += [weight(path, layer) for path in of_layer]
        weights += [weight(fc.format(e, n), layer, e, together) for e in (4, 5, 6) for n in (1, 2)]
    backward = [(w.layer_number, w.path[-4:], w.expert) for w in in_forward_order(weights)[::-1]]
    one = [("_fc2", 6), ("_fc1", 6), ("_fc2", 5), ("_fc1", 5), ("_fc2", 4), ("_fc1", 4)]
    if together:
        one = [(name, e) for name in ("_fc2", "_fc1") for e in (4, 5, 6)]
    one += [("proj", None), ("_qkv", None)]
    assert backward == [(layer, *rest) for layer in (2, 1) for rest in one]
    whole = [len(unit) for unit in whole_banks(in_forward_order(weights)[::-1])]
    assert whole == ([3, 3, 1, 1] * 2 if together else [1] * 16)
