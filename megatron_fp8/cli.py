"""`megatron-fp8 VERB ...`, also `python -m megatron_fp8.cli VERB ...`: the command line of all tools beside training.

A verb's module is imported when the verb is used. It has `add_arguments(parser)` and `run(args) -> int`, which returns
the exit code.  A mistake on the command line gives one line and exit code 2; Ctrl-C gives 130, as in a shell.
"""

import argparse
import errno
import os
import sys

from .errors import UserError
from .flags.usage import Verb, add_verb, hide_missing_package_warnings, one_line_errors, run_verb
from .version import described

VERBS = {
    "args": Verb("megatron_fp8.tools.launch.args", "print the command line that --args-file makes from files of flags"),
    "build": Verb("megatron_fp8.tools.verbs.build", "compile ahead: our CUTLASS GEMMs, or a job's Triton kernels"),
    "compare": Verb("megatron_fp8.tools.perf.compare", "compare runs: speed, memory, losses"),
    "convert": Verb("megatron_fp8.tools.verbs.convert", "convert checkpoints to Hugging Face's format, and back"),
    "doctor": Verb("megatron_fp8.tools.doctor.main", "check what this machine or cluster lacks"),
    "estimate": Verb("megatron_fp8.tools.perf.estimate", "estimate whether a job fits, and how fast it is"),
    "lab": Verb("megatron_fp8.tools.lab.main", "the stability lab: sweeps, reports, which linears diverge"),
    "launch": Verb("megatron_fp8.tools.launch.main", "write a Slurm job from files of flags, and submit it"),
    "memory": Verb("megatron_fp8.tools.perf.memory", "the memory that each rank of a job holds between two steps"),
    "plan": Verb("megatron_fp8.tools.perf.plan", "find a job's fastest layouts on a number of GPUs"),
    "rehearse": Verb("megatron_fp8.tools.rehearsal.main", "run a cluster job's command here, small, with every rank"),
    "table": Verb("megatron_fp8.tools.perf.table", "FP8-LM's tables beside the cost model and measured runs"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the verb argv[0] with the rest (None: the process's arguments); returns the exit code."""
    code = 1
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, by >&- for example: no other file may get its descriptor
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    with one_line_errors(of_ranks=False):
        parser = argparse.ArgumentParser(prog="megatron-fp8", description="`megatron-fp8 VERB --help` explains a verb.")
        parser.add_argument("--version", action="store_true", help="print the version and its commit")
        add_verb(parser, VERBS)
        words = sys.argv[1:] if argv is None else argv
        if words[:1] == ["--version"]:
            print(f"megatron-fp8 {described()}")
            return 0
        chosen = parser.parse_args(words or ["--help"])
        hide_missing_package_warnings()
        try:
            code = run_verb("megatron-fp8", VERBS, chosen)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as head, has closed the pipe
            _forget_output()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
        except OSError as error:
            full = error.errno == errno.ENOSPC
            if not full and error.filename is None:
                raise
            if full:
                _forget_output()
            remedy = "free some space, or write elsewhere" if full else "give another"
            raise UserError(f"{error.filename or 'the output'}: {error.strerror}; {remedy}") from None
    return code


def _forget_output() -> None:
    """Discard buffered output: when Python ends it would try to write it again, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
