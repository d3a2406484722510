"""Try a cluster job's command on this machine: every rank, a small model, no GPU.

    megatron-fp8 rehearse -- torchrun --nnodes 16 --nproc-per-node 8 pretrain_gpt_fp8.py FLAGS --fp8-level O3

Megatron validates the command's flags for all of its GPUs. Then the same layout trains a model shrunk in width, heads,
vocabulary, sequence and layers, over gloo, with a process for every rank: four steps, a checkpoint after the third, a
second start that repeats the fourth from it, and an evaluation. A page says what ran, what was shrunk, what each rank
holds at full size, and what would fail at scale. Exit code 0: all went well; 1: something failed; 2: a mistake in the
command.

    megatron-fp8 rehearse --full --rank 0 -- COMMAND       one true rank at full size, on this machine's GPU (full.py)

Not rehearsed: NCCL, memory and speed at full size, GPU kernels, Transformer Engine's attention.
"""

import os
import shlex
import sys
import tempfile
import time
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from ...errors import UserError
from ...flags.command import Launch, take_apart, words_of
from ...flags.level import is_stock
from ...metrics import LOSS, VARIABLE, Reader
from ...processes import ended_like_ctrl_c
from ..perf.output import PAGE_FORMATS, show
from . import ranks, room
from .job import examine, gpus_of

_RANKS_A_CORE = 8  # with more, a second replica would take too long


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 rehearse`."""
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the job, if its command does not say")
    parser.add_argument("--ranks", type=int, metavar="N", help="at most N ranks: one replica, or two if they fit")
    parser.add_argument("--all-layers", action="store_true", help="keep every layer (slower)")
    parser.add_argument("--full", action="store_true", help="instead, one rank at full size on a GPU, for its memory")
    parser.add_argument("--rank", type=int, metavar="R", help="the rank for --full (0)")
    parser.add_argument("--folder", metavar="DIR", help="keep logs and page in DIR (a temporary folder)")
    parser.add_argument("--format", choices=PAGE_FORMATS, default="text", help="of the output; page.md is Markdown")
    parser.add_argument("--timeout", type=int, default=1800, metavar="S", help="seconds for each start (1800)")
    parser.add_argument("command", nargs=REMAINDER, help="-- and the whole launch command")


@ended_like_ctrl_c()
def run(args: Namespace) -> int:
    """Rehearse. Returns the exit code."""
    began = time.monotonic()
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    launch = take_apart(words)
    gpus = gpus_of(launch, args.gpus)
    if args.rank is not None and not args.full:
        raise UserError(f"--rank {args.rank}: works only with --full; add it, or remove --rank")
    if args.folder:
        _make(Path(args.folder))
    environment = dict(os.environ)  # copied before the GPU is hidden
    ranks.warm_up(os.path.dirname(os.path.abspath(launch.script[-1])))
    from . import page  # these import Megatron, which must find no GPU
    from .shrink import shrink

    job = examine(launch, gpus)
    if args.full:
        from .full import rehearse

        args.rank = args.rank or 0
        return rehearse(launch, job, gpus, args, environment)
    if is_stock(job.level):
        raise UserError("rehearse: the command has no --fp8-level, or O0; add --fp8-level O1, O2 or O3")
    outcome = page.Outcome()
    rehearsal = None
    quick = args.ranks or max(32, _RANKS_A_CORE * (os.cpu_count() or 1))
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as temporary:
        folder = Path(args.folder or temporary)
        if job.args is not None:
            assert job.cells is not None  # there is a level
            free = room.here()
            rehearsal = shrink(
                job.flags,
                job.args,
                most_ranks=args.ranks,
                free=free,
                quick_ranks=quick,
                mock_data=bool(job.missing) or job.args.mock_data,
                all_layers=args.all_layers,
                storage=job.cells["grad_accum"],
            )
            slow = ", which takes long: a smaller layout tries the same flags sooner" * (rehearsal.ranks > quick)
            _tell(f"{rehearsal.ranks} ranks on {os.cpu_count()} cores{slow}; {room.needs(rehearsal.ranks)} of memory "
                  f"({free}); logs in {folder}")  # fmt: skip
            outcome = _rehearse(launch, rehearsal, folder, args.timeout)
        text = page.write(shlex.join(words), gpus, launch.gpus or args.gpus, job, rehearsal, outcome,
                          time.monotonic() - began)  # fmt: skip
        if args.folder:
            (folder / "page.md").write_text(text)
        show(text, args.format)
        if outcome.failed and not args.folder:
            print(f"\nThe end of the log of what failed:\n\n{outcome.end_of_log}")
    if job.args is None:
        raise UserError(*job.error.split("\n"))
    return 0 if outcome.passed and not job.error else 1


def _make(folder: Path) -> None:
    """Make the folder, before the minutes that fill it.  Raises UserError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"--folder {folder}: {error.strerror or error}; use another") from None


def _rehearse(launch: Launch, rehearsal, folder: Path, timeout: int):
    """Train and save, then resume from the save. Returns a page.Outcome."""
    from . import page
    from .shrink import SAVED

    outcome = page.Outcome()
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=folder) as checkpoints:
        flags = [*launch.script, *words_of(rehearsal.flags), "--data-cache-path", f"{checkpoints}/data"]
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, **launch.variables, "OMP_NUM_THREADS": "1"}
        environment.pop("MEGATRON_FP8_REPORT", None)  # the job's file
        save = ["--save", checkpoints, "--save-interval", str(SAVED)]
        outcome.train = _start("train", [*flags, *save], rehearsal.ranks, folder, timeout, environment)
        if outcome.train.code == 0:
            saved = Path(checkpoints) / f"iter_{SAVED:07d}"
            outcome.files = [file.stat().st_size for file in saved.rglob("*") if file.is_file()]
            resume = ["--load", checkpoints, "--ckpt-step", str(SAVED)]
            outcome.resume = _start("resume", [*flags, *resume], rehearsal.ranks, folder, timeout, environment)
    return outcome


def _start(name: str, command: list[str], count: int, folder: Path, timeout: int, environment: Mapping[str, str]):
    """Run all ranks once, with their output in a log. Returns a page.Start."""
    from . import page

    began = time.monotonic()
    metrics = Reader(folder / f"{name}.jsonl")
    metrics.path.unlink(missing_ok=True)  # left by an earlier rehearsal
    reading, writing = os.pipe()
    environment = {**environment, VARIABLE: str(metrics.path.resolve())}
    supervisor = ranks.launch(count, command, output=writing, timeout=timeout, env=environment)
    try:
        os.close(writing)
        lines, numbers = [], []
        with os.fdopen(reading, errors="replace") as printed, (folder / f"{name}.log").open("w") as log:
            for line in printed:
                log.write(line)
                log.flush()
                lines.append(line.rstrip("\n"))
                for step, values in metrics.read():
                    numbers.append((step, values))
                    if LOSS in values:
                        _tell(f"{name}: step {step} after {time.monotonic() - began:.0f} s")
        code = ranks.wait(supervisor)
    except BaseException:  # such as Ctrl-C
        ranks.end(supervisor)
        raise
    seconds = time.monotonic() - began
    _tell(f"{name}: {'done' if code == 0 else f'failed, exit code {code}'} after {seconds:.0f} s")
    return page.read(name, code, seconds, lines, [*numbers, *metrics.read()])


def _tell(line: str) -> None:
    print(f"[rehearse] {line}", file=sys.stderr, flush=True)
