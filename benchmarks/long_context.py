"""Long sequences on a few GPUs: how fast GPUs that share a sequence are, and the longest sequence that they hold.

    python benchmarks/long_context.py --te-path DIR --csv FILE                       two GPUs, 32,768 tokens
    python benchmarks/long_context.py --longest --nproc 1 --csv FILE                 Llama 3 8B whole
    python benchmarks/long_context.py --shape tiny --systems O3 --csv FILE           any machine, checks the script

Systems, shapes and flags are those of train_step.py.  Three layouts have the same tokens a step:

    shared    all GPUs share every sequence (context parallelism)                 each of --systems
    halves    each GPU has sequences of its own, 1 / GPUs as long                 each of --alone
    whole     each GPU has sequences of its own, of the same length               each of --alone

Attention costs a token of `whole` as much as one of `shared`, and one of `halves` less.  A row's time is the median
over the log's lines after the warm-up, each of which is the mean of five steps.

`--longest` trains two steps with full recomputation, the first of 8,192 tokens: it allocates the optimizer's states and
compiles. While the model fits, the next sequence is --growth times as long. While none has fitted, it is --shrink times
as long. Then it bisects, down to --grain tokens. Each try has a row; "out of memory" is an outcome.  GB are 10^9 bytes
of torch's allocator, which has expandable segments, as recipe/pretrain sets. tokens_s is of one GPU.

A step of 376,832 tokens takes two GPUs three minutes, because attention's time grows with the square. `--to-peak` ends
a try in its second step, when the last two layers' backward pass is done: a quarter of the time. The step's peak lies
before that (profile_gpt.py, `look_at_peak`). A whole step prints its peak until then too.
"""

import itertools
import json
import math
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from stamp import ROOT
from train_step import PROFILED, SHAPES, SYSTEMS, append, arguments, check_columns, command, model_flags, read, stamp

# isort: split
from kernels import dimensions
from launch import RunFailed, torchrun

from megatron_fp8.tools.perf.output import MIB

SHARED = ["O3", "O3-te-attention", "te-delayed", "O3-fetched-keys", "te-delayed-all-gather", "bf16"]
ALONE, LONGEST = ["O3"], ["O3-fp8-activations"]
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FIRST_TOKENS = 8192
LAYERS = 2  # whose backward pass ends before a try of --to-peak does
FITS = f"fits: ended after the backward pass of {LAYERS} layers"
SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF"
LAYOUTS = ("shared", "halves", "whole")
EVERY_STEP = "--log-interval 1 --log-memory-interval 1"
PATIENT = "--distributed-timeout-minutes 15"  # a collective waits in its queue from when the host asks for it
FIGURES = ("ms", "ms_min", "ms_max", "tokens_s", "tflops", "held_gb", "peak_gb", "loss", "seconds")
OF_PROFILE = [f"profile_{name}" for name in PROFILED]
SETTING = ("gpu", "torch", "commit", "date", "shape", "nproc", "layout", "sequence", "gbs", "system", "te", "outcome")
COLUMNS = [*SETTING, *FIGURES, *OF_PROFILE]


def train(system: str, args: Namespace, layout: str, sequence: int, gbs: int, *more: str, profiled=True) -> dict:
    """Train and return a row. It has no figures but "seconds" unless its outcome is "ok"."""
    flags = [f"--seq-length={sequence}", f"--max-position-embeddings={sequence}"]
    if layout == "shared":
        flags.append(f"--context-parallel-size={args.nproc}")
    mbs = {system: args.mbs.get(system, SHAPES[args.shape].mbs)}
    options = Namespace(**{**vars(args), "gbs": gbs, "mbs": mbs, "extra": [*args.extra, *flags, *more]})
    words, env = command(system, options)
    if not profiled:
        env |= {"PROFILE_STEP": "0", "FIRST_TOKENS": str(FIRST_TOKENS), "PEAK_AFTER": str(LAYERS)}
        env |= {SEGMENTS: os.environ.get(SEGMENTS, "expandable_segments:True")}
        env |= {"PEAK_ENDS": "1"} if args.to_peak else {}
    log = Path(args.logs or ROOT / "runs/long_context") / f"{system}-{layout}-{sequence}.log"
    began, outcome = time.monotonic(), "ok"
    try:
        torchrun(args.nproc, words, log, timeout=args.timeout, env=env)
    except RunFailed as error:
        outcome = str(error).splitlines()[0]
    text = log.read_text(errors="replace")
    if outcome != "ok" and re.search(r"OutOfMemoryError|out of memory|CUBLAS_STATUS_ALLOC_FAILED", text):
        outcome = "out of memory"
    elif outcome != "ok":
        print(text[-3000:], flush=True)
    row = {"layout": layout, "sequence": sequence, "gbs": gbs, "system": system, "te": SYSTEMS[system].te}
    row |= {"nproc": args.nproc, "outcome": outcome, "seconds": time.monotonic() - began}
    if not profiled and args.to_peak and outcome == "ok":
        return row | {"outcome": FITS} | at_peak(text)
    figures = of_steps(text, options.warmup) if profiled else of_second_step(text)
    if outcome != "ok" or not figures:
        return row
    if not profiled:
        print(f"    its peak until {LAYERS} layers' backward pass: {at_peak(text)['peak_gb']:.3f} GB", flush=True)
    return row | figures | {"tokens_s": gbs * sequence / figures["ms"] * 1e3 / args.nproc}


def of_steps(log: str, warmup: int) -> dict:
    """The figures of a log, by columns."""
    found = read(log, warmup)
    if not found:
        return {}
    profile = found.pop("profile")
    gb = {"held_gb": found.pop("gb") * 1e3 * MIB, "peak_gb": found.pop("gb_peak") * 1e3 * MIB}
    return found | gb | {f"profile_{name}": json.dumps(profile.get(name)) for name in PROFILED}


def of_second_step(log: str) -> dict:
    """The figures of a log of two steps; its second time is the mean of both, as Megatron's log has it."""
    both = [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", log)]
    memory = re.findall(r"allocated: ([\d.]+) \| max allocated: ([\d.]+)", log)
    loss = re.findall(r"lm loss: ([\d.E+-]+)", log)
    if len(both) != 2 or not memory:
        return {}
    held, peak = (max(float(of_rank[i]) for of_rank in memory) * MIB for i in (0, 1))
    return {"ms": 2 * both[1] - both[0], "held_gb": held, "peak_gb": peak, "loss": float(loss[-1])}


def at_peak(log: str) -> dict:
    """What `look_at_peak` has printed, the larger of the ranks' figures."""
    held, peak = zip(*re.findall(r"PEAK ([\d.]+) ([\d.]+)", log), strict=True)
    return {"held_gb": max(map(float, held)), "peak_gb": max(map(float, peak))}


def side_by_side(args: Namespace) -> Iterator[dict]:
    """A row for each system and layout, in one call."""
    sequence, gpus = dimensions(model_flags(args)).seq_length, args.nproc
    of_layout = {"shared": (sequence, args.gbs), "halves": (sequence // gpus, args.gbs * gpus)}
    of_layout["whole"] = (sequence, args.gbs)
    for layout in args.layouts:
        for system in args.systems if layout == "shared" else args.alone:
            yield train(system, args, layout, *of_layout[layout])


def longest(args: Namespace, attempt: Callable[[int, float], dict]) -> Iterator[dict]:
    """The rows of tries, until lengths --grain tokens apart fit and do not fit, a try fails otherwise, or the next one
    would end after --budget seconds if it took as long as the last.  attempt(tokens, seconds that are left): a row."""
    ends, fits, too_long = time.monotonic() + args.budget, 0, 0
    length = args.start
    for tries in itertools.count(1):
        row = attempt(length, ends - time.monotonic())
        yield row
        if row["outcome"] in ("ok", FITS):
            fits = length
        elif row["outcome"] == "out of memory":
            too_long = length
        else:
            return
        wanted = (fits + too_long) / 2 if fits and too_long else args.growth * fits or args.shrink * too_long
        length = math.ceil(wanted / args.grain) * args.grain
        if length == too_long or tries == args.tries or time.monotonic() + row["seconds"] > ends:
            return


def add(parser) -> None:
    search = "--longest" in sys.argv
    shape = "llama3-8b" if search else "llama-32k"
    parser.set_defaults(shape=shape, nproc=2, iterations=12, timeout=150)
    parser.add_argument("--alone", nargs="*", choices=SYSTEMS, default=ALONE, help="systems of the other layouts")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--longest", action="store_true", help="search for the longest sequence of each system")
    parser.add_argument("--start", type=int, default=32768, help="tokens of the first try of --longest")
    parser.add_argument("--shrink", type=float, default=0.5, help="the same while nothing has fitted")
    parser.add_argument("--to-peak", action="store_true", help="end a try of --longest when its peak is over")
    parser.add_argument("--growth", type=float, default=2, help="factor of the next length of --longest while it fits")
    parser.add_argument("--grain", type=int, default=8192, help="all lengths of --longest but the first are multiples")
    parser.add_argument("--budget", type=float, default=540, help="seconds that --longest has for a system")
    parser.add_argument("--tries", type=int, help="how many --longest makes of a system at most")


def main() -> None:
    args = arguments(__doc__.split("\n")[0], LONGEST if "--longest" in sys.argv else SHARED, add)
    check_columns(args.csv, COLUMNS)
    same = {**stamp(), "shape": " ".join([args.shape, *args.extra])}

    def keep(row: dict) -> None:
        shown = f"{row['system']:22} {row['layout']:7} {row['sequence']:8,} tokens: {row['outcome']}"
        if row["outcome"] == FITS:
            shown += f", {row['held_gb']:.1f} GB, peak {row['peak_gb']:.1f}"
        if "ms" in row:
            shown += f", {row['ms']:.1f} ms, {row['tokens_s']:,.0f} tokens/s a GPU, {row['held_gb']:.1f} GB, "
            shown += f"peak {row['peak_gb']:.1f}, loss {row['loss']:.4f}"
        print(f"{shown} ({row['seconds']:.0f} s)", flush=True)
        for name in ("ms", "collectives"):
            if (profile := row.get(f"profile_{name}", "null")) != "null":
                print(f"    {name}: {profile}", flush=True)
        if args.csv:
            append(args.csv, COLUMNS, [same | row])

    if not args.longest:
        for row in side_by_side(args):
            keep(row)
        return
    args.iterations = 2
    for system in args.systems:
        flags = f"{RECOMPUTED} {EVERY_STEP} {PATIENT}".split()

        def attempt(length: int, left: float, system=system, flags=flags) -> dict:
            limited = Namespace(**{**vars(args), "timeout": min(args.timeout, left)})
            return train(system, limited, "shared", length, 1, *flags, profiled=False)

        for row in longest(args, attempt):
            keep(row)


if __name__ == "__main__":
    main()
