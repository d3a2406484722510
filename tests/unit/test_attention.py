"""TorchAttention against softmax(Q K^T / sqrt(d)) V written out in FP32."""

import math

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_fp8.layers.attention import TorchAttention

S, B, HEADS, GROUPS, D = 24, 2, 4, 2, 16


def attention(layer_number=1, **settings) -> TorchAttention:
    config = TransformerConfig(
        num_layers=8, hidden_size=HEADS * D, num_attention_heads=HEADS, num_query_groups=GROUPS, attention_dropout=0.0,
        **settings,
    )  # fmt: skip
    return TorchAttention(config, layer_number, AttnMaskType.causal, "self")


def qkv(dtype=torch.float32):
    shapes = ((S, B, HEADS, D), (S, B, GROUPS, D), (S, B, GROUPS, D))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def written_out(q, k, v):
    q, k, v = (t.permute(1, 2, 0, 3).float() for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
    logits = q @ k.transpose(-1, -2) / math.sqrt(D)
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    out = logits.masked_fill(future, -torch.inf).softmax(-1) @ v
    return out.permute(2, 0, 1, 3).reshape(S, B, HEADS * D)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "query-key layer scaling"])
@pytest.mark.parametrize("layer_number", [1, 8])
def test_agrees_with_the_formula(layer_number, scaled):
    q, k, v = qkv()
    out = attention(layer_number, apply_query_key_layer_scaling=scaled)(q, k, v)
    expected = written_out(q, k, v)
    assert torch.allclose(out, expected, atol=1e-5)
    weight = torch.randn_like(out)
    ours, theirs = torch.autograd.grad(out, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_bf16_stays_near_the_formula():
    q, k, v = qkv(torch.bfloat16)
    out = attention()(q, k, v)
    assert out.dtype == torch.bfloat16
    assert (out.float() - written_out(q, k, v)).abs().max() < 0.05


@pytest.mark.parametrize(
    "changed", [{"attn_mask_type": AttnMaskType.padding}, {"attention_bias": torch.zeros(1)}]
)
def test_refuses_what_it_cannot_do(changed):
    with pytest.raises(ValueError, match="--"):
        attention()(*qkv(), **changed)


def test_refuses_queries_without_their_keys():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="key-value cache"):
        attention()(q[:1], k, v)


def seen_by(window, hidden=None):
    """(s, s): True where query i sees key j."""
    i, j = torch.arange(S)[:, None], torch.arange(S)
    seen = (j <= i) & ((window is None) | (i - j <= (window or 0)))
    return seen if hidden is None else seen & ~hidden


def masked(q, k, v, seen):
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
    logits = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(~seen, -torch.inf)
    return (logits.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize(
    ("window", "left"), [((4, 0), 4), ((4, 2), 4), ((0, 0), 0), ((-1, 0), None), ((100, 0), None)]
)
def test_a_window_is_causal_and_looks_back_only_so_far(window, left):
    q, k, v = qkv()
    out = attention(window_size=window)(q, k, v)
    assert torch.allclose(out, masked(q, k, v, seen_by(left)), atol=1e-5)


def test_a_window_may_be_left_out_in_some_layers():
    q, k, v = qkv()
    settings = {"window_size": (4, 0), "window_attn_skip_freq": 2}
    assert torch.allclose(attention(1, **settings)(q, k, v), masked(q, k, v, seen_by(4)), atol=1e-5)
    assert torch.allclose(attention(2, **settings)(q, k, v), masked(q, k, v, seen_by(None)), atol=1e-5)


def test_documents_that_do_not_see_each_other():
    q, k, v = qkv()
    document = torch.arange(S) // 10
    hidden = (document[:, None] != document).expand(B, 1, S, S)
    core = attention(window_size=(4, 0))
    core.reads_mask = True
    assert torch.allclose(core(q, k, v, hidden), masked(q, k, v, seen_by(4, hidden)), atol=1e-5)
    core.reads_mask = False
    assert torch.allclose(core(q, k, v, hidden), masked(q, k, v, seen_by(4)), atol=1e-5)


def test_a_mask_that_does_not_come_is_missed():
    core = attention()
    core.reads_mask = True
    with pytest.raises(ValueError, match="--reset-attention-mask: no attention mask has come"):
        core(*qkv())


def test_values_may_have_another_size():
    q, k, _ = qkv()
    v = torch.randn(S, B, GROUPS, 40)
    out = attention()(q, k, v)
    assert out.shape == (S, B, HEADS * 40)
    assert torch.allclose(out, masked(q, k, v, seen_by(None)), atol=1e-5)
