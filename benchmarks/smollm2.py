"""SmolLM2-135M-Instruct tuned at every level: SFT, then DPO, on Python's standard library; held-out loss and accuracy.

    python tools/gguf_to_hf.py SmolLM2-135M-Instruct.Q4_1.gguf HF
    python benchmarks/smollm2.py build --hf HF --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out IN
    python benchmarks/smollm2.py run --inputs IN/0 IN/1 --te-path DIR --jobs 6 --minutes 9 --csv FILE
    python benchmarks/smollm2.py report --csv FILE

`build` makes all that `run` needs, so that the GPU's machine needs neither a network nor a tokenizer: tokens of
functions and of the same with a mistake (function_pairs.py), and the model in its four bits, cut into parts to carry
(carried_model.py). It needs the packages gguf and tokenizers.

A unit of `run` is an arm and a seed: SFT from the converted checkpoint, then DPO from its result, with the reference on
the device. Both have three epochs, and are evaluated once at the end, on functions of other files. In FP8 that
evaluation rounds too, and a log-ratio has noise (preference_noise.py). So `sft judged` evaluates SFT's weights, and
`judged` DPO's against SFT's, once more with BF16 GEMMs, alike for all arms. They read weights as they were saved: O1's
and O2's in BF16, O3's on their E4M3 numbers. Units run side by side (--jobs on --gpus), so nothing is timed. Finished
stages in the CSV are not repeated; one whose weights a later stage needs, and WORK has no more, is made again. After
--minutes what runs is ended; it has no row then.

The seed changes the order of the data, and the noise of rounding. Arms: the levels (O0 needs --te-path: stock has
packed attention only through Transformer Engine), O3 with the paper's FP16 master, O1 and O2 with masters that begin on
the numbers of the file, as stock's do, and O3 with other scales of its GEMMs' inputs, or with BF16 GEMMs. With `--until
sft` a unit ends after SFT, and keeps its weights in WORK for a call that goes on. Unknown flags go to Megatron.

    heldout_loss   SFT: nats a token of the answers
    accuracy       DPO, judged: share of pairs with a margin above 0, half of those at 0; `report` has Wilson's interval
    share          of Adam's update what the linears' masters took (tuned_gpt.py)
    shown          of the masters' way what the weights show that GEMMs read
"""

import argparse
import csv
import itertools
import json
import math
import queue
import random
import shlex
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import function_pairs
import numpy as np
import token_files
import train_step
from carried_model import CONFIG, one_of, pack_model, unpack_model
from stamp import ROOT
from tuning import losses

# isort: split
import prepare_sft
from launch import RunFailed, torchrun

ARMS = {
    "O0": "--fp8-level O0 --dist-ckpt-strictness log_unexpected",  # Transformer Engine's attention has an empty state
    "O1": "--fp8-level O1",
    "O2": "--fp8-level O2",
    "O3": "--fp8-level O3",
    "O3, FP16 master": "--fp8-level O3 --fp8-master fp16",
    "O1, masters as loaded": "--fp8-level O1 --fp8-masters-as-loaded",
    "O2, masters as loaded": "--fp8-level O2 --fp8-masters-as-loaded",
    "O3, margin 1": "--fp8-level O3 --fp8-margin 1",
    "O3, margin 2": "--fp8-level O3 --fp8-margin 2",
    "O3, tensorwise": "--fp8-level O3 --fp8-recipe tensorwise",
    "O3, BF16 GEMMs": "--fp8-level O3 --fp8-gemm bf16",
}
STAGES = "sft", "sft judged", "dpo", "judged"
JUDGE = "--fp8-level O1 --fp8-gemm bf16 --skip-train --no-load-optim --no-load-rng"
PAD, START, END = 0, 1, 2  # <|endoftext|>, <|im_start|>, <|im_end|>
DATA = "functions.npz"
TRAINING = (
    "--bf16 --use-distributed-optimizer --weight-decay 0 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --sft "
    "--attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss --attention-backend auto --log-interval 1 "
    "--num-workers 0 --tokenizer-type NullTokenizer --no-save-optim --no-save-rng --distributed-timeout-minutes 5"
)
RATES = {"sft": "--lr-decay-style linear --min-lr 0", "dpo": "--lr-decay-style constant --dpo-beta 0.1"}
COLUMNS = ["gpu", "torch", "commit", "date", "arm", "seed", "stage", "lr", "steps", "batch", "seq", "flags"]
COLUMNS += ["heldout_loss", "accuracy", "counted", "margin", "kl", "log_ratio", "share", "shown"]
COLUMNS += ["first_loss", "last_loss"]
SAME = ("arm", "seed", "stage", "lr", "steps", "batch", "seq", "flags")  # what makes a row the one that is wanted


# --- the data


def chat(module: str, prompt: str) -> tuple[str, str]:
    """What stands before and after an answer, in SmolLM2's chat template."""
    before = "<|im_start|>system\nYou write Python.<|im_end|>\n<|im_start|>user\n"
    before += f"Write the body of this function of the module {module}.\n\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return before, "<|im_end|>\n"


def encoder(tokenizer: str):
    """A function from a text to its tokens. tokenizer: a tokenizer.json, or "bytes": a byte's number and 3."""
    if tokenizer == "bytes":
        return lambda text: [byte + 3 for byte in text.encode()]
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(tokenizer)
    return lambda text: read.encode(text, add_special_tokens=False).ids


def build(args: argparse.Namespace) -> None:
    out = args.out
    out.mkdir(parents=True)
    (out / "0").mkdir()
    turn = chat if args.tokenizer != "bytes" else lambda module, prompt: (f"{module}\n{prompt}", "\n")
    encode = encoder(args.tokenizer or str(args.hf / "tokenizer.json"))
    found = function_pairs.documents(function_pairs.functions(args.source), encode, turn, args.most)
    found.save(out / "0" / DATA)
    shutil.copy(args.hf / CONFIG, out / "0" / CONFIG)
    pack_model(args.hf, args.gguf, out, args.parts)
    pairs = np.array([len(ids) > 0 for ids in found.rejected])
    for word, kept in (("training", ~found.held_out), ("held out", found.held_out)):
        tokens = sum(len(p) + len(c) for p, c, k in zip(found.prompts, found.chosen, kept, strict=True) if k)
        print(f"{word}: {kept.sum():,} functions, {tokens:,} tokens, {(kept & pairs).sum():,} pairs")
    for part in sorted(out.iterdir()):
        size = sum(file.stat().st_size for file in part.iterdir())
        print(f"{part}: {size / 2**20:.1f} MiB")


def words(ids: np.ndarray) -> str:
    return " ".join(map(str, ids.tolist()))


def lines_of(found: function_pairs.Documents, stage: str, held_out: bool, seed: int, length: int) -> list[list]:
    """Packed lines of a stage's file, in an order of the seed."""
    lines = []
    for prompt, chosen, rejected, out in zip(*vars(found).values(), strict=True):
        if bool(out) != held_out or (stage == "dpo" and not len(rejected)):
            continue
        asked = {"role": "system", "content": words(prompt)}
        said = [[asked, {"role": "assistant", "content": words(ids)}] for ids in (chosen, rejected)]
        lines.append(dict(zip(("chosen", "rejected"), said, strict=True)) if stage == "dpo" else said[0])
    random.Random(seed).shuffle(lines)
    count = token_files.size_of_pair if stage == "dpo" else token_files.size
    return prepare_sft.pack(lines, count, length)


# --- the runs


def converted(inputs: list[Path], work: Path) -> tuple[Path, list[str]]:
    """(The checkpoint that all begin with, made at the first use, the model's flags)."""
    from megatron_fp8.checkpoint import convert
    from megatron_fp8.checkpoint.hf.config import args_of, flags_of

    base = work / "base"
    if not base.exists():
        folder = work / "hf"
        shutil.rmtree(folder, ignore_errors=True)
        unpack_model(inputs, folder)
        convert.to_megatron(str(folder), str(base))
    config = json.loads(one_of(inputs, CONFIG).read_text())
    return base, [*shlex.split(flags_of(args_of(config))), f"--vocab-size={config['vocab_size']}"]


class Runs:
    """All that units share. Attributes: deadline, a time after which nothing runs."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.deadline = args, time.monotonic() + 60 * args.minutes
        self._gpus: queue.SimpleQueue[int] = queue.SimpleQueue()  # one entry for each unit that may run
        for job in range(args.jobs):
            self._gpus.put(job % args.gpus)
        self._lock, self.rows = threading.Lock(), read(args.csv)
        self._longest: dict[str, float] = {}  # seconds of each stage
        args.work = args.work.resolve()  # runs have the repository as their folder
        args.work.mkdir(parents=True, exist_ok=True)
        self._found = function_pairs.Documents.load(one_of(args.inputs, DATA))
        self._stamp = train_step.stamp()
        self.base, self.model = converted(args.inputs, args.work)

    def file(self, stage: str, held_out: bool, seed: int) -> tuple[Path, int]:
        """(A stage's file, whole batches in it), written at its first use."""
        args = self.args
        path = args.work / f"{stage}_{'held_out' if held_out else seed}_{args.seq}.jsonl"
        with self._lock:
            if not path.exists():
                lines = lines_of(self._found, stage, held_out, 0 if held_out else seed, args.seq)
                token_files.write(path, lines, stage == "dpo")
        return path, len(path.read_text().splitlines()) // args.batch

    def unit(self, arm: str, seed: int) -> bool:
        """Do what is not done -> whether all is."""
        gpu = self._gpus.get()
        try:
            return self._stages(arm, seed, {"CUDA_VISIBLE_DEVICES": str(gpu)} if self.args.gpus > 1 else {})
        finally:
            self._gpus.put(gpu)

    def _stages(self, arm: str, seed: int, env: dict[str, str]) -> bool:
        folder = self.args.work / folder_of(f"{arm}_{seed}")
        stages = STAGES[: 1 + STAGES.index(self.args.until)]
        done = {stage: self._row(arm, seed, stage) in self for stage in stages}
        if all(done.values()):
            return True
        sft, dpo = folder / "sft", folder / "dpo"

        def made(stage: str, begin: Path, *more: str) -> bool:
            return self._run(arm, seed, stage, folder, begin, more, env, keep=not done[stage])

        for stage in stages:
            saved, begin = (sft, self.base) if task_of(stage) == "sft" else (dpo, sft)
            if is_judged(stage):
                if not done[stage] and not made(stage, begin, "--load", str(saved)):
                    return False
            elif not done[stage] or not (saved / "latest_checkpointed_iteration.txt").exists():
                shutil.rmtree(saved, ignore_errors=True)
                if not made(stage, begin, "--save", str(saved)):
                    return False
        if stages[-1] == STAGES[-1]:  # no stage is left that needs them
            for saved in (sft, dpo):
                shutil.rmtree(saved, ignore_errors=True)
        return True

    def __contains__(self, wanted: dict) -> bool:
        return any(all(str(row[key]) == str(wanted[key]) for key in SAME) for row in self.rows)

    def _row(self, arm: str, seed: int, stage: str) -> dict:
        args, task = self.args, task_of(stage)
        steps = min(args.epochs * self.file(task, False, seed)[1], args.steps or 10**9)
        return {"arm": arm, "seed": seed, "stage": stage, "lr": f"{getattr(args, f'{task}_lr'):g}", "steps": steps,
                "batch": args.batch, "seq": args.seq, "flags": " ".join(args.extra)}  # fmt: skip

    def _run(self, arm: str, seed: int, stage: str, folder: Path, begin: Path, more: Sequence[str],
             env: dict[str, str], *, keep: bool) -> bool:  # fmt: skip
        """Run a stage, and write its row if `keep`. False if there was no time, or the run failed."""
        args, row, name = self.args, self._row(arm, seed, stage), f"{arm}, seed {seed}, {stage}"
        task, steps = task_of(stage), row["steps"]
        (train, _), (held_out, evaluations) = self.file(task, False, seed), self.file(task, True, 0)
        left = self.deadline - time.monotonic()
        if left < self._longest.get(stage, 20):
            print(f"{name}: no time is left", flush=True)
            return False
        arm_flags = JUDGE if is_judged(stage) else ARMS[arm]
        flags = [*self.model, *TRAINING.split(), *RATES[task].split(), *f"--lr {row['lr']} --seed {seed} "
                 f"--seq-length {args.seq} --micro-batch-size {args.micro_batch} --global-batch-size {args.batch} "
                 f"--train-iters {steps} --lr-warmup-iters {steps // 10} --eval-interval {steps + 1} --save-interval "
                 f"{steps} --eval-iters {evaluations} --train-data-path {train} --valid-data-path {held_out} "
                 f"--pretrained-checkpoint {begin}".split(), *more, *shlex.split(arm_flags), *args.extra]  # fmt: skip
        te = "repaired" if arm == "O0" and not is_judged(stage) and args.te_path else "none"
        env = {**env, **train_step.environment(te, args.te_path), "TASK": task, "PAD": str(PAD), "END": str(END)}
        began, log = time.monotonic(), folder / f"{folder_of(stage)}.log"
        try:
            torchrun(1, [str(ROOT / "benchmarks/tuned_gpt.py"), *flags], log, timeout=left, env=env | {"WATCH": "1"})
        except RunFailed as error:
            print(f"{name}: {error}"[-2500:], flush=True)
            return False
        seconds = time.monotonic() - began
        self._longest[stage] = max(self._longest.get(stage, 20), seconds)
        row |= self._stamp | figures(log.read_text(errors="replace"))
        said = (f"{key} {row[key]}" for key in ("heldout_loss", "accuracy", "margin", "share") if row[key])
        print(f"{name}: {' '.join(said)} ({seconds:.0f} s)", flush=True)
        if keep:
            with self._lock:
                self.rows.append(row)
                train_step.append(str(args.csv), COLUMNS, [{key: row.get(key, "") for key in COLUMNS}])
        return True


def folder_of(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


def task_of(stage: str) -> str:
    """The script and the data of a stage."""
    return "sft" if stage.startswith("sft") else "dpo"


def is_judged(stage: str) -> bool:
    """Whether a stage evaluates saved weights with BF16 GEMMs."""
    return stage.endswith("judged")


def figures(log: str) -> dict:
    """What a run's log says: sums of its last evaluation, the update's share, the first and the last loss."""
    last = {word: json.loads(line[len(word) + 1 :]) for line in log.splitlines()
            for word in ("HELDOUT", "SHARE") if line.startswith(f"{word} ")}  # fmt: skip
    sums = last.get("HELDOUT", {})
    mean = {name: total / number if number else math.nan for name, (total, number) in sums.items()}
    names = {"heldout_loss": "lm loss", "accuracy": "accuracy", "margin": "margin", "kl": "kl a token",
             "log_ratio": "abs log-ratio"}  # fmt: skip
    found = {column: f"{mean[name]:.6f}" if name in mean else "" for column, name in names.items()}
    found["counted"] = str(round((sums.get("accuracy") or sums.get("lm loss") or (0, 0))[1]))
    for name in ("share", "shown"):
        found[name] = f"{last['SHARE'][name]:.4f}" if "SHARE" in last else ""
    seen = losses(log)
    return found | ({"first_loss": f"{seen[0]:.6f}", "last_loss": f"{seen[-1]:.6f}"} if seen else {})


def read(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(args: argparse.Namespace) -> None:
    train_step.check_columns(str(args.csv), COLUMNS)
    runs = Runs(args)
    with ThreadPoolExecutor(args.jobs) as pool:  # all arms of a seed, then those of the next
        done = list(pool.map(lambda unit: runs.unit(*unit[::-1]), itertools.product(args.seeds, args.arms)))
    print("\n".join(report(runs.rows)))
    sys.exit(not all(done))


# --- what they say


def wilson(right: float, number: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of 95 % for a share, of `right` among `number`."""
    share = right / number
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * math.sqrt(share * (1 - share) / number + (z / (2 * number)) ** 2)
    return middle - half, middle + half


def report(rows: list[dict]) -> list[str]:
    """Lines of a Markdown table: an arm a row, the mean of its seeds and their spread."""
    lines = ["| arm | seeds | SFT: held-out loss | share of the update | DPO: accuracy, all seeds' pairs (95 %) "
             "| by seed | margin | log-ratio | share of the update | shown | judged in BF16: accuracy (95 %) | margin "
             "| log-ratio | SFT judged in BF16: held-out loss |", "|---" * 14 + "|"]  # fmt: skip
    for arm in ARMS:
        of = {stage: [row for row in rows if row["arm"] == arm and row["stage"] == stage] for stage in STAGES}
        if not any(of.values()):
            continue

        def means(stage: str, column: str, form: str, of=of) -> str:
            values = [float(row[column]) for row in of[stage] if row[column] not in ("", None)]
            spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
            return f"{statistics.mean(values):{form}}{spread}" if values else "-"

        def accuracy(stage: str, of=of) -> str:
            numbers = [(float(row["accuracy"]) * int(row["counted"]), int(row["counted"])) for row in of[stage]]
            if not numbers:
                return "-"
            right, number = map(sum, zip(*numbers, strict=True))
            low, high = wilson(right, number)
            return f"{right / number:.3f} ({low:.3f} to {high:.3f} of {number:,})"

        seeds = [f"{float(row['accuracy']):.3f}" for row in of["dpo"]]
        cells = [arm, len(seeds or of["sft"]), means("sft", "heldout_loss", ".4f"), means("sft", "share", ".3f")]
        cells += [accuracy("dpo"), " ".join(seeds), means("dpo", "margin", ".4f"), means("dpo", "log_ratio", ".4f")]
        cells += [means("dpo", "share", ".3f"), means("dpo", "shown", ".3f"), accuracy("judged")]
        cells += [means("judged", "margin", ".4f"), means("judged", "log_ratio", ".4f")]
        cells += [means("sft judged", "heldout_loss", ".4f")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("build", help="make what `run` needs")
    verb.add_argument("--hf", type=Path, required=True, help="a Hugging Face folder in BF16")
    verb.add_argument("--gguf", type=Path, help="the GGUF file that it was made of (default: carry BF16)")
    verb.add_argument("--out", type=Path, required=True, help="a new folder")
    verb.add_argument("--parts", type=int, default=2, help="folders to carry one by one")
    verb.add_argument("--most", type=int, default=640, help="tokens of a function with its prompt")
    verb.add_argument("--source", type=Path, help="Python files (default: the standard library)")
    verb.add_argument("--tokenizer", help='a tokenizer.json (default: the folder\'s), or "bytes"')
    verb = verbs.add_parser("run", help="tune, and append rows to the CSV")
    verb.add_argument("--inputs", type=Path, nargs="+", required=True, help="the folders that `build` made")
    verb.add_argument("--work", type=Path, default=Path("runs/smollm2"), help="checkpoints, data and logs")
    verb.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    verb.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    verb.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage of a unit")
    verb.add_argument("--jobs", type=int, default=1, help="units at a time")
    verb.add_argument("--gpus", type=int, default=1, help="GPUs that they are shared among, the first ones")
    verb.add_argument("--minutes", type=float, default=60)
    verb.add_argument("--sft-lr", type=float, default=2e-5)
    verb.add_argument("--dpo-lr", type=float, default=1e-6)
    verb.add_argument("--epochs", type=int, default=3)
    verb.add_argument("--steps", type=int, help="of each stage, at most")
    verb.add_argument("--seq", type=int, default=2048)
    verb.add_argument("--batch", type=int, default=8, help="samples of a step")
    verb.add_argument("--micro-batch", type=int, default=4)
    verb.add_argument("--te-path", default="", help="folder with Transformer Engine, for O0")
    verb.add_argument("--csv", type=Path, required=True)
    verb = verbs.add_parser("report", help="print the CSV's table")
    verb.add_argument("--csv", type=Path, required=True)
    args, args.extra = parser.parse_known_args(argv)
    if args.verb == "run" and args.te_path:
        args.te_path = str(Path(args.te_path).resolve())
    if args.verb != "run" and args.extra:
        parser.error(f"unrecognized arguments: {' '.join(args.extra)}")
    return args


def main() -> None:
    args = arguments()
    try:
        if args.verb == "report":
            print("\n".join(report(read(args.csv))))
        else:
            {"build": build, "run": run}[args.verb](args)
    except (ValueError, FileExistsError) as error:
        sys.exit(f"smollm2: {error}")


if __name__ == "__main__":
    main()
