"""The flags of the FP8 GEMM backend: --fp8-gemm-backend, --fp8-gemm-search and --fp8-log-gemm.

    cublaslt   cuBLASLt through our own binding: the GEMM itself accumulates weight gradients
    cutlass    our own kernels, for Hopper, built at first use; cuBLASLt for GEMMs that they do not support
    torch      torch._scaled_mm
    auto       cuBLASLt; CUTLASS if it is built and known to be faster, or a search has found it faster; torch if
               cuBLASLt is not found

The backends differ in speed and in the last bits. All need a CUDA device. Several experts at once
(--moe-grouped-gemm) are multiplied by CUTLASS with auto or cutlass, if it is built, and otherwise by Triton.
"""

from argparse import Namespace

from ..errors import UserError
from .flag import Flag, one_of

BACKENDS = ("auto", "cublaslt", "cutlass", "torch")
BACKEND = Flag(
    "--fp8-gemm-backend",
    "The backend of the FP8 GEMMs: cublaslt, which accumulates weight gradients in the GEMM; cutlass, our own kernels, "
    "which take minutes to build at first use (or before: megatron-fp8 build); or torch (torch._scaled_mm). Default "
    "auto: cuBLASLt, and CUTLASS, if it is built, for large GEMMs of the backward pass and for GEMMs that "
    "--fp8-gemm-search has found faster with it. With auto or cutlass CUTLASS also multiplies several experts at "
    "once, if it is built; otherwise Triton does.",
    one_of(*BACKENDS),
)
SEARCH = Flag(
    "--fp8-gemm-search",
    "Run each GEMM with the fastest of cuBLASLt's algorithms and, if they are built (megatron-fp8 build), our CUTLASS "
    "kernels. Rank 0 times them after the first step and keeps the result in ~/.cache/megatron_fp8 (or "
    "$MEGATRON_FP8_CACHE) for later runs.",
)
LOG = Flag(
    "--fp8-log-gemm",
    "Log each GEMM's shape, types, backend and algorithm when it first runs; with --fp8-gemm-search also how much "
    "faster the FP8 GEMMs are than BF16 ones.",
)
FLAGS = (BACKEND, SEARCH, LOG)


def backend(args: Namespace) -> str:
    """One of BACKENDS. Raises UserError of one line: flag, value, remedy."""
    name = BACKEND.given(args) or "auto"
    if SEARCH.given(args) and name == "torch":
        raise UserError(f"{SEARCH.name} with {BACKEND.name} {name}: it searches cuBLASLt and CUTLASS; remove one")
    return name
