"""Checks at start that a run may use CUTLASS: every rank has the library in one version, and its GEMM is right."""

import math

import torch

from ..numerics.formats import E4M3, E5M2, encode
from ..ranks import gathered
from . import cublaslt, plans, timing
from .cublaslt import CUBLASLT
from .cutlass import CUTLASS
from .race import AGREE


def why_not() -> str:
    """Why the run may not use CUTLASS, or "" if all ranks have loaded the same version and it is right. Collective."""
    reason = "" if cublaslt.bound() else f"CUTLASS also needs cuBLASLt, which is not bound: {cublaslt.why_not()}"
    try:
        CUTLASS.prepare(build=False)
        if torch.cuda.is_available() and not reason:
            reason = fault()
            torch.cuda.empty_cache()
    except (OSError, RuntimeError) as error:  # such as Unavailable; the other ranks wait in `gathered`
        reason = " ".join(str(error).split())
    ranks = gathered([CUTLASS.version, reason])
    for rank, (version, reason) in enumerate(ranks):
        if reason or version != ranks[0][0]:
            reason = reason or f"its CUTLASS library is {version}, but rank 0's is {ranks[0][0]}"
            return reason if ranks.count(ranks[0]) == len(ranks) else f"rank {rank}: {reason}"
    return ""


def fault(m: int = 2048, n: int = 4096, k: int = 6144) -> str:
    """What is wrong with CUTLASS's product, compared with cuBLASLt's on random data; "" if nothing is.

    Some compilers have built wrong libraries. The product has more tiles than a GPU has multiprocessors.
    """
    noise = torch.Generator(timing.DEVICE).manual_seed(0)  # leaves the run's own generator unchanged
    a, b = (torch.randn(rows, k, device=timing.DEVICE, generator=noise) for rows in (m, n))
    a, b, one = encode(a, E5M2), encode(b, E4M3), torch.ones((), device=timing.DEVICE)
    device, results = torch.cuda.current_device(), []
    for by in (CUBLASLT, CUTLASS):
        out = torch.full((m, n), math.nan, dtype=torch.bfloat16, device=timing.DEVICE)
        problem = plans.problem_of(a, b, out, plans.ALIGNMENT, False, None, False)
        found = by.candidates(problem, device, plans.pointers_of(one, one), 1)
        if not found:
            return f"its library has no kernel for {problem}; remove and rebuild it"
        found[0].run(a.data_ptr(), b.data_ptr(), out.data_ptr(), out.data_ptr(), plans._stream(device))
        results.append(out.float())
    theirs, ours = results
    off = float((ours - theirs).norm() / theirs.norm())
    return "" if off < AGREE else f"its product differs from cuBLASLt's by {off:.1g}; remove and rebuild its library"
