"""FP8-LM's Table 6: which optimizer states tolerate few bits?  The same GPT trained with each, beside our levels.

    python benchmarks/table6.py                              # 16 runs a seed; finished ones are not repeated
    python benchmarks/table6.py --arms 0 2a O3 --print       # prints each run's command
    python benchmarks/table6.py --arms 0 O3 --steps 10 --csv t6.csv --plot t6.svg        # checks the script

The demo's GPT of 2.6 million parameters and its text, one process, on the CPU. All runs of a seed see the same data and
have the same initial weights (--use-cpu-initialization: drawn in FP32, rounded to BF16 except for #0).  The rate is
constant after a warm-up of a tenth of the steps.  Only the four linears differ; embedding, head and norms, 8 % of the
parameters, are stock's with FP32 masters in every arm.

Why 1e-5.  Rounding to nearest loses a change below half an ulp. For 2^k <= |w| < 2^(k+1) that is 2^(k - bits), with 11
bits for FP16, 8 for BF16 and 4 for E4M3.  So a change reaches the weights |w| < 2^(floor(log2(change) + bits) + 1).
Adam changes a weight by lr a step if gradients agree, and by lr * sqrt((1 - beta1) / (1 + beta1)) = 0.23 lr, rms, if
they are noise.  Weights start as N(0, 0.02^2) (proj and fc2: 0.02 / sqrt(6)). The share of them that is reached:

    lr      gradients      FP16     BF16     E4M3
    1e-5    agree          88 %     16 %      1 %
    1e-5    are noise      30 %      4 %    0.2 %
    1e-3    agree         100 %    100 %     88 %
    1e-3    are noise     100 %    100 %     16 %

At 1e-5, masters in BF16 and E4M3 almost stand still, and FP16 begins to; at 1e-3 only E4M3 is in trouble.  A remainder
loses changes below 2^-20 of a weight, 2e-8.  Half the rate shifts the table by one bit.
"""

import argparse
import csv
import math
import sys
from itertools import product
from pathlib import Path

from stamp import ROOT, cpu

# isort: split
import prepare_data
from demo import MODEL, STOCK_ONLY
from launch import RunFailed, parse_step, parse_validation, torchrun
from train_step import stamp

ARMS = {  # name: (flags, formats of GEMMs, master and m + v)
    "0": ("", ("FP32", "FP32", "FP32 + FP32")),
    "1": ("--bf16", ("BF16", "FP32", "FP32 + FP32")),
    "2a": ("--bf16 --fp8-level O3 --fp8-master fp16", ("FP8", "FP16", "FP8 + FP16")),
    "2b": ("--bf16 --fp8-level O3 --fp8-master bf16", ("FP8", "BF16", "FP8 + FP16")),
    "3": ("--bf16 --fp8-level O3 --fp8-master fp8", ("FP8", "FP8", "FP8 + FP16")),
    "4": ("--bf16 --fp8-level O3 --fp8-master fp16 --fp8-exp-avg-sq fp8", ("FP8", "FP16", "FP8 + FP8")),
    "O3": ("--bf16 --fp8-level O3", ("FP8", "E4M3 + remainder", "FP8 + FP16")),
    "O2": ("--bf16 --fp8-level O2", ("FP8", "BF16 + remainder", "FP8 + FP16")),
}
COLORS = dict(zip(ARMS, ("0.6", "black", "C0", "C1", "C3", "C4", "C2", "C9"), strict=True))
FOLDER = Path("runs/table6")  # in the repository
DATA = FOLDER / "data/stdlib"
TRAINING = (
    "--micro-batch-size 8 --global-batch-size 16 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1.0 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --use-cpu-initialization --log-interval 1 --eval-iters 40 --num-workers 0 "
    f"--train-data-path {DATA}_train --valid-data-path {DATA}_heldout --tokenizer-type NullTokenizer --vocab-size 257"
)
BITS = {"FP16": 11, "BF16": 8, "E4M3": 4}  # significant bits
SMOOTH = 8  # steps, for the distance in the figure

Key = tuple[str, float, int]  # arm, learning rate, seed
Curve = tuple[list[float], float]  # training loss of every step, held-out loss


def shown(arm: str) -> str:
    """An arm's name in the table; the paper's are numbers, such as #2a."""
    return f"#{arm}" if arm[0].isdigit() else arm


def reached(change: float, bits: int) -> float:
    """Share of weights N(0, 0.02^2), stored with `bits` significant bits, that a change reaches."""
    below = 2.0 ** (math.floor(math.log2(change) + bits) + 1)
    return math.erf(below / 0.02 / math.sqrt(2))


def flags(key: Key, steps: int) -> list[str]:
    """The flags of one run."""
    arm, lr, seed = key
    own = f"--train-iters {steps} --lr-warmup-iters {steps // 10} --eval-interval {steps + 1} --lr {lr:g} --seed {seed}"
    return f"{MODEL} {TRAINING} {STOCK_ONLY} {own} {ARMS[arm][0]}".split()


def train(key: Key, args) -> Curve:
    """Do one run. Raises RunFailed."""
    log = ROOT / FOLDER / "{}-{:g}-{}.log".format(*key)
    env = {"CUDA_VISIBLE_DEVICES": ""}  # --use-cpu-initialization leaves Megatron 0.19.2's model on the CPU
    lines = torchrun(1, ["pretrain_gpt_fp8.py", *flags(key, args.steps)], log, timeout=args.timeout, env=env)
    heldout = [loss for loss in map(parse_validation, lines) if loss is not None]
    return [step.loss for step in map(parse_step, lines) if step], heldout[0]


def read(path: Path, steps: int) -> dict[Key, Curve]:
    """The finished runs of this number of steps."""
    runs: dict[Key, Curve] = {}
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if int(row["steps"]) == steps:
                    key = row["arm"], float(row["lr"]), int(row["seed"])
                    losses, _ = runs.get(key, ([], 0.0))
                    runs[key] = [*losses, float(row["loss"])], float(row["heldout"] or "nan")
    return runs


def write(path: Path, key: Key, steps: int, curve: Curve) -> None:
    """Append a run: a row for each step, with the held-out loss in the last."""
    losses, heldout = curve
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(["commit", "machine", "steps", "arm", "lr", "seed", "step", "loss", "heldout"])
        for i, loss in enumerate(losses, 1):
            last = f"{heldout:.6f}" if i == len(losses) else ""
            writer.writerow([stamp()["commit"], cpu(), steps, *key, i, f"{loss:.6f}", last])


def distance(runs: dict[Key, Curve], key: Key) -> float:
    """Held-out loss minus that of #0 with the same rate and seed; NaN if one is missing."""
    reference = ("0", *key[1:])
    return runs[key][1] - runs[reference][1] if {key, reference} <= runs.keys() else math.nan


def table(runs: dict[Key, Curve], args) -> list[str]:
    """Markdown: each seed's held-out loss and, in brackets, its distance from #0."""

    def cell(key: Key) -> str:
        return f"{runs[key][1]:.4f} ({distance(runs, key):+.4f})" if key in runs else "-"

    head = ["arm", "GEMM", "master", "m + v", *(f"lr {lr:g}, seed {seed}" for lr in args.lr for seed in args.seeds)]
    rows = [head, ["---"] * len(head)]
    for arm in args.arms:
        rows.append([shown(arm), *ARMS[arm][1], *(cell((arm, lr, seed)) for lr in args.lr for seed in args.seeds)])
    return ["| " + " | ".join(row) + " |" for row in rows]


def plot(runs: dict[Key, Curve], args) -> None:
    """A column for each learning rate: training loss of the first seed; below, all seeds' distance from #0."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = len(args.lr)
    figure, axes = plt.subplots(2, columns, sharex=True, squeeze=False, figsize=(5 * columns, 7), layout="constrained")
    for (above, below), lr in zip(axes.T, args.lr, strict=True):
        for arm, seed in product(args.arms, args.seeds):
            if (arm, lr, seed) not in runs:
                continue
            losses = runs[arm, lr, seed][0]
            if seed == args.seeds[0]:
                above.plot(range(1, len(losses) + 1), losses, color=COLORS[arm], label=shown(arm), linewidth=1)
            reference = runs.get(("0", lr, seed), ([], 0.0))[0]
            gaps = [a - b for a, b in zip(losses, reference, strict=False)]
            means = [sum(gaps[i : i + SMOOTH]) / SMOOTH for i in range(len(gaps) - SMOOTH + 1)]
            below.plot([i + (SMOOTH + 1) / 2 for i in range(len(means))], means, color=COLORS[arm], linewidth=1)
        above.set(title=f"learning rate {lr:g}", ylabel="training loss (nats a byte)")
        below.set(xlabel="step", ylabel=f"distance from #0, mean of {SMOOTH} steps")
        below.set_yscale("symlog", linthresh=0.01)
        above.legend(ncols=2)
        for axis in (above, below):
            axis.grid(alpha=0.3)
    figure.savefig(args.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-5, 1e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one run")
    parser.add_argument("--csv", default=str(ROOT / "benchmarks/results/table6.csv"))
    parser.add_argument("--plot", default=str(ROOT / "docs/figures/table6.svg"))
    parser.add_argument("--print", action="store_true", help="only print each run's command")
    args = parser.parse_args()
    jobs = [(arm, lr, seed) for seed, lr, arm in product(args.seeds, args.lr, args.arms)]
    if args.print:
        for job in jobs:
            print("torchrun --standalone --nproc-per-node 1 pretrain_gpt_fp8.py", *flags(job, args.steps), end="\n\n")
        return
    if not (ROOT / f"{DATA}_heldout.idx").exists():
        prepare_data.prepare([], str(ROOT / DATA), prepare_data.Bytes())

    results = Path(args.csv)
    runs = read(results, args.steps)
    failed = False
    for job in jobs:
        if job in runs:
            continue
        try:
            runs[job] = train(job, args)
        except RunFailed as failure:
            failed = True
            print(f"{job}: {failure}", flush=True)
            continue
        write(results, job, args.steps, runs[job])
        print("arm {}, lr {:g}, seed {}:".format(*job), f"held-out loss {runs[job][1]:.4f}", flush=True)

    print(f"\nHeld-out loss after {args.steps} steps, nats a byte (distance from #0)\n")
    print(*table(runs, args), sep="\n")
    print("\nShare of weights that a step reaches, if gradients agree / are noise:")
    noise = math.sqrt((1 - 0.9) / (1 + 0.9))
    for lr in args.lr:
        shares = (f"{name} {reached(lr, b):.1%} / {reached(noise * lr, b):.1%}" for name, b in BITS.items())
        print(f"  lr {lr:g}:", ", ".join(shares))
    plot(runs, args)
    sys.exit(failed)


if __name__ == "__main__":
    main()
