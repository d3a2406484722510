"""One true rank of a job at full size, alone on a GPU: its flags, its process, and how it ended.

It runs the job's command with stock's --fake-process-group: there is no other rank, and collectives return at once
(full_rank.py). Model, layout, level, micro-batch, recomputation and schedule are the job's. The number of micro-batches
is reduced, but as many are in flight as in the job.
"""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import UserError
from ...flags.command import Launch, words_of
from ...flags.numeric_checks import largest_batch
from ...metrics import VARIABLE as METRICS
from .full_rank import MARK
from .job import Job
from .shrink import DATA, FOLDERS, LEFT_OUT, LENGTH

STEPS = 3
_LATE = 124  # the exit code of timeout(1)
_TAIL = 15  # lines


@dataclass(frozen=True)
class Ran:
    """How a rank ended.

    Attributes:
        command: the command that was started.
        code: its exit code; 124 if it took longer than `timeout` seconds.
        seconds: the time that it took.
        lines: its output.
        found: the JSON of its last line (full_rank.py); empty if it printed none.
    """

    command: list[str]
    code: int
    seconds: float
    timeout: float
    lines: list[str]
    found: dict

    def failure(self) -> str:
        """Why it failed, and the end of its log, as lines."""
        memory = any("out of memory" in line or "OutOfMemoryError" in line for line in self.lines)
        late = self.code == _LATE and self.seconds >= self.timeout
        why = f": it took longer than --timeout {self.timeout:g}" if late else ""
        why = why or (": it does not fit this GPU" if memory else "")
        end = (f"      {line}" for line in self.lines[-_TAIL:])
        return "\n".join([f"Exit code {self.code}{why}. The end of its log:", *end])


def refuse(job: Job, verb: str) -> Namespace:
    """Megatron's arguments of a job whose ranks can run alone; raises UserError for another job."""
    if job.args is None:
        raise UserError(*(f"{verb}: the job would not start: {reason}" for reason in job.error.split("\n")))
    if job.context > 1:
        raise UserError(f"{verb}: --context-parallel-size {job.context}: a rank with Transformer Engine's context "
                        "parallelism cannot run alone; remove it, or see megatron-fp8 estimate")  # fmt: skip
    return job.args


def flags_of_rank(job: Job, evaluations: int = 0) -> tuple[list[str], int]:
    """(A rank's flags, its global batch). evaluations: batches to evaluate after the last step."""
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
        --eval-iters {evaluations} --eval-interval 1000000 --log-interval 1 --num-workers 0 --mock-data --split 98,1,1
        --tokenizer-type NullTokenizer --vocab-size {vocabulary} --distributed-timeout-minutes 10"""
    if job.cells is not None and not any(flag == "--fp8-grad-accum" for flag, _ in kept):
        ours += f" --fp8-grad-accum {job.cells['grad_accum']}"  # auto would depend on the number of micro-batches
    return [*words_of(kept), *ours.split()], batch


def run_rank(
    launch: Launch, flags: list[str], rank: int, gpus: int, environment: Mapping[str, str], timeout: float
) -> Ran:
    """Run one of `gpus` ranks to its end.  environment: of a process that can see the GPU."""
    command = [sys.executable, "-m", "megatron_fp8.tools.rehearsal.full_rank", launch.script[-1], *flags]
    folder = Path(__file__).resolve().parents[3]
    environment = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment, **launch.variables, "RANK": str(rank), "LOCAL_RANK": "0",
        "WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), environment.get("PYTHONPATH")))),
    }  # fmt: skip
    for file in ("MEGATRON_FP8_REPORT", METRICS):  # the job's files
        environment.pop(file, None)
    return start(command, environment, timeout)


def start(command: list[str], environment: Mapping[str, str], timeout: float) -> Ran:
    """Run a command to its end, or for at most `timeout` seconds."""
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors="replace", timeout=timeout)  # fmt: skip
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        code, text = _LATE, said.decode(errors="replace") if isinstance(said, bytes) else said
    lines = text.splitlines()
    marked = next((line for line in reversed(lines) if line.startswith(MARK)), None)
    found = json.loads(marked.removeprefix(MARK)) if marked else {}
    return Ran(command, code, time.monotonic() - began, timeout, lines, found)
