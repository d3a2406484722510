"""Who runs a shape, and how: measured once on the machine, kept in a file, the same on all ranks.

    read()     at the start: rank 0's file of this GPU, sent to all
    search()   one problem: cuBLASLt's algorithms and CUTLASS's kernels timed against each other
    tune()     after a step, by all ranks together: rank 0 times what any of them met, writes the file and tells all
    summary()  a line on what was found

The file is JSON, {problem as text: [{"maker": "cutlass", "version": ..., "name": ..., "ms": ..., ...}, ...]}, the best
of each maker, in ~/.cache/megatron_fp8/gemm, or under $MEGATRON_FP8_CACHE. A name says what runs, not where it stands
in a list; it is believed of the same version of the maker's library only. The file is written beside and renamed, so
that a reader finds all of the old or all of the new; what another run has found in between is kept. Two runs with the
same file compute the same bits; what is chosen after the first step rounds otherwise than what ran before it.
"""

import contextlib
import functools
import json
import math
import os
import re
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fp8.ops import cublaslt, plans, timing
from megatron_fp8.ops.cublaslt import CUBLASLT
from megatron_fp8.ops.cutlass import CUTLASS, Cutlass
from megatron_fp8.ops.plans import FP8, Maker, Plan, Problem

SCREENED = 4  # runs of every candidate, one by one: even
KEPT = 3  # of each maker, the fastest of these, which then run under load
AGREE = 0.01  # two results of one product: sums and their rounding differ by a tenth of it
WORTH = 0.99  # of the first choice's time: what is closer is noise, and the first stays
_DEVICE = "cuda"  # the current one


@dataclass(frozen=True)
class Choice:
    """What a search found of one maker; milliseconds.

    first_ms: of the first choice, what runs without a search.  bf16_ms: of the product of BF16 operands; 0: not asked.
    """

    maker: str
    version: str
    name: str
    ms: float
    first_ms: float
    bf16_ms: float = 0.0


_among: tuple[Maker, ...] = (CUBLASLT,)  # who is chosen from
_found: dict[str, list[Choice]] = {}  # the file's, by the problem's text
_met: list[Problem] = []  # by this rank, up to `tune`


def path(gpu: str) -> Path:
    """The file of a GPU."""
    root = os.environ.get("MEGATRON_FP8_CACHE") or Path.home() / ".cache/megatron_fp8"
    return Path(root) / "gemm" / f"{re.sub(r'[^0-9A-Za-z]+', '-', gpu)}.json"


def load(file: Path) -> dict[str, list[Choice]]:
    """What a file holds; nothing where there is none, or where it is none of ours."""
    try:
        held = json.loads(file.read_text())
        return {str(problem): [_checked(Choice(**one)) for one in choices] for problem, choices in held.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _checked(choice: Choice) -> Choice:
    if not all(isinstance(text, str) for text in (choice.maker, choice.version, choice.name)):
        raise TypeError(choice)
    if not all(ms > 0 for ms in (choice.ms, choice.first_ms)):
        raise ValueError(choice)
    return choice


def save(file: Path, new: dict[str, list[Choice]]) -> None:
    """Add to the file, in one step; what it holds of the same makers, in the same versions, is replaced."""
    file.parent.mkdir(parents=True, exist_ok=True)
    held = load(file)
    for problem, choices in new.items():
        theirs = {(one.maker, one.version) for one in choices}
        others = [one for one in held.get(problem, []) if (one.maker, one.version) not in theirs]
        held[problem] = choices + others
    text = json.dumps({problem: [vars(one) for one in choices] for problem, choices in held.items()}, indent=1)
    handle, beside = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.replace(beside, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def read(among: tuple[Maker, ...] = (CUBLASLT,)) -> int:
    """Have all ranks choose among these makers and use what rank 0's file holds; how many problems that is. Collective.

    A maker that is not on all ranks, in the same version, is left out.
    """
    global _among
    everywhere = _gathered([(maker.name, maker.version) for maker in among])
    _among = tuple(m for m in among if all((m.name, m.version) in versions for versions in everywhere))
    table = load(_file()) if _rank() == 0 else {}
    versions = {(maker.name, maker.version) for maker in (*_among, CUBLASLT)}
    ours = {problem: [one for one in held if (one.maker, one.version) in versions] for problem, held in table.items()}
    _found.clear()
    _found.update(_from_rank_0({problem: held for problem, held in ours.items() if held}))
    plans.searched = _planned
    plans.renew()
    return len(_found)


def read_for(backend: str) -> tuple[int, list[str]]:
    """`read` for a run whose GEMM backend has this name, "auto" among them; and lines on who is left out. Collective.

    CUTLASS is chosen from where it is built: a search builds nothing, in the middle of a run.
    """
    reason = "" if backend == "cublaslt" else why_not(CUTLASS)
    have = {"auto": (CUBLASLT, CUTLASS), "cublaslt": (CUBLASLT,), "cutlass": (CUTLASS,)}[backend]
    count = read(tuple(maker for maker in have if maker is CUBLASLT or not reason))
    return count, [f"--fp8-gemm-search: cuBLASLt alone: {reason}"] if reason else []


def why_not(maker: Cutlass) -> str:
    """Why a CUTLASS maker may not serve; "" where it may: all ranks have loaded its library, in one version, and it is
    right. Collective."""
    reason = "" if cublaslt.bound() else f"cuBLASLt, for what CUTLASS does not take, is not bound: {cublaslt.why_not()}"
    try:
        maker.prepare(build=False)
        if torch.cuda.is_available() and not reason:
            reason = fault(maker)
            torch.cuda.empty_cache()
    except (OSError, RuntimeError) as error:  # Unavailable, or a disc's: no reason to leave the others waiting
        reason = " ".join(str(error).split())
    ranks = _gathered([maker.version, reason])
    for rank, (version, reason) in enumerate(ranks):
        if reason or version != ranks[0][0]:
            reason = reason or f"its CUTLASS library is {version}, rank 0's {ranks[0][0]}"
            return reason if ranks.count(ranks[0]) == len(ranks) else f"rank {rank}: {reason}"
    return ""


def fault(maker: Cutlass, m: int = 2048, n: int = 4096, k: int = 6144) -> str:
    """What is wrong with a maker's product, beside cuBLASLt's; "" where nothing is. Of random data, and more tiles than
    a GPU has multiprocessors: a library is made by the compiler of some machine, and not every one has been right."""
    noise = torch.Generator(_DEVICE).manual_seed(0)  # the run's own is left as it is
    a, b = (torch.randn(rows, k, device=_DEVICE, generator=noise) for rows in (m, n))
    a, b, one = a.to(torch.float8_e5m2), b.to(torch.float8_e4m3fn), torch.ones((), device=_DEVICE)
    device, results = torch.cuda.current_device(), []
    for by in (CUBLASLT, maker):
        out = torch.full((m, n), math.nan, dtype=torch.bfloat16, device=_DEVICE)
        problem = plans.problem_of(a, b, out, plans.ALIGNMENT, False, None, False)
        (plan,) = by.candidates(problem, device, plans.pointers_of(one, one), 1)
        plan.run(a.data_ptr(), b.data_ptr(), out.data_ptr(), out.data_ptr(), plans._stream(device))
        results.append(out.float())
    theirs, ours = results
    off = float((ours - theirs).norm() / theirs.norm())
    return "" if off < AGREE else f"its library is wrong, {off:.1g} off cuBLASLt's product; remove and rebuild it"


def forget() -> None:
    """Go back to what runs without a search."""
    global _among
    _among, plans.searched = (CUBLASLT,), None
    _found.clear()
    plans.renew()


def chosen(problem: Problem) -> Choice | None:
    """The fastest that was found of a problem."""
    return next(iter(_allowed(problem)), None)


def _allowed(problem: Problem) -> list[Choice]:
    """What was found of it, of those who are chosen from; the fastest first."""
    makers = {maker.name for maker in _makers(problem)}
    return [choice for choice in _found.get(str(problem), ()) if choice.maker in makers]


def _planned(problem: Problem, device: int, pointers: tuple[int, ...]) -> Plan | None:
    """The plan of the fastest choice that runs here."""
    named = {maker.name: maker for maker in _makers(problem)}
    for choice in _allowed(problem):
        plan = named[choice.maker].named(problem, device, pointers, choice.name)
        if plan is not None:
            return plan
    return None


def _makers(problem: Problem) -> list[Maker]:
    return [maker for maker in _among if maker.takes(problem)] or [CUBLASLT]


def tune() -> list[str]:
    """Search what no file had, of all problems that any rank has met, and have all ranks use the result. Collective.

    Returns a line for each problem, on rank 0.
    """
    _met[:] = [plan.problem for plan in plans.plans()]
    everywhere = _gathered(_met)
    met = {str(problem): problem for problems in everywhere for problem in problems}
    new: dict[str, list[Choice]] = {}
    lines = []
    if _rank() == 0:
        for name, problem in sorted(met.items()):
            if len(_allowed(problem)) == len(_makers(problem)):
                continue
            try:
                choices = search(problem, torch.cuda.current_device())
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
    _found.update(_from_rank_0(new))
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


def search(problem: Problem, device: int) -> list[Choice]:
    """Time what each maker has on random data; the best of each, the fastest first.

    The first choice is what runs without a search. All candidates have a few runs, one by one; the fastest of each
    maker, and the first choice, then run alone for a while (timing.py says why). The first choice stays where nothing
    is 1 % better. What gives another result than the first choice is left out. Waits for the device, some two seconds
    for a problem.
    """
    makers = _makers(problem)
    with torch.cuda.device(device):
        operands = _Operands(problem)
        usual = plans.usual(problem, device, operands.pointers)
        candidates: list[Plan] = [usual]
        for maker in makers:
            of_maker = maker.candidates(problem, device, operands.pointers)
            candidates += [plan for plan in of_maker if (plan.maker, plan.name) != (usual.maker, usual.name)]
        ran: list[Plan] = []
        expected = None
        for plan in candidates:
            try:
                result = operands.result_of(plan)
            except RuntimeError:
                continue
            expected = result if expected is None else expected
            if (result - expected).norm() <= AGREE * expected.norm():
                ran.append(plan)
        if not ran:
            raise RuntimeError(f"none of {len(candidates)} candidates ran: {problem}")
        del result, expected
        first, in_bf16 = ran[0], [operands.in_bf16] if problem.a in FP8 else []
        calls = {one: functools.partial(operands.run, one) for one in (*ran, *in_bf16)}
        times = timing.in_turns(calls, SCREENED)
        kept = [first]
        for name in {plan.maker for plan in ran}:
            mine = sorted((plan for plan in ran if plan.maker == name), key=times.__getitem__)
            kept += [plan for plan in mine[:KEPT] if plan is not first]
        times = timing.under_load({one: calls[one] for one in (*kept, *in_bf16)}, times)
    bf16_ms = sum(times[run] for run in in_bf16)
    choices = []
    for maker in makers:
        mine = [plan for plan in kept if plan.maker == maker.name]
        if not mine:
            continue
        plan = min(mine, key=times.__getitem__)
        if plan.maker == first.maker and times[plan] > WORTH * times[first]:
            plan = first
        ms = (round(value, 5) for value in (times[plan], times[first], bf16_ms))
        choices.append(Choice(maker.name, maker.version, plan.name, *ms))
    return sorted(choices, key=lambda choice: choice.ms * (WORTH if choice.maker == first.maker else 1))


class _Operands:
    """Random data for one problem."""

    def __init__(self, problem: Problem):
        def random(rows: int, columns: int, ld: int, by_rows: bool, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(rows if by_rows else columns, ld, device=_DEVICE, dtype=torch.bfloat16).to(dtype)

        p = problem
        self._problem = p
        self._bf16: list[torch.Tensor] | None = None
        self._a = random(p.m, p.k, p.a_ld, p.a_rows, p.a)
        self._b = random(p.n, p.k, p.b_ld, p.b_rows, p.b)
        self._out = torch.zeros(p.m, p.d_ld, device=_DEVICE, dtype=p.d)
        self._bias = torch.randn(p.n, device=_DEVICE).to(p.bias or torch.bfloat16)
        self._one = torch.ones((), device=_DEVICE)
        scale = self._one if p.a in FP8 else None
        self.pointers = plans.pointers_of(scale, scale, self._bias if p.bias is not None else None)

    def result_of(self, plan: Plan) -> torch.Tensor:
        self._out.zero_()
        self.run(plan)
        return self._out.float()

    def in_bf16(self) -> None:
        """The product in BF16 into BF16, as stock does it, by rows and without an epilogue."""
        if self._bf16 is None:
            p = self._problem
            sizes = (p.m, p.k), (p.n, p.k), (p.m, p.n)
            self._bf16 = [torch.randn(size, device=_DEVICE, dtype=torch.bfloat16) for size in sizes]
        x, w, y = self._bf16
        torch.mm(x, w.t(), out=y)

    def run(self, one) -> None:
        if callable(one):
            return one()
        out = self._out.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        one.run(self._a.data_ptr(), self._b.data_ptr(), out, out, stream)


def _file() -> Path:
    return path(torch.cuda.get_device_name())


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _from_rank_0(table: dict[str, list[Choice]]) -> dict[str, list[Choice]]:
    held = [table]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(held, 0)
    return held[0]


def _gathered(mine: list) -> list[list]:
    """Of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    everywhere: list[list] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, mine)
    return everywhere
