"""Packed sequences: each document as if it were alone, to the bit in FP32; against stock's rotation of them too."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_fp8.layers import packed
from megatron_fp8.layers.attention import TorchAttention, UnfusedAttention
from megatron_fp8.layers.norm import Norm
from megatron_fp8.layers.packed import Documents, documents_of
from megatron_fp8.layers.self_attention import FusedSelfAttention

ENDS = [0, 5, 8, 9, 9, 24]  # of one token, and of none, too
T, HIDDEN, HEADS, GROUPS = 24, 64, 4, 2
DOCUMENTS = [(a, b) for a, b in itertools.pairwise(ENDS) if a < b]


class Linear(torch.nn.Linear):
    def __init__(self, input_size, output_size, *, bias, **_):
        super().__init__(input_size, output_size, bias)

    def forward(self, x):
        return super().forward(x), None


def params(**changed) -> PackedSeqParams:
    ends = torch.tensor(ENDS, dtype=torch.int32)
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 15, "max_seqlen_kv": 15}
    return PackedSeqParams(**{"qkv_format": "thd", **given, **changed})


def attention(fuses=True, core=TorchAttention, norm=WrappedTorchNorm, **settings) -> FusedSelfAttention:
    torch.manual_seed(0)
    settings = {"attention_dropout": 0.0, "num_query_groups": GROUPS, **settings}
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS, use_cpu_initialization=True, **settings
    )
    norm = norm if config.qk_layernorm else None
    parts = SelfAttentionSubmodules(Linear, core, Linear, norm, norm)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    fp8 = SimpleNamespace(fuses_rotary=fuses)
    groups = SimpleNamespace(tp=group, cp=group)
    return FusedSelfAttention(config, parts, 1, AttnMaskType.causal, pg_collection=groups, fp8_config=fp8)


def angles(length: int, width: int = 16) -> torch.Tensor:
    turns = torch.outer(torch.arange(length).float(), 10000 ** -torch.linspace(0, 1, width // 2))
    return torch.cat((turns, turns), -1)[:, None, None, :]


def hidden(seed: int = 3) -> torch.Tensor:
    return torch.randn(T, 1, HIDDEN, generator=torch.Generator().manual_seed(seed), requires_grad=True)


SETTINGS = [
    {},
    {"fuses": False},
    {"qk_layernorm": True},
    {"qk_layernorm": True, "normalization": "RMSNorm", "norm": Norm},
    {"num_query_groups": HEADS},
    {"rotary_interleaved": True},
    {"window_size": (3, 0)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_each_document_is_as_if_alone(settings):
    """Values and gradients, rotation from its own beginning included."""
    ours, x = attention(**settings), hidden()
    y, _ = ours(x, None, rotary_pos_emb=angles(15), packed_seq_params=params())
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    y.backward(dy)
    for start, stop in DOCUMENTS:
        alone = x.detach()[start:stop].requires_grad_()
        expected, _ = ours(alone, None, rotary_pos_emb=angles(stop - start))
        expected.backward(dy[start:stop])
        assert torch.allclose(y[start:stop], expected, atol=1e-6)
        assert torch.allclose(x.grad[start:stop], alone.grad, atol=1e-5)
    unpacked, _ = ours(x, None, rotary_pos_emb=angles(T))
    assert not torch.allclose(unpacked[5:], y[5:], atol=1e-2)


def test_the_core_has_the_bits_of_one_document_at_a_time():
    core = attention().core_attention
    q, k, v = (torch.randn(T, heads, 16, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS))
    y = core(q, k, v, packed_seq_params=params())
    assert y.shape == (T, HIDDEN)
    for start, stop in DOCUMENTS:
        one = core(*(t.detach()[start:stop, None] for t in (q, k, v)))
        assert torch.equal(y[start:stop], one[:, 0])
    assert torch.equal(core(q[:, None], k[:, None], v[:, None], packed_seq_params=params()), y[:, None])


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_nothing_leaks_from_one_document_to_another(settings):
    """A document's result does not change with its neighbours, and has a gradient of exactly 0 in them."""
    ours, x = attention(**settings), hidden()
    y, _ = ours(x, None, rotary_pos_emb=angles(15), packed_seq_params=params())
    y[5:8].sum().backward()
    assert x.grad[5:8].abs().min() > 0 and not x.grad[:5].any() and not x.grad[8:].any()
    other = torch.cat((hidden(7)[:5], x[5:8], hidden(8)[8:])).detach()
    again, _ = ours(other, None, rotary_pos_emb=angles(15), packed_seq_params=params())
    assert torch.equal(again[5:8], y[5:8]) and not torch.equal(again[8:], y[8:])


def test_rotation_is_stocks_of_packed_sequences():
    """Stock cuts the row on the host, in every layer; the angles are the same."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
    t, table = torch.randn(T, HEADS, 16), angles(15)
    expected = apply_rotary_pos_emb(t, table, config, cu_seqlens=params().cu_seqlens_q, cp_group=group)
    own = documents_of(params()).by_position(table, T)
    found = apply_rotary_pos_emb(t[:, None], own, config, cp_group=group)
    assert torch.equal(found[:, 0], expected)


def test_what_is_made_once_a_micro_batch():
    one, table = params(), angles(15)
    assert documents_of(one) is documents_of(one) is not documents_of(params())
    documents = documents_of(one)
    first = documents.by_position(table, T)
    assert documents.by_position(table.detach(), T) is first  # recomputation brings another tensor of the memory
    assert documents.by_position(table + 1, T) is not first
    expected = [i - a for a, b in DOCUMENTS for i in range(a, b)]
    assert documents.positions(T).tolist() == expected


def test_padding_counts_to_the_document_before_it():
    ends = torch.tensor([0, 4, 7, 20], dtype=torch.int32)
    padded = params(cu_seqlens_q=ends, cu_seqlens_q_padded=torch.tensor(ENDS, dtype=torch.int32))
    assert documents_of(padded).ends.tolist() == ENDS


def test_a_gpu_has_one_call_of_the_kernel(monkeypatch):
    """With head sizes that it takes, one for all three, a multiple of 8; and the causal window."""
    calls = []

    def varlen_attn(q, k, v, *ends, scale, window_size):
        calls.append((q.shape[-1], k.shape[-1], v.shape[-1], ends, scale, window_size))
        documents = Documents(ends[0], ends[2])
        return packed._one_by_one(q, k, v, documents, None if window_size[0] < 0 else window_size[0], scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    documents = documents_of(params())
    for hn, hv, width in ((16, 16, 16), (20, 12, 24), (16, 32, 32)):
        for window in (None, 3):
            q, k, v = torch.randn(T, HEADS, hn), torch.randn(T, GROUPS, hn), torch.randn(T, GROUPS, hv)
            found = packed._in_one_kernel(q, k, v, documents, window, 0.25)
            expected = packed._one_by_one(q, k, v, documents, window, 0.25)
            assert found.shape == (T, HEADS, hv) and torch.allclose(found, expected, atol=1e-6)
            *widths, ends, scale, seen = calls.pop()
            assert widths == [width] * 3 and scale == 0.25 and seen == (-1 if window is None else 3, 0)
            assert ends[0] is ends[1] is documents.ends and ends[2:] == (15, 15)


def test_what_it_cannot_do_is_said():
    core = attention(attention_dropout=0.1).core_attention
    q, k, v = (torch.randn(T, heads, 16) for heads in (HEADS, GROUPS, GROUPS))
    with pytest.raises(ValueError, match="--attention-dropout 0"):
        core(q, k, v, packed_seq_params=params())
    core.eval()(q, k, v, packed_seq_params=params())
    with pytest.raises(ValueError, match="form bshd are not known"):
        core(q, k, v, packed_seq_params=params(qkv_format="bshd"))
    with pytest.raises(ValueError, match="cu_seqlens ends at 24, and there are 23 tokens"):
        core(q[1:], k[1:], v[1:], packed_seq_params=params())
    core.context = "the group"
    with pytest.raises(ValueError, match="--context-parallel-size with packed sequences that another"):
        core(q, k, v, packed_seq_params=params())
    with pytest.raises(ValueError, match="remove --attention-backend"):
        UnfusedAttention.forward(None, q, k, v, None, packed_seq_params=params())
