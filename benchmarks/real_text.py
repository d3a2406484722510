"""GPT-125M for a hundred steps on real text, at every level, beside seeds of stock BF16: is a gap more than noise?

    python benchmarks/real_text.py --jobs 7 --csv FILE             one GPU, two minutes
    python benchmarks/real_text.py --arms O0 O3 --steps 5 --num-layers 2 --hidden-size 64 --num-attention-heads 4

The text is the Python standard library's source, a token a byte; flags that are not the script's own are Megatron's,
and stand in the CSV.  The second command runs on any machine.  Runs of one seed begin with the same weights and see the
same data, and all are judged by the same held-out text, whole but for its last batch.  A gap is an arm's held-out loss
less that of O0's same seed; noise is how far O0's spread.  Runs share the GPU, `--jobs` at a time: nothing is timed.  A
run that fails is told and has no row.
"""

import argparse
import math
import os
import shlex
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import train_step
from stamp import ROOT

# isort: split
import prepare_data
from launch import RunFailed, parse_step, parse_validation, torchrun

TEXT, HELD_OUT = "runs/real_text/data/python", 0.02
CONTEXT, BATCH = 1024, 32
SEEDS = (1, 2, 3, 4)
ARMS = {
    "O0": "--fp8-level O0",
    "O1": "--fp8-level O1",
    "O2": "--fp8-level O2",
    "O3": "--fp8-level O3",
    "O3 --fp8-lm-head": "--fp8-level O3 --fp8-lm-head",
    "O3 --fp8-activations": "--fp8-level O3 --fp8-activations",
}
MODEL = f"{train_step.SHAPES['125m'].flags} --seq-length {CONTEXT} --max-position-embeddings {CONTEXT} "
TRAINING = (
    f"--micro-batch-size {BATCH // 2} --global-batch-size {BATCH} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 "
    "--use-distributed-optimizer --log-interval 1 --num-workers 0 --init-method-std 0.02 --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion "
    f"--train-data-path {TEXT}_train --valid-data-path {TEXT}_heldout --tokenizer-type NullTokenizer --vocab-size 257 "
)
COLUMNS = ["gpu", "torch", "commit", "date", "steps", "flags", "arm", "seed", "heldout_loss", "last_10_steps", "losses"]
OF_THE_JUDGE = ("--seq-length", "--global-batch-size", "--eval-iters")  # as they are, the held-out text is whole


def train(arm: str, seed: int, args: argparse.Namespace) -> dict | None:
    """One run's row; None where it failed."""
    held_out = prepare_data.samples(f"{TEXT}_heldout", CONTEXT)
    flags = f"{MODEL} {TRAINING} {train_step.LOCAL} --train-iters {args.steps} --eval-interval {args.steps + 1} "
    flags += f"--lr-warmup-iters {args.steps // 5} --eval-iters {held_out // BATCH} --seed {seed} {ARMS[arm]}"
    name = f"{arm}_{seed}".replace(" --", "_")
    log = Path(f"runs/real_text/{name}.log")
    try:
        lines = torchrun(1, ["pretrain_gpt_fp8.py", *flags.split(), *args.extra], log, timeout=args.timeout)
    except RunFailed as error:
        print(f"{name} failed: {error}", flush=True)
        return None
    steps = [step for step in map(parse_step, lines) if step]
    if skipped := sum(step.skipped for step in steps):
        print(f"{name}: {skipped} of its steps were skipped, for a loss or a gradient that is not finite", flush=True)
    (heldout,) = [loss for loss in map(parse_validation, lines) if loss is not None]
    print(f"{arm:22} seed {seed}  held-out loss {heldout:.5f}", flush=True)
    return {
        "arm": arm,
        "seed": seed,
        "heldout_loss": f"{heldout:.5f}",
        "last_10_steps": f"{statistics.mean(step.loss for step in steps[-10:]):.5f}",
        "losses": " ".join(f"{step.loss:.4f}" for step in steps),
    }


def gaps(rows: list[dict]) -> list[str]:
    """A line an arm: its gaps, seed by seed, and whether each is inside the noise."""
    loss = {(row["arm"], row["seed"]): float(row["heldout_loss"]) for row in rows}
    stock = {seed: value for (arm, seed), value in loss.items() if arm == "O0" and math.isfinite(value)}
    if not stock:
        return ["no run of O0 to compare with: add O0 to --arms"]
    noise = max(stock.values()) - min(stock.values())
    lines = [f"O0: {len(stock)} seeds spread over {noise:.4f}, {min(stock.values()):.4f} to {max(stock.values()):.4f}"]
    for arm in ARMS:
        found = [value - stock[seed] for (name, seed), value in loss.items() if name == arm and seed in stock]
        if arm != "O0" and found:
            place = "inside" if all(abs(gap) <= noise for gap in found) else "OUTSIDE"  # a NaN is outside
            lines.append(f"{arm:22} {'  '.join(f'{gap:+.4f}' for gap in found)}  {place} the noise")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=2, choices=range(1, 5), help="of each arm; O0 has all four")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one run")
    parser.add_argument("--csv", type=os.path.abspath, help="append the rows to this file")
    args, args.extra = parser.parse_known_args()
    if fixed := [word for word in args.extra if word.split("=")[0] in OF_THE_JUDGE]:
        parser.error(f"{fixed[0]}: all runs are judged by the same text in the same batches; leave it")
    os.chdir(ROOT)
    train_step.check_columns(args.csv, COLUMNS)
    if not Path(f"{TEXT}_heldout.idx").exists():
        prepare_data.prepare([], TEXT, prepare_data.Bytes(), held_out=HELD_OUT)
    todo = [(arm, seed) for arm in args.arms for seed in (SEEDS if arm == "O0" else SEEDS[: args.seeds])]
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = [row for row in pool.map(lambda run: train(*run, args), todo) if row]
    if args.csv:
        same = train_step.stamp() | {"steps": args.steps, "flags": shlex.join(args.extra)}
        train_step.append(args.csv, COLUMNS, [same | row for row in rows])
    print("\n".join(gaps(rows)))


if __name__ == "__main__":
    main()
