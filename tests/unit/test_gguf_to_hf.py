"""tools/gguf_to_hf.py: a folder of a GGUF file, made here by the package gguf, has the model that was written."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from launch import ROOT
from safetensors.torch import load_file

from megatron_fp8.checkpoint import convert

SIZES = {"hidden": 64, "ffn": 96, "heads": 4, "groups": 2, "layers": 2, "vocabulary": 259}
HEAD = SIZES["hidden"] // SIZES["heads"]


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "tools/gguf_to_hf.py", *words], cwd=ROOT, capture_output=True, text=True)


def by_pairs(weight: torch.Tensor) -> torch.Tensor:
    """Rows of a head as llama.cpp keeps them: the two channels that are rotated together lie side by side."""
    return weight.view(-1, 2, HEAD // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write(path) -> dict[str, torch.Tensor]:
    """A tiny Llama in FP32 -> its tensors by Hugging Face's names."""
    gguf = pytest.importorskip("gguf", reason="needs gguf, which writes the file")
    for name in ("transformers", "accelerate"):
        pytest.importorskip(name, reason=f"needs {name}, with which the tool reads", exc_type=ImportError)
    hidden, ffn, wide = SIZES["hidden"], SIZES["ffn"], SIZES["groups"] * HEAD
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SIZES["layers"])
    writer.add_context_length(32)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["groups"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(SIZES["vocabulary"])
    writer.add_tokenizer_model("gpt2")
    words = ["<unk>", "<s>", "</s>", *(chr(256 + i) for i in range(255))]
    words.append(words[3] + words[4])
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * 256)
    writer.add_token_merges([f"{words[3]} {words[4]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"output_norm": ("model.norm", (hidden,))}
    shapes |= {"token_embd": ("model.embed_tokens", (SIZES["vocabulary"], hidden))}
    for i in range(SIZES["layers"]):
        to, own = f"model.layers.{i}.", f"blk.{i}."
        shapes |= {f"{own}attn_norm": (f"{to}input_layernorm", (hidden,))}
        shapes |= {f"{own}ffn_norm": (f"{to}post_attention_layernorm", (hidden,))}
        shapes |= {f"{own}attn_{a}": (f"{to}self_attn.{a}_proj", (wide, hidden)) for a in "kv"}
        shapes |= {f"{own}attn_q": (f"{to}self_attn.q_proj", (hidden, hidden))}
        shapes |= {f"{own}attn_output": (f"{to}self_attn.o_proj", (hidden, hidden))}
        shapes |= {f"{own}ffn_{a}": (f"{to}mlp.{a}_proj", (ffn, hidden)) for a in ("gate", "up")}
        shapes |= {f"{own}ffn_down": (f"{to}mlp.down_proj", (hidden, ffn))}
    held = {}
    for name, (theirs, shape) in shapes.items():
        held[f"{theirs}.weight"] = tensor = torch.randn(shape)
        stored = by_pairs(tensor) if name.endswith(("attn_q", "attn_k")) else tensor
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(stored.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_folder_holds_the_model(tmp_path, capsys):
    held = write(tmp_path / "model.gguf")
    done = run(str(tmp_path / "model.gguf"), str(tmp_path / "hf"))
    assert done.returncode == 0, done.stderr[-1500:]
    assert "LlamaForCausalLM" in done.stdout
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in held.items())
    assert "quantization_config" not in json.loads((tmp_path / "hf/config.json").read_text())
    assert (tmp_path / "hf/tokenizer.json").is_file()
    convert.to_megatron(str(tmp_path / "hf"), str(tmp_path / "megatron"))
    assert "--num-layers 2 --hidden-size 64 " in capsys.readouterr().out


def test_a_mistake_is_one_line(tmp_path):
    (tmp_path / "there.gguf").write_text("x")
    for words, said in (
        (("nowhere.gguf", str(tmp_path / "out")), "nowhere.gguf: no such file; name a GGUF file"),
        ((str(tmp_path / "there.gguf"), str(tmp_path)), "exists already; name a new or an empty folder"),
    ):
        done = run(*words)
        assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr
