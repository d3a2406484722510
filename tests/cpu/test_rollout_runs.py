"""What a rollout engine gets of a live model: the values of the checkpoint that was saved beside it, bit for bit."""

import pytest
import torch
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron, script_path
from safetensors.torch import load_file

from megatron_fp8.checkpoint.convert import to_hf

TWO = "--train-iters 2 --lr-decay-iters 10 --save-interval 2 --attention-backend auto".split()
LINEARS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("level", "nproc", "flags"),
    [
        ("O3", 2, "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 2"),
        pytest.param("O3", 1, "", marks=slow),
        pytest.param("O3", 2, "--pipeline-model-parallel-size 2", marks=slow),
        pytest.param("O3", 1, "--fp8-bf16-layers *.0.mlp.linear_fc1", marks=slow),
        pytest.param("O3", 2, "--tensor-model-parallel-size 2 --qk-layernorm", marks=slow),
        pytest.param("O3", 2, "--tensor-model-parallel-size 2 --add-qkv-bias", marks=slow),
        pytest.param("O2", 1, "", marks=slow),
    ],
)
def test_the_values_are_the_checkpoint_s(level, nproc, flags, tmp_path):
    (tmp_path / "out").mkdir()
    env = {"PYTHONPATH": script_path(), "FOLDER": str(tmp_path / "out")}
    script = str(ROOT / "tests/scripts/rolled_out.py")
    given = [*TINY_GPT, *TWO, "--fp8-level", level, "--save", str(tmp_path / "run"), *flags.split()]
    run_megatron(nproc, given, script=script, env=env)
    found: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "out").iterdir()):
        for name, tensor in load_file(file).items():
            before = found.setdefault(name, tensor)
            assert torch.equal(before.view(torch.uint8), tensor.view(torch.uint8))  # tensor-parallel ranks agree
    to_hf(str(tmp_path / "run"), str(tmp_path / "hf"), vocab_size=255)
    saved = load_file(tmp_path / "hf/model.safetensors")
    assert saved.keys() == {name for name in found if not name.endswith("_scale")}
    in_e4m3 = set()
    for name, expected in saved.items():
        tensor, scale = found[name], found.get(f"{name}_scale")
        if scale is not None:
            assert tensor.dtype == torch.float8_e4m3fn and scale.log2() % 1 == 0
            in_e4m3.add(name)
            tensor = (tensor.float() * scale).bfloat16()
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name
    linears = {name for name in saved if name.endswith(".weight") and name.split(".")[-2] in LINEARS}
    left_out = {name for name in linears if "layers.0.mlp.gate" in name or "layers.0.mlp.up" in name}
    assert in_e4m3 == (set() if level == "O2" else linears - (left_out if "bf16-layers" in flags else set()))
