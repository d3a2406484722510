"""Estimate before you book a cluster: does a job fit, how fast is it, and what does each level gain?

    megatron-fp8 estimate --gpus 128 --hardware h100-80gb-sxm -- FLAGS          a table with a column for each system
    megatron-fp8 estimate --gpus 128 --systems bf16 O3 --tokens 40e9 --format json -- FLAGS

FLAGS are Megatron's flags of a GPT, dense or with experts, and the level's, or a job's whole command with launcher and
script. No model is built and no GPU is needed. Systems: bf16 (stock), te (Transformer Engine's FP8, delayed scaling,
QKV split repaired), O1, O2, O3. Without --systems: bf16, te and the flags' level, or all if the flags name no level.
Below the table stands what is not known of experts, and the model's error on measured runs (perf/measured.csv). See
docs/estimate.md.
"""

import csv
import json
import math
import sys
import textwrap
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...errors import UserError
from ...flags.flag import positive
from . import hardware, job_flags, validation
from .collectives import Traffic
from .hardware import Hardware
from .output import FORMATS, show
from .step import Estimate, estimate
from .systems import SYSTEMS, TE_GATHERS_FP8
from .workload import Workload


def add_model_arguments(parser: ArgumentParser) -> None:
    """The flags that `estimate` and `plan` share."""
    parser.add_argument("--hardware", default="h200", metavar="NAME",
                        help=f"{', '.join(hardware.known())}, or a YAML file of your own (h200)")  # fmt: skip
    parser.add_argument("--cap-gb", type=positive().read, metavar="GB",
                        help="GB (10^9 bytes) that torch's allocator may use (what the hardware allows)")  # fmt: skip
    parser.add_argument("--tokens", type=positive().read, metavar="N",
                        help="also print the days to train N tokens")  # fmt: skip
    parser.add_argument("--format", choices=(*FORMATS, "json"), default="text")
    parser.add_argument("flags", nargs=REMAINDER, help="-- and Megatron's flags, or a job's whole command")


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 estimate`."""
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the job (its command's, or one replica's)")
    parser.add_argument("--frozen-base", action="store_true", help="nothing is trained but adapters, not counted here")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help=f"from {', '.join(SYSTEMS)}")
    add_model_arguments(parser)


def run(args: Namespace) -> int:
    """Print the estimates. Returns 0, or 1 if none fits."""
    flags, on = job_flags.parse(args.flags), hardware.load(args.hardware)
    flags.args.frozen_base = args.frozen_base
    gpus = args.gpus or flags.gpus or flags.replica
    names = args.systems or (["bf16", "te", flags.level] if flags.level else list(SYSTEMS))
    found = [estimate(job_flags.workload(flags, gpus, name), on) for name in names]
    rows = [record(e, args.cap_gb, args.tokens) for e in found]
    if args.format == "json":
        print(json.dumps({"estimates": rows, "error": validation.summary()}, indent=2))
    elif args.format == "csv":
        write_csv(rows)
    else:
        show("\n".join(table(found, args.cap_gb, args.tokens)), args.format)
        weights, activations = job_flags.megatrons_memory(flags, found[0].workload)
        for note in [*_left_out(flags.left_out), *notes(found)]:
            print(f"\n{note}")
        print(f"\nMegatron's own theory of stock BF16: {weights:.1f} GB of weights and optimizer, {activations:.1f} of "
              f"activations.\n{validation.line()}")  # fmt: skip
    return 0 if any(e.room(args.cap_gb) >= 0 for e in found) else 1


def largest_micro_batch(w: Workload, on: Hardware, cap_gb: float | None = None) -> Estimate | None:
    """The estimate with the largest micro-batch that fits and divides the global batch; None if no size fits.

    It tries all sizes: a larger one may fit where a smaller does not, since with a single micro-batch a step the
    gradients may be stored in FP8.
    """
    best = None
    for size in divisors(w.global_batch // w.data):
        try:
            found = estimate(replace(w, micro_batch=size), on)
        except UserError:  # virtual stages do not allow this number of micro-batches
            continue
        if found.room(cap_gb) >= 0:
            best = found
    return best


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def record(e: Estimate, cap_gb: float | None, tokens: float | None) -> dict[str, Any]:
    """An estimate as one flat dictionary, for JSON and CSV."""
    w, largest = e.workload, largest_micro_batch(e.workload, e.hardware, cap_gb)
    found: dict[str, Any] = {
        "system": w.system.name, "hardware": e.hardware.name, "gpus": w.gpus, "tensor": w.tensor,
        "pipeline": w.pipeline, "virtual": w.virtual, "context": w.context, "data": w.data,
        **_of_experts(w), "micro_batch": w.micro_batch, "global_batch": w.global_batch, "sequence": w.sequence,
        "recompute": w.recompute,
        "step_ms": e.ms, "gpu_ms": e.gpu_ms, "host_ms": e.host_ms, "samples_per_s": e.samples_a_second,
        "tokens_per_s_per_gpu": e.tokens_a_second, "tflops_per_gpu": e.tflops,
        "mfu_of_bf16_peak": e.mfu(e.hardware.peak_bf16_tflops), "mfu_of_fp8_peak": e.mfu(e.hardware.peak_fp8_tflops),
        "held_gb": e.held, "peak_gb": e.peak, "peak_stage": e.stage, "room_gb": e.room(cap_gb),
        "largest_micro_batch": largest.workload.micro_batch if largest else 0,
    }  # fmt: skip
    if tokens:
        found["days"] = e.days(tokens)
    found |= {f"ms {kind}": ms for kind, ms in e.parts.items()}
    found |= {f"gb {kind}": gb for kind, gb in e.memory.items()}
    found |= {f"gb beside the peak: {kind}": gb for kind, gb in e.of_graph.items()}
    for kind, traffic in e.traffic.items():
        found |= {f"{kind} {name}": value for name, value in traffic._asdict().items()}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}


def _of_experts(w: Workload) -> dict[str, Any]:
    parts = w.job.expert_ranks // w.job.expert_model_parallel_size
    return {"expert": w.job.expert_model_parallel_size, "expert_tensor": parts} if w.job.num_experts else {}


def notes(found: Sequence[Estimate]) -> list[str]:
    """A line for each thing that these estimates do not know of flags and experts."""
    lines = []
    if any(e.workload.system is TE_GATHERS_FP8 for e in found):
        lines.append("TE FP8 with --fp8-param-gather: memory and the gather of weights are arithmetic, the rest is as "
                     "without it.")  # fmt: skip
    if any(e.workload.job.grad_reduce_in_bf16 for e in found):
        lines.append("--grad-reduce-in-bf16: stock's gradients take half the memory and the wire; the time to write "
                     "them is that of FP32.")  # fmt: skip
    if any(e.workload.job.num_experts for e in found):
        lines += _notes_on_experts(found)
    return [textwrap.fill(line, width=100) for line in lines]


def _left_out(flags: Sequence[str]) -> list[str]:
    line = f"The level switches off {', '.join(flags)}. All columns are without; stock and TE may be faster with it."
    return [textwrap.fill(line, width=100)] if flags else []


def _notes_on_experts(found: Sequence[Estimate]) -> list[str]:
    lines = [
        "Experts: each counts as getting as many tokens as the others. The cost of imbalance is not in it. Their "
        "products were measured alone, and two models of four layers on one H200. The host's time grows with a rank's "
        "experts as it did there. Nothing was measured on several GPUs: the tokens sent between them are arithmetic.",
    ]
    if any(e.workload.together and not e.workload.experts_fp8 for e in found):
        lines.append("Stock BF16 with experts together: the products are torch's, the host's time is that of TE FP8.")
    if any(e.workload.experts_fp8 and not e.workload.together for e in found):
        lines.append("Experts one by one in FP8: the host's time is that of BF16.")
    return lines


def write_csv(rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def table(found: Sequence[Estimate], cap_gb: float | None, tokens: float | None) -> list[str]:
    """Lines of a Markdown table with a column for each system."""
    w, on = found[0].workload, found[0].hardware
    largest = [largest_micro_batch(e.workload, on, cap_gb) for e in found]
    head = (
        f"{on.name}, {w.gpus} GPUs: TP {w.tensor}, PP {w.pipeline}"
        + (f" x {w.virtual} chunks" if w.virtual > 1 else "")
        + (f", CP {w.context}" if w.context > 1 else "")
        + (f", EP {w.job.expert_model_parallel_size}" if w.job.num_experts else "")
        + f", DP {w.data}; micro-batch {w.micro_batch}, global batch {w.global_batch}, sequence {w.sequence}"
    )
    lines = [head, "", "| | " + " | ".join(e.workload.system.title for e in found) + " |"]
    lines.append("|---" * (1 + len(found)) + "|")

    def row(name: str, cells: Iterable[str]) -> None:
        cells = list(cells)
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")

    row("**step, ms**", (f"{e.ms:,.0f}" for e in found))
    row("samples/s", (f"{e.samples_a_second:.2f}" for e in found))
    row("tokens/s/GPU", (f"{e.tokens_a_second:,.0f}" for e in found))
    row("TFLOP/s/GPU, as Megatron's", (f"{e.tflops:.0f}" for e in found))
    row(f"MFU of {on.peak_bf16_tflops:,.0f} (BF16)", (f"{e.mfu(on.peak_bf16_tflops):.1%}" for e in found))
    row(f"MFU of {on.peak_fp8_tflops:,.0f} (FP8)", (f"{e.mfu(on.peak_fp8_tflops):.1%}" * e.workload.fp8
                                                      for e in found))  # fmt: skip
    if tokens:
        row(f"days for {tokens:.3g} tokens", (f"{e.days(tokens):.1f}" for e in found))
    row("**peak memory, GB**", (f"{e.peak:.1f}" for e in found))
    row("held between steps, GB", (f"{e.held:.1f}" for e in found))
    if w.pipeline > 1:
        row("fullest stage, from 0", (str(e.stage) for e in found))
    rooms = [e.room(cap_gb) for e in found]
    row(f"fits, GB left of {on.room(cap_gb):.1f}",
        (f"yes, {room:.1f}" if room >= 0 else f"NO, {-room:.1f} over" for room in rooms))  # fmt: skip
    row("largest micro-batch that fits", (str(e.workload.micro_batch) if e else "none" for e in largest))
    row("tokens/s/GPU with it", (f"{e.tokens_a_second:,.0f}" if e else "" for e in largest))
    row("bound by", ("the host" if e.host_ms > e.gpu_ms else "the GPU" for e in found))
    row("host, ms", (f"{e.host_ms:,.0f}" for e in found))
    for title, of, unit in (
        ("ms", [e.parts for e in found], 1), ("GB", [e.memory for e in found], 3),
        ("GB beside the peak", [e.of_graph for e in found], 3),
    ):  # fmt: skip
        for kind in dict.fromkeys(kind for parts in of for kind in parts):
            row(f"{title}: {kind}", (f"{parts[kind]:,.{unit}f}" if kind in parts else "" for parts in of))
    kinds = list(dict.fromkeys(kind for e in found for kind in e.traffic))
    if kinds:
        lines += ["", "Collectives of a rank and step: GB inside a node + between nodes; ms / of these bare", ""]
        lines += ["| | " + " | ".join(e.workload.system.title for e in found) + " |", "|---" * (1 + len(found)) + "|"]
    for kind in kinds:
        sent = [e.traffic.get(kind) for e in found]
        row(f"GB: {kind}", (_gigabytes(t) if t else "" for t in sent))
        row(f"ms: {kind}", (f"{_short(t.ms)} / {_short(t.bare)}" if t else "" for t in sent))
    return lines


def _gigabytes(t: Traffic) -> str:
    """GB sent inside a node, and between nodes if any. Short, so that five systems fit a terminal."""
    return f"{t.inside / 1e9:.2f}" + (f" + {t.between / 1e9:.2f}" if t.between else "")


def _short(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}"


