"""How much of an answer's log-ratio is FP8's rounding: from the logs of DPO, or from pairs scored twice.

    python benchmarks/preference_noise.py logs --work runs/smollm2 --runs RUNS --csv FILE
    python benchmarks/preference_noise.py score --inputs IN/0 IN/1 --lines 4 --arms BF16 O1 O3

`logs` reads the logs that `smollm2.py run` left in WORK. It prints means over parts of the runs. Of DPO: an answer's
mean absolute log-ratio, nats, and the share of right pairs; each step has its own batch. DPO begins at zero with equal
models. So as long as half of the pairs are right, the log-ratio is noise. Of SFT: the loss less O0's of the same seed,
which has the same batches. A row's GPU, versions, commit and date are those of its run, from RUNS, the CSV that
`smollm2.py run` wrote.

`score` needs no training. IN/0 and IN/1 are what `smollm2.py build` makes. Each arm scores the same held-out pairs
twice, with dpo_gpt_fp8.py --dpo-score-reference: with the model's weights, and with all linears' weights moved by
--step up or down at random, as Adam's first step moves them. A moved weight is rounded to BF16 up or down at random, so
that on average it moves by the step. The same moved model serves all arms. If GEMMs are in BF16, the scores differ by
what the move does, and by BF16's rounding. In FP8 they differ by FP8's rounding too: a small change of an activation
takes some of its elements to another FP8 number, and some layers later the rounding errors of the two models are as
good as independent.

A run that scores has no amax history, so it casts with scales of the tensor's own amax, and nothing clips. Unknown
flags go to Megatron.

    answer      mean |difference of log p| of an answer, nats: `abs log-ratio` of DPO's log
    a token     the root of the mean square of a token's share: sqrt(sum of squares / sum of tokens)
    margin      the standard deviation of the difference chosen minus rejected, nats; DPO's log has it times beta
    log p       mean log p of a token
"""

import argparse
import math
import shlex
import shutil
import statistics
import sys
import time
from pathlib import Path

import function_pairs
import numpy as np
import smollm2
import token_files
import train_step
from carried_model import one_of
from stamp import ROOT

# isort: split
from launch import RunFailed, parse_step, torchrun

_EMULATED = "--fp8-level O1 --fp8-gemm bf16 --fp8-emulate"
ARMS = {
    "BF16": "--fp8-level O1 --fp8-gemm bf16",
    "O1": "--fp8-level O1",
    "O3": "--fp8-level O3",
    "weights": f"{_EMULATED} weight=E4M3:nearest:tensor",
    "activations": f"{_EMULATED} activation=E4M3:nearest:tensor",
    "O1, fc2 in BF16": "--fp8-level O1 --fp8-bf16-layers *.linear_fc2",
    "O1, first and last in BF16": "--fp8-level O1 --first-last-layers-bf16",
    "O1 and head": "--fp8-level O1 --fp8-lm-head",
}
PARTS = {  # steps; the rate rises until step 21 of SFT, and 35 of DPO
    "sft": ((4, 10), (11, 21), (22, 45), (46, 105), (106, 210)),
    "dpo": ((4, 20), (21, 36), (90, 110), (200, 220), (340, 357)),
}
LOGGED = {"loss": "{task} loss", "log_ratio": "abs log-ratio", "accuracy": "accuracy"}
STAMP = ["gpu", "torch", "commit", "date"]
LOG_COLUMNS = [*STAMP, "arm", "seed", "stage", "first", "last", *LOGGED]
MEANS = ["answer", "a token", "margin", "log p"]
COLUMNS = [*STAMP, "arm", "step", "lines", "flags", "answers", *MEANS]


def moved_model(folder: Path, out: Path, step: float, seed: int) -> None:
    """Write a Hugging Face folder whose linears' weights are `step` from those of `folder`, up or down at random."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    tensors, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name, weight in tensors.items():
        if "_proj" not in name:
            continue
        up = torch.randint(2, weight.shape, generator=random) * 2 - 1
        bits = (weight.float() + step * up).view(torch.int32)
        bits += torch.randint(1 << 16, weight.shape, generator=random, dtype=torch.int32)  # carries in proportion
        tensors[name] = (bits >> 16 << 16).view(torch.float32).bfloat16()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def models(args: argparse.Namespace) -> tuple[list[Path], list[str]]:
    """(The checkpoints of the model and of the moved one, the model's flags), made at the first use."""
    from megatron_fp8.checkpoint import convert

    base, flags = smollm2.converted(args.inputs, args.work)
    moved = args.work / f"moved_{args.step:g}_{args.seed}"
    if not moved.exists():
        folder = args.work / "hf_moved"
        shutil.rmtree(folder, ignore_errors=True)
        moved_model(args.work / "hf", folder, args.step, args.seed)
        convert.to_megatron(str(folder), str(moved))
    return [base, moved], flags


def scored(arm: str, which: Path, file: Path, flags: list[str], args: argparse.Namespace) -> np.ndarray:
    """log p (answers,) FP32 of a checkpoint, in the order of the samples' keys. Raises RunFailed."""
    name = smollm2.folder_of(f"{arm}_{which.name}")
    out = args.work / f"{name}.npz"
    out.unlink(missing_ok=True)
    words = [*flags, *smollm2.TRAINING.split(), *smollm2.RATES["dpo"].split(), *f"--lr 1e-6 --train-iters 1 "
             f"--seq-length {args.seq} --micro-batch-size 1 --global-batch-size 1 --eval-iters 0 --eval-interval 10 "
             f"--train-data-path {file} --pretrained-checkpoint {which} --dpo-score-reference {out}".split(),
             *shlex.split(ARMS[arm]), *args.extra]  # fmt: skip
    env = train_step.environment("none", "") | {"TASK": "dpo", "PAD": str(smollm2.PAD), "END": str(smollm2.END)}
    torchrun(1, [str(ROOT / "benchmarks/tuned_gpt.py"), *words], args.work / f"{name}.log", timeout=args.seconds,
             env=env)  # fmt: skip
    with np.load(out) as found:
        return found["logp"]


def compared(one: np.ndarray, other: np.ndarray, tokens: int) -> dict[str, float]:
    """The columns at the top. one, other (answers,), chosen and rejected in turn; tokens: of all answers."""
    change = (other - one).astype(np.float64)
    return {"answer": np.abs(change).mean(), "a token": math.sqrt((change**2).sum() / tokens),
            "margin": (change[0::2] - change[1::2]).std(), "log p": one.sum(dtype=np.float64) / tokens}  # fmt: skip


def parts_of(log: str, stage: str) -> list[dict]:
    """Columns from `stage` on, of each part that a stage's log has whole: means of its steps."""
    names = {column: name.format(task="lm" if stage == "sft" else stage) for column, name in LOGGED.items()}
    logged, found = {}, []
    for line in log.splitlines():
        if (step := parse_step(line)) is not None:
            cells = (cell.partition(":") for cell in line.split("|"))
            logged[step.iteration] = {name.strip(): value for name, _, value in cells}
    for first, last in PARTS[stage]:
        steps = [logged.get(step, {}) for step in range(first, last + 1)]
        means = {column: f"{statistics.mean(float(step[name]) for step in steps):.5f}"
                 for column, name in names.items() if all(name in step for step in steps)}  # fmt: skip
        if means:
            found.append({"stage": stage, "first": first, "last": last} | means)
    return found


def tables(rows: list[dict]) -> list[str]:
    """Lines of a Markdown table of each stage: an arm a row, the mean of its seeds."""
    lines = []
    for stage, parts in PARTS.items():
        lines.append(f"| {stage} | " + " | ".join(f"steps {first} to {last}" for first, last in parts) + " |")
        lines.append("|---" * (1 + len(parts)) + "|")
        for arm in (arm for arm in smollm2.ARMS if any(row["arm"] == arm for row in rows)):
            cells = [arm]
            for first, _ in parts:
                part = [row for row in rows if (row["stage"], int(row["first"])) == (stage, first)]
                mine = [row for row in part if row["arm"] == arm]
                stock = {row["seed"]: float(row["loss"]) for row in part if row["arm"] == "O0"}
                more = [float(row["loss"]) - stock[row["seed"]] for row in mine if row["seed"] in stock]
                if stage == "dpo" and mine:
                    ratio, right = ([float(row[column]) for row in mine] for column in ("log_ratio", "accuracy"))
                    cells.append(f"{statistics.mean(ratio):.2f}, {statistics.mean(right):.3f}")
                else:
                    cells.append(f"{statistics.mean(more):+.3f}" if more else "-")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def read_logs(args: argparse.Namespace) -> None:
    rows, runs = [], smollm2.read(args.runs) if args.csv else []
    made = {(row["arm"], row["seed"], row["stage"]): {name: row[name] for name in STAMP} for row in runs}
    for arm in smollm2.ARMS:
        for log in sorted(args.work.glob(f"{smollm2.folder_of(arm)}_[0-9]*/*.log")):
            if log.stem in PARTS:
                where = {"arm": arm, "seed": log.parent.name.rpartition("_")[2]}
                if args.csv:
                    if (key := (arm, where["seed"], log.stem)) not in made:
                        raise ValueError(f"--runs {args.runs}: has no row of {log}; name the CSV of these runs")
                    where |= made[key]
                rows += [where | part for part in parts_of(log.read_text(errors="replace"), log.stem)]
    print("\n".join(tables(rows)))
    if args.csv:
        train_step.check_columns(str(args.csv), LOG_COLUMNS)
        train_step.append(str(args.csv), LOG_COLUMNS, [{key: row.get(key, "") for key in LOG_COLUMNS} for row in rows])


def measure(args: argparse.Namespace) -> None:
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    found = function_pairs.Documents.load(one_of(args.inputs, smollm2.DATA))
    lines = smollm2.lines_of(found, "dpo", True, 0, args.seq)[: args.lines]
    file = args.work / f"pairs_{args.lines}_{args.seq}.jsonl"
    token_files.write(file, lines, True)
    tokens = sum(len(pair[one][1]["content"].split()) for line in lines for pair in line
                 for one in ("chosen", "rejected"))  # fmt: skip
    checkpoints, flags = models(args)
    if args.csv:
        train_step.check_columns(str(args.csv), [*COLUMNS])
    print("| arm | answers | answer | a token | margin | log p |\n|---|---|---|---|---|---|", flush=True)
    for arm in args.arms:
        began = time.monotonic()
        try:
            one, other = (scored(arm, which, file, flags, args) for which in checkpoints)
        except RunFailed as error:
            print(f"{arm}: {error}"[-2500:], flush=True)
            continue
        row = compared(one, other, tokens)
        said = " | ".join(f"{row[name]:.4f}" for name in MEANS)
        print(f"| {arm} | {len(one)} | {said} |", flush=True)
        print(f"{arm}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if args.csv:
            row |= train_step.stamp() | {"arm": arm, "step": f"{args.step:g}", "lines": len(lines)}
            row |= {"flags": " ".join(args.extra), "answers": len(one)}
            train_step.append(str(args.csv), COLUMNS, [row])


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("logs", help="read DPO's logs")
    verb.add_argument("--work", type=Path, default=Path("runs/smollm2"), help="that of smollm2.py run")
    verb.add_argument("--runs", type=Path, help="what smollm2.py run wrote as its --csv; --csv needs it")
    verb.add_argument("--csv", type=Path)
    verb = verbs.add_parser("score", help="score pairs with two models that are nearly equal")
    verb.add_argument("--inputs", type=Path, nargs="+", required=True, help="the folders that smollm2.py made")
    verb.add_argument("--work", type=Path, default=Path("runs/preference_noise"), help="checkpoints, scores and logs")
    verb.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    verb.add_argument("--step", type=float, default=1e-5, help="how far each weight is moved")
    verb.add_argument("--seed", type=int, default=1, help="of the moves' signs")
    verb.add_argument("--lines", type=int, default=8, help="packed lines of pairs")
    verb.add_argument("--seq", type=int, default=2048)
    verb.add_argument("--seconds", type=float, default=600, help="until a run is ended")
    verb.add_argument("--csv", type=Path)
    args, args.extra = parser.parse_known_args(argv)
    if args.verb == "logs" and args.extra:
        parser.error(f"unrecognized arguments: {' '.join(args.extra)}")
    if args.verb == "logs" and args.csv and not args.runs:
        parser.error("--csv: the rows' GPU and commit are in another file; add --runs, the CSV of smollm2.py run")
    return args


def main() -> None:
    args = arguments()
    try:
        {"logs": read_logs, "score": measure}[args.verb](args)
    except (ValueError, FileExistsError) as error:
        sys.exit(f"preference_noise: {error}")


if __name__ == "__main__":
    main()
