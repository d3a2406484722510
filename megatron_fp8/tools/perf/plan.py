"""Find the layout for a number of GPUs: all that Megatron accepts, ranked by tokens a second, and why the others lose.

    megatron-fp8 plan --gpus 128 --hardware h100-80gb-sxm -- FLAGS --fp8-level O3

Searched: tensor parallelism inside a node (with sequence parallelism), pipeline stages and virtual chunks, data
parallelism with the remaining GPUs, every size of expert parallelism that divides the experts, every micro-batch, and
no, selective or full recomputation. FLAGS give the model, the global batch, context parallelism, expert tensor
parallelism (without it, that of tensor parallelism) and the level; their own layout, if it is among the results, is
marked. For each layout the fastest micro-batch and recomputation that fit are shown, with the flags that overlap data
parallelism; a line says which of them FLAGS lack. Beyond the runs of perf/measured.csv the ranking is arithmetic, not
measurement.
"""

import json
import math
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UserError
from . import hardware, job_flags, validation
from .estimate import add_model_arguments, divisors, notes, record, write_csv
from .hardware import Hardware
from .job import flag
from .job_flags import Flags
from .output import show
from .step import Estimate, estimate, room
from .systems import chosen
from .workload import Workload

_MOST_CHUNKS = 8
_SILENCE = 5  # seconds between lines that say how far the search is
_OVERLAP = "overlap_grad_reduce", "overlap_param_gather"  # of every layout
RECOMPUTE: tuple[str | None, ...] = (None, "selective", "full")  # each slower, if both are graphs or neither is


@dataclass(frozen=True)
class Layout:
    tensor: int
    pipeline: int
    virtual: int
    expert: int | None = None  # of a model with experts

    def __str__(self) -> str:
        virtual = f" x {self.virtual}" if self.virtual > 1 else ""
        return f"TP {self.tensor}, PP {self.pipeline}{virtual}" + (f", EP {self.expert}" if self.expert else "")


@dataclass(frozen=True)
class Candidate:
    """A layout with its best estimate that fits, or the reason that there is none."""

    layout: Layout
    best: Estimate | None
    lost: str = ""


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 plan`."""
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the job (its command's)")
    parser.add_argument("--system", metavar="SYSTEM", help="bf16, te, O1, O2 or O3 (the flags' level, or O3)")
    parser.add_argument("--top", type=int, default=8, metavar="N", help="print the N fastest layouts (8)")
    parser.add_argument("--all", action="store_true", help="print every layout")
    add_model_arguments(parser)


def run(args: Namespace) -> int:
    """Print the plan. Returns 0, or 1 if no layout fits."""
    if sys.stderr.isatty():  # a log gets a mistake's line alone
        _tell("reading the flags with Megatron's parser")
    flags, on = job_flags.parse(args.flags), hardware.load(args.hardware)
    args.gpus = args.gpus or flags.gpus
    if args.gpus is None:
        raise UserError("--gpus is missing; give it, or put a command behind -- whose launcher says how many")
    system = args.system or flags.level or "O3"
    found = search(flags, args.gpus, system, on, args.cap_gb)
    ranked = sorted((c for c in found if c.best), key=lambda c: -c.best.tokens_a_second)  # type: ignore[union-attr]
    lost = [c for c in found if not c.best]
    top = len(found) if args.all else args.top
    rows = [record(c.best, args.cap_gb, args.tokens) for c in ranked[:top] if c.best]
    left_out = max(0, len(ranked) - top)
    lacking = [flag(name) for name in _OVERLAP if not getattr(flags.args, name)]
    lacks = f"Counted with {' '.join(lacking)}, which the flags lack: add them" if lacking and ranked else ""
    if args.format == "json":
        why_lost = {str(c.layout): c.lost for c in lost}
        print(json.dumps({"layouts": rows, "left_out": left_out, "added_flags": lacking, "lost": why_lost,
                          "error": validation.summary()}, indent=2))  # fmt: skip
    elif args.format == "csv":
        write_csv(rows)
        for said in filter(None, (_left_out(left_out) if left_out else "", lacks)):
            _tell(said)
        if not ranked:  # CSV rows cannot show this
            why_not = f"{lost[0].layout}: {lost[0].lost}"
            _tell(f"none of {len(lost)} layouts fits; {why_not}")
    else:
        own = flags.args
        mine = Layout(own.tensor_model_parallel_size, own.pipeline_model_parallel_size, job_flags.virtual(own),
                      own.expert_model_parallel_size if own.num_experts else None)  # fmt: skip
        show("\n".join(_table(ranked, lost, args, on, mine, top, own.context_parallel_size)), args.format)
        for note in notes([c.best for c in ranked[:1] if c.best]):
            print(note)
        if lacks:
            print(lacks)
        print(f"\n{validation.line()}")
    return 0 if ranked else 1


def search(flags: Flags, gpus: int, system: str, on: Hardware, cap_gb: float | None) -> list[Candidate]:
    """Every layout of `gpus` GPUs, with the best of its micro-batches and recomputations."""
    context = flags.args.context_parallel_size
    if flags.args.global_batch_size is None:
        raise UserError("--global-batch-size is missing; a plan needs the batch of the training")
    if gpus % context:
        raise UserError(f"--gpus {gpus}: no multiple of --context-parallel-size {context}; change one")
    # Report a mistake that no layout can mend once, here, with the whole model on one replica's GPUs.
    chosen(system, "--system")
    job_flags.check_optimizer(flags.args, gpus)
    _workload(flags, context, system, Layout(1, 1, 1), expert_tensor_parallel_size=None)
    layouts, found = list(_layouts(flags.args, gpus, context, on.gpus_per_node)), []
    told = time.monotonic()
    _tell(f"{len(layouts)} layouts to compare")
    for layout in layouts:
        found.append(_best(flags, gpus, system, on, cap_gb, layout))
        if time.monotonic() - told > _SILENCE:
            told = time.monotonic()
            _tell(f"{len(found)} of {len(layouts)} layouts")
    return found


def _tell(line: str) -> None:
    print(f"megatron-fp8 plan: {line}", file=sys.stderr, flush=True)


def _layouts(args: Namespace, gpus: int, context: int, gpus_per_node: int) -> Iterator[Layout]:
    for tensor in divisors(min(gpus, gpus_per_node)):
        for pipeline in divisors(args.num_layers or 1):
            if gpus % (tensor * pipeline * context):
                continue
            chunks = divisors(args.num_layers // pipeline) if pipeline > 1 else [1]
            ranks, parts = gpus // pipeline, args.expert_tensor_parallel_size or tensor
            for expert in divisors(args.num_experts) if args.num_experts else [None]:
                if expert is None or ranks % (expert * parts) == 0:
                    yield from (Layout(tensor, pipeline, virtual, expert) for virtual in chunks
                                if virtual <= _MOST_CHUNKS)  # fmt: skip


def _best(
    flags: Flags, gpus: int, system: str, on: Hardware, cap_gb: float | None, layout: Layout
) -> Candidate:
    best, nearest = None, -math.inf
    data = gpus // (layout.tensor * layout.pipeline * flags.args.context_parallel_size)
    if flags.args.global_batch_size % data:
        return Candidate(layout, None, f"not divisible: DP {data} does not divide the global batch")
    try:
        of_one = [_workload(flags, gpus, system, layout, recompute) for recompute in RECOMPUTE]
    except UserError as error:  # no micro-batch mends it
        return Candidate(layout, None, f"not divisible: {error}")
    for size in divisors(flags.args.global_batch_size // data):
        try:
            of_size = [replace(w, micro_batch=size) for w in of_one]
        except UserError:  # too few micro-batches for virtual stages
            continue
        for w in of_size:
            left = room(w, on, cap_gb)
            nearest = max(left, nearest)
            if left < 0:
                continue
            found = estimate(w, on)
            if best is None or found.tokens_a_second > best.tokens_a_second:
                best = found
            if w.graphed == of_size[0].graphed:
                break
    return Candidate(layout, best, "" if best else f"does not fit: {-nearest:.1f} GB too much at the least")


def _workload(
    flags: Flags, gpus: int, system: str, layout: Layout, recompute: str | None = None, **more: Any
) -> Workload:
    """With a micro-batch of 1; `replace` makes the others of it. Some recomputation makes a graph impossible."""
    return job_flags.workload(
        flags,
        gpus,
        system,
        expert_model_parallel_size=layout.expert or 1,
        **more,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=layout.virtual,
        sequence_parallel=layout.tensor > 1,
        micro_batch_size=1,
        recompute_activations=False,
        recompute_granularity=recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        recompute_modules=["core_attn"],
        **dict.fromkeys(_OVERLAP, True),
    )


def why(e: Estimate, winner: Estimate) -> str:
    """Why a layout is slower: the shares of its step that exceed the winner's. For the winner: "the fastest"."""
    if e is winner:
        return "the fastest"
    recomputed = e.parts.get("recomputation", 0.0) / e.gpu_ms
    shares = {"bubble": e.bubble, "bare communication": e.bare, "recomputation": recomputed}
    before = {
        "bubble": winner.bubble, "bare communication": winner.bare,
        "recomputation": winner.parts.get("recomputation", 0.0) / winner.gpu_ms,
    }  # fmt: skip
    more = {name: share for name, share in shares.items() if share - before[name] > 0.005}
    said = [f"{name} {share:.1%}" for name, share in sorted(more.items(), key=lambda item: -item[1])]
    if e.host_ms > e.gpu_ms:
        said.insert(0, "bound by the host")
    return ", ".join(said) or "smaller products and passes"


def _table(
    ranked: list[Candidate], lost: list[Candidate], args: Namespace, on: Hardware, mine: Layout, top: int, context: int
) -> Iterator[str]:
    allowed = f"{on.room(args.cap_gb):.1f} GB (10^9 bytes)"
    given = f", all with CP {context}, as given" if context > 1 else ""
    yield f"{on.name}, {args.gpus} GPUs: {len(ranked)} layouts fit in {allowed}, {len(lost)} do not{given}"
    yield ""
    if ranked:
        days = f" days for {args.tokens:.3g} tokens |" if args.tokens else ""
        yield f"| layout | DP | MBS | recompute | tokens/s/GPU | TFLOP/s/GPU | ms | peak GB |{days} why |"
        yield "|---" * (9 + bool(args.tokens)) + "|"
        winner = ranked[0].best
        assert winner is not None
        shown = ranked[:top]
        shown += [c for c in ranked[top:] if c.layout == mine]
        for c in shown:
            e = c.best
            assert e is not None
            w = e.workload
            own = " (as given)" if c.layout == mine else ""
            cells: list[Any] = [
                f"{c.layout}{own}", w.data, w.micro_batch, w.recompute, f"{e.tokens_a_second:,.0f}", f"{e.tflops:.0f}",
                f"{e.ms:,.0f}", f"{e.peak:.1f}",
            ]  # fmt: skip
            cells += [f"{e.days(args.tokens):.1f}"] if args.tokens else []
            yield "| " + " | ".join(map(str, [*cells, why(e, winner)])) + " |"
        if len(ranked) > len(shown):
            yield ""
            yield _left_out(len(ranked) - len(shown))
        yield ""
    reasons = Counter(c.lost.partition(":")[0] for c in lost)
    for reason, count in reasons.most_common():
        yield f"{reason}, {count}:"
        of = [c for c in lost if c.lost.startswith(reason)]
        for c in of[:top]:
            yield f"  {c.layout}: {c.lost.partition(': ')[2]}"
        if len(of) > top:
            yield f"  and {len(of) - top} more"


def _left_out(count: int) -> str:
    return f"Slower layouts that fit and are not shown: {count} (--all shows every layout, --top N the N fastest)"
