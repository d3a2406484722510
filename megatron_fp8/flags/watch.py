"""What a run does about a spike of its loss or gradient norm: --fp8-on-spike, and when it is one (monitor/watch.py)."""

from argparse import Namespace
from dataclasses import dataclass

from ..errors import UserError
from .flag import Flag, filled, one_of, positive, refuse, whole

ACTIONS = LOG, SKIP, FALLBACK = ("log", "skip", "bf16-fallback")
LEAST_WINDOW = 16  # values that a spike is told from
NO_FP8 = f"--fp8-on-spike {FALLBACK}: no linear of this run computes in FP8; use log or skip"


@dataclass(frozen=True)
class WatchPlan:
    """What the flags say: `action`, of ACTIONS; `sigma`, deviations; `window`, steps."""

    action: str
    sigma: float = 7.0
    window: int = 128


ON_SPIKE = Flag(
    "--fp8-on-spike",
    "Watch loss and gradient norm for spikes: say so in the log; or skip the step too; or have the linears whose "
    "FP8 casts clipped compute in BF16 until it is calm. Default: not watched.",
    one_of(*ACTIONS),
    "action",
)
HOW = (
    Flag(
        "--fp8-spike-sigma",
        f"With --fp8-on-spike: standard deviations above the trend from which on ({WatchPlan.sigma:g}).",
        positive(),
        "sigma",
    ),
    Flag(
        "--fp8-spike-window",
        "With --fp8-on-spike: steps whose trend counts, and calm steps until a linear returns to FP8 "
        f"({WatchPlan.window}).",
        whole(LEAST_WINDOW),
        "window",
    ),
)
FLAGS = (ON_SPIKE, *HOW)


def watch_from_args(args: Namespace, has_fp8: bool) -> WatchPlan | None:
    """The plan of a run's arguments; None: nothing is watched.

    has_fp8: whether the run's linears compute in FP8. Raises UserError of one line: flag, value, remedy.
    """
    if ON_SPIKE.given(args) is None:
        refuse(args, HOW, ": nothing is watched; add --fp8-on-spike log")
        return None
    plan = WatchPlan(**filled(args, FLAGS))
    if plan.action == FALLBACK and not has_fp8:
        raise UserError(NO_FP8)
    return plan
