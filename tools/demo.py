"""Train a small GPT at every level on the same data, from the same weights, and compare.

    make demo

The text is the Python standard library's own source; a token is a byte. Two processes on the CPU, or one a
GPU (at most two) where the GPUs are Hopper's or newer. Everything goes to runs/demo: the log of each run,
loss.png, and summary.json with the table.
"""

import json
import os
import sys
import time
from pathlib import Path

import prepare_data
import torch
from launch import ROOT, RunFailed, Step, parse_step, parse_validation, torchrun

sys.path.insert(0, str(ROOT))

from megatron_fp8.flags.level import LEVELS

OUTPUT = Path("runs/demo")  # in the repository
STEPS = 200
MODEL = (
    "--num-layers 3 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 704 --seq-length 128 "
    "--max-position-embeddings 128 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0"
)
TRAINING = (
    f"--micro-batch-size 8 --global-batch-size 16 --train-iters {STEPS} --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 40 --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --bf16 --use-distributed-optimizer --seed 1234 --log-interval 1 "
    f"--eval-iters 40 --eval-interval {STEPS + 1} --num-workers 0"
)
# What stock Megatron needs to hear to train without Transformer Engine and apex.
STOCK_ONLY = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-rope-fusion --attention-backend unfused"
)
DATA = (
    f"--train-data-path {OUTPUT}/data/stdlib_train --valid-data-path {OUTPUT}/data/stdlib_heldout "
    "--tokenizer-type NullTokenizer --vocab-size 257"
)


class Progress:
    """One line on the terminal that follows a run; elsewhere, a line now and then."""

    def __init__(self, level: str):
        self.level = level
        self.steps: list[Step] = []
        self.heldout_loss = float("nan")
        self.started = time.monotonic()
        self.live = sys.stdout.isatty()
        self.show("starting")

    def read(self, line: str) -> None:
        """Take in one line of the run's log."""
        step, validation = parse_step(line), parse_validation(line)
        if validation is not None:
            self.heldout_loss = validation
        if step is None:
            return
        self.steps.append(step)
        if not self.live and step.iteration % 50:
            return
        # the first steps are slower: judge by the later half
        recent = self.steps[len(self.steps) // 2 :]
        pace = sum(s.milliseconds for s in recent) / len(recent) / 1000
        eta = f"{(STEPS - step.iteration) * pace:3.0f} s left"
        self.show(f"step {step.iteration:3}/{STEPS}  loss {step.loss:.4f}  {pace * 1000:4.0f} ms/step  {eta}")

    def show(self, text: str, end: bool = False) -> None:
        line = f"  {self.level}  {text}"
        print(f"\r{line:70}" if self.live else line, end="\n" if end or not self.live else "", flush=True)

    def done(self) -> None:
        seconds = time.monotonic() - self.started
        self.show(f"held-out loss {self.heldout_loss:.4f}  after {STEPS} steps, {seconds:.0f} s", end=True)


def train(level: str, nproc: int, env: dict[str, str]) -> tuple[list[Step], dict]:
    """Train at `level`; returns its steps and its entry of summary.json. Raises RunFailed."""
    report = OUTPUT / f"{level}.report.json"
    report.unlink(missing_ok=True)
    flags = " ".join((MODEL, TRAINING, STOCK_ONLY, DATA, f"--fp8-level {level}")).split()
    progress = Progress(level)
    torchrun(
        nproc,
        ["pretrain_gpt_fp8.py", *flags],
        OUTPUT / f"{level}.log",
        timeout=1800,
        env={**env, "MEGATRON_FP8_REPORT": str(report)},  # the plugin writes there what it measured
        on_line=progress.read,
    )
    progress.done()
    measured = json.loads(report.read_text())
    return progress.steps, {
        "final_loss": progress.steps[-1].loss,
        "heldout_loss": progress.heldout_loss,
        "bytes_per_param": measured["bytes_per_param"],
        "wire_bytes_per_step": measured["wire_bytes_per_step"],
    }


def table(levels: dict[str, dict]) -> list[list[str]]:
    """The closing table, a column a level: its header, and a row for everything measured."""
    results = list(levels.values())
    baseline = levels["O0"]["heldout_loss"]

    def row(name: str, values: list[float | None], form: str) -> list[str]:
        return [name, *("-" if value is None else f"{value:{form}}" for value in values)]

    rows = [
        ["", *levels],
        row("final loss", [r["final_loss"] for r in results], ".4f"),
        row("held-out loss", [r["heldout_loss"] for r in results], ".4f"),
        row("gap to O0", [r["heldout_loss"] - baseline for r in results], "+.4f"),
    ]
    for measure, unit, form in (
        ("bytes_per_param", "bytes a parameter", ".3f"),
        ("wire_bytes_per_step", "bytes on the wire a step", ",.0f"),
    ):
        for kind in dict.fromkeys(kind for r in results for kind in r[measure]):
            rows.append(row(f"{unit}: {kind}", [r[measure].get(kind) for r in results], form))
        rows.append(row(f"{unit}, in all", [sum(r[measure].values()) for r in results], form))
    return rows


def print_table(rows: list[list[str]]) -> None:
    """By rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *values in rows:
            cells = (value.rjust(width) for value, width in zip(values, widths[1:], strict=True))
            print(name.ljust(widths[0]), *cells, sep="  ")
        return
    shown = Table(rows[0][0])
    for level in rows[0][1:]:
        shown.add_column(level, justify="right")
    for row in rows[1:]:
        shown.add_row(*row)
    Console().print(shown)


def plot(curves: dict[str, list[Step]], path: Path) -> None:
    """Save the loss curves, and below them each level's distance from O0, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 2), layout="constrained"
    )
    baseline = {step.iteration: step.loss for step in curves["O0"]}
    for level, steps in curves.items():
        iterations = [step.iteration for step in steps]
        above.plot(iterations, [step.loss for step in steps], label=level, linewidth=1)
        below.plot(iterations, [step.loss - baseline[step.iteration] for step in steps], linewidth=1)
    above.set(ylabel="training loss (nats a byte)", title="The same GPT at each level: same seed, same data")
    above.legend()
    below.set(xlabel="step", ylabel="difference from O0")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    os.chdir(ROOT)
    started = time.monotonic()
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    nproc = min(2, torch.cuda.device_count()) if on_gpu else 2
    env = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    device = torch.cuda.get_device_name() if on_gpu else "the CPU"
    print(f"A GPT of 2.6 million parameters, {STEPS} steps at each of {', '.join(LEVELS)}")
    print(f"{nproc} process{'es' * (nproc > 1)} on {device}")
    if not Path(f"{OUTPUT}/data/stdlib_heldout.idx").exists():
        counts = prepare_data.prepare([], f"{OUTPUT}/data/stdlib", prepare_data.Bytes())
        sizes = ", ".join(f"{tokens:,} bytes {part}" for part, (_, tokens) in counts.items())
        print(f"Text: Python's standard library, {sizes}")

    curves, results = {}, {}
    for level in LEVELS:
        try:
            curves[level], results[level] = train(level, nproc, env)
        except RunFailed as failure:
            sys.exit(f"\ndemo: the run at {level} failed: {failure}")
        except KeyboardInterrupt:
            sys.exit("\ndemo: interrupted")
    seconds = round(time.monotonic() - started, 1)
    summary = OUTPUT / "summary.json"
    summary.write_text(json.dumps({"levels": results, "seconds": seconds}, indent=2) + "\n")
    print()
    print_table(table(results))
    written = [str(summary)]
    try:
        plot(curves, OUTPUT / "loss.png")
        written.append(str(OUTPUT / "loss.png"))
    except ImportError:
        print("no loss.png: matplotlib is not installed (pip install -e '.[viz]')")
    print(f"{seconds:.0f} s in all; written: {', '.join(written)}")


if __name__ == "__main__":
    main()
