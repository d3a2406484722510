"""`megatron-fp8 rehearse --full --rank R`: one true rank of a job at full size on this GPU, measured and estimated.

one_rank.py runs the job's command. Tensor-parallel ranks are alike and only the first of them reads data, so R is
replaced by the first rank of its tensor-parallel group.

Not covered: NCCL and its buffers, values, hangs, speed.
"""

import shlex
from argparse import Namespace
from pathlib import Path

from ...errors import UserError
from ...flags.command import Launch
from ..perf.output import show
from .job import Job
from .one_rank import STEPS, Ran, flags_of_rank, refuse, run_rank

_GB = 1e9


def rehearse(launch: Launch, job: Job, gpus: int, args: Namespace, environment: dict[str, str]) -> int:
    """Run the rank and print its page. Returns 0 if it trained, else 1.

    environment: this process's own, copied before the GPU was hidden.  Raises UserError if the job has no such rank.
    """
    a = refuse(job, "rehearse --full")
    if not 0 <= args.rank < gpus:
        raise UserError(f"--rank {args.rank}: the job has ranks 0 to {gpus - 1}; give one of them")
    rank = args.rank - args.rank % a.tensor_model_parallel_size
    flags, batch = flags_of_rank(job)
    ran = run_rank(launch, flags, rank, gpus, environment, args.timeout)
    if args.folder:
        (Path(args.folder) / "full.log").write_text("\n".join([shlex.join(ran.command), *ran.lines, ""]))
    show("\n".join(_page(job, gpus, args.rank, rank, batch, ran)), args.format)
    return int(ran.code != 0)


def _page(job: Job, gpus: int, asked: int, rank: int, batch: int, ran: Ran):
    a = job.args
    assert a is not None
    pipeline = a.pipeline_model_parallel_size
    stage = rank // (gpus // pipeline)
    result = "passed" if ran.code == 0 else "failed"
    yield f"# Rank {rank} of {gpus} at full size: {result}, {ran.seconds:.0f} s"
    yield ""
    if rank != asked:
        yield f"- You asked for rank {asked}. Tensor-parallel ranks are alike, and the first of its group is {rank}."
    context = f"CP {a.context_parallel_size}, " * (a.context_parallel_size > 1)
    yield (f"- {job.level}: TP {a.tensor_model_parallel_size}, PP {pipeline} (stage {stage}), {context}DP "
           f"{a.data_parallel_size}; {STEPS} steps of {batch // (a.micro_batch_size * a.data_parallel_size)} "
               f"micro-batches of {a.micro_batch_size}, in stock's --fake-process-group.")  # fmt: skip
    yield from (f"- {flag}: left out, because it needs Transformer Engine's attention." for flag in job.unseen)
    if ran.code:
        yield f"- {ran.failure()}"
    yield from _figures(job, gpus, stage, batch, ran.found)
    yield "- Not covered: NCCL and its buffers, values, hangs, speed."


def _figures(job: Job, gpus: int, stage: int, batch: int, found: dict[str, float]):
    """The table of measured and estimated memory."""
    from ..perf.job_flags import Flags, workload
    from ..perf.step import stages
    from ..perf.systems import SYSTEMS

    a = job.args
    assert a is not None
    try:
        level = job.level if job.level in SYSTEMS and SYSTEMS[job.level].level else None
        asked = dict(job.flags).get("--attention-backend", ["auto"])  # as given; a level has changed it in args
        w = workload(Flags(a, level), gpus, global_batch_size=batch, attention_backend=asked[0])
    except UserError as error:
        yield f"- No estimate: {'; '.join(map(str, error.args))}"
        estimated = None
    else:
        held, beside = list(stages(w))[stage]
        estimated = sum(held.values()) / _GB, sum([*held.values(), *beside.values()]) / _GB
    if not found:
        said = f"the estimate: {estimated[0]:.3f} GB held, {estimated[1]:.3f} at the peak" if estimated else "nothing"
        yield f"- No memory was measured (no GPU, or the rank did not finish); {said}."
        return
    yield ""
    yield "| GB | measured | estimate | |"
    yield "|---|---|---|---|"
    for i, name in enumerate(("held", "peak")):
        measured = found[name] / _GB
        of = f"{estimated[i]:.2f} | {estimated[i] / measured - 1:+.1%}" if estimated else " | "
        yield f"| {name} | {measured:.2f} | {of} |"
    yield f"| reserved by torch's allocator | {found['reserved'] / _GB:.2f} | | |"
    yield f"| in use on the GPU, of {found['there'] / _GB:.1f} | {found['device'] / _GB:.2f} | | |"
    yield ""
