"""GPT-125M on real text at every level, beside seeds of stock BF16: is a gap more than noise?

    python benchmarks/real_text.py --jobs 7 --csv FILE             a hundred steps: one GPU, two minutes
    python benchmarks/real_text.py --steps 800 --seeds 4 --jobs 8 --arms O0 O3 --timeout 1200 --csv FILE
    python benchmarks/real_text.py --steps 800 --csv FILE --read --plot FIGURE
    python benchmarks/real_text.py --arms O0 O3 --steps 5 --num-layers 2 --hidden-size 64 --num-attention-heads 4

The text is the Python standard library's source, one token a byte. Flags that are not the script's own go to Megatron
and are recorded in the CSV.  The last command runs on any machine.  Runs of one seed have the same initial weights and
see the same batches in the same order.  Two judgements:

    held-out loss     at the end, over the same text, all of it but the last batch. A gap is an arm's minus that of O0's
                      same seed; noise is the spread of O0's seeds
    training loss     minus that of O0's same seed, batch by batch, averaged over the last hundred steps that all have.
                      The text's effect cancels, and the standard error over seeds measures what is left to chance

Runs share the GPU, `--jobs` at a time, so nothing is timed.  A row is written when its run ends. A run that is cut off
keeps its losses, without a held-out one.  Stock's runs in FILE with the same GPU, torch, steps and flags are not
repeated.  The arms with Transformer Engine are stock with its layers and attention: TE with its FP8 (delayed
scaling), "O0, TE" in BF16. The latter differs from O0 only by its kernels, and is far faster.
"""

import argparse
import csv
import math
import os
import shlex
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import train_step
from grad_error import pyplot, save_figure
from stamp import ROOT

# isort: split
import prepare_data
from launch import RunFailed, parse_step, parse_validation, torchrun

from megatron_fp8.tools.palette import looks

TEXT, HELD_OUT = "runs/real_text/data/python", 0.02
CONTEXT, BATCH = 1024, 32
WINDOW = 100  # steps over which training losses are judged
SMOOTHED = 25  # steps in a point of the figure
SEEDS = (1, 2, 3, 4)
ARMS = {
    "O0": "--fp8-level O0",
    "O1": "--fp8-level O1",
    "O2": "--fp8-level O2",
    "O3": "--fp8-level O3",
    "O3 --fp8-lm-head": "--fp8-level O3 --fp8-lm-head",
    "O3 --fp8-activations": "--fp8-level O3 --fp8-activations",
    "O3, all": "--fp8-level O3 --fp8-lm-head --fp8-activations --fp8-grad-accum fp8",
    "TE": f"{train_step.TE_FP8} --fp8-recipe delayed",
    "O0, TE": "--fp8-level O0",
}
BY_DEFAULT = list(ARMS)[:6]
STOCK, WITH_TE = ("O0", "O0, TE"), ("TE", "O0, TE")
NAMES = {"O0": "stock BF16", "O0, TE": "stock BF16 (TE)", "TE": "Transformer Engine"}  # in the figure
MODEL = f"{train_step.SHAPES['125m'].flags} --seq-length {CONTEXT} --max-position-embeddings {CONTEXT} "
TRAINING = (
    f"--micro-batch-size {BATCH // 2} --global-batch-size {BATCH} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 "
    "--use-distributed-optimizer --log-interval 1 --num-workers 0 --init-method-std 0.02 --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion "
    f"--train-data-path {TEXT}_train --valid-data-path {TEXT}_heldout --tokenizer-type NullTokenizer --vocab-size 257 "
)
COLUMNS = ["gpu", "torch", "commit", "date", "steps", "flags", "arm", "seed", "heldout_loss", "last_10_steps", "losses"]
OF_THE_JUDGE = ("--seq-length", "--global-batch-size", "--eval-iters")  # fixed, so that the held-out text is whole


def train(arm: str, seed: int, args: argparse.Namespace) -> dict | None:
    """One run's row; None if it failed before its first step."""
    held_out = prepare_data.samples(f"{TEXT}_heldout", CONTEXT)
    flags = f"{MODEL} {TRAINING} --train-iters {args.steps} --eval-interval {args.steps + 1} "
    flags += f"--lr-warmup-iters {args.steps // 5} --eval-iters {held_out // BATCH} --seed {seed} {ARMS[arm]} "
    env = {}
    if arm in WITH_TE:
        env["PYTHONPATH"] = f"{args.te_path}:{os.environ.get('PYTHONPATH', '')}"
    else:
        flags += train_step.LOCAL
    name = f"{arm}_{seed}".replace(" --", "_").replace(", ", "_")
    log = Path(f"runs/real_text/{name}.log")
    try:
        torchrun(1, ["pretrain_gpt_fp8.py", *flags.split(), *args.extra], log, timeout=args.timeout, env=env)
    except RunFailed as error:
        print(f"{name} failed: {str(error).splitlines()[0]}; its log: {log}", flush=True)
    row = read(arm, seed, log.read_text(errors="replace").splitlines())
    print(f"{arm:22} seed {seed}  held-out loss {(row and row['heldout_loss']) or 'none'}", flush=True)
    return row


def read(arm: str, seed: int, lines: list[str]) -> dict | None:
    """The row of a log; None if it has no step."""
    steps = [step for step in map(parse_step, lines) if step]
    if not steps:
        return None
    if skipped := sum(step.skipped for step in steps):
        print(f"{arm} seed {seed}: {skipped} steps skipped, for a loss or a gradient that is not finite", flush=True)
    heldout = [loss for loss in map(parse_validation, lines) if loss is not None]
    return {
        "arm": arm,
        "seed": seed,
        "heldout_loss": f"{heldout[-1]:.5f}" if heldout else "",
        "last_10_steps": f"{statistics.mean(step.loss for step in steps[-10:]):.5f}",
        "losses": " ".join(f"{step.loss:.4f}" for step in steps),
    }


def gaps(rows: list[dict], reference: str = "O0") -> list[str]:
    """A line for each arm: its gaps of held-out loss, seed by seed, and whether all are within the noise."""
    loss = {(row["arm"], int(row["seed"])): float(row["heldout_loss"]) for row in rows if row["heldout_loss"]}
    stock = {seed: value for (arm, seed), value in loss.items() if arm == reference and math.isfinite(value)}
    if not stock:
        return [f"held-out loss: no run of {reference} that ended to compare with"]
    noise = max(stock.values()) - min(stock.values())
    low, high = min(stock.values()), max(stock.values())
    lines = [f"held-out loss: {reference} {low:.4f} to {high:.4f}, a spread of {noise:.4f}; less {reference}'s:"]
    for arm in ARMS:
        found = [value - stock[seed] for (name, seed), value in loss.items() if name == arm and seed in stock]
        if arm != reference and found:
            place = "inside" if all(abs(gap) <= noise for gap in found) else "OUTSIDE"  # a NaN is outside
            lines.append(f"{arm:22} {'  '.join(f'{gap:+.4f}' for gap in found)}  {place} the noise")
    return lines


def differences(rows: list[dict], reference: str = "O0") -> dict[str, dict[int, list[float]]]:
    """{arm: {seed: the arm's training loss minus the reference's with that seed, step by step, as far as both go}}."""
    losses = {(row["arm"], int(row["seed"])): [float(loss) for loss in row["losses"].split()] for row in rows}
    found: dict[str, dict[int, list[float]]] = {}
    for (arm, seed), of_arm in losses.items():
        stock = losses.get((reference, seed))
        if arm != reference and stock:
            found.setdefault(arm, {})[seed] = [a - b for a, b in zip(of_arm, stock, strict=False)]
    return found


def paired(rows: list[dict], reference: str = "O0") -> list[str]:
    """A line for each arm: its training loss minus the reference's on the same batches, over the last steps that its
    runs and the reference's all have."""
    found = differences(rows, reference)
    lines = [f"training loss less {reference}'s, same batches:"]
    for arm in filter(found.get, ARMS):
        end = min(map(len, found[arm].values()))
        begin = max(end - WINDOW, end // 2)
        each = [statistics.mean(steps[begin:end]) for _, steps in sorted(found[arm].items())]
        error = f" +- {statistics.stdev(each) / len(each) ** 0.5:.4f}" if len(each) > 1 else ""
        shown = "  ".join(f"{gap:+.4f}" for gap in each)
        lines.append(f"{arm:22} {shown}  mean {statistics.mean(each):+.4f}{error}, steps {begin + 1} to {end}")
    return lines if found else [f"training loss: no run of {reference} with an arm's seed to compare with"]


def plot(rows: list[dict], path: Path, reference: str = "O0") -> None:
    """Left: losses of the reference's seeds. Right: each arm's minus those, as mean over seeds with a standard error.
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")

    def smooth(steps: list[float]) -> list[float]:
        return [statistics.mean(steps[i : i + SMOOTHED]) for i in range(0, len(steps) - SMOOTHED + 1, SMOOTHED)]

    def at(points: list) -> list[float]:
        return [(i + 0.5) * SMOOTHED for i in range(len(points))]

    for row in rows:
        if row["arm"] == reference:
            points = smooth([float(loss) for loss in row["losses"].split()])
            left.plot(at(points), points, color="black", linewidth=0.8, label=f"seed {row['seed']}")
    left.set_title(f"{NAMES.get(reference, reference)}: training loss, nats a byte", fontsize=9)
    arms = differences(rows, reference)
    look = looks([reference, *arms])
    for arm, seeds in arms.items():
        curves = list(zip(*map(smooth, seeds.values()), strict=False))
        mean = [statistics.mean(point) for point in curves]
        error = [statistics.stdev(point) / len(point) ** 0.5 if len(point) > 1 else 0.0 for point in curves]
        right.plot(at(mean), mean, **look[arm], linewidth=1, label=f"{arm}, {len(seeds)} seeds")
        low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
        right.fill_between(at(mean), low, high, color=look[arm]["color"], alpha=0.2, linewidth=0)
    right.axhline(0, color="black", linewidth=0.8)
    right.set_yscale("symlog", linthresh=0.01)
    right.set_title(f"less {NAMES.get(reference, reference)}'s, same seed and batches", fontsize=9)
    right.legend()
    for panel in (left, right):
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    save_figure(figure, path)
    plt.close(figure)


def known(path: str | None, same: dict, *, every_arm: bool) -> dict[tuple[str, int], dict]:
    """The file's rows of these steps and flags by (arm, seed), the last of each. Without every_arm: only stock's, with
    this GPU and torch."""
    if not path or not Path(path).exists():
        return {}
    with Path(path).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if every_arm or row["arm"] in STOCK]
    alike = [key for key in ("gpu", "torch", "steps", "flags") if key in same]  # stock is the same at every commit
    return {(row["arm"], int(row["seed"])): row for row in rows if all(row[key] == same[key] for key in alike)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=BY_DEFAULT)
    parser.add_argument("--seeds", type=int, default=2, choices=range(1, 5), help="of each arm; stock has all four")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one run")
    parser.add_argument("--te-path", help="folder with Transformer Engine, for the arm TE")
    parser.add_argument("--csv", type=os.path.abspath, help="append the rows to this file")
    parser.add_argument("--read", action="store_true", help="run nothing: judge the rows of --csv with --steps")
    parser.add_argument("--reference", choices=ARMS, default="O0", help="the arm that the others are compared with")
    parser.add_argument("--plot", type=os.path.abspath, help="draw the training losses, as SVG")
    args, args.extra = parser.parse_known_args()
    if fixed := [word for word in args.extra if word.split("=")[0] in OF_THE_JUDGE]:
        parser.error(f"{fixed[0]}: all runs are judged by the same text in the same batches; leave it")
    if args.read and not args.csv:
        parser.error("--read: name the rows' file by --csv FILE")
    if set(WITH_TE).intersection(args.arms) and not args.te_path and not args.read:
        parser.error("--arms: of those with TE, name Transformer Engine's folder by --te-path DIR")
    os.chdir(ROOT)
    train_step.check_columns(args.csv, COLUMNS)
    same = {"steps": str(args.steps), "flags": shlex.join(args.extra)}
    if not args.read:
        same |= train_step.stamp()
    rows = known(args.csv, same, every_arm=args.read)
    if not args.read:
        if not Path(f"{TEXT}_heldout.idx").exists():
            prepare_data.prepare([], TEXT, prepare_data.Bytes(), held_out=HELD_OUT)
        todo = [(arm, seed) for arm in args.arms for seed in (SEEDS if arm in STOCK else SEEDS[: args.seeds])]

        def one(run: tuple[str, int]) -> None:
            if run not in rows and (row := train(*run, args)):
                rows[run] = row
                if args.csv:
                    with writing:
                        train_step.append(args.csv, COLUMNS, [same | row])

        writing = threading.Lock()
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(one, todo))
    found = [rows[run] for run in sorted(rows, key=lambda run: (list(ARMS).index(run[0]), run[1]))]
    print("\n".join(gaps(found, args.reference) + paired(found, args.reference)))
    if args.plot:
        plot(found, Path(args.plot), args.reference)


if __name__ == "__main__":
    main()
