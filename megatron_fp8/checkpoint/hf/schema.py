"""Schemas for config.json, an index and a checkpoint's arguments: types and ranges, checked by pydantic.

Such files come from other people. A value of another type, or outside any model's range, is refused in one line that
names file, key, value and the expected value; the rest of convert relies on it. Ranges are wide: they keep out
nonsense, not large models. Other keys are ignored, as transformers does.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from ...errors import UserError
from ...flags.rope import STOCK_FACTOR
from ...packages import needs

try:
    from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
except ModuleNotFoundError:
    raise UserError(f"megatron-fp8 convert {needs('pydantic')}") from None

Count = Annotated[int, Field(ge=1, le=100_000)]  # layers, heads
Size = Annotated[int, Field(ge=1, le=2**30)]
Share = Annotated[float, Field(ge=0, lt=1)]  # a dropout rate
Epsilon = Annotated[float, Field(ge=1e-20, lt=1)]
Deviation = Annotated[float, Field(ge=1e-10, le=100)]  # standard deviation of initial weights
Base = Annotated[float, Field(ge=2, le=1e15, multiple_of=1)]  # --rotary-base takes a whole number
Part = Annotated[float, Field(gt=0, le=1)]  # share of a head's channels
Factor = Annotated[float, Field(gt=0, le=1e6)]
Gelu = Literal["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu"]
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # the form that --bias-gelu-fusion computes


class Section(BaseModel):
    """A JSON object. strict: "12" and true are not numbers.

    nullable: the keys whose null says something else than their absence.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    nullable: ClassVar[tuple[str, ...]] = ()


class Rope(Section):
    """Rotary positions: rope_scaling in transformers 4, rope_parameters in 5. Other keys are kept unchecked."""

    model_config = ConfigDict(extra="allow")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Base | None = None
    partial_rotary_factor: Part | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    original_max_position_embeddings: Size | None = None


class _Roped(Section):
    num_hidden_layers: Count
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Count
    max_position_embeddings: Size
    vocab_size: Size
    initializer_range: Deviation = 0.02
    attention_dropout: Share = 0.0
    tie_word_embeddings: bool = False
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None


class LlamaLike(_Roped):
    """config.json of a model with a Llama's layers; the subclasses have the differences."""

    head_dim: Size | None = None
    rms_norm_eps: Epsilon = 1e-6
    hidden_act: Literal["silu"] = "silu"
    rope_theta: Base = 10000.0
    partial_rotary_factor: Part = 1.0


class Llama(LlamaLike):
    """config.json of a LlamaForCausalLM."""

    num_key_value_heads: Count | None = None
    attention_bias: bool = False
    mlp_bias: bool = False


class Mistral(LlamaLike):
    """config.json of a MistralForCausalLM. transformers takes an absent window for 4096, and null for none."""

    nullable: ClassVar = ("sliding_window",)

    num_key_value_heads: Count  # transformers takes null for the number of heads, and an absent key for 8
    sliding_window: Size | None = 4096


class Qwen2(LlamaLike):
    """config.json of a Qwen2ForCausalLM, which Qwen 2.5 is too. Megatron's window is of all layers, Qwen's of some."""

    num_key_value_heads: Count  # transformers takes null for the number of heads, and an absent key for 32
    use_sliding_window: Literal[False] = False
    layer_types: list[Literal["full_attention"]] | None = None


class Qwen3(Qwen2):
    """config.json of a Qwen3ForCausalLM. Megatron has no bias of o_proj alone."""

    head_dim: Size  # transformers takes an absent key for 128
    attention_bias: Literal[False] = False


class Mixtral(LlamaLike):
    """config.json of a MixtralForCausalLM."""

    num_key_value_heads: Count  # transformers takes null for the number of heads, and an absent key for 8
    sliding_window: Size | None = None
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2


class Qwen3Moe(Qwen3):
    """config.json of a Qwen3MoeForCausalLM, by transformers 4 or 5. Each layer has experts."""

    moe_intermediate_size: Size  # transformers takes an absent key for 768
    num_experts: Count = Field(128, validation_alias=AliasChoices("num_experts", "num_local_experts"))  # 4's, 5's
    num_experts_per_tok: Count = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: list[Any] = Field(default=[], max_length=0)


class Neox(_Roped):
    """config.json of a GPTNeoXForCausalLM."""

    layer_norm_eps: Epsilon = 1e-5
    hidden_dropout: Share = 0.0
    hidden_act: Gelu = "gelu"
    # If absent it is true, which is refused.
    use_parallel_residual: Literal[False] = Field(True, validate_default=True)  # type: ignore[assignment]
    attention_bias: Literal[True] = True
    rotary_emb_base: Base = 10000.0
    rotary_pct: Part = 0.25


class Gpt2(Section):
    """config.json of a GPT2LMHeadModel."""

    n_layer: Count
    n_embd: Size
    n_head: Count
    n_positions: Size
    vocab_size: Size
    n_inner: Size | None = None
    layer_norm_epsilon: Epsilon = 1e-5
    initializer_range: Deviation = 0.02
    attn_pdrop: Share = 0.1
    resid_pdrop: Share = 0.1
    embd_pdrop: Share = 0.1
    activation_function: Gelu = "gelu_new"
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: bool = True


class ModelArguments(Section):
    """The model's arguments among those that a Megatron checkpoint was saved with."""

    num_layers: Count
    hidden_size: Size
    ffn_hidden_size: Size
    num_attention_heads: Count
    group_query_attention: bool
    num_query_groups: Count
    kv_channels: Size
    max_position_embeddings: Size
    normalization: str
    layernorm_epsilon: Epsilon
    swiglu: bool
    add_bias_linear: bool
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    window_size: tuple[Annotated[int, Field(ge=0, lt=2**30)], Literal[0]] | None = None
    bias_gelu_fusion: bool
    untie_embeddings_and_output_weights: bool
    position_embedding_type: str
    rotary_base: Base
    rotary_percent: Part
    use_rope_scaling: bool
    rope_factor_built: Factor = STOCK_FACTOR
    attention_dropout: Share
    hidden_dropout: Share
    init_method_std: Deviation
    num_experts: Count | None = None
    moe_ffn_hidden_size: Size | None = None
    moe_router_topk: Count | None = None
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    padded_vocab_size: Size
    vocab_size: Size | None = None


class Index(Section):
    """model.safetensors.index.json: {tensor: file}. A file must be in the folder itself."""

    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/\\]+\.safetensors$")]]


def checked[S: Section](schema: type[S], values: Mapping[str, Any], file: str, missing: str = "is missing") -> S:
    """Values, checked by a schema.  Raises UserError for the first that does not fit.

    file: the values' source in error lines.  missing: the error text for a value that is absent.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
    key, value, said = shown(".".join(map(str, first["loc"]))), as_json(first["input"]), first["msg"]
    if first["type"] == "missing":
        said = f"{key} {missing}"
    elif first["type"] == "literal_error":
        said = f"{key} {value} is not supported; Megatron computes the model with {first['ctx']['expected']}"
    else:
        said = f"{key} {value}: {said.replace('Input should', 'it should')}"
    raise UserError(f"{file}: {said}" + (f" (and {len(others)} more mistakes)" if others else "")) from None


def constants(schema: type[Section]) -> dict[str, Any]:
    """{key: value} of the keys that allow only one value."""
    fixed = {key: get_args(field.annotation) for key, field in schema.model_fields.items()
             if get_origin(field.annotation) is Literal}  # fmt: skip
    return {key: values[0] for key, values in fixed.items() if len(values) == 1}


def as_json(value: Any, most: int = 60) -> str:
    """A value as one line of ASCII JSON for a message, cut to `most` characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[:most]}..."


def shown(name: str, most: int = 60) -> str:
    """A name from a user's file for a message: unchanged if it is short and printable ASCII, else as JSON."""
    return name if name.isascii() and name.isprintable() and 0 < len(name) <= most else as_json(name, most)
