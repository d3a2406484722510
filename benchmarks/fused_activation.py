"""Time activation with its cast, the cast with the bias gradient, quantise + transpose, and add_blocks on one GPU.

    python benchmarks/fused_activation.py [--csv FILE]        sized for a minute on an H200, compilation included

Microseconds are medians of triton.testing.do_bench, which empties the L2 cache before each run; data is random. GB/s
counts the bytes that must move (each input read once, each output written once); "floor" is their time at 4.0 TB/s.
"torch" is the code that a kernel replaces: torch's activation (compiled, if stock's is), its gradient, the sum over
rows, and ops.quantize. Rows with a configuration try other tile rows, columns and warps; the defaults are in
ops/triton/. `--old FOLDER` also times quantise + transpose and add_blocks of cast.py and blocks.py in FOLDER.
"""

import argparse
import csv
import importlib.util
import sys
from pathlib import Path

import torch
import triton
from stamp import commit
from torch.nn import functional
from triton.testing import do_bench

from megatron_fp8 import ops
from megatron_fp8.numerics import BLOCK, E4M3, E5M2
from megatron_fp8.numerics.blocks import PackedBlocks
from megatron_fp8.numerics.noise import noise_seed
from megatron_fp8.ops.reference_activation import GATED
from megatron_fp8.ops.triton import activation, blocks, cast

RATE = 4.0e12  # bytes a second
SHAPES = [(8192, 16384, "gelu", True), (8192, 14336, "swiglu", False), (8192, 16384, "gelu_tanh", True)]
TILES = [(32, 128, 4), (64, 64, 4), (128, 128, 8)]
CASTS = [(8192, 4096), (8192, 16384)]
ADD_BLOCKS = [(8, 4), (32, 8)]
FIELDS = ["name", "shape", "config", "us", "floor us", "GB/s"]


class Table:
    def __init__(self) -> None:
        self.rows: list[dict] = []
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {commit()}")

    def add(self, name: str, shape, function, numbytes: float, config="product") -> None:
        us = 1e3 * do_bench(function, warmup=10, rep=60, return_mode="median")
        shape, config = "x".join(map(str, shape)), str(config)
        rate, floor = round(numbytes / us / 1e3), round(numbytes / RATE * 1e6, 1)
        self.rows.append(dict(zip(FIELDS, (name, shape, config, round(us, 1), floor, rate), strict=True)))
        print(f"{name:32} {shape:12} {config:14} {us:8.1f} us  floor {floor:7.1f}  {rate:5} GB/s", flush=True)

    def write(self, path: str) -> None:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(self.rows)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def torch_functions(kind: str):
    """(forward, backward) in BF16, as stock runs them."""
    from megatron.core.fusions import fused_bias_gelu, fused_bias_swiglu

    if kind == "gelu":  # without bias_gelu_fusion stock adds the bias first
        add = torch.add
        return lambda h, b: functional.gelu(add(h, b)), lambda dy, h, b: torch.ops.aten.gelu_backward(dy, add(h, b))
    if kind == "gelu_tanh":
        fused, fused_back = fused_bias_gelu.bias_gelu, fused_bias_gelu.bias_gelu_back
        return (lambda h, b: fused(b, h)), (lambda dy, h, b: fused_back(dy, b, h))
    return (lambda h, b: fused_bias_swiglu.swiglu(h)), (lambda dy, h, b: fused_bias_swiglu.swiglu_back(dy, h))


def bench_activation(table: Table) -> None:
    scale, largest = torch.tensor(20.0, device="cuda"), torch.tensor(0.0, device="cuda")
    for M, F, kind, with_bias in SHAPES:
        gated = kind in GATED
        wide = 2 * F if gated else F
        h, dy, bias = randn(M, wide), randn(M, F), randn(wide) if with_bias else None
        forward, backward = torch_functions(kind)

        def old_forward(h=h, bias=bias, forward=forward):
            return ops.quantize(forward(h, bias), E4M3, scale, transpose=True, amax_out=largest)

        def old_backward(dy=dy, h=h, bias=bias, backward=backward):
            dh = backward(dy, h, bias)
            return ops.quantize(dh, E5M2, scale, transpose=True, amax_out=largest), bias is not None and dh.sum(0)

        def new_forward(h=h, bias=bias, kind=kind):
            return ops.activate_quantize(h, kind, E4M3, scale, bias=bias, columns=True, amax_out=largest)

        def new_backward(dy=dy, h=h, bias=bias, kind=kind):
            return ops.activate_backward_quantize(
                dy, h, kind, E5M2, scale, bias=bias, columns=True, amax_out=largest, bias_grad=bias is not None
            )

        # --fp8-activations: h is kept in blocks, and the backward pass writes the forward pass's columns.
        kept, columns = ops.blocks_for(h, kind), torch.empty(F, M, dtype=E4M3.dtype, device="cuda")

        def forward_keeping(h=h, bias=bias, kind=kind, kept=kept):
            return ops.activate_quantize(h, kind, E4M3, scale, bias=bias, amax_out=largest, kept=kept)

        def backward_again(dy=dy, bias=bias, kind=kind, kept=kept, again=(scale, columns)):
            options = {"columns": True, "amax_out": largest, "bias_grad": bias is not None, "again": again}
            return ops.activate_backward_quantize(dy, kept, kind, E5M2, scale, **options)

        bytes_forward, bytes_backward = M * (2 * wide + 2 * F), M * (2 * F + 2 * wide + 2 * wide)
        table.add(f"{kind} forward: torch", (M, F), old_forward, bytes_forward, "torch")
        table.add(f"{kind} backward: torch", (M, F), old_backward, bytes_backward, "torch")
        plain = lambda h=h, kind=kind, bias=bias: ops.activate(h, kind, bias)  # noqa: E731
        table.add(f"{kind} forward, not cast", (M, F), plain, bytes_forward)
        forward_tile, backward_tile = ("GATED_FORWARD", "GATED_BACKWARD") if gated else ("FORWARD", "BACKWARD")
        for name, constant, function, numbytes in [
            ("forward", forward_tile, new_forward, bytes_forward),
            ("forward, kept", forward_tile, forward_keeping, M * (3 * wide + F)),
            ("backward", backward_tile, new_backward, bytes_backward),
            ("backward, kept, and columns", backward_tile, backward_again, M * (3 * F + 3 * wide)),
        ]:
            tiles = TILES if kind != "gelu_tanh" else []
            if "kept" in name:  # a tile is one block wide
                tiles = [tile for tile in tiles if tile[1] == BLOCK]
            sweep(table, f"{kind} {name}", (M, F), activation, constant, tiles, function, numbytes)


def sweep(table: Table, name, shape, module, constant: str, configs, function, numbytes) -> None:
    """Time `function` with the module's constant (or several, separated by commas) as it is and as each of `configs`;
    print the best."""
    names, before = constant.split(","), len(table.rows)
    chosen = [getattr(module, one) for one in names]
    product = tuple(chosen) if len(names) > 1 else chosen[0]
    for config in (product, *(config for config in configs if config != product)):
        for one, value in zip(names, config if len(names) > 1 else [config], strict=True):
            setattr(module, one, value)
        table.add(name, shape, function, numbytes, config)
    for one, value in zip(names, chosen, strict=True):
        setattr(module, one, value)
    times = {row["config"]: row["us"] for row in table.rows[before:]}
    print(f"{name:32} best {min(times, key=times.__getitem__)}, the product's is {product}")


def load(folder: str, name: str):
    spec = importlib.util.spec_from_file_location(f"old_{name}", Path(folder) / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bench_cast(table: Table, old: str | None) -> None:
    scale, largest = torch.tensor(20.0, device="cuda"), torch.tensor(0.0, device="cuda")
    before = load(old, "cast") if old else None
    for shape in CASTS:
        x = randn(*shape)
        for fmt in (E4M3, E5M2):

            def quantize(module, x=x, fmt=fmt):
                return module.quantize(x, fmt, scale, transpose=True, amax_out=largest)

            name = f"quantize+T+amax {fmt.name}"
            if before:
                table.add(name, shape, lambda q=quantize: q(before), 4 * x.numel(), "old")
            tiles = TILES if shape == CASTS[-1] and fmt is E4M3 else []
            constants = "TILE_M,TILE_K,TILE_WARPS"
            sweep(table, name, shape, cast, constants, tiles, lambda q=quantize: q(cast), 4 * x.numel())
        for name, function in [
            ("bias gradient: sum + quantize", lambda x=x: (x.sum(0), ops.quantize(x, E5M2, scale, transpose=True))),
            ("quantize_bias_grad", lambda x=x: ops.quantize_bias_grad(x, E5M2, scale, columns=True)),
        ]:
            table.add(name, shape, function, 4 * x.numel())
        codes = ops.quantize(x, E4M3, scale)
        if before:
            table.add("transpose", shape, lambda c=codes: before.transpose(c), 2 * x.numel(), "old")
        table.add("transpose", shape, lambda c=codes: ops.transpose(c), 2 * x.numel())


def bench_blocks(table: Table, old: str | None) -> None:
    n, moved = 256 << 20, 2 + 2 * (1 + 1 / BLOCK)
    x, seed = randn(n), noise_seed(1)
    stored = ops.quantize_blocks(x, out=PackedBlocks.empty(4, n // 4, "cuda"))
    if old:
        before = load(old, "blocks")
        table.add("add_blocks", (n,), lambda: before.add_blocks(x, stored, seed), moved * n, "old")
    constants = "ADD_BLOCKS,ADD_WARPS"
    sweep(table, "add_blocks", (n,), blocks, constants, ADD_BLOCKS, lambda: ops.add_blocks(x, stored, seed), moved * n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv")
    parser.add_argument("--old", metavar="FOLDER")
    options = parser.parse_args()
    table = Table()
    bench_activation(table)
    bench_cast(table, options.old)
    bench_blocks(table, options.old)
    if options.csv:
        table.write(options.csv)


if __name__ == "__main__":
    main()
