"""Does the storage of micro-batches' gradients matter to training?  Train the same GPT with each --fp8-grad-accum.

    python benchmarks/grad_storage.py --gpus 4 --csv benchmarks/results/grad_storage.csv \\
        --plot docs/figures/grad_storage.svg
    python benchmarks/grad_storage.py --steps 5 --micro-batches 4 --seeds 1      # any machine, checks the script

A byte-level GPT on the Python standard library's source (tools/prepare_data.py). All runs of a seed have the same
initial weights and data: stock BF16, and O1 with gradients in FP32, BF16 and FP8. They use many micro-batches a step
and one process, so that only the storage differs.  Runs go side by side, spread over the GPUs.  Prints each run's
held-out loss and its difference from O1 with FP32 storage; the CSV has every step's loss.
"""

import argparse
import csv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stamp import ROOT

# isort: split
import prepare_data
from launch import RunFailed, parse_step, parse_validation, torchrun
from train_step import LOCAL, stamp

MODEL = """--num-layers 4 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1408 --seq-length 256
--max-position-embeddings 256 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
--vocab-size 257 --micro-batch-size 2 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --weight-decay 0.1
--clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --log-interval 1 --num-workers 1"""
STOCK = LOCAL + " --no-gradient-accumulation-fusion"
SYSTEMS = {
    "O0": STOCK,
    "O1 fp32": "--fp8-level O1 --fp8-grad-accum fp32",
    "O1 bf16": "--fp8-level O1 --fp8-grad-accum bf16",
    "O1 fp8": "--fp8-level O1 --fp8-grad-accum fp8",
}


def train(system: str, seed: int, gpu: int, args) -> dict:
    """One run: {"system", "seed", "losses" of every step, "heldout"}."""
    data = ROOT / "runs/grad_storage/data/stdlib"
    flags = f"""{MODEL} {SYSTEMS[system]} --seed {seed} --train-iters {args.steps} --lr-warmup-iters {args.steps // 10}
    --global-batch-size {2 * args.micro_batches} --eval-iters 1 --eval-interval {args.steps + 1}
    --train-data-path {data}_train --valid-data-path {data}_heldout"""
    log = ROOT / f"runs/grad_storage/{system.replace(' ', '-')}-{seed}.log"
    env = {"CUDA_VISIBLE_DEVICES": str(gpu) if args.gpus else ""}
    command = ["pretrain_gpt_fp8.py", *flags.split()]
    try:
        lines = torchrun(1, command, log, timeout=args.timeout, env=env)
    except RunFailed as failure:
        print(f"{system}, seed {seed}: {failure}", flush=True)
        lines = log.read_text().splitlines()
    steps = [step for step in map(parse_step, lines) if step]
    heldout = [loss for loss in map(parse_validation, lines) if loss is not None]
    return {
        "system": system,
        "seed": seed,
        "losses": [step.loss for step in steps],
        "heldout": heldout[0] if heldout else float("nan"),
    }


def plot(runs: list[dict], micro_batches: int, path: str) -> None:
    """Each storage's training loss, minus that of FP32 storage with the same seed, as means over eight steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    colors = dict(zip(SYSTEMS, ("tab:gray", "black", "tab:blue", "tab:red"), strict=True))
    reference = {run["seed"]: run["losses"] for run in runs if run["system"] == "O1 fp32"}
    for run in runs:
        first = run["seed"] == runs[0]["seed"]
        label = run["system"] if first else None
        above.plot(run["losses"], color=colors[run["system"]], label=label, linewidth=1)
        gaps = [a - b for a, b in zip(run["losses"], reference[run["seed"]], strict=False)]
        means = [sum(gaps[i : i + 8]) / 8 for i in range(len(gaps) - 7)]
        below.plot(range(4, 4 + len(means)), means, color=colors[run["system"]], linewidth=1)
    above.set(ylabel="training loss (nats a byte)", title=f"{micro_batches} micro-batches a step")
    above.legend()
    below.set(xlabel="step", ylabel="less O1 with FP32 storage", ylim=(-0.02, 0.02))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=0, help="spread the runs over this many GPUs; 0: the CPU")
    parser.add_argument("--runs-at-once", type=int, help="default: all")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--micro-batches", type=int, default=128)
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for one run")
    parser.add_argument("--csv")
    parser.add_argument("--plot")
    args = parser.parse_args()
    prefix = ROOT / "runs/grad_storage/data/stdlib"
    if not Path(f"{prefix}_heldout.idx").exists():
        prepare_data.prepare([], str(prefix), prepare_data.Bytes())

    jobs = [(system, 1234 + seed) for seed in range(args.seeds) for system in SYSTEMS]
    with ThreadPoolExecutor(args.runs_at_once or len(jobs)) as pool:
        started = [pool.submit(train, *job, i % max(args.gpus, 1), args) for i, job in enumerate(jobs)]
        runs = [future.result() for future in started]

    reference = {run["seed"]: run for run in runs if run["system"] == "O1 fp32"}
    print(f"{args.micro_batches} micro-batches a step; held-out loss after {args.steps} steps, nats a byte")
    for run in runs:
        gap = run["heldout"] - reference[run["seed"]]["heldout"]
        last = sum(run["losses"][-10:]) / max(1, len(run["losses"][-10:]))
        name = f"seed {run['seed']}  {run['system']:8}"
        print(f"{name} {run['heldout']:.4f} ({gap:+.4f})  last 10 of {len(run['losses'])} steps: {last:.4f}")
    if args.csv:
        path = Path(args.csv)
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow([*stamp(), "micro_batches", "system", "seed", "heldout", "losses"])
            for run in runs:
                losses = " ".join(f"{loss:.5f}" for loss in run["losses"])
                row = [args.micro_batches, run["system"], run["seed"], run["heldout"], losses]
                writer.writerow([*stamp().values(), *row])
    if args.plot:
        plot(runs, args.micro_batches, args.plot)


if __name__ == "__main__":
    main()
