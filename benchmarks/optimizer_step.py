"""One step of Adam over 1.8 B parameters on one GPU: each level beside stock's FP32 Adam and Transformer Engine's.

    python benchmarks/optimizer_step.py --te-path DIR --csv benchmarks/results/optimizer_step.csv
    python benchmarks/optimizer_step.py --tiles                       # O2 and O3 by launch configuration
    python benchmarks/optimizer_step.py --params 1e6 --device cpu     # any machine, checks the script

The parameters are the four linears of 9 layers of a GPT of 7B's width, one call for each weight, as in the engine at
O3.

    O1, O2, O3     the level's formats (megatron_fp8/flags/level.py), from a gradient in FP8 blocks, one rank
    ... bf16 grad  the same from a BF16 gradient, which a step of more than 8 micro-batches keeps
    ... drawn v    O2 and O3 at beta2 0.999, where the second moment is rounded by a draw
    torch          AdamW(fused=True) in FP32, then each FP32 weight copied to its BF16 one: as stock Megatron without
                   Transformer Engine, except that stock does not ask for the fused kernel
    te             the same with Transformer Engine's FusedAdam
    te-low         FusedAdam as megatron.core makes it for --use-precision-aware-optimizer --main-grads-dtype bf16
                   --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16

Ours clip in the same pass (grad_scale); stock's clip is a separate pass, not counted here.  Time: the median over
repetitions after a warm-up, by CUDA events; random data; one system after the other.  B/element: the bytes that must
move, from the tensors' sizes, every tensor of the state once each way; temporaries do not count.  GB/s is that over the
time, and "% copy" its share of the rate of a 4 GiB device copy in the same run.
"""

import argparse
import csv
import dataclasses
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from train_step import stamp

from megatron_fp8 import ops
from megatron_fp8.flags.level import resolve
from megatron_fp8.numerics import BlockScaled, ScaledTensor
from megatron_fp8.numerics.master import quantize_block16, split_bf16, split_e4m3
from megatron_fp8.ops.adam import AdamHyper, adam_step
from megatron_fp8.ops.adam_states import State, is_remainder

LAYERS = 9
LEVELS = ("O1", "O2", "O3")
OURS = [*LEVELS, *(f"{level} bf16 grad" for level in LEVELS), "O2 drawn v", "O3 drawn v"]
SYSTEMS = ["torch", *OURS, "te", "te-low"]
TILES = [(2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8)]  # blocks of 128 and warps a program
HYPER = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)
ADAM = {"lr": HYPER.lr, "betas": (HYPER.beta1, HYPER.beta2), "eps": HYPER.eps, "weight_decay": HYPER.weight_decay}
SCALE = 2.0**11  # of E4M3 weights

type Step = Callable[[], None]


def weights(params: float) -> list[int]:
    """Elements of each weight: qkv, proj, fc1 and fc2 of every layer, at the width that gives about `params`."""
    hidden = max(1, round((params / (12 * LAYERS)) ** 0.5 / 128)) * 128
    return [part * hidden**2 for part in (3, 1, 4, 4)] * LAYERS


def tensors(state: State | ScaledTensor) -> Iterable[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    parts = (getattr(state, field.name) for field in dataclasses.fields(state))
    return [part for part in parts if part is not None]


def nbytes(*states: State | ScaledTensor) -> int:
    return sum(tensor.nbytes for state in states for tensor in tensors(state))


def stored(values: torch.Tensor, kind: str) -> State:
    """`values` (n,) FP32 in the format of a level's cell."""
    if kind == "fp8":
        return ops.quantize_blocks(values)
    return quantize_block16(values) if kind == "fp16" else values


def ours(system: str, sizes: list[int], device: str) -> tuple[Step, int]:
    """A level's step, and the bytes that it must move."""
    cells, hyper = resolve(system[:2], {}), replace(HYPER, beta2=0.999) if "drawn" in system else HYPER
    grad_scale, scale = (torch.tensor(x, device=device) for x in (0.9, SCALE))
    calls, moved = [], 0
    for n in sizes:
        w, gradient = 0.02 * torch.randn(n, device=device), 1e-3 * torch.randn(n, device=device)
        averages = [
            stored(1e-3 * torch.randn(n, device=device), cells["exp_avg"]),
            stored((1e-3 * torch.randn(n, device=device)).square_(), cells["exp_avg_sq"]),
        ]
        if cells["weight"] == "fp8":
            payload, remainder = split_e4m3(w, scale)
            weight, of_weight = ScaledTensor(payload, 1 / scale), [scale, torch.zeros((), device=device)]
        else:
            weight, remainder = split_bf16(w)
            of_weight = [None, torch.zeros((), device=device)]
        master = remainder if cells["master"] == "remainder" else stored(w, cells["master"])
        gradient = gradient.bfloat16() if "bf16" in system else ops.quantize_blocks(gradient)
        moved += nbytes(gradient) + 2 * nbytes(*averages, master) + (1 + is_remainder(master)) * nbytes(weight)
        if isinstance(gradient, BlockScaled):
            gradient = gradient.payload[None], gradient.exponents[None]
        calls.append((gradient, *averages, master, weight, hyper, grad_scale, *of_weight))

    def step() -> None:
        for arguments in calls:
            adam_step(*arguments)

    return step, moved


def fused_adam(*args, **kwargs) -> torch.optim.Optimizer:
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(*args, adam_w_mode=True, capturable=False, **kwargs)


def stock_fp32(system: str, sizes: list[int], device: str) -> tuple[Step, int]:
    """The step of an optimizer over FP32 weights, with the copy of each to its BF16 weight; and its bytes."""
    masters = [torch.nn.Parameter(0.02 * torch.randn(n, device=device)) for n in sizes]
    copies = [master.detach().bfloat16() for master in masters]
    for master in masters:
        master.grad = 1e-3 * torch.randn_like(master)
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAM) if system == "torch" else fused_adam(masters, **ADAM)

    def step() -> None:
        optimizer.step()
        for copy, master in zip(copies, masters, strict=True):
            copy.copy_(master.detach())

    return step, sum(8 * master.nbytes + copy.nbytes for master, copy in zip(masters, copies, strict=True))


def te_low(system: str, sizes: list[int], device: str) -> tuple[Step, int]:
    """A step of Transformer Engine's FusedAdam: BF16 weights and gradients, FP16 masters, FP8 and FP16 averages."""
    params = [torch.nn.Parameter((0.02 * torch.randn(n, device=device)).bfloat16()) for n in sizes]
    for param in params:
        param.decoupled_grad = 1e-3 * torch.randn_like(param)
    low = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16, "master_weight_dtype": torch.float16}
    optimizer = fused_adam(
        params, master_weights=True, use_decoupled_grad=True, store_param_remainders=True, **low, **ADAM
    )
    # gradient and weight once, BF16; exp_avg, exp_avg_sq and master each way: 1, 2 and 2 bytes
    return optimizer.step, sum((2 + 2 + 2 * (1 + 2 + 2)) * param.numel() for param in params)


def measure(step: Step, device: str, repeats: int, warmup: int = 3) -> float:
    """The median time of a step, in ms."""
    for _ in range(warmup):
        step()
    if device == "cpu":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def copy_rate(device: str, repeats: int) -> float:
    """GB/s of a device copy, reads and writes together."""
    source = torch.randn(2**20 if device == "cpu" else 2**30, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure(lambda: target.copy_(source), device, repeats) / 1e6


def free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def row(system: str, sizes: list[int], moved: int, ms: float, copied: float) -> dict:
    params, rate = sum(sizes), moved / ms / 1e6
    return {
        "system": system, "params": params, "ms": round(ms, 3), "B/element": round(moved / params, 2),
        "GB/s": round(rate), "% copy": round(100 * rate / copied), "x torch": "",
    }  # fmt: skip


def compare(systems: list[str], sizes: list[int], device: str, repeats: int, copied: float) -> list[dict]:
    """A row for each system, compared with torch's if that is one of them."""
    rows, torch_ms = [], None
    for system in sorted(systems, key=lambda name: name != "torch"):
        build = ours if system in OURS else te_low if system == "te-low" else stock_fp32
        try:
            step, moved = build(system, sizes, device)
            ms = measure(step, device, repeats)
        except (ImportError, OSError, RuntimeError) as error:  # not installed, or out of memory: go on with the others
            print(f"{system:14} {error}")
            continue
        finally:
            step = None
            free(device)
        torch_ms = ms if system == "torch" else torch_ms
        rows.append(row(system, sizes, moved, ms, copied))
        if torch_ms:
            rows[-1]["x torch"] = round(torch_ms / ms, 2)
        show(rows[-1])
    return rows


def sweep(sizes: list[int], device: str, repeats: int, copied: float) -> list[dict]:
    """Time O2 and O3 by blocks and warps a program."""
    from megatron_fp8.ops.triton import adam

    rows, chosen = [], (adam.ADAM_BLOCKS, adam.ADAM_WARPS)
    for system in ("O2", "O3"):
        step, moved = ours(system, sizes, device)
        for tile in TILES:
            adam.ADAM_BLOCKS, adam.ADAM_WARPS = tile
            ms = measure(step, device, repeats)
            rows.append(row(f"{system} {tile}" + " *" * (tile == chosen), sizes, moved, ms, copied))
            show(rows[-1])
        adam.ADAM_BLOCKS, adam.ADAM_WARPS = chosen
        step = None
        free(device)
    return rows


def show(row: dict) -> None:
    ratio = f" {row['x torch']:>6} x torch" if row["x torch"] else ""
    print(
        f"{row['system']:14} {row['ms']:9.3f} ms {row['B/element']:6.2f} B/element {row['GB/s']:6} GB/s "
        f"{row['% copy']:4} % of copy{ratio}",
        flush=True,
    )


def installed(package: str) -> str:
    """A package's version, or ""."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--params", type=float, default=1.8e9)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiles", action="store_true", help="only time O2 and O3 by launch configuration")
    parser.add_argument("--te-path", help="folder with Transformer Engine")
    parser.add_argument("--csv", help="append the figures to this file")
    args = parser.parse_args()
    if args.te_path:
        sys.path.insert(0, args.te_path)
    torch.manual_seed(0)

    sizes = weights(args.params)
    versions = stamp() | {name: installed(name) for name in ("triton", "transformer_engine")}
    copied = copy_rate(args.device, args.repeats)
    free(args.device)
    print(", ".join(f"{key} {value}" for key, value in versions.items()))
    print(f"{sum(sizes) / 1e9:.3f} B parameters in {len(sizes)} weights; a device copy moves {copied:.0f} GB/s")
    if args.tiles:
        rows = sweep(sizes, args.device, args.repeats, copied)
    else:
        rows = compare(args.systems, sizes, args.device, args.repeats, copied)
    if args.csv and rows:
        path = Path(args.csv)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=[*versions, "copy GB/s", *rows[0]])
            if new:
                writer.writeheader()
            writer.writerows(versions | {"copy GB/s": round(copied)} | found for found in rows)


if __name__ == "__main__":
    main()
