"""Which backends compute a run's FP8 GEMMs (gemm/interface.py): those that its flags name and that all ranks can run.

    choose()   as the flags are read, on each rank alone: the backend that --fp8-gemm-backend names
    settle()   before training, all ranks together. With "auto": CUTLASS, if it is built and right on every rank. If
               the flag names CUTLASS: checks that it multiplies rightly. With --fp8-gemm-search: the plans that were
               found earlier; returns the search for the rest, for after the first step

All is put back when the next run of the process reads its flags.
"""

import functools
from collections.abc import Callable
from typing import Any

from ..errors import UserError
from ..flags.config import Fp8Config
from ..gemm import cublaslt, cutlass_check, search
from ..gemm.cutlass import CUTLASS
from ..gemm.cutlass_build import Unavailable
from ..gemm.gemm_log import announce
from ..gemm.interface import serving, use

_OURS = "CUTLASS for large ones of the backward pass"
_NAMES = {"auto": "CUTLASS and cuBLASLt", "cublaslt": "cuBLASLt", "cutlass": "CUTLASS", "torch": "torch._scaled_mm"}


class RunGemms:
    """The GEMM backends of one run.

    Args:
        device: "cuda", or "cpu" on a machine without a GPU: then the reference serves, whatever the flags say.
        say: prints lines on rank 0.
        undo: the undo of each change is added here.
    """

    def __init__(self, fp8: Fp8Config, device: str, say: Callable[[list[str]], None], undo: list[Callable[[], Any]]):
        self._fp8, self._device, self._say, self._undo = fp8, device, say, undo

    def choose(self) -> None:
        """Raises UserError if a backend that a flag names cannot serve."""
        fp8 = self._fp8
        if self._device == "cpu":
            if fp8.gemm_backend != "auto" or fp8.gemm_search:
                self._say(["no CUDA device: --fp8-gemm-backend and --fp8-gemm-search have no effect"])
        else:
            if (fp8.gemm_search or fp8.gemm_backend in ("cublaslt", "cutlass")) and not cublaslt.bound():
                flag = "--fp8-gemm-search" if fp8.gemm_search else f"--fp8-gemm-backend {fp8.gemm_backend}"
                raise UserError(f"{flag}: cuBLASLt's library is not found ({cublaslt.why_not()}); remove it")
            if fp8.gemm_backend != "auto":
                try:
                    self._use(fp8.gemm_backend)
                except Unavailable as reason:
                    raise UserError(f"--fp8-gemm-backend {fp8.gemm_backend}: {reason}; or remove it") from reason
            if fp8.gemm_search:
                self._undo.append(search.forget)
        if fp8.log_gemm:
            self._undo.append(announce(self._device, lambda line: self._say([line])))

    def settle(self) -> Callable[[], list[str]]:
        """Collective. A second call, for an evaluation after training, changes nothing.

        Raises UserError, on all ranks, if a backend that a flag names cannot serve on one of them.
        """
        fp8 = self._fp8
        if self._device == "cpu":
            return list
        if fp8.gemm_backend == "auto" and fp8.gemm == "fp8" and serving("cuda").name != "auto":
            ours = _OURS + " and for experts together" * (fp8.experts and fp8.draws_grouped)
            if reason := cutlass_check.why_not():
                self._say([f"FP8 GEMMs: without {ours}: {reason}"])
            else:
                self._use("auto")
                self._say([f"FP8 GEMMs: {ours}, cuBLASLt for the rest ({CUTLASS.version})"])
        if fp8.gemm_backend == "cutlass" and (reason := cutlass_check.why_not()):
            raise UserError(f"--fp8-gemm-backend cutlass: {reason}; or remove it")
        if not fp8.gemm_search:
            return list
        count, reasons = search.read_for(fp8.gemm_backend)
        self._say([f"--fp8-gemm-search: {count} GEMMs were searched earlier", *reasons])
        return self._search

    def name(self) -> str:
        """Who computes them, for people, from `settle` on."""
        if self._device == "cpu":
            return "this package's emulation on the CPU"
        name = serving("cuda").name
        return _NAMES["torch" if name == "cublaslt" and not cublaslt.bound() else name]

    def _search(self) -> list[str]:
        lines = search.tune()
        return [*lines, search.summary()] if self._fp8.log_gemm else lines

    def _use(self, name: str) -> None:
        self._undo.append(functools.partial(use, serving("cuda").name))
        use(name)
