"""The converter between real training runs: it reads Megatron's checkpoint, and Megatron loads its output."""

import pytest
import torch
from megatron_runs import TINY_GPT, run_megatron
from safetensors.torch import load_file

from megatron_fp8.checkpoint import convert

LLAMA = [*TINY_GPT, *"--vocab-size 256 --group-query-attention --num-query-groups 2 --ckpt-format torch_dist".split()]
TWO_STEPS = "--train-iters 2 --lr-warmup-iters 0 --save-interval 2".split()


def tensors(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_megatron_goes_on_from_what_came_back(tmp_path, capsys):
    trained = run_megatron(1, [*LLAMA, *TWO_STEPS, "--fp8-level", "O1", "--save", str(tmp_path / "saved")])
    convert.to_hf(str(tmp_path / "saved"), str(tmp_path / "hf"))
    capsys.readouterr()
    convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "back"))
    flags = capsys.readouterr().out.split(" with ")[1].split()  # --load, and the model's flags
    assert flags[:2] == ["--load", str(tmp_path / "back")]

    level = "--fp8-level O1 --train-iters 1 --lr-warmup-iters 0".split()
    weights = "--finetune --no-load-optim --no-load-rng --load".split()
    original = run_megatron(1, [*LLAMA, *level, *weights, str(tmp_path / "saved")])
    (tmp_path / "vocab.json").write_text("{}")
    flags += ["--vocab-file", str(tmp_path / "vocab.json"), "--data-parallel-random-init"]  # stock compares it
    converted = run_megatron(1, [*LLAMA, *level, *flags])
    assert converted.losses == original.losses and converted.grad_norms == original.grad_norms
    assert original.losses[0] < trained.losses[0] - 0.05  # on the same batch: the trained weights were loaded
    assert run_megatron(1, [*LLAMA, *level[2:], *flags]).losses[0] < trained.losses[0] - 0.05

    convert.to_hf(str(tmp_path / "back"), str(tmp_path / "again"))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_o3_weights_lose_nothing_in_e4m3(tmp_path):
    """Saved by two tensor-parallel ranks: their parts of a fused weight must come into order."""
    split = "--fp8-level O3 --tensor-model-parallel-size 2 --save".split()
    run_megatron(2, [*LLAMA, *TWO_STEPS, *split, str(tmp_path / "saved")])
    convert.to_hf(str(tmp_path / "saved"), str(tmp_path / "bf16"))
    convert.to_hf(str(tmp_path / "saved"), str(tmp_path / "e4m3"), dtype="e4m3")
    exact, coded = tensors(tmp_path / "bf16"), tensors(tmp_path / "e4m3")
    linears = [name for name, tensor in coded.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(linears) == 2 * 7
    for name in linears:
        assert torch.equal(coded[name].double() * coded[f"{name}_scale"].double(), exact[name].double())
