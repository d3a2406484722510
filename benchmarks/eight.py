"""Layers of GPT-175B over two, four or eight GPUs, then experts and whole models, each beside its estimate.

    python benchmarks/eight.py --te-path DIR --nproc 8 --csv benchmarks/results/eight.csv         the plan, in order
    python benchmarks/eight.py --te-path DIR --nproc 4 --arms 175b:O3-graph:1 175b:bf16:1 --csv FILE
    python benchmarks/eight.py --nproc 8 --table --csv benchmarks/results/eight.csv               runs nothing
    python benchmarks/eight.py --nproc 2 --gbs 8 --arms qwen3-30b-a3b:O3-experts-grouped:1 --csv FILE     two H200s
    python benchmarks/eight.py --nproc 2 --gbs 8 --arms qwen3-30b-a3b:O3-experts-graph:1 --csv FILE       two H200s
    python benchmarks/eight.py --nproc 1 --gbs 8 --arms deepseek-v2-lite:O3-experts-grouped:1 --csv FILE  one H200
    python benchmarks/eight.py --nproc 2 --arms tiny:O3:2 tiny:bf16-local:2                        any machine

An arm is LAYOUT:SYSTEM:MICRO-BATCH, with train_step.py's systems. Each arm is a run of its own, and the
script fits a call of ten minutes: an arm begins only if as much of --minutes is left as the longest one took, and one
that is cut off has no row. Rows are written at once, in train_step.py's columns. An arm that the estimate says needs
more memory than a GPU has is not tried.

    175b         layers of GPT-175B, tensor and sequence parallelism over all GPUs, sequence 2,048
    175b-dp2     the same layers; half as many tensor-parallel ranks, two data-parallel ones
    qwen3-moe    layers of Qwen3-30B-A3B, expert parallelism over all GPUs, sequence 4,096
    13b-whole    GPT-13B in the layout of 175b-dp2
    qwen3-30b-a3b, deepseek-v2-lite    whole; expert parallelism over all GPUs, gradients in FP8, sequence 4,096

O3-experts-graph with expert parallelism has the all-gather dispatcher: with the other there is no graph. Whole models
have PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and NCCL_GRAPH_REGISTER=0 because a graph's collectives need it
with that, unless the environment sets them.

A step has 16 sequences, or --gbs. Every system trains the same model. Its layers are as many as fit 80 GB in all
systems, with 2 GB to spare, in the first layout (LAYERS). By the estimate Transformer Engine needs most: at micro-batch
4 it has room for 3, 7 and 15 of GPT-175B's layers on two, four and eight GPUs. Stock BF16 alone would have room for 3,
8 and 17. O3 has room for 175b-dp2 too; the others do not.

The table has each measured figure with the estimate of `megatron-fp8 estimate` and its error behind it; a figure that
was not measured has the estimate alone. Bare collectives are the profiled step's, on rank 0: the time in which nothing
else ran; the estimate's also count what a hidden collective slows. GB are 10^9 bytes of torch's allocator.
"""

import argparse
import csv
import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import train_step
from kernels import dimensions
from train_step import COLUMNS, SYSTEMS, model_flags

# isort: split
from megatron_fp8.errors import UserError
from megatron_fp8.tools.perf import hardware, job_flags
from megatron_fp8.tools.perf.hardware import Hardware
from megatron_fp8.tools.perf.output import MIB, render
from megatron_fp8.tools.perf.step import Estimate, estimate

BATCH = 16
CARD = "h100-80gb-sxm"  # the layers fit its memory; the default of --hardware
GPUS = (2, 4, 8)  # of the plan; --arms may name models for one
LAYERS = {
    "175b": {2: 3, 4: 7, 8: 15},
    # Transformer Engine's weights and states are 58, 51 and 45 GB (`megatron-fp8 memory`, and 2 bytes for its copies);
    # the rest is for the logits, 6 GB, and for activations, whose size depends on the router.
    "qwen3-moe": {2: 8, 4: 14, 8: 24},
}
_TENSOR = "--tensor-model-parallel-size={gpus} --sequence-parallel"
_EXPERTS = "--expert-model-parallel-size={gpus}"
_TWO_REPLICAS = "--tensor-model-parallel-size={half} --sequence-parallel --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {  # by name: train_step.py's shape, and flags
    "175b": ("175b", _TENSOR),
    "175b-dp2": ("175b", _TWO_REPLICAS),
    "qwen3-moe": ("qwen3-moe", _EXPERTS),
    "13b-whole": ("13b-whole", _TWO_REPLICAS),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", f"{_EXPERTS} --fp8-grad-accum=fp8"),
    "deepseek-v2-lite": ("deepseek-v2-lite", f"{_EXPERTS} --fp8-grad-accum=fp8"),
    "tiny": ("tiny", "--tensor-model-parallel-size={gpus}"),
}
WHOLE = ("13b-whole", "qwen3-30b-a3b", "deepseek-v2-lite")  # near a GPU's memory: fragments could end a run
OF_WHOLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}  # unless they are set
OVER = 0.02  # an arm is tried if the estimate exceeds the GPU by this share or less: it was wrong by as much at worst
IDENTITY = ("shape", "nproc", "gbs", "system", "mbs")  # the columns that say which arm a row is of
FORMS = {"ms": ".1f", "tokens/s/GPU": ",.0f", "TFLOP/s": ".0f", "GB after a step": ".1f", "peak GB": ".1f",
         "bare ms": ".0f", "x TE's best": ".2f", "x BF16": ".2f", "peak of BF16's": ".2f"}  # fmt: skip
WITH_ERROR = ("ms", "peak GB")
type Figures = dict[str, float]


class Arm(NamedTuple):
    layout: str
    system: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.layout}:{self.system}:{self.micro_batch}"


def _arms(layout: str, systems: str, micro_batch: int) -> list[Arm]:
    return [Arm(layout, system, micro_batch) for system in systems.split()]


PLAN = [  # the most important first: the time may end before the last
    *_arms("175b", "O3-graph te-delayed-graph bf16 O3 te-delayed", 1),
    *_arms("175b", "O3-graph te-delayed-graph bf16", 2),
    *_arms("175b", "O3-graph te-delayed-graph bf16", 4),
    *_arms("175b-dp2", "O3-graph", 4),
    *_arms("qwen3-moe", "O3-experts-grouped te-delayed-experts", 1),
    *_arms("13b-whole", "O3-graph te-delayed-graph", 2),
]


def arm_of(name: str) -> Arm:
    """The arm that --arms names."""
    layout, _, rest = name.partition(":")
    system, _, size = rest.partition(":")
    if layout not in LAYOUTS or system not in SYSTEMS or not size.isdecimal() or int(size) == 0:
        raise argparse.ArgumentTypeError(
            f"{name}: LAYOUT:SYSTEM:MICRO-BATCH is meant; layouts are {', '.join(LAYOUTS)}, systems train_step.py's"
        )
    return Arm(layout, system, int(size))


def settings(
    arm: Arm, gpus: int, layers: int | None = None, extra: Sequence[str] = (), batch: int = BATCH
) -> dict:
    """The columns of a row that are known before it is measured. layers: None for LAYERS'. batch: the global one."""
    shape, flags = LAYOUTS[arm.layout]
    count = layers or LAYERS.get(shape, {}).get(gpus)
    words = [shape, *([f"--num-layers={count}"] if count else []), *flags.format(gpus=gpus, half=gpus // 2).split()]
    if arm.system == "O3-experts-graph" and gpus > 1 and _EXPERTS in flags:
        words.append("--moe-token-dispatcher-type=allgather")
    shape = " ".join([*words, *extra])
    return {"shape": shape, "nproc": gpus, "gbs": batch, "system": arm.system, "mbs": arm.micro_batch}


def flags_of(row: Mapping) -> list[str]:
    """Megatron's flags of a row: its model, its layout and its system's."""
    shape, *extra = row["shape"].split()
    same = model_flags(Namespace(shape=shape, gbs=row["gbs"], extra=extra))
    return [*same, f"--micro-batch-size={row['mbs']}", *SYSTEMS[row["system"]].flags.split()]


def predicted(row: Mapping, on: Hardware) -> Estimate | None:
    """What `megatron-fp8 estimate` says of a row's arm; None if the model does not cover it."""
    flags = job_flags.parse(flags_of(row))
    try:
        w = job_flags.workload(flags, int(row["nproc"]))
    except UserError:
        return None
    return estimate(replace(w, repaired=SYSTEMS[row["system"]].te != "unrepaired"), on)


def measured(row: Mapping) -> Figures:
    """The figures of a row of the CSV; none if it was not measured."""
    if not row.get("ms"):
        return {}
    ms, gpus = float(row["ms"]), int(row["nproc"])
    tokens = int(row["gbs"]) * dimensions(flags_of(row)).seq_length
    found = {"ms": ms, "tokens/s/GPU": tokens / ms * 1e3 / gpus, "TFLOP/s": float(row["tflops"]),
             "GB after a step": float(row["gb"]) * 1e3 * MIB, "peak GB": float(row["gb_peak"]) * 1e3 * MIB}  # fmt: skip
    if collectives := json.loads(row["profile_collectives"] or "null"):
        found["bare ms"] = sum(kind["exposed_ms"] for kind in collectives.values())
    return found


def modelled(e: Estimate | None) -> Figures:
    """The same figures by the estimate; none without one."""
    if e is None:
        return {}
    bare = sum(traffic.bare for traffic in e.traffic.values())
    return {"ms": e.ms, "tokens/s/GPU": e.tokens_a_second, "TFLOP/s": e.tflops, "GB after a step": e.held,
            "peak GB": e.peak, "bare ms": bare}  # fmt: skip


def compare(rows: Sequence[Mapping], figures: Sequence[Figures]) -> None:
    """Add to each row's figures the ratios to Transformer Engine's best and to stock BF16 at the same micro-batch."""
    for row, own in zip(rows, figures, strict=True):
        beside = [(other["system"], found) for other, found in zip(rows, figures, strict=True)
                  if found and other["mbs"] == row["mbs"]]  # fmt: skip
        te = [found["ms"] for system, found in beside if system.startswith("te-")]
        stock = [found for system, found in beside if system.startswith("bf16")]
        if own and te:
            own["x TE's best"] = min(te) / own["ms"]
        if own and stock:
            own["x BF16"] = stock[0]["ms"] / own["ms"]
            if stock[0]["peak GB"]:  # a CPU's log has no memory
                own["peak of BF16's"] = own["peak GB"] / stock[0]["peak GB"]


def table(rows: Sequence[Mapping], on: Hardware) -> str:
    """Markdown: a table for each model, an arm a line; beneath it the fastest of each kind of system."""
    said = []
    for title in dict.fromkeys(_model(row) for row in rows):
        of = [row for row in rows if _model(row) == title]
        estimates = [predicted(row, on) for row in of]
        found, models = [measured(row) for row in of], [modelled(e) for e in estimates]
        compare(of, found)
        compare(of, models)
        said += [f"**{title}, {of[0]['nproc']} GPUs ({on.name}), global batch {of[0]['gbs']}**", ""]
        if not any([*found, *models]):
            said += ["Nothing is measured, and the estimate does not cover it: " + "; ".join(map(_name, of)), ""]
            continue
        lines = []
        for row, e, own, model in zip(of, estimates, found, models, strict=True):
            cells = {"arm": _name(row)}
            cells |= {name: _cell(name, own.get(name), model.get(name)) for name in FORMS}
            cells["GB left"] = f"({e.room():.1f})" if e else ""
            lines.append(cells)
        said += [render(lines, "markdown"), "", *_fastest(of, found, "Measured"),
                 *_fastest(of, models, "By the estimate"), ""]  # fmt: skip
    return "\n".join(said)


def _model(row: Mapping) -> str:
    return f"{row['shape'].split()[0]}, {dimensions(flags_of(row)).num_layers} layers"


def _name(row: Mapping) -> str:
    return f"{row['system']}, {_layout(row)}, MBS {row['mbs']}"


def _layout(row: Mapping) -> str:
    """A row's ranks, as "TP 4", "TP 2 DP 2" or "EP 4"."""
    sizes = dict(word.split("=") for word in row["shape"].split() if "-parallel-size=" in word)
    tensor, experts = (int(sizes.get(f"--{kind}-model-parallel-size", 1)) for kind in ("tensor", "expert"))
    data = int(row["nproc"]) // tensor
    of = {"TP": tensor, "EP": experts, "DP": data if experts == 1 else 1}
    return " ".join(f"{name} {size}" for name, size in of.items() if size > 1) or "one GPU"


def _cell(name: str, own: float | None, model: float | None) -> str:
    """A measured figure, and in brackets the estimate's and its error; or the estimate's alone, in brackets."""
    shown = "" if own is None else format(own, FORMS[name])
    if model is None:
        return shown
    error = f", {model / own - 1:+.1%}" if own and name in WITH_ERROR else ""
    return f"{shown} ({format(model, FORMS[name])}{error})".strip()


def _fastest(rows: Sequence[Mapping], figures: Sequence[Figures], whose: str) -> list[str]:
    """A line about the fastest arm of our levels beside the fastest of Transformer Engine and of stock BF16."""
    best: dict[str, tuple[float, str]] = {}
    for row, found in zip(rows, figures, strict=True):
        kind = next(kind for kind in ("O", "te-", "bf16") if row["system"].startswith(kind))
        if found and (kind not in best or found["ms"] < best[kind][0]):
            best[kind] = found["ms"], _name(row)
    if "O" not in best or len(best) == 1:
        return []
    ours, name = best.pop("O")
    beside = " and ".join(f"{ms / ours:.2f} times {other} ({ms:.1f} ms)" for ms, other in best.values())
    return [f"{whose}, the fastest of each: {name}, {ours:.1f} ms, {beside}."]


def known_rows(path: str | None, on: Hardware) -> list[dict]:
    """The rows of a CSV that were measured on this hardware."""
    if not path or not Path(path).exists():
        return []
    with Path(path).open(newline="") as file:
        return [row for row in csv.DictReader(file) if _hardware(row["gpu"]) == on]


def merged(plan: Sequence[dict], known: Sequence[dict]) -> list[dict]:
    """The plan's rows, each with what was measured of it last."""
    last = {_identity(row): row for row in known}
    return [last.get(_identity(row), {}) | row for row in plan]


def _identity(row: Mapping) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in IDENTITY)


def _hardware(gpu: str) -> Hardware:
    """The estimate's hardware for a GPU's name; the H100 for any other, and for a machine without one."""
    name = next((name for name in hardware.known() if name.split("-")[0].upper() in gpu), CARD)
    return hardware.load(name)


def measure(args: Namespace, on: Hardware, began: float, keep: Callable[[dict], None]) -> None:
    """Run the arms as long as there is time. keep: takes each row.

    began: when the call began, in time.monotonic()'s seconds.
    """
    longest = 0.0
    for i, arm in enumerate(args.arms):
        left = 60 * args.minutes - (time.monotonic() - began)
        if left < longest:
            print(f"{left:.0f} s are left: not begun: --arms {' '.join(map(str, args.arms[i:]))}", flush=True)
            return
        row = settings(arm, args.nproc, args.layers, args.extra, args.gbs)
        e = predicted(row, on)
        if e is not None and e.room() < -OVER * e.peak:
            print(f"{arm}: not tried: the estimate has {e.peak:.1f} GB, {-e.room():.1f} too many", flush=True)
            continue
        print(f"{arm}, {_layout(row)}:", flush=True)
        start = time.monotonic()
        train_step.measure(_options(args, arm, row, left), lambda found, row=row: keep(row | found))
        longest = max(longest, time.monotonic() - start)


def _options(args: Namespace, arm: Arm, row: Mapping, left: float) -> Namespace:
    """The arguments of train_step.py for an arm that has `left` seconds."""
    shape, *extra = row["shape"].split()
    options = {"systems": [arm.system], "mbs": {arm.system: arm.micro_batch}, "shape": shape, "extra": extra}
    options |= {"gbs": row["gbs"], "timeout": min(args.timeout, left)}
    options["env"] = {name: os.environ.get(name, value) for name, value in OF_WHOLE.items() if arm.layout in WHOLE}
    if args.logs:
        options["logs"] = f"{args.logs}/{arm.layout}-{arm.micro_batch}"
    return Namespace(**{**vars(args), **options})


def arguments(argv: list[str] | None = None) -> Namespace:
    """Parse the command line, or argv. `args.extra` has flags for Megatron, which every arm gets."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, choices=(1, *GPUS), default=8, help="GPUs")
    parser.add_argument("--arms", nargs="+", type=arm_of, default=PLAN, metavar="LAYOUT:SYSTEM:MICRO-BATCH")
    parser.add_argument("--gbs", type=int, default=BATCH, help=f"sequences of a step ({BATCH})")
    parser.add_argument("--minutes", type=float, default=9, help="for the whole call")
    parser.add_argument("--timeout", type=int, default=150, help="seconds for an arm")
    parser.add_argument("--layers", type=int, help="of every arm, instead of as many as fit")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=train_step.EVERY)
    parser.add_argument("--te-path", default="", help="folder with Transformer Engine")
    parser.add_argument("--csv", help="append the figures to this file; with --table, read them from it")
    parser.add_argument("--logs", help="keep each run's log in this folder")
    parser.add_argument("--table", action="store_true", help="run nothing; print the table of --csv and estimates")
    parser.add_argument("--hardware", choices=hardware.known(), help="of --table (h100-80gb-sxm)")
    args, args.extra = parser.parse_known_args(argv)
    if (least := train_step.least_iterations(args.warmup)) > args.iterations:
        parser.error(f"--iterations {args.iterations}: with --warmup {args.warmup} {least} are the least")
    for arm in args.arms:
        if args.gbs % arm.micro_batch:
            parser.error(f"--arms {arm}: the micro-batch does not divide --gbs {args.gbs}; change one")
        if args.nproc == 1 and "{half}" in LAYOUTS[arm.layout][1]:
            parser.error(f"--nproc 1: {arm} is for two GPUs or more; name other --arms")
    if args.hardware and not args.table:
        parser.error(f"--hardware {args.hardware}: needs --table; a run knows its GPUs")
    return args


def main() -> None:
    began, args = time.monotonic(), arguments()
    plan = [settings(arm, args.nproc, args.layers, args.extra, args.gbs) for arm in args.arms]
    if args.table:
        on = hardware.load(args.hardware or CARD)
        print(table(merged(plan, known_rows(args.csv, on)), on))
        return
    train_step.check_columns(args.csv, COLUMNS)
    stamp = train_step.stamp()
    on, kept = _hardware(stamp["gpu"]), []

    def keep(found: dict) -> None:
        row = stamp | {name: found[name] for name in IDENTITY} | train_step.flat(found)
        kept.append(row)
        if args.csv:
            train_step.append(args.csv, COLUMNS, [row])

    measure(args, on, began, keep)
    print("\n" + table(merged(plan, kept), on), flush=True)


if __name__ == "__main__":
    main()
