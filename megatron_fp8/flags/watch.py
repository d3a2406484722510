"""The --fp8-on-spike flags: what a run does about a spike of its loss or gradient norm (monitor/watch.py finds it)."""

from argparse import Namespace
from dataclasses import dataclass

from ..errors import UserError
from .flag import Flag, filled, one_of, positive, refuse, whole

ACTIONS = LOG, SKIP, FALLBACK = ("log", "skip", "bf16-fallback")
LEAST_WINDOW = 16  # with fewer values a spike cannot be told from the trend
NO_FP8 = f"--fp8-on-spike {FALLBACK}: no linear of this run computes in FP8; use log or skip"


@dataclass(frozen=True)
class WatchPlan:
    """What the flags say. action: one of ACTIONS. sigma: standard deviations. window: steps."""

    action: str
    sigma: float = 7.0
    window: int = 128


ON_SPIKE = Flag(
    "--fp8-on-spike",
    "Watch loss and gradient norm for spikes. log: log a spike; skip: also skip the step; bf16-fallback: use "
    "BF16 in the linears whose FP8 casts clipped, until no spike follows. Default: no watching.",
    one_of(*ACTIONS),
    "action",
)
HOW = (
    Flag(
        "--fp8-spike-sigma",
        f"With --fp8-on-spike: a spike is this many standard deviations above the trend ({WatchPlan.sigma:g}).",
        positive(),
        "sigma",
    ),
    Flag(
        "--fp8-spike-window",
        "With --fp8-on-spike: steps that make up the trend, and steps without a spike until a linear returns to FP8 "
        f"({WatchPlan.window}).",
        whole(LEAST_WINDOW),
        "window",
    ),
)
FLAGS = (ON_SPIKE, *HOW)


def watch_from_args(args: Namespace, has_fp8: bool) -> WatchPlan | None:
    """The plan in a run's arguments; None: no watching.

    has_fp8: whether the run's linears compute in FP8. Raises UserError of one line: flag, value, remedy.
    """
    if ON_SPIKE.given(args) is None:
        refuse(args, HOW, ": nothing is watched; add --fp8-on-spike log")
        return None
    plan = WatchPlan(**filled(args, FLAGS))
    if plan.action == FALLBACK and not has_fp8:
        raise UserError(NO_FP8)
    return plan
