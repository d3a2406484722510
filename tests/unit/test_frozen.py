"""A script freezes an owned weight, or puts another in its place: seen, whatever does it and whenever."""

from types import SimpleNamespace

import pytest
import torch
from engine_parts import OneWeight

from megatron_fp8.engine import as_found
from megatron_fp8.engine.as_found import check_linears, layers_differ
from megatron_fp8.engine.frozen import OwnedParameter, own, show_to_stock
from megatron_fp8.engine.owned_weight import UNSEEN
from megatron_fp8.errors import UserError
from megatron_fp8.layers.parcel import plan

FREEZING = {
    "attribute": lambda linear: setattr(linear.weight, "requires_grad", False),
    "method": lambda linear: linear.weight.requires_grad_(False),
    "detach_": lambda linear: linear.weight.detach_(),
    "module": lambda linear: linear.requires_grad_(False),
    "every parameter": lambda linear: [p.requires_grad_(False) for p in linear.parameters()],
}
REPLACING = {
    "parameter": lambda linear: setattr(linear, "weight", torch.nn.Parameter(torch.zeros(32, 48))),
    "no parameter": lambda linear: linear.register_parameter("weight", None),
    "deleted": lambda linear: delattr(linear, "weight"),
}
FP8 = SimpleNamespace(level="O3")


def linear_of(group, layer: int = 1) -> torch.nn.Module:
    """A module that holds an owned weight, as the package's linears do."""
    one = OneWeight(torch.randn(32, 48).bfloat16(), group)
    one.weight.layer_number, one.weight.config.level = layer, "O3"
    linear = torch.nn.Module()
    linear.weight, linear.owned = one.weight.param, one.weight
    return linear


def forward(linear) -> None:
    plan(linear.owned, None, False, False, training=True)


@pytest.mark.parametrize("how", FREEZING)
def test_frozen_before_the_optimizer_is_built(how, group):
    model = torch.nn.ModuleList(linear_of(group, layer) for layer in (1, 2))
    assert check_linears(FP8, [model]) == []
    FREEZING[how](model[1])
    assert check_linears(FP8, [model]) == ["decoder.layers.1.mlp.linear_fc1"]
    assert [linear.owned.trained for linear in model] == [True, False]
    model.requires_grad_(True)
    assert check_linears(FP8, [model]) == []
    assert not any(p.requires_grad for p in model.parameters())  # to stock they stay frozen


def test_frozen_on_some_ranks_only(group, monkeypatch):
    frozen, trained = linear_of(group), linear_of(group)
    frozen.requires_grad_(False)
    monkeypatch.setattr(as_found, "gathered", lambda mine: [mine, [(trained.owned.name, False, True)]])
    with pytest.raises(UserError, match=r"the script freezes decoder.layers.0.mlp.linear_fc1 on some ranks only; "):
        check_linears(FP8, [torch.nn.ModuleList([frozen])])


@pytest.mark.parametrize("how", FREEZING)
def test_frozen_after_it(how, group):
    linear = linear_of(group)
    forward(linear)
    FREEZING[how](linear)
    with pytest.raises(UserError, match=r"the script has frozen decoder.layers.0.mlp.linear_fc1 since"):
        forward(linear)
    with pytest.raises(UserError, match=r"the script has frozen decoder.layers.0.mlp.linear_fc1 since"):
        linear.owned.begin_step(2)
    with torch.no_grad():
        forward(linear)  # an evaluation
    linear.weight.requires_grad = True
    linear.owned.begin_step(2)
    forward(linear)


def test_thawed_after_it(group):
    linear = linear_of(group)
    linear.owned.sink = None  # as the optimizer leaves what was frozen
    linear.requires_grad_(False)
    linear.owned.begin_step(2)
    forward(linear)
    linear.requires_grad_(True)
    with pytest.raises(UserError, match=r"the script has thawed decoder.layers.0.mlp.linear_fc1 since"):
        forward(linear)


@pytest.mark.parametrize("how", REPLACING)
def test_replaced(how, group):
    model = torch.nn.ModuleList([linear_of(group)])
    REPLACING[how](model[0])
    with pytest.raises(UserError, match=r"the script replaces the weight of decoder.layers.0.mlp.linear_fc1; "):
        check_linears(FP8, [model])


def test_a_wrapper_with_an_adapter_freezes_its_base(group):
    base = linear_of(group)
    wrapper = torch.nn.Module()
    wrapper.base, wrapper.adapter = base, torch.nn.Linear(48, 2)
    for name, parameter in wrapper.named_parameters():
        parameter.requires_grad = "adapter" in name
    assert check_linears(FP8, [wrapper]) == ["decoder.layers.0.mlp.linear_fc1"]


class Layer(as_found.TransformerLayer):
    """A layer of a linear and a norm."""

    def __init__(self, group, number: int):
        torch.nn.Module.__init__(self)
        self.linear, self.norm, self.layer_number = linear_of(group, number), torch.nn.LayerNorm(48), number


def stack(group) -> torch.nn.Module:
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList(Layer(group, number) for number in (1, 2))
    return model


def test_a_layer_of_which_all_else_is_frozen_must_say_what_of_its_linear(group):
    model = stack(group)
    layer = model.decoder.layers[1]
    layer.norm.requires_grad_(False)
    with pytest.raises(UserError, match="freezes the norms and biases of layer 2, and says nothing of its linears"):
        check_linears(FP8, [model])
    layer.linear.weight.requires_grad = True
    assert check_linears(FP8, [model]) == []
    layer.linear.weight.requires_grad = False
    assert check_linears(FP8, [model]) == ["decoder.layers.1.mlp.linear_fc1"]


def test_layers_differ(group):
    assert not layers_differ([stack(group)])
    for change in (
        lambda layer: layer.linear.requires_grad_(False),
        lambda layer: layer.norm.bias.requires_grad_(False),
        lambda layer: layer.register_parameter("adapter", torch.nn.Parameter(torch.zeros(1))),
    ):
        model = stack(group)
        change(model.decoder.layers[0])
        assert layers_differ([model])
        change(model.decoder.layers[1])
        assert not layers_differ([model])


def test_a_model_without_a_weight_of_ours(group):
    with pytest.raises(UserError, match="has no GPT transformer layer to train in FP8"):
        check_linears(FP8, [torch.nn.Linear(2, 2)])


def test_a_weight_without_an_engine_may_be_looked_at_but_not_trained(group):
    linear = linear_of(group)
    linear.owned.sink, linear.owned.events = None, UNSEEN
    with torch.no_grad():
        forward(linear)
    with pytest.raises(UserError, match="linear_fc1 is about to train, but no FP8 optimizer has its weight"):
        forward(linear)
    linear.requires_grad_(False)  # a model beside the one that is trained
    forward(linear)
    with pytest.raises(UserError, match="no FP8 optimizer has its weight"):
        linear.owned.take_gradient(None)


def test_an_owned_parameter_is_a_parameter_that_stock_finds_frozen():
    param = torch.nn.Parameter(torch.randn(16, 16))
    owned = own(param)
    assert owned is param and isinstance(owned, torch.nn.Parameter) and not owned.requires_grad and not owned.frozen
    assert type(owned.detach()) is type(owned + 1) is torch.Tensor  # results are plain tensors
    show_to_stock(owned, True)
    assert owned.requires_grad and not owned.frozen
    show_to_stock(owned, False)
    assert isinstance(owned, OwnedParameter) and not owned.requires_grad and not owned.frozen
