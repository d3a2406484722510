"""--fp8-log-gemm: logs one line for each GEMM shape, when it first occurs.

    GEMM 8192 x 12288 x 4096 E4M3 x E4M3 -> BF16, fast: cublaslt, algorithm 66, tile 24, stages 36
    GEMM 8192 x 4096 x 16384 E5M2 x E4M3 -> BF16: cutlass, 128x256 2x1 promoted/128 8/1

The numbers are M x N x K. "fast" is fast accumulation, used in the forward pass. "added" means that the GEMM adds a
stored gradient or a residual.
"""

from collections.abc import Callable
from typing import Any

from ..numerics.scaled import ScaledTensor
from . import cublaslt, plans
from .interface import Backend, Epilogue, Planned, register, serving
from .plans import NAMES


class Announcing:
    """Wraps a backend that makes no plans (torch, reference): logs each shape once, like `plans.on_plan` for plans."""

    def __init__(self, inner: Backend, say: Callable[[str], None]):
        self.name, self.devices, self._inner, self._say = inner.name, inner.devices, inner, say
        self._seen: set[tuple] = set()

    @property
    def fuses(self) -> frozenset[str]:
        return self._inner.fuses

    def product(self, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> Any:
        out = epilogue.dtype if epilogue.into is None else epilogue.into.dtype
        extras = [*(["fast"] if fast_accum else []), *epilogue.parts()]
        key = (a.payload.shape, b.payload.shape, a.payload.dtype, b.payload.dtype, out, *extras)
        if key not in self._seen:
            self._seen.add(key)
            (m, k), n = a.payload.shape, b.payload.shape[0]
            types = f"{NAMES[a.payload.dtype]} x {NAMES[b.payload.dtype]} -> {NAMES[out]}"
            self._say(f"GEMM {', '.join([f'{m} x {n} x {k} {types}', *extras])}: {self.name}")
        return self._inner.product(a, b, epilogue, fast_accum)


def announce(device: str, say: Callable[[str], None]) -> Callable[[], None]:
    """Log the shapes of the backend that serves a device type, and of stock linears' weight gradients.

    For GEMMs by plans (plans.py) each new plan is logged, for every caller. Returns a function that stops the log.
    """
    inner = serving(device)
    if not isinstance(inner, Planned) or not cublaslt.bound():
        register(Announcing(inner, say))
    plans.on_plan = lambda plan: say(f"GEMM {plan.problem}: {plan.maker}, {plan.described()}")

    def undo() -> None:
        register(inner)
        plans.on_plan = None

    return undo
