"""`megatron-fp8 memory`: the bytes that each rank of a job holds between two steps, without building the model.

    megatron-fp8 memory --model 7b --data-parallel-size 256        a model of FP8-LM, or one given by Megatron's flags
    megatron-fp8 memory --gpus 128 -- FLAGS                        a job's flags, or its whole command

    on each rank        elements                       bytes an element
    linears, O1 to O3   the engine's buckets, R * m    weight, gradients                  (engine/partition.py has R, m)
                        its row of each, m             master, exp_avg, exp_avg_sq
                        all                            1: the E4M3 copy of a BF16 weight that its GEMMs take
                        the largest linear's           1: a scratch buffer for W^T, shared by all layers
    linears at O0, and  Megatron's buckets             2 + 4: BF16 weight, FP32 gradient (2: --grad-reduce-in-bf16)
    all else            what the rank owns of them     4 + 4 + 4: FP32 master, moments
    routed experts      as linears if they are owned (--fp8-experts), else as all else; R is expert data parallelism's.
                        With --moe-grouped-gemm the scratch holds a layer's experts
    --dpo-reference     the linears; all else          1 (2 with BF16 GEMMs); 2
    --frozen-base       the linears; all else          1 (O3), 2 + 1 (O1, O2), 2 (O0); 2, and the scratch

A job's command with dpo_gpt_fp8.py has a reference, unless it reads the reference's scores from a file. The adapters on
a frozen base are the script's, and are not counted. --sft changes none of these bytes.

If the job's flags behind -- lack --use-distributed-optimizer, every rank holds all states and stock's buckets have no
padding; in front of -- that flag is taken as given.

The functions of the engine and of Megatron cut the buckets here too, from a job's sizes instead of a model's weights.
Ranks differ by pipeline stage: the first has the embedding, the last the head (if tied, a copy of the embedding). In
the engine, data-parallel ranks have rows of equal length, so an uneven partition costs padding. The row "in use" says
how much of its states a rank really owns. Stock Megatron's last ranks lack a few elements. Tensor-parallel ranks are
alike.

Not counted: activations, temporary buffers of a reduction or of Adam, scales of whole tensors (4 bytes each), amax
histories, the allocator's fragments, NCCL's buffers. At O0 the linears have buckets of their own here, which changes
only the padding.
"""

from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from ...errors import UserError
from ...flags.level import CELLS, LEVELS, is_stock
from ...flags.numeric_checks import FEW_MICRO_BATCHES
from . import job_flags
from .job import BYTES, MODELS, STATES, Job, flag
from .output import PAGE_FORMATS, show

if TYPE_CHECKING:  # imported late at run time: --help and mistakes must not wait for torch and Megatron
    from ...engine.partition import Placement

REFERENCE = "reference"
SCRATCH = "transpose scratch"
KINDS = ("weight", "weight fp8 copy", SCRATCH, "grad", *STATES, REFERENCE)
_CELLS = [c for c in CELLS if c.name in ("gemm", "grad_accum", *STATES, "weight", "partition")]
_GB = 1e9
# --fp8-grad-accum auto without a micro-batch size: the storage is not known, and FP8 is counted.
_UNKNOWN = "auto", (
    f"Gradients in FP8: {FEW_MICRO_BATCHES} micro-batch a step, or --fp8-grad-accum fp8; else 1 byte more"
)


def engine_buckets(sizes: list[int], ranks: int, how: str) -> "list[Placement]":
    """The engine's buckets for a model chunk's weights of `sizes` elements, given in the order of the backward pass.

    ranks: the data-parallel size; how: "even" or "greedy".
    """
    from ...engine.partition import bucket_size, cut, place

    runs = cut(sizes, bucket_size(None, None, sum(sizes), ranks), how)
    return [place(sizes[run], ranks, how) for run in runs]


def engine_bytes(buckets: "list[Placement]", cells: Mapping[str, str], sharded: bool = True) -> dict[str, int]:
    """Bytes, by kind, that each data-parallel rank holds for the weights in the given buckets.

    cells: {cell of flags/level.py: value}; grad_accum auto counts as fp8.  sharded: whether a rank has only the states
    of its row.
    """
    whole = sum(bucket.numel for bucket in buckets)
    sizes = [size for bucket in buckets for size in bucket.sizes]
    of_states = sum(bucket.row for bucket in buckets) if sharded else whole
    stored, storage = cells["weight"], cells["grad_accum"]
    in_fp8 = cells["gemm"] == "fp8"
    held = {
        "weight": whole * BYTES["e4m3" if stored == "fp8" else stored],
        "weight fp8 copy": sum(sizes) * BYTES["e4m3"] * (in_fp8 and stored != "fp8"),
        SCRATCH: max(sizes) * BYTES["e4m3"] * in_fp8,
        "grad": whole * BYTES["fp8" if storage == "auto" else storage],
        **{state: of_states * BYTES[cells[state]] for state in STATES},
    }
    return {kind: int(size) for kind, size in held.items()}


def stock_buckets(sizes: list[int], ranks: int, sharded: bool = True) -> "list[Placement]":
    """Stock Megatron's buckets for parameters of `sizes` elements, with Megatron's padding. If states are not sharded:
    one bucket of one row without padding, which every rank owns."""
    from ...engine.partition import Placement, bucket_size

    if not sharded:
        return [Placement(sum(sizes), [0, *accumulate(sizes[:-1])], sizes, 1)]
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    params = [torch.empty(size, device="meta") for size in reversed(sizes)]  # the layout reverses them again
    config = DistributedDataParallelConfig()
    layout = DistributedOptimizer._compute_per_buffer_param_layout(
        params, bucket_size(None, None, sum(sizes), ranks), ranks, config
    )
    of_bucket: list[list[tuple[int, int]]] = [[] for _ in layout.bucket_indices]
    for first, last, bucket in layout.param_index_map.values():
        of_bucket[bucket].append((first, last))
    buckets = []
    for (start, stop), spans in zip(layout.bucket_indices, of_bucket, strict=True):
        starts, lengths = [first - start for first, _ in spans], [last - first for first, last in spans]
        buckets.append(Placement((stop - start) // ranks, starts, lengths, ranks))
    return buckets


def stock_bytes(buckets: "list[Placement]", rank: int, gradient: float = BYTES["fp32"]) -> dict[str, int]:
    """Bytes, by kind, that the owner of row `rank` holds under stock Megatron. gradient: bytes of one."""
    whole = sum(bucket.numel for bucket in buckets)
    held = {"weight": whole * BYTES["bf16"], "grad": whole * gradient}
    held |= dict.fromkeys(STATES, owned(buckets, rank) * BYTES["fp32"])
    return {kind: int(size) for kind, size in held.items()}


def owned(buckets: "list[Placement]", rank: int) -> int:
    """How many parameters of these buckets data-parallel rank `rank` owns."""
    return sum(stop - start for bucket in buckets for _, start, stop in bucket.owned(rank))


def untrained_bytes(job: Job, stage: int, cells: Mapping[str, str] | None) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes, by kind, of a frozen model's linears and of all else, on every rank of a stage (engine/frozen_set.py)."""
    sizes, all_else = job.linears(), sum(job.others(stage))
    in_fp8 = cells is not None and cells["gemm"] == "fp8"
    stored = BYTES["e4m3" if cells is not None and cells["weight"] == "fp8" else "bf16"]
    linears = {
        "weight": sum(sizes) * stored,
        "weight fp8 copy": sum(sizes) * BYTES["e4m3"] * (in_fp8 and stored != BYTES["e4m3"]),
        SCRATCH: max(sizes) * BYTES["e4m3"] * in_fp8,
    }
    return {kind: int(size) for kind, size in linears.items()}, {"weight": int(all_else * BYTES["bf16"])}


def reference_bytes(job: Job, stage: int, cells: Mapping[str, str] | None) -> tuple[int, int]:
    """Bytes of DPO's reference on every rank of a stage: its linears, all else (tuning/reference.py). It shares the
    policy's scratch."""
    in_fp8 = cells is not None and cells["gemm"] == "fp8"
    return int(sum(job.linears()) * BYTES["e4m3" if in_fp8 else "bf16"]), int(sum(job.others(stage)) * BYTES["bf16"])


def kept_transposes(job: Job, levels: Iterable[Mapping[str, str] | None]) -> int:
    """Bytes of W^T on the fullest rank, in a step with --keep-fp8-transpose-cache; 0 if no level's GEMMs are FP8."""
    if not any(cells is not None and cells["gemm"] == "fp8" for cells in levels):
        return 0
    return max(
        sum(job.linears(stage)) + sum(job.experts(stage)) * job.fp8_experts
        for stage in range(job.pipeline_model_parallel_size)
    )


class Rank(NamedTuple):
    """Bytes on a rank, by kind, for the linears, for all else and for routed experts. used: bytes of the linears'
    states in use."""

    linears: dict[str, int]
    others: dict[str, int]
    used: int
    experts: dict[str, int]

    @property
    def all(self) -> int:
        return sum(sum(held.values()) for held in (self.linears, self.others, self.experts))


def ranks_bytes(
    job: Job, cells: Mapping[str, str] | None, stages: Iterable[int] | None = None, ranks: Iterable[int] | None = None
) -> Iterator[Rank]:
    """The Rank of each (pipeline stage, data-parallel rank), stages outermost; or of the given stages and ranks only.

    cells: {cell: value}, or None for stock Megatron (O0). No data-parallel rank holds more than rank 0.
    """
    data, sharded = job.data_parallel_size, job.use_distributed_optimizer
    states = sum(BYTES["fp32" if cells is None else cells[state]] for state in STATES)
    gradient = job.stock_gradient
    for stage in range(job.pipeline_model_parallel_size) if stages is None else stages:
        if job.frozen_base:
            frozen = Rank(*untrained_bytes(job, stage, cells), 0, {})
            yield from (frozen for _ in (range(data) if ranks is None else ranks))
            continue
        sizes = job.linears(stage)
        linears = _owned(sizes, data, cells, sharded)
        others, experts = _owned(job.others(stage), data, None, sharded), job.experts(stage)
        owned_experts = cells if job.fp8_experts else None
        alike = job.expert_data_parallel_size if experts else 1
        of_experts = _owned(experts, alike, owned_experts, sharded)
        beside = reference_bytes(job, stage, cells) if job.dpo_reference else (0, 0)
        for rank in range(data) if ranks is None else ranks:
            row = rank if sharded else 0
            ours = stock_bytes(linears, row, gradient) if cells is None else engine_bytes(linears, cells, sharded)
            used = owned(linears, row) if sharded else sum(sizes)
            all_else = stock_bytes(others, row, gradient)
            routed: dict[str, int] = {}
            if experts and owned_experts is None:
                routed = stock_bytes(of_experts, rank * alike // data if sharded else 0, gradient)
            elif experts and owned_experts is not None:
                routed = engine_bytes(of_experts, owned_experts, sharded)
                if job.moe_grouped_gemm and routed[SCRATCH]:  # a bank: W^T of all experts of a layer at once
                    routed[SCRATCH] = job.local_experts * max(rows * columns for rows, columns in job.expert)
                routed[SCRATCH] = max(0, routed[SCRATCH] - ours[SCRATCH])  # linears and experts share the scratch
            if job.keep_fp8_transpose_cache:
                for held in ours, routed:
                    held.pop(SCRATCH, None)
            yield Rank(ours | {REFERENCE: beside[0]}, all_else | {REFERENCE: beside[1]}, int(used * states), routed)


def _owned(sizes: list[int], ranks: int, cells: Mapping[str, str] | None, sharded: bool) -> "list[Placement]":
    """Buckets of weights of these sizes: the engine's, or without cells stock's."""
    return _buckets(tuple(sizes), ranks, None if cells is None else cells["partition"], sharded)


@lru_cache(maxsize=64)
def _buckets(sizes: tuple[int, ...], ranks: int, how: str | None, sharded: bool) -> "list[Placement]":
    """Cached: levels and layouts share them. No level changes those of all else, nor expert parallelism those of
    linears."""
    return stock_buckets([*sizes], ranks, sharded) if how is None else engine_buckets([*sizes], ranks, how)


def parameters(job: Job) -> tuple[int, int]:
    """(Weights of the four linears, all other parameters) of one tensor-parallel rank, over all pipeline stages."""
    stages = range(job.pipeline_model_parallel_size)
    return sum(sum(job.linears(stage)) for stage in stages), sum(sum(job.others(stage)) for stage in stages)


def expert_parameters(job: Job) -> int:
    """Weights of one rank's routed experts, over all pipeline stages."""
    return sum(sum(job.experts(stage)) for stage in range(job.pipeline_model_parallel_size))


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 memory`."""
    parser.add_argument("--model", choices=MODELS, help="a model of FP8-LM in its layout; other flags change it")
    for field in fields(Job):
        if field.type is bool:
            parser.add_argument(flag(field.name), action="store_true", default=None)
        else:
            choices = get_args(field.type) if get_origin(field.type) is Literal else None
            parser.add_argument(flag(field.name), choices=choices, type=str if choices else int)
    parser.add_argument(
        "--fp8-level", nargs="+", choices=LEVELS, help="levels, a column each (the job's, or all four)"
    )
    for cell in _CELLS:
        parser.add_argument(cell.flag, choices=cell.available, help=cell.meaning)
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of a job (its command's, or one replica's)")
    parser.add_argument("--format", choices=PAGE_FORMATS, default="text")
    parser.add_argument("flags", nargs=REMAINDER, help="-- and a job's flags, or its whole command")


def run(args: Namespace) -> int:
    """Print what a rank holds, a column for each level. "least .. most" is the range over the ranks if they differ."""
    given = {field.name: value for field in fields(Job) if (value := getattr(args, field.name)) is not None}
    overrides = {c.name: value for c in _CELLS if (value := getattr(args, c.dest)) is not None}
    asked: Sequence[str] = args.fp8_level or LEVELS
    auto, of_stock, context = _UNKNOWN, "", 1
    if args.flags:
        job, of_job, level, auto, of_stock, context = _behind_dashes(args, given)
        overrides = of_job | overrides
        asked = args.fp8_level or ([level] if level else LEVELS)
    else:
        job = _job(args, given)
    all_stock = all(map(is_stock, asked))
    if overrides and all_stock:
        cell = next(c for c in _CELLS if c.name in overrides)
        raise UserError(f"{cell.flag} {overrides[cell.name]} with --fp8-level O0: no effect; take a level above it")
    decided = overrides.get("grad_accum", "auto") != "auto"
    if not decided:
        overrides["grad_accum"], said = auto
    levels = {
        level: None if is_stock(level) else {c.name: c.at(level) for c in _CELLS} | overrides
        for level in asked
    }
    show("\n".join(table(job, levels, context)), args.format)
    if not decided and not all_stock and not job.frozen_base:
        print(f"\n{said}")
    if job.keep_fp8_transpose_cache and (kept := kept_transposes(job, list(levels.values()))):
        beside = " and of experts" if job.fp8_experts else ""
        print(f"\n--keep-fp8-transpose-cache: no scratch. W^T of all linears{beside}, {kept / _GB:.3f} GB on the "
              "fullest rank, comes on top from a step's first backward pass to its update")  # fmt: skip
    if of_stock and any(map(is_stock, asked)):
        print(f"\n{of_stock}")
    return 0


def table(job: Job, levels: Mapping[str, Mapping[str, str] | None], context: int = 1) -> list[str]:
    """Lines of a Markdown table of what a rank holds, a column a level.

    levels: {name: cells, or None for stock}.  context: context-parallel ranks, of the job's data-parallel ones.
    """
    columns = [_column(job, cells) for cells in levels.values()]
    tensor, pipeline, data = job.tensor_model_parallel_size, job.pipeline_model_parallel_size, job.data_parallel_size
    whole = "" if job.use_distributed_optimizer or data == 1 else ", with whole states"
    shards = f"CP {context}, DP {data // context}" if context > 1 else f"DP {data}"
    lines = [f"| GB on a rank; TP {tensor}, PP {pipeline}, {shards}{whole} | " + " | ".join(levels) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for row in columns[0]:
        if any(column[row] for column in columns):
            lines.append(f"| {row} | " + " | ".join(column[row] for column in columns) + " |")
    return lines


def _column(job: Job, cells: Mapping[str, str] | None) -> dict[str, str]:
    """{row: cell} of a level's column."""
    ranks = list(ranks_bytes(job, cells))
    linears, others = [sum(rank.linears.values()) for rank in ranks], [sum(rank.others.values()) for rank in ranks]
    experts = [sum(rank.experts.values()) for rank in ranks]
    both = [rank.all for rank in ranks]
    rows = {f"linears: {kind}": [rank.linears.get(kind, 0) for rank in ranks] for kind in KINDS}
    rows["linears: of these states, in use"] = [rank.used for rank in ranks]
    rows |= {f"experts: {kind}": [rank.experts.get(kind, 0) for rank in ranks] for kind in KINDS}
    rows |= {"embedding, head, norms, biases": others, "all": both}
    column = {row: _range(values) if any(values) else "" for row, values in rows.items()}
    counts = [count * job.data_parallel_size for count in (*parameters(job), expert_parameters(job))]
    column["bytes a parameter: linears"] = f"{sum(linears) / counts[0]:.3f}"
    column["bytes a parameter: experts"] = f"{sum(experts) / counts[2]:.3f}" if counts[2] else ""
    column["bytes a parameter: all"] = f"{sum(both) / sum(counts):.3f}"
    return column


def _range(values: list[int]) -> str:
    least, most = f"{min(values) / _GB:.3f}", f"{max(values) / _GB:.3f}"
    return least if least == most else f"{least} .. {most}"


def _job(args: Namespace, given: dict[str, Any]) -> Job:
    if args.gpus is not None:
        raise UserError(f"--gpus {args.gpus}: needs a job; put its flags behind --, or give --data-parallel-size")
    if args.model is not None:
        return replace(MODELS[args.model], **given)
    for field in fields(Job):
        if field.default is MISSING and field.name not in given:
            raise UserError(f"{flag(field.name)} is missing; give it, or --model, or put a job's flags behind --")
    return Job(**given)


def _behind_dashes(
    args: Namespace, given: dict[str, Any]
) -> tuple[Job, dict[str, str], str | None, tuple[str, str], str, int]:
    """(Job, {cell: value}, level or None, `_auto`, a line about O0 or "", context-parallel ranks) from the flags behind
    --; the flags `given` before -- override."""
    if args.model is not None:
        raise UserError(f"--model {args.model}: the flags behind -- give a model too; remove one of the two")
    flags = job_flags.parse(args.flags)
    flags = replace(flags, args=Namespace(**{**vars(flags.args), **given}))  # the GPUs are divided by this layout
    job_flags.check_given(flags.args)
    job_flags.check_counted(flags.args)
    gpus = args.gpus or flags.gpus or flags.replica
    context = flags.args.context_parallel_size
    if "data_parallel_size" in given:
        given = given | {"data_parallel_size": given["data_parallel_size"] * context}  # a Job's has the context's too
    data = given.get("data_parallel_size") or job_flags.data_parallel(flags.args, gpus)
    known = {cell.name for cell in _CELLS}
    of_job = {name: value for name, value in job_flags.cells_given(flags.args).items() if name in known}
    job = replace(job_flags.job(flags.args, data), **given)
    of_stock = ""
    if flags.level is None and flags.fp8_param_gather:
        of_stock = "O0: with --fp8-param-gather E4M3 weights and their transposes take BF16's 2 bytes"
    elif flags.level is None and flags.args.fp8:
        of_stock = "O0 is stock BF16: Transformer Engine's FP8 holds 2 bytes more for each weight of the linears"
    return job, of_job, flags.level, _auto(flags.args, job), of_stock, context


def _auto(args: Namespace, job: Job) -> tuple[str, str]:
    """(The storage that --fp8-grad-accum auto chooses for a job's micro-batches, a line about it), as in training."""
    if args.micro_batch_size is None:
        return _UNKNOWN
    from ...flags import gradients

    gpus = job.tensor_model_parallel_size * job.pipeline_model_parallel_size * job.data_parallel_size
    args = Namespace(**{**vars(args), "world_size": gpus, "fp8_grad_accum": "auto"})
    storage = gradients.storage(args, "auto")
    (line,) = gradients.storage_line(args, storage)
    return storage, line[0].upper() + line[1:]
