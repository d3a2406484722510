"""The converter between real training runs: it reads Megatron's checkpoint, and Megatron loads its output."""

import json

import pytest
import torch
from hf_models import saved, write_folder
from launch import RunFailed
from megatron_runs import TINY_GPT, run_megatron
from safetensors.torch import load_file

from megatron_fp8.checkpoint import convert
from megatron_fp8.checkpoint.hf.config import model_args

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


SMALL = {
    **{"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2},
    **{"kv_channels": 16, "max_position_embeddings": 64, "padded_vocab_size": 256, "vocab_size": 255},
    **{"attention_dropout": 0.0, "init_method_std": 0.02},
}
TIED = {"untie_embeddings_and_output_weights": False}
LLAMA_3_2 = {**TIED, "use_rope_scaling": True, "rope_factor_built": 32.0}
MODELS = {
    "llama": LLAMA_3_2,
    "mistral": {"window_size": (15, 0), "kv_channels": 32},
    "qwen2": {**TIED, "add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True, "kv_channels": 32},
}


def small(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights as a model has them: gains about 1, the rest small."""
    gains = {name for name in tensors if "norm.weight" in name}
    return {name: (1 + 0.1 * t if name in gains else 0.05 * t).bfloat16() for name, t in tensors.items()}


def folder_and_flags(model: str, path, capsys) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What a new folder holds, and the flags of a run that starts from it."""
    held = write_folder(path / "hf", model_args(saved(**SMALL | MODELS[model])), small)
    convert.to_megatron(str(path / "hf"), str(path / "megatron"))
    flags = capsys.readouterr().out.splitlines()[0].split(" with ")[1].split()
    stocks = [flag for flag in TINY_GPT if flag != "--untie-embeddings-and-output-weights"]
    return held, [*stocks, *"--attention-backend auto --ckpt-format torch_dist".split(), *flags]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_is_trained_at_o3_and_comes_back(model, tmp_path, capsys):
    held, flags = folder_and_flags(model, tmp_path, capsys)
    o3 = ["--fp8-level", "O3", *TWO_STEPS, "--save", str(tmp_path / "saved")]
    trained = run_megatron(1, [*flags, *o3])
    # Stock builds another rope for Llama 3.2 (and short sequences hardly see it): --finetune lets it load.
    stock = run_megatron(1, [*flags, "--fp8-level", "O0", *TWO_STEPS, *(["--finetune"] if model == "llama" else [])])
    assert abs(trained.losses[0] - stock.losses[0]) < 0.01 and trained.losses[1] < trained.losses[0]

    convert.to_hf(str(tmp_path / "saved"), str(tmp_path / "back"))
    convert.to_hf(str(tmp_path / "saved"), str(tmp_path / "e4m3"), dtype="e4m3")
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config == json.loads((tmp_path / "hf/config.json").read_text()) and config["model_type"] == model
    back, coded = tensors(tmp_path / "back"), tensors(tmp_path / "e4m3")
    assert {name: t.shape for name, t in back.items()} == {name: t.shape for name, t in held.items()}
    for name, before in held.items():
        change = back[name].float() - before.float()
        assert change.norm() < 0.2 * before.float().norm(), name  # two steps, and E4M3's rounding
        if coded[name].dtype == torch.float8_e4m3fn:
            assert torch.equal(coded[name].double() * coded[f"{name}_scale"].double(), back[name].double())
    for kind in (".bias", "embed_tokens.weight"):  # of stock's optimizer, in the same run
        assert all(not torch.equal(back[name], before) for name, before in held.items() if name.endswith(kind))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_llama_3_2_is_loaded_with_its_factor(tmp_path, capsys):
    _, flags = folder_and_flags("llama", tmp_path, capsys)
    at = flags.index("--rope-scaling-factor")
    line = "--rope-scaling-factor 8.0: the checkpoint's model was built with 32.0; give 32.0, or add --finetune"
    run = [*flags, "--fp8-level", "O2", *TWO_STEPS[:4]]
    loss = run_megatron(1, run).losses[0]
    with pytest.raises(RunFailed, match=line):
        run_megatron(1, [*run[:at], *run[at + 2 :]])
    other = run_megatron(1, [*run[:at], *run[at + 2 :], "--finetune"]).losses[0]
    assert abs(loss - other) < 0.05  # short sequences hardly see the rotations that a factor changes
    with pytest.raises(RunFailed, match=r"with 32\.0; without a level Megatron builds 8\.0: give --fp8-level O1, O2"):
        run_megatron(1, [*flags, "--fp8-level", "O0", *TWO_STEPS[:4]])
