"""Check every operation of megatron_fp8.ops on one GPU against reference.py, then time it.

    python benchmarks/ops.py --csv ops.csv        about two minutes on an H200, compilation included

Times are medians of triton.testing.do_bench, which empties the L2 cache before each run; data is random. GB/s counts
the bytes that must move (each input read once, each output written once), and % is that rate over a device copy's in
the same run. The rows named "tile", "flat", "quantize_blocks", "add_blocks" and "sum_blocks" with a configuration
compare launch configurations; the default is in ops/triton/.
"""

import csv

import torch
import triton
from timed_rows import measured
from triton.testing import do_bench

from megatron_fp8 import gemm, ops
from megatron_fp8.numerics import BLOCK, E4M3, E5M2
from megatron_fp8.numerics.blocks import PackedBlocks
from megatron_fp8.numerics.noise import noise_seed
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops import reference
from megatron_fp8.ops.triton import blocks, cast

SHAPES = [(8192, 4096), (8192, 12288), (8192, 16384)]
FLAT = [(4096, 4), (4096, 8), (8192, 4), (8192, 8), (16384, 8)]  # elements, warps
TILES = [(64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4), (32, 128, 4)]
QUANTIZE_BLOCKS = [(4, 4), (8, 4), (8, 8), (16, 4), (16, 8), (32, 8)]  # blocks, warps
ADD_BLOCKS = [(4, 4), (8, 4), (16, 4), (16, 8), (32, 8)]
SUM_BLOCKS = [(4, 4), (8, 4), (8, 8), (16, 8)]
TOKENS = 8192
LINEARS = {"qkv": (12288, 4096), "proj": (4096, 4096), "fc1": (16384, 4096), "fc2": (4096, 16384)}  # out, in


class Table:
    """Prints each row when it is measured, and keeps it for the CSV."""

    def __init__(self, commit: str):
        self.rows: list[dict] = []
        self.copy_rate: float | None = None
        gpu = torch.cuda.get_device_name()
        self.where = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "commit": commit}
        print(", ".join(f"{key} {value}" for key, value in self.where.items()))

    def add(self, name, shape, function, *, config="default", numbytes=0, flops=0):
        """Time function(), which must move `numbytes` bytes or do `flops` operations."""
        ms = do_bench(function, warmup=10, rep=60, return_mode="median")
        row = {"name": name, "shape": "x".join(map(str, shape)), "config": config, "ms": round(ms, 4)}
        if numbytes:
            rate = numbytes / ms / 1e6
            self.copy_rate = self.copy_rate or rate
            row |= {"GB/s": round(rate), "% of copy": round(100 * rate / self.copy_rate)}
        if flops:
            row |= {"TFLOP/s": round(flops / ms / 1e9)}
        self.rows.append(row)
        rates = "".join(f" {row[key]:6} {key}" for key in ("GB/s", "% of copy", "TFLOP/s") if key in row)
        print(f"{name:26} {row['shape']:17} {config:12} {ms:8.4f} ms{rates}", flush=True)

    def write(self, path: str):
        fields = ["name", "shape", "config", "ms", "GB/s", "% of copy", "TFLOP/s", *self.where]
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(row | self.where for row in self.rows)


def randn(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device="cuda")


def payload(rows: int, cols: int, fmt=E4M3) -> torch.Tensor:
    return ops.quantize(randn(rows, cols), fmt, scalar(fmt.max / 6))


def equal(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def check() -> None:
    """Bitwise equality with reference.py on the GPU, at two sizes, one odd; the GEMM by its error's norm."""
    for shape in [(8192, 4096), (1003, 4109)]:
        for dtype, fmt in [(torch.bfloat16, E4M3), (torch.bfloat16, E5M2), (torch.float32, E4M3)]:
            x, scale, largest = randn(*shape, dtype=dtype), scalar(fmt.max / 3), scalar(0.0)
            expected, expected_t = reference.quantize(x, fmt, scale, transpose=True)
            got, got_t = ops.quantize(x, fmt, scale, transpose=True, amax_out=largest)
            assert equal(got, expected) and equal(got_t, expected_t) and equal(ops.transpose(got), expected_t)
            assert equal(ops.quantize(x, fmt, scale), expected)
            assert largest == ops.amax(x) == reference.amax(x)
            for amax_out in (None, scalar(0.0)):  # a separate kernel, because it writes no rows
                none, got_t = ops.quantize(x, fmt, scale, transpose=True, rows=False, amax_out=amax_out)
                assert none is None and equal(got_t, expected_t) and amax_out in (None, largest)
    x = randn(1 << 24, dtype=torch.float32) * randn(1 << 24, dtype=torch.float32).exp()
    for options in ({}, {"rounding": "stochastic", "noise": torch.rand_like(x)}):
        got, expected = ops.quantize_blocks(x, **options), reference.quantize_blocks(x, **options)
        assert equal(got.payload, expected.payload) and equal(got.exponents, expected.exponents)
    packed = ops.quantize_blocks(x, out=PackedBlocks.empty(8, 1 << 21, "cuda"))
    expected = reference.quantize_blocks(x, out=PackedBlocks.empty(8, 1 << 21, "cuda"))
    assert equal(packed.data, expected.data)
    first, increment = 5 * BLOCK, randn((1 << 24) - 7 * BLOCK)
    ops.add_blocks(increment, packed, noise_seed(1), first)
    reference.add_blocks(increment, expected, noise_seed(1), first)
    assert equal(packed.data, expected.data)
    shards = packed.payload, packed.exponents
    out, expected = torch.empty_like(x[: 1 << 21]), torch.empty_like(x[: 1 << 21])
    for scale in (None, scalar(0.3)):
        assert equal(ops.sum_blocks(*shards, out, scale), reference.sum_blocks(*shards, expected, scale))
    squares, expected = ops.square_sum_blocks(*shards), reference.square_sum_blocks(*shards)
    assert torch.allclose(squares, expected, rtol=1e-5)
    for fmt, fast in [(E4M3, True), (E5M2, False)]:
        a, b, scale = payload(2048, 4096, fmt), payload(1024, 4096), scalar(0.01)
        exact = (a.float().double() @ b.float().double().t()) * 1e-4
        for dtype in (torch.bfloat16, torch.float32):
            operands = ScaledTensor(a, scale), ScaledTensor(b, scale)
            got = gemm.gemm(*operands, gemm.Epilogue(dtype=dtype), fast_accum=fast)
            error = ((got.double() - exact).norm() / exact.norm()).item()
            print(f"gemm {fmt.name} x e4m3 -> {dtype}, fast_accum {fast}: relative error {error:.1e}")
            assert error < 5e-3
    print("all operations agree with the reference\n")


def bench_cast(table: Table) -> None:
    scale, largest = scalar(100.0), scalar(0.0)
    for shape in SHAPES:
        x = randn(*shape)
        n = x.numel()
        q = ops.quantize(x, E4M3, scale)
        q_t = ops.transpose(q)
        table.add("amax", shape, lambda x=x: ops.amax(x), numbytes=2 * n)
        table.add("quantize", shape, lambda x=x: ops.quantize(x, E4M3, scale), numbytes=3 * n)
        table.add(
            "quantize+amax", shape, lambda x=x: ops.quantize(x, E4M3, scale, amax_out=largest), numbytes=3 * n
        )
        table.add(
            "quantize+T", shape, lambda x=x: ops.quantize(x, E4M3, scale, transpose=True), numbytes=4 * n
        )
        for fmt in (E4M3, E5M2):
            table.add(
                f"quantize+T+amax {fmt.name}",
                shape,
                lambda x=x, fmt=fmt: ops.quantize(x, fmt, scale, transpose=True, amax_out=largest),
                numbytes=4 * n,
            )
        table.add("transpose", shape, lambda q=q, q_t=q_t: ops.transpose(q, out=q_t), numbytes=2 * n)

    x, n = randn(*SHAPES[-1]), SHAPES[-1][0] * SHAPES[-1][1]
    flat, tile = (cast.BLOCK, cast.FLAT_WARPS), (cast.TILE_M, cast.TILE_K, cast.TILE_WARPS)
    for config in FLAT:
        cast.BLOCK, cast.FLAT_WARPS = config
        table.add("flat amax", x.shape, lambda: ops.amax(x), config=str(config), numbytes=2 * n)
        table.add(
            "flat quantize+amax",
            x.shape,
            lambda: ops.quantize(x, E4M3, scale, amax_out=largest),
            config=str(config),
            numbytes=3 * n,
        )
    for config in TILES:
        cast.TILE_M, cast.TILE_K, cast.TILE_WARPS = config
        for fmt in (E4M3, E5M2):
            table.add(
                f"tile quantize+T+amax {fmt.name}",
                x.shape,
                lambda fmt=fmt: ops.quantize(x, fmt, scale, transpose=True, amax_out=largest),
                config=str(config),
                numbytes=4 * n,
            )
        table.add(
            "tile transpose", x.shape, lambda: ops.transpose(q, out=q_t), config=str(config), numbytes=2 * n
        )
    (cast.BLOCK, cast.FLAT_WARPS), (cast.TILE_M, cast.TILE_K, cast.TILE_WARPS) = flat, tile


def bench_blocks(table: Table) -> None:
    n = 256 << 20
    x = randn(n, dtype=torch.float32)
    one = 1 + 1 / BLOCK
    stored = ops.quantize_blocks(x, out=PackedBlocks.empty(4, n // 4, "cuda"))
    chosen = blocks.QUANTIZE_BLOCKS, blocks.QUANTIZE_WARPS
    for config in QUANTIZE_BLOCKS:
        blocks.QUANTIZE_BLOCKS, blocks.QUANTIZE_WARPS = config
        table.add(
            "quantize_blocks fp32",
            (n,),
            lambda: ops.quantize_blocks(x, out=stored),
            config=str(config),
            numbytes=(4 + one) * n,
        )
    blocks.QUANTIZE_BLOCKS, blocks.QUANTIZE_WARPS = chosen
    noise = torch.rand_like(x)
    table.add(
        "quantize_blocks stoch.",
        (n,),
        lambda: ops.quantize_blocks(x, "stochastic", noise, stored),
        numbytes=(8 + one) * n,
    )
    narrow = x.bfloat16()
    table.add(
        "quantize_blocks bf16", (n,), lambda: ops.quantize_blocks(narrow, out=stored), numbytes=(2 + one) * n
    )
    chosen = blocks.ADD_BLOCKS, blocks.ADD_WARPS
    for config in ADD_BLOCKS:
        blocks.ADD_BLOCKS, blocks.ADD_WARPS = config
        table.add(
            "add_blocks bf16",
            (n,),
            lambda: ops.add_blocks(narrow, stored, noise_seed(1)),
            config=str(config),
            numbytes=(2 + 2 * one) * n,
        )
    blocks.ADD_BLOCKS, blocks.ADD_WARPS = chosen
    chosen = blocks.SUM_BLOCKS, blocks.SUM_WARPS
    for ranks in (1, 4, 8):
        packed = ops.quantize_blocks(x, out=PackedBlocks.empty(ranks, n // ranks, "cuda"))
        shards, out = (packed.payload, packed.exponents), torch.empty(n // ranks, device="cuda")
        for config in SUM_BLOCKS if ranks == 4 else [chosen]:
            blocks.SUM_BLOCKS, blocks.SUM_WARPS = config
            table.add(
                f"sum_blocks R={ranks}",
                out.shape,
                lambda s=shards, out=out: ops.sum_blocks(*s, out),
                config=str(config),
                numbytes=one * n + 4 * out.numel(),
            )
            table.add(
                f"square_sum_blocks R={ranks}",
                out.shape,
                lambda s=shards: ops.square_sum_blocks(*s),
                config=str(config),
                numbytes=one * n,
            )
        blocks.SUM_BLOCKS, blocks.SUM_WARPS = chosen


def bench_gemm(table: Table) -> None:
    """Time the four linears of a 7B layer, 8192 tokens: (M, N, K) forward, input gradient, weight gradient."""
    scale = scalar(0.01)
    for name, (n, k) in LINEARS.items():
        flops = 2 * TOKENS * n * k
        for direction, shape, fmt in [
            ("forward", (TOKENS, n, k), E4M3),
            ("dgrad", (TOKENS, k, n), E5M2),
            ("wgrad", (n, k, TOKENS), E5M2),
        ]:
            a, b = payload(shape[0], shape[2], fmt), payload(shape[1], shape[2])
            operands, fast = (ScaledTensor(a, scale), ScaledTensor(b, scale)), direction == "forward"
            if direction != "wgrad":
                table.add(
                    f"{direction} {name}",
                    shape,
                    lambda o=operands, f=fast: gemm.gemm(*o, fast_accum=f),
                    flops=flops,
                )
                continue
            out = randn(shape[0], shape[1], dtype=torch.float32)
            for accumulate in (False, True):
                table.add(
                    f"wgrad {name} fp32 {'+=' if accumulate else '='}",
                    shape,
                    lambda o=operands, out=out, add=accumulate: gemm.gemm(*o, gemm.Epilogue(into=out, accumulate=add)),
                    flops=flops,
                )
        x, w = randn(TOKENS, k), randn(n, k)
        table.add(f"forward {name} bf16", (TOKENS, n, k), lambda x=x, w=w: x @ w.t(), flops=flops)


def main() -> None:
    with measured(__doc__, Table) as table:
        check()
        source = randn(1 << 29)
        target = torch.empty_like(source)
        table.add("copy", source.shape, lambda: target.copy_(source), numbytes=2 * source.nbytes)
        bench_cast(table)
        bench_blocks(table)
        bench_gemm(table)


if __name__ == "__main__":
    main()
