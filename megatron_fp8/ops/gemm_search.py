"""Which of cuBLASLt's algorithms runs a shape: measured once on the machine, kept in a file, the same on all ranks.

    read()     at the start: rank 0's file of this GPU and this version of the library, sent to all
    search()   one problem: the library's favourites timed against each other
    tune()     after a step, by all ranks together: rank 0 times what any of them met, writes the file and tells all

The file is JSON, {problem as text: {"algo": 64 bytes in hexadecimal, "ms": ..., "first_ms": ...}}, in
~/.cache/megatron_fp8/gemm, or under $MEGATRON_FP8_CACHE. It is written beside and renamed, so that a reader finds all
of the old or all of the new; what another run has found in between is kept. Two runs with the same file compute the
same bits; an algorithm that is chosen after the first step rounds otherwise than the one before it.
"""

import contextlib
import json
import os
import re
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fp8.ops import cublaslt
from megatron_fp8.ops.cublaslt import FP8, Choice, CublasLtError, Plan, Problem

CANDIDATES, REPETITIONS = 16, 11
WORTH = 0.99  # of the first choice's time: what is closer is noise, and the first stays
_FLUSH = 256 << 20  # bytes: several times the L2 cache
_found: dict[str, Choice] = {}  # the file's, by the problem's text


def path(gpu: str, version: int) -> Path:
    """The file of a GPU and a version of the library."""
    root = os.environ.get("MEGATRON_FP8_CACHE") or Path.home() / ".cache/megatron_fp8"
    return Path(root) / "gemm" / f"{re.sub(r'[^0-9A-Za-z]+', '-', gpu)}-cublas{version}.json"


def load(file: Path) -> dict[str, Choice]:
    """What a file holds; nothing where there is none, or where it is none of ours."""
    try:
        held = json.loads(file.read_text())
        choices = {str(problem): Choice(**choice) for problem, choice in held.items()}
        return {problem: one for problem, one in choices.items() if len(bytes.fromhex(one.algo)) == 64}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def save(file: Path, choices: dict[str, Choice]) -> None:
    """Add to the file, in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    held = {problem: vars(choice) for problem, choice in (load(file) | choices).items()}
    handle, beside = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as out:
            json.dump(held, out, indent=1)
        os.replace(beside, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def read() -> int:
    """Have all ranks use what rank 0's file holds; how many problems that is. Collective."""
    table = load(_file()) if _rank() == 0 else {}
    _found.clear()
    _found.update(_from_rank_0(table))
    cublaslt.look_up = lambda problem: _found.get(str(problem))
    return len(_found)


def forget() -> None:
    """Go back to the library's own choices."""
    cublaslt.look_up = None
    _found.clear()
    cublaslt.renew()


def tune() -> list[str]:
    """Search what no file had, of all problems that any rank has met, and have all ranks use the result. Collective.

    Returns a line for each problem, on rank 0.
    """
    everywhere = _gathered([plan.problem for plan in cublaslt.plans()])
    met = {str(problem): problem for problems in everywhere for problem in problems}
    new: dict[str, Choice] = {}
    lines = []
    if _rank() == 0:
        for name, problem in sorted(met.items()):
            if name in _found:
                continue
            try:
                choice = search(problem, torch.cuda.current_device())
            except (CublasLtError, torch.OutOfMemoryError) as error:
                lines.append(f"GEMM {problem}: no search, the first choice stays: {str(error).splitlines()[0]}")
                continue
            new[name] = choice
            rate, first = (problem.flops / ms / 1e9 for ms in (choice.ms, choice.first_ms))
            lines.append(f"GEMM {problem}: {rate:.0f} TFLOP/s, the library's first choice {first:.0f}")
        try:
            if new:
                save(_file(), new)
        except OSError as error:
            lines.append(f"the GEMM search is not kept for the next run: {error}; set MEGATRON_FP8_CACHE")
        torch.cuda.empty_cache()  # what training allocates next is of other sizes
    _found.update(_from_rank_0(new))
    cublaslt.look_up = lambda problem: _found.get(str(problem))
    cublaslt.renew()
    return lines


def search(problem: Problem, device: int, count: int = CANDIDATES) -> Choice:
    """Time up to `count` algorithms on random data and return the best, or the first where none is 1 % better.

    Medians; the candidates take turns, and each run finds an empty L2 cache. What gives another result than the first
    is left out. Waits for the device.
    """
    with torch.cuda.device(device):
        operands = _Operands(problem, device)
        candidates = Plan(problem, device, operands.pointers).descriptors.candidates(device, count)
        plans, expected = [], None
        for candidate in candidates:
            plan = Plan(problem, device, operands.pointers, candidate)
            try:
                result = operands.result_of(plan)
            except CublasLtError:
                continue
            expected = result if expected is None else expected
            if (result - expected).norm() <= 0.01 * expected.norm():
                plans.append(plan)
        if not plans:
            raise CublasLtError(f"cuBLASLt: none of {len(candidates)} algorithms ran: {problem}")
        times: list[list[float]] = [[] for _ in plans]
        for _ in range(REPETITIONS):
            events = [operands.timed(plan) for plan in plans]
            torch.cuda.synchronize()
            for measured, (start, end) in zip(times, events, strict=True):
                measured.append(start.elapsed_time(end))
    medians = [statistics.median(measured) for measured in times]
    best = min(range(len(plans)), key=medians.__getitem__)
    if medians[best] > WORTH * medians[0]:
        best = 0
    return Choice(plans[best].choice.algo, round(medians[best], 5), round(medians[0], 5))


class _Operands:
    """Random data for one problem."""

    def __init__(self, problem: Problem, device: int):
        def random(rows: int, columns: int, ld: int, by_rows: bool, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(rows if by_rows else columns, ld, device=device, dtype=torch.bfloat16).to(dtype)

        p = problem
        self._device = device
        self._a = random(p.m, p.k, p.a_ld, p.a_rows, p.a)
        self._b = random(p.n, p.k, p.b_ld, p.b_rows, p.b)
        self._out = torch.zeros(p.m, p.d_ld, device=device, dtype=p.d)
        self._bias = torch.randn(p.n, device=device).to(p.bias or torch.bfloat16)
        self._one, self._amax = torch.ones((), device=device), torch.zeros((), device=device)
        self._flush = torch.empty(_FLUSH, dtype=torch.uint8, device=device)
        scale = self._one.data_ptr() if p.a in FP8 else 0
        bias = self._bias.data_ptr() if p.bias is not None else 0
        self.pointers = (scale, scale, bias, 0, self._amax.data_ptr() if p.amax else 0)

    def _run(self, plan: Plan) -> None:
        at = (self._a.data_ptr(), self._b.data_ptr(), self._out.data_ptr())
        plan.run(*at, torch.cuda.current_stream(self._device).cuda_stream)

    def result_of(self, plan: Plan) -> torch.Tensor:
        self._out.zero_()
        self._run(plan)
        return self._out.float()

    def timed(self, plan: Plan) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        self._run(plan)
        end.record()
        return start, end


def _file() -> Path:
    return path(torch.cuda.get_device_name(), cublaslt.version())


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _from_rank_0(table: dict[str, Choice]) -> dict[str, Choice]:
    held = [table]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(held, 0)
    return held[0]


def _gathered(met: list[Problem]) -> list[list[Problem]]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [met]
    everywhere: list[list[Problem]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, met)
    return everywhere
