"""The question put to the cost model: a model, its layout, a batch, a system. Also its parts by pipeline stage."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...errors import UserError
from ...flags.level import CELLS
from ...flags.numeric_checks import FEW_MICRO_BATCHES
from .job import Job
from .systems import System

Recompute = Literal["none", "selective", "full"]
MODULES = ("core_attn", "layernorm", "mlp")  # the --recompute-modules whose memory and time are modelled
MOE = "moe"  # and this one, of layers with experts


@dataclass(frozen=True)
class Workload:
    """Attributes:
    job: model and layout; its data-parallel size includes context parallelism.
    keys: how a level's context parallelism gets K and V of other ranks if they are large; "" if it is not a level's.
    virtual: model chunks a pipeline stage.
    loss_chunks: --fp8-loss-chunks, of a level.
    recompute, modules: --recompute-granularity, --recompute-modules.
    recomputed_layers: with recompute "full", how many layers of a chunk (None: all).
    keeps_transposes: whether a level keeps W^T of its FP8 weights from one micro-batch to the next.
    dropout: whether hidden states have dropout.
    graphed: whether a step is one CUDA graph.
    two_levels: whether a level's gradients are reduced inside a node first.
    overrides: {cell: value} of flags that change the level's table.
    topk: routed experts a token.
    grouped: --moe-grouped-gemm.  permute_fused: --moe-permute-fusion.
    dispatcher: --moe-token-dispatcher-type.  fp8_dispatch: --fp8-dispatch, of a level.
    router_fp32: whether probabilities are FP32 (--moe-router-dtype).
    """

    job: Job
    system: System
    sequence: int
    micro_batch: int
    global_batch: int
    sequence_parallel: bool = False
    context: int = 1
    keys: Literal["gathered", "fetched", ""] = ""
    virtual: int = 1
    recompute: Recompute = "none"
    modules: tuple[str, ...] = ("core_attn",)
    recomputed_layers: int | None = None
    overlap_reduce: bool = False
    overlap_gather: bool = False
    fp8_head: bool = False
    loss_chunks: int = 1
    fp8_activations: bool = False
    keeps_transposes: bool = False
    dropout: bool = False
    graphed: bool = False
    two_levels: bool = False
    repaired: bool = True  # Transformer Engine's QKV split
    overrides: Mapping[str, str] | None = None
    topk: int = 1
    grouped: bool = False
    permute_fused: bool = False
    dispatcher: Literal["allgather", "alltoall"] = "allgather"
    fp8_dispatch: Literal["off", "forward", "both"] = "off"
    router_fp32: bool = False

    def __post_init__(self):
        for flag, value in (("--seq-length", self.sequence), ("--micro-batch-size", self.micro_batch),
                            ("--global-batch-size", self.global_batch)):  # fmt: skip
            if value < 1:
                raise UserError(f"{flag} {value}: use 1 or more")
        if self.job.data_parallel_size % self.context:
            raise UserError(
                f"--context-parallel-size {self.context}: does not divide the {self.job.data_parallel_size} GPUs that "
                "tensor and pipeline parallelism leave; change one"
            )
        if self.global_batch % (self.micro_batch * self.data):
            raise UserError(
                f"--global-batch-size {self.global_batch}: no multiple of --micro-batch-size {self.micro_batch} times "
                f"{self.data} data-parallel ranks; change one"
            )
        if self.job.num_layers % (self.pipeline * self.virtual):
            raise UserError(
                f"--num-layers {self.job.num_layers}: not divided by {self.pipeline} stages of {self.virtual} chunks"
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise UserError(
                f"--pipeline-model-parallel-size 1: {self.virtual} virtual stages need 2 or more; change one"
            )
        if self.job.multi_latent_attention and self.context > 1:
            raise UserError(
                f"--context-parallel-size {self.context} with --multi-latent-attention: not modelled; remove one"
            )
        if self.job.num_experts and self.tensor > 1 and not self.sequence_parallel:
            raise UserError(
                f"--num-experts {self.job.num_experts} with --tensor-model-parallel-size {self.tensor}: Megatron "
                "trains experts only with --sequence-parallel; add it"
            )
        if self.virtual > 1 and self.micro_batches % self.pipeline:
            raise UserError(
                f"--global-batch-size {self.global_batch}: {self.micro_batches} micro-batches, and virtual stages need "
                f"a multiple of --pipeline-model-parallel-size {self.pipeline}; change one"
            )

    @property
    def data(self) -> int:
        return self.job.data_parallel_size // self.context

    @property
    def tensor(self) -> int:
        return self.job.tensor_model_parallel_size

    @property
    def pipeline(self) -> int:
        return self.job.pipeline_model_parallel_size

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.job.data_parallel_size

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a context-parallel rank."""
        return self.micro_batch * self.sequence // self.context

    @property
    def layers(self) -> int:
        """Layers of a stage."""
        return self.job.num_layers // self.pipeline

    def kinds(self, stage: int) -> list[tuple[bool, int]]:
        """(Whether they have experts, how many there are) of each kind of a stage's layers."""
        moe = sum(self.job.of_stage(stage))
        return [(kind, count) for kind, count in ((False, self.layers - moe), (True, moe)) if count]

    @property
    def rows(self) -> float:
        """Rows that a rank's routed experts get of a micro-batch, if all experts get as many."""
        parts = self.job.expert_ranks // self.job.expert_model_parallel_size
        return self.tokens / self.split * self.topk * parts

    @property
    def padded_rows(self) -> float:
        """`rows` with the padding of experts that are multiplied together: half a tile each, as counts are random."""
        if not self.together:
            return self.rows
        from ...ops.groups import TILE  # late: a mistake in the flags must not wait for torch

        return self.rows + self.job.local_experts * TILE / 2

    @property
    def picks(self) -> bool:
        """Whether the GPU picks its experts' rows from all tokens (layers/gathered_dispatch.py)."""
        return self.graphed and self.dispatcher == "allgather" and self.experts_owned and self.together

    @property
    def gathered_tokens(self) -> float:
        """Tokens of all ranks that share a layer's experts."""
        return self.tokens / self.split * self.job.expert_ranks

    @property
    def room_rows(self) -> float:
        """Rows that a rank's routed experts have room for: `padded_rows`, or if it `picks` all that could come."""
        if not self.picks:
            return self.padded_rows
        from ...ops.groups import TILE  # late: a mistake in the flags must not wait for torch

        most, experts = min(self.topk, self.job.local_experts), self.job.local_experts
        return (self.gathered_tokens * most + (TILE - 1) * experts) // TILE * TILE

    @property
    def experts_fp8(self) -> bool:
        """Whether the routed experts' GEMMs are in FP8."""
        return self.fp8 and (self.system.level is None or self.job.fp8_experts)

    @property
    def experts_owned(self) -> bool:
        """Whether a level owns the routed experts."""
        return self.system.level is not None and self.job.fp8_experts

    @property
    def together(self) -> bool:
        """Whether a rank's experts are multiplied together. A level does it only with what is in FP8."""
        return self.grouped and (self.system.level is None or self.experts_fp8)

    @property
    def fetches(self) -> bool:
        """Whether a level's context parallelism fetches K and V from rank after rank."""
        from ...flags.stock import FETCHED_ABOVE  # late: a mistake in the flags must not wait for torch

        whole = 2 * self.tokens * self.context * (self.key_channels + self.value_channels) / self.tensor
        return self.keys == "fetched" and whole > FETCHED_ABOVE

    def again(self, part: str) -> float:
        """Share of the layers that run a part of theirs forward again in the backward pass. part: MOE, one of MODULES,
        or another, which only full recomputation repeats."""
        if self.recompute == "full":
            chunk = self.layers // self.virtual
            return 1.0 if self.recomputed_layers is None else min(self.recomputed_layers, chunk) / chunk
        return float(self.recompute == "selective" and part in self.modules)

    @property
    def query_channels(self) -> int:
        """Channels of all heads' queries."""
        return self.job.num_attention_heads * self.job.channels[0]

    @property
    def output_channels(self) -> int:
        """Channels of attention's output: of all heads, as wide as values."""
        return self.job.num_attention_heads * self.job.channels[1]

    @property
    def key_channels(self) -> int:
        """Channels of all query groups' keys."""
        return self.job.query_groups * self.job.channels[0]

    @property
    def value_channels(self) -> int:
        """Channels of all query groups' values."""
        return self.job.query_groups * self.job.channels[1]

    def mlp(self, moe: bool = False) -> tuple[int, int]:
        """(Width of fc1's output, of fc2's input) of a layer's MLP; with experts, of the shared ones, or zeros."""
        mlp = self.job.layer(moe)[len(self.job.attention) :]
        return (mlp[0][0], mlp[1][1]) if mlp else (0, 0)

    @property
    def vocabulary(self) -> int:
        """Padded size of the vocabulary over all tensor-parallel ranks."""
        unit = self.job.make_vocab_size_divisible_by * self.tensor
        return -(-self.job.vocab_size // unit) * unit

    @property
    def split(self) -> int:
        """Ranks that share the hidden states: all tensor-parallel ranks under sequence parallelism, else 1."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def fp8(self) -> bool:
        """Whether the linears' GEMMs are in FP8; --fp8-gemm bf16 switches that off."""
        return self.system.fp8 and (self.overrides or {}).get("gemm", "fp8") == "fp8"

    @property
    def input_bytes(self) -> int:
        """Bytes an element of a linear's input kept for the backward pass."""
        return self.system.input_bytes if self.fp8 else 2

    def cells(self) -> dict[str, str] | None:
        """The level's table with the storage of gradients resolved; None for stock and Transformer Engine."""
        level = self.system.level
        if level is None:
            return None
        cells = {cell.name: cell.at(level) for cell in CELLS} | dict(self.overrides or {})
        if cells["grad_accum"] == "auto":
            cells["grad_accum"] = "fp8" if self.micro_batches <= FEW_MICRO_BATCHES else "bf16"
        return cells
