"""How fast this machine's host is: what it takes to launch a kernel.

A step of a small model is as long as its host needs for Python and some ten thousand launches, and hosts differ by
half: no figure of such a step means anything without this one beside it.
"""

import statistics
import time

_LAUNCHES = 500  # fewer than the GPU's queue has room for, so that no launch waits
_ROUNDS = 21


def launch_us() -> float | None:
    """Microseconds of the host for one small kernel through torch, the median of rounds; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    x = torch.zeros(16, device="cuda")
    y = torch.empty_like(x)
    rounds = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_LAUNCHES):
            torch.add(x, x, out=y)
        rounds.append((time.perf_counter() - began) / _LAUNCHES * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)
