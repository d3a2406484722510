"""The --fp8-probe flags: at which steps a run compares its GEMMs with BF16 ones.

    --fp8-probe-step N[,N...]    the steps, as Megatron's log numbers them (monitor/probe.py lists what is measured)
    --fp8-probe-dir DIR          where rank 0 writes step-N.json

A probe changes nothing: the losses are the same to the last bit.
"""

from argparse import Namespace
from dataclasses import dataclass

from ..errors import UserError
from .flag import LARGEST, Flag, listed, named, refuse

STEP = Flag(
    "--fp8-probe-step",
    "At these steps compare every FP8 or emulated GEMM with a BF16 one, and measure its operands (docs/lab.md).",
    listed("N[,N...]", lambda step: 0 < step <= LARGEST, "use steps from 1, separated by commas, such as 1,100"),
    needs_level=False,
)
FOLDER = Flag(
    "--fp8-probe-dir",
    "The folder where --fp8-probe-step writes step-N.json, with the errors of each linear.",
    named("DIR"),
    needs_level=False,
)
FLAGS = (STEP, FOLDER)


@dataclass(frozen=True)
class ProbePlan:
    """The steps to probe, counted from 1, and the folder for the results."""

    steps: frozenset[int]
    folder: str


def probe_from_args(args: Namespace, has_gemms: bool) -> ProbePlan | None:
    """The plan in a run's arguments; None: no step is probed.

    has_gemms: whether the run has FP8 or emulated GEMMs. Raises UserError of one line: flag, value, remedy.
    """
    steps, folder = STEP.given(args), FOLDER.given(args)
    if steps is None:
        refuse(args, [FOLDER], ": no step is probed; add --fp8-probe-step N")
        return None
    if folder is None:
        raise UserError(f"{STEP.shown(args)}: no folder for the results; add --fp8-probe-dir DIR")
    if not has_gemms:
        refuse(args, [STEP], ": no GEMM of this run is FP8 or emulated; add --fp8-level O1 or --fp8-emulate")
    return ProbePlan(frozenset(map(int, steps.split(","))), folder)
