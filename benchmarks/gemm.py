"""Compare GEMMs by shape: torch._scaled_mm, cuBLASLt by our binding, our CUTLASS kernels; one Hopper GPU.

    megatron-fp8 build                                 the CUTLASS library, once; without it only the rest is measured
    python benchmarks/gemm.py --csv gemm.csv
    python benchmarks/gemm.py --only "7B fc1"          only problems whose names begin with this
    python benchmarks/gemm.py --plain                  without epilogues
    python benchmarks/gemm.py --usual --csv usual.csv  the backward's GEMMs without a search, of other shapes too

The linears of GPT-7B and of GPT-175B at TP 8, and the LM head. For each: the forward (E4M3 x E4M3, fast accumulation,
BF16), dgrad (E5M2 x E4M3, BF16) and wgrad (E5M2 x E4M3, into FP32 and BF16); and with an epilogue: bias, bias +
residual, and wgrad accumulated.

    torch      torch._scaled_mm, and a kernel for each part of an epilogue
    first      cuBLASLt's first choice, with its epilogue in the GEMM
    cublaslt   the fastest of 16 of its algorithms
    cutlass    the fastest of our kernels and orders of tiles

Each runs alone for 150 ms on random data, twice, in turns (gemm/timing.py). A GPU in training is bound by its power
(docs/performance.md), so the fastest GEMM of a burst is not always the fastest then. "burst" is the median of runs that
take turns, each with an empty L2 cache. "error" is the output's relative error over 64 rows, against float64. For sums
in BF16, "once" is the share of elements that equal the exact sum rounded once. The BF16 head's weight gradient is
compared with stock's code without apex: a product in BF16, then a sum. Geometric means and the host's microseconds of a
call come last.

With --usual: cuBLASLt's first choice against CUTLASS's, and the one that `--fp8-gemm-backend auto` runs.
"""

import argparse
import csv
import functools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from stamp import commit

from megatron_fp8 import ops
from megatron_fp8.gemm import cublaslt, plans, search, timing
from megatron_fp8.gemm import race as gemm_race
from megatron_fp8.gemm.cublaslt import CUBLASLT
from megatron_fp8.gemm.cutlass import CUTLASS
from megatron_fp8.gemm.cutlass_build import Unavailable
from megatron_fp8.gemm.plans import NAMES
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor

SHAPES = {  # tokens, out, in
    "7B qkv": (8192, 12288, 4096),
    "7B proj": (8192, 4096, 4096),
    "7B fc1": (8192, 16384, 4096),
    "7B fc2": (8192, 4096, 16384),
    "175B/8 qkv": (4096, 4608, 12288),
    "175B/8 proj": (4096, 12288, 1536),
    "175B/8 fc1": (4096, 6144, 12288),
    "175B/8 fc2": (4096, 12288, 6144),
    "head, sequence 2048": (2048, 50304, 4096),
    "head": (8192, 50304, 4096),
}
OTHERS = {  # more shapes for which cutlass.py's is_faster should be right
    "125M qkv": (32768, 2304, 768),
    "125M proj": (32768, 768, 768),
    "125M fc1": (32768, 6144, 768),
    "125M fc2": (32768, 768, 3072),
    "7B fc1, 2,048 tokens": (2048, 16384, 4096),
    "Llama qkv": (8192, 6144, 4096),
    "Llama fc1": (8192, 28672, 4096),
    "Llama fc2": (8192, 4096, 14336),
    "13B/2 qkv": (4096, 7680, 5120),
    "13B/2 fc2": (4096, 5120, 10240),
    "70B/8 qkv": (8192, 1280, 8192),
    "70B/8 proj": (8192, 8192, 1024),
    "70B/8 fc1": (8192, 7168, 8192),
    "70B/8 fc2": (8192, 8192, 3584),
    "175B/2 qkv": (4096, 18432, 12288),
    "175B/2 fc2": (4096, 12288, 24576),
    "small": (2048, 512, 512),
}
DEVICE = "cuda"
FP32, BF16 = torch.float32, torch.bfloat16
SYSTEMS = ("torch", "first", "cublaslt", "cutlass")
PLAIN = ("forward", "dgrad", "wgrad")
FUSED = ("forward + bias", "forward + bias + residual", "wgrad added")
REPETITIONS, ROWS = 4, 64


def scaled(rows: int, columns: int, fmt=E4M3) -> ScaledTensor:
    scale = torch.tensor(fmt.max / 6, device=DEVICE)
    x = torch.randn(rows, columns, dtype=BF16, device=DEVICE)
    payload, transposed = ops.quantize(x, fmt, scale, transpose=True)
    return ScaledTensor(payload, scale.reciprocal(), transposed)


class Case:
    """One problem: its operands (a, b: ScaledTensors, or plain), its epilogue, and every system's call."""

    def __init__(self, a, b, out: torch.Tensor, fast: bool, bias=None, residual=None, add: bool = False):
        self.a, self.b, self.out, self.fast = a, b, out, fast
        self.bias, self.residual, self.add = bias, residual, add
        x, w = (t.payload if isinstance(t, ScaledTensor) else t for t in (a, b))
        self._scales = [t.scale_inv if isinstance(t, ScaledTensor) else None for t in (a, b)]
        how = (16, fast, None if bias is None else bias.dtype, add or residual is not None)
        self.problem = plans.problem_of(x, w, out, *how)
        self._pointers = plans.pointers_of(*self._scales, bias)
        self._at = [t.data_ptr() for t in (x, w, out if residual is None else residual, out)]
        self.plans: dict[str, plans.Plan] = {}

    def calls(self) -> dict[str, Callable[[], object]]:
        """{system: call}; runs the search."""
        first = CUBLASLT.candidates(self.problem, 0, self._pointers, 1)[0]
        self.plans["first"] = first
        for choice in gemm_race.race(self.problem, search.makers_of(self.problem), 0):
            maker = CUBLASLT if choice.maker == "cublaslt" else CUTLASS
            plan = maker.named(self.problem, 0, self._pointers, choice.name)
            self.plans[choice.maker] = first if plan is None else plan
        stream = torch.cuda.current_stream().cuda_stream
        ours = {name: lambda p=plan: p.run(*self._at, stream) for name, plan in self.plans.items()}
        return {"torch": self.by_torch, **ours}

    def by_torch(self) -> None:
        if isinstance(self.a, ScaledTensor):
            scales = {"scale_a": self._scales[0], "scale_b": self._scales[1]}
            into = {} if self.add else {"out": self.out}
            how = {"use_fast_accum": self.fast, "out_dtype": self.out.dtype}
            y = torch._scaled_mm(self.a.payload, self.b.payload.t(), **scales, **how, **into)
        else:
            y = self.a @ self.b.t()
        for part in (self.bias, self.residual):
            if part is not None:
                y.add_(part)
        if self.add:
            self.out.add_(y)

    def exact(self, before: torch.Tensor) -> torch.Tensor:
        """The exact first rows, in float64."""
        a, b = self.a, self.b
        if isinstance(a, ScaledTensor):
            rows = ScaledTensor(a.payload[:ROWS], a.scale_inv).dequantize().double()
            y = torch.cat([rows @ part.float().double().t() for part in b.payload.split(8192)], 1) * b.scale_inv
        else:
            y = a[:ROWS].double() @ b.double().t()
        y = y if self.bias is None else y + self.bias.double()
        y = y if self.residual is None else y + self.residual[:ROWS].double()
        return y + before.double() if self.add else y


def usual() -> list[dict]:
    """A row for each product of the backward pass; takes two minutes in all."""
    rows: list[dict] = []
    for name, (tokens, out_features, in_features) in (SHAPES | OTHERS).items():
        x, w, dy = scaled(tokens, in_features), scaled(out_features, in_features), scaled(tokens, out_features, E5M2)
        dx = torch.empty(tokens, in_features, dtype=BF16, device=DEVICE)
        grads = {dtype: torch.zeros(out_features, in_features, dtype=dtype, device=DEVICE) for dtype in (BF16, FP32)}
        cases = {"dgrad": Case(dy, w.T, dx, False), "wgrad": Case(dy.T, x.T, grads[BF16], False)}
        cases |= {f"wgrad added {NAMES[dtype]}": Case(dy.T, x.T, grads[dtype], False, add=True) for dtype in grads}
        for kind, case in cases.items():
            p = case.problem
            first = {maker.name: maker.candidates(p, 0, case._pointers, 1)[0] for maker in (CUBLASLT, CUTLASS)}
            at = (*case._at, torch.cuda.current_stream().cuda_stream)
            calls = {maker: functools.partial(plan.run, *at) for maker, plan in first.items()}
            bursts = timing.in_turns(calls, REPETITIONS)
            ms = timing.under_load(calls, bursts)
            row: dict = {"name": name, "gemm": kind, "m": p.m, "n": p.n, "k": p.k}
            row |= {f"{maker} ms": round(ms[maker], 4) for maker in calls}
            row |= {f"{maker} burst ms": round(bursts[maker], 4) for maker in calls}
            row |= {"gain": round(ms["cublaslt"] / ms["cutlass"], 3), "kernel": first["cutlass"].described()}
            row |= {"auto runs": "cutlass" if CUTLASS.is_faster(p) else "cublaslt"}
            rows.append(row)
            print(f"{name:22} {kind:16} {row['gain']:6.3f} {row['auto runs']:9} {row['kernel']}", flush=True)
    for which in ("cutlass", "cublaslt"):
        gains = [row["gain"] for row in rows if row["auto runs"] == which]
        if gains:
            mean, of = math.exp(statistics.mean(map(math.log, gains))), f"{min(gains)} to {max(gains)}, {len(gains)}"
            print(f"CUTLASS over cuBLASLt where auto runs {which}: {mean:.3f} ({of} products)")
    return rows


class Table:
    """Prints each row when it is measured, and keeps it."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.where = where()
        print(", ".join(f"{key} {value}" for key, value in self.where.items()))
        print(f"{'TFLOP/s, error':52} {''.join(f'{s:>9}' for s in SYSTEMS)}   {''.join(f'{s:>9}' for s in SYSTEMS)}")

    def measure(self, name: str, kind: str, case: Case) -> None:
        calls = case.calls()
        before = torch.randn(case.out.shape[0], case.out.shape[1], device=DEVICE).to(case.out.dtype)
        exact, errors, once = case.exact(before[:ROWS]), {}, {}
        for system, call in calls.items():
            case.out.copy_(before)
            call()
            got = case.out[:ROWS]
            errors[system] = float((got.double() - exact).norm() / exact.norm())
            once[system] = float((got == exact.to(got.dtype)).double().mean())
        bursts = timing.in_turns(calls, REPETITIONS)
        ms = timing.under_load(calls, bursts)
        rates = {system: case.problem.flops / ms[system] / 1e9 for system in calls}
        row: dict = {"name": name, "gemm": kind, "out": NAMES[case.out.dtype]}
        for system in SYSTEMS:
            has = system in calls
            row[f"{system} ms"] = round(ms[system], 4) if has else ""
            row[f"{system} burst ms"] = round(bursts[system], 4) if has else ""
            row[f"{system} TFLOP/s"] = round(rates[system], 1) if has else ""
            row[f"{system} error"] = f"{errors[system]:.3e}" if has else ""
        sums = case.add and case.out.dtype is BF16
        best = min((system for system in calls if system not in ("torch", "first")), key=ms.__getitem__)
        row |= {"once": " ".join(f"{once[system]:.3f}" for system in calls) if sums else ""}
        row |= {"fastest of ours": best, "cublaslt's": case.plans["cublaslt"].described()}
        row |= {"cutlass's": case.plans["cutlass"].described() if "cutlass" in calls else ""}
        self.rows.append(row)
        shown = "".join(f"{rates[s]:9.0f}" if s in calls else f"{'':9}" for s in SYSTEMS)
        wrong = "".join(f"{errors[s]:9.1e}" if s in calls else f"{'':9}" for s in SYSTEMS)
        what = f"{name} {kind} {row['out']}"
        print(f"{what:52} {shown}   {wrong}  {best}: {case.plans[best].described()} {row['once']}", flush=True)

    def means(self) -> None:
        """Print speed-ups over cuBLASLt's first choice, and with an epilogue over GEMM + separate kernels."""
        for title, base, kinds in (
            ("without epilogue, over cuBLASLt's first choice", "first", PLAIN),
            ("with its epilogue, over torch._scaled_mm + separate kernels", "torch", FUSED),
        ):
            print(f"\ngeometric means {title}")
            for kind in (*kinds, None):
                rows = [row for row in self.rows if (row["gemm"] == kind if kind else row["gemm"] in kinds)]
                shown = []
                for system in ("torch", "first", "cublaslt", "cutlass", "the faster of both"):
                    pair = ("cublaslt", "cutlass") if system not in SYSTEMS else (system,)
                    gains = [r[f"{base} ms"] / min(r[f"{s} ms"] for s in pair if r[f"{s} ms"]) for r in rows
                             if any(r[f"{s} ms"] for s in pair)]  # fmt: skip
                    if gains:
                        shown.append(f"{system} {math.exp(statistics.mean(map(math.log, gains))):.3f}")
                print(f"    {kind or 'all':30} {', '.join(shown)}")

    def write(self, path: str) -> None:
        write(path, self.rows, self.where)


def write(path: str, rows: list[dict], where: dict) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *where])
        writer.writeheader()
        writer.writerows(row | where for row in rows)


def where() -> dict:
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cublas": cublaslt.version()}
    return versions | {"cutlass library": CUTLASS.version, "commit": commit()}


def linear(table: Table, name: str, tokens: int, out_features: int, in_features: int, plain: bool) -> None:
    """Measure one linear's three products and, unless `plain`, its epilogues."""
    x, w, dy = scaled(tokens, in_features), scaled(out_features, in_features), scaled(tokens, out_features, E5M2)
    y, dx = (torch.empty(tokens, features, dtype=BF16, device=DEVICE) for features in (out_features, in_features))
    bias, residual = torch.randn(out_features, dtype=BF16, device=DEVICE), torch.randn_like(y)
    table.measure(name, "forward", Case(x, w, y, True))
    table.measure(name, "dgrad", Case(dy, w.T, dx, False))
    if not name.startswith("head") and not plain:
        table.measure(name, "forward + bias", Case(x, w, y, True, bias))
        table.measure(name, "forward + bias + residual", Case(x, w, y, True, bias, residual))
    for dtype in (FP32, BF16):
        grad = torch.empty(out_features, in_features, dtype=dtype, device=DEVICE)
        table.measure(name, "wgrad", Case(dy.T, x.T, grad, False))
        if not plain:
            table.measure(name, "wgrad added", Case(dy.T, x.T, grad, False, add=True))


def head(table: Table, tokens: int, vocabulary: int, width: int) -> None:
    """Measure the BF16 head's weight gradient, accumulated in FP32."""
    x = torch.randn(tokens, width, dtype=BF16, device=DEVICE)
    dy = torch.randn(tokens, vocabulary, dtype=BF16, device=DEVICE)
    grad = torch.empty(vocabulary, width, device=DEVICE)
    table.measure("head in BF16", "wgrad of stock, added", Case(dy.t(), x.t(), grad, False, add=True))


def host_time(calls: int = 2000) -> None:
    """Print the host's microseconds of a call, for a product so small that the GPU never stays behind."""
    a, b, out = scaled(16, 16), scaled(16, 16), torch.empty(16, 16, dtype=BF16, device=DEVICE)
    scales = {"a_scale": a.scale_inv, "b_scale": b.scale_inv}
    runs = {"torch._scaled_mm": Case(a, b, out, False).by_torch}
    runs["by a plan, cuBLASLt's"] = lambda: plans.product(a.payload, b.payload, out, **scales)
    served = [(name, call, CUBLASLT) for name, call in runs.items()]
    if CUTLASS.kernels:
        served.append(("by a plan, CUTLASS's", runs["by a plan, cuBLASLt's"], CUTLASS))
    print()
    for name, call, maker in served:
        plans.serve(lambda problem, maker=maker: maker)
        for repeat in (100, calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            took = time.perf_counter() - start
        print(f"host time of a call, {name}: {took / calls * 1e6:.1f} us")
    plans.serve(lambda problem: CUBLASLT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="write the table to this file")
    parser.add_argument("--only", default="", help="only shapes whose names begin with this")
    parser.add_argument("--plain", action="store_true", help="forward, dgrad and wgrad without an epilogue")
    parser.add_argument("--usual", action="store_true", help="the backward's products without a search")
    args = parser.parse_args()
    torch.manual_seed(1)
    try:
        CUTLASS.prepare(build=False)
    except Unavailable as reason:
        if args.usual:
            sys.exit(f"--usual: {reason}")
        print(f"without CUTLASS: {reason}")
    if args.usual:
        rows = usual()
        if args.csv:
            write(args.csv, rows, where())
        return
    begun, table = time.perf_counter(), Table()
    with tempfile.TemporaryDirectory() as nothing:
        os.environ["MEGATRON_FP8_CACHE"] = nothing  # ignore earlier searches
        search.read((CUBLASLT, CUTLASS) if CUTLASS.kernels else (CUBLASLT,))
        for name, shape in SHAPES.items():
            if name.startswith(args.only):
                linear(table, name, *shape, args.plain)
        if "head".startswith(args.only) and not args.plain:
            head(table, *SHAPES["head"])
    search.forget()
    table.means()
    host_time()
    print(f"took {time.perf_counter() - begun:.0f} s")
    if args.csv:
        table.write(args.csv)


if __name__ == "__main__":
    main()
