"""With all experts on a rank, no host reads what the GPU counted: not in a pass of dispatcher and experts together.

The tensors are torch's "meta" ones, which have no values: to read one, or to copy it to the host, is an error.
"""

from types import SimpleNamespace

import architecture
import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_fp8.gemm import grouped
from megatron_fp8.layers import grouped_experts, local_dispatch
from megatron_fp8.layers.experts import Fp8Experts
from megatron_fp8.layers.local_dispatch import LocalDispatcher
from megatron_fp8.numerics.scaled import ScaledTensor

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP = 24, 32, 48, 4, 2


class Linears:
    """A bank that computes nothing: (N, K) a weight, in the places of what it is asked for."""

    def __init__(self, n: int, k: int):
        self.shape, self.gradients, self.read, self.read_back = (n, k), 0, None, None

    def await_gradients(self):
        pass

    def cast(self, x, role, groups, *, rows, columns, training):
        self.read, self.read_back = self.read or tuple(x.shape), tuple(x.shape)
        codes = torch.empty(groups.rows, x.shape[1], dtype=torch.float8_e4m3fn, device=x.device)
        return grouped.GroupedTensor(groups, torch.ones(EXPERTS, device=x.device), codes, codes.t().contiguous())

    def quantized(self):
        one = ScaledTensor(torch.empty(self.shape, dtype=torch.float8_e4m3fn, device="meta"), torch.ones(()))
        return grouped.GroupedWeights.of((one,) * EXPERTS)

    def transposed(self, w):
        return grouped.GroupedWeights(w.payload.mT, w.scale_inv)

    def take_gradients(self, dy, x):
        self.gradients += 1


def one_pass(monkeypatch, together: bool = True, fused: bool = False, added: bool = False) -> tuple[Linears, Linears]:
    config = SimpleNamespace(
        num_moe_experts=EXPERTS, moe_router_topk=TOP, moe_permute_fusion=False, moe_expert_capacity_factor=None,
        moe_pad_expert_input_to_capacity=False, moe_router_padding_for_quantization=False, cuda_graph_impl="none",
        use_te_activation_func=False, bias_activation_fusion=False, gated_linear_unit=True, glu_linear_offset=0.0,
        activation_func_clamp_value=None, activation_func=F.silu, moe_apply_probs_on_input=False,
    )  # fmt: skip
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", object())
    monkeypatch.setattr(grouped, "rows", lambda a, weights, out, **how: out)
    for module in (grouped_experts, local_dispatch):
        monkeypatch.setattr(module, "adds_up", lambda x: added)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    stock = SimpleNamespace(
        ep_group=alone, tp_group=alone, tp_ep_group=alone, num_local_experts=EXPERTS,
        local_expert_indices=list(range(EXPERTS)), config=config,
    )  # fmt: skip
    banks, asked = (Linears(2 * WIDTH, HIDDEN), Linears(HIDDEN, WIDTH)), []
    like = SimpleNamespace(config=config, activation_func=F.silu)
    experts = SimpleNamespace(
        config=config, _banks=banks, num_local_experts=EXPERTS, local_experts=[like] * EXPERTS, training=True,
        takes_tickets=lambda: asked.append(1) or together, _together=lambda: asked.append(1) or True,
    )  # fmt: skip
    dispatcher = LocalDispatcher(stock, experts)
    config.moe_permute_fusion = fused  # only now: stock's own tables would need a GPU
    x = torch.empty(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    logits = torch.empty(TOKENS, EXPERTS, device="meta", requires_grad=True)
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(TOP).indices, 1).bool()
    rows, probs = dispatcher.dispatch_preprocess(x, chosen, logits.softmax(1) * chosen)
    rows, counts, probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, probs))
    assert rows.shape == (TOKENS * TOP, HIDDEN) and counts.device.type == "meta"
    y, _ = Fp8Experts.forward(experts, rows, counts, probs)
    assert y.shape == (TOKENS if added and together else TOKENS * TOP, HIDDEN)
    assert not together or len(asked) == 1  # it is a look at hundreds of modules
    y = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y)))
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape and logits.grad is not None
    return banks


OWNED = "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --fp8-experts --moe-router-load-balancing-type none"
TO_ALL = "--moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    ("flags", "local"),
    [
        (f"--moe-grouped-gemm {TO_ALL}", True),
        (TO_ALL, False),
        ("--moe-grouped-gemm", False),
        (f"--moe-grouped-gemm {TO_ALL} --moe-expert-capacity-factor 1", False),
    ],
)
def test_which_layers_have_it(flags, local):
    with architecture.started():
        model = architecture.build(f"{OWNED} {flags}".split(), level=True)
    dispatchers = [layer.mlp.token_dispatcher for layer in model.decoder.layers if hasattr(layer.mlp, "experts")]
    assert dispatchers and all(isinstance(dispatcher, LocalDispatcher) == local for dispatcher in dispatchers)


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_no_value_is_read(together, added, monkeypatch):
    """Whether a ticket stands for the rows or not, and whether their results are added up (as on a GPU) or not."""
    banks = one_pass(monkeypatch, together, added=added)
    assert [bank.gradients for bank in banks] == [1, 1]
    assert banks[0].read == ((TOKENS if together else TOKENS * TOP), HIDDEN)
    assert banks[1].read_back == (TOKENS if added and together else TOKENS * TOP, HIDDEN)


def test_transformer_engines_permutation_gathers_the_rows(monkeypatch):
    """Its map of rows has another form, which only its own kernels read (--moe-permute-fusion)."""
    form, gathered = (TOKENS, 2 * EXPERTS + 1), []

    def permute(x, probs, routing_map, num_out_tokens):
        gathered.append(tuple(x.shape))
        return x.repeat(TOP, 1), probs.view(-1)[:num_out_tokens], x.new_empty(form, dtype=torch.int32)

    def unpermute(rows, found, merging_probs, restore_shape, **how):
        assert rows.shape == (TOKENS * TOP, HIDDEN) and found.shape == form
        return rows[:TOKENS].view(restore_shape)

    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(moe_utils, "is_te_min_version", lambda version: False)
    monkeypatch.setattr(moe_utils, "fused_permute_with_probs", permute)
    monkeypatch.setattr(moe_utils, "fused_unpermute", unpermute)
    banks = one_pass(monkeypatch, fused=True)
    assert gathered == [(TOKENS, HIDDEN)] and banks[0].read == (TOKENS * TOP, HIDDEN)


def test_a_ticket_that_was_replaced_is_found(monkeypatch):
    """Between the dispatcher and the experts, by a view of it. To compute with it gives NaN."""
    monkeypatch.setattr(LocalDispatcher, "token_dispatch", lambda self, rows, probs: (rows.view(-1, HIDDEN), probs))
    with pytest.raises(RuntimeError, match="were changed between the dispatcher and the experts"):
        one_pass(monkeypatch)


def test_stocks_sort_reads_counts(monkeypatch):
    monkeypatch.delattr(LocalDispatcher, "dispatch_postprocess")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        one_pass(monkeypatch)


def test_a_copy_to_the_host_is_found(monkeypatch):
    monkeypatch.setattr(LocalDispatcher, "_maybe_dtoh_and_synchronize", lambda self, point, counts=None: counts.cpu())
    with pytest.raises(NotImplementedError, match="meta"):
        one_pass(monkeypatch)
