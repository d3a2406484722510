"""`megatron-fp8 VERB ...`, also `python -m megatron_fp8.cli VERB ...`: everything that is no training run.

A verb's module is imported when the verb is used, and offers `add_arguments(parser)` and `run(args) -> int`,
whose result is the exit code.  A mistake on the command line is one line and exit code 2; Ctrl-C is 130, as in a shell.
"""

import argparse
import errno
import os
import sys

from .errors import UserError
from .flags.usage import add_verb, hide_missing_package_warnings, one_line_errors, run_verb

VERBS = {
    "args": "megatron_fp8.launch.args",
    "build": "megatron_fp8.ops.cutlass_build",
    "compare": "megatron_fp8.perf.compare",
    "convert": "megatron_fp8.checkpoint.convert",
    "doctor": "megatron_fp8.doctor.main",
    "estimate": "megatron_fp8.perf.estimate",
    "lab": "megatron_fp8.lab.main",
    "launch": "megatron_fp8.launch.main",
    "memory": "megatron_fp8.perf.memory",
    "plan": "megatron_fp8.perf.plan",
    "rehearse": "megatron_fp8.rehearsal.main",
    "table": "megatron_fp8.perf.table",
}


def main(argv: list[str] | None = None) -> int:
    """Run the verb argv[0] with the rest (None: the process's arguments); returns the exit code."""
    code = 1
    with one_line_errors():
        parser = argparse.ArgumentParser(prog="megatron-fp8", description="`megatron-fp8 VERB --help` has the rest.")
        add_verb(parser, VERBS)
        chosen = parser.parse_args(argv)
        hide_missing_package_warnings()
        try:
            code = run_verb("megatron-fp8", VERBS, chosen)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever reads has enough of it, as head has
            _forget_output()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _forget_output()
            where = error.filename or "the output"
            raise UserError(f"{where}: {error.strerror}; make room, or write elsewhere") from None
    return code


def _forget_output() -> None:
    """Python would try once more, as it ends, to write what waits for stdout, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
