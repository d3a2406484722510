"""A model in words: Megatron's arguments on one side, config.json on the other.

Both conversions go through one namespace of Megatron's own argument names, which `model_args` makes of the
arguments that a checkpoint was saved with, and `args_of` of a config.json.  What would make the two models
compute different things is refused here, before a tensor is read.

What a checkpoint does not have is the tokenizer: its files must be copied by hand, and bos_token_id and
eos_token_id are null.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from ...errors import UserError
from .families import FAMILIES, OUTPUT, Family, family_of

VOCABULARY_MULTIPLE = 128  # Megatron's default of --make-vocab-size-divisible-by
# {argument: flag} of everything that describes the model. A flag that ends in "!" takes no value and stands for False.
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
    "bias_gelu_fusion": "--no-bias-gelu-fusion!",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "position_embedding_type": "--position-embedding-type",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "use_rope_scaling": "--use-rope-scaling",
    "attention_dropout": "--attention-dropout",
    "hidden_dropout": "--hidden-dropout",
    "init_method_std": "--init-method-std",
}
# Arguments that change what the model computes, in ways that no family has unless they are off.
_OFF = (
    "num_experts multi_latent_attention mtp_num_layers qk_layernorm qk_l2_norm layernorm_zero_centered_gamma "
    "apply_residual_connection_post_layernorm softmax_type window_size rotary_interleaved squared_relu quick_geglu "
    "rotary_seq_len_interpolation_factor no_rope_freq attention_output_gate glu_linear_offset use_mup "
    "activation_func_clamp_value experimental_attention_variant linear_attention_freq hybrid_layer_pattern "
    "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json spec"
).split()
_USE_VOCAB_SIZE = (None, "NullTokenizer", "TikTokenizer")  # other tokenizers ignore --vocab-size
# All that Megatron builds with --use-rope-scaling: it hands --rope-scaling-factor to no model, and has no other flags.
_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # as --bias-gelu-fusion computes it


def model_args(saved: Namespace, vocab_size: int | None = None) -> Namespace:
    """What describes the model in the arguments that a checkpoint was saved with.

    vocab_size: the number of real tokens; None: as the arguments have it, else with the padding.
    UserError naming the flag for a model that no family computes.
    """
    for name in _OFF:
        value = getattr(saved, name, None)
        if value and value != "vanilla":
            flag = "apply_layernorm_1p" if name == "layernorm_zero_centered_gamma" else name
            raise UserError(f"--{flag.replace('_', '-')} {value}: no Hugging Face model known here computes this")
    args = Namespace(**{name: getattr(saved, name, None) for name in (*_FLAGS, "padded_vocab_size")})
    for name, value in vars(args).items():
        if value is None:
            raise UserError(f"{name} is not among the checkpoint's arguments: save it with megatron-core 0.19")
    if not args.group_query_attention:
        args.num_query_groups = args.num_attention_heads
    if not args.add_bias_linear and getattr(saved, "add_qkv_bias", False):
        raise UserError("--add-qkv-bias with --disable-bias-linear: no Hugging Face model known here has this")
    known = getattr(saved, "vocab_size", None) if getattr(saved, "tokenizer_type", None) in _USE_VOCAB_SIZE else None
    args.vocab_size = vocab_size or known or args.padded_vocab_size
    if args.vocab_size > args.padded_vocab_size:
        raise UserError(f"--vocab-size {args.vocab_size}: the checkpoint has rows for {args.padded_vocab_size} tokens")
    _check(args)
    return args


def _check(args: Namespace) -> None:
    """Refuse what the family of these arguments does not compute."""
    family = family_of(args)
    chosen = f"{family.model_type} (chosen for --normalization {args.normalization}"
    chosen += f" --position-embedding-type {args.position_embedding_type})"
    needs = dict(family.needs)
    if family.model_type != "llama":
        needs |= {"group_query_attention": False}
        needs |= {"kv_channels": args.hidden_size // args.num_attention_heads}
    for name, value in needs.items():
        found = getattr(args, name)
        if found != value:
            flag = _FLAGS[name].rstrip("!")
            raise UserError(f"{flag}: Hugging Face's {chosen} has {name} = {value} only, this model has {found}")


def config_of(args: Namespace) -> dict[str, Any]:
    """config.json for a model of BF16 weights that `args` (of model_args or args_of) describe."""
    family = family_of(args)
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {key: getattr(args, name) for name, key in family.keys.items()}
    config |= {key: value for key, (value, _) in family.fixed.items()}
    config |= {"tie_word_embeddings": not args.untie_embeddings_and_output_weights, "torch_dtype": "bfloat16"}
    config |= {"bos_token_id": None, "eos_token_id": None}
    gelu = "gelu_new" if args.bias_gelu_fusion else "gelu"
    if family.model_type == "llama":
        config |= {"attention_bias": args.add_bias_linear, "mlp_bias": args.add_bias_linear}
        config |= {"rope_theta": float(args.rotary_base), "rope_scaling": None}
        if args.use_rope_scaling:
            config["rope_scaling"] = {"rope_type": "llama3", **_LLAMA3_ROPE}
    elif family.model_type == "gpt_neox":
        config |= {"hidden_act": gelu, "rotary_emb_base": args.rotary_base, "rotary_pct": args.rotary_percent}
    else:
        config |= {"activation_function": gelu, "embd_pdrop": args.hidden_dropout}
    return config


def args_of(config: Mapping[str, Any]) -> Namespace:
    """Megatron's arguments for a config.json.  UserError for a model that Megatron does not compute."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        known = ", ".join(FAMILIES)
        raise UserError(f"config.json: model_type {config.get('model_type')} is not supported; use one of {known}")
    for key, (value, absent) in family.fixed.items():
        _must_be(config, key, value, absent)
    values = {name: _get(config, key, family) for name, key in family.keys.items()}
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    defaults = {
        "ffn_hidden_size": 4 * hidden,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "hidden_dropout": 0.0,
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "bias_gelu_fusion": False,
        **family.needs,
    }
    args = Namespace(**defaults | {name: value for name, value in values.items() if value is not None})
    args.untie_embeddings_and_output_weights = not _get(config, "tie_word_embeddings", family)
    args.group_query_attention = args.num_query_groups != args.num_attention_heads
    args.padded_vocab_size = -(-args.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if family.model_type == "llama":
        args.add_bias_linear = bool(config.get("attention_bias", False))
        _must_be(config, "mlp_bias", args.add_bias_linear, False)
    else:
        key = "hidden_act" if family.model_type == "gpt_neox" else "activation_function"
        gelu = config.get(key, "gelu" if family.model_type == "gpt_neox" else "gelu_new")
        if gelu not in (*_TANH_GELU, "gelu"):
            raise UserError(f"config.json: {key} {gelu} is not supported; Megatron has gelu and gelu_new")
        args.bias_gelu_fusion = gelu in _TANH_GELU
    if args.position_embedding_type == "rope":
        _read_rope(args, config, family)
    return args


def _read_rope(args: Namespace, config: Mapping[str, Any], family: Family) -> None:
    """Rotary positions, as transformers 4 writes them in config.json or as 5 does."""
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    base = rope.get("rope_theta", config.get("rotary_emb_base", config.get("rope_theta", 10000)))
    if base != int(base):
        raise UserError(f"config.json: rope_theta {base} is not supported; --rotary-base takes a whole number")
    args.rotary_base = int(base)
    if family.model_type == "gpt_neox":
        args.rotary_percent = rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3" and family.model_type == "llama":
        for key, value in _LLAMA3_ROPE.items():
            if scaling.get(key) != value:
                reason = f"is not supported; Megatron 0.19 builds every such model with {value}, whatever its flags say"
                raise UserError(f"config.json: {key} {scaling.get(key)} of the rope scaling {reason}")
        args.use_rope_scaling = True
    elif kind != "default":
        raise UserError(f"config.json: rope scaling {dict(scaling)} is not supported; Megatron has Llama 3.1's")


def _get(config: Mapping[str, Any], key: str, family: Family) -> Any:
    if key not in config and key not in family.defaults:
        raise UserError(f"config.json has no {key}, which a {family.model_type} model needs")
    return config.get(key, family.defaults.get(key))


def _must_be(config: Mapping[str, Any], key: str, value: Any, absent: Any) -> None:
    found = config.get(key, absent)
    if found != value:
        raise UserError(f"config.json: {key} {found} is not supported; Megatron computes the model with {value}")


def flags_of(args: Namespace) -> str:
    """Megatron's flags for the model that `args` (of model_args or args_of) describe."""
    unused = {"bias_gelu_fusion"} if args.swiglu else set()
    if args.position_embedding_type != "rope":
        unused |= {"rotary_base", "rotary_percent"}
    words = []
    for name, flag in _FLAGS.items():
        value = getattr(args, name)
        if name in unused:
            continue
        if flag.endswith("!"):
            words += [] if value else [flag[:-1]]
        elif isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [flag, str(value)]
    return " ".join(words)


def quantization_config(family: Family) -> dict[str, Any]:
    """What config.json says of E4M3 weights: compressed-tensors, one scale a weight; activations scaled on the fly."""
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
