"""Runs docs/post_training.md's commands unchanged, in this checkout: all of its `sh` blocks in one shell, on a tiny
model.

Stand-ins (tests/stand_ins) take the places of the packages `datasets` and `transformers`.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from hf_models import write_llama
from launch import ROOT, parse_step
from safetensors.torch import load_file

BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/post_training.md").read_text(), re.S)
SMALL = {"LENGTH": "256", "BATCH": "4", "STEPS": "6", "LOG": "1", "RATE": "1e-3", "GPUS": "1"}


@pytest.mark.slow
def test_every_command_runs(tmp_path):
    assert len(BLOCKS) == 7
    before = write_llama(tmp_path / "hf")
    for file in "tokenizer.json", "generation_config.json":
        (tmp_path / "hf" / file).write_text("{}")
    script = "set -e\n" + "\n".join(f"echo '== {number}'\n{block}" for number, block in enumerate(BLOCKS))
    bins = os.pathsep.join([str(ROOT / ".venv/bin"), str(os.path.dirname(sys.executable)), os.environ["PATH"]])
    env = {**os.environ, **SMALL, "HF": str(tmp_path / "hf"), "OUT": str(tmp_path / "out"), "PATH": bins,
           "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/stand_ins")]), "CUDA_VISIBLE_DEVICES": "",
           "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    _, _, packed, tuned, back, adapted = re.split(r"== \d\n", done.stdout)[1:7]
    assert re.search(r"400 conversations in \d+ lines of 256 tokens, 9\d % filled", packed)
    losses = [step.loss for step in map(parse_step, tuned.splitlines()) if step]
    assert "[fp8] O3: the GEMMs of 8 of 8 linears are in FP8" in tuned
    sft = [float(loss) for loss in re.findall(r"lm loss: (\S+)", tuned)]
    dpo = [float(loss) for loss in re.findall(r"dpo loss: (\S+)", tuned)]
    assert losses and sft[-1] < sft[0] - 0.1 and dpo[0] == pytest.approx(0.6931, abs=1e-4), (sft, dpo)
    assert "hf" in back
    of_adapters = [float(loss) for loss in re.findall(r"lm loss: (\S+)", adapted)]
    assert "frozen by the script, without gradients and states: decoder.layers.0-1" in adapted
    assert of_adapters[0] == pytest.approx(sft[0], abs=1e-2) and of_adapters[-1] < of_adapters[0], of_adapters
    assert re.search(r"--merge-adapters: 4 kinds of linears; [\d.]+ % of the change", adapted)
    assert (tmp_path / "out/lora-hf/model.safetensors").is_file()
    for file in "tokenizer.json", "generation_config.json":
        assert (tmp_path / "out/hf" / file).is_file() and (tmp_path / "out/lora-hf" / file).is_file()
    config = json.loads((tmp_path / "out/hf/config.json").read_text())
    assert config["quantization_config"]["format"] == "float-quantized" and config["vocab_size"] == 259
    after = load_file(tmp_path / "out/hf/model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert after[name].dtype == torch.float8_e4m3fn
    values = after[name].float() * after[f"{name}_scale"].float()
    apart = (values - before[name].float()).norm() / before[name].float().norm()
    assert 1e-3 < apart < 0.5
