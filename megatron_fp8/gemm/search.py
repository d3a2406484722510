"""Who runs a shape, and how: measured once on the machine, kept in a file, the same on all ranks.

    read()     at the start: rank 0's file of this GPU (found.py), sent to all
    tune()     after a step, by all ranks together: rank 0 times what any of them met (race.py), writes the file
               and tells all
    summary()  a line on what was found

Two runs with the same file compute the same bits; what is chosen after the first step rounds otherwise than what ran
before it.
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
_among = _ALONE  # who is chosen from
_found: dict[str, list[Choice]] = {}  # the file's, by the problem's text
_met: list[Problem] = []  # by this rank, up to `tune`


def read(among: tuple[Maker, ...] = (CUBLASLT,)) -> int:
    """Have all ranks choose among these makers and use what rank 0's file holds; how many problems that is. Collective.

    A maker that is not on all ranks, in the same version, is left out.
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
    """`read` for a run whose GEMM backend has this name, "auto" among them; and lines on who is left out. Collective.

    CUTLASS is chosen from where it is built: a search builds nothing, in the middle of a run.
    """
    reason = "" if backend == "cublaslt" else cutlass_check.why_not()
    have = {"auto": (CUBLASLT, CUTLASS), "cublaslt": (CUBLASLT,), "cutlass": (CUTLASS,)}[backend]
    count = read(tuple(maker for maker in have if maker is CUBLASLT or not reason))
    return count, [f"--fp8-gemm-search: cuBLASLt alone: {reason}"] if reason else []


def forget() -> None:
    """Go back to what runs without a search."""
    global _among
    _among, plans.searched = _ALONE, None
    _found.clear()
    _met.clear()
    plans.renew()


def chosen(problem: Problem) -> Choice | None:
    """The fastest that was found of a problem."""
    return next(iter(_allowed(problem)), None)


def _allowed(problem: Problem) -> list[Choice]:
    """What was found of it, of those who are chosen from; the fastest first."""
    makers = {maker.name for maker in makers_of(problem)}
    return [choice for choice in _found.get(str(problem), ()) if choice.maker in makers]


def _planned(problem: Problem, device: int, pointers: tuple[int, ...]) -> Plan | None:
    """The plan of the fastest choice that runs here."""
    named = {maker.name: maker for maker in makers_of(problem)}
    for choice in _allowed(problem):
        plan = named[choice.maker].named(problem, device, pointers, choice.name)
        if plan is not None:
            return plan
    return None


def makers_of(problem: Problem) -> list[Maker]:
    """Who is chosen from for a problem: those that take it, else cuBLASLt."""
    return [maker for maker in _among if maker.takes(problem)] or [CUBLASLT]


def tune() -> list[str]:
    """Search what no file had, of all problems that any rank has met, and have all ranks use the result. Collective.

    Returns a line for each problem, on rank 0.
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
            lines.append(f"the GEMM search is not kept for the next run: {error}; set MEGATRON_FP8_CACHE")
        torch.cuda.empty_cache()  # what training allocates next is of other sizes
    _found.update(from_rank_0(new))
    plans.renew()
    return lines


def said(problem: Problem, choice: Choice) -> str:
    """As "cutlass 1402 TFLOP/s, the first choice 1350, BF16 790"."""
    ours, first = (problem.flops / ms / 1e9 for ms in (choice.ms, choice.first_ms))
    bf16 = f", BF16 {problem.flops / choice.bf16_ms / 1e9:.0f}" if choice.bf16_ms else ""
    return f"{choice.maker} {ours:.0f} TFLOP/s, the first choice {first:.0f}{bf16}"


def summary() -> str:
    """On the GEMMs of FP8 operands that this rank met, geometric means; by name each no faster than BF16's."""
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
        f"{problem} ({gain:.2f} x, {(problem.m + problem.n) * problem.k / 1e6:.1f} MB of operands less)"
        for problem, gain in gains.items()
        if gain <= 1
    ]
    return line + (f"; no faster than BF16: {'; '.join(lost)}" if lost else "")


def _kept() -> dict[str, list[Choice]]:
    try:
        return load(_file())
    except OSError:  # it has no place: `tune` says so, when there is something to keep
        return {}


def _file() -> Path:
    return path(torch.cuda.get_device_name())
