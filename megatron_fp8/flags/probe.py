"""When a run probes its GEMMs, and what else it logs of its steps: the --fp8-probe flags, and two of --fp8-log's.

    --fp8-probe-step N[,N...]    the steps, as Megatron's log numbers them (monitor/probe.py says what is measured)
    --fp8-probe-dir DIR          where rank 0 writes step-N.json
    --fp8-log-exact              loss and gradient norm of every step with all their digits, without a level too
    --fp8-log-update-norm        how far the steps that are logged move the weights, without a level too

All look on: the losses are the same to the last bit.
"""

from argparse import Namespace
from dataclasses import dataclass

from ..errors import UserError

PROBE_FLAGS = (  # (flag, metavar or None for a switch, type, meaning)
    (
        "--fp8-probe-step",
        "N[,N...]",
        str,
        "At these steps compare every FP8 or emulated GEMM with BF16's, and look at its operands (docs/lab.md).",
    ),
    ("--fp8-probe-dir", "DIR", str, "Where --fp8-probe-step writes step-N.json, and how each linear fared."),
    (
        "--fp8-log-exact",
        None,
        None,
        "Log loss and gradient norm with all their digits, at any level and without one: Megatron's log has seven of "
        "the one and three decimals of the other.",
    ),
    (
        "--fp8-log-update-norm",
        None,
        None,
        "Log how far every --log-interval-th step moves the weights, and that by their norm, at any level and without "
        "one.",
    ),
)


@dataclass(frozen=True)
class ProbePlan:
    """Which steps, from 1, are probed, and the folder for what is found."""

    steps: frozenset[int]
    folder: str


def probe_from_args(args: Namespace, has_gemms: bool) -> ProbePlan | None:
    """The plan of a run's arguments; None: no step is probed.

    has_gemms: whether the run has FP8 or emulated GEMMs. Raises UserError of one line: flag, value, remedy.
    """
    steps, folder = getattr(args, "fp8_probe_step", None), getattr(args, "fp8_probe_dir", None)
    if steps is None:
        if folder is not None:
            raise UserError(f"--fp8-probe-dir {folder}: no step is probed; add --fp8-probe-step N, or remove it")
        return None
    words = steps.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--fp8-probe-step {steps}: use steps from 1, divided by commas, such as 1,100")
    if folder is None:
        raise UserError(f"--fp8-probe-step {steps}: nowhere to write to; add --fp8-probe-dir DIR")
    if not has_gemms:
        raise UserError(
            f"--fp8-probe-step {steps}: no GEMM of this run is FP8 or emulated; add --fp8-level O1 or --fp8-emulate, "
            "or remove it"
        )
    return ProbePlan(frozenset(map(int, words)), folder)


def logs_update_norm(args: Namespace) -> bool:
    """Whether a run logs the norm of its updates. Raises UserError of one line: flag, value, remedy."""
    if not getattr(args, "fp8_log_update_norm", None):
        return False
    hiding = {  # their weights are not where the optimizer's are, or they step them elsewhere
        "--use-precision-aware-optimizer": args.use_precision_aware_optimizer,
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--optimizer-cuda-graph": getattr(args, "optimizer_cuda_graph", False),
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
        "--qk-clip": getattr(args, "qk_clip", False),
        f"--optimizer {args.optimizer}": args.optimizer not in ("adam", "sgd"),
    }
    for flag, given in hiding.items():
        if given:
            raise UserError(f"--fp8-log-update-norm with {flag}: does not see its updates; remove one")
    return True
