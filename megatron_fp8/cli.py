"""`megatron-fp8 VERB ...`, also `python -m megatron_fp8.cli VERB ...`: everything that is no training run.

A verb's module is imported when the verb is used, and offers `add_arguments(parser)` and `run(args) -> int`,
whose result is the exit code.  A mistake on the command line is one line and exit code 2; Ctrl-C is 130, as in a shell.
"""

import argparse
import errno
import os
import sys

from .errors import UserError
from .flags.usage import Verb, add_verb, hide_missing_package_warnings, one_line_errors, run_verb
from .version import described

VERBS = {
    "args": Verb("megatron_fp8.tools.launch.args", "the command line that --args-file makes of files of flags"),
    "build": Verb("megatron_fp8.tools.verbs.build", "compile ahead: our CUTLASS GEMMs, or the Triton kernels of a job"),
    "compare": Verb("megatron_fp8.tools.perf.compare", "runs beside each other: speed, memory, losses"),
    "convert": Verb("megatron_fp8.tools.verbs.convert", "checkpoints to Hugging Face's form, and back"),
    "doctor": Verb("megatron_fp8.tools.doctor.main", "what this machine or cluster lacks"),
    "estimate": Verb("megatron_fp8.tools.perf.estimate", "whether a job fits, and how fast it is"),
    "lab": Verb("megatron_fp8.tools.lab.main", "the stability lab: sweeps, reports, which linears are at fault"),
    "launch": Verb("megatron_fp8.tools.launch.main", "a Slurm job of files of flags"),
    "memory": Verb("megatron_fp8.tools.perf.memory", "what each rank of a job holds between two steps"),
    "plan": Verb("megatron_fp8.tools.perf.plan", "the fastest layouts of a job on so many GPUs"),
    "rehearse": Verb("megatron_fp8.tools.rehearsal.main", "a cluster job's command here, small, with every rank"),
    "table": Verb("megatron_fp8.tools.perf.table", "FP8-LM's tables beside the cost model and measured runs"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the verb argv[0] with the rest (None: the process's arguments); returns the exit code."""
    code = 1
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-: no file that is opened later may take its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    with one_line_errors():
        parser = argparse.ArgumentParser(prog="megatron-fp8", description="`megatron-fp8 VERB --help` has the rest.")
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
        except BrokenPipeError:  # the reader has enough of it, as head has
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
            remedy = "make room, or write elsewhere" if full else "give another"
            raise UserError(f"{error.filename or 'the output'}: {error.strerror}; {remedy}") from None
    return code


def _forget_output() -> None:
    """Python would try once more, as it ends, to write what waits for stdout, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
