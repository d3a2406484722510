"""Refuses combinations of stock flags with which megatron-core 0.19 crashes or does nothing, before the run starts.

stock_errors.py handles Megatron's own checks; this file has the combinations that Megatron does not check.  Most of
them crash without a level too: a traceback of an operation on None or on an object of another type, sometimes hours
later, at the first evaluation or at the end of the training.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from ..errors import UserError
from .flag import whole_number

_STOCKS = "pretrain_gpt.py"
_OF_ONE_AXIS = (_STOCKS, "pretrain_gpt_fp8.py")  # scripts whose positions have one axis


class Fault(NamedTuple):
    """Megatron crashes, or does not what is asked, if `test` is true of the arguments.

    line: the error line, with a remedy. Both take the arguments from before Megatron's validation.
    """

    test: Callable[[Namespace], bool]
    line: Callable[[Namespace], str]


def _has_virtual_stages(args: Namespace) -> bool:
    count, layers = args.num_virtual_stages_per_pipeline_rank, args.num_layers_per_virtual_pipeline_stage
    if count is None and layers:
        count = (args.num_layers or 0) // (args.pipeline_model_parallel_size * layers)
    return (count or 1) > 1


def _of_evaluations(args: Namespace) -> str:
    """The error line if virtual stages refuse an evaluation's batch, other than training's; computed before Megatron
    does, which fails hours later, at the first evaluation."""
    size, trained = args.micro_batch_size or 1, args.global_batch_size
    evaluated = args.eval_global_batch_size, args.eval_micro_batch_size
    usual = trained is not None and evaluated[0] in (None, trained) and evaluated[1] in (None, size)
    if usual or not args.eval_iters or not _has_virtual_stages(args):
        return ""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    replicas = max(1, args.world_size // model)
    batch = evaluated[0] or trained or size * replicas  # the last with a schedule
    count = batch // ((evaluated[1] or size) * replicas)
    of_training = evaluated == (None, None) and args.step_batch_size_schedule is None
    return of_virtual_stages(args, "--global-batch-size" if of_training else "--eval-global-batch-size", batch, count)


FAULTS = (
    Fault(
        lambda args: args.eval_interval is None and not args.skip_train and not args.full_validation,
        lambda args: "--eval-interval: missing; Megatron computes its samples from it; give one, such as 1000",
    ),
    Fault(
        lambda args: args.full_validation and not args.multiple_validation_sets,
        lambda args: "--full-validation: Megatron then needs several validation sets; add --multiple-validation-sets",
    ),
    Fault(
        lambda args: not args.pad_vocab_size and args.padded_vocab_size is None,
        lambda args: "--no-pad-vocab-size: Megatron then does not know the vocabulary size; add --padded-vocab-size "
        "N, or remove the flag",
    ),
    Fault(
        lambda args: not _are_numbers(args.phase_transition_iterations),
        lambda args: f"--phase-transition-iterations {args.phase_transition_iterations}: use whole numbers separated "
        "by commas, such as 1000,2000",
    ),
    Fault(
        lambda args: bool(args.phase_transition_iterations) and not args.train_samples,
        lambda args: f"--phase-transition-iterations {args.phase_transition_iterations}: Megatron counts the last "
        "phase by --train-samples; give that instead of --train-iters, or remove the flag",
    ),
    Fault(
        lambda args: args.position_embedding_type == "mrope" and os.path.basename(sys.argv[0]) in _OF_ONE_AXIS,
        lambda args: "--position-embedding-type mrope: needs positions with three axes, and "
        f"{os.path.basename(sys.argv[0])} gives one; use rope",
    ),
    Fault(
        lambda args: args.tensor_model_parallel_size > 1
        and args.eval_micro_batch_size not in (None, args.micro_batch_size)
        and bool(args.eval_iters or args.full_validation)
        and os.path.basename(sys.argv[0]) == _STOCKS,
        lambda args: f"--eval-micro-batch-size {args.eval_micro_batch_size}: with --tensor-model-parallel-size "
        f"{args.tensor_model_parallel_size} Megatron's other ranks expect batches of --micro-batch-size "
        f"{args.micro_batch_size} in an evaluation too; use {args.micro_batch_size}, or pretrain_gpt_fp8.py",
    ),
    Fault(lambda args: bool(_of_evaluations(args)), lambda args: _of_evaluations(args)),
    Fault(  # it would train no step, and end with exit code 0
        lambda args: 0 < (args.train_samples or 0) < (args.global_batch_size or 0),
        lambda args: f"--train-samples {args.train_samples}: fewer than --global-batch-size {args.global_batch_size}, "
        f"so there is no step; use {args.global_batch_size} or more",
    ),
    Fault(
        lambda args: args.use_sharp,
        lambda args: "--use-sharp: megatron-core 0.19 cannot start with it: it asks for a group that it has not made; "
        "remove it",
    ),
    Fault(
        # The first loss is NaN then, if it is anything; and Megatron saves, without --save.
        lambda args: not args.perform_initialization and not (args.load or args.pretrained_checkpoint),
        lambda args: "--no-initialization: the weights would be what the memory held before; add --load or "
        "--pretrained-checkpoint, or remove the flag",
    ),
    Fault(
        lambda args: bool(args.num_experts) and args.moe_layer_freq == 0,
        lambda args: "--moe-layer-freq 0: Megatron gives one layer of so many experts; use 1 for all layers, or a list "
        "such as [0,1]",
    ),
    Fault(
        lambda args: bool(args.num_experts)
        and args.moe_input_jitter_eps is not None
        and args.moe_input_jitter_eps <= 0,
        lambda args: f"--moe-input-jitter-eps {args.moe_input_jitter_eps:g}: Megatron draws from 1 - this to 1 + this; "
        "use a number above 0, or remove it",
    ),
    Fault(
        lambda args: _by_groups(args) and args.moe_router_topk > _in_reach(args),
        lambda args: f"--moe-router-topk {args.moe_router_topk}: a token's --moe-router-group-topk "
        f"{args.moe_router_group_topk} of --moe-router-num-groups {args.moe_router_num_groups} groups have "
        f"{_in_reach(args)} of the --num-experts {args.num_experts}; use at most so many, or larger or more groups",
    ),
    Fault(
        lambda args: _by_groups(args) and args.moe_router_group_topk > args.moe_router_topk,
        lambda args: f"--moe-router-group-topk {args.moe_router_group_topk}: more than --moe-router-topk "
        f"{args.moe_router_topk}, so Megatron would score a group by none of its experts and take any groups; use "
        f"--moe-router-group-topk {args.moe_router_topk} or less",
    ),
)


def check_faults(args: Namespace) -> None:
    """Raise UserError of one line for the first fault. args: parsed, before Megatron's validation."""
    for fault in FAULTS:
        if fault.test(args):
            raise UserError(fault.line(args))


def _by_groups(args: Namespace) -> bool:
    """Whether a token chooses groups of experts first, and the flags pass Megatron's own checks of it."""
    chosen, groups = args.moe_router_group_topk, args.moe_router_num_groups
    return bool(args.num_experts and chosen and groups and args.num_experts % groups == 0 and chosen <= groups)


def _in_reach(args: Namespace) -> int:
    """How many experts the groups of a token have."""
    return args.moe_router_group_topk * args.num_experts // args.moe_router_num_groups


def of_virtual_stages(args: Namespace, flag: str, batch: int, count: int) -> str:
    """The error line if the interleaved schedule refuses a batch of `count` micro-batches; else "".

    megatron.core.pipeline_parallel.schedules has the rule: a group has as many as there are stages, or more, and the
    last one may be smaller, but not smaller than the number of stages.
    """
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or stages
    # A group of fewer than the stages is refused whatever the batch is.
    if group < stages or (count >= group and not 0 < count % group < stages):
        return ""
    few = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    groups = f"groups of {group}" if group == stages else f"groups of {group}, the last of {stages} or more"
    return f"{flag} {batch}: {few}, and virtual stages take them in {groups}; change it"


def _are_numbers(text: str | None) -> bool:
    return not text or all(whole_number(part.strip()) is not None for part in text.split(","))
