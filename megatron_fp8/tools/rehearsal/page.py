"""A rehearsal's page: what ran, what was shrunk, what a rank holds at full size, what would fail at scale."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...metrics import LOSS, VALIDATION_LOSS
from ..perf import memory
from ..perf.job import Job as CountedJob
from ..perf.job_flags import job as counted_job
from ..perf.job_flags import uncounted as not_counted
from .job import Job
from .shrink import SAVED, STEPS, Rehearsal

_ENDING = 25  # lines shown of a failed start's log
_MISTAKE = "megatron_fp8: "  # the prefix of flags/usage.py
_H100 = 80e9  # bytes
_NOISE = re.compile(r"Warning|warnings\.warn|return func\(|^\s*$|torch/distributed/elastic")


@dataclass
class Start:
    """The log of one start of all ranks: {step: {name: value}}, the evaluation's loss, our own lines."""

    name: str
    code: int
    seconds: float
    steps: dict[int, dict[str, float]]
    evaluation: float | None
    said: list[str]
    lines: list[str]


@dataclass
class Outcome:
    """The starts of a rehearsal, and the file sizes of its checkpoint."""

    train: Start | None = None
    resume: Start | None = None
    files: list[int] = field(default_factory=list)

    @property
    def failed(self) -> Start | None:
        return next((start for start in (self.train, self.resume) if start is not None and start.code), None)

    @property
    def passed(self) -> bool:
        return self.resume is not None and self.failed is None and self.repeats

    @property
    def repeats(self) -> bool:
        """Whether the second start's last step equals the first's: loss and norm, to the last bit."""
        if self.train is None or self.resume is None:
            return False
        first, again = (start.steps.get(STEPS, {}) for start in (self.train, self.resume))
        return bool(first) and all(first.get(name) == again.get(name) for name in (LOSS, "grad_norm"))

    @property
    def mistake(self) -> str:
        """The error line of a start that failed by a mistake in the command; else ""."""
        lines = self.failed.lines if self.failed else []
        return next((line.partition(_MISTAKE)[2] for line in lines if line.startswith(_MISTAKE)), "")

    @property
    def end_of_log(self) -> str:
        lines = [line for line in self.failed.lines if not _NOISE.search(line)] if self.failed else []
        return "\n".join(line[:300] for line in lines[-_ENDING:])


def read(
    name: str, code: int, seconds: float, lines: list[str], numbers: Iterable[tuple[int, dict[str, float]]]
) -> Start:
    """A Start from a log and the values of megatron_fp8/metrics.py."""
    steps, evaluation = {}, None
    for step, values in numbers:
        evaluation = values.get(VALIDATION_LOSS, evaluation)
        if LOSS in values:
            steps[step] = values
    said = list(dict.fromkeys(line.strip() for line in lines if line.startswith("[fp8] ")))
    return Start(name, code, seconds, steps, evaluation, said, lines)


def write(command: str, gpus: int, known: int | None, job: Job, rehearsal: Rehearsal | None, outcome: Outcome,
          seconds: float) -> str:  # fmt: skip
    """The page, in Markdown."""
    return "\n".join([*_page(command, gpus, known, job, rehearsal, outcome, seconds), ""])


def _page(command, gpus, known, job: Job, rehearsal, outcome: Outcome, seconds) -> Iterator[str]:
    verdict = "passed" if outcome.passed and not job.error else "FAILED"
    yield f"# Rehearsal: {verdict}, {int(seconds) // 60} min {int(seconds) % 60} s"
    yield ""
    yield f"    {command if len(command) < 400 else command[:400] + ' ...'}"
    yield ""
    if job.args is None:
        here = "install Transformer Engine" in job.error
        what = "cannot be rehearsed without Transformer Engine" if here else f"would not start on {gpus} GPUs"
        yield f"The job {what}, so nothing was rehearsed:"
        yield ""
        yield from (f"    {line}" for line in job.error.split("\n"))
        return
    yield from _ran(gpus, known, job, rehearsal, outcome)
    yield from _shrunk(rehearsal)
    yield from _full_size(job)
    yield from _at_scale(job, rehearsal, outcome)


def _ran(gpus: int, known: int | None, job: Job, rehearsal: Rehearsal, outcome: Outcome) -> Iterator[str]:
    args = job.args
    assert args is not None
    yield "## What ran"
    context = job.context * args.context_parallel_size
    layout = f"TP {args.tensor_model_parallel_size} x PP {args.pipeline_model_parallel_size}"
    if args.virtual_pipeline_model_parallel_size:
        layout += f" (x {args.virtual_pipeline_model_parallel_size} virtual)"
    if args.expert_model_parallel_size > 1:
        layout += f", EP {args.expert_model_parallel_size}"
    layout += ", sequence parallel" * args.sequence_parallel + f", CP {context}" * (context > 1)
    unknown = "" if known else " (one replica: the command does not give their number; use --gpus)"
    yield f"- {job.level} on {gpus} GPUs{unknown}: {layout}, DP {args.data_parallel_size}."
    yield f"- Here: {rehearsal.ranks} ranks on the CPU, the same with DP {rehearsal.data_parallel}."
    train, resume = outcome.train, outcome.resume
    if train is not None and train.steps:
        losses = " ".join(f"{values[LOSS]:.4f}" for _, values in sorted(train.steps.items()))
        norms = " ".join(f"{values.get('grad_norm', 0):.3f}" for _, values in sorted(train.steps.items()))
        yield f"- {len(train.steps)} steps in {train.seconds:.0f} s: loss {losses}, gradient norm {norms}."
    if outcome.files:
        megabytes = sum(outcome.files) / 1e6
        yield f"- A checkpoint after step {SAVED}: {len(outcome.files)} files, {megabytes:.1f} MB, sealed."
    if resume is not None and resume.steps:
        again = resume.steps.get(STEPS, {})
        what = "the same" if outcome.repeats else "NOT the same"
        yield f"- A second start from it repeats step {STEPS}: loss {again.get(LOSS, 0):.4f}, {what} to the last digit."
    if resume is not None and resume.evaluation is not None:
        yield f"- An evaluation: loss {resume.evaluation:.4f}."
    if outcome.failed:
        first = next((line for line in outcome.failed.lines if line.startswith("[ranks]")), "")
        yield f"- FAILED in the start to {outcome.failed.name}: {first.removeprefix('[ranks] ') or 'see its log'}."
    yield ""


def _shrunk(rehearsal: Rehearsal) -> Iterator[str]:
    yield "## What was shrunk"
    yield "| | job | here |"
    yield "|---|---|---|"
    for change in rehearsal.changes:
        yield f"| {change.what} | {change.before} | {change.after} |"
    yield ""
    if rehearsal.left_out:
        yield f"Left out: {' '.join(rehearsal.left_out)}."
        yield ""


def _full_size(job: Job) -> Iterator[str]:
    yield "## What each rank holds at full size"
    counted = _counted(job)
    if isinstance(counted, str):
        yield f"Not computed: `megatron-fp8 memory` does not count {counted}."
    else:
        assert job.args is not None
        context = job.context * job.args.context_parallel_size
        yield from memory.table(counted, {"stock BF16": None, job.level: job.cells}, context)
        yield ""
        yield "Weights, gradients and optimizer states between two steps, without activations and buffers."
        yield from [f"Counted with {job.guessed}."] if job.guessed else []
    yield ""


def _counted(job: Job) -> CountedJob | str:
    """The memory report's Job of a job, or the parts of it that the report does not count."""
    args = job.args
    assert args is not None
    uncounted = not_counted(args)
    if not (args.padded_vocab_size or args.vocab_size):
        uncounted.append("an unknown vocabulary")
    if uncounted:
        return " and ".join(uncounted)
    return counted_job(args, args.data_parallel_size * job.context * args.context_parallel_size)


def _at_scale(job: Job, rehearsal: Rehearsal, outcome: Outcome) -> Iterator[str]:
    yield "## What would fail at scale"
    found = list(warnings(job, rehearsal, outcome))
    yield from (f"- {line}" for line in found or ["Nothing that could be seen here."])
    yield "- Not covered here: NCCL and the network, memory and speed at full size, GPU kernels, files of the cluster."
    if job.said:
        yield ""
        yield "## What the level says about the command, on a machine without Transformer Engine"
        yield from (f"- {line.removeprefix('[fp8] ')}" for line in job.said if "no CUDA device" not in line)


def warnings(job: Job, rehearsal: Rehearsal, outcome: Outcome) -> Iterator[str]:
    """A line for each failure here, and for each that would come at full size."""
    args = job.args
    assert args is not None
    if outcome.failed:
        start = f"The start to {outcome.failed.name} failed here"
        if outcome.mistake:
            yield f"{start}, and the job's will too, unless the cause is this machine: {outcome.mistake}"
        else:
            yield f"{start} with exit code {outcome.failed.code}; it will fail there too."
    elif outcome.train is not None and not outcome.train.steps:
        yield "No step was logged here, so it is unknown whether the script trains."
    elif not outcome.repeats:
        yield "A resumed run does not continue as the original run would: see above."
    if isinstance(counted := _counted(job), CountedJob):
        most = max(rank.all for rank in memory.ranks_bytes(counted, job.cells))
        if most > _H100:
            yield f"A rank holds {most / 1e9:.0f} GB before the first activation; an H100 has 80 GB, an H200 141."
    if rehearsal.data_parallel == 1 < args.data_parallel_size:
        yield (
            "Communication over data parallelism was not rehearsed: two replicas are too many for so few cores; "
            f"--ranks {2 * rehearsal.ranks} rehearses it, more slowly."
        )
    if job.missing:
        yield f"{job.missing} (rehearsed with mock data)"
    for flag in job.unseen:
        yield f"{flag}: not rehearsed, because it needs Transformer Engine's attention."
    if not args.save:
        yield "--save: not given, so the run saves nothing."
