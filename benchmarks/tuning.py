"""Post-training side by side: SFT, DPO, LoRA and PPO's four models, of stock BF16, Transformer Engine FP8, our levels.

    python benchmarks/tuning.py --te-path DIR --layers 32 --csv benchmarks/results/tuning.csv
    python benchmarks/tuning.py --te-path DIR --layers 8 --arms sft:O3 sft:bf16-repaired dpo:O3 --mbs sft:O3=4
    python benchmarks/tuning.py --shape tiny --arms sft:O3 dpo:O3 dpo-file:O3 lora:O3 ppo:O3     # any machine

An arm is TASK:SYSTEM. Systems are train_step.py's; those of stock and of Transformer Engine need --te-path, because
stock has packed attention only through it. The tasks:

    sft        packed conversations, pretrain_gpt_fp8.py --sft
    dpo        pairs, dpo_gpt_fp8.py, with the reference on the device
    dpo-file   the same with the reference's scores from a file, which a process of its own writes first
    lora       SFT of adapters of rank 16 beside frozen linears (examples/lora.py)
    ppo        no training: four_models.py, the memory of policy, critic, reference and reward model

Each arm is a process of its own, one after the other, with a limit in seconds. The data are random tokens in documents
as long as those of chats (token_files.py), the same ones for every arm of a task; a file has as many samples as a run
reads. Unknown flags go to Megatron.

    tokens_s     the file's tokens without padding, at the median of the steps after the first ones
    gb           held after the last step: weights, states, gradients, the reference
    gb_peak      the most in the steps after the first; gb_peak_start: until the end of the first, building included
    outcome      ok, out of memory, failed, or late: cut off at the limit
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import token_files
import train_step
from stamp import ROOT

# isort: split
from launch import RunFailed, torchrun

ARMS = ("sft:O3", "sft:bf16-repaired", "sft:te-delayed", "dpo:O3", "dpo-file:O3", "lora:O3", "lora:bf16-repaired")
TASKS = {"sft": "sft", "dpo": "dpo", "dpo-file": "dpo", "lora": "sft", "ppo": ""}  # and the kind of file
COMMON = (
    "--log-interval 1 --train-iters {iterations} --lr 1e-5 --lr-decay-style constant "
    "--lr-warmup-iters 0 --split 1,0,0 --attention-backend auto "
    "--untie-embeddings-and-output-weights --position-embedding-type rope"
)
OF_TASK = {
    "sft": "--sft",
    "lora": "--sft --lr 1e-4",
    "dpo": "--hidden-dropout 0 --lr 5e-7 --dpo-beta 0.1",
    "dpo-file": "--hidden-dropout 0 --lr 5e-7 --dpo-beta 0.1",
}
FIGURES = ("ms", "ms_min", "ms_max", "tokens_s", "gb", "gb_peak", "gb_peak_start", "loss", "seconds", "outcome")
COLUMNS = ["gpu", "torch", "commit", "date", "shape", "layers", "seq", "gbs", "filled", "task", "system", "te", "mbs"]
COLUMNS += [*FIGURES, "steps_ms", "note"]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. `args.mbs` has every arm's micro-batch, `args.extra` flags for Megatron."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arms", nargs="+", default=ARMS, metavar="TASK:SYSTEM", help=f"tasks: {', '.join(TASKS)}")
    parser.add_argument("--shape", choices=train_step.SHAPES, default="7b")
    parser.add_argument("--layers", type=int, help="layers (default: the shape's)")
    parser.add_argument("--seq", type=int, help="tokens of a sample (default: the shape's)")
    parser.add_argument("--gbs", type=int, help="samples of a step (default: the shape's)")
    parser.add_argument("--mbs", nargs="+", default=[], metavar="ARM=N", help="samples of a micro-batch (default: 1)")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not timed")
    parser.add_argument("--timeout", type=int, default=240, help="seconds for a process")
    parser.add_argument("--seed", type=int, default=1, help="of the data")
    parser.add_argument("--te-path", default="", help="folder with Transformer Engine")
    parser.add_argument("--csv", help="append the figures to this file")
    parser.add_argument("--logs", help="keep each process' log in this folder")
    args, args.extra = parser.parse_known_args(argv)
    args.te_path = args.te_path and str(Path(args.te_path).resolve())  # a run's folder is the repository
    if args.warmup < 2 or args.iterations <= args.warmup:
        parser.error(f"--warmup {args.warmup}: at least 2, and less than --iterations {args.iterations}")
    for arm in args.arms:
        task, _, system = arm.partition(":")
        if task not in TASKS or system not in train_step.SYSTEMS or (task == "ppo" and system not in ("O3", "bf16")):
            parser.error(f"--arms {arm}: TASK:SYSTEM is meant; tasks are {', '.join(TASKS)}, systems train_step.py's; "
                         "ppo has O3 and bf16")  # fmt: skip
    chosen, args.mbs = args.mbs, dict.fromkeys(args.arms, 1)
    for choice in chosen:
        arm, _, number = choice.rpartition("=")
        if arm not in args.mbs or not number.isdecimal():
            parser.error(f"--mbs {choice}: ARM=N is meant, and an arm of --arms")
        args.mbs[arm] = int(number)
    shape = train_step.SHAPES[args.shape]
    args.gbs = args.gbs or shape.gbs
    given = [*train_step.COMMON.split(), *shape.flags.split(), *args.extra]
    args.seq, args.layers = args.seq or last(given, "--seq-length"), args.layers or last(given, "--num-layers")
    args.vocabulary = last(given, "--vocab-size")
    return args


def last(flags: list[str], name: str) -> int:
    """The value of a flag that counts: the last."""
    return int(flags[len(flags) - 1 - flags[::-1].index(name) + 1])


def model_flags(args: argparse.Namespace) -> list[str]:
    """Megatron's flags that all arms share; if a flag is repeated, the last counts."""
    given = [flag for flag in train_step.COMMON.split() if flag != "--mock-data"]
    given += [*train_step.SHAPES[args.shape].flags.split(), *COMMON.format(iterations=args.iterations).split()]
    longest = max(args.seq, last(given, "--max-position-embeddings"))
    given += f"--num-layers {args.layers} --seq-length {args.seq} --max-position-embeddings {longest}".split()
    return [*given, f"--global-batch-size={args.gbs}", *args.extra]


class Files:
    """The files of a run's samples, each written at its first use. filled: {kind: the part that is not padding}."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        self._folder, self._args, self.filled = folder, args, {}

    def path(self, kind: str) -> str:
        path, args = self._folder / f"{kind}.jsonl", self._args
        if kind not in self.filled:
            of_pairs, lines = kind == "dpo", args.gbs * args.iterations
            draw, count = (token_files.pairs, token_files.size_of_pair) if of_pairs else (
                token_files.conversations, token_files.size)  # fmt: skip
            documents = draw(args.vocabulary - 2, args.seq, args.seed)
            packed = token_files.packed(documents, count, args.seq, lines)
            self.filled[kind] = token_files.write(path, packed, of_pairs) / (lines * args.seq)
        return str(path)


def command_of(arm: str, args: argparse.Namespace, files: Files) -> tuple[list[str], dict[str, str]]:
    """A process' command and its environment."""
    task, _, system = arm.partition(":")
    te, flags, _ = train_step.SYSTEMS[system]
    env = train_step.environment(te, args.te_path)
    if task == "ppo":
        command = [str(ROOT / "benchmarks/four_models.py"), "O0" if system == "bf16" else system]
        sizes = {"--layers": args.layers, "--vocabulary": args.vocabulary, "--seq": args.seq}
        sizes |= {name: last(model_flags(args), name) for name in ("--hidden-size", "--num-attention-heads")}
        return [*command, *(str(word) for size in sizes.items() for word in size)], env
    env |= {"TASK": task.removesuffix("-file"), "PAD": str(args.vocabulary - 2), "END": str(args.vocabulary - 1)}
    command = [str(ROOT / "benchmarks/tuned_gpt.py"), *model_flags(args), f"--micro-batch-size={args.mbs[arm]}"]
    return [*command, *OF_TASK[task].split(), *flags.split(), "--data-path", files.path(TASKS[task])], env


def run(arm: str, args: argparse.Namespace, files: Files, folder: Path) -> dict:
    """An arm's figures. One that fails has what it measured before, and why it failed."""
    task, _, system = arm.partition(":")
    command, env = command_of(arm, args, files)
    log = Path(args.logs or folder) / f"{task}-{system}.log"
    row = {"task": task, "system": system, "te": train_step.SYSTEMS[system].te, "mbs": args.mbs[arm]}
    began, error = time.time(), None
    try:
        if task == "dpo-file":
            scores = str(folder / f"{system}.npz")
            torchrun(1, [*command, "--dpo-score-reference", scores], log, timeout=args.timeout, env=env)
            row["note"] = f"scored in {time.time() - began:.0f} s, start included"
            began = time.time()
            command += ["--dpo-reference-scores", scores]
        torchrun(1, command, log, timeout=args.timeout, env=env)
    except RunFailed as failed:
        error = failed
    text = log.read_text(errors="replace")
    row |= figures(text, args.warmup) | {"outcome": outcome(text, error), "seconds": time.time() - began}
    if row["outcome"] != "ok" and row["outcome"] != "out of memory":
        print(f"{arm}: {error}"[-3000:], flush=True)
    if "ms" in row:
        row["tokens_s"] = args.gbs * args.seq * files.filled[TASKS[task]] / row["ms"] * 1e3
    return row


def outcome(log: str, error: RunFailed | None) -> str:
    if error is None:
        return "ok"
    if "OutOfMemoryError" in log or "out of memory" in log:
        return "out of memory"
    return "late" if str(error).startswith("killed") else "failed"


def figures(log: str, warmup: int) -> dict:
    """What the lines `STEP {...}`, or `MODELS {...}`, and Megatron's log lines say."""
    steps, models = ([json.loads(line[len(word) :]) for line in log.splitlines() if line.startswith(word)]
                     for word in ("STEP ", "MODELS "))  # fmt: skip
    if models:
        built = max(model["gb_peak"] for model in models)
        return models[-1] | {"gb_peak_start": built, "note": json.dumps(models[-1])}
    if not steps:
        return {}
    found = {"gb": steps[-1]["gb"], "gb_peak_start": steps[0]["gb_peak"],
             "gb_peak": max((step["gb_peak"] for step in steps[1:]), default=float("nan")),
             "steps_ms": " ".join(str(step["ms"]) for step in steps)}  # fmt: skip
    if seen := losses(log):
        found["loss"] = seen[-1]
    if timed := [step["ms"] for step in steps[warmup:]]:
        found |= {"ms": statistics.median(timed), "ms_min": min(timed), "ms_max": max(timed)}
    return found


def losses(log: str) -> list[float]:
    """Of the steps that Megatron has logged."""
    lines = (line for line in log.splitlines() if " iteration " in line)
    parts = (part.partition(":") for line in lines for part in line.split("|"))
    return [float(value) for name, _, value in parts if name.strip() in ("lm loss", "dpo loss")]


def line(arm: str, row: dict) -> str:
    """What is printed of an arm."""
    forms = {"ms": ".1f", "tokens_s": ",.0f", "gb": ".1f", "gb_peak": ".1f", "gb_peak_start": ".1f", "loss": ".4f"}
    n = {name: format(row[name], form) if name in row else "-" for name, form in forms.items()}
    said = f"{arm:22} MBS {row['mbs']:2} {n['ms']:>9} ms {n['tokens_s']:>9} tokens/s {n['gb']:>6} GB, peak "
    said += f"{n['gb_peak']}, at the start {n['gb_peak_start']}; loss {n['loss']}  {row['outcome']} "
    return said + f"({row['seconds']:.0f} s) {row.get('note', '')}"


def main() -> None:
    args = arguments()
    train_step.check_columns(args.csv, COLUMNS)
    same = train_step.stamp() | {"shape": " ".join([args.shape, *args.extra]), "layers": args.layers, "seq": args.seq}
    good = True
    with tempfile.TemporaryDirectory() as name:
        files = Files(Path(name), args)
        for arm in args.arms:
            row = run(arm, args, files, Path(name))
            print(line(arm, row), flush=True)
            good &= row["outcome"] == "ok"
            if args.csv:  # at once: the next arm may be the last
                filled = {"gbs": args.gbs, "filled": files.filled.get(TASKS[row["task"]], "")}
                found = {**same, **filled, **row}
                train_step.append(args.csv, COLUMNS, [{key: found.get(key, "") for key in COLUMNS}])
    sys.exit(not good)


if __name__ == "__main__":
    main()
