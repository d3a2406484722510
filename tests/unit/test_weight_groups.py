"""What a set calls its weights: linears as always, experts each by its number; and which replica a rank is."""

import dataclasses

import pytest
import torch
from engine_parts import OneWeight, one_set
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fp8.engine.owned_weight import name_weights, owned_weights


def layer(group, number: int, *linears: str) -> torch.nn.Module:
    """A transformer layer of modules that hold an owned weight each, at these paths."""
    found = TransformerLayer.__new__(TransformerLayer)
    torch.nn.Module.__init__(found)
    found.layer_number = number
    for path in linears:
        place = found
        for name in path.split("."):
            if name not in place._modules:
                place.add_module(name, torch.nn.Module())
            place = place._modules[name]
        place.owned = OneWeight(torch.randn(16, 16).bfloat16(), group).weight
    return found


def model(group) -> torch.nn.Module:
    """Wrapped twice: a stack of two layers, the second of experts, and one of multi-token prediction."""
    stack = torch.nn.ModuleList(
        [
            layer(group, 1, "self_attention.linear_qkv", "mlp.linear_fc1"),
            layer(group, 2, "mlp.experts.local_experts.0.linear_fc1", "mlp.experts.local_experts.1.linear_fc1"),
        ]
    )
    ahead = torch.nn.ModuleList([torch.nn.ModuleDict({"transformer_layer": layer(group, 3, "mlp.linear_fc1")})])
    gpt = torch.nn.ModuleDict({"decoder": torch.nn.ModuleDict({"layers": stack})})
    gpt["mtp"] = torch.nn.ModuleDict({"layers": ahead})
    return torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"module": gpt})})


@pytest.fixture
def weights(group):
    built = model(group)
    name_weights([built])
    return owned_weights([built])


def test_linears_are_called_as_checkpoints_know_them(weights, group):
    qkv, fc1, _, _, ahead = weights
    of = one_set(group)
    assert [of.key(w) for w in (qkv, fc1, ahead)] == [
        "decoder.layers.self_attention.linear_qkv.1",
        "decoder.layers.mlp.linear_fc1.1",
        "mtp.layers.mlp.linear_fc1.3",
    ]
    assert fc1.name == "decoder.layers.0.mlp.linear_fc1"


def test_experts_of_a_layer_share_neither_key_nor_noise_nor_name(weights, group):
    experts, of = weights[2:4], one_set(group)
    path = "decoder.layers.mlp.experts.local_experts"
    assert [of.key(w) for w in experts] == [f"{path}.0.linear_fc1.2", f"{path}.1.linear_fc1.2"]
    for what in (of.key, lambda w: of.identity(w, 1), lambda w: w.name):
        assert len({what(w) for w in weights}) == 5


def test_experts_are_called_after_their_number_among_all_ranks(group):
    """Rank 1 of two has experts 2 and 3: what is saved is called after these, and rank 0's noise is not drawn again."""
    built = model(group)
    experts = owned_weights([built])[2:4]
    theirs = dataclasses.replace(one_set(group), name="experts.")
    name_weights([built])
    firsts = {theirs.identity(w, 1) for w in experts}
    for number, weight in enumerate(experts, 2):
        weight.expert = number
    name_weights([built])
    path = "decoder.layers.mlp.experts.local_experts"
    assert [theirs.key(w) for w in experts] == [f"experts.{path}.{i}.linear_fc1.2" for i in (2, 3)]
    assert {theirs.identity(w, 1) for w in experts}.isdisjoint(firsts)


def test_replicas_are_counted_in_the_sets_own_groups(group):
    one = OneWeight(torch.randn(16, 16).bfloat16(), group)
    of = dataclasses.replace(one.weight.of, rank=3)
    assert one.weight.of.replica == (0, 0, 0) and of.replica == (0, 3, 0)
