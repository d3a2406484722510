"""Names and layouts of tensors in Hugging Face's model families that match Megatron's GPT.

These families compute exactly what a Megatron GPT with these flags computes:

    llama      --normalization RMSNorm, --swiglu, --position-embedding-type rope; any grouping of queries;
               with or without biases (attention_bias and mlp_bias)
    mistral    llama without biases, with --window-size W,0: a token sees itself and W before it, and
               sliding_window counts both, W + 1.  (A Mistral without a window is a llama.)
    qwen2      llama with --add-qkv-bias --disable-bias-linear
    qwen3      llama without biases, with --qk-layernorm: one norm of a head's channels for all query heads, one
               for all keys
    mixtral    llama without biases, with --num-experts in every layer: probabilities are those of the chosen experts
               alone, as without --moe-router-pre-softmax; with --window-size or not
    qwen3_moe  qwen3 likewise; norm_topk_prob is true without --moe-router-pre-softmax, false with it
    gpt_neox   LayerNorm, GELU, rope (--rotary-percent too), biases; without its parallel residual
    gpt2       LayerNorm, GELU, learned positions, biases

A Megatron checkpoint stacks a parameter of all layers along a new first dimension; the layouts below are one
layer's.  h: heads, g: query groups, d: channels per head, f: FFN size; rows of a weight are its outputs:

    linear_qkv   [g, h/g + 2, d] rows: each group's queries, then its key, then its value.
                 llama: q (h d rows), k (g d), v (g d).  gpt2: q, k, v in one tensor.
                 gpt_neox (g = h): as Megatron.
    linear_fc1   gate above up, 2 f rows.  llama: two tensors.  (--swiglu computes silu(gate) * up.)
    experts      [E, ...] of these; each expert has tensors of its own in both families.
    gpt2's four linears are stored transposed.

An E4M3 weight is payload (float8_e4m3fn) times weight_scale (float32, one number), the compressed-tensors format.  The
scale is a power of two, and the parts of one Megatron weight share it: a loader that fuses q, k, v or gate, up again
does not round a second time.  It is the smallest scale with which no element exceeds 448.  So a weight that is E4M3
times a power of two, as at level O3, loses nothing; in other weights an element's error is at most 2^-4 of it, or
2^-10 of the scale if that is more.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import UserError
from ...numerics import E4M3, ScaledTensor
from ...numerics.scaling import power_of_two_scale
from ...ops import amax, quantize
from .schema import Gpt2, Llama, LlamaLike, Mistral, Mixtral, Neox, Qwen2, Qwen3, Qwen3Moe

# Prefixes of Megatron's parameter names; "weight" or "bias" follows.
_WORDS = "embedding.word_embeddings."
_POSITIONS = "embedding.position_embeddings."
_NORM1 = "decoder.layers.self_attention.linear_qkv.layer_norm_"
_QKV = "decoder.layers.self_attention.linear_qkv."
_QNORM = "decoder.layers.self_attention.q_layernorm."
_KNORM = "decoder.layers.self_attention.k_layernorm."
_PROJ = "decoder.layers.self_attention.linear_proj."
_NORM2 = "decoder.layers.mlp.linear_fc1.layer_norm_"
_FC1 = "decoder.layers.mlp.linear_fc1."
_FC2 = "decoder.layers.mlp.linear_fc2."
_NORM_MOE = "decoder.layers.pre_mlp_layernorm."
_ROUTER = "decoder.layers.mlp.router."
_EXPERT_FC1 = "decoder.layers.mlp.experts.experts.linear_fc1."
_EXPERT_FC2 = "decoder.layers.mlp.experts.experts.linear_fc2."
_NORM = "decoder.final_layernorm."
OUTPUT = "output_layer."
LINEARS = (_QKV, _PROJ, _FC1, _FC2)
EXPERT_LINEARS = (_EXPERT_FC1, _EXPERT_FC2)
_NUMBER = "#"  # of an expert


def split_qkv(tensor: torch.Tensor, args: Namespace) -> list[torch.Tensor]:
    """linear_qkv's weight (rows, hidden) or bias (rows,) -> q, k, v."""
    groups = tensor.unflatten(0, (args.num_query_groups, -1, args.kv_channels))
    return [groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)]


def merge_qkv(parts: list[torch.Tensor], args: Namespace) -> torch.Tensor:
    """The reverse of split_qkv."""
    groups = [part.unflatten(0, (args.num_query_groups, -1, args.kv_channels)) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class Layout:
    """How one layer's parameter maps to a family's tensors: split makes them, merge joins them."""

    split: Callable[[torch.Tensor, Namespace], list[torch.Tensor]]
    merge: Callable[[list[torch.Tensor], Namespace], torch.Tensor]


# .t() does not change a bias.
AS_IS = Layout(lambda tensor, args: [tensor], lambda parts, args: parts[0])
TRANSPOSED = Layout(lambda tensor, args: [tensor.t()], lambda parts, args: parts[0].t())
QKV = Layout(split_qkv, merge_qkv)
GATE_UP = Layout(lambda tensor, args: list(tensor.chunk(2)), lambda parts, args: torch.cat(parts))
EXPERTS = Layout(lambda tensor, args: list(tensor), lambda parts, args: torch.stack(parts))
EXPERTS_GATE_UP = Layout(
    lambda tensor, args: [part for expert in tensor for part in expert.chunk(2)],
    lambda parts, args: torch.stack([torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)]),
)
TRANSPOSED_QKV = Layout(
    lambda tensor, args: [torch.cat(split_qkv(tensor, args)).t()],
    lambda parts, args: merge_qkv(list(parts[0].t().chunk(3)), args),
)


@dataclass(frozen=True)
class Family:
    """One of Hugging Face's model types.

    modules: {Megatron's module: its modules}, several if Megatron fuses them; {} is the layer.  schema: of its
    config.json.  keys: {Megatron's argument: config.json's key}.  needs: {argument: the value that it must have}.
    """

    model_type: str
    architecture: str
    modules: Mapping[str, tuple[str, ...]]
    layouts: Mapping[str, Layout]
    schema: type[LlamaLike] | type[Neox] | type[Gpt2]
    keys: Mapping[str, str]
    needs: Mapping[str, Any]


_KEYS = {  # most families'
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "init_method_std": "initializer_range",
    "attention_dropout": "attention_dropout",
    "vocab_size": "vocab_size",
}
_PLAIN_ATTENTION: dict[str, Any] = {"qk_layernorm": False, "window_size": None}
_LAYER_NORM_GELU = {
    **{"normalization": "LayerNorm", "swiglu": False, "use_rope_scaling": False},
    **{"add_bias_linear": True, "add_qkv_bias": True},
    **_PLAIN_ATTENTION,
}
_RMS_NORM_SWIGLU: dict[str, Any] = {
    **{"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "rotary_percent": 1.0}
}
_LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    modules={
        _WORDS: ("model.embed_tokens.",),
        _NORM1: ("model.layers.{}.input_layernorm.",),
        _QKV: tuple(f"model.layers.{{}}.self_attn.{part}_proj." for part in "qkv"),
        _PROJ: ("model.layers.{}.self_attn.o_proj.",),
        _NORM2: ("model.layers.{}.post_attention_layernorm.",),
        _FC1: ("model.layers.{}.mlp.gate_proj.", "model.layers.{}.mlp.up_proj."),
        _FC2: ("model.layers.{}.mlp.down_proj.",),
        _NORM: ("model.norm.",),
        OUTPUT: ("lm_head.",),
    },
    layouts={_QKV: QKV, _FC1: GATE_UP},
    schema=Llama,
    keys={
        **_KEYS,
        "num_query_groups": "num_key_value_heads",
        "kv_channels": "head_dim",
        "layernorm_epsilon": "rms_norm_eps",
    },
    needs={**_RMS_NORM_SWIGLU, **_PLAIN_ATTENTION},
)
_NO_BIAS = {"add_bias_linear": False, "add_qkv_bias": False}
_MISTRAL = replace(
    _LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    schema=Mistral,
    needs={**_RMS_NORM_SWIGLU, **_NO_BIAS, "qk_layernorm": False},
)
_QWEN2 = replace(
    _LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    schema=Qwen2,
    needs={**_LLAMA.needs, "add_bias_linear": False, "add_qkv_bias": True},
)
_QWEN3 = replace(
    _LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    modules={
        **_LLAMA.modules,
        _QNORM: ("model.layers.{}.self_attn.q_norm.",),
        _KNORM: ("model.layers.{}.self_attn.k_norm.",),
    },
    schema=Qwen3,
    needs={**_LLAMA.needs, **_NO_BIAS, "qk_layernorm": True},
)


def _of_experts(router: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """The modules of a layer's second half, by their names in it."""
    layer = "model.layers.{}."
    expert = f"{layer}{router.rpartition('.')[0]}.experts.{_NUMBER}."
    return {
        _NORM_MOE: (f"{layer}post_attention_layernorm.",),
        _ROUTER: (f"{layer}{router}.",),
        _EXPERT_FC1: (f"{expert}{gate}.", f"{expert}{up}."),
        _EXPERT_FC2: (f"{expert}{down}.",),
    }


def _with_experts(modules: Mapping[str, tuple[str, ...]], second: Mapping[str, tuple[str, ...]]) -> dict:
    """modules with `second` in the place of a dense layer's second half, in the model's order."""
    first = {name: names for name, names in modules.items() if name not in (_NORM2, _FC1, _FC2, _NORM, OUTPUT)}
    return {**first, **second, **{name: modules[name] for name in (_NORM, OUTPUT)}}


_EXPERT_LAYOUTS = {_QKV: QKV, _EXPERT_FC1: EXPERTS_GATE_UP, _EXPERT_FC2: EXPERTS}
_SOFTMAX = {"moe_router_score_function": "softmax"}
_WITHOUT_FFN = {name: key for name, key in _LLAMA.keys.items() if name != "ffn_hidden_size"}
_MIXTRAL = replace(
    _MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    modules=_with_experts(_LLAMA.modules, _of_experts("block_sparse_moe.gate", "w1", "w3", "w2")),
    layouts=_EXPERT_LAYOUTS,
    schema=Mixtral,
    keys={
        **_WITHOUT_FFN,
        "moe_ffn_hidden_size": "intermediate_size",
        "num_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
    },
    needs={**_MISTRAL.needs, **_SOFTMAX, "moe_router_pre_softmax": False},
)
_QWEN3_MOE = replace(
    _QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    modules=_with_experts(_QWEN3.modules, _of_experts("mlp.gate", "gate_proj", "up_proj", "down_proj")),
    layouts=_EXPERT_LAYOUTS,
    schema=Qwen3Moe,
    keys={
        **_LLAMA.keys,
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "num_experts": "num_experts",
        "moe_router_topk": "num_experts_per_tok",
    },
    needs={**_QWEN3.needs, **_SOFTMAX},
)
_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    modules={
        _WORDS: ("gpt_neox.embed_in.",),
        _NORM1: ("gpt_neox.layers.{}.input_layernorm.",),
        _QKV: ("gpt_neox.layers.{}.attention.query_key_value.",),
        _PROJ: ("gpt_neox.layers.{}.attention.dense.",),
        _NORM2: ("gpt_neox.layers.{}.post_attention_layernorm.",),
        _FC1: ("gpt_neox.layers.{}.mlp.dense_h_to_4h.",),
        _FC2: ("gpt_neox.layers.{}.mlp.dense_4h_to_h.",),
        _NORM: ("gpt_neox.final_layer_norm.",),
        OUTPUT: ("embed_out.",),
    },
    layouts={},
    schema=Neox,
    keys={**_KEYS, "hidden_dropout": "hidden_dropout", "layernorm_epsilon": "layer_norm_eps"},
    needs={**_LAYER_NORM_GELU, "position_embedding_type": "rope"},
)
_GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    modules={
        _WORDS: ("transformer.wte.",),
        _POSITIONS: ("transformer.wpe.",),
        _NORM1: ("transformer.h.{}.ln_1.",),
        _QKV: ("transformer.h.{}.attn.c_attn.",),
        _PROJ: ("transformer.h.{}.attn.c_proj.",),
        _NORM2: ("transformer.h.{}.ln_2.",),
        _FC1: ("transformer.h.{}.mlp.c_fc.",),
        _FC2: ("transformer.h.{}.mlp.c_proj.",),
        _NORM: ("transformer.ln_f.",),
        OUTPUT: ("lm_head.",),
    },
    layouts={_QKV: TRANSPOSED_QKV, _PROJ: TRANSPOSED, _FC1: TRANSPOSED, _FC2: TRANSPOSED},
    schema=Gpt2,
    keys={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "ffn_hidden_size": "n_inner",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "init_method_std": "initializer_range",
        "attention_dropout": "attn_pdrop",
        "hidden_dropout": "resid_pdrop",
        "layernorm_epsilon": "layer_norm_epsilon",
        "vocab_size": "vocab_size",
    },
    needs={**_LAYER_NORM_GELU, "position_embedding_type": "learned_absolute"},
)
_ALL = (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _MIXTRAL, _QWEN3_MOE, _NEOX, _GPT2)
FAMILIES = {family.model_type: family for family in _ALL}


def family_of(args: Namespace) -> Family:
    """The family for a model's norms, biases and positions; hf/config.py checks the family's other needs."""
    if args.normalization == "RMSNorm":
        if args.num_experts is not None:
            return _QWEN3_MOE if args.qk_layernorm else _MIXTRAL
        if args.qk_layernorm:
            return _QWEN3
        if args.add_qkv_bias and not args.add_bias_linear:
            return _QWEN2
        return _LLAMA if args.window_size is None else _MISTRAL
    return _GPT2 if args.position_embedding_type == "learned_absolute" else _NEOX


@dataclass(frozen=True)
class Parameter:
    """One tensor of a Megatron checkpoint and its names in a family. If the names contain {}, layers are stacked.

    shape: one layer's, with the vocabulary padded.
    """

    name: str
    names: tuple[str, ...]
    layout: Layout
    shape: tuple[int, ...]

    @property
    def is_stacked(self) -> bool:
        return "{}" in self.names[0]

    @property
    def has_vocabulary(self) -> bool:
        return self.name.startswith((_WORDS, OUTPUT))

    @property
    def is_linear_weight(self) -> bool:
        return self.name in tuple(f"{module}weight" for module in LINEARS)

    def split(self, tensor: torch.Tensor, args: Namespace) -> list[torch.Tensor]:
        """One layer's tensor -> the tensors of `names`, as views if possible."""
        return self.layout.split(tensor[: args.vocab_size] if self.has_vocabulary else tensor, args)

    def merge(self, parts: list[torch.Tensor], args: Namespace) -> torch.Tensor:
        """The reverse of split. parts: of shapes `part_shapes`. Rows that pad the vocabulary become zero."""
        tensor = self.layout.merge(parts, args)
        if self.has_vocabulary:
            tensor = torch.cat([tensor, tensor.new_zeros(self.shape[0] - len(tensor), *tensor.shape[1:])])
        return tensor

    def part_shapes(self, args: Namespace) -> list[tuple[int, ...]]:
        """The shapes of the tensors that `split` returns."""
        return [tuple(part.shape) for part in self.split(torch.empty(self.shape, device="meta"), args)]


def parameters(args: Namespace) -> list[Parameter]:
    """Every tensor of a model, in the model's order. args: from model_args or args_of."""
    family = family_of(args)
    hidden = args.hidden_size
    rows = {
        _WORDS: args.padded_vocab_size,
        _POSITIONS: args.max_position_embeddings,
        _QKV: (args.num_attention_heads + 2 * args.num_query_groups) * args.kv_channels,
        _FC1: args.ffn_hidden_size * (2 if args.swiglu else 1),
        OUTPUT: args.padded_vocab_size,
        _QNORM: args.kv_channels,
        _KNORM: args.kv_channels,
        _ROUTER: args.num_experts,
        _EXPERT_FC1: 2 * (args.moe_ffn_hidden_size or 0),
    }
    columns = {
        **{_PROJ: args.num_attention_heads * args.kv_channels, _FC2: args.ffn_hidden_size},
        _EXPERT_FC2: args.moe_ffn_hidden_size,
    }
    found = []
    for module, names in family.modules.items():
        is_norm, is_linear = module in (_NORM1, _QNORM, _KNORM, _NORM2, _NORM_MOE, _NORM), module in LINEARS
        biased = args.add_qkv_bias if module == _QKV else args.add_bias_linear
        has_bias = args.normalization == "LayerNorm" if is_norm else is_linear and biased
        if module == OUTPUT and not args.untie_embeddings_and_output_weights:
            continue
        for kind in ("weight", "bias") if has_bias else ("weight",):
            shape = [rows.get(module, hidden)]
            if kind == "weight" and not is_norm:
                shape.append(columns.get(module, hidden))
            if module in EXPERT_LINEARS:
                shape = [args.num_experts, *shape]
                names = tuple(name.replace(_NUMBER, str(i)) for i in range(args.num_experts) for name in names)
            layout = family.layouts.get(module, AS_IS)
            found.append(Parameter(module + kind, tuple(name + kind for name in names), layout, tuple(shape)))
    return found


def to_e4m3(weight: torch.Tensor) -> ScaledTensor:
    """Quantize a weight of any shape and float dtype with one power-of-two scale.  UserError for a NaN or infinity."""
    largest = amax(weight)
    if not largest.isfinite():
        raise UserError("contains a NaN or an infinity, which --dtype e4m3 cannot store; use --dtype bf16")
    scale = power_of_two_scale(largest, E4M3)
    return ScaledTensor(quantize(weight, E4M3, scale), scale.reciprocal())
