"""The --fp8-sharpness flags: when a run measures the sharpness of its loss, at any level and without one.

    --fp8-sharpness-interval N      in training, every N-th iteration as Megatron's log numbers them; goes to the log
    --fp8-sharpness-eval FILE       in evaluations, with --skip-train too; goes to FILE (`megatron-fp8 lab sharpness`)
    --fp8-sharpness-iterations N    in evaluations also by N iterations of L-BFGS-B, on each sequence's last token

Measuring changes nothing: the losses are the same to the last bit.
"""

from argparse import Namespace
from dataclasses import dataclass

from .. import packages
from ..errors import UserError
from .flag import Flag, filled, named, refuse, whole

PAPER_ITERATIONS = 10  # of L-BFGS-B
QUANTILES = {"min": 0.0, "q05": 0.05, "median": 0.5, "q95": 0.95, "q99": 0.99, "max": 1.0}  # written to FILE


@dataclass(frozen=True)
class SharpnessPlan:
    """What the flags say.

    Attributes:
        interval: iterations of training from one measurement to the next; 0: none.
        file: for the results of evaluations; None: evaluations do not measure.
        iterations: of L-BFGS-B in evaluations, on the last token of each sequence; 0: none.
    """

    interval: int = 0
    file: str | None = None
    iterations: int = 0


INTERVAL = Flag(
    "--fp8-sharpness-interval",
    "Measure the sharpness of the loss over all positions in every N-th iteration, and log it, at any level and "
    "without one. Default 0: never.",
    whole(0, "never"),
    "interval",
    needs_level=False,
)
FILE = Flag(
    "--fp8-sharpness-eval",
    "Measure the sharpness in evaluations, with --skip-train too, and write its quantiles to FILE as JSON "
    "(megatron-fp8 lab sharpness).",
    named("FILE"),
    "file",
    needs_level=False,
)
ITERATIONS = Flag(
    "--fp8-sharpness-iterations",
    "In evaluations measure it also by N iterations of L-BFGS-B on the last token of each sequence. Default 0: no.",
    whole(0, "not done"),
    "iterations",
    needs_level=False,
)
FLAGS = (INTERVAL, FILE, ITERATIONS)


def sharpness_from_args(args: Namespace) -> SharpnessPlan | None:
    """The plan in a run's arguments; None: nothing is measured. Raises UserError of one line: flag, value, remedy.

    args: after `adapt_stock_args`.
    """
    plan = SharpnessPlan(**filled(args, FLAGS))
    if plan.iterations and plan.file is None:
        refuse(args, [ITERATIONS], ": only for evaluations; add --fp8-sharpness-eval FILE")
    if plan.iterations and not packages.installed("scipy"):
        raise UserError(f"{ITERATIONS.shown(args)}: {packages.needs('scipy', 'use 0')}")
    if not plan.interval and plan.file is None:
        return None
    asked = (INTERVAL if plan.interval else FILE).shown(args)
    hiding = {  # with these the logits do not come out of the model's forward, or a graph replays it
        "--overlap-moe-expert-parallel-comm": args.overlap_moe_expert_parallel_comm,
        "--cuda-graph-impl full_iteration": args.cuda_graph_impl == "full_iteration",
        "--cuda-graph-modules full_iteration": "full_iteration" in (args.cuda_graph_modules or ()),
        "--cuda-graph-scope full_iteration": "full_iteration" in (args.cuda_graph_scope_deprecated or ()),
    }
    for flag, given in hiding.items():
        if given:
            raise UserError(f"{flag} with {asked}: hides the logits; remove one")
    return plan
