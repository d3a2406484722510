"""A job's flags, read by Megatron's own parser and the plugin's, as the cost model's Workload.

Nothing is built and nothing trained. Flags that the model cannot honour are refused in a line; flags that change
neither bytes nor time (learning rate, data, logs) pass.
"""

import contextlib
import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...errors import UserError
from ...flags.command import job_of
from ...flags.level import CELLS, LEVEL, is_stock
from ...flags.numeric_checks import largest_batch
from ...rebind import Rebound
from .job import Job
from .systems import System, asked_for, chosen
from .workload import Workload

# What changes weights, gradients or states and is not counted: {name in Megatron's arguments: values that pass}.
_NOT_COUNTED: dict[str, tuple[str, ...]] = dict.fromkeys((
    "use_megatron_fsdp", "use_torch_fsdp2", "optimizer_cpu_offload", "mtp_num_layers", "hybrid_layer_pattern",
    "hybrid_override_pattern", "is_hybrid_model", "experimental_attention_variant", "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json", "fp16", "use_precision_aware_optimizer", "grad_reduce_in_bf16",
    "first_last_layers_bf16", "fp8_bf16_layers", "fp8_emulate", "fp8_param_gather",
), ()) | {"optimizer": ("adam",), "num_distributed_optimizer_instances": ("1",)}  # fmt: skip
# What changes time or activations, and is not modelled; of the gates the weights are counted.
_NOT_MODELLED: dict[str, tuple[str, ...]] = dict.fromkeys((
    "distribute_saved_activations", "cpu_offloading_num_layers", "fine_grained_activation_offloading", "window_size",
    "fp32_residual_connection", "reset_attention_mask", "quick_geglu", "attention_output_gate",
), ()) | {
    "attention_backend": ("auto", "flash", "fused"), "softmax_type": ("vanilla",), "fp8_recipe": ("delayed",),
    "fp8_grad_reduce": ("block",), "fp8_grad_reduce_hierarchy": ("off", "node"),
}  # fmt: skip
# Nor what a page has a word for.
_UNCOUNTED = {"num_experts": "experts", "multi_latent_attention": "multi-latent attention"} | dict.fromkeys(
    ("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
     "account_for_loss_in_pipeline_split", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    "uneven stages",
)  # fmt: skip
_NEVER_MIND = "--eval-interval 1000 --train-iters 1 --lr 1e-4 --mock-data".split()  # costs nothing, and must be said


@dataclass(frozen=True)
class Flags:
    """A command line's model, layout and batch; the system is still open.

    Attributes:
        args: as Megatron's parser returns them, with the level's flags; not validated.
        level: --fp8-level, None where it is not given or O0.
        gpus: of the job, where its launcher was given and says how many.
    """

    args: Namespace
    level: str | None
    gpus: int | None = None

    @property
    def replica(self) -> int:
        """GPUs of one."""
        args = self.args
        return args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size


def parse(words: Sequence[str]) -> Flags:
    """Read a job's command, or its flags alone; "--" in front is passed over.  Raises UserError as a run would, but
    where Transformer Engine is missing here."""
    from ... import plugin  # which imports torch and Megatron: seconds that --help need not wait for, as others here
    from ...flags import config

    command = job_of(words)
    before, variables, replaced, said = sys.argv, dict(os.environ), Rebound(), io.StringIO()
    try:
        replaced.replace(config, "installed", lambda module: True)  # TE, for its attention: the job's machines may
        os.environ.update(command.variables)
        plugin.install(begins=False)
        import megatron.training.arguments as arguments

        sys.argv = ["pretrain_gpt_fp8.py", *_NEVER_MIND, *command.words]
        with contextlib.redirect_stdout(said):
            args = arguments.parse_args()
    except SystemExit:  # of --help
        print(said.getvalue(), end="")
        raise
    finally:
        sys.argv = before
        replaced.put_back()
        plugin.uninstall()
        os.environ.clear()
        os.environ.update(variables)
    if args.use_checkpoint_args:
        raise UserError("--use-checkpoint-args: the sizes are in a checkpoint; give them as flags instead")
    level = LEVEL.given(args)
    if level is None or is_stock(level):
        level = None
    else:
        _switch_off(args)
    return Flags(args, level, None if command.gpus == 1 else command.gpus)  # 1: no launcher, or one that does not say


def _switch_off(args: Namespace) -> None:
    """What a level switches off, which without one is not modelled."""
    from ...flags.stock import ADAPTED, rows

    for row in rows(args, ADAPTED):
        if row.flag == "--fp8-param-gather":
            print(f"[fp8] {row.shown(args)}: {row.note}", file=sys.stderr)
            row.adapt(args)


def workload(flags: Flags, gpus: int, system: System | str | None = None, **changes: Any) -> Workload:
    """The Workload of flags on so many GPUs.

    system: one of systems.py; None: the flags' own level, Transformer Engine's FP8 or stock.  changes: of Megatron's
    arguments, by their names.
    """
    from ...flags import graphs

    args = Namespace(**{**vars(flags.args), **changes})
    if isinstance(system, str) or system is None:
        system = chosen(system or flags.level or ("te" if args.fp8 else "bf16"))
    check_given(args, "seq_length", "micro_batch_size")
    data, tensor, context = data_parallel(args, gpus), args.tensor_model_parallel_size, args.context_parallel_size
    _refuse(args)
    check_optimizer(args, data)
    again = getattr(args, "recompute_activations", False)  # which validation turns into the other flag
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
        virtual=virtual(args),
        recompute=args.recompute_granularity or ("selective" if again else "none"),
        modules=modules,
        recomputed_layers=args.recompute_num_layers if args.recompute_method == "block" else None,
        overlap_reduce=bool(args.overlap_grad_reduce),
        overlap_gather=bool(args.overlap_param_gather),
        fp8_head=bool(getattr(args, "fp8_lm_head", False)) and system.level is not None,
        fp8_activations=bool(getattr(args, "fp8_activations", False)) and system.level is not None,
        keeps_transposes=bool(args.keep_fp8_transpose_cache) and system.level is not None,
        dropout=args.hidden_dropout > 0,
        graphed=graphs.asked(args) and not graphs.inside(args) if system.level else graphs.stock_asked(args),
        two_levels=getattr(args, "fp8_grad_reduce_hierarchy", None) == "node",
        overrides=overrides if system.level else None,
    )


def cells_given(args: Namespace) -> dict[str, str]:
    """{cell: value} of the flags that change a level's table."""
    return {cell.name: value for cell in CELLS if (value := getattr(args, cell.dest, None)) is not None}


def check_given(args: Namespace, *more: str) -> None:
    """Raise UserError where the model's sizes, or `more` of Megatron's arguments, are missing."""
    for name in ("num_layers", "hidden_size", "num_attention_heads", *more):
        if getattr(args, name) is None:
            raise UserError(f"--{name.replace('_', '-')} is missing; give it behind --")


def data_parallel(args: Namespace, gpus: int) -> int:
    """Data-parallel ranks on so many GPUs, context-parallel ones too.  Raises UserError where they do not divide."""
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
    """The memory report's Job of Megatron's arguments, on `data` data-parallel ranks (context-parallel ones too)."""
    vocabulary = getattr(args, "padded_vocab_size", None) or args.vocab_size
    if not vocabulary:
        raise UserError("--vocab-size is missing, and no tokenizer is read here; give its number of tokens")
    given: dict[str, Any] = {field.name: getattr(args, field.name, None) for field in fields(Job)}
    given |= {"vocab_size": vocabulary, "data_parallel_size": data}
    given |= {"swiglu": bool(args.swiglu), "disable_bias_linear": not args.add_bias_linear}
    if not args.group_query_attention:
        given["num_query_groups"] = None
    return Job(**given)


def uncounted(args: Namespace) -> list[str]:
    """What of a job neither the memory report nor the cost model counts."""
    found = [what for name, what in _UNCOUNTED.items() if getattr(args, name, None)]
    return list(dict.fromkeys([*found, *(shown for _, shown in _other(args, _NOT_COUNTED))]))


def check_counted(args: Namespace) -> None:
    """Raise UserError for a job of which they would leave something out."""
    for _, shown in _other(args, dict.fromkeys(_UNCOUNTED, ())):
        raise UserError(f"{shown}: not modelled; give a dense GPT with even stages")
    _check_modelled(args, _NOT_COUNTED)


def _check_modelled(args: Namespace, table: Mapping[str, tuple[str, ...]]) -> None:
    for name, shown in _other(args, table):
        raise UserError(f"{shown}: not modelled; {'use --bf16 instead' if name == 'fp16' else 'remove it'}")


def _other(args: Namespace, table: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """(Name, flag with its value) of what a job has of a table, and does not pass."""
    from ...flags.stock import plain

    for name, passing in table.items():
        if (value := getattr(args, name, None)) and plain(value) not in passing:
            yield name, f"--{name.replace('_', '-')}" + ("" if value is True else f" {plain(value)}")


def megatrons_memory(flags: Flags, w: Workload) -> tuple[float, float]:
    """GB (10^9 bytes) of weights and optimizer, and of activations, by Megatron's own theory of stock BF16."""
    import megatron.training.theoretical_memory_usage as theory

    job = w.job
    args = Namespace(**{
        **vars(flags.args), "kv_channels": w.channels, "ffn_hidden_size": w.ffn, "padded_vocab_size": w.vocabulary,
        "data_parallel_size": w.data, "world_size": w.gpus, "micro_batch_size": w.micro_batch,
        "num_query_groups": job.num_query_groups or job.num_attention_heads, "sequence_parallel": w.sequence_parallel,
        "virtual_pipeline_model_parallel_size": w.virtual if w.virtual > 1 else None,
        "expert_tensor_parallel_size": w.tensor,
    })  # fmt: skip
    selective = w.sequence_parallel and w.recompute == "selective"
    of_activations = theory.compute_activation_memory if selective else theory.compute_activation_memory_without_sp
    weights = theory.compute_weight_and_optimizer_memory(args)
    return weights / 1e9, of_activations(args, num_microbatches=w.micro_batches) / 1e9


def check_optimizer(args: Namespace, data: int) -> None:
    """Raise UserError where it is not the distributed one, on more than one data-parallel rank: its memory is counted,
    its time not modelled."""
    if not args.use_distributed_optimizer and data > 1:
        raise UserError("only the distributed optimizer is modelled; add --use-distributed-optimizer")


def _refuse(args: Namespace) -> None:
    check_counted(args)
    _check_modelled(args, _NOT_MODELLED)
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
