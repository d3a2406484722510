"""What a run does about a spike of its loss or gradient norm: --fp8-on-spike, and when it is one (monitor/watch.py)."""

from argparse import Namespace
from dataclasses import dataclass

from ..errors import UserError

ACTIONS = LOG, SKIP, FALLBACK = ("log", "skip", "bf16-fallback")
LEAST_WINDOW = 16  # values that a spike is told from
NO_FP8 = f"--fp8-on-spike {FALLBACK}: no linear of this run computes in FP8; use log or skip"
WATCH_FLAGS = (  # (flag, metavar, type, meaning)
    (
        "--fp8-on-spike",
        f"{{{','.join(ACTIONS)}}}",
        str,
        "Watch loss and gradient norm for spikes: say so in the log; or skip the step too; or have the linears whose "
        "FP8 casts clipped compute in BF16 until it is calm. Default: not watched.",
    ),
    ("--fp8-spike-sigma", "X", float, "With --fp8-on-spike: standard deviations above the trend from which on (7)."),
    (
        "--fp8-spike-window",
        "N",
        int,
        "With --fp8-on-spike: steps whose trend counts, and calm steps until a linear returns to FP8 (128).",
    ),
)


@dataclass(frozen=True)
class WatchPlan:
    """What the flags say: `action`, of ACTIONS; `sigma`, deviations; `window`, steps."""

    action: str
    sigma: float = 7.0
    window: int = 128


def watch_from_args(args: Namespace, has_fp8: bool) -> WatchPlan | None:
    """The plan of a run's arguments; None: nothing is watched.

    has_fp8: whether the run's linears compute in FP8. Raises UserError of one line: flag, value, remedy.
    """
    action, sigma, window = (getattr(args, flag[2:].replace("-", "_"), None) for flag, *_ in WATCH_FLAGS)
    if action is None:
        for flag, value in (("--fp8-spike-sigma", sigma), ("--fp8-spike-window", window)):
            if value is not None:
                raise UserError(f"{flag} {value}: nothing is watched; add --fp8-on-spike log, or remove it")
        return None
    if action not in ACTIONS:
        raise UserError(f"--fp8-on-spike {action}: no such value; use {', '.join(ACTIONS)}")
    if action == FALLBACK and not has_fp8:
        raise UserError(NO_FP8)
    if sigma is not None and not 0 < sigma < float("inf"):
        raise UserError(f"--fp8-spike-sigma {sigma}: use a number above 0")
    if window is not None and window < LEAST_WINDOW:
        raise UserError(f"--fp8-spike-window {window}: use {LEAST_WINDOW} or more")
    given = {"sigma": sigma, "window": window}
    return WatchPlan(action, **{name: value for name, value in given.items() if value is not None})
