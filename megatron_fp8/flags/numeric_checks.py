"""Refuses numbers, shapes and formats with which a level cannot train; computes the batch size of the largest step.

Each refusal is a UserError of one line: flag, value, remedy. bounds.py refuses numbers that no run can have.
"""

import math
from argparse import Namespace
from collections.abc import Iterator

from ..errors import UserError
from .flag import value_of

LARGEST_MARGIN = 8  # see check_numbers
FEW_MICRO_BATCHES = 1  # FP8 storage up to here: for more, sums are faster and more exact in BF16 (docs/gradients.md)
GEMM_MULTIPLE = 16  # the dimensions of Hopper's FP8 GEMMs, in elements


def check_numbers(args: Namespace) -> None:
    """Refuse numbers with which Megatron fails late, weights become NaN, or FP8 values clip or vanish.

    Relative error of E4M3 on normally distributed values: 2.65 % for margins 0 to 9, then 2.8, 6.9, 28 and 92 % for 12,
    14, 16 and 18. With margin -1 the largest values are clipped: 16 %.
    """
    heads, groups = args.num_attention_heads, args.num_query_groups
    if args.group_query_attention and heads and groups and heads % groups:
        raise UserError(f"--num-query-groups {groups}: use a divisor of --num-attention-heads {heads}")
    window, layers = args.window_size, args.window_attn_skip_freq
    if window is not None and (len(window) != 2 or min(window) < -1):
        shown = ",".join(map(str, window))
        raise UserError(f"--window-size {shown}: use two numbers of at least -1 (-1: no limit), such as 128,0")
    if isinstance(layers, list) and args.num_layers not in (None, len(layers)):
        shown = f"--window-attn-skip-freq {layers}".replace(" [", " '[")
        raise UserError(f"{shown}': {len(layers)} entries for --num-layers {args.num_layers}; give one for each layer")
    if args.num_experts and args.moe_router_topk > args.num_experts:
        raise UserError(f"--moe-router-topk {args.moe_router_topk} with --num-experts {args.num_experts}: use fewer")
    length, tensor, context = args.seq_length, args.tensor_model_parallel_size, args.context_parallel_size
    if args.sequence_parallel and length and tensor > 1 and length % (tensor * context):
        shared = f"--tensor-model-parallel-size {tensor}"
        shared += f" times --context-parallel-size {context}" if context > 1 else ""
        raise UserError(f"--seq-length {length} with --sequence-parallel: use a multiple of {shared}")
    if not 0 <= args.fp8_margin <= LARGEST_MARGIN:
        lost = "large values clip" if args.fp8_margin < 0 else "small values vanish"
        raise UserError(f"--fp8-margin {args.fp8_margin}: {lost}; use 0 to {LARGEST_MARGIN}")
    for flag, beta in (("--adam-beta1", args.adam_beta1), ("--adam-beta2", args.adam_beta2)):
        if not 0 <= beta < 1:
            raise UserError(f"{flag} {beta}: use a number from 0 to below 1")
    if not args.adam_eps > 0:
        raise UserError(f"--adam-eps {args.adam_eps}: a weight without gradients would become NaN; use one above 0")


def largest_batch(args: Namespace) -> int:
    """Samples in the largest step: --global-batch-size, or the largest of --step-batch-size-schedule; 0 if neither.

    For a run with a schedule, Megatron's validation sets the global batch size to one micro-batch per rank.
    """
    if args.step_batch_size_schedule is None:
        return args.global_batch_size or 0
    return max(scheduled_batches(args), default=0)


def scheduled_batches(args: Namespace) -> list[int]:
    """The batches of --step-batch-size-schedule, in order, in samples."""
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator as Stock

    try:
        return [batch for _, batch in Stock._parse_schedule(args.step_batch_size_schedule, None)]
    except ValueError:
        return []  # Megatron reports the bad schedule itself, later


def check_optimizer(args: Namespace, cells: dict[str, str]) -> None:
    """Refuse optimizer settings that the formats of weights and states do not support."""
    if cells["weight"] == "fp8" and not args.adam_beta1**2 < args.adam_beta2:
        raise UserError(
            f"--adam-beta1 {args.adam_beta1} with --adam-beta2 {args.adam_beta2}: E4M3 weights need beta1^2 < beta2, "
            "which bounds a step; change one, or add --fp8-weight bf16"
        )
    if cells["partition"] == "greedy" and args.overlap_grad_reduce:
        raise UserError(
            "--overlap-grad-reduce with --fp8-partition greedy: greedy uses one bucket, so nothing can overlap; "
            "remove it, or use even"
        )


def check_geometry(args: Namespace) -> None:
    """Refuse shapes that an FP8 GEMM does not support: it needs multiples of 16 on every tensor-parallel rank.

    With --use-checkpoint-args the shapes come later, from a checkpoint; the layers check those.
    """
    if args.hidden_size is not None:
        _require_multiple("--hidden-size", args.hidden_size, args.hidden_size, GEMM_MULTIPLE)
        for flag in ("--q-lora-rank", "--kv-lora-rank") if args.multi_latent_attention else ():
            if rank := value_of(args, flag):
                _require_multiple(flag, rank, rank, GEMM_MULTIPLE)
        tp = args.tensor_model_parallel_size
        for flag, value, size in _sharded_sizes(args):
            _require_multiple(flag, value, size, GEMM_MULTIPLE * tp)
        if value_of(args, "--fp8-experts") and (width := args.moe_ffn_hidden_size):
            parts = args.expert_tensor_parallel_size or tp  # as Megatron's own default
            _require_multiple("--moe-ffn-hidden-size", width, width, GEMM_MULTIPLE * parts)
        _check_head(args)
    length = args.seq_length or args.encoder_seq_length
    if args.fp8_wgrad and length and args.micro_batch_size:  # K of a weight-gradient GEMM is the number of tokens
        pieces = args.context_parallel_size * args.mlp_chunks_for_training
        tokens = length * args.micro_batch_size
        if tokens % (GEMM_MULTIPLE * pieces):
            raise UserError(
                f"--seq-length {length} with --micro-batch-size {args.micro_batch_size}: {tokens} tokens in "
                f"{pieces} part(s); an FP8 weight gradient needs a multiple of {GEMM_MULTIPLE} in each part: "
                "change one of the two, or add --no-fp8-wgrad"
            )


def _check_head(args: Namespace) -> None:
    """Check --fp8-lm-head if the flags give the vocabulary size. The head checks a size that a tokenizer gives."""
    unit = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    vocabulary = args.vocab_size if args.tokenizer_type == "NullTokenizer" and args.pad_vocab_size else None
    if value_of(args, "--fp8-lm-head") and vocabulary and not (args.padded_vocab_size or args.use_checkpoint_args):
        rows = -(-vocabulary // unit) * args.make_vocab_size_divisible_by  # on each tensor-parallel rank
        if rows % GEMM_MULTIPLE:
            raise UserError(
                f"--make-vocab-size-divisible-by {args.make_vocab_size_divisible_by} with --fp8-lm-head: a head of "
                f"{rows} rows on each tensor-parallel rank is not a multiple of {GEMM_MULTIPLE}; use "
                f"{math.lcm(args.make_vocab_size_divisible_by, GEMM_MULTIPLE)}, or remove --fp8-lm-head"
            )


def _sharded_sizes(args: Namespace) -> Iterator[tuple[str, int, int]]:
    """(flag, value, size) of every GEMM dimension that tensor parallelism divides."""
    heads = args.num_attention_heads
    if args.multi_latent_attention and heads:
        keys, values = args.qk_head_dim, args.v_head_dim
        yield "--num-attention-heads", heads, heads * (keys + args.qk_pos_emb_head_dim)
        yield "--num-attention-heads", heads, heads * (keys + values)
        yield "--v-head-dim", values, heads * values
    elif heads:
        channels = args.kv_channels or args.hidden_size // heads
        groups = args.num_query_groups if args.group_query_attention else heads
        yield "--num-attention-heads", heads, heads * channels
        queries = 2 * heads if args.attention_output_gate else heads
        yield "--num-query-groups", groups, (queries + 2 * groups) * channels
    only_experts = args.num_experts and (
        args.moe_layer_freq == 1 or (isinstance(args.moe_layer_freq, list) and 0 not in args.moe_layer_freq)
    )
    if not only_experts:
        ffn = args.ffn_hidden_size
        if ffn is None:  # Megatron's own defaults
            ffn = int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
        yield "--ffn-hidden-size", ffn, ffn
    if args.num_experts and (shared := args.moe_shared_expert_intermediate_size):
        yield "--moe-shared-expert-intermediate-size", shared, shared


def _require_multiple(flag: str, value: int, size: int, multiple: int) -> None:
    if size % multiple:
        if size == value:
            what, remedy = "", f"use {-(-size // multiple) * multiple}"
        else:
            what, remedy = f" a linear of {size} is", "change it, or the size of a head"
        raise UserError(
            f"{flag} {value}:{what} not a multiple of {multiple} (FP8 GEMMs need {GEMM_MULTIPLE} on each "
            f"tensor-parallel rank); {remedy}, or add --fp8-gemm bf16"
        )
