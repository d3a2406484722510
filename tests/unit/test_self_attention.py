"""FusedSelfAttention against stock's SelfAttention with the same linears and weights: all bits in FP32, and which of a
layer's calls are fused."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_fp8 import ops
from megatron_fp8.layers import self_attention
from megatron_fp8.layers.attention import TorchAttention
from megatron_fp8.layers.norm import Norm
from megatron_fp8.layers.self_attention import FusedSelfAttention, Rotary, SplitQkv, cos_sin

S, B, HIDDEN, HEADS = 12, 2, 64, 4


class Linear(torch.nn.Linear):
    def __init__(self, input_size, output_size, *, bias, **_):
        super().__init__(input_size, output_size, bias)

    def forward(self, x):
        return super().forward(x), None


@pytest.fixture
def built():
    """(stock's, ours) of a configuration, with one set of weights."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(tp=group, cp=group)

    def build(fuses_rotary=True, norm=WrappedTorchNorm, **settings):
        settings = {"attention_dropout": 0.0, "add_bias_linear": True, **settings}
        config = TransformerConfig(
            num_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS, use_cpu_initialization=True, **settings
        )
        norm = norm if config.qk_layernorm else None
        parts = SelfAttentionSubmodules(Linear, TorchAttention, Linear, norm, norm)
        args = (config, parts, 1, AttnMaskType.causal)
        stock = SelfAttention(*args, pg_collection=groups)
        fp8_config = SimpleNamespace(fuses_rotary=fuses_rotary)
        ours = FusedSelfAttention(*args, pg_collection=groups, fp8_config=fp8_config)
        assert ours.state_dict().keys() == stock.state_dict().keys()
        ours.load_state_dict(stock.state_dict())
        return stock, ours

    return build


def computed(attention, angles):
    torch.manual_seed(3)
    x = torch.randn(S, B, HIDDEN, requires_grad=True)
    y, _ = attention(x, None, rotary_pos_emb=angles)
    y.backward(torch.randn_like(y))
    return {"y": y, "x": x.grad} | {name: p.grad for name, p in attention.named_parameters() if p.grad is not None}


def embedding(rotated=HIDDEN // HEADS):
    return 30 * torch.randn(S, 1, 1, rotated)


RMS = {"qk_layernorm": True, "normalization": "RMSNorm", "norm": Norm, "num_query_groups": 2}
CASES = {  # (settings of the model, numbers of a head that are rotated, whether the rotation is fused)
    "plain": ({}, 16, True),
    "grouped": ({"num_query_groups": 2}, 16, True),
    "one group": ({"num_query_groups": 1}, 16, True),
    "a part": ({"num_query_groups": 2}, 6, True),
    "interleaved": ({"rotary_interleaved": True}, 16, True),
    "no rotation": ({"num_query_groups": 2}, None, False),
    "--no-rope-fusion": ({"fuses_rotary": False}, 16, False),
    "another class's norms": ({"qk_layernorm": True, "num_query_groups": 2}, 16, False),
    "LayerNorm of q and k": ({"qk_layernorm": True, "norm": Norm}, 16, False),
    "norms, --no-rope-fusion": ({**RMS, "fuses_rotary": False}, 16, False),
    "norms without rotation": (RMS, None, False),
    "a layer without": ({"no_rope_freq": [1, 0]}, 16, False),
    "output gate": ({"attention_output_gate": True}, 16, False),
}


@pytest.mark.parametrize("case", CASES)
def test_all_bits_are_stocks(case, built, monkeypatch):
    settings, rotated, fused = CASES[case]
    stock, ours = built(**settings)
    angles = None if rotated is None else embedding(rotated)
    turned = []
    split = ops.split_qkv
    monkeypatch.setattr(
        ops, "split_qkv", lambda *args, **kwargs: (turned.append(args[3] is not None), split(*args, **kwargs))[1]
    )
    with torch.compiler.set_stance("force_eager"):  # stock's gate would be compiled, for seconds
        expected, got = computed(stock, angles), computed(ours, angles)
    assert turned == ([] if case == "output gate" else [fused])
    assert len(expected) >= 6 and expected.keys() == got.keys()
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


NORMED = {
    "grouped": (RMS, 16),
    "one head a group": ({**RMS, "num_query_groups": HEADS}, 16),
    "one group": ({**RMS, "num_query_groups": 1}, 16),
    "zero-centred, a part": ({**RMS, "layernorm_zero_centered_gamma": True}, 6),
    "interleaved": ({**RMS, "rotary_interleaved": True}, 16),
}


@pytest.mark.parametrize("case", NORMED)
def test_rmsnorm_of_q_and_k_is_fused_with_their_rotation(case, built, monkeypatch):
    """In FP32 it is stock's model with torch's norm, but for the order of sums."""
    settings, rotated = NORMED[case]
    stock, ours = built(**settings)
    with torch.no_grad():
        for norms in zip((stock.q_layernorm, stock.k_layernorm), (ours.q_layernorm, ours.k_layernorm), strict=True):
            gains = torch.randn(HIDDEN // HEADS)
            for norm in norms:
                norm.weight.copy_(gains)
    fused, angles = [], embedding(rotated)
    monkeypatch.setattr(
        ops, "norm_rotate", lambda *args, plain=ops.norm_rotate, **how: (fused.append(1), plain(*args, **how))[1]
    )
    expected, got = computed(stock, angles), computed(ours, angles)
    assert len(fused) == 2 and len(expected) >= 6 and expected.keys() == got.keys()
    for name, right in expected.items():
        assert torch.allclose(got[name], right, rtol=1e-4, atol=1e-5 * float(right.detach().abs().max())), name


def test_keys_and_values_of_normed_heads_lie_side_by_side_for_other_ranks(built):
    _, ours = built(**RMS)
    x, rotary = torch.randn(S, B, HIDDEN), Rotary(*cos_sin(embedding(), 1.0))
    found = []
    for paired in (False, True):
        ours._rotary, ours._pairs = rotary, paired
        x.requires_grad_()
        q, k, v = ours.get_query_key_value_tensors(x)
        torch.manual_seed(5)
        (dx,) = torch.autograd.grad([q, k, v], x, [torch.randn(t.shape) for t in (q, k, v)])
        found.append((q, k, v, dx))
        assert (v.data_ptr() == k.data_ptr() + k.shape[-1] * k.itemsize) == paired
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_norm_with_a_hook_stays_apart(built):
    stock, ours = built(**RMS)
    seen = []
    ours.k_layernorm.register_forward_hook(lambda module, args, out: seen.append(out))
    angles = embedding()
    expected, got = computed(stock, angles), computed(ours, angles)
    assert len(seen) == 1 and all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("unusual", ["a tuple", "of each sample"])
def test_other_angles_are_left_to_stock(unusual, built):
    stock, ours = built()
    angles = (embedding(), embedding()) if unusual == "a tuple" else 30 * torch.randn(S, B, 1, 16)
    expected, got = computed(stock, angles), computed(ours, angles)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_layers_and_recomputation_share_a_table():
    angles = embedding()
    cos, sin = cos_sin(angles, 1.0)
    assert torch.equal(cos, angles[:, 0, 0].cos()) and torch.equal(sin, angles[:, 0, 0].sin())
    again = cos_sin(angles.detach().requires_grad_(), 1.0)
    assert again[0] is cos and again[1] is sin
    scaled, _ = cos_sin(angles, 1.5)
    assert torch.equal(scaled, angles[:, 0, 0].cos() * 1.5)


def test_other_angles_get_their_own_table():
    angles = embedding()
    cos, _ = cos_sin(angles, 1.0)
    assert not torch.equal(cos_sin(embedding(), 1.0)[0], cos)
    angles.add_(1.0)  # in the same memory
    assert torch.equal(cos_sin(angles, 1.0)[0], angles[:, 0, 0].cos())
    for _ in range(20):  # what a freed tensor leaves behind is soon another's
        angles = embedding()
        assert torch.equal(cos_sin(angles, 1.0)[0], angles[:, 0, 0].cos())
    assert len(self_attention._kept) <= 2
    with torch.inference_mode():
        angles = embedding()
        cos_sin(angles, 1.0)
        angles.add_(1.0)
        assert torch.equal(cos_sin(angles, 1.0)[0], angles[:, 0, 0].cos())


def test_whoever_has_kept_the_product_is_refused():
    """It is rotated where it lies: its old values are gone."""
    mixed = torch.randn(S, B, 3 * HIDDEN, requires_grad=True) * 1.0
    square = mixed.square()
    q, _, _ = SplitQkv.apply(mixed, HEADS, 1, Rotary(*cos_sin(embedding(), 1.0)), False, None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (square.sum() + q.sum()).backward()
