"""When a run probes its GEMMs: the --fp8-probe flags.

    --fp8-probe-step N[,N...]    the steps, as Megatron's log numbers them (monitor/probe.py says what is measured)
    --fp8-probe-dir DIR          where rank 0 writes step-N.json

It changes nothing: the losses are the same to the last bit.
"""

from argparse import Namespace
from dataclasses import dataclass

from ..errors import UserError
from .flag import LARGEST, Flag, listed, named, refuse

STEP = Flag(
    "--fp8-probe-step",
    "At these steps compare every FP8 or emulated GEMM with BF16's, and look at its operands (docs/lab.md).",
    listed("N[,N...]", lambda step: 0 < step <= LARGEST, "use steps from 1, divided by commas, such as 1,100"),
    needs_level=False,
)
FOLDER = Flag(
    "--fp8-probe-dir",
    "Where --fp8-probe-step writes step-N.json, and how each linear fared.",
    named("DIR"),
    needs_level=False,
)
FLAGS = (STEP, FOLDER)


@dataclass(frozen=True)
class ProbePlan:
    """Which steps, from 1, are probed, and the folder for what is found."""

    steps: frozenset[int]
    folder: str


def probe_from_args(args: Namespace, has_gemms: bool) -> ProbePlan | None:
    """The plan of a run's arguments; None: no step is probed.

    has_gemms: whether the run has FP8 or emulated GEMMs. Raises UserError of one line: flag, value, remedy.
    """
    steps, folder = STEP.given(args), FOLDER.given(args)
    if steps is None:
        refuse(args, [FOLDER], ": no step is probed; add --fp8-probe-step N")
        return None
    if folder is None:
        raise UserError(f"{STEP.shown(args)}: nowhere to write to; add --fp8-probe-dir DIR")
    if not has_gemms:
        refuse(args, [STEP], ": no GEMM of this run is FP8 or emulated; add --fp8-level O1 or --fp8-emulate")
    return ProbePlan(frozenset(map(int, steps.split(","))), folder)
