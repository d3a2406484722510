"""Flags of gradient storage and reduction that refine the cells grad_accum and grad_reduce.

    --fp8-grad-accum auto            FP8 for one micro-batch a step, BF16 for more; a log line says which
    --fp8-grad-reduce-hierarchy      with block: reduce inside a node first, then across nodes
    --fp8-grad-scaling...            with shared: how its factor mu is found, after FP8-LM section 2.1
"""

from argparse import Namespace

from ..errors import UserError
from ..numerics.auto_scaling import AUTO, LARGEST_MU, MODES, ScalingRule
from .flag import Flag, Values, filled, one_of, positive, refuse, whole, whole_number
from .numeric_checks import FEW_MICRO_BATCHES, largest_batch

HIERARCHY = Flag(
    "--fp8-grad-reduce-hierarchy",
    "Reduce gradients in two levels, inside a node first, then across nodes. A node is the ranks that one torchrun "
    "started (node), or N data-parallel ranks. Default off.",
    Values(
        "{off,node,N}",
        test=lambda node: node in ("off", "node") or bool(whole_number(node)),
        remedy="use off, node, or the number of data-parallel ranks in a node",
    ),
)


def _scaling(name: str, meaning: str, values: Values, field: str) -> Flag:
    return Flag(f"--fp8-grad-scaling{name}", f"With --fp8-grad-reduce shared: {meaning}", values, field)


_BACKOFF = Values("X", float, lambda x: 0 < x < 1, "mu must shrink; use a number above 0 and below 1")
SCALING = _scaling("", "how mu is found: auto-scaling (default), 1/N or 1.", one_of(*MODES), "mode")
OF_AUTO = (
    _scaling("-threshold", "mu shrinks above this share of saturated elements (1e-5).", positive(1), "threshold"),
    _scaling("-window", f"otherwise mu doubles in this many steps ({ScalingRule.window}).", whole(1), "window"),
    _scaling("-backoff", f"factor by which mu shrinks ({ScalingRule.backoff}).", _BACKOFF, "backoff"),
    _scaling("-init", "mu at the start (1/sqrt of the data-parallel size).", positive(LARGEST_MU), "initial"),
    _scaling("-interval", "check saturation every N steps (1).", whole(1), "interval"),
)
FLAGS = (HIERARCHY, SCALING, *OF_AUTO)


def storage(args: Namespace, chosen: str) -> str:
    """The value of the cell grad_accum, with "auto" decided."""
    few = _gradients(args) <= FEW_MICRO_BATCHES
    return ("fp8" if few else "bf16") if chosen == "auto" else chosen


def storage_line(args: Namespace, storage: str) -> list[str]:
    """The log line about gradient storage. storage: the value of the cell grad_accum."""
    count = _gradients(args)
    many = "micro-batches" if _parts(args) == 1 else "gradients of a weight"
    few, chosen = count <= FEW_MICRO_BATCHES, args.fp8_grad_accum in (None, "auto") and storage != "fp32"
    noise = f"an unbiased error of about {0.0375 * ((count + 1) / 2) ** 0.5:.0%}"
    if chosen and few:
        return ["gradients are stored in FP8: 1 micro-batch a step (--fp8-grad-accum)"]
    if chosen:
        return [
            f"gradients are stored in BF16: {count} {many} a step; FP8 would have {noise} (--fp8-grad-accum fp8)"
        ]
    if storage == "fp8" and not few:
        return [f"--fp8-grad-accum fp8: {count} {many} a step, {noise}; bf16: 1 %, at a byte a parameter more"]
    return []


def hierarchy(args: Namespace, reduction: str) -> str:
    """The hierarchy: "off", "node" or a number as text. reduction: the cell grad_reduce. Raises UserError."""
    value = HIERARCHY.given(args) or "off"
    if value != "off" and reduction != "block":
        why = f"with --fp8-grad-reduce {reduction}: only block reduces in two levels"
        raise UserError(f"{HIERARCHY.shown(args)} {why}; remove one")
    if value != "off" and not args.use_distributed_optimizer:
        raise UserError(f"{HIERARCHY.shown(args)}: needs --use-distributed-optimizer; add it, or remove the hierarchy")
    return value


def scaling_rule(args: Namespace, reduction: str) -> ScalingRule:
    """How mu moves. reduction: the cell grad_reduce. Raises UserError of one line: flag, value, remedy."""
    if reduction != "shared":
        refuse(args, (SCALING, *OF_AUTO), ": no effect; add --fp8-grad-reduce shared")
    if SCALING.given(args) not in (None, AUTO):
        refuse(args, OF_AUTO, f" with {SCALING.shown(args)}: no effect; use auto")
    return ScalingRule(**filled(args, (SCALING, *OF_AUTO)))


def _parts(args: Namespace) -> int:
    """The most gradients that one micro-batch adds to a weight: one per MLP chunk, or per repeat of an MTP layer."""
    repeats = args.mtp_num_layers if args.mtp_use_repeated_layer else 1
    return max(args.mlp_chunks_for_training or 1, repeats or 1)


def _gradients(args: Namespace) -> int:
    """How many gradients a step adds to a weight, computed before Megatron does."""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    replicas = max(1, args.world_size // model)
    return max(1, largest_batch(args) // ((args.micro_batch_size or 1) * replicas)) * _parts(args)
