"""`megatron-fp8 lab VERB ...`: the stability lab. Is my FP8 run sound, and how would I notice early if not?

See `megatron-fp8 lab VERB --help`.
"""

import argparse

from ...flags.usage import Verb, add_verb, run_verb

VERBS = {
    "sweep": Verb(
        "megatron_fp8.tools.lab.sweep.main", "train formats x seeds x learning rates x data sets, from a plan file"
    ),
    "merge": Verb("megatron_fp8.tools.lab.sweep.merge", "adds the runs of other stores: sweeps of several machines"),
    "report": Verb("megatron_fp8.tools.lab.report.main", "what a sweep's runs show, and what they cannot"),
    "bisect": Verb(
        "megatron_fp8.tools.lab.trial.bisect", "the linears whose return to BF16 removes most of an FP8 run's gap"
    ),
    "sharpness": Verb(
        "megatron_fp8.tools.lab.trial.checkpoint_sharpness",
        "sharpness of a checkpoint over a data set: quantiles, and the paper's search beside the closed form",
    ),
    "probe": Verb(
        "megatron_fp8.tools.lab.trial.probe",
        "error and gain of every GEMM beside BF16's; --invariants: checks that tell a bug from rounding",
    ),
    "stress": Verb(
        "megatron_fp8.tools.stress.main", "plants eight troubles in small models: which recipes are fragile"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs."""
    add_verb(parser, VERBS)


def run(args: argparse.Namespace) -> int:
    """Run a verb. Returns its exit code."""
    return run_verb("megatron-fp8 lab", VERBS, args)
