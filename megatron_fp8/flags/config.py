"""From flags to one frozen Fp8Config.

    parser   add_fp8_arguments    our flags: --fp8-level, one for each cell of its table, and --fp8-attention
    args     config_from_args     an Fp8Config, or None where the run is stock Megatron's
             adapt_stock_args     edits stock's arguments, before Megatron validates them

What becomes of each stock flag is a table, stock.py; the levels are another, level.py; which numbers and shapes do,
in numbers.py; what else a run needs before it may start, in checks.py. Every mistake of a user is a UserError of one
line: the flag, its value, and what to do.
"""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

from ..errors import UserError
from ..numerics.auto_scaling import AUTO, LARGEST_MU, MODES, ScalingRule
from ..numerics.formats import E4M3, E5M2, Format
from .emulate import EmulationPlan, plan_from_flags, read_patterns
from .level import CELLS, LEVELS, resolve
from .numbers import check_geometry, check_numbers, check_optimizer, value_of
from .probe import PROBE_FLAGS
from .sharpness import SHARPNESS_FLAGS
from .stock import ADAPTED, NOTED, REFUSED, TE, installed, plain, rows
from .watch import WATCH_FLAGS, WatchPlan, watch_from_args

ATTENTIONS = ("torch", "te")
SHARED_FLAGS = (  # (flag, metavar, type, meaning), after FP8-LM section 2.1
    ("--fp8-grad-scaling", "{auto,pre,post}", str, "how mu is found: auto-scaling (default), 1/N or 1."),
    ("--fp8-grad-scaling-threshold", "X", float, "share of saturated elements beyond which mu shrinks (1e-5)."),
    ("--fp8-grad-scaling-window", "N", int, "steps in which mu doubles otherwise (1000)."),
    ("--fp8-grad-scaling-backoff", "X", float, "factor by which mu shrinks (0.5)."),
    ("--fp8-grad-scaling-init", "X", float, "mu at the start (1/sqrt of the data-parallel size)."),
    ("--fp8-grad-scaling-interval", "N", int, "steps from one look at saturation to the next (1)."),
)
EMULATE_FLAGS = (  # (flag, metavar or None for a switch, type, meaning), see flags/emulate.py
    (
        "--fp8-emulate",
        "SPEC",
        str,
        "Round the operands of the linears' BF16 GEMMs: E8M3, or weight=E4M3,activation=E4M3:nearest:tensor, "
        "each FORMAT[:ROUNDING][:SCALING]. Without --fp8-level everything else is as in stock BF16.",
    ),
    ("--fp8-emulate-layers", "PATTERNS", str, "Which linears, as 'decoder.layers.[0-3].*,*.linear_fc2'. Default all."),
    ("--fp8-emulate-lm-head", None, None, "The LM head too."),
    ("--fp8-emulate-from-step", "N", int, "From update N on (default 1, the first)."),
    ("--fp8-emulate-until-step", "N", int, "Before update N (default: to the end)."),
)
BF16_FLAG = "--fp8-bf16-layers"
FEW_MICRO_BATCHES = 8  # so many may add up in FP8: its error is then a fifth of sampling's (docs/gradients.md)


@dataclass(frozen=True)
class Fp8Config:
    """Everything that a run with a level was asked for.

    Attributes:
        level: "O1", "O2" or "O3".
        gemm ... partition: the cells of flags/level.py, each one of its available values; grad_accum is never "auto".
        forward_format, grad_format: of activations and weights; of activation gradients.
        recipe: "delayed" or "tensorwise"; margin, amax_history_len, amax_compute_algo: as stock has them.
        wgrad: whether the weight-gradient GEMM is FP8 (else BF16).
        bf16_layers_start, bf16_layers_end: how many first and last layers of the model stay in BF16.
        bf16_layers: patterns of the linears that do.
        keep_transpose_cache: keep each weight's transposed FP8 copy from one micro-batch to the next.
        grad_reduce_hierarchy: "off", "node", or the number of data-parallel ranks in a node, as text.
        grad_scaling: of grad_reduce "shared".
        emulate: which operands of the GEMMs are rounded to which formats, and when; None: none are.
        ckpt_compact: save optimizer state as it is, for this layout only.
        log_interval: steps from one log of FP8 statistics to the next; 0: never.
        log_grad_snr: whether those compare the reduced gradients with FP32's.
        watch: what is done about spikes; None: nothing is watched.
        seed: of the run.
        attention: "torch" or "te".
        unfused_attention: Megatron's unfused kernel instead of torch's attention (--attention-backend local, unfused).
        reads_mask: torch's attention applies the mask that the data bring (--reset-attention-mask).
    """

    level: str
    gemm: str
    grad_accum: str
    grad_reduce: str
    exp_avg: str
    exp_avg_sq: str
    master: str
    weight: str
    tp_gather: str
    tp_reduce_scatter: str
    partition: str
    forward_format: Format
    grad_format: Format
    recipe: str
    margin: int
    amax_history_len: int
    amax_compute_algo: str
    wgrad: bool
    bf16_layers_start: int
    bf16_layers_end: int
    bf16_layers: tuple[str, ...]
    keep_transpose_cache: bool
    grad_reduce_hierarchy: str
    grad_scaling: ScalingRule
    emulate: EmulationPlan | None
    ckpt_compact: bool
    log_interval: int
    log_grad_snr: bool
    watch: WatchPlan | None
    seed: int
    attention: str
    unfused_attention: bool
    reads_mask: bool


def add_fp8_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the group "megatron-fp8"; every default is None, so that what was given can be told."""
    group = parser.add_argument_group("megatron-fp8", "FP8 training: a level, and flags to change its cells")
    group.add_argument(
        "--fp8-level",
        metavar=f"{{{','.join(LEVELS)}}}",
        help="How much of the run is FP8. O0, the default, is stock Megatron-LM, bit for bit.",
    )
    for cell in CELLS:
        values = f"{{{','.join(cell.available)}}}"
        defaults = " ".join(f"{level} {cell.at(level)}" for level in LEVELS[1:])
        group.add_argument(cell.flag, metavar=values, help=f"{cell.meaning}. By level: {defaults}.")
    group.add_argument(
        "--fp8-grad-reduce-hierarchy",
        metavar="{off,node,N}",
        help="Reduce gradients in two levels, inside a node first and then across nodes: a node is what torchrun "
        "started together, or N data-parallel ranks. Default off.",
    )
    for flag, metavar, of, meaning in SHARED_FLAGS:
        group.add_argument(flag, metavar=metavar, type=of, help=f"With --fp8-grad-reduce shared: {meaning}")
    for flag, metavar, of, meaning in EMULATE_FLAGS:
        how = {"metavar": metavar, "type": of} if metavar else {"action": "store_true", "default": None}
        group.add_argument(flag, help=meaning, **how)
    group.add_argument(
        BF16_FLAG,
        metavar="PATTERNS",
        help="Linears that stay in BF16, GEMMs and weights, and are not emulated: as 'decoder.layers.[0-3].*,"
        "*.linear_fc2', shell patterns for a linear's whole path, layers numbered from 0.",
    )
    group.add_argument(
        "--fp8-ckpt-compact",
        action="store_true",
        default=None,
        help="Save the optimizer state in its own formats, 5 bytes a parameter at O2 and O3 instead of 12: for a run "
        "that resumes at the same level, parallel sizes and buckets. Without it, any level and layout can load.",
    )
    group.add_argument(
        "--fp8-log-interval",
        metavar="N",
        type=int,
        help="Write FP8 statistics to TensorBoard and W&B, and the worst of them to the log, every N steps; 0: never. "
        "Default 100 with --tensorboard-dir or --wandb-project, else 0.",
    )
    group.add_argument(
        "--fp8-log-grad-snr",
        action="store_true",
        default=None,
        help="Log the signal-to-noise ratio of the reduced gradients too; the steps that log hold and reduce an FP32 "
        "copy of them (4 bytes a parameter).",
    )
    for flag, metavar, of, meaning in (*SHARPNESS_FLAGS, *WATCH_FLAGS):
        group.add_argument(flag, metavar=metavar, type=of, help=meaning)
    for flag, metavar, of, meaning in PROBE_FLAGS:
        takes = {"metavar": metavar, "type": of} if metavar else {"action": "store_true", "default": None}
        group.add_argument(flag, help=meaning, **takes)
    group.add_argument(
        "--fp8-attention",
        metavar=f"{{{','.join(ATTENTIONS)}}}",
        help="Whose BF16 attention: torch's (the default), or Transformer Engine's, which must be installed.",
    )
    return parser


def config_from_args(args: Namespace) -> Fp8Config | None:
    """Read a run's flags.

    Args:
        args: as Megatron's parser returns them, not yet validated; not changed.

    Returns:
        None without a level and at O0: nothing of the run is then to be touched.

    Raises:
        UserError: the first flag that the run cannot honour, in one line: flag, value, remedy.
    """
    level = getattr(args, "fp8_level", None)
    emulate = None
    if level != "O0":
        emulate = plan_from_flags(*(value_of(args, flag) for flag, *_ in EMULATE_FLAGS))
    if (level is None and emulate is None) or level == "O0":
        _check_stock_run(args, level)
        return None
    overrides = {c.name: getattr(args, c.dest, None) for c in CELLS}
    if emulate is not None:
        overrides |= _emulation_base(level, overrides)
        level = level or "O1"
    cells = resolve(level, overrides)
    check_numbers(args)
    for row in rows(args, REFUSED):
        raise UserError(f"{row.shown(args)}: {row.note}")

    attention = args.fp8_attention or "torch"
    if attention not in ATTENTIONS:
        raise UserError(f"--fp8-attention {attention}: no such value; use {' or '.join(ATTENTIONS)}")
    if attention == "te" and not installed(TE):
        raise UserError("--fp8-attention te: Transformer Engine is not installed; install it, or use torch")
    if args.fp8_amax_history_len < 1:
        raise UserError(f"--fp8-amax-history-len {args.fp8_amax_history_len}: use 1 or more")
    ends = (args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16)
    start, end = ends if args.first_last_layers_bf16 else (0, 0)
    if min(start, end) < 0 or (args.num_layers is not None and start + end > args.num_layers):
        raise UserError(
            f"--num-layers-at-start-in-bf16 {start} with --num-layers-at-end-in-bf16 {end}: a model of "
            f"--num-layers {args.num_layers} has not so many; use smaller counts"
        )
    log_interval = args.fp8_log_interval
    if log_interval is None:
        log_interval = 100 if args.tensorboard_dir or args.wandb_project else 0
    if log_interval < 0:
        raise UserError(f"--fp8-log-interval {log_interval}: use 0 (never) or more")
    if args.fp8_log_grad_snr and not log_interval:
        raise UserError("--fp8-log-grad-snr: nothing is logged; add --fp8-log-interval N, or remove it")
    if cells["grad_accum"] == "auto":
        cells["grad_accum"] = "fp8" if _micro_batches(args) <= FEW_MICRO_BATCHES else "bf16"
    if cells["gemm"] == "fp8":
        check_geometry(args)
    check_optimizer(args, cells)
    return Fp8Config(
        level=level,
        **cells,
        forward_format=E4M3,
        grad_format=E4M3 if args.fp8 == "e4m3" else E5M2,
        recipe=args.fp8_recipe,
        margin=args.fp8_margin,
        amax_history_len=args.fp8_amax_history_len,
        amax_compute_algo=args.fp8_amax_compute_algo,
        wgrad=args.fp8_wgrad,
        bf16_layers_start=start,
        bf16_layers_end=end,
        bf16_layers=read_patterns(BF16_FLAG, args.fp8_bf16_layers) if args.fp8_bf16_layers is not None else (),
        keep_transpose_cache=args.keep_fp8_transpose_cache,
        grad_reduce_hierarchy=_hierarchy(args, cells["grad_reduce"]),
        grad_scaling=_scaling_rule(args, cells["grad_reduce"]),
        emulate=emulate,
        ckpt_compact=bool(args.fp8_ckpt_compact),
        log_interval=log_interval,
        log_grad_snr=bool(args.fp8_log_grad_snr),
        watch=watch_from_args(args, cells["gemm"] == "fp8"),
        seed=args.seed,
        attention=attention,
        unfused_attention=plain(args.attention_backend) in ("local", "unfused"),
        reads_mask=args.reset_attention_mask,
    )


def adapt_stock_args(args: Namespace, config: Fp8Config) -> list[str]:
    """Edit stock's arguments for a level, before Megatron validates them.

    A command written for Transformer Engine and apex then passes validation also where neither is installed.
    Calling it again changes nothing more.

    Args:
        args: what `config` was read from; changed in place.

    Returns:
        Lines for the log: what was changed, and what the level does not reach.
    """
    args.fp8 = None  # kept in `config`: stock's own FP8, Transformer Engine's, must not start
    found = list(rows(args, ADAPTED, NOTED))
    flags_of: dict[str, list[str]] = {}
    for row in found:
        flags_of.setdefault(row.note, []).append(row.shown(args))
    for row in found:
        if row.verdict == ADAPTED:
            row.adapt(args)
    return [f"{', '.join(flags)}: {note}" for note, flags in flags_of.items()] + [
        *_storage_line(args, config),
        *([] if config.emulate is None else [f"--fp8-emulate: {config.emulate}"]),
    ]


def _check_stock_run(args: Namespace, level: str | None) -> None:
    """Refuse flags that a run without a level would ignore in silence."""
    without = f"--fp8-level {level}" if level else "no --fp8-level"
    others = "--fp8-attention --fp8-grad-reduce-hierarchy --fp8-ckpt-compact --fp8-log-interval --fp8-log-grad-snr"
    more = [BF16_FLAG, *(row[0] for row in (*SHARED_FLAGS, *EMULATE_FLAGS, *WATCH_FLAGS))]
    given = {flag: value_of(args, flag) for flag in (*others.split(), *more)}
    given |= {c.flag: getattr(args, c.dest, None) for c in CELLS}
    for flag, value in given.items():
        if value is not None:
            raise UserError(f"{flag} {value} with {without}: no effect; add --fp8-level O1, or remove it")
    fmt = getattr(args, "fp8", None)
    if fmt and args.transformer_impl == "local":
        raise UserError(
            f"--fp8-format {fmt} with --transformer-impl local and {without}: Megatron would train in BF16, "
            "silently; add --fp8-level O1, or use --transformer-impl transformer_engine"
        )
    yaml = getattr(args, "yaml_cfg", None)
    if yaml is not None and level is None and any(a.startswith("--fp8-level") for a in sys.argv):
        raise UserError(f"--yaml-cfg {yaml}: replaces every flag, --fp8-level included; give flags instead")


def _emulation_base(level: str | None, overrides: dict[str, str | None]) -> dict[str, str]:
    """The cells of a run that emulates: its GEMMs are BF16 ones, and without a level nothing else is rounded."""
    if overrides["gemm"] == "fp8":
        raise UserError("--fp8-gemm fp8 with --fp8-emulate: emulated operands go into BF16 GEMMs; remove one")
    exact = {"gemm": "bf16"} if level else {"gemm": "bf16", "grad_accum": "fp32", "grad_reduce": "fp32"}
    return {cell: overrides[cell] or value for cell, value in exact.items()}


def _micro_batches(args: Namespace) -> int:
    """How many micro-batches a step adds up, before Megatron has worked it out."""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    replicas = max(1, args.world_size // model)
    return max(1, (args.global_batch_size or 1) // ((args.micro_batch_size or 1) * replicas))


def _storage_line(args: Namespace, config: Fp8Config) -> list[str]:
    """What the log should say of how gradients are stored."""
    count = _micro_batches(args)
    few, chosen = count <= FEW_MICRO_BATCHES, args.fp8_grad_accum in (None, "auto") and config.grad_accum != "fp32"
    noise = f"an unbiased error of about {0.0375 * ((count + 1) / 2) ** 0.5:.0%}"
    if chosen and few:
        return [f"gradients are stored in FP8: {count} micro-batch{'es' * (count > 1)} a step (--fp8-grad-accum)"]
    if chosen:
        return [f"gradients are stored in BF16: {count} micro-batches a step, in FP8 {noise} (--fp8-grad-accum fp8)"]
    if config.grad_accum == "fp8" and not few:
        return [f"--fp8-grad-accum fp8: {count} micro-batches a step, {noise}; bf16: 1 %, for a byte a parameter more"]
    return []


def _hierarchy(args: Namespace, reduction: str) -> str:
    """--fp8-grad-reduce-hierarchy, checked against the rest."""
    flag, value = "--fp8-grad-reduce-hierarchy", args.fp8_grad_reduce_hierarchy
    if value in (None, "off"):
        return "off"
    if value != "node" and not (value.isdecimal() and int(value) > 0):
        raise UserError(f"{flag} {value}: use off, node, or the number of data-parallel ranks in a node")
    if reduction != "block":
        raise UserError(f"{flag} {value} with --fp8-grad-reduce {reduction}: only block has two levels; remove one")
    if not args.use_distributed_optimizer:
        raise UserError(f"{flag} {value}: needs --use-distributed-optimizer; add it, or remove the hierarchy")
    return value


def _scaling_rule(args: Namespace, reduction: str) -> ScalingRule:
    """The --fp8-grad-scaling flags, checked against each other."""
    given = {row[0]: value_of(args, row[0]) for row in SHARED_FLAGS if value_of(args, row[0]) is not None}
    mode = given.get("--fp8-grad-scaling", AUTO)
    for flag, value in given.items():
        if reduction != "shared":
            raise UserError(f"{flag} {value}: no effect; add --fp8-grad-reduce shared, or remove it")
        if flag != "--fp8-grad-scaling" and mode != AUTO:
            raise UserError(f"{flag} {value} with --fp8-grad-scaling {mode}: no effect; use auto, or remove it")
        if isinstance(value, str):
            continue
        largest = {"--fp8-grad-scaling-threshold": 1, "--fp8-grad-scaling-init": LARGEST_MU}.get(flag)
        if not 0 < value <= (largest or value):
            raise UserError(f"{flag} {value}: use a number above 0{f', at most {largest:g}' if largest else ''}")
    if mode not in MODES:
        raise UserError(f"--fp8-grad-scaling {mode}: no such value; use auto, pre or post")
    backoff = given.get("--fp8-grad-scaling-backoff", 0.5)
    if not backoff < 1:
        raise UserError(f"--fp8-grad-scaling-backoff {backoff}: mu must shrink; use a number below 1")
    names = {"threshold", "window", "backoff", "initial", "interval"}
    values = {flag.rpartition("-")[2].replace("init", "initial"): value for flag, value in given.items()}
    return ScalingRule(mode, **{name: value for name, value in values.items() if name in names})
