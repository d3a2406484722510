"""`megatron-fp8 lab VERB ...`: the stability lab. Is my FP8 run sound, and how would I know early?

    sweep     train formats x seeds x learning rates x data sets, as a plan file says
    report    what a sweep's runs show, and what they cannot
    bisect    the layers or linears whose return to BF16 removes most of an FP8 run's gap
    sharpness quantiles of a checkpoint's sharpness over a data set, and the paper's search beside the closed form
    probe     error and gain of every GEMM beside BF16's; --invariants: checks that tell a bug from rounding

`megatron-fp8 lab VERB --help` has the rest.
"""

import argparse

from ..flags.usage import add_verb, run_verb

VERBS = {
    "sweep": "megatron_fp8.lab.sweep.main",
    "report": "megatron_fp8.lab.report.main",
    "bisect": "megatron_fp8.lab.trial.bisect",
    "sharpness": "megatron_fp8.lab.trial.checkpoint_sharpness",
    "probe": "megatron_fp8.lab.trial.probe",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb, and the rest for it."""
    add_verb(parser, VERBS)


def run(args: argparse.Namespace) -> int:
    """Run a verb; its exit code."""
    return run_verb("megatron-fp8 lab", VERBS, args)
