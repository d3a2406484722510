"""What ends a job only as Megatron builds its model, at its first step or evaluation, or at a later step.

A rehearsal has fewer layers, micro-batches and replicas, so it would pass where the job ends.
"""

from argparse import Namespace
from collections.abc import Iterator

from ...errors import check_all
from ...flags.numeric_checks import scheduled_batches


def check_layers(config) -> None:
    """Raise Megatron's own error if a model's layers do not divide into the stages and their virtual parts.

    config: the TransformerConfig of all of the job's ranks.
    """
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    if config.pipeline_model_parallel_layout is not None:  # it lists each stage's layers, and is checked already
        return
    for rank in range(config.pipeline_model_parallel_size):
        for part in range(config.virtual_pipeline_model_parallel_size or 1):
            get_num_layers_to_build(config, part, rank)


def check_ranks(args: Namespace) -> None:
    """Raise UserError for batches and nodes that do not divide among the job's ranks, and Megatron's own error for a
    schedule that it cannot read. args: Megatron's, validated."""
    if args.step_batch_size_schedule is not None:
        from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator as Schedule

        Schedule(args.micro_batch_size, args.data_parallel_size, args.decrease_batch_size_if_needed, 1,
                 args.step_batch_size_schedule, args.seq_length)  # fmt: skip
    check_all([*_batches(args), *_nodes(args)])


def _batches(args: Namespace) -> Iterator[str]:
    flag, trained = "--global-batch-size", [args.global_batch_size]
    if args.step_batch_size_schedule is not None:
        flag = f"--step-batch-size-schedule '{args.step_batch_size_schedule}': a batch of"
        trained = scheduled_batches(args)
    batches = [(flag, batch, args.micro_batch_size) for batch in trained]
    evaluated = args.eval_global_batch_size, args.eval_micro_batch_size
    if args.eval_iters and (flag, *evaluated) not in batches:  # by default as trained; with a schedule not so
        batches.append(("--eval-global-batch-size", *evaluated))
    for flag, batch, size in batches:
        count, rest = divmod(batch, size * args.data_parallel_size)
        if rest and not args.decrease_batch_size_if_needed:
            yield f"{flag} {batch}: no multiple of {size} for each of {args.data_parallel_size} data-parallel ranks"
        elif args.virtual_pipeline_model_parallel_size and (groups := _refused_groups(args, count)):
            few = "1 micro-batch" if count == 1 else f"{count} micro-batches"
            yield f"{flag} {batch}: {few}, and virtual stages take them in {groups}; change it"


def _refused_groups(args: Namespace, count: int) -> str:
    """The groups in which the interleaved schedule takes micro-batches, if it refuses `count` of them; else "".

    megatron.core.pipeline_parallel.schedules has the rule: a group has as many as there are stages, or more, and the
    last one may be smaller, but not smaller than the number of stages.
    """
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or stages
    if group < stages:  # refused whatever the batch is; a rehearsal has the same sizes
        return ""
    if count >= group and not 0 < count % group < stages:
        return ""
    return f"groups of {group}" if group == stages else f"groups of {group}, the last of {stages} or more"


def _nodes(args: Namespace) -> Iterator[str]:
    nodes, data = args.fp8_grad_reduce_hierarchy or "off", args.data_parallel_size * args.context_parallel_size
    if nodes.isdecimal() and data % int(nodes):
        yield (
            f"--fp8-grad-reduce-hierarchy {nodes}: does not divide the data-parallel size {data}; give the number of "
            "data-parallel ranks in a node, or off"
        )
