"""`megatron-fp8 build -- COMMAND`: compile a job's Triton kernels into this machine's cache before the job starts.

It runs one true rank of the first pipeline stage, then one of the second and one of the last, each alone on this GPU
(one_rank.py): three steps and, if the job evaluates, one batch of evaluation. The second step does what the job does
every N-th step (statistics, sharpness); the other two are like most of the job's steps.

All layers stay, as do widths, micro-batch and data parallelism. Triton compiles a kernel again for a number that is 1,
a multiple of 16, or at least 2^31, and Adam's kernel has a constant for how a weight's share divides. With fewer layers
the buckets would be cut elsewhere, and offsets in them would fit in 32 bits.

Ranks of one stage are assumed to be alike: tensor-parallel ranks have the same shapes, data-parallel ranks have rows of
the same buckets. If another rank's row cuts a weight so that its share is not a multiple of 2,048, that rank compiles a
variant of Adam's kernel in its first step.
"""

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping

from ...errors import UserError
from ...flags import log, sharpness
from ...flags.command import take_apart
from ...flags.level import is_stock
from . import ranks
from .job import Job, examine, gpus_of


def build(args: Namespace) -> int:
    """Compile the kernels for the job of args.command and print their number. Returns the exit code."""
    launch = take_apart(args.command[1:] if args.command[0] == "--" else args.command)
    gpus = gpus_of(launch, args.gpus)
    environment = {**os.environ, **launch.variables}  # copied before the GPU is hidden
    if not has_gpu(environment):
        print("megatron-fp8 build: there is no GPU here, so nothing was compiled. Run this on a machine with the "
              "job's kind of GPU", file=sys.stderr)  # fmt: skip
        return 1
    ranks.warm_up(os.path.dirname(os.path.abspath(launch.script[-1])))
    from .one_rank import refuse, run_rank  # these import torch

    job = examine(launch, gpus)
    a = refuse(job, "build")
    if is_stock(job.level):
        raise UserError("build: the command has no --fp8-level, or O0, so it has no kernels of ours; add --fp8-level "
                        "O1, O2 or O3")  # fmt: skip
    compiled = in_cache = 0
    seconds, cache = 0.0, ""
    for stage, rank in ranks_of_stages(a, gpus).items():
        ran = run_rank(launch, flags_of_build(job), rank, gpus, environment, args.timeout)
        said = f"[build] rank {rank} of {gpus}, pipeline stage {stage}"
        if ran.code:
            print(f"{said}: {ran.failure()}", file=sys.stderr)
            return 1
        new, held, compiling = (ran.found.get(name, 0) for name in ("compiled", "in_cache", "compile_seconds"))
        print(f"{said}: {new} kernels compiled in {compiling:.0f} s, {held} were cached; {ran.seconds:.0f} s in all",
              flush=True)  # fmt: skip
        compiled, in_cache, seconds = compiled + new, in_cache + held, seconds + ran.seconds
        cache = ran.found.get("cache", "")
    if not compiled + in_cache:
        print("megatron-fp8 build: no kernel was launched: the ranks saw no GPU", file=sys.stderr)
        return 1
    print(f"{compiled} kernels compiled, {seconds:.0f} s in all; they are in {cache}")
    return 0


def has_gpu(environment: Mapping[str, str]) -> bool:
    """Whether a process sees a GPU. Asked in a subprocess, because this process will fork."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL).returncode == 0


def ranks_of_stages(a: Namespace, gpus: int) -> dict[int, int]:
    """{pipeline stage: its first rank} for the first, the second and the last stage."""
    stages = a.pipeline_model_parallel_size
    apart = a.tensor_model_parallel_size if a.use_tp_pp_dp_mapping else gpus // stages
    return {stage: stage * apart for stage in sorted({0, min(1, stages - 1), stages - 1})}


def flags_of_build(job: Job) -> list[str]:
    """The flags of a rank that compiles."""
    from .one_rank import flags_of_rank

    a = job.args
    assert a is not None
    flags, _ = flags_of_rank(job, evaluations=1 if a.eval_iters else 0)
    every = {log.INTERVAL.name: log.statistics_interval(a), sharpness.INTERVAL.name: sharpness.INTERVAL.given(a)}
    return [*flags, *(word for flag, interval in every.items() if interval for word in (flag, "2"))]
