"""Converts Megatron's model arguments to config.json, and back.

Both conversions use one namespace with Megatron's argument names. `model_args` makes it from a checkpoint's saved
arguments, `args_of` from a config.json.  A setting with which the two models would compute different results is
refused here, before a tensor is read.

A checkpoint does not contain the tokenizer: its files must be copied by hand, and bos_token_id and eos_token_id are
null.
"""

import shlex
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from ...errors import UserError
from ...flags.rope import STOCK_FACTOR
from .families import FAMILIES, OUTPUT, Family, family_of
from .schema import (
    TANH_GELU,
    Gpt2,
    Llama,
    LlamaLike,
    Mistral,
    Mixtral,
    ModelArguments,
    Neox,
    Qwen3Moe,
    Rope,
    Section,
    as_json,
    checked,
    constants,
    shown,
)

VOCABULARY_MULTIPLE = 128  # Megatron's default of --make-vocab-size-divisible-by
# {argument: flag} for all arguments of the model. A flag that ends in "!" takes no value and means False.
_FLAGS = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "group_query_attention": "--group-query-attention",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "max_position_embeddings": "--max-position-embeddings",
    "normalization": "--normalization",
    "layernorm_epsilon": "--norm-epsilon",
    "swiglu": "--swiglu",
    "add_bias_linear": "--disable-bias-linear!",
    "add_qkv_bias": "--add-qkv-bias",
    "qk_layernorm": "--qk-layernorm",
    "window_size": "--window-size",
    "bias_gelu_fusion": "--no-bias-gelu-fusion!",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "position_embedding_type": "--position-embedding-type",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "use_rope_scaling": "--use-rope-scaling",
    "rope_factor_built": "--rope-scaling-factor",
    "attention_dropout": "--attention-dropout",
    "hidden_dropout": "--hidden-dropout",
    "init_method_std": "--init-method-std",
    "num_experts": "--num-experts",
    "moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "moe_router_topk": "--moe-router-topk",
    "moe_router_pre_softmax": "--moe-router-pre-softmax",
}
# Arguments that must be off: no family computes what they switch on.
_OFF = (
    "multi_latent_attention mtp_num_layers qk_l2_norm layernorm_zero_centered_gamma "
    "apply_residual_connection_post_layernorm softmax_type window_attn_skip_freq rotary_interleaved squared_relu "
    "quick_geglu rotary_seq_len_interpolation_factor no_rope_freq attention_output_gate glu_linear_offset use_mup "
    "activation_func_clamp_value experimental_attention_variant linear_attention_freq hybrid_layer_pattern "
    "moe_shared_expert_intermediate_size moe_latent_size moe_router_enable_expert_bias moe_router_num_groups "
    "moe_router_topk_scaling_factor moe_expert_capacity_factor moe_apply_probs_on_input "
    "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json spec"
).split()
_USE_VOCAB_SIZE = (None, "NullTokenizer", "TikTokenizer")  # other tokenizers ignore --vocab-size
# Megatron builds only this with --use-rope-scaling, beside the factor: it has no flags of these.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def model_args(saved: Namespace, vocab_size: int | None = None, file: str = "the checkpoint") -> Namespace:
    """The model's arguments among those that a checkpoint was saved with.

    vocab_size: the number of real tokens; None: the arguments' number, or else the padded one.  file: the checkpoint's
    name in error lines.  Raises UserError, which names the flag, for a model that no family computes.
    """
    for name in _OFF:
        value = getattr(saved, name, None)
        if value and value != "vanilla":
            flag = "apply_layernorm_1p" if name == "layernorm_zero_centered_gamma" else name
            said = "no Hugging Face model known here computes this"
            raise UserError(f"--{flag.replace('_', '-')} {shown(str(value))}: {said}")
    given = {name: value for name in ModelArguments.model_fields if (value := getattr(saved, name, None)) is not None}
    if given.get("num_experts") and (frequency := getattr(saved, "moe_layer_freq", 1)) != 1 and 0 in _listed(frequency):
        said = "no Hugging Face model known here has experts in some layers only"
        raise UserError(f"--moe-layer-freq {shown(str(frequency))}: {said}")
    missing = "is missing from its arguments; save it with megatron-core 0.19"
    args = Namespace(**checked(ModelArguments, given, file, missing).model_dump())
    args.rotary_base = int(args.rotary_base)
    if args.num_experts is None:
        args.moe_ffn_hidden_size = args.moe_router_topk = None
    elif args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size  # as Megatron has it
    if not args.group_query_attention:
        args.num_query_groups = args.num_attention_heads
    args.add_qkv_bias |= args.add_bias_linear  # as Megatron has it
    known = args.vocab_size if getattr(saved, "tokenizer_type", None) in _USE_VOCAB_SIZE else None
    args.vocab_size = vocab_size or known or args.padded_vocab_size
    if args.vocab_size > args.padded_vocab_size:
        raise UserError(f"--vocab-size {args.vocab_size}: the checkpoint has rows for {args.padded_vocab_size} tokens")
    _check(args)
    return args


def _listed(frequency: Any) -> list:
    """Megatron's --moe-layer-freq as a number a layer; of a number above 1: with a layer without experts."""
    return list(frequency) if isinstance(frequency, list | tuple) else [0]


def _check(args: Namespace) -> None:
    """Refuse arguments that their family does not compute."""
    family = family_of(args)
    chosen = f"{family.model_type} (chosen for --normalization {args.normalization}"
    chosen += f" --position-embedding-type {args.position_embedding_type}"
    asked = {"qwen3": " --qk-layernorm", "qwen2": " --add-qkv-bias", "mistral": " --window-size"}
    asked |= {"mixtral": " --num-experts", "qwen3_moe": " --num-experts --qk-layernorm"}
    chosen += f"{asked.get(family.model_type, '')})"
    needs = dict(family.needs)
    if not issubclass(family.schema, LlamaLike):
        needs |= {"group_query_attention": False}
        needs |= {"kv_channels": args.hidden_size // args.num_attention_heads}
    for name, value in needs.items():
        found = getattr(args, name)
        if found != value:
            flag = _FLAGS.get(name, f"--{name.replace('_', '-')}").rstrip("!")
            raise UserError(f"{flag}: Hugging Face's {chosen} has only {name} = {value}, this model has {found}")


def config_of(args: Namespace) -> dict[str, Any]:
    """config.json for a model with BF16 weights. args: from model_args or args_of."""
    family = family_of(args)
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {key: getattr(args, name) for name, key in family.keys.items()}
    config |= constants(family.schema)
    config |= {"tie_word_embeddings": not args.untie_embeddings_and_output_weights, "torch_dtype": "bfloat16"}
    config |= {"bos_token_id": None, "eos_token_id": None}
    gelu = "gelu_new" if args.bias_gelu_fusion else "gelu"
    if issubclass(family.schema, LlamaLike):
        config |= {"rope_theta": float(args.rotary_base), "rope_scaling": None}
        if args.use_rope_scaling:
            config["rope_scaling"] = {"rope_type": "llama3", "factor": args.rope_factor_built, **_LLAMA3_ROPE}
        if family.schema is Llama:
            config |= {"attention_bias": args.add_bias_linear, "mlp_bias": args.add_bias_linear}
        elif family.schema in (Mistral, Mixtral):
            config["sliding_window"] = None if args.window_size is None else args.window_size[0] + 1
        elif family.schema is Qwen3Moe:
            config |= {"norm_topk_prob": not args.moe_router_pre_softmax, "mlp_only_layers": []}
    elif family.model_type == "gpt_neox":
        config |= {"hidden_act": gelu, "rotary_emb_base": args.rotary_base, "rotary_pct": args.rotary_percent}
    else:
        config |= {"activation_function": gelu, "embd_pdrop": args.hidden_dropout}
    return config


def args_of(values: Mapping[str, Any], file: str = "config.json") -> Namespace:
    """Megatron's arguments for a config.json.  Raises UserError for a model that Megatron cannot compute.

    file: its name in error lines.
    """
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        said = f"model_type {as_json(values.get('model_type'))} is not supported; use one of {', '.join(FAMILIES)}"
        raise UserError(f"{file}: {said}")
    # Other nulls are absent keys.
    given = {key: value for key, value in values.items() if value is not None or key in family.schema.nullable}
    config = checked(family.schema, given, file, f"is missing, and a {family.model_type} model needs it")
    args = Namespace(**{name: getattr(config, key) for name, key in family.keys.items()})
    if isinstance(config, Qwen3Moe):
        args.moe_router_pre_softmax = not config.norm_topk_prob
    none = dict.fromkeys(("num_experts", "moe_ffn_hidden_size", "moe_router_topk"))
    defaults = {
        **none,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "ffn_hidden_size": getattr(args, "moe_ffn_hidden_size", None) or 4 * args.hidden_size,
        "num_query_groups": args.num_attention_heads,
        "kv_channels": args.hidden_size // args.num_attention_heads,
        "hidden_dropout": 0.0,
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "rope_factor_built": STOCK_FACTOR,
        "bias_gelu_fusion": False,
        **family.needs,
    }
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.untie_embeddings_and_output_weights = not config.tie_word_embeddings
    args.group_query_attention = args.num_query_groups != args.num_attention_heads
    args.padded_vocab_size = -(-args.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if isinstance(config, Llama):
        args.add_bias_linear = config.attention_bias
        if config.mlp_bias != config.attention_bias:
            raise UserError(f"{file}: mlp_bias {config.mlp_bias} with attention_bias {config.attention_bias} is not "
                            "supported; Megatron has biases in all linears or in none")  # fmt: skip
        args.add_qkv_bias = args.add_bias_linear
    elif isinstance(config, Mistral | Mixtral):
        args.window_size = None if config.sliding_window is None else (config.sliding_window - 1, 0)
    elif isinstance(config, Neox | Gpt2):
        gelu = config.hidden_act if isinstance(config, Neox) else config.activation_function
        args.bias_gelu_fusion = gelu in TANH_GELU
    if isinstance(config, LlamaLike | Neox):
        _read_rope(args, config, file)
    _check_heads(args, config, family.keys, file)
    return args


def _read_rope(args: Namespace, config: LlamaLike | Neox, file: str) -> None:
    """Read rotary positions in transformers 4's form of config.json or in 5's."""
    rope = config.rope_parameters or Rope()
    if isinstance(config, LlamaLike):
        base, part = config.rope_theta, config.partial_rotary_factor
    else:
        base, part = config.rotary_emb_base, config.rotary_pct
    args.rotary_base = int(rope.rope_theta or base)
    args.rotary_percent = rope.partial_rotary_factor or part
    if isinstance(config, LlamaLike) and args.rotary_percent != 1:
        said = f"partial_rotary_factor {args.rotary_percent} is not supported"
        raise UserError(f"{file}: {said}; use 1: models with RMSNorm rotate whole heads")
    scaling = config.rope_scaling or rope
    kind = scaling.rope_type or scaling.type
    given = scaling.model_dump(exclude_none=True).keys() - {"rope_theta", "partial_rotary_factor"}
    if kind is None and given:
        raise UserError(f"{file}: rope scaling with {shown(min(given))} but without rope_type is not supported")
    if kind == "llama3" and isinstance(config, LlamaLike):
        if scaling.factor is None:
            raise UserError(f"{file}: factor of the rope scaling is missing, and llama3 needs it")
        for key, value in _LLAMA3_ROPE.items():
            if (found := getattr(scaling, key)) != value:
                reason = f"is not supported; Megatron 0.19 always builds such a model with {value}"
                raise UserError(f"{file}: {key} {found} of the rope scaling {reason}")
        args.use_rope_scaling, args.rope_factor_built = True, scaling.factor
    elif kind not in (None, "default"):
        said = f"rope scaling {as_json(kind)} is not supported"
        raise UserError(f"{file}: {said}; Megatron has llama3, for models with RMSNorm")


def _check_heads(args: Namespace, config: Section, keys: Mapping[str, str], file: str) -> None:
    """Refuse sizes that do not give whole heads, whole query groups and whole pairs of rotated channels."""
    heads, groups, hidden = args.num_attention_heads, args.num_query_groups, args.hidden_size
    if getattr(config, keys.get("kv_channels", ""), None) is None and hidden % heads:
        said = f"{keys['num_attention_heads']} {heads} does not divide {keys['hidden_size']} {hidden}"
        raise UserError(f"{file}: {said}; a head needs a whole number of channels")
    if heads % groups:
        said = f"{keys['num_query_groups']} {groups} does not divide {keys['num_attention_heads']} {heads}"
        raise UserError(f"{file}: {said}; a group needs a whole number of heads")
    rotated = int(args.kv_channels * args.rotary_percent)
    if args.position_embedding_type == "rope" and (rotated < 2 or rotated % 2):
        said = f"rotary positions would rotate {rotated} of a head's {args.kv_channels} channels"
        raise UserError(f"{file}: {said}; the number must be even and not 0")


def flags_of(args: Namespace) -> str:
    """Megatron's flags for a model, quoted for a shell. args: from model_args or args_of."""
    unused = {"bias_gelu_fusion"} if args.swiglu else set()
    if args.add_bias_linear:
        unused.add("add_qkv_bias")
    if args.rope_factor_built == STOCK_FACTOR:
        unused.add("rope_factor_built")
    if args.position_embedding_type != "rope":
        unused |= {"rotary_base", "rotary_percent"}
    words = []
    for name, flag in _FLAGS.items():
        value = getattr(args, name)
        if name in unused or value is None:
            continue
        if flag.endswith("!"):
            words += [] if value else [flag[:-1]]
        elif isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return shlex.join(words)


def quantization_config(family: Family) -> dict[str, Any]:
    """config.json's entry for E4M3 weights: compressed-tensors, one scale a weight, activations scaled at run time."""
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        # transformers 5 calls every family's output layer lm_head
        "ignore": sorted({"lm_head", family.modules[OUTPUT][0].rstrip(".")}),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**fp8, "strategy": "tensor", "dynamic": False},
                "input_activations": {**fp8, "strategy": "token", "dynamic": True},
            }
        },
    }
