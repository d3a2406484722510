"""A job for the cost model: a GPT, its parallel layout, and the bytes an element of each storage format."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from ...errors import UserError
from ...flags.numeric_checks import GEMM_MULTIPLE

BYTES: dict[str, float] = {
    "fp32": 4,
    "bf16": 2,
    "remainder": 2,  # int16
    "fp16": 2 + 1 / 128,  # Block16: a byte of exponent for 128 elements
    "fp8": 1 + 1 / 128,  # BlockScaled: the same
    "e4m3": 1,  # ScaledTensor, a weight or its copy: one scale for the tensor
}
STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Job:
    """A GPT and its parallel layout: Megatron's flags and the data-parallel size. Defaults are Megatron's, except for
    the distributed optimizer.

    data_parallel_size includes context parallelism. grad_reduce_in_bf16: stock's gradients, as they are kept and sent.
    dpo_reference: whether DPO's reference is on the device beside the policy. frozen_base: whether no parameter of
    these is trained, as under adapters, which are not counted. moe_layer_freq: one layer of so many has experts, or a
    number a layer, as Megatron has it. fp8_experts: whether a level owns routed experts; moe_grouped_gemm: and
    multiplies them together. Of multi-latent attention (layers/latent.py) kv_channels and query groups say nothing.
    Raises UserError if Megatron or the GEMMs cannot cut the model so.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    ffn_hidden_size: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    swiglu: bool = False
    quick_geglu: bool = False
    attention_output_gate: bool = False
    qk_layernorm: bool = False
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    disable_bias_linear: bool = False
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    max_position_embeddings: int | None = None
    untie_embeddings_and_output_weights: bool = False
    make_vocab_size_divisible_by: int = 128
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    data_parallel_size: int = 1
    use_distributed_optimizer: bool = True
    grad_reduce_in_bf16: bool = False
    dpo_reference: bool = False
    frozen_base: bool = False
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_layer_freq: int | tuple[int, ...] = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    fp8_experts: bool = False
    moe_grouped_gemm: bool = False
    keep_fp8_transpose_cache: bool = False

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and field.type is not bool and value < 1:
                raise UserError(f"{flag(field.name)} {value}: use 1 or more")
        if self.position_embedding_type == "learned_absolute" and self.max_position_embeddings is None:
            raise UserError("--position-embedding-type learned_absolute: add --max-position-embeddings, or use rope")
        if self.kv_channels is None:
            self._check_divides("num_attention_heads", "hidden_size")
        self._check_divides("tensor_model_parallel_size", "num_attention_heads")
        self._check_divides("pipeline_model_parallel_size", "num_layers")
        tensor, groups = self.tensor_model_parallel_size, self.num_query_groups
        if groups is not None and groups % tensor and tensor % groups:
            remedy = f"neither multiple nor divisor of --tensor-model-parallel-size {tensor}; change one"
            raise UserError(f"--num-query-groups {groups}: {remedy}")
        if groups is not None:
            self._check_divides("num_query_groups", "num_attention_heads")
        if self.num_experts is not None:
            self._check_experts()
        for rows, columns, across in self.linear_sizes if 0 in self.moe else self.attention:
            cut, whole = (rows, columns) if across else (columns, rows)
            if cut % (tensor * GEMM_MULTIPLE) or whole % GEMM_MULTIPLE:
                raise UserError(
                    f"--tensor-model-parallel-size {tensor}: cuts a linear of {rows} x {columns} elements into parts "
                    f"that are not multiples of {GEMM_MULTIPLE}; change it, --hidden-size or --ffn-hidden-size"
                )

    def _check_experts(self) -> None:
        self._check_divides("expert_model_parallel_size", "num_experts")
        for what, found in ("--dpo-reference", self.dpo_reference), ("--frozen-base", self.frozen_base):
            if found:
                raise UserError(f"{what} with --num-experts {self.num_experts}: not counted; remove one")
        if not self.disable_bias_linear:
            raise UserError(f"--num-experts {self.num_experts}: experts with biases are not counted; "
                            "add --disable-bias-linear")  # fmt: skip
        if len(self.moe) != self.num_layers:
            raise UserError(f"--moe-layer-freq: {len(self.moe)} layers, and --num-layers is {self.num_layers}")
        ranks, each = self.data_parallel_size * self.tensor_model_parallel_size, self.expert_ranks
        if ranks % each:
            raise UserError(
                f"--expert-model-parallel-size {self.expert_model_parallel_size}: with expert tensor parallelism "
                f"{each // self.expert_model_parallel_size} it does not divide a stage's {ranks} GPUs; change one"
            )

    def _check_divides(self, divisor: str, number: str) -> None:
        by, value = getattr(self, divisor), getattr(self, number)
        if value % by:
            raise UserError(f"{flag(divisor)} {by}: does not divide {flag(number)} {value}; change one")

    @property
    def stock_gradient(self) -> float:
        """Bytes of a gradient of stock's, in memory and between ranks."""
        return BYTES["bf16" if self.grad_reduce_in_bf16 else "fp32"]

    @cached_property
    def linear_sizes(self) -> list[tuple[int, int, bool]]:
        """(Rows, columns, across) of attention's linears, fc1 and fc2. across: tensor parallelism cuts the rows, as in
        Megatron's column-parallel linears; else the columns."""
        hidden = self.hidden_size
        ffn = self.ffn_hidden_size or (hidden * 8 // 3 // 64 * 64 if self.swiglu else 4 * hidden)
        return [*self.attention, *self.mlp(ffn)]

    @cached_property
    def channels(self) -> tuple[int, int]:
        """Channels of a head's query or key, and of its value."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim, self.v_head_dim
        one = self.kv_channels or self.hidden_size // self.num_attention_heads
        return one, one

    @cached_property
    def query_groups(self) -> int:
        """Heads that have keys and values of their own."""
        heads = self.num_attention_heads
        return heads if self.multi_latent_attention else self.num_query_groups or heads

    @cached_property
    def attention(self) -> list[tuple[int, int, bool]]:
        """linear_sizes of attention: qkv and proj, or, if it is multi-latent, of q or its up projection, the up
        projection of k and v, and proj."""
        hidden, heads, (of_key, of_value) = self.hidden_size, self.num_attention_heads, self.channels
        proj = hidden, heads * of_value, False
        if self.multi_latent_attention:
            up = heads * (self.qk_head_dim + of_value), self.kv_lora_rank, True
            return [(heads * of_key, self.q_lora_rank or hidden, True), up, proj]
        queries = heads * (1 + self.attention_output_gate)
        return [((queries + 2 * self.query_groups) * of_key, hidden, True), proj]

    @property
    def down(self) -> list[tuple[int, int]]:
        """(Rows, columns) of multi-latent attention's down projections. Stock Megatron trains them in BF16, and every
        tensor-parallel rank has them whole."""
        if not self.multi_latent_attention:
            return []
        ranks = [*([self.q_lora_rank] if self.q_lora_rank else []), self.kv_lora_rank + self.qk_pos_emb_head_dim]
        return [(rank, self.hidden_size) for rank in ranks]

    @property
    def qk_norms(self) -> list[int]:
        """Widths of a layer's norms of q and k, or of what multi-latent attention projects up."""
        if not self.qk_layernorm:
            return []
        if self.multi_latent_attention:
            return [self.q_lora_rank or self.hidden_size, self.kv_lora_rank]
        return [self.channels[0]] * 2

    @cached_property
    def moe(self) -> list[bool]:
        """Of each layer, whether it has experts."""
        if self.num_experts is None:
            return [False] * self.num_layers
        every = self.moe_layer_freq
        return [i % every == 0 for i in range(self.num_layers)] if isinstance(every, int) else [bool(i) for i in every]

    @property
    def expert_ranks(self) -> int:
        """The ranks that have an expert each, or a part of one: EP times ETP."""
        parts = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        return self.expert_model_parallel_size * parts

    @property
    def expert_data_parallel_size(self) -> int:
        """The ranks of a stage that have the same experts."""
        return self.data_parallel_size * self.tensor_model_parallel_size // self.expert_ranks

    def of_stage(self, stage: int) -> list[bool]:
        """`moe` of a stage's layers."""
        count = self.num_layers // self.pipeline_model_parallel_size
        return self.moe[stage * count : (stage + 1) * count]

    @cached_property
    def first_alike(self) -> list[int]:
        """Of each stage, the first stage with the same layers and tables: itself, or an earlier one."""
        last = self.pipeline_model_parallel_size - 1
        first: dict[object, int] = {}
        kinds = ((stage == 0, stage == last, tuple(self.of_stage(stage))) for stage in range(last + 1))
        return [first.setdefault(kind, stage) for stage, kind in enumerate(kinds)]

    def mlp(self, width: int) -> list[tuple[int, int, bool]]:
        """linear_sizes of an MLP of that width."""
        gated = self.swiglu or self.quick_geglu
        return [(width * (1 + gated), self.hidden_size, True), (self.hidden_size, width, False)]

    def layer(self, moe: bool) -> list[tuple[int, int, bool]]:
        """linear_sizes of a layer; with experts, those of attention and of shared experts, if there are any."""
        if not moe:
            return self.linear_sizes
        width = self.moe_shared_expert_intermediate_size
        return [*self.attention, *(self.mlp(width) if width else [])]

    def linears(self, stage: int = 0) -> list[int]:
        """Elements of each linear's weight of a stage on a tensor-parallel rank, in the order of the backward pass.

        Shared experts are linears, routed ones are not. Only with experts stages may differ.
        """
        sizes = []
        for moe in reversed(self.of_stage(stage)):
            layer = reversed(self.layer(moe))
            sizes += [rows * columns // self.tensor_model_parallel_size for rows, columns, _ in layer]
        return sizes

    @property
    def local_experts(self) -> int:
        """Routed experts of a layer on a rank."""
        return (self.num_experts or 0) // self.expert_model_parallel_size

    @property
    def expert_width(self) -> int:
        """Width of a whole routed expert."""
        return self.moe_ffn_hidden_size or self.linear_sizes[-1][1]

    @cached_property
    def expert(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(Rows, columns) of fc1 and of fc2 of a routed expert on a rank: expert tensor parallelism cuts the width."""
        parts = self.expert_ranks // self.expert_model_parallel_size
        (fc1, hidden, _), (_, width, _) = self.mlp(self.expert_width)
        return (fc1 // parts, hidden), (hidden, width // parts)

    def experts(self, stage: int = 0) -> list[int]:
        """Elements of each routed expert's weights of a stage on one rank, in the order of the backward pass."""
        if self.num_experts is None:
            return []
        expert = [rows * columns for rows, columns in reversed(self.expert)]
        return expert * self.local_experts * sum(self.of_stage(stage))

    def others(self, stage: int) -> list[int]:
        """Elements of each other parameter of pipeline stage `stage` on a tensor-parallel rank."""
        hidden, tensor, stages = self.hidden_size, self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        parts = 1 if self.normalization == "RMSNorm" else 2
        norm, of_attention = [hidden] * parts, [width for width in self.qk_norms for _ in range(parts)]
        of_attention += [rows * columns for rows, columns in self.down]
        bias = []
        if not self.disable_bias_linear:  # multi-latent attention's linears have none, but for the last
            having = self.linear_sizes[2 if self.multi_latent_attention else 0 :]
            bias = [rows // tensor if across else rows for rows, _, across in having]
        unit = self.make_vocab_size_divisible_by * tensor
        words = -(-self.vocab_size // unit) * unit // tensor * hidden
        first, last = stage == 0, stage == stages - 1
        sizes = [words] if first else []
        if first and self.position_embedding_type == "learned_absolute":
            assert self.max_position_embeddings is not None  # checked in __post_init__
            sizes.append(self.max_position_embeddings * hidden)
        for moe in self.of_stage(stage):
            router = [(self.num_experts or 0) * hidden] if moe else []
            sizes += [*norm, *norm, *of_attention, *bias, *router]
        if last:
            sizes += norm
            # A tied head is the embedding itself if one stage has both, else a copy.
            sizes += [words] if self.untie_embeddings_and_output_weights or not first else []
        return sizes


def _paper(layers: int, hidden: int, heads: int, tensor: int = 1, pipeline: int = 1, data: int = 1) -> Job:
    return Job(
        layers,
        hidden,
        heads,
        vocab_size=50_304,
        disable_bias_linear=True,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        data_parallel_size=data,
    )


MODELS = {  # FP8-LM (arXiv 2310.18313), tables 1 and 5; the paper gives no data-parallel size for 125M
    "125m": _paper(12, 768, 12),
    "7b": _paper(32, 4096, 32, data=32),
    "13b": _paper(40, 5120, 40, tensor=2, data=16),
    "175b": _paper(96, 12288, 96, tensor=8, pipeline=4, data=4),
}


def flag(name: str) -> str:
    """The command-line flag of a field of Job."""
    return "--" + name.replace("_", "-")
