"""Time ops.norm_quantize and ops.norm_backward on one GPU, beside the code that they replace.

That code is torch's norm followed by ops.quantize, and torch's backward followed by the residual gradient's addition.

    python benchmarks/fused_norm.py --csv fused_norm.csv        sized for a minute on an H200, compilation included

Microseconds are medians of triton.testing.do_bench, which empties the L2 cache before each run; data is random BF16,
the format E4M3. GB/s counts the bytes that must move (x and dy read once, outputs written once), and % is that rate
over a device copy's in the same run. Rows with a configuration try others than the default of ops/triton/norm.py's
tables, which comes first.
"""

import csv

import torch
import torch.nn.functional as F
import triton
from timed_rows import measured
from triton.testing import do_bench

from megatron_fp8 import ops
from megatron_fp8.numerics import E4M3
from megatron_fp8.ops.triton.norm import BACKWARD, Backward

SHAPES = [(8192, 4096, False), (8192, 4096, True), (32768, 768, False), (4096, 12288, False)]  # M, K, RMSNorm
EPS = 1e-5
OTHER_BACKWARD = {  # rows, warps, stages, programs
    768: [Backward(4, 8, 2, 2), Backward(1, 4, 3, 4)],
    4096: [Backward(1, 8, 3, 2), Backward(1, 16, 2, 1)],
    12288: [Backward(1, 16, 1, 1), Backward(1, 32, 2, 1)],
}


class Table:
    """Prints each row when it is measured, and keeps it for the CSV."""

    def __init__(self, commit: str):
        self.rows: list[dict] = []
        self.where = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit,
        }
        print(", ".join(f"{key} {value}" for key, value in self.where.items()))
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        self.copy_rate = 2 * source.nbytes / self.milliseconds(lambda: target.copy_(source)) / 1e6
        print(f"copy {self.copy_rate:.0f} GB/s")

    def milliseconds(self, function) -> float:
        return do_bench(function, warmup=10, rep=60, return_mode="median")

    def add(self, name, shape, function, numbytes, config=""):
        try:
            us = 1e3 * self.milliseconds(function)
        except triton.runtime.errors.OutOfResources as error:  # this configuration does not fit K
            print(f"{name:34} {config}: {error}")
            return
        rate = numbytes / us / 1e3
        row = {"name": name, "shape": "x".join(map(str, shape)), "config": str(config), "us": round(us, 1)}
        row |= {"GB/s": round(rate), "% of copy": round(100 * rate / self.copy_rate)}
        self.rows.append(row)
        print(f"{name:34} {row['shape']:11} {us:7.1f} us {rate:6.0f} GB/s {row['% of copy']:4} % {config}", flush=True)

    def write(self, path: str):
        fields = ["name", "shape", "config", "us", "GB/s", "% of copy", *self.where]
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(row | self.where for row in self.rows)


def tried(table: Table, name: str, shape, limits: dict, others: list, function, numbytes: int) -> None:
    """Time function() with each configuration, put into the kernels' table at the entry for K; print the best."""
    limit = next(limit for limit in limits if limit >= shape[1])
    chosen, before = limits[limit], len(table.rows)
    for config in (chosen, *others):
        limits[limit] = config
        table.add(name, shape, function, numbytes, config)
    limits[limit] = chosen
    best = min(table.rows[before:], key=lambda row: row["us"])
    print(f"{name:34} best {best['config']}{'' if best['config'] != str(chosen) else ', as it is'}")


def bench(table: Table, shape: tuple[int, int], rms: bool) -> None:
    M, K = shape
    n, kind = M * K, "rmsnorm" if rms else "layernorm"
    x, dy, residual = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    weight = torch.rand(K, dtype=torch.bfloat16, device="cuda").add_(0.5)
    bias = None if rms else torch.randn(K, dtype=torch.bfloat16, device="cuda")
    scale, amax = torch.tensor(40.0, device="cuda"), torch.tensor(0.0, device="cuda")
    options = {"rms": rms, "zero_centered": False}

    def torch_norm(x, weight, bias):
        return F.rms_norm(x, (K,), weight, EPS) if rms else F.layer_norm(x, (K,), weight, bias, EPS)

    def fused(**wanted):
        return ops.norm_quantize(x, weight, bias, EPS, E4M3, scale, amax_out=amax, **wanted, **options)

    def separate(**wanted):
        return ops.quantize(torch_norm(x, weight, bias), E4M3, scale, amax_out=amax, **wanted)

    table.add(f"{kind} torch", shape, lambda: torch_norm(x, weight, bias), 4 * n)
    table.add(f"{kind} ops.norm", shape, lambda: ops.norm(x, weight, bias, EPS, **options), 4 * n)
    table.add(f"{kind} norm_quantize rows", shape, fused, 3 * n)
    table.add(f"{kind} torch + quantize both", shape, lambda: separate(transpose=True), 4 * n)
    table.add(f"{kind} norm_quantize both", shape, lambda: fused(columns=True), 4 * n)
    # --fp8-activations: instead of both layouts, the rows and the kept input, and the columns later.
    kept, zero_centered = torch.empty_like(x, dtype=E4M3.dtype), options["zero_centered"]
    again = {"zero_centered": zero_centered, "rows": False, "columns": True}
    table.add(f"{kind} norm_quantize rows, kept", shape, lambda: fused(kept=kept), 4 * n)
    table.add(
        f"{kind} norm_requantize", shape, lambda: ops.norm_requantize(kept, weight, bias, E4M3, scale, **again), 2 * n
    )

    leaves = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = torch_norm(*leaves, *[None] * rms)
    _, mean, rstd = ops.norm(x, weight, bias, EPS, **options)

    def torch_backward():
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)[0] + residual

    def backward(residual=None, x=x):
        return ops.norm_backward(dy, x, weight, mean, rstd, residual=residual, **options)

    table.add(f"{kind} norm_backward", shape, backward, 6 * n)
    table.add(f"{kind} torch backward + residual", shape, torch_backward, 8 * n)
    table.add(f"{kind} norm_backward + residual", shape, lambda: backward(residual), 8 * n)
    table.add(f"{kind} the same, kept", shape, lambda: backward(residual, kept), 7 * n)
    if rms:
        return
    add = "  norm_backward + residual"
    tried(table, add, shape, BACKWARD, OTHER_BACKWARD[K], lambda: backward(residual), 8 * n)


def main() -> None:
    with measured(__doc__, Table) as table:
        for *shape, rms in SHAPES:
            bench(table, tuple(shape), rms)


if __name__ == "__main__":
    main()
