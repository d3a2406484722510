"""Who computes the FP8 GEMMs: --fp8-gemm-backend, --fp8-gemm-search and --fp8-log-gemm.

    cublaslt   cuBLASLt by our own binding: adds weight gradients in the GEMM, and can choose among its algorithms
    torch      torch._scaled_mm
    auto       the first of them that this machine has

They differ in speed, and in the last bits. Without a CUDA device none of them serves.
"""

from argparse import Namespace

from ..errors import UserError
from .flag import Flag, one_of

BACKENDS = ("auto", "cublaslt", "torch")
BACKEND = Flag(
    "--fp8-gemm-backend",
    "Who computes the FP8 GEMMs: cuBLASLt by our own binding, which adds weight gradients in the GEMM, or "
    "torch._scaled_mm. Default auto: the first of them that is here.",
    one_of(*BACKENDS),
)
SEARCH = Flag(
    "--fp8-gemm-search",
    "Run each GEMM by the fastest of cuBLASLt's algorithms instead of its first choice: rank 0 times them after the "
    "first step, and keeps what it finds in ~/.cache/megatron_fp8 (or $MEGATRON_FP8_CACHE) for later runs.",
)
LOG = Flag("--fp8-log-gemm", "Log each GEMM's shape, types, backend and algorithm, when it is first met.")
FLAGS = (BACKEND, SEARCH, LOG)


def backend(args: Namespace) -> str:
    """One of BACKENDS. Raises UserError of one line: flag, value, remedy."""
    name = BACKEND.value(args) or "auto"
    if SEARCH.value(args) and name not in ("auto", "cublaslt"):
        raise UserError(f"{SEARCH.name} with {BACKEND.name} {name}: it searches only cuBLASLt; remove one")
    return name
