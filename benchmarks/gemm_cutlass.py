"""The CUTLASS GEMMs beside cuBLASLt's (torch._scaled_mm), at the shapes of GPT-7B and GPT-175B with TP 8; one GPU.

    python benchmarks/gemm_cutlass.py --csv gemm_cutlass.csv           about a minute on an H200
    python benchmarks/gemm_cutlass.py --only 7B/fc1                    the problems whose names begin so

Every contender of a problem runs back to back for some milliseconds, in turns, several rounds: the median of rounds is
printed, so that all are measured on an equally hot GPU (FP8 GEMMs are bound by power). Data is random. The rows:

    cublaslt fast | full       torch._scaled_mm with and without use_fast_accum
    TILE CLUSTER HOW           a kernel; "8/0" is swizzle/order of tiles; "*" is what the backend chooses unmeasured
    error                      RMS of the difference to float64 over the RMS of the result, over 256 rows, into FP32
                               (BF16 alone rounds by 1.7e-3, which would hide it)

Forward is compared with cuBLASLt's fast accumulation; dgrad and wgrad with its full one, and with promotion every 128.
What an epilogue saves: bias + residual in the forward, accumulation into BF16 and FP32 in wgrad, against torch's passes
after the product.
"""

import argparse
import csv
import math
import time
from collections.abc import Callable

import torch
from stamp import commit

from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops.cutlass import CUTLASS, Choice, Problem

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
SHAPES = {  # (tokens, out, in)
    "7B/qkv": (8192, 12288, 4096),
    "7B/proj": (8192, 4096, 4096),
    "7B/fc1": (8192, 16384, 4096),
    "7B/fc2": (8192, 4096, 16384),
    "175B/qkv": (4096, 4608, 12288),
    "175B/proj": (4096, 12288, 1536),
    "175B/fc1": (4096, 6144, 12288),
    "175B/fc2": (4096, 12288, 6144),
}
ROUNDS, ROUND_MS = 5, 4.0
ORDERS = [(1, 1), (1, 2), (2, 0), (4, 0), (8, 1), (8, 2)]  # tried with the best tile, beside (8, 0)


def problems(only: str):
    """(name, Problem) of each linear's three products."""
    for name, (tokens, out, into) in SHAPES.items():
        for kind, (m, n, k), a in (
            ("fwd", (tokens, out, into), E4M3),
            ("dgrad", (tokens, into, out), E5M2),
            ("wgrad", (out, into, tokens), E5M2),
        ):
            if f"{name} {kind}".startswith(only):
                yield f"{name} {kind}", Problem(m, n, k, a, E4M3, BF16, kind == "fwd")


def scaled(m: int, k: int, dtype: torch.dtype) -> ScaledTensor:
    values = torch.randn(m, k, device="cuda", dtype=BF16)
    return ScaledTensor((values * 32).to(dtype), torch.tensor(1 / 32, device="cuda"))


def medians(contenders: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds a call of each."""
    calls = {}
    for name, call in contenders.items():  # warm, and a first guess
        call()
        calls[name] = max(2, round(ROUND_MS / _elapsed(call, 3)))
    rounds = [{name: _elapsed(call, calls[name]) for name, call in contenders.items()} for _ in range(ROUNDS)]
    return {name: sorted(row[name] for row in rounds)[ROUNDS // 2] for name in contenders}


def _elapsed(call: Callable[[], object], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def scaled_mm(a: ScaledTensor, b: ScaledTensor, dtype=BF16, fast=False) -> torch.Tensor:
    scales = {"scale_a": a.scale_inv, "scale_b": b.scale_inv}
    return torch._scaled_mm(a.payload, b.payload.t(), **scales, out_dtype=dtype, use_fast_accum=fast)


def ours(choice: Choice, a: ScaledTensor, b: ScaledTensor, out, added=None, bias=None) -> Callable[[], None]:
    return lambda: CUTLASS.launch(choice, a.payload, b.payload, a.scale_inv, b.scale_inv, out, added, bias)


def measure(problem: Problem) -> tuple[dict[str, float], dict[str, Choice]]:
    """Milliseconds by contender, and what ours were."""
    a, b = scaled(problem.m, problem.k, problem.a), scaled(problem.n, problem.k, problem.b)
    out = torch.empty(problem.m, problem.n, dtype=problem.out, device="cuda")
    types = (problem.a, problem.b, problem.out)
    kernels = [kernel for kernel in CUTLASS.kernels if (kernel.a, kernel.b, kernel.out) == types]
    named = {f"{kernel} 8/0": Choice(kernel) for kernel in kernels if problem.fast <= (not kernel.promote)}
    contenders: dict[str, Callable[[], object]] = {
        "cublaslt fast": lambda: scaled_mm(a, b, fast=True),
        "cublaslt full": lambda: scaled_mm(a, b),
    }
    contenders |= {name: ours(choice, a, b, out) for name, choice in named.items()}
    times = medians(contenders)
    best = min((name for name in named if comparable(named[name], problem)), key=times.__getitem__)
    more = {f"{named[best].kernel} {s}/{o}": Choice(named[best].kernel, s, o) for s, o in ORDERS}
    times |= medians({name: ours(choice, a, b, out) for name, choice in more.items()})
    return times, named | more


def comparable(choice: Choice, problem: Problem) -> bool:
    """Whether it sums as the backend would."""
    return choice.kernel.promote == (0 if problem.fast else CUTLASS.promote)


def errors() -> None:
    """Of each way to sum, at a long and a very long K; into FP32, so that nothing hides it but the sum itself."""
    print("\nerror against float64, in units of the result's RMS")
    for k in (4096, 16384):
        a, b = scaled(256, k, E5M2), scaled(4096, k, E4M3)
        x, w = (t.payload.double() * t.scale_inv.double() for t in (a, b))
        exact = x @ w.t()

        def error(got: torch.Tensor, exact=exact) -> str:
            return f"{((got.double() - exact).square().mean() / exact.square().mean()).sqrt().item():.3e}"

        rows = {f"cublaslt {'fast' if f else 'full'}": error(scaled_mm(a, b, FP32, f)) for f in (True, False)}
        rows |= {f"cublaslt {'fast' if f else 'full'} BF16": error(scaled_mm(a, b, BF16, f)) for f in (True, False)}
        for kernel in CUTLASS.kernels:
            if (kernel.a, kernel.b) == (E5M2, E4M3):
                out = torch.empty(256, 4096, dtype=kernel.out, device="cuda")
                ours(Choice(kernel), a, b, out)()
                rows[f"{kernel} {str(kernel.out)[6:]}"] = error(out)
        for name, value in rows.items():
            print(f"    K {k:6}  {name:42} {value}")


def epilogues(only: str) -> list[tuple[float, str]]:
    """(GEMM and separate passes) / (GEMM with its epilogue), printed and returned."""
    print("\nwhat an epilogue saves: cublaslt and passes of torch -> ours, ms")
    ratios = []
    for name, problem in problems(only):
        if name.endswith("dgrad"):
            continue
        m, n = problem.m, problem.n
        a, b = scaled(m, problem.k, problem.a), scaled(n, problem.k, problem.b)
        cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
        if name.endswith("fwd"):
            bias, residual = torch.randn(n, device="cuda", dtype=BF16), torch.randn(m, n, device="cuda", dtype=BF16)
            out, choice = torch.empty_like(residual), CUTLASS.choice(problem)
            assert choice is not None
            cases["bias + residual"] = (
                lambda a=a, b=b, bias=bias, residual=residual: (scaled_mm(a, b, fast=True) + bias).add_(residual),
                ours(choice, a, b, out, residual, bias),
            )
        else:
            for dtype in (BF16, FP32):
                grad = torch.zeros(m, n, device="cuda", dtype=dtype)
                choice = CUTLASS.choice(Problem(m, n, problem.k, problem.a, problem.b, dtype, False))
                assert choice is not None
                cases[f"accumulate {str(dtype)[6:]}"] = (
                    lambda a=a, b=b, grad=grad: grad.add_(scaled_mm(a, b)),
                    ours(choice, a, b, grad, grad),
                )
        for case, (theirs, fused) in cases.items():
            times = medians({"theirs": theirs, "fused": fused})
            ratios.append((times["theirs"] / times["fused"], case))
            print(f"    {name:16} {case:20} {times['theirs']:.4f} -> {times['fused']:.4f}  {ratios[-1][0]:.3f}")
    return ratios


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    CUTLASS.prepare()
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    began, rows = time.monotonic(), []
    ratios: dict[str, list[tuple[float, float]]] = {}  # by pass: (of the best, of the unmeasured choice)
    for name, problem in problems(args.only):
        times, choices = measure(problem)
        theirs = times["cublaslt fast" if problem.fast else "cublaslt full"]
        unmeasured = CUTLASS.choice(problem)
        flops = 2 * problem.m * problem.n * problem.k
        print(f"\n{name}: {problem.m} x {problem.n} x {problem.k}")
        for contender, ms in times.items():
            star = "*" if contender in choices and choices[contender] == unmeasured else ""
            print(f"    {contender + star:44} {ms:8.4f} ms {flops / ms / 1e9:7.0f} TFLOP/s {theirs / ms:6.3f}")
            rows.append({"problem": name, "contender": contender, "ms": ms, "TFLOP/s": flops / ms / 1e9, **where})
        mine = {name: times[name] for name, choice in choices.items() if comparable(choice, problem)}
        best = min(mine, key=mine.__getitem__)
        chosen = next(times[name] for name, choice in choices.items() if choice == unmeasured)
        ratios.setdefault(name.split()[1], []).append((theirs / mine[best], theirs / chosen))
        print(
            f"    best: {best}: {theirs / mine[best]:.3f} of cublaslt's speed; unmeasured choice {theirs / chosen:.3f}"
        )
    print("\ngeometric means over cublaslt: best kernel, unmeasured choice")
    everything = [pair for pairs in ratios.values() for pair in pairs]
    for kind, pairs in (ratios | {"all": everything}).items():
        print(f"    {kind:6} {geometric_mean([p[0] for p in pairs]):.3f} {geometric_mean([p[1] for p in pairs]):.3f}")
    errors()
    saved = epilogues(args.only)
    for case in sorted({case for _, case in saved}):
        print(f"    {case:20} geometric mean {geometric_mean([ratio for ratio, of in saved if of == case]):.3f}")
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
