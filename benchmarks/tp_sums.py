"""The cost of FP8 sums over tensor-parallel ranks: the error of a linear's output, and the loss of a small GPT.

    python benchmarks/tp_sums.py error        CPU, one core, seconds
    python benchmarks/tp_sums.py train        CPU, two cores, an hour; continues where it was stopped

error: y = x W^T with K = 8192 terms, cut over T ranks like a row-parallel linear's. Each rank's product is rounded to
BF16, as its GEMM writes it. The truth is y in float64 of the same operands. BF16's sum is FP32's, rounded once (NCCL's
ring rounds at each hop). FP8's is `--fp8-tp-reduce-scatter fp8`: the T - 1 other parts as BlockScaled and the own part
as it is, one FP32 sum, rounded to BF16. With a rotation, each block of 128 is multiplied by random signs and a Hadamard
matrix before the cast, and the sum by the inverse. Only the other parts are rotated, so that the own one stays exact.
For comparison: the casts of x and W alone, with sums in BF16. Inputs:

    gaussian      x and W standard normal
    channels      1 in 256 of x's channels (columns, terms of the sum) times 30
    outputs       1 in 256 of W's rows (channels of y) times 30
    tokens        1 in 256 of x's rows times 30

train: the demo's GPT on the Python standard library's source, 300 steps, TP 2 and 4 over gloo. Stock BF16 (whose local
layers do not support sequence parallelism) beside O3 with sequence parallelism and its sums in BF16, in FP8 forward,
backward, and both.  All runs of one seed and TP have the same initial weights and data, and are judged by the same 64
batches of the held-out text.
"""

import argparse
import csv
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from stamp import ROOT, commit

# isort: split
import demo
import prepare_data
import torch
from launch import forked, parse_step, parse_validation

from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.numerics.scaling import compute_scale
from megatron_fp8.ops import reference

RESULTS = ROOT / "benchmarks/results"
STEPS, SEEDS, SIZES = 300, (1, 2, 3), (2, 4)
LEVEL = "--fp8-level O3 --sequence-parallel --fp8-tp-reduce-scatter"
WAYS = ("bf16", "forward", "backward", "fp8")
ARMS = {"stock BF16": "--fp8-level O0"} | {f"O3, {way}": f"{LEVEL} {way}" for way in WAYS}
# The demo's GPT with an MLP whose quarter is a multiple of 16, and its training with half the batch.
SMALLER = f"""--ffn-hidden-size 384 --global-batch-size 16 --train-iters {STEPS} --eval-interval {STEPS + 1}
--eval-iters 64"""

TOKENS, TERMS, CHANNELS, BLOCK = 256, 8192, 1024, 128
EVERY, TIMES = 256, 30.0  # spacing and factor of the outliers


# --- error


def inputs() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, x (M, K), W (N, K)), float64 of BF16 values."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, TERMS, generator=g, dtype=torch.float64) for n in (TOKENS, CHANNELS))

    def some(n: int) -> torch.Tensor:
        return torch.ones(n).double().index_fill(0, torch.randperm(n, generator=g)[: -(-n // EVERY)], TIMES)

    for name, x_, w_ in (
        ("gaussian", x, w),
        ("channels", x * some(TERMS), w),
        ("outputs", x, w * some(CHANNELS)[:, None]),
        ("tokens", x * some(TOKENS)[:, None], w),
    ):
        yield name, x_.bfloat16().double(), w_.bfloat16().double()


def in_fp8(x: torch.Tensor) -> torch.Tensor:
    """x (..., N) after FP8 on the wire."""
    return reference.quantize_blocks(x.flatten()).dequantize().view(x.shape)


def in_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x as an FP8 GEMM reads it, with one scale."""
    scale = compute_scale(reference.amax(x), E4M3)
    return ScaledTensor(reference.quantize(x.float(), E4M3, scale), scale.reciprocal()).dequantize().double()


def rotation() -> torch.Tensor:
    """Orthogonal (128, 128): random signs, then Hadamard's matrix."""
    h = torch.ones(1, 1)
    while len(h) < BLOCK:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = torch.randint(0, 2, (BLOCK, 1), generator=torch.Generator().manual_seed(1)) * 2 - 1
    return signs * h / BLOCK**0.5


def rotated(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x.view(-1, BLOCK) @ by).view(x.shape)


def sum_of(parts: list[torch.Tensor], way: str) -> torch.Tensor:
    """A rank's sum of all ranks' parts (M, N), BF16; parts[0] is its own."""
    own, *others = (part.float() for part in parts)
    if way == "fp8":
        others = [in_fp8(part) for part in others]
    total = torch.stack(others).sum(0)
    if way == "fp8, rotated":
        by = rotation()
        total = rotated(sum(in_fp8(rotated(part, by)) for part in others), by.T)
    return (own + total).bfloat16()


def errors() -> list[dict]:
    rows = []
    for name, x, w in inputs():
        truth = x @ w.T
        size = truth.square().mean(0).sqrt()  # of each channel
        for ranks, way in itertools.product((2, 4, 8), ("bf16", "fp8", "fp8, rotated", "bf16 of FP8 operands")):
            a, b = (in_e4m3(x), in_e4m3(w)) if way.endswith("operands") else (x, w)
            cut = zip(a.chunk(ranks, 1), b.chunk(ranks, 1), strict=True)
            wrong = sum_of([(a @ b.T).float().bfloat16() for a, b in cut], way).double() - truth
            channel = wrong.square().mean(0).sqrt() / size
            rows.append({
                "input": name,
                "ranks": ranks,
                "sum": way,
                "relative_error": f"{wrong.norm() / truth.norm():.5f}",
                "median_channel": f"{channel.median():.5f}",
                "worst_channel": f"{channel.max():.5f}",
            })  # fmt: skip
    return rows


# --- training


def train(tp: int, arm: str, seed: int) -> dict:
    """One run's row."""
    name = f"tp{tp}_{arm}_{seed}".replace(" ", "_").replace(",", "")
    flags = f"{demo.MODEL} {demo.TRAINING} {demo.STOCK_ONLY} {demo.DATA} {SMALLER} --seed {seed} {ARMS[arm]}"
    flags += f" --tensor-model-parallel-size {tp}"
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    log = ROOT / f"runs/tp_sums/{name}.log"
    began = time.monotonic()
    lines = forked(tp, ["pretrain_gpt_fp8.py", *flags.split()], log, timeout=1800, env=env)
    steps = [step for step in map(parse_step, lines) if step]
    assert len(steps) == STEPS and not any(step.skipped for step in steps)
    (heldout,) = [loss for loss in map(parse_validation, lines) if loss is not None]
    return {
        "tp": tp,
        "arm": arm,
        "seed": seed,
        "heldout_loss": f"{heldout:.5f}",
        "last_50_steps": f"{statistics.mean(step.loss for step in steps[-50:]):.5f}",
        "seconds": f"{time.monotonic() - began:.0f}",
        "commit": commit(),
    }


def train_all(path: Path, seeds: list[int]) -> list[dict]:
    """The rows of all runs; runs that the file already has are not repeated."""
    os.chdir(ROOT)
    if not Path(f"{demo.TEXT}_heldout.idx").exists():
        prepare_data.prepare([], str(demo.TEXT), prepare_data.Bytes(), held_out=demo.HELD_OUT)
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    done = {(int(row["tp"]), row["arm"], int(row["seed"])) for row in rows}
    for seed in seeds:
        for tp in SIZES:
            for arm in ARMS:
                if (tp, arm, seed) not in done:
                    rows.append(train(tp, arm, seed))
                    write(path, rows)
                    print(*rows[-1].values(), sep="  ", flush=True)
    return rows


def gaps(rows: list[dict]) -> Iterator[str]:
    """Each arm's held-out loss minus stock's with the same seed."""
    for tp in SIZES:
        loss = {(r["arm"], r["seed"]): float(r["heldout_loss"]) for r in rows if int(r["tp"]) == tp}
        seeds = [seed for arm, seed in loss if arm == "stock BF16"]
        for arm in ARMS:
            found = [loss[arm, s] - loss["stock BF16", s] for s in seeds if (arm, s) in loss]
            mean = statistics.mean(loss[arm, s] for s in seeds if (arm, s) in loss)
            yield f"TP {tp}  {arm:14} {mean:.4f}  " + "  ".join(f"{gap:+.4f}" for gap in found)


def write(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["error", "train"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    args = parser.parse_args()
    path = RESULTS / f"tp_sums_{args.what}.csv"
    if args.what == "error":
        write(path, rows := errors())
        for row in rows:
            print(*row.values(), sep="  ")
    else:
        print(*gaps(train_all(path, args.seeds)), sep="\n")


if __name__ == "__main__":
    main()
