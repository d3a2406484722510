"""Compile before a run does: our CUTLASS GEMMs, or the Triton kernels of a job.

    megatron-fp8 build [--jobs N]                  the CUTLASS GEMMs, once for a machine; prints the library's path
    megatron-fp8 build [--gpus N] -- COMMAND       the Triton kernels of the job of a whole launch command

The first form needs nvcc and CUTLASS's headers, but no GPU; gemm/cutlass_build.py says where the library is kept. The
second needs a GPU of the job's kind. It compiles into Triton's cache, which all ranks of the machine share; with
--fp8-gemm-search in the command it also searches. See tools/rehearsal/ahead.py. Exit code 0: built; 1: it could not be
built, and a line says why.
"""

import sys
from argparse import REMAINDER, ArgumentParser, Namespace

from ...errors import UserError
from ...processes import ended_like_ctrl_c

_PATIENCE = 1800  # seconds


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 build`."""
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: by cores and memory)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the job, if its command does not say")
    parser.add_argument("--timeout", type=int, metavar="S", help=f"seconds for each pipeline stage ({_PATIENCE})")
    parser.add_argument("command", nargs=REMAINDER, help="-- and a job's whole launch command")


@ended_like_ctrl_c()
def run(args: Namespace) -> int:
    """Build what is missing. Returns the exit code."""
    others, works = (("jobs",), "without") if args.command else (("gpus", "timeout"), "with")
    for name in others:
        if (value := getattr(args, name)) is not None:
            raise UserError(f"--{name} {value}: works only {works} a job's command behind --; remove it")
    if args.command:
        from ..rehearsal.ahead import build

        args.timeout = args.timeout or _PATIENCE
        return build(args)
    from ...gemm.cutlass_build import Unavailable, library

    try:
        print(library(args.jobs))
    except Unavailable as reason:
        print(f"megatron-fp8 build: {reason}", file=sys.stderr)
        return 1
    return 0
