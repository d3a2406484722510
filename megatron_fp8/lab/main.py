"""`megatron-fp8 lab VERB ...`: the stability lab. Is my FP8 run sound, and how would I know early?

    sweep     train formats x seeds x learning rates x data sets, as a plan file says
    report    what a sweep's runs show, and what they cannot

`megatron-fp8 lab VERB --help` has the rest.
"""

import argparse
import importlib

from ..entry import one_line_usage_errors

# A verb's module is imported when it is used, and offers what cli.py asks of its own verbs' modules.
VERBS = {"sweep": "megatron_fp8.lab.sweep", "report": "megatron_fp8.lab.report"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb, and the rest for it."""
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="the verb's own arguments")


def run(args: argparse.Namespace) -> int:
    """Run a verb; its exit code."""
    module = importlib.import_module(VERBS[args.verb])
    parser = argparse.ArgumentParser(
        prog=f"megatron-fp8 lab {args.verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one_line_usage_errors(parser)
    module.add_arguments(parser)
    return module.run(parser.parse_args(args.rest))
