"""FP8 GEMMs of the linears of GPT-7B, of GPT-175B at TP 8 and of the LM head: cuBLASLt by our binding against torch.

    python benchmarks/gemm.py --csv gemm.csv        under a minute on an H200

For each shape the forward (E4M3 x E4M3, fast accumulation, BF16), dgrad (E5M2 x E4M3, BF16) and wgrad (E5M2 x E4M3,
into FP32 and BF16, written and added). Medians of runs that take turns, so that a GPU that slows down slows all of
them, each with an empty L2 cache on random data:

    torch     torch._scaled_mm, and where the product is added a pass that does it: torch knows no beta
    first     our binding with the library's first choice
    search    with the fastest of up to 16 algorithms (ops/gemm_search.py)

"error" is the relative error of 64 rows against float64, of what is written. The BF16 head's weight gradient into FP32
is compared with what stock does without apex: a BF16 product, then a sum. At the end the geometric means of TFLOP/s,
and the microseconds of host time of a call.
"""

import argparse
import csv
import math
import statistics
import time
from collections.abc import Callable

import torch
from stamp import commit

from megatron_fp8 import ops
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops import cublaslt, gemm_search, wgrad
from megatron_fp8.ops.cublaslt import NAMES

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
FP32, BF16 = torch.float32, torch.bfloat16
SYSTEMS = ("torch", "first", "search")
REPETITIONS, ROWS = 11, 64


def scaled(rows: int, columns: int, fmt=E4M3) -> ScaledTensor:
    scale = torch.tensor(fmt.max / 6, device="cuda")
    x = torch.randn(rows, columns, dtype=BF16, device="cuda")
    payload, transposed = ops.quantize(x, fmt, scale, transpose=True)
    return ScaledTensor(payload, scale.reciprocal(), transposed)


def by_torch(a, b, out, add, fast) -> None:
    how = {"scale_a": a.scale_inv, "scale_b": b.scale_inv, "use_fast_accum": fast, "out_dtype": out.dtype}
    if add:
        out.add_(torch._scaled_mm(a.payload, b.payload.t(), **how))
    else:
        torch._scaled_mm(a.payload, b.payload.t(), out=out, **how)


def by_us(a, b, out, add, fast) -> None:
    scales = {"a_scale": a.scale_inv, "b_scale": b.scale_inv}
    cublaslt.product(a.payload, b.payload, out, add=add, fast_accum=fast, **scales)


class Table:
    """Prints a row as it is measured, and keeps it."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cublas": cublaslt.version()}
        self.where["commit"] = commit()
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        print(", ".join(f"{key} {value}" for key, value in self.where.items()))
        print(f"{'':40} {'TFLOP/s':>24}   {'error':>26}  algorithm found")
        print(f"{'':40} {''.join(f'{system:>8}' for system in SYSTEMS)}   {''.join(f'{s:>9}' for s in SYSTEMS)}")

    def add(self, name: str, kind: str, out: torch.Tensor, flops: int, theirs: Callable, ours: Callable, exact) -> None:
        """Time theirs() and ours(), which write or add to `out`; exact: the first rows of what they add to zeros."""
        calls = {"torch": theirs, "first": ours, "search": ours}
        plans: dict[str, dict] = {system: {} for system in SYSTEMS}
        errors = {}
        for system, call in calls.items():
            cublaslt._plans = plans[system]
            out.zero_()
            call()
            errors[system] = float((out[: len(exact)].double() - exact).norm() / exact.norm())
            if system == "first":
                (plan,) = cublaslt.plans()
                choice = gemm_search.search(plan.problem, out.get_device())
                cublaslt.look_up = {plan.problem: choice}.get
        cublaslt.look_up = None
        (plan,) = plans["search"].values()
        times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for _ in range(REPETITIONS):
            for system, call in calls.items():
                cublaslt._plans = plans[system]
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._flush.zero_()
                start.record()
                call()
                end.record()
                end.synchronize()
                times[system].append(start.elapsed_time(end))
        ms = {system: statistics.median(measured) for system, measured in times.items()}
        rates = {system: flops / ms[system] / 1e9 for system in SYSTEMS}
        row = {"name": name, "gemm": kind, "out": NAMES[out.dtype]}
        row |= {f"{system} ms": round(ms[system], 4) for system in SYSTEMS}
        row |= {f"{system} TFLOP/s": round(rates[system], 1) for system in SYSTEMS}
        row |= {f"{system} error": f"{errors[system]:.3e}" for system in SYSTEMS}
        self.rows.append(row | {"algorithm": plan.described()})
        shown = "".join(f"{rates[system]:8.0f}" for system in SYSTEMS)
        wrong = "".join(f"{errors[system]:9.1e}" for system in SYSTEMS)
        what = f"{kind} {NAMES[out.dtype]}"
        print(f"{name:20} {what:19} {shown}   {wrong}  {plan.described()}", flush=True)

    def means(self) -> None:
        """Of groups of rows."""
        groups: dict[str, Callable[[dict], bool]] = {
            "forward": lambda row: row["gemm"] == "forward",
            "dgrad": lambda row: row["gemm"] == "dgrad",
            "wgrad written": lambda row: row["gemm"] == "wgrad",
            "wgrad added": lambda row: row["gemm"] == "wgrad added",
            "all that torch does in one": lambda row: row["gemm"] in ("forward", "dgrad", "wgrad"),
        }
        for name, among in groups.items():
            rows = [row for row in self.rows if among(row)]
            rates = [math.exp(statistics.mean(math.log(r[f"{s} TFLOP/s"]) for r in rows)) for s in SYSTEMS]
            shown = "".join(f"{rate:8.0f}" for rate in rates)
            against = f"{rates[1] / rates[0]:.3f} and {rates[2] / rates[0]:.3f} x torch"
            print(f"{f'geometric mean, {name}':40} {shown}   {against}")

    def write(self, path: str) -> None:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, [*self.rows[0], *self.where])
            writer.writeheader()
            writer.writerows(row | self.where for row in self.rows)


def linear(table: Table, name: str, tokens: int, out_features: int, in_features: int) -> None:
    """One linear's three products; of the weight gradient's four forms those that the storages have."""
    flops = 2 * tokens * out_features * in_features
    x, w, dy = scaled(tokens, in_features), scaled(out_features, in_features), scaled(tokens, out_features, E5M2)
    for kind, a, b, dtype, fast in (
        ("forward", x, w, BF16, True),
        ("dgrad", dy, w.T, BF16, False),
        ("wgrad", dy.T, x.T, FP32, False),
        ("wgrad", dy.T, x.T, BF16, False),
        ("wgrad added", dy.T, x.T, FP32, False),
        ("wgrad added", dy.T, x.T, BF16, False),
    ):
        rows = ScaledTensor(a.payload[:ROWS], a.scale_inv).dequantize().double()
        exact = torch.cat([rows @ part.float().double().t() for part in b.payload.split(8192)], 1) * b.scale_inv
        out = torch.empty(a.payload.shape[0], b.payload.shape[0], dtype=dtype, device="cuda")
        call = (a, b, out, kind.endswith("added"), fast)
        table.add(name, kind, out, flops, lambda c=call: by_torch(*c), lambda c=call: by_us(*c), exact)


def head(table: Table, tokens: int, vocabulary: int, width: int) -> None:
    """The BF16 head's weight gradient, added to FP32."""
    x = torch.randn(tokens, width, dtype=BF16, device="cuda")
    dy = torch.randn(tokens, vocabulary, dtype=BF16, device="cuda")
    out = torch.empty(vocabulary, width, device="cuda")
    exact = dy[:, :ROWS].double().t() @ x.double()

    def theirs() -> None:
        out.add_(dy.t() @ x)

    table.add(
        *("head in BF16", "wgrad of stock", out, 2 * tokens * vocabulary * width),
        *(theirs, lambda: wgrad.add_weight_gradient(x, dy, out), exact),
    )


def host_time(calls: int = 2000) -> None:
    """Microseconds that the host spends on a call, of a product so small that the GPU is never behind for long."""
    a, b, out = scaled(16, 16), scaled(16, 16), torch.empty(16, 16, dtype=BF16, device="cuda")
    for name, call in (("torch._scaled_mm", by_torch), ("our binding", by_us)):
        for repeat in (100, calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeat):
                call(a, b, out, False, False)
            took = time.perf_counter() - start
        print(f"host time of a call, {name}: {took / calls * 1e6:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="write the table here")
    args = parser.parse_args()
    torch.manual_seed(1)
    begun, table = time.perf_counter(), Table()
    for name, shape in SHAPES.items():
        linear(table, name, *shape)
    head(table, *SHAPES["head"])
    table.means()
    host_time()
    print(f"took {time.perf_counter() - begun:.0f} s")
    if args.csv:
        table.write(args.csv)


if __name__ == "__main__":
    main()
