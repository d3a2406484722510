"""Context-parallel attention in real gloo groups of 2, 3 and 4 processes, against the formula on one process in FP64,
and against torch's own ring attention.

One group of processes a size does everything once (`work`) and saves what each rank got; the tests look at it.
"""

import dataclasses
import functools
import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_parts import OneWeight
from gloo_ranks import run_ranks
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

from megatron_fp8 import gemm, ops
from megatron_fp8.comm import wire
from megatron_fp8.layers import context_parallel
from megatron_fp8.layers.attention import TorchAttention
from megatron_fp8.layers.context_exchange import Block
from megatron_fp8.layers.context_parallel import Kernel, PackedKernel
from megatron_fp8.layers.linear import product
from megatron_fp8.layers.packed import Documents
from megatron_fp8.layers.parcel import Parcel, plan, recipe_of

S, B = 48, 2
HEADS = {  # np, ng, hn, hv
    "plain": (4, 4, 16, 16),
    "grouped": (4, 2, 16, 16),
    "one group": (6, 1, 8, 8),
    "wide keys": (4, 4, 24, 16),
    "wide values": (4, 2, 8, 20),
}
NAMES = ("out", "dq", "dk", "dv")
WAYS = {"gathered": False, "fetched": True}


def whole(case: str, seed: int) -> list[torch.Tensor]:
    """q, k, v and the output's gradient, (s, b, heads, width) in FP32."""
    heads, groups, width, of_values = HEADS[case]
    g = torch.Generator().manual_seed(seed)
    sizes = ((heads, width), (groups, width), (groups, of_values), (heads, of_values))
    return [torch.randn(S, B, *size, generator=g) for size in sizes]


def written_out(q, k, v, dy, ends=()) -> list[torch.Tensor]:
    """[out, dq, dk, dv] of softmax(Q K^T / sqrt(d)) V in FP64, (s, b, heads, width). ends: of documents."""
    operands = [t.double().requires_grad_() for t in (q, k, v)]
    q, k, v = (t.permute(1, 2, 0, 3) for t in operands)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    for end in ends:
        hidden[end:, :end] = True
    out = (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v).permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, operands, dy.double())]


def ends(number: int, seed: int) -> list[int]:
    """0, and where the documents of a row end: drawn; each token one, and two of none; a single one."""
    drawn = sorted(random.Random(seed).sample(range(1, S), 5))
    return [[0, *drawn, S], [*range(20), 20, *range(20, S + 1), S], [0, S]][number]


# --- the processes


def work(rank: int, ranks: int) -> dict:
    seed = torch.tensor([torch.seed() % 2**31])
    dist.broadcast(seed, 0)
    group, found = dist.group.WORLD, {"seed": seed.item()}
    cut = get_batch_on_this_cp_rank({"tokens": torch.arange(S)[None]}, is_hybrid_cp=False, cp_group=group)
    found["tokens"] = cut["tokens"][0]
    context_parallel.FETCHED_ABOVE = 0
    for case, dtype, way in itertools.product(HEADS, (torch.float32, torch.bfloat16), WAYS):
        q, k, v, dy = (t[found["tokens"]].to(dtype) for t in whole(case, found["seed"]))
        operands = [t.requires_grad_() for t in (q, k, v)]
        wire.sent_bytes.clear()
        y = context_parallel.attention(*operands, 1 / math.sqrt(q.shape[3]), group, WAYS[way])
        kept = {t.data_ptr() for t in y.grad_fn.saved_tensors}
        assert recipe_of(y) is not None and y.data_ptr() in kept
        grads = torch.autograd.grad(y, operands, dy.flatten(2))
        found[case, dtype, way] = [y.detach().view(dy.shape), *grads], dict(wire.sent_bytes)
    for case, number in itertools.product(HEADS, range(3)):
        q, k, v, dy = (t[found["tokens"], :1] for t in whole(case, found["seed"]))
        operands = [t.requires_grad_() for t in (q, k, v)]
        documents = Documents(torch.tensor(ends(number, found["seed"]), dtype=torch.int32), S, group)
        y = context_parallel.attention(*operands, 1 / math.sqrt(q.shape[3]), group, documents=documents)
        grads = torch.autograd.grad(y, operands, dy.flatten(2))
        found[case, number] = [y.detach().view(dy.shape), *grads], documents.positions(len(q))
    found["ring"] = ring(*(t[found["tokens"]] for t in whole("plain", found["seed"])), group)
    return found


def ring(q, k, v, dy, group) -> list[torch.Tensor]:
    """[out, dq, dk, dv] by torch's own, which cuts a sequence alike."""
    q, k, v, dy = (t.permute(1, 2, 0, 3).contiguous() for t in (q, k, v, dy))
    aten = torch.ops.aten
    how = {"is_causal": True, "scale": 1 / math.sqrt(q.shape[3])}
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse, *_ = _templated_ring_attention(group, 2, forward, q, k, v, **how)
    grads = _templated_ring_attention_backward(
        group, 2, aten._scaled_dot_product_flash_attention_for_cpu_backward.default, dy, "grad_out", q, k, v, out, lse,
        dropout_p=0.0, **how,
    )  # fmt: skip
    return [t.permute(2, 0, 1, 3) for t in (out, *grads[:3])]


# --- the tests


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request, tmp_path_factory) -> list[dict]:
    """What each of so many ranks got."""
    return run_ranks(work, request.param, tmp_path_factory.mktemp("ranks"))


def joined(ranks: list[dict], found) -> list[torch.Tensor]:
    """[out, dq, dk, dv] of the whole sequence; found: of a rank's."""
    order = torch.cat([rank["tokens"] for rank in ranks]).argsort()
    return [torch.cat(parts)[order] for parts in zip(*(found(rank) for rank in ranks), strict=True)]


def test_ranks_have_the_two_chunks_of_their_queries(ranks):
    for rank, found in enumerate(ranks):
        own = torch.arange(S).view(2 * len(ranks), -1)[[rank, 2 * len(ranks) - 1 - rank]]
        assert torch.equal(found["tokens"], own.flatten())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", HEADS)
def test_fp32_is_the_formula(ranks, case, way):
    right = written_out(*whole(case, ranks[0]["seed"]))
    got = joined(ranks, lambda rank: rank[case, torch.float32, way][0])
    for name, value, exact in zip(NAMES, got, right, strict=True):
        assert value.dtype == torch.float32 and (value - exact).abs().max() < 1e-5, name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", HEADS)
def test_bf16_is_near_the_formula(ranks, case, way):
    """Each number is rounded once or twice on its way: the norm of the error is below two roundings of BF16."""
    right = written_out(*(t.bfloat16() for t in whole(case, ranks[0]["seed"])))
    got = joined(ranks, lambda rank: rank[case, torch.bfloat16, way][0])
    for name, value, exact in zip(NAMES, got, right, strict=True):
        assert value.dtype == torch.bfloat16
        assert (value - exact).norm() / exact.norm() < 2 * 2**-9, name


@pytest.mark.parametrize("way", WAYS)
def test_torchs_own_ring_attention(ranks, way):
    ours = joined(ranks, lambda rank: rank["plain", torch.float32, way][0])
    theirs = joined(ranks, lambda rank: rank["ring"])
    for name, value, right in zip(NAMES, ours, theirs, strict=True):
        assert (value - right).abs().max() < 1e-5, name


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("case", HEADS)
def test_documents_that_end_anywhere(ranks, case, number):
    """None sees another, and each token knows its place in its own."""
    q, k, v, dy = (t[:, :1] for t in whole(case, ranks[0]["seed"]))
    of = ends(number, ranks[0]["seed"])
    got = joined(ranks, lambda rank: rank[case, number][0])
    for name, value, exact in zip(NAMES, got, written_out(q, k, v, dy, of), strict=True):
        assert (value - exact).abs().max() < 1e-5, name
    (positions,) = joined(ranks, lambda rank: [rank[case, number][1]])
    assert positions.tolist() == [i - a for a, b in itertools.pairwise(of) for i in range(a, b)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", HEADS)
def test_bytes_on_the_wire(ranks, case, way):
    """K and V twice: gathered by all others, or fetched whole by an earlier rank and half by a later one. Of their
    gradients a later rank gets all and an earlier one half."""
    _, groups, width, of_values = HEADS[case]
    n, own = len(ranks), S // len(ranks) * B * groups * (width + of_values) * 2
    for rank, found in enumerate(ranks):
        read = own * (n - 1) if way == "gathered" else own * rank + own // 2 * (n - 1 - rank)
        sums = own * (n - 1 - rank) + own // 2 * rank
        assert found[case, torch.bfloat16, way][1] == {"cp_gather": 2 * read, "cp_sum": sums}


@pytest.mark.parametrize("sharpness", [pytest.param(1.0, marks=pytest.mark.slow), 3.0])
def test_why_keys_and_values_are_not_sent_in_fp8(sharpness):
    """With a power-of-two scale for each head's key and value, E4M3 has over ten times BF16's error. sharpness: the
    standard deviation of logits. See docs/decisions.md."""
    sizes = (8, 2, 2, 8)  # heads of q, k, v and the output's gradient
    q, k, v, dy = (torch.randn(1024, 1, heads, 128).bfloat16() for heads in sizes)
    q = q * sharpness
    right = written_out(q, k, v, dy)
    in_fp8 = [ops.quantize_blocks(t.reshape(-1)).dequantize().view(t.shape) for t in (k, v)]
    fp8 = written_out(q, *in_fp8, dy)
    operands, scale = [context_parallel._heads(t) for t in (q, k, v)], 1 / math.sqrt(128)
    kernel = context_parallel._REFERENCE
    out, lse, _ = kernel.forward(*operands, True, scale)
    grads = kernel.backward(context_parallel._heads(dy), *operands, out, lse, True, scale)
    bf16 = [t.permute(2, 0, 1, 3) for t in (out, *grads)]
    for name, *values, exact in zip(NAMES, bf16, fp8, right, strict=True):
        in_bf16, in_e4m3 = (((value - exact).norm() / exact.norm()).item() for value in values)
        print(f"logits {sharpness}: {name} BF16 {in_bf16:.2%}, K and V in E4M3 {in_e4m3:.2%}")
        assert in_bf16 < 0.004 and 10 * in_bf16 < in_e4m3 < 0.1, name


def test_a_gpu_has_one_call_of_the_kernel_for_all_documents_of_a_block(monkeypatch):
    """As the formula for the CPU. The kernel's logarithm is +inf for queries that see no key; NaN would be seen."""
    ends = torch.tensor([0, 3, 3, 17, 18, 40, 48], dtype=torch.int32)
    block = Block(0, torch.empty(0), (1,))
    sizes = (4, 2, 2, 4)
    plain = PackedKernel(Documents(ends, 22), 8, (2, 3), (2, 3), fused=False)

    def one_by_one(q, k, v, *like_q, ends_q, ends_k, do):
        found = []
        for (a, b), (c, d) in zip(*(itertools.pairwise(ends.tolist()) for ends in (ends_q, ends_k)), strict=True):
            found.append(do(q[a:b], k[c:d], v[c:d], *(t[a:b] for t in like_q)))
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def forward(q, k, v, ends_q, ends_k, longest_q, longest_k, dropout, causal, mask, *, scale):
        assert longest_q >= ends_q.diff().max() and longest_k >= ends_k.diff().max() and (dropout, mask) == (0.0, False)

        def do(q, k, v):
            out, lse, _ = context_parallel._plain(*(t.transpose(0, 1)[None] for t in (q, k, v)), causal, scale)
            return out[0].transpose(0, 1), lse[0].T.nan_to_num(neginf=torch.inf)

        out, lse = one_by_one(q, k, v, ends_q=ends_q, ends_k=ends_k, do=do)
        return out, lse.T, "seed", "unused", None

    def backward(dout, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, dropout, causal, *random, scale):
        assert random == ("seed", "unused") and dropout == 0.0 and longest_q <= 16

        def do(q, k, v, dout, out, lse):
            operands = (t.transpose(0, 1)[None] for t in (dout, q, k, v, out))
            grads = context_parallel._plain_backward(*operands, lse.T[None], causal, scale)
            return [t[0].transpose(0, 1) for t in grads]

        dq, dk, dv = one_by_one(q, k, v, dout, out, lse.T, ends_q=ends_q, ends_k=ends_k, do=do)
        return dq, dk, dv

    aten = SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
    monkeypatch.setattr(context_parallel, "_aten", aten)
    fused = dataclasses.replace(plain, fused=True)
    for own in (True, False):
        ours, right = (kernel if own else kernel.against(block) for kernel in (fused, plain))
        q, k, v, dout = (torch.randn(1, heads, 16 if own or i in (0, 3) else 8, 16) for i, heads in enumerate(sizes))
        out, lse, random = ours.forward(q, k, v, own, 0.25)
        expected, of, _ = right.forward(q, k, v, own, 0.25)
        assert torch.allclose(out, expected, atol=1e-6) and torch.allclose(lse, of)
        assert own or (lse == -torch.inf).any()
        whole_lse = lse.nan_to_num(neginf=0.0)
        found = ours.backward(dout, q, k, v, out, whole_lse, own, 0.25, *random)
        for grad, exact in zip(found, right.backward(dout, q, k, v, out, whole_lse, own, 0.25), strict=True):
            assert grad.shape == exact.shape and torch.allclose(grad, exact, atol=1e-5) and exact.any()


def attention(cp_comm_type="p2p", **settings) -> TorchAttention:
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, context_parallel_size=2, **settings
    )
    groups = SimpleNamespace(cp="the group")
    return TorchAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type=cp_comm_type, pg_collection=groups)


@pytest.mark.parametrize("settings", [{"attention_dropout": 0.1}, {"attention_dropout": 0.0, "window_size": (4, 0)}])
def test_a_layer_refuses_what_blocks_of_keys_do_not_have(settings):
    with pytest.raises(ValueError, match=r"^--context-parallel-size 2: without --window-size"):
        attention(**settings)


@pytest.mark.parametrize(("kind", "fetches"), [("p2p", True), ("all_gather", False), (None, False)])
def test_a_layer_hands_its_group_on(monkeypatch, kind, fetches):
    q, k, v = (torch.randn(8, 1, 4, 16) for _ in range(3))
    monkeypatch.setattr(context_parallel, "attention", lambda *given: given)
    assert attention(kind, attention_dropout=0.0)(q, k, v) == (q, k, v, 0.25, "the group", fetches)


@pytest.mark.parametrize("fetch", [True, False])
def test_only_large_keys_are_fetched(monkeypatch, fetch):
    """FETCHED_ABOVE bytes of the whole sequence's K and V are still gathered."""
    made = []

    class Told(Exception):
        pass

    def tell(way):
        def make(pairs, group):
            made.append(way)
            raise Told

        return make

    for way in ("Gathered", "Fetched"):
        monkeypatch.setattr(context_parallel, way, tell(way))
    group = SimpleNamespace(size=lambda: 4)
    q, k, v = torch.zeros(8, 1, 4, 16), torch.zeros(8, 1, 2, 16), torch.zeros(8, 1, 2, 8)
    for limit in (4 * 4 * 8 * 2 * (16 + 8), 4 * 4 * 8 * 2 * (16 + 8) - 1):
        monkeypatch.setattr(context_parallel, "FETCHED_ABOVE", limit)
        with pytest.raises(Told):
            context_parallel.attention(q, k, v, 0.25, group, fetch)
    assert made == ["Gathered", "Fetched" if fetch else "Gathered"]


# --- the order of things on one rank of two


class Noted:
    """An exchange that writes down what it is asked for; the other rank has zeros."""

    count = 1

    def __init__(self, pairs, group, events):
        self.pairs, self.events = pairs, events
        events.append("keys")

    def blocks(self):
        yield Block(len(self.pairs) // 2, torch.zeros_like(self.pairs))

    def send(self, gradients):
        self.events.append("gradients")

    def add_received(self, dk, dv):
        self.events.append("received")


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What happens in attention and the linear behind it, in the order of launches: "own" and "other" are blocks."""
    noted, plain, multiply = [], context_parallel._REFERENCE, gemm.gemm

    def of(function, causal_at):
        return lambda *args: (noted.append("own" if args[causal_at] else "other"), function(*args))[1]

    monkeypatch.setattr(context_parallel, "_REFERENCE", Kernel(of(plain.forward, 3), of(plain.backward, 6)))
    monkeypatch.setattr(context_parallel, "Gathered", functools.partial(Noted, events=noted))
    monkeypatch.setattr(gemm, "gemm", lambda *args, **how: (noted.append("gemm"), multiply(*args, **how))[1])
    return noted


@pytest.mark.parametrize("fp8", [True, False])
def test_what_travels_does_so_beside_what_computes(events, group, fp8):
    """K and V come beside the own block, and in the backward pass beside the linear's GEMMs. Gradients of other ranks'
    K and V go before the own block's backward pass begins, and are waited for after it."""
    one = OneWeight(torch.randn(64, 64).bfloat16(), group)
    one.weight.fp8 = fp8
    operands = [torch.randn(16, 1, 4, 16).bfloat16().requires_grad_() for _ in range(3)]
    y = context_parallel.attention(*operands, 0.25, SimpleNamespace(size=lambda: 2))
    assert events == ["keys", "own", "other"]
    events.clear()
    z = product(y, torch.zeros(0, requires_grad=True), Parcel(plan(one.weight, None, False, False, training=True)))
    events.clear()
    torch.autograd.grad(z, operands, torch.ones_like(z))
    assert events[:2] == ["keys", "gemm"] and events[-4:] == ["other", "gradients", "own", "received"]
    assert events.count("keys") == 1


def test_without_that_linear_keys_come_when_they_are_needed(events):
    operands = [torch.randn(16, 1, 4, 16).requires_grad_() for _ in range(3)]
    y = context_parallel.attention(*operands, 0.25, SimpleNamespace(size=lambda: 2))
    events.clear()
    for _ in range(2):
        torch.autograd.grad(y, operands, torch.ones_like(y), retain_graph=True)
    assert events == 2 * ["keys", "other", "gradients", "own", "received"]
