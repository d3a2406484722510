"""Layers of GPT-175B over two, four or eight GPUs, then experts and a whole GPT-13B, each beside its estimate.

    python benchmarks/eight.py --te-path DIR --nproc 8 --csv benchmarks/results/eight.csv         the plan, in order
    python benchmarks/eight.py --te-path DIR --nproc 4 --arms 175b:O3-graph:1 175b:bf16:1 --csv FILE
    python benchmarks/eight.py --nproc 8 --table --csv benchmarks/results/eight.csv               runs nothing
    python benchmarks/eight.py --nproc 2 --arms tiny:O3:2 tiny:bf16-local:2                        any machine

An arm is SHAPE:SYSTEM:MICRO-BATCH, with train_step.py's shapes and systems. Each arm is a run of its own, and the
script fits a call of ten minutes: an arm begins only if as much of --minutes is left as the longest one took, and one
that is cut off has no row. Rows are written at once, in train_step.py's columns. An arm that the estimate says needs
more memory than a GPU has is not tried.

    175b         tensor and sequence parallelism over all GPUs, sequence 2,048
    qwen3-moe    expert parallelism over all GPUs, sequence 4,096
    13b-whole    tensor and sequence parallelism over half of the GPUs, two data-parallel ranks

A step has 16 sequences. Every system trains the same model, whose layers are as many as fit 80 GB in all of them, with
2 GB to spare (LAYERS). By the estimate Transformer Engine needs most: at micro-batch 4 it has room for 3, 7 and 15 of
GPT-175B's layers on two, four and eight GPUs. Stock BF16 alone would have room for 3, 8 and 17.

The table has each measured figure with the estimate of `megatron-fp8 estimate` and its error behind it; a figure that
was not measured has the estimate alone. Bare collectives are the profiled step's, on rank 0: the time in which nothing
else ran; the estimate's also count what a hidden collective slows. GB are 10^9 bytes of torch's allocator.
"""

import argparse
import csv
import json
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

BATCH, EVERY_CARD = 16, "h100-80gb-sxm"
GPUS = (2, 4, 8)
LAYERS = {
    "175b": {2: 3, 4: 7, 8: 15},
    # Transformer Engine's weights and states are 58, 51 and 45 GB (`megatron-fp8 memory`, and 2 bytes for its copies);
    # the rest is for the logits, 6 GB, and for activations, whose size depends on the router.
    "qwen3-moe": {2: 8, 4: 14, 8: 24},
}
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "175b": "--tensor-model-parallel-size={gpus} --sequence-parallel",
    "qwen3-moe": "--expert-model-parallel-size={gpus}",
    "13b-whole": "--tensor-model-parallel-size={half} --sequence-parallel " + OVERLAP,
    "tiny": "--tensor-model-parallel-size={gpus}",
}
OVER = 0.02  # an arm is tried if the estimate exceeds the GPU by this share or less: it was wrong by as much at worst
IDENTITY = ("shape", "nproc", "gbs", "system", "mbs")  # the columns that say which arm a row is of
FORMS = {"ms": ".1f", "tokens/s/GPU": ",.0f", "TFLOP/s": ".0f", "GB after a step": ".1f", "peak GB": ".1f",
         "bare ms": ".0f", "x TE's best": ".2f", "x BF16": ".2f", "peak of BF16's": ".2f"}  # fmt: skip
WITH_ERROR = ("ms", "peak GB")
type Figures = dict[str, float]


class Arm(NamedTuple):
    shape: str
    system: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.shape}:{self.system}:{self.micro_batch}"


def _arms(shape: str, systems: str, micro_batch: int) -> list[Arm]:
    return [Arm(shape, system, micro_batch) for system in systems.split()]


PLAN = [  # the most important first: the time may end before the last
    *_arms("175b", "O3-graph te-delayed-graph bf16 O3 te-delayed", 1),
    *_arms("175b", "O3-graph te-delayed-graph bf16", 2),
    *_arms("175b", "O3-graph te-delayed-graph bf16", 4),
    *_arms("qwen3-moe", "O3-experts-grouped te-delayed-experts", 1),
    *_arms("13b-whole", "O3-graph te-delayed-graph", 2),
]


def arm_of(name: str) -> Arm:
    """The arm that --arms names."""
    shape, _, rest = name.partition(":")
    system, _, size = rest.partition(":")
    divides = size.isdecimal() and int(size) > 0 and BATCH % int(size) == 0
    if shape not in LAYOUTS or system not in SYSTEMS or not divides:
        raise argparse.ArgumentTypeError(
            f"{name}: SHAPE:SYSTEM:MICRO-BATCH is meant; shapes are {', '.join(LAYOUTS)}, systems train_step.py's, and "
            f"the micro-batch divides {BATCH}"
        )
    return Arm(shape, system, int(size))


def settings(arm: Arm, gpus: int, layers: int | None, extra: Sequence[str] = ()) -> dict:
    """The columns of a row that are known before it is measured. layers: None for LAYERS'."""
    words = []
    if count := layers or LAYERS.get(arm.shape, {}).get(gpus):
        words.append(f"--num-layers={count}")
    words += LAYOUTS[arm.shape].format(gpus=gpus, half=gpus // 2).split()
    shape = " ".join([arm.shape, *words, *extra])
    return {"shape": shape, "nproc": gpus, "gbs": BATCH, "system": arm.system, "mbs": arm.micro_batch}


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
    """Markdown: a table for each model and layout, an arm a line; beneath it the fastest of each kind of system."""
    said = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of = [row for row in rows if row["shape"] == shape]
        estimates = [predicted(row, on) for row in of]
        found, model = [measured(row) for row in of], [modelled(e) for e in estimates]
        compare(of, found)
        compare(of, model)
        lines = []
        for row, e, own, by_model in zip(of, estimates, found, model, strict=True):
            cells = {"arm": f"{row['system']}, MBS {row['mbs']}"}
            cells |= {name: _cell(name, own.get(name), by_model.get(name)) for name in FORMS}
            cells["model: GB left"] = f"{e.room():.1f}" if e else ""
            lines.append(cells)
        said += [f"{shape}; {of[0]['nproc']} GPUs, global batch {of[0]['gbs']}; {on.name}", "",
                 render(lines, "markdown"), "", *_fastest(of, found, "Measured"),
                 *_fastest(of, model, "By the estimate"), ""]  # fmt: skip
    return "\n".join(said)


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
            best[kind] = found["ms"], f"{row['system']}, MBS {row['mbs']}"
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
    name = next((name for name in hardware.known() if name.split("-")[0].upper() in gpu), EVERY_CARD)
    return hardware.load(name)


def measure(args: Namespace, plan: Sequence[dict], on: Hardware, began: float, keep: Callable[[dict], None]) -> None:
    """Run the arms of the plan's rows, as long as there is time. keep: takes each row.

    began: when the call began, in time.monotonic()'s seconds.
    """
    longest = 0.0
    for i, row in enumerate(plan):
        left = 60 * args.minutes - (time.monotonic() - began)
        if left < longest:
            later = " ".join(str(Arm(r["shape"].split()[0], r["system"], r["mbs"])) for r in plan[i:])
            print(f"{left:.0f} s are left: not begun: --arms {later}", flush=True)
            return
        e = predicted(row, on)
        if e is not None and e.room() < -OVER * e.peak:
            print(f"{row['system']} MBS {row['mbs']} of {row['shape']}: not tried: the estimate has {e.peak:.1f} GB, "
                  f"{-e.room():.1f} too many", flush=True)  # fmt: skip
            continue
        shape, *extra = row["shape"].split()
        options = {"systems": [row["system"]], "mbs": {row["system"]: row["mbs"]}, "shape": shape, "gbs": row["gbs"]}
        options |= {"extra": extra, "timeout": min(args.timeout, left)}
        if args.logs:
            options["logs"] = f"{args.logs}/{shape}-{row['mbs']}"
        print(f"{row['shape']}, {row['nproc']} GPUs:", flush=True)
        start = time.monotonic()
        train_step.measure(Namespace(**{**vars(args), **options}), lambda found, row=row: keep(row | found))
        longest = max(longest, time.monotonic() - start)


def arguments(argv: list[str] | None = None) -> Namespace:
    """Parse the command line, or argv. `args.extra` has flags for Megatron, which every arm gets."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, choices=GPUS, default=8, help="GPUs")
    parser.add_argument("--arms", nargs="+", type=arm_of, default=PLAN, metavar="SHAPE:SYSTEM:MICRO-BATCH")
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
    if args.hardware and not args.table:
        parser.error(f"--hardware {args.hardware}: needs --table; a run knows its GPUs")
    return args


def main() -> None:
    began, args = time.monotonic(), arguments()
    plan = [settings(arm, args.nproc, args.layers, args.extra) for arm in args.arms]
    if args.table:
        on = hardware.load(args.hardware or EVERY_CARD)
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

    measure(args, plan, on, began, keep)
    print("\n" + table(merged(plan, kept), on), flush=True)


if __name__ == "__main__":
    main()
