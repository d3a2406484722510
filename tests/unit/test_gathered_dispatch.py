"""Experts whose rows the device picks (layers/gathered_dispatch.py): no host reads what it has counted, as torch's
"meta" tensors show, which have no values; and all bits are those of rows that are gathered before and cut after, with
all undefined memory NaN."""

from dataclasses import replace
from types import SimpleNamespace

import architecture
import pytest
import torch
import torch.nn.functional as F
from test_combined_experts import Rows, Sums
from test_local_dispatch import EXPERTS, HIDDEN, TOKENS, TOP, Linears
from test_weighted_experts import HIDDEN as WIDE
from test_weighted_experts import Layer

from megatron_fp8.flags import graphs
from megatron_fp8.gemm import grouped
from megatron_fp8.layers import grouped_experts
from megatron_fp8.layers.experts import Fp8Experts
from megatron_fp8.layers.gathered_dispatch import GatheredDispatcher, Picked
from megatron_fp8.ops.groups import TILE, Made, groups_of_chosen

OWNED = "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --fp8-experts --moe-router-load-balancing-type none"
OWNED += " --fp8-gemm fp8"
WHOLE = "--cuda-graph-impl full_iteration"


@pytest.mark.parametrize(
    ("flags", "gathered"),
    [
        (f"--moe-grouped-gemm {WHOLE}", True),
        ("--moe-grouped-gemm", False),  # the bound costs memory
        (f"--moe-grouped-gemm {WHOLE} --moe-token-dispatcher-type alltoall", False),
        (f"--moe-grouped-gemm {WHOLE} --moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input", False),
    ],
)
def test_which_layers_have_it(flags, gathered, monkeypatch):
    monkeypatch.setattr(graphs, "can_record", lambda: True)
    with architecture.started():
        model = architecture.build(f"{OWNED} {flags}".split(), level=True)
    dispatchers = [layer.mlp.token_dispatcher for layer in model.decoder.layers if hasattr(layer.mlp, "experts")]
    assert dispatchers and all(isinstance(dispatcher, GatheredDispatcher) == gathered for dispatcher in dispatchers)


def one_pass(monkeypatch) -> tuple[Linears, Linears]:
    config = SimpleNamespace(
        moe_router_topk=TOP, add_bias_linear=False, moe_apply_probs_on_input=False, use_te_activation_func=False,
        bias_activation_fusion=True, gated_linear_unit=True, glu_linear_offset=0.0, activation_func_clamp_value=None,
        activation_func=F.silu, activation_func_fp8_input_store=False, moe_permute_fusion=False,
    )  # fmt: skip
    monkeypatch.setattr(grouped, "rows", lambda a, weights, out, **how: out)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    stock = SimpleNamespace(
        ep_group=alone, tp_group=alone, tp_ep_group=alone, num_local_experts=EXPERTS,
        local_expert_indices=list(range(EXPERTS, 2 * EXPERTS)), config=config,
    )  # fmt: skip
    banks = Linears(96, HIDDEN), Linears(HIDDEN, 48)
    for bank in banks:
        bank.columns_again = lambda made, role, groups, scale: scale.new_empty(made.of[0].shape[1], groups.rows)
    cast = Linears.cast

    def cast_again(bank, x, *how, **named):
        return replace(cast(bank, x, *how, **named), again=(Made(print, (x,)), torch.ones(EXPERTS, device="meta")))

    monkeypatch.setattr(Linears, "cast", cast_again)
    like = SimpleNamespace(config=config, activation_func=F.silu)
    experts = SimpleNamespace(
        config=config, _banks=banks, num_local_experts=EXPERTS, local_experts=[like] * EXPERTS, training=True,
        takes_tickets=lambda: True,
    )  # fmt: skip
    dispatcher = GatheredDispatcher(stock, experts)
    x = torch.empty(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    logits = torch.empty(TOKENS, 3 * EXPERTS, device="meta", requires_grad=True)
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(TOP).indices, 1).bool()
    rows, probs = dispatcher.dispatch_preprocess(x, chosen, logits.softmax(1) * chosen)
    rows, counts, probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, probs))
    y, _ = Fp8Experts.forward(experts, rows, counts, probs)
    y = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y)))
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape and logits.grad is not None
    return banks


def test_no_value_is_read(monkeypatch):
    banks = one_pass(monkeypatch)
    assert [bank.gradients for bank in banks] == [1, 1] and banks[0].read == (TOKENS, HIDDEN)


def test_stocks_cut_reads_counts(monkeypatch):
    monkeypatch.delattr(GatheredDispatcher, "dispatch_postprocess")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        one_pass(monkeypatch)


# tokens, most experts a token, experts, which of these are chosen from, share of tokens that choose
CHOICES = [
    (100, 3, 5, range(5), 0.7), (70, 1, 3, [1], 0.5), (45, 2, 6, [0, 2, 5], 1), (128, 1, 1, [0], 0.4),
    (130, 8, 4, range(4), 0.3), (40, 2, 3, range(3), 0), (256, 1, 2, range(2), 1),
]  # fmt: skip


def choice(tokens, most, experts, of, share) -> torch.Tensor:
    """(T, E) bool"""
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    for t in range(tokens):
        if torch.rand(()) < share:
            count = int(torch.randint(1, min(most, len(of)) + 1, ()))
            chosen[t, torch.tensor(list(of))[torch.randperm(len(of))[:count]]] = True
    return chosen


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_tables(case):
    """Against a loop over experts and tokens."""
    chosen = choice(*case)
    given, read = groups_of_chosen(chosen, case[1])
    (tokens, experts), at = chosen.shape, 0
    sources, tiles, first, table = {}, [], [0], [[] for _ in range(tokens)]
    for e in range(experts):
        mine = chosen[:, e].nonzero()[:, 0].tolist()
        for i, t in enumerate(mine):
            sources[at + i] = t, e
            table[t].append(at + i)
        tiles += [e] * -(-len(mine) // TILE)
        at = TILE * len(tiles)
        first.append(len(tiles))
    first[-1] = max(first[-1], 1)  # of padding alone
    assert given.first.tolist() == read.first.tolist() == first
    assert given.expert[: len(tiles)].tolist() == tiles and given.expert.max() < experts
    assert given.counts.tolist() == chosen.sum(0).tolist() and given.bound and read.bound
    assert given.rows == read.rows == TILE * given.expert.numel() >= TILE * first[-1] and given.rows != tokens
    for row in range(given.rows):
        t, e = sources.get(row, (-1, -1))
        assert read.source[row] == t and given.source[row] == (-1 if t < 0 else t * experts + e)
    assert [[at for at in row if at >= 0] for row in read.table.tolist()] == table
    most = torch.ones_like(chosen) if case[1] >= experts else None
    if most is not None:  # all that can come
        assert groups_of_chosen(most, case[1])[0].first[-1] * TILE <= given.rows


def passed(layer, x, probs, dy, chosen, picked: bool) -> list[torch.Tensor]:
    layer.scaling.amax.zero_()
    for bank in layer.banks:
        for weight in bank.weights:
            weight.sink.begin_step(1)
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    if picked:
        tables = groups_of_chosen(chosen, 3)
        rows, given, counts = Picked.apply(x, tables), probs.reshape(-1), tables[0].counts
    else:
        token = chosen.t().nonzero()[:, 1]
        rows, given, counts = Rows.apply(x, token), probs.t()[chosen.t()], chosen.sum(0)
    y = grouped_experts.experts_together(layer.like, *layer.banks, rows, counts, given, True)
    y = y if picked else Sums.apply(y, token, x.shape[0])
    y.backward(dy)
    dws = [store.dense().clone() for store in layer.stores]
    return [y.detach(), x.grad, probs.grad, *dws, layer.scaling.amax.clone()]


@pytest.fixture
def poisoned(monkeypatch):
    rows = grouped.rows
    monkeypatch.setattr(grouped, "rows", lambda a, w, out, **how: rows(a, w, out.fill_(torch.nan), **how))


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("case", [case for case in CHOICES if case[4]], ids=str)
@pytest.mark.parametrize("weighs", [True, False])
def test_bit_for_bit(case, weighs, warm, poisoned, monkeypatch):
    """weighs: SwiGLU is a part of the casts, as on a GPU. warm: scales are known; else casts take them from amaxes."""
    layer, chosen = Layer(case[2]), choice(*case[:1], min(case[1], 3), *case[2:])
    monkeypatch.setattr(layer.scaling, "warm", warm)
    x, dy = (torch.randn(case[0], WIDE).bfloat16() for _ in range(2))
    given = layer, x, torch.rand(case[0], case[2]), dy, chosen
    monkeypatch.setattr(grouped_experts, "_weighs", lambda *_: weighs)
    cut, picked = passed(*given, False), passed(*given, True)
    for mine, other in zip(picked, cut, strict=True):
        assert torch.equal(mine, other) and mine.abs().max() > 0
    tables = groups_of_chosen(chosen, 3)
    with torch.no_grad():
        y = grouped_experts.experts_together(
            layer.like, *layer.banks, Picked.apply(x, tables), tables[0].counts, given[2].reshape(-1), True
        )
    assert torch.equal(y, cut[0])


@pytest.mark.parametrize("weighs", [True, False])
def test_no_row_at_all(weighs, poisoned, monkeypatch):
    layer, chosen = Layer(3), torch.zeros(40, 3, dtype=torch.bool)
    monkeypatch.setattr(grouped_experts, "_weighs", lambda *_: weighs)
    x, dy = (torch.randn(40, WIDE).bfloat16() for _ in range(2))
    assert not any(found.any() for found in passed(layer, x, torch.rand(40, 3), dy, chosen, True))


def test_it_keeps_no_rows_in_fp8(monkeypatch):
    """x and h are kept for the backward pass, and cast again."""
    layer, chosen = Layer(4), choice(100, 3, 4, range(4), 1)
    monkeypatch.setattr(grouped_experts, "_weighs", lambda *_: True)
    tables, kept = groups_of_chosen(chosen, 3), []
    x, probs = torch.randn(100, WIDE).bfloat16().requires_grad_(), torch.rand(400).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rows = Picked.apply(x, tables)
        grouped_experts.experts_together(layer.like, *layer.banks, rows, tables[0].counts, probs, True)
    large = {(t.data_ptr(), tuple(t.shape)) for t in kept if t.numel() > 400}
    assert {shape for _, shape in large} == {(100, WIDE), (tables[0].rows, 96)} and len(large) == 2
    assert not any(t.itemsize == 1 for t in kept)
