"""The weights, gradients and activations that Megatron writes beside its checkpoints are readable at O3."""

import torch
from megatron_runs import TINY_GPT, run_megatron
from test_checkpoints import tensors


def saved(folder, label):
    return torch.load(folder / label / "iter_0000002/mp_rank_00.pth", weights_only=False)["model_chunk0"]


def test_dumps_are_of_values_not_of_fp8_codes(tmp_path):
    dumps = "--save-params-interval 2 --save-dgrads-interval 2 --save-activations-interval 2"
    flags = f"--fp8-level O3 --exit-interval 2 --save {tmp_path} --save-interval 2 {dumps}"
    run_megatron(1, [*TINY_GPT, *flags.split()])
    params, checkpoint = saved(tmp_path, "params"), tensors(tmp_path, 2)
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    for name in linears:
        layers = checkpoint[f"decoder.layers.{name}.weight"]
        for number in range(2):
            value = params[f"decoder.layers.{number}.{name}.weight"]
            assert value.dtype == torch.bfloat16
            expected = layers[number]
            assert value.shape == expected.shape or value.numel() == expected.numel()
            assert torch.equal(value.flatten(), expected.flatten())
            assert value.abs().max() < 1
    assert {value.dtype for value in params.values()} == {torch.bfloat16}
    for label in "dgrads", "activations":
        values = saved(tmp_path, label)
        for name in linears:
            value = values[f"decoder.layers.1.{name}/output0"]
            assert value.shape[:2] == (64, 2) and value.isfinite().all() and value.abs().max() > 0
