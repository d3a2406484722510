"""Compile our CUTLASS GEMMs, once for a machine, and print where the library lies.

    megatron-fp8 build [--jobs N]

Needs nvcc and CUTLASS' headers, and no GPU; megatron_fp8/ops/cutlass_build.py says where the library is kept. Exit code
0: it is there; 1: it could not be built, and the line says why.
"""

import sys
from argparse import ArgumentParser, Namespace

from ..processes import ended_like_ctrl_c


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 build`."""
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: by cores and memory)")


@ended_like_ctrl_c()
def run(args: Namespace) -> int:
    """Build it if it is not there; returns the exit code."""
    from ..ops.cutlass_build import Unavailable, library

    try:
        print(library(args.jobs))
    except Unavailable as reason:
        print(f"megatron-fp8 build: {reason}", file=sys.stderr)
        return 1
    return 0
