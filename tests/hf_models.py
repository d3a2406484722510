"""Small models as arguments of a Megatron checkpoint and as Hugging Face folders."""

import json
from argparse import Namespace
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_fp8.checkpoint.hf.config import config_of
from megatron_fp8.checkpoint.hf.families import parameters

SAVED = {  # the arguments in a stock checkpoint of a small Llama
    "num_layers": 2,
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_router_topk": None,
    "hidden_size": 24,
    "ffn_hidden_size": 40,
    "num_attention_heads": 6,
    "group_query_attention": True,
    "num_query_groups": 3,
    "kv_channels": 4,
    "max_position_embeddings": 32,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "window_size": None,
    "bias_gelu_fusion": False,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.0,
    "init_method_std": 0.01,
    "padded_vocab_size": 128,
    "vocab_size": 101,
    "tokenizer_type": "NullTokenizer",
    "softmax_type": "vanilla",
    "glu_linear_offset": 0.0,
}
NEOX = {
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "group_query_attention": False,
    "bias_gelu_fusion": True,
    "rotary_percent": 0.5,
}
GPT2 = NEOX | {
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
    "rotary_percent": 1.0,
    "rotary_base": 10000,
}
MISTRAL = {"window_size": (11, 0), "kv_channels": 6}
QWEN2 = {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False}
QWEN3 = {"qk_layernorm": True, "kv_channels": 6}
EXPERTS = {"num_experts": 3, "moe_ffn_hidden_size": 20, "moe_router_topk": 2, "moe_layer_freq": 1}
FAMILY_CHANGES = {
    **{"llama": {}, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3},
    "mixtral": EXPERTS | MISTRAL | {"ffn_hidden_size": 20},
    "qwen3_moe": EXPERTS | QWEN3 | {"moe_router_pre_softmax": True},
    **{"gpt_neox": NEOX, "gpt2": GPT2},
}


def saved(**changes) -> Namespace:
    return Namespace(**SAVED | changes)


def write_folder(folder: Path, args: Namespace, change=lambda tensors: tensors) -> dict[str, torch.Tensor]:
    """Make a Hugging Face folder with random weights. Returns its tensors."""
    tensors = {}
    for p in parameters(args):
        for layer in range(args.num_layers if p.is_stacked else 1):
            for name, part in zip(p.names, p.split(torch.randn(p.shape).bfloat16(), args), strict=True):
                tensors[name.format(layer)] = part.clone(memory_format=torch.contiguous_format)
    tensors = change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(args)))
    return tensors


def write_llama(folder: Path) -> dict[str, torch.Tensor]:
    """Make a folder of a tiny Llama that trains: 259 tokens, weights of 0.05, norms of 1."""
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2}
    sizes |= {"kv_channels": 16}
    sizes |= {"max_position_embeddings": 512, "padded_vocab_size": 384, "vocab_size": 259, "attention_dropout": 0.0}
    args = saved(**sizes, untie_embeddings_and_output_weights=False)

    def small(tensors):
        return {name: torch.ones_like(t) if "norm" in name else 0.05 * t for name, t in tensors.items()}

    return write_folder(folder, args, small)
