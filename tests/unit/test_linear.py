"""The FP8 linear, what can be tested of it without a model."""

from types import SimpleNamespace

from megatron_fp8.engine.owned import in_forward_order


def test_weights_in_the_order_of_the_forward_pass():
    def weight(path, layer):
        return SimpleNamespace(path=path, layer_number=layer)

    attention, mlp = "decoder.layers.self_attention", "decoder.layers.mlp"
    registered = [f"{attention}.linear_proj", f"{attention}.linear_qkv", f"{mlp}.linear_fc1", f"{mlp}.linear_fc2"]
    forward = [registered[1], registered[0], *registered[2:]]
    weights = [weight(path, layer) for layer in (1, 2) for path in registered]
    assert [(w.path, w.layer_number) for w in in_forward_order(weights)] == [(p, n) for n in (1, 2) for p in forward]
