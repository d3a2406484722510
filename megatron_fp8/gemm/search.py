"""--fp8-gemm-search: finds the fastest plan for each GEMM by measuring on this machine; all ranks use the same plans.

    read()     at the start: rank 0 reads the file for this GPU (found.py) and sends it to all
    tune()     after a step, on all ranks: rank 0 times the problems of all ranks (race.py), writes the file, and sends
               the results to all
    summary()  one line about the results

Two runs with the same file compute the same bits. A plan that is chosen after the first step may round differently from
the one before it.
"""

import math
import statistics
from pathlib import Path

import torch

from ..ranks import from_rank_0, gathered, rank
from . import cutlass_check, plans
from . import race as gemm_race
from .cublaslt import CUBLASLT
from .cutlass import CUTLASS
from .found import Choice, load, path, save
from .plans import FP8, Maker, Plan, Problem

_ALONE: tuple[Maker, ...] = (CUBLASLT,)
_among = _ALONE  # the makers to choose from
_found: dict[str, list[Choice]] = {}  # the search results, by the problem's text
_met: list[Problem] = []  # the problems that this rank had run when `tune` was called


def read(among: tuple[Maker, ...] = (CUBLASLT,)) -> int:
    """Use the results in rank 0's file on all ranks, for these makers; return the number of problems. Collective.

    A maker is left out unless all ranks have the same version of it.
    """
    global _among
    everywhere = gathered([(maker.name, maker.version) for maker in among])
    _among = tuple(m for m in among if all((m.name, m.version) in versions for versions in everywhere))
    table = _kept() if rank() == 0 else {}
    versions = {(maker.name, maker.version) for maker in (*_among, CUBLASLT)}
    ours = {problem: [one for one in held if (one.maker, one.version) in versions] for problem, held in table.items()}
    _found.clear()
    _found.update(from_rank_0({problem: held for problem, held in ours.items() if held}))
    plans.searched = _planned
    plans.renew()
    return len(_found)


def read_for(backend: str) -> tuple[int, list[str]]:
    """`read` for the run's GEMM backend; returns read's number and log lines about makers left out. Collective.

    CUTLASS takes part only if its library is built already: a search does not build in the middle of a run.
    """
    reason = "" if backend == "cublaslt" else cutlass_check.why_not()
    have = {"auto": (CUBLASLT, CUTLASS), "cublaslt": (CUBLASLT,), "cutlass": (CUTLASS,)}[backend]
    count = read(tuple(maker for maker in have if maker is CUBLASLT or not reason))
    return count, [f"--fp8-gemm-search: cuBLASLt alone: {reason}"] if reason else []


def forget() -> None:
    """Stop using the results of searches."""
    global _among
    _among, plans.searched = _ALONE, None
    _found.clear()
    _met.clear()
    plans.renew()


def chosen(problem: Problem) -> Choice | None:
    """The fastest result for a problem, or None."""
    return next(iter(_allowed(problem)), None)


def _allowed(problem: Problem) -> list[Choice]:
    """The results for a problem by makers that may run it; the fastest first."""
    makers = {maker.name for maker in makers_of(problem)}
    return [choice for choice in _found.get(str(problem), ()) if choice.maker in makers]


def _planned(problem: Problem, device: int, pointers: tuple[int, ...]) -> Plan | None:
    """The plan of the fastest choice that runs here, or None."""
    named = {maker.name: maker for maker in makers_of(problem)}
    for choice in _allowed(problem):
        plan = named[choice.maker].named(problem, device, pointers, choice.name)
        if plan is not None:
            return plan
    return None


def makers_of(problem: Problem) -> list[Maker]:
    """The makers to choose from that take the problem, or cuBLASLt if none does."""
    return [maker for maker in _among if maker.takes(problem)] or [CUBLASLT]


def tune() -> list[str]:
    """Search all problems of all ranks that have no result yet, and use the results on all ranks. Collective.

    Returns log lines on rank 0, one for each problem.
    """
    _met[:] = [plan.problem for plan in plans.plans()]
    everywhere = gathered(_met)
    met = {str(problem): problem for problems in everywhere for problem in problems}
    new: dict[str, list[Choice]] = {}
    lines = []
    if rank() == 0:
        for name, problem in sorted(met.items()):
            makers = makers_of(problem)
            if len(_allowed(problem)) == len(makers):
                continue
            try:
                choices = gemm_race.race(problem, makers, torch.cuda.current_device())
            except RuntimeError as error:
                lines.append(f"GEMM {problem}: no search, the first choice stays: {str(error).splitlines()[0]}")
                continue
            new[name] = choices
            lines.append(f"GEMM {problem}: {said(problem, choices[0])}")
        try:
            if new:
                save(_file(), new)
        except OSError as error:
            lines.append(f"the GEMM search is not saved for the next run: {error}; set MEGATRON_FP8_CACHE")
        torch.cuda.empty_cache()  # training allocates other sizes
    _found.update(from_rank_0(new))
    plans.renew()
    return lines


def said(problem: Problem, choice: Choice) -> str:
    """Text such as "cutlass 1402 TFLOP/s, the first choice 1350, BF16 790"."""
    ours, first = (problem.flops / ms / 1e9 for ms in (choice.ms, choice.first_ms))
    bf16 = f", BF16 {problem.flops / choice.bf16_ms / 1e9:.0f}" if choice.bf16_ms else ""
    return f"{choice.maker} {ours:.0f} TFLOP/s, the first choice {first:.0f}{bf16}"


def summary() -> str:
    """One line about this rank's FP8 GEMMs: geometric means, and the problems that are no faster than in BF16."""
    pairs = {str(problem): (problem, chosen(problem)) for problem in _met if problem.a in FP8}
    found = [(problem, choice) for problem, choice in pairs.values() if choice is not None]
    if not found:
        return "FP8 GEMMs: none was searched"

    def mean(values: list[float]) -> float:
        return math.exp(statistics.mean(map(math.log, values)))

    rate = mean([problem.flops / choice.ms / 1e9 for problem, choice in found])
    makers = [choice.maker for _, choice in found]
    by = ", ".join(f"{makers.count(name)} by {name}" for name in sorted(set(makers)))
    line = f"FP8 GEMMs: {len(found)} shapes ({by}), geometric means: {rate:.0f} TFLOP/s, "
    line += f"{mean([choice.first_ms / choice.ms for _, choice in found]):.3f} x the first choice"
    gains = {problem: choice.bf16_ms / choice.ms for problem, choice in found if choice.bf16_ms}
    if gains:
        line += f", {mean(list(gains.values())):.2f} x BF16"
    lost = [
        f"{problem} ({gain:.2f} x, operands {(problem.m + problem.n) * problem.k / 1e6:.1f} MB smaller)"
        for problem, gain in gains.items()
        if gain <= 1
    ]
    return line + (f"; no faster than BF16: {'; '.join(lost)}" if lost else "")


def _kept() -> dict[str, list[Choice]]:
    try:
        return load(_file())
    except OSError:  # there is no cache folder; `tune` reports it when it has results to save
        return {}


def _file() -> Path:
    return path(torch.cuda.get_device_name())
