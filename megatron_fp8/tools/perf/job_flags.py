"""Read a job's flags with Megatron's parser and the plugin's, and turn them into the cost model's Workload.

Nothing is built or trained. Each flag that the model does not cover is refused with a line. A flag that changes neither
bytes nor time (learning rate, data, logs) passes.
"""

import contextlib
import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ...errors import UserError, check_all
from ...flags.command import job_of
from ...flags.dispatch import OFF
from ...flags.level import CELLS, LEVEL, is_stock
from ...flags.numeric_checks import largest_batch
from ...rebind import Rebound
from .job import Job
from .systems import SYSTEMS, TE_GATHERS_FP8, System, asked_for, chosen
from .workload import Workload

# Flags that change weights, gradients or states and are not counted: {Megatron's argument: values that pass}.
_NOT_COUNTED: dict[str, tuple[str, ...]] = dict.fromkeys((
    "use_megatron_fsdp", "use_torch_fsdp2", "optimizer_cpu_offload", "mtp_num_layers", "hybrid_layer_pattern",
    "hybrid_override_pattern", "is_hybrid_model", "experimental_attention_variant", "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json", "fp16", "use_precision_aware_optimizer",
    "first_last_layers_bf16", "fp8_bf16_layers", "fp8_emulate", "fp8_param_gather",
), ()) | {"optimizer": ("adam",), "num_distributed_optimizer_instances": ("1",)}  # fmt: skip
# Flags that change time or activations and are not modelled. The memory report counts the gates' weights.
_NOT_MODELLED: dict[str, tuple[str, ...]] = dict.fromkeys((
    "distribute_saved_activations", "cpu_offloading_num_layers", "fine_grained_activation_offloading", "window_size",
    "fp32_residual_connection", "reset_attention_mask", "quick_geglu", "attention_output_gate",
), ()) | {
    "attention_backend": ("auto", "flash", "fused"), "softmax_type": ("vanilla",), "fp8_recipe": ("delayed",),
    "fp8_grad_reduce": ("block",), "fp8_grad_reduce_hierarchy": ("off", "node"),
}  # fmt: skip
# The same, of experts.
_EXPERTS_NOT_MODELLED: dict[str, tuple[str, ...]] = dict.fromkeys((
    "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_shared_expert_overlap", "moe_extended_tp",
    "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad",
), ()) | {"moe_token_dispatcher_type": ("allgather", "alltoall")}  # fmt: skip
# Not counted either, with the word that a rehearsal's page uses for it.
_UNCOUNTED = {"moe_latent_size": "latent experts"} | dict.fromkeys(
    ("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
     "account_for_loss_in_pipeline_split", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    "uneven stages",
)  # fmt: skip
# Flags that a level switches off and that are not modelled in other columns, except for the first.
_SWITCHED_OFF = (
    "--fp8-param-gather", "--moe-shared-expert-overlap", "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute",
)  # fmt: skip
_NEVER_MIND = "--eval-interval 1000 --train-iters 1 --lr 1e-4 --mock-data".split()  # required by the parser; no cost


@dataclass(frozen=True)
class Flags:
    """The model, layout and batch of a command line; the system is not chosen yet.

    Attributes:
        args: what Megatron's parser returns, with the level's flags; not validated.
        level: --fp8-level, or None if it is missing or O0.
        gpus: the job's GPUs, if the launcher is given and says how many.
        fp8_param_gather: whether Transformer Engine keeps and gathers FP8 weights; `args` never say so.
        left_out: flags that the level switches off, and that no other column has.
    """

    args: Namespace
    level: str | None
    gpus: int | None = None
    fp8_param_gather: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def replica(self) -> int:
        """GPUs of one model replica."""
        args = self.args
        return args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size


def parse(words: Sequence[str]) -> Flags:
    """Read a job's command, or its flags alone; a leading "--" is skipped.  Raises UserError as a run would, except
    that Transformer Engine may be missing here."""
    from ... import plugin  # late, like others here: --help must not wait for torch and Megatron
    from ...flags import config, dpo

    command = job_of(words)
    tunes = command.script == dpo.SCRIPT
    before, variables, replaced, said = sys.argv, dict(os.environ), Rebound(), io.StringIO()
    try:
        replaced.replace(config, "installed", lambda module: True)  # the job's machines may have it: TE
        os.environ.update(command.variables)
        plugin.install(begins=False)
        import megatron.training.arguments as arguments

        sys.argv = ["pretrain_gpt_fp8.py", *_NEVER_MIND, *command.words]
        with contextlib.redirect_stdout(said):
            args = arguments.parse_args(dpo.add_arguments if tunes else None)
    except SystemExit:  # raised by --help
        print(said.getvalue(), end="")
        raise
    finally:
        sys.argv = before
        replaced.put_back()
        plugin.uninstall()
        os.environ.clear()
        os.environ.update(variables)
    args.dpo_reference = tunes and not (args.dpo_reference_scores or args.dpo_score_reference)
    if args.use_checkpoint_args:
        raise UserError("--use-checkpoint-args: the sizes are in a checkpoint; give them as flags instead")
    level, gathers = LEVEL.given(args), bool(args.fp8_param_gather)
    level = None if level is None or is_stock(level) else level
    left_out = tuple(_switched_off(args)) if level else ()
    args.fp8_param_gather = False
    gpus = None if command.gpus == 1 else command.gpus  # 1: no launcher, or it gives no number
    return Flags(args, level, gpus, gathers, left_out)


def _switched_off(args: Namespace) -> Iterator[str]:
    """Apply what a level switches off and is not modelled, with a line each. Yields the flags that no column has."""
    from ...flags import graphs
    from ...flags.stock import ADAPTED, rows

    for row in rows(args, ADAPTED):
        if row.flag in _SWITCHED_OFF:
            print(f"[fp8] {row.shown(args)}: {row.note}", file=sys.stderr)
            row.adapt(args)
            if row.flag != "--fp8-param-gather":
                yield row.flag
    if graphs.asked(args) and (flag := graphs.inside(args)):
        print(f"[fp8] {graphs.spelling(args)}: a level has no CUDA graph with {flag}", file=sys.stderr)
        if not (args.num_experts and graphs.stock_asked(args)):
            return
        yield graphs.spelling(args)  # with experts stock's is not modelled
        args.cuda_graph_impl, args.enable_cuda_graph, args.external_cuda_graph = "none", False, False


def workload(flags: Flags, gpus: int, system: System | str | None = None, **changes: Any) -> Workload:
    """The Workload of flags on `gpus` GPUs.

    system: one of systems.py, or None for the flags' own (level, Transformer Engine's FP8 or stock).  changes: values
    for Megatron's arguments, by name.
    """
    from ...flags import graphs

    args = Namespace(**{**vars(flags.args), **changes})
    if isinstance(system, str) or system is None:
        system = chosen(system or flags.level or ("te" if args.fp8 else "bf16"))
    if system is SYSTEMS["te"] and flags.fp8_param_gather:
        system = TE_GATHERS_FP8
    check_given(args, "seq_length", "micro_batch_size")
    data, tensor, context = data_parallel(args, gpus), args.tensor_model_parallel_size, args.context_parallel_size
    _refuse(args)
    graphed = graphs.asked(args) and not graphs.inside(args) if system.level else graphs.stock_asked(args)
    if graphed and args.num_experts and not (system.level and args.moe_grouped_gemm):
        remedy = "add --moe-grouped-gemm" if system.level else "name levels alone with --systems, or remove it"
        raise UserError(f"{graphs.spelling(args)} with {system.title}'s experts: not modelled; {remedy}")
    check_optimizer(args, data)
    again = getattr(args, "recompute_activations", False)  # validation turns it into --recompute-granularity selective
    modules = tuple(args.recompute_modules or ("core_attn",))
    overrides = cells_given(args)
    return Workload(
        job(args, data),
        asked_for(system, overrides) if system.level else system,
        sequence=args.seq_length,
        micro_batch=args.micro_batch_size,
        global_batch=largest_batch(args) or args.micro_batch_size * data // context,
        sequence_parallel=bool(args.sequence_parallel) and tensor > 1,
        context=context,
        keys=_keys(args) if system.level else "",
        virtual=virtual(args),
        recompute=args.recompute_granularity or ("selective" if again else "none"),
        modules=modules,
        recomputed_layers=args.recompute_num_layers if args.recompute_method == "block" else None,
        overlap_reduce=bool(args.overlap_grad_reduce),
        overlap_gather=bool(args.overlap_param_gather),
        fp8_head=bool(getattr(args, "fp8_lm_head", False)) and system.level is not None,
        loss_chunks=(getattr(args, "fp8_loss_chunks", None) or 1) if system.level else 1,
        fp8_activations=bool(getattr(args, "fp8_activations", False)) and system.level is not None,
        keeps_transposes=bool(args.keep_fp8_transpose_cache) and system.level is not None,
        dropout=args.hidden_dropout > 0,
        graphed=graphed,
        two_levels=getattr(args, "fp8_grad_reduce_hierarchy", None) == "node",
        overrides=overrides if system.level else None,
        topk=args.moe_router_topk,
        grouped=bool(args.moe_grouped_gemm),
        permute_fused=bool(args.moe_permute_fusion),
        dispatcher=args.moe_token_dispatcher_type,
        router_fp32=args.moe_router_dtype == "fp32",
        fp8_dispatch=getattr(args, "fp8_dispatch", None) or OFF if system.level else OFF,
    )


def _keys(args: Namespace) -> Literal["gathered", "fetched", ""]:
    """How a level's context parallelism gets K and V, by flags."""
    if args.fp8_attention == "te":
        return ""
    return "fetched" if "p2p" in args.cp_comm_type else "gathered"


def cells_given(args: Namespace) -> dict[str, str]:
    """{cell: value} of the flags that override a level's table."""
    return {cell.name: value for cell in CELLS if (value := getattr(args, cell.dest, None)) is not None}


def check_given(args: Namespace, *more: str) -> None:
    """Raise UserError if the model's sizes, or `more` of Megatron's arguments, are missing."""
    for name in ("num_layers", "hidden_size", "num_attention_heads", *more):
        if getattr(args, name) is None:
            raise UserError(f"--{name.replace('_', '-')} is missing; give it behind --")


def data_parallel(args: Namespace, gpus: int) -> int:
    """Data-parallel ranks on `gpus` GPUs, with context-parallel ones.  Raises UserError if they do not divide."""
    tensor, pipeline, context = (
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    )  # fmt: skip
    if gpus % (tensor * pipeline * context):
        raise UserError(
            f"--gpus {gpus}: no multiple of --tensor-model-parallel-size {tensor} times "
            f"--pipeline-model-parallel-size {pipeline} times --context-parallel-size {context}; change one"
        )
    return gpus // (tensor * pipeline)


def job(args: Namespace, data: int) -> Job:
    """The Job of Megatron's arguments on `data` data-parallel ranks (context parallelism included)."""
    vocabulary = getattr(args, "padded_vocab_size", None) or args.vocab_size
    if not vocabulary:
        raise UserError("--vocab-size is missing, and no tokenizer is read here; give its number of tokens")
    given: dict[str, Any] = {field.name: getattr(args, field.name, None) for field in fields(Job)}
    given |= {"vocab_size": vocabulary, "data_parallel_size": data, "disable_bias_linear": not args.add_bias_linear}
    given |= {field.name: bool(given[field.name]) for field in fields(Job) if field.type is bool}
    if not isinstance(given["moe_layer_freq"], int):
        given["moe_layer_freq"] = tuple(given["moe_layer_freq"])
    if not args.group_query_attention:
        given["num_query_groups"] = None
    return Job(**given)


def uncounted(args: Namespace) -> list[str]:
    """The parts of a job that neither the memory report nor the cost model counts."""
    found = [what for name, what in _UNCOUNTED.items() if getattr(args, name, None)]
    found += ["experts with biases"] if args.num_experts and args.add_bias_linear else []
    return list(dict.fromkeys([*found, *(shown for _, shown in _other(args, _NOT_COUNTED))]))


def check_counted(args: Namespace) -> None:
    """Raise UserError if a job has parts that are not counted, a line each."""
    check_all(_mistakes(args, _NOT_COUNTED))


def _mistakes(args: Namespace, table: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """A line for each flag that is not counted or, by the table, not modelled."""
    for _, shown in _other(args, dict.fromkeys(_UNCOUNTED, ())):
        yield f"{shown}: not modelled; give a GPT with even stages"
    for name, shown in _other(args, table):
        yield f"{shown}: not modelled; {'use --bf16 instead' if name == 'fp16' else 'remove it'}"


def _other(args: Namespace, table: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """(Name, flag with its value) of each argument of the table whose value does not pass."""
    from ...flags.stock import plain

    for name, passing in table.items():
        if (value := getattr(args, name, None)) and plain(value) not in passing:
            yield name, f"--{name.replace('_', '-')}" + ("" if value is True else f" {plain(value)}")


def megatrons_memory(flags: Flags, w: Workload) -> tuple[float, float]:
    """GB (10^9 bytes) of (weights and optimizer, activations), by Megatron's own theory for stock BF16."""
    import megatron.training.theoretical_memory_usage as theory

    job = w.job
    args = Namespace(**{
        **vars(flags.args), "kv_channels": w.job.channels[0], "ffn_hidden_size": w.mlp()[1],
        "padded_vocab_size": w.vocabulary, "data_parallel_size": w.data, "world_size": w.gpus,
        "micro_batch_size": w.micro_batch,
        "num_query_groups": job.num_query_groups or job.num_attention_heads, "sequence_parallel": w.sequence_parallel,
        "virtual_pipeline_model_parallel_size": w.virtual if w.virtual > 1 else None,
        "expert_tensor_parallel_size": job.expert_tensor_parallel_size or w.tensor,
        "moe_ffn_hidden_size": job.expert_width, "moe_layer_freq": [int(moe) for moe in job.moe],
    })  # fmt: skip
    selective = w.sequence_parallel and w.recompute == "selective"
    of_activations = theory.compute_activation_memory if selective else theory.compute_activation_memory_without_sp
    weights = theory.compute_weight_and_optimizer_memory(args)
    return weights / 1e9, of_activations(args, num_microbatches=w.micro_batches) / 1e9


def check_optimizer(args: Namespace, data: int) -> None:
    """Raise UserError if several data-parallel ranks do not use the distributed optimizer. Only its time is modelled,
    though the memory of both is counted."""
    if not args.use_distributed_optimizer and data > 1:
        raise UserError("only the distributed optimizer is modelled; add --use-distributed-optimizer")


def _refuse(args: Namespace) -> None:
    check_all(_mistakes(args, _NOT_COUNTED | _NOT_MODELLED | (_EXPERTS_NOT_MODELLED if args.num_experts else {})))
    if not args.bf16:
        raise UserError("--bf16: missing, and FP32 is not modelled; add it")
    if not args.fp8_wgrad:
        raise UserError("--no-fp8-wgrad: not modelled; remove it")
    if args.recompute_granularity == "full":
        if args.recompute_method is None:
            raise UserError("--recompute-granularity full: add --recompute-method uniform, or block")
        if (layers := args.recompute_num_layers) is None:
            raise UserError("--recompute-granularity full: add --recompute-num-layers 1, or more")
        if args.recompute_method == "uniform" and layers > 1:
            raise UserError(f"--recompute-num-layers {layers}: not modelled with uniform; use 1, or block")


def virtual(args: Namespace) -> int:
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return args.num_virtual_stages_per_pipeline_rank
    if (layers := args.num_layers_per_virtual_pipeline_stage) is None:
        return 1
    stage = args.num_layers // args.pipeline_model_parallel_size
    if stage % layers:
        flag = f"--num-layers-per-virtual-pipeline-stage {layers}"
        raise UserError(f"{flag}: a stage has {stage} layers, which it does not divide; change one of the two")
    return stage // layers
