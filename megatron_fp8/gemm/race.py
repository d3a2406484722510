"""Times all plans for one GEMM against each other, on random data, on one GPU.

All candidates run a few times in turns. Then the fastest of each maker, and the first choice (which runs without a
search), each run alone for a while (timing.py says why). The first choice stays unless another is at least 1 % faster.
A candidate whose result differs from the first choice's is left out.
"""

import functools

import torch

from . import plans, timing
from .found import Choice
from .plans import FP8, Maker, Plan, Problem

SCREENED = 4  # runs of every candidate in turns; even
KEPT = 3  # the fastest candidates of each maker, which then run under load
AGREE = 0.01  # largest relative difference of two results; different sums and rounding cause a tenth of it
WORTH = 0.99  # a time above this share of the first choice's is no gain: the difference is noise


def race(problem: Problem, makers: list[Maker], device: int) -> list[Choice]:
    """The best plan of each maker, the fastest first. Waits for the device, about two seconds for a problem.

    Raises RuntimeError if no candidate runs.
    """
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
            return torch.randn(rows if by_rows else columns, ld, device=timing.DEVICE, dtype=torch.bfloat16).to(dtype)

        p = problem
        self._problem = p
        self._bf16: list[torch.Tensor] | None = None
        self._a = random(p.m, p.k, p.a_ld, p.a_rows, p.a)
        self._b = random(p.n, p.k, p.b_ld, p.b_rows, p.b)
        self._out = torch.zeros(p.m, p.d_ld, device=timing.DEVICE, dtype=p.d)
        self._bias = torch.randn(p.n, device=timing.DEVICE).to(p.bias or torch.bfloat16)
        self._one = torch.ones((), device=timing.DEVICE)
        scale = self._one if p.a in FP8 else None
        self.pointers = plans.pointers_of(scale, scale, self._bias if p.bias is not None else None)

    def result_of(self, plan: Plan) -> torch.Tensor:
        self._out.zero_()
        self.run(plan)
        return self._out.float()

    def in_bf16(self) -> None:
        """Stock's GEMM: BF16 operands and result, all row-major, without an epilogue."""
        if self._bf16 is None:
            p = self._problem
            sizes = (p.m, p.k), (p.n, p.k), (p.m, p.n)
            self._bf16 = [torch.randn(size, device=timing.DEVICE, dtype=torch.bfloat16) for size in sizes]
        x, w, y = self._bf16
        torch.mm(x, w.t(), out=y)

    def run(self, one) -> None:
        if callable(one):
            return one()
        out = self._out.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        one.run(self._a.data_ptr(), self._b.data_ptr(), out, out, stream)
