"""Reads a run's flags into one frozen Fp8Config, and adapts stock's arguments to it.

    parser   add_fp8_arguments    adds ALL our flags; each subject's flags stand in its own file
    args     config_from_args     returns an Fp8Config, or None if the run is stock Megatron's
             adapt_stock_args     edits stock's arguments, before Megatron validates them

stock.py is the table of stock flags, level.py the table of levels. numeric_checks.py checks numbers and shapes,
checks.py everything else that a run needs before it starts. A user's mistake raises a UserError of one line: flag,
value, remedy.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UserError, check_all
from ..numerics.auto_scaling import ScalingRule
from ..numerics.formats import E4M3, E5M2, Format
from . import args_file, emulate, gemm, gradients, graphs, level, log, probe, sharpness, watch
from .activations import ACTIVATIONS, activations, activations_line
from .dispatch import DISPATCH, dispatch
from .emulate import BF16_FLAG, EmulationPlan, emulation_from_args, read_patterns
from .flag import Flag, Values, filled, one_of, refuse
from .level import CELL_FLAGS, LEVEL, LOWEST, STOCK, is_stock, resolve
from .loss_chunks import LOSS_CHUNKS, loss_chunks
from .numeric_checks import check_geometry, check_numbers, check_optimizer
from .skips import MAX_SKIPPED, most_skipped
from .stock import ADAPTED, NOTED, REFUSED, TE, installed, plain, rows
from .watch import WatchPlan, watch_from_args

BF16_LAYERS = Flag(
    BF16_FLAG,
    "Linears whose GEMMs and weights stay in BF16, without emulation: shell patterns for a linear's whole path, layers "
    "numbered from 0, such as 'decoder.layers.[0-3].*,*.linear_fc2'.",
    Values("PATTERNS"),
)
COMPACT = Flag(
    "--fp8-ckpt-compact",
    "Save the optimizer state in its own formats: 5 bytes a parameter at O2 and O3 instead of 12. Such a checkpoint "
    "loads only at the same level, parallel sizes and buckets; without the flag, at any level and layout.",
)
AS_LOADED = Flag(
    "--fp8-masters-as-loaded",
    "Begin masters on the numbers of the weights, as stock does. Without it each is drawn among the numbers that round "
    "to its weight, so that small updates show at once: if weights come without optimizer state, at O3 always.",
)
ATTENTION = Flag(
    "--fp8-attention",
    "Which BF16 attention runs: torch's (the default), or Transformer Engine's, which must be installed.",
    one_of("torch", "te"),
)
LM_HEAD = Flag(
    "--fp8-lm-head",
    "Run the LM head's GEMMs in FP8 too; its weight and gradient stay stock's. No level includes it.",
)
EXPERTS = Flag(
    "--fp8-experts",
    "Run routed experts in FP8 too, one by one; with --moe-grouped-gemm a rank's together. Store and update "
    "their weights as the level does. Needs --num-experts without biases. In no level: on a GPU only its speed and "
    "memory were measured.",
)
ALL = (
    *level.FLAGS,
    *gradients.FLAGS,
    *emulate.FLAGS,
    *(BF16_LAYERS, LM_HEAD, LOSS_CHUNKS, EXPERTS, DISPATCH, ACTIVATIONS, COMPACT, AS_LOADED, ATTENTION),
    *gemm.FLAGS,
    *log.FLAGS,
    *sharpness.FLAGS,
    *watch.FLAGS,
    MAX_SKIPPED,
    graphs.STEP_GRAPH,
    *probe.FLAGS,
    *args_file.FLAGS,
)


@dataclass(frozen=True)
class Fp8Config:
    """All settings of a run with a level.

    Attributes:
        level: "O1", "O2" or "O3".
        gemm ... partition: the cells of flags/level.py, each one of its available values; grad_accum is never "auto".
        forward_format, grad_format: of activations and weights; of activation gradients.
        recipe: "delayed" or "tensorwise"; margin, amax_history_len, amax_compute_algo: as in stock.
        wgrad: whether the weight-gradient GEMM is FP8 (else BF16).
        bf16_layers_start, bf16_layers_end: how many first and last layers of the model stay in BF16.
        bf16_layers: patterns of the linears that stay in BF16.
        lm_head: whether the LM head's GEMMs are FP8 too.
        loss_chunks: parts of a micro-batch's tokens in which head and loss are computed.
        experts: whether routed experts are owned too.
        dispatch: what of their rows travels in FP8: "off", "forward" or "both" (flags/dispatch.py).
        activations: whether norms and activation functions keep their inputs for the backward pass in FP8.
        keep_transpose_cache: keep each weight's transposed FP8 copy from one micro-batch to the next.
        grad_reduce_hierarchy: "off", "node", or the number of data-parallel ranks in a node, as text.
        timeout_minutes: of the process groups of these nodes, as of Megatron's own.
        grad_scaling: how the factor mu of grad_reduce "shared" moves.
        emulate: which GEMM operands are rounded to which formats, and when; None: no emulation.
        ckpt_compact: save optimizer state in its own formats, for this layout only.
        draws_masters: whether masters that no file has begin on numbers drawn around their weights, at O1 and O2 those
            of loaded weights alone; not if a run without a level emulates.
        log_interval: steps from one log of FP8 statistics to the next; 0: never.
        log_grad_snr: whether those compare the reduced gradients with an FP32 copy.
        watch: what is done about spikes; None: no watching.
        max_skipped: steps in a row that may be skipped; 0: no limit.
        seed: of the run.
        attention: "torch" or "te".
        unfused_attention: Megatron's unfused kernel instead of torch's attention (--attention-backend local, unfused).
        reads_mask: torch's attention applies the data loader's mask (--reset-attention-mask).
        gemm_backend: the name of an FP8 GEMM backend.
        gemm_search: whether GEMM kernels are timed and the fastest is kept, once per machine.
        log_gemm: whether each GEMM's shape is logged.
        fuses_rotary: the QKV split also applies rotary embedding, in FP32; else stock does it (--no-rope-fusion).
        draws_grouped: --moe-grouped-gemm: the experts' weights are initialised as with it, and owned experts are
            computed together; draws_fused: latent attention's down projections are initialised as
            --mla-down-proj-fusion does. A level switches both flags off.
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
    lm_head: bool
    loss_chunks: int
    experts: bool
    dispatch: str
    activations: bool
    keep_transpose_cache: bool
    grad_reduce_hierarchy: str
    timeout_minutes: int
    grad_scaling: ScalingRule
    emulate: EmulationPlan | None
    ckpt_compact: bool
    draws_masters: bool
    log_interval: int
    log_grad_snr: bool
    watch: WatchPlan | None
    max_skipped: int
    seed: int
    attention: str
    unfused_attention: bool
    reads_mask: bool
    gemm_backend: str
    gemm_search: bool
    log_gemm: bool
    fuses_rotary: bool
    draws_grouped: bool
    draws_fused: bool


def add_fp8_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the group "megatron-fp8"."""
    group = parser.add_argument_group("megatron-fp8", "FP8 training: a level, and flags to change its cells")
    for flag in ALL:
        flag.add_to(group)
    return parser


def check_yaml(words: Sequence[str]) -> None:
    """Refuse --yaml-cfg together with one of our flags: while Megatron parses, its file replaces all flags.

    words: the command line.  Raises UserError of one line.
    """
    given = {word.partition("=")[0] for word in words}
    for flag in ALL:
        if "--yaml-cfg" in given and flag.name in given:
            raise UserError(f"--yaml-cfg: its file replaces all flags, {flag.name} included; give flags instead")


def asks_for_level(args: Namespace) -> bool:
    """Whether a run has a level or emulates. Otherwise the run is stock Megatron's, and the plugin changes nothing."""
    level = LEVEL.given(args)
    return not is_stock(level) or (level is None and emulate.EMULATE.given(args) is not None)


def config_from_args(args: Namespace, of_model: bool = True) -> Fp8Config | None:
    """Read a run's flags.

    Args:
        args: as Megatron's parser returns them, before validation; not changed.
        of_model: whether they say what the model is; those of a trainer without Megatron's parser do not.

    Returns:
        None without a level and at O0: the plugin then changes nothing.

    Raises:
        UserError: Megatron's flags that the run cannot honour, a line each, or the first of ours: flag, value, remedy.
    """
    level = LEVEL.given(args)
    emulated = None if level == STOCK else emulation_from_args(args)
    if not asks_for_level(args):
        _check_stock_run(args)
        return None
    cells = _cells(args, emulated)
    check_numbers(args)
    check_all(f"{row.shown(args)}: {row.note}" for row in rows(args, REFUSED))
    attention = ATTENTION.given(args) or "torch"
    if attention == "te" and not installed(TE):
        raise UserError("--fp8-attention te: Transformer Engine is not installed; install it, or use torch")
    if args.fp8_amax_history_len < 1:
        raise UserError(f"--fp8-amax-history-len {args.fp8_amax_history_len}: use 1 or more")
    start, end = _ends_in_bf16(args)
    log_interval = log.statistics_interval(args)
    cells["grad_accum"] = gradients.storage(args, cells["grad_accum"])
    if cells["gemm"] == "fp8":
        check_geometry(args)
    check_optimizer(args, cells)
    patterns = BF16_LAYERS.given(args)
    return Fp8Config(
        level=LOWEST if level is None else level,
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
        bf16_layers=() if patterns is None else read_patterns(BF16_FLAG, patterns),
        lm_head=_lm_head(args, cells["gemm"]),
        loss_chunks=loss_chunks(args),
        experts=_experts(args, cells["grad_reduce"], of_model),
        dispatch=dispatch(args, cells["gemm"]),
        activations=activations(args, cells["gemm"]),
        keep_transpose_cache=args.keep_fp8_transpose_cache,
        grad_reduce_hierarchy=gradients.hierarchy(args, cells["grad_reduce"]),
        timeout_minutes=args.distributed_timeout_minutes,
        grad_scaling=gradients.scaling_rule(args, cells["grad_reduce"]),
        emulate=emulated,
        ckpt_compact=bool(COMPACT.given(args)),
        draws_masters=level is not None and not AS_LOADED.given(args),
        log_interval=log_interval,
        log_grad_snr=bool(log.GRAD_SNR.given(args)),
        watch=watch_from_args(args, cells["gemm"] == "fp8"),
        max_skipped=most_skipped(args),
        seed=args.seed,
        attention=attention,
        unfused_attention=plain(args.attention_backend) in ("local", "unfused"),
        reads_mask=args.reset_attention_mask,
        gemm_backend=gemm.backend(args),
        gemm_search=bool(gemm.SEARCH.given(args)),
        log_gemm=bool(gemm.LOG.given(args)),
        fuses_rotary=args.apply_rope_fusion,
        draws_grouped=args.moe_grouped_gemm,
        draws_fused=args.mla_down_proj_fusion,
    )


def adapt_stock_args(args: Namespace, config: Fp8Config) -> list[str]:
    """Edit stock's arguments for a level, before Megatron validates them.

    A command written for Transformer Engine and apex then passes validation even if neither is installed.
    A second call changes nothing.

    Args:
        args: the arguments that `config` was read from; changed in place.

    Returns:
        Lines for the log: what was changed, and what the level does not cover.
    """
    args.fp8 = None  # `config` has it; stock's own FP8, which is Transformer Engine's, must not start
    found = list(rows(args, ADAPTED, NOTED))
    flags_of: dict[str, list[str]] = {}
    for row in found:
        flags_of.setdefault(row.note, []).append(row.shown(args))
    for row in found:
        if row.verdict == ADAPTED:
            row.adapt(args)
    return [f"{', '.join(dict.fromkeys(flags))}: {note}" for note, flags in flags_of.items()] + [
        *gradients.storage_line(args, config.grad_accum),
        *activations_line(args, config.activations, config.tp_gather),
        *([] if config.emulate is None else [f"--fp8-emulate: {config.emulate}"]),
    ]


def _check_stock_run(args: Namespace) -> None:
    """Refuse flags that a run without a level would silently ignore."""
    level = LEVEL.given(args)
    without = LEVEL.shown(args) if level else f"no {LEVEL.name}"
    needing = (flag for flag in ALL if flag.needs_level and flag is not LEVEL)
    refuse(args, needing, f" with {without}: no effect; add {LEVEL.name} {LOWEST}")
    fmt = getattr(args, "fp8", None)
    if fmt and args.transformer_impl == "local":
        raise UserError(
            f"--fp8-format {fmt} with --transformer-impl local and {without}: Megatron would silently train in BF16; "
            "add --fp8-level O1, or use --transformer-impl transformer_engine"
        )


def _cells(args: Namespace, emulated: EmulationPlan | None) -> dict[str, str]:
    """{cell: value} of a run that has a level or emulates.

    An emulating run's GEMMs are BF16. Without a level nothing else of it is rounded.
    """
    level, overrides = LEVEL.given(args), filled(args, CELL_FLAGS)
    if emulated is not None:
        if overrides.get("gemm") == "fp8":
            raise UserError("--fp8-gemm fp8 with --fp8-emulate: emulated operands go into BF16 GEMMs; remove one")
        exact = {"gemm": "bf16"} if level else {"gemm": "bf16", "grad_accum": "fp32", "grad_reduce": "fp32"}
        overrides = exact | overrides
    cells = resolve(LOWEST if level is None else level, overrides)
    sums = overrides.get("tp_reduce_scatter") or "bf16"
    if cells["gemm"] == "bf16" and sums != "bf16":
        raise UserError(
            f"--fp8-tp-reduce-scatter {sums}: this run's GEMMs are BF16 (--fp8-gemm bf16, --fp8-emulate); remove one"
        )
    return cells


def _lm_head(args: Namespace, gemm: str) -> bool:
    if not LM_HEAD.given(args):
        return False
    if gemm != "fp8":
        raise UserError("--fp8-lm-head: this run's GEMMs are BF16 (--fp8-gemm bf16, --fp8-emulate); remove one")
    if args.defer_embedding_wgrad_compute:
        raise UserError("--fp8-lm-head: --defer-embedding-wgrad-compute needs stock's LM head; remove one")
    return True


def _experts(args: Namespace, grad_reduce: str, of_model: bool) -> bool:
    if not EXPERTS.given(args):
        return False
    for hindered, why in (
        (of_model and not args.num_experts, "no --num-experts: there are no experts; remove it"),
        (of_model and args.add_bias_linear, "experts with biases; add --disable-bias-linear"),
        (
            graphs.graphed(args) and not args.moe_grouped_gemm,
            f"{graphs.spelling(args)} needs experts that run together; add --moe-grouped-gemm",
        ),
        (grad_reduce == "shared", "--fp8-grad-reduce shared has no scale for an expert without a token; use block"),
        (bool(COMPACT.given(args)), f"{COMPACT.name} does not know experts' ranks; remove one"),
    ):
        if hindered:
            raise UserError(f"{EXPERTS.name}: {why}")
    return True


def _ends_in_bf16(args: Namespace) -> tuple[int, int]:
    """How many first and last layers --first-last-layers-bf16 keeps in BF16."""
    if not args.first_last_layers_bf16:
        return 0, 0
    start, end = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16
    if min(start, end) < 0 or (args.num_layers is not None and start + end > args.num_layers):
        raise UserError(
            f"--num-layers-at-start-in-bf16 {start} with --num-layers-at-end-in-bf16 {end}: more layers than "
            f"--num-layers {args.num_layers}; use smaller counts"
        )
    return start, end
