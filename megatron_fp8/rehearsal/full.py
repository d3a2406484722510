"""`megatron-fp8 rehearse --full --rank R`: one true rank of a job at full size on this GPU, measured and estimated.

The job's command, with stock's --fake-process-group: no other rank exists, collectives end at once (full_rank.py). Kept
are model, layout, level, micro-batch, recomputation and schedule; of micro-batches so many that as many are in flight
as in the job. Tensor-parallel ranks are alike, and only the first of them reads data: R is taken down to it.

Not seen: NCCL and its buffers, values, hangs, speed.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

from ..errors import UserError
from ..flags.command import Launch, words_of
from ..flags.numbers import largest_batch
from ..perf.text import show
from .full_rank import MARK
from .job import Job
from .shrink import DATA, FOLDERS, LEFT_OUT, LENGTH

STEPS = 3
_GB = 1e9
_LATE = 124  # the exit code, as of timeout(1)


def rehearse(launch: Launch, job: Job, gpus: int, args: Namespace, environment: dict[str, str]) -> int:
    """Run the rank and print its page; returns 0 where it trained, else 1.

    environment: this process' own, before anything hid the GPU.  UserError for a rank that the job does not have.
    """
    if job.args is None:
        raise UserError(f"rehearse --full: the job would not start: {job.error}")
    if job.context > 1:
        raise UserError(f"rehearse --full: --context-parallel-size {job.context}: no rank of it is run, as Transformer "
                        "Engine's attention does it; remove it, or see megatron-fp8 estimate")  # fmt: skip
    tensor = job.args.tensor_model_parallel_size
    if not 0 <= args.rank < gpus:
        raise UserError(f"--rank {args.rank}: the job has ranks 0 to {gpus - 1}; give one of them")
    rank = args.rank - args.rank % tensor
    flags, batch = _flags(job)
    command = [sys.executable, "-m", "megatron_fp8.rehearsal.full_rank", launch.script[-1], *flags]
    folder = Path(__file__).resolve().parents[2]
    environment = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment, **launch.variables, "RANK": str(rank), "LOCAL_RANK": "0",
        "WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), environment.get("PYTHONPATH")))),
    }  # fmt: skip
    began = time.monotonic()
    code, lines = _start(command, environment, args)
    seconds = time.monotonic() - began
    marked = next((line for line in reversed(lines) if line.startswith(MARK)), None)
    found = json.loads(marked.removeprefix(MARK)) if marked else {}
    show("\n".join(_page(job, gpus, args.rank, rank, batch, code, seconds, found, lines, args.timeout)), args.format)
    return int(code != 0)


def _start(command: list[str], environment: dict[str, str], args: Namespace) -> tuple[int, list[str]]:
    """(Exit code, lines) of the rank; _LATE where it took too long."""
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors="replace", timeout=args.timeout)  # fmt: skip
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        code, text = _LATE, said.decode(errors="replace") if isinstance(said, bytes) else said
    if args.folder:
        (Path(args.folder) / "full.log").write_text(f"{shlex.join(command)}\n{text}")
    return code, text.splitlines()


def _flags(job: Job) -> tuple[list[str], int]:
    """(The rank's flags, its global batch)."""
    a = job.args
    assert a is not None
    chunks = a.virtual_pipeline_model_parallel_size or 1
    count = largest_batch(a) // (a.micro_batch_size * a.data_parallel_size)
    enough = 2 * a.pipeline_model_parallel_size if chunks > 1 else a.pipeline_model_parallel_size + 1
    batch = min(count, max(2, enough)) * a.micro_batch_size * a.data_parallel_size
    replaced = {*LENGTH, *FOLDERS, *DATA, *LEFT_OUT, "--global-batch-size", "--fake-process-group"}
    kept = [(flag, values) for flag, values in job.flags if flag not in replaced]
    vocabulary = a.vocab_size or a.padded_vocab_size
    ours = f"""--fake-process-group --global-batch-size {batch} --train-iters {STEPS} --lr-decay-iters 1000
        --eval-iters 0 --eval-interval 1000000 --log-interval 1 --num-workers 0 --mock-data --split 98,1,1
        --tokenizer-type NullTokenizer --vocab-size {vocabulary} --distributed-timeout-minutes 10"""
    if job.cells is not None and not any(flag == "--fp8-grad-accum" for flag, _ in kept):
        ours += f" --fp8-grad-accum {job.cells['grad_accum']}"  # which the number of micro-batches would decide
    return [*words_of(kept), *ours.split()], batch


def _page(
    job: Job, gpus: int, asked: int, rank: int, batch: int, code: int, seconds: float, found: dict[str, float],
    lines: list[str], timeout: float,
):  # fmt: skip
    a = job.args
    assert a is not None
    pipeline = a.pipeline_model_parallel_size
    stage = rank // (gpus // pipeline)
    result = "passed" if code == 0 else "failed"
    yield f"# Rank {rank} of {gpus} at full size: {result}, {seconds:.0f} s"
    yield ""
    if rank != asked:
        yield f"- Asked for was rank {asked}; tensor-parallel ranks are alike, and their first is {rank}."
    yield (f"- {job.level}: TP {a.tensor_model_parallel_size}, PP {pipeline} (stage {stage}), DP "
           f"{a.data_parallel_size}; {STEPS} steps of {batch // (a.micro_batch_size * a.data_parallel_size)} "
           f"micro-batches of {a.micro_batch_size}, by stock's --fake-process-group.")  # fmt: skip
    yield from (f"- {flag}: left out, it is of Transformer Engine's attention." for flag in job.unseen)
    if code:
        memory = any("out of memory" in line or "OutOfMemoryError" in line for line in lines)
        late = code == _LATE and seconds >= timeout
        why = f": it took longer than --timeout {timeout:g}" if late else ": it does not fit this GPU" if memory else ""
        yield f"- Exit code {code}{why}. The end of its log:"
        yield from (f"      {line}" for line in lines[-15:])
    yield from _figures(job, gpus, stage, batch, found)
    yield "- Not seen: NCCL and its buffers, values, hangs, speed."


def _figures(job: Job, gpus: int, stage: int, batch: int, found: dict[str, float]):
    """The table: measured and estimated."""
    from ..perf.read import Flags, workload
    from ..perf.step import stages
    from ..perf.systems import SYSTEMS

    a = job.args
    assert a is not None
    try:
        level = job.level if job.level in SYSTEMS and SYSTEMS[job.level].level else None
        asked = dict(job.flags).get("--attention-backend", ["auto"])  # which a level has changed in args
        w = workload(Flags(a, level), gpus, global_batch_size=batch, attention_backend=asked[0])
    except UserError as error:
        yield f"- No estimate: {error}"
        estimated = None
    else:
        held, beside = list(stages(w))[stage]
        estimated = sum(held.values()) / _GB, sum([*held.values(), *beside.values()]) / _GB
    if not found:
        said = f"the estimate: {estimated[0]:.3f} GB held, {estimated[1]:.3f} at the peak" if estimated else "nothing"
        yield f"- No memory was measured (no GPU, or it did not end); {said}."
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
