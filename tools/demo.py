"""Train a small GPT at every level on the same data, from the same weights, and compare.

    make demo

The text is the source of Python's standard library; a token is a byte. A run has two processes on the CPU, forked from
one that has imported all modules; on Hopper or newer GPUs, torchrun starts one process per GPU, at most two. Stock's
BF16 and O3 run first. Then O0 runs with more seeds: their spread is the noise, and a level's gap counts only if it is
larger. All runs are evaluated on the same held-out text, except its last partial batch. The output goes to runs/demo:
each run's log, loss.png, and summary.json with the table.

Two seeds are too few: one pair ended 0.0005 apart by chance, other pairs of this model 0.03.
"""

import json
import os
import sys
import time
from pathlib import Path

import prepare_data
import torch
from launch import ROOT, RunFailed, Step, forked, parse_step, parse_validation, torchrun

sys.path.insert(0, str(ROOT))

from megatron_fp8.flags.level import LEVELS
from megatron_fp8.tools.palette import looks

OUTPUT = Path("runs/demo")  # in the repository
TEXT = OUTPUT / "data/python"
HELD_OUT = 0.02  # share of the documents
STEPS = 150
BATCH, CONTEXT = 32, 64
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 352 "
    f"--seq-length {CONTEXT} --max-position-embeddings {CONTEXT} --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.06"
)
TRAINING = (
    f"--micro-batch-size 16 --global-batch-size {BATCH} --train-iters {STEPS} --lr 3e-3 --min-lr 3e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 "
    "--adam-beta2 0.98 --bf16 --use-distributed-optimizer --log-interval 1 "
    f"--eval-interval {STEPS + 1} --num-workers 0"
)
# Stock Megatron needs these flags to train without Transformer Engine and apex.
STOCK_ONLY = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-rope-fusion --attention-backend unfused"
)
DATA = (
    f"--train-data-path {TEXT}_train --valid-data-path {TEXT}_heldout "
    "--tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 2"
)
SEEDS = (1, 2, 3, 4)  # O0's; every level uses the first


class Progress:
    """Shows a run's progress: one line that changes on a terminal, a line every 50 steps elsewhere."""

    def __init__(self, name: str):
        self.name = name
        self.steps: list[Step] = []
        self.heldout_loss = float("nan")
        self.started = time.monotonic()
        self.live = sys.stdout.isatty()
        self.show("starting")

    def read(self, line: str) -> None:
        """Read one line of the run's log."""
        step, validation = parse_step(line), parse_validation(line)
        if validation is not None:
            self.heldout_loss = validation
        if step is None:
            return
        self.steps.append(step)
        if not self.live and step.iteration % 50:
            return
        # The first steps are slower, so the estimate uses the later half.
        recent = self.steps[len(self.steps) // 2 :]
        pace = sum(s.milliseconds for s in recent) / len(recent) / 1000
        eta = f"{(STEPS - step.iteration) * pace:3.0f} s left"
        self.show(f"step {step.iteration:3}/{STEPS}  loss {step.loss:.4f}  {pace * 1000:4.0f} ms/step  {eta}")

    def show(self, text: str, end: bool = False) -> None:
        line = f"  {self.name:9}  {text}"
        print(f"\r{line:76}" if self.live else line, end="\n" if end or not self.live else "", flush=True)

    def done(self) -> None:
        seconds = time.monotonic() - self.started
        self.show(f"held-out loss {self.heldout_loss:.4f}  after {STEPS} steps, {seconds:.0f} s", end=True)


def train(name: str, level: str, seed: int, on_gpu: bool) -> tuple[list[Step], dict]:
    """Train at `level` under a name. Returns its steps and its entry in summary.json. Raises RunFailed."""
    file = OUTPUT / name.replace(" ", "_")
    report = file.with_suffix(".report.json")
    report.unlink(missing_ok=True)
    held_out = prepare_data.samples(f"{TEXT}_heldout", CONTEXT)
    flags = f"{MODEL} {TRAINING} {STOCK_ONLY} {DATA} --eval-iters {held_out // BATCH} --seed {seed} --fp8-level {level}"
    progress = Progress(name)
    (torchrun if on_gpu else forked)(
        processes(on_gpu),
        ["pretrain_gpt_fp8.py", *flags.split()],
        file.with_suffix(".log"),
        timeout=1800,
        # The plugin writes its measurements there.
        env={"MEGATRON_FP8_REPORT": str(report)} | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}),
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


def processes(on_gpu: bool) -> int:
    return min(2, torch.cuda.device_count()) if on_gpu else 2


def again(seed: int) -> str:
    """The name of an O0 run with another seed than the levels'."""
    return f"O0 seed {seed}"


def noise_of(results: dict[str, dict]) -> float:
    """The spread of O0's held-out losses over its seeds: largest minus smallest."""
    losses = [results[name]["heldout_loss"] for name in ("O0", *map(again, SEEDS[1:]))]
    return max(losses) - min(losses)


def verdict(level: str, results: dict[str, dict]) -> str:
    """One line: a level's gap compared with the noise."""
    noise, gap = noise_of(results), results[level]["heldout_loss"] - results["O0"]["heldout_loss"]
    place = "inside" if abs(gap) <= noise else "OUTSIDE"
    return f"{level} ends {gap:+.4f} from O0, {place} the noise: {len(SEEDS)} seeds of O0 spread over {noise:.4f}"


def table(levels: dict[str, dict]) -> list[list[str]]:
    """The final table, one column per level: the header, then a row for each measurement."""
    results = list(levels.values())

    def row(name: str, values: list[float | None], form: str) -> list[str]:
        return [name, *("-" if value is None else f"{value:{form}}" for value in values)]

    rows = [
        ["", *levels],
        row("final loss", [r["final_loss"] for r in results], ".4f"),
        row("held-out loss", [r["heldout_loss"] for r in results], ".4f"),
        row("gap to O0", [r["heldout_loss"] - levels["O0"]["heldout_loss"] for r in results], "+.4f"),
    ]
    for measure, unit, form in (
        ("bytes_per_param", "bytes a parameter", ".3f"),
        ("wire_bytes_per_step", "bytes sent a step", ",.0f"),
    ):
        rows.append(row(unit, [sum(r[measure].values()) for r in results], form))
        for kind in dict.fromkeys(kind for r in results for kind in r[measure]):
            rows.append(row(f"  {kind}", [r[measure].get(kind) for r in results], form))
    return rows


def print_table(rows: list[list[str]]) -> None:
    """Print a table, within 80 columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *values in rows:
        cells = (value.rjust(width) for value, width in zip(values, widths[1:], strict=True))
        print("  " + "  ".join([name.ljust(widths[0]), *cells]))


def plot(curves: dict[str, list[Step]], results: dict[str, dict], path: Path) -> None:
    """Draw the loss curves, each level's gap to O0 at every step on the same text, and its final held-out gap beside
    the spread of O0's seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    look = looks(LEVELS)
    figure, panels = plt.subplots(3, 1, figsize=(8, 8), height_ratios=(3, 2, 2), layout="constrained")
    above, middle, below = panels
    losses = {name: {step.iteration: step.loss for step in steps} for name, steps in curves.items()}
    seeds = ["O0", *map(again, SEEDS[1:])]
    steps = list(losses["O0"])
    ends = [(min(values), max(values)) for values in ([losses[seed][i] for seed in seeds] for i in steps)]
    noise = {"color": look["O0"]["color"], "alpha": 0.2, "linewidth": 0}
    above.fill_between(steps, *zip(*ends, strict=True), **noise, label=f"O0, {len(SEEDS)} seeds")
    for level in LEVELS:
        above.plot(steps, [losses[level][i] for i in steps], **look[level], label=level, linewidth=1)
        middle.plot(steps, [losses[level][i] - losses["O0"][i] for i in steps], **look[level], linewidth=1)
    held_out = {name: results[name]["heldout_loss"] - results["O0"]["heldout_loss"] for name in results}
    said = f"the noise: spread of O0's {len(SEEDS)} seeds"
    below.axvspan(-noise_of(results), noise_of(results), **noise, label=said)
    below.plot([held_out[seed] for seed in seeds], [0] * len(seeds), "|", color=look["O0"]["color"], markersize=14)
    for row, level in enumerate(LEVELS):
        below.plot(held_out[level], row, "o", color=look[level]["color"])
    above.set(ylabel="nats a byte", title="Training loss of the same GPT at each level: same seed, same text")
    middle.set(xlabel="step", ylabel="nats a byte", title="Training loss minus O0's at each step")
    below.set(xlabel="nats a byte", yticks=range(len(LEVELS)), yticklabels=LEVELS, ylim=(len(LEVELS) - 0.5, -0.5))
    below.set_title("Final held-out loss minus O0's (bars: O0's other seeds)")
    above.sharex(middle)
    for axes in panels:
        axes.grid(alpha=0.3)
    for axes in (above, below):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    os.chdir(ROOT)
    started = time.monotonic()
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    device = f"GPUs, {torch.cuda.get_device_name()}" if on_gpu else "the CPU"
    print(f"A GPT of half a million parameters, {STEPS} steps a run; {processes(on_gpu)} process(es) on {device}")
    if not Path(f"{TEXT}_heldout.idx").exists():
        counts = prepare_data.prepare([], str(TEXT), prepare_data.Bytes(), held_out=HELD_OUT)
        sizes = ", ".join(f"{tokens:,} bytes {part}" for part, (_, tokens) in counts.items())
        print(f"Text: Python's standard library, {sizes}")

    more = {again(seed): seed for seed in SEEDS[1:]}
    runs = {"O0": SEEDS[0], "O3": SEEDS[0], **more, **dict.fromkeys(LEVELS, SEEDS[0])}
    curves, results, said = {}, {}, []
    for name, seed in runs.items():
        try:
            curves[name], results[name] = train(name, name.split()[0], seed, on_gpu)
        except RunFailed as failure:
            sys.exit(f"\ndemo: the run {name} failed: {failure}")
        except KeyboardInterrupt:
            sys.exit("\ndemo: interrupted")
        if more.keys() <= results.keys():  # the noise is known
            for level in [level for level in LEVELS if level in results and level not in ("O0", *said)]:
                print("    " + verdict(level, results), flush=True)
                said.append(level)
    seconds = round(time.monotonic() - started, 1)
    levels = {level: results[level] for level in LEVELS}
    seeds = {name: results[name] for name in more}
    summary = OUTPUT / "summary.json"
    found = {"levels": levels, "seeds": seeds, "noise": noise_of(results), "seconds": seconds}
    summary.write_text(json.dumps(found, indent=2) + "\n")
    print()
    print_table(table(levels))
    print()
    for level in said:
        print(verdict(level, results))
    written = [str(summary)]
    try:
        plot(curves, results, OUTPUT / "loss.png")
        written.append(str(OUTPUT / "loss.png"))
    except ImportError:
        print("no loss.png: matplotlib is not installed (pip install -e '.[viz]')")
    print(f"{seconds:.0f} s in all; written: {', '.join(written)}")


if __name__ == "__main__":
    main()
