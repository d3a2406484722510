"""Who computes the FP8 GEMMs: --fp8-gemm-backend, --fp8-gemm-search and --fp8-log-gemm.

    cublaslt   cuBLASLt by our own binding: adds weight gradients in the GEMM
    cutlass    our own kernels, for Hopper, built at first use; cuBLASLt for what they do not take
    torch      torch._scaled_mm
    auto       cuBLASLt, and CUTLASS where it is built and known to be faster, or a search has found it so; torch where
               cuBLASLt is not found

They differ in speed, and in the last bits. Without a CUDA device none of them serves.
"""

from argparse import Namespace

from ..errors import UserError
from .flag import Flag, one_of

BACKENDS = ("auto", "cublaslt", "cutlass", "torch")
BACKEND = Flag(
    "--fp8-gemm-backend",
    "Who computes the FP8 GEMMs: cuBLASLt by our own binding, which adds weight gradients in the GEMM; our CUTLASS "
    "kernels, built at first use, in minutes (or before: megatron-fp8 build); or torch._scaled_mm. Default auto: "
    "cuBLASLt, and where they are built our CUTLASS kernels for large products of the backward pass, and for what "
    "--fp8-gemm-search has found them faster for.",
    one_of(*BACKENDS),
)
SEARCH = Flag(
    "--fp8-gemm-search",
    "Run each GEMM by the fastest of cuBLASLt's algorithms and, where they are built (megatron-fp8 build), our CUTLASS "
    "kernels: rank 0 times them after the first step, and keeps what it finds in ~/.cache/megatron_fp8 (or "
    "$MEGATRON_FP8_CACHE) for later runs.",
)
LOG = Flag(
    "--fp8-log-gemm",
    "Log each GEMM's shape, types, backend and algorithm, when it is first met; with --fp8-gemm-search also what the "
    "FP8 ones gain over BF16's.",
)
FLAGS = (BACKEND, SEARCH, LOG)


def backend(args: Namespace) -> str:
    """One of BACKENDS. Raises UserError of one line: flag, value, remedy."""
    name = BACKEND.given(args) or "auto"
    if SEARCH.given(args) and name == "torch":
        raise UserError(f"{SEARCH.name} with {BACKEND.name} {name}: it searches cuBLASLt and CUTLASS; remove one")
    return name
