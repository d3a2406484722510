"""What ends a job only as Megatron builds its model, at its first step or evaluation, or at a later step.

A rehearsal has fewer layers, micro-batches and replicas, so it would pass where the job ends.
"""

from argparse import Namespace
from collections.abc import Iterator

from ...errors import check_all
from ...flags.numeric_checks import scheduled_batches
from ...flags.stock_faults import of_virtual_stages


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
        elif args.virtual_pipeline_model_parallel_size:
            yield from filter(None, [of_virtual_stages(args, flag, batch, count)])


def _nodes(args: Namespace) -> Iterator[str]:
    nodes, data = args.fp8_grad_reduce_hierarchy or "off", args.data_parallel_size * args.context_parallel_size
    if nodes.isdecimal() and data % int(nodes):
        yield (
            f"--fp8-grad-reduce-hierarchy {nodes}: does not divide the data-parallel size {data}; give the number of "
            "data-parallel ranks in a node, or off"
        )
