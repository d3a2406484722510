"""Writes a job's Slurm script: scripts/slurm/train.sbatch with the job's own #SBATCH options and settings."""

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.tracker import folder_name, read_tracker
from ...errors import UserError
from ...flags import sbatch
from ...flags.flag import whole_number
from ...shipped import shipped
from .shell import TEMPLATE

_WARNING = 600  # seconds before the time limit: one step, one save
_OURS = {  # {an option of sbatch that launch writes: launch's own flag for it}
    ("--time", "-t"): "--time", ("--nodes", "-N"): "--nodes", ("--job-name", "-J"): "--name",
    ("--ntasks", "-n"): "--gpus-per-node", ("--ntasks-per-node",): "--gpus-per-node",
    ("--gpus-per-node",): "--gpus-per-node", ("--gpus", "-G"): "--gpus-per-node",
    ("--output", "-o"): "--folder", ("--chdir", "-D"): "", ("--signal",): "", ("--no-requeue",): "",
}  # fmt: skip
# A task takes the GPU of its number among all of its node, and tensor parallelism is between consecutive ranks.
_PLACING = ("--gpus-per-task", "--ntasks-per-gpu", "--gpu-bind", "--distribution", "-m")


@dataclass(frozen=True)
class Settings:
    """A job's settings. steps: of the whole training. words: its command line. first: words only for a first start."""

    name: str
    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    time: str
    folder: Path
    save: Path
    steps: int
    words: list[str]
    first: list[str]
    variables: Mapping[str, str]
    script: Path
    python: str
    container: str
    mounts: str
    sbatch: str
    max_restarts: int


def write_script(settings: Settings) -> Path:
    """Make the job's folder and write its script there."""
    text = shipped(TEMPLATE).read_text()
    body = re.sub(r"\A#!.*\n(#SBATCH.*\n)+", lambda _: _header(settings), text)
    body = re.sub(r"(?<=^# >>> settings).*?(?=^# <<< settings)", lambda _: _settings(settings), body, flags=re.M | re.S)
    try:
        content = body.encode()
    except UnicodeEncodeError as error:
        line = body[: error.end].rpartition("\n")[2] + body[error.end :].partition("\n")[0]
        raise UserError(f"{line.strip()!a}: not UTF-8 text, and the job's script needs it; use another name") from None
    path = settings.folder / f"{settings.name}.sbatch"
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=settings.folder, prefix=".", delete=False) as file:
            file.write(content)
        os.chmod(file.name, 0o755)
        os.replace(file.name, path)  # replaces a link instead of following it
    except OSError as error:
        raise UserError(f"--folder {settings.folder}: {error.strerror or error}; use another") from None
    return path


def _header(job: Settings) -> str:
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.tasks_per_node}",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *("--exclusive", "--mem=0", "--wait-all-nodes=1"),
        f"--time={job.time}",
        f"--signal=B:USR1@{_warning(job)}",
        *("--requeue", "--open-mode=append"),
        sbatch.output(job.folder, "log-%j.txt"),
        f'--chdir="{Path.cwd()}"',
        *([job.sbatch] if job.sbatch else []),  # for each option the last one counts
    ]
    return "".join(["#!/bin/bash\n", *(f"#SBATCH {option}\n" for option in options)])


def _warning(job: Settings) -> int:
    return min(_WARNING, seconds(job.time) // 5)


def check_sbatch(options: str) -> None:
    """Raise UserError for an option that overrides one that the script or its checks need."""
    for word in options.split():
        if word.split("=")[0] in _PLACING or (word[:2] in _PLACING and word[1] != "-"):
            why = "the job's tasks need all GPUs of a node, and its ranks in order"
            raise UserError(f"--sbatch {word}: {why}; remove it")
        for names, ours in _OURS.items():
            if word.split("=")[0] in names or (word[:2] in names and word[1] != "-"):
                remedy = f"use launch's own {ours}" if ours else "remove it"
                raise UserError(f"--sbatch {word}: the job's script needs the value that launch writes; {remedy}")


def last_saved(save: Path) -> int:
    """The step that the job would resume from, found as its script does (its `saved`); 0: none."""
    with contextlib.suppress(OSError):
        named = whole_number(read_tracker(save))
        if named is not None and _is_finished(save / folder_name(named)):
            return named
    found = {path: whole_number(path.name[5:]) or 0 for path in save.glob("iter_*")}
    sealed = (step for path, step in found.items() if path.name == folder_name(step) and _is_finished(path, True))
    return max(sealed, default=0)


def _beginning(path: Path, size: int) -> bytes:
    """A file's first bytes; b"" if it is not a regular file or not readable."""
    with contextlib.suppress(OSError):
        if path.is_file():  # opening a pipe would block
            with path.open("rb") as file:
                return file.read(size)
    return b""


def _is_finished(folder: Path, needs_seal: bool = False) -> bool:
    """Whether it has a checkpoint, sealed or stock Megatron's without a seal, and no save into it is in progress."""
    try:
        if not folder.is_dir() or (folder / "unsealed").exists():
            return False
        has_metadata = bool(_beginning(folder / "metadata.json", 1))
        if needs_seal or (folder / "integrity.json").exists():
            seal = _beginning(folder / "integrity.json", 2**24)
            return has_metadata and bool(re.search(rb'"metadata\.json": *"[0-9a-f]{64}"', seal))
        has_metadata |= bool(_beginning(folder / ".metadata", 1))  # torch's own formats have only this file
        return has_metadata or any(folder.glob("mp_rank_*"))
    except OSError:
        return False


def _settings(job: Settings) -> str:
    values = {
        "ITERATIONS": str(job.steps),
        "FOLDER": str(job.folder),
        "SAVE": str(job.save),
        "PYTHON": job.python,
        "SCRIPT": str(job.script),
        "CONTAINER": job.container,
        "MOUNTS": job.mounts,
        "MAX_RESTARTS": str(job.max_restarts),
        "MAX_STALLS": "3",
        "WARNING": str(_warning(job)),
    }
    lines = ["", *(f"{name}={shlex.quote(value)}" for name, value in values.items())]
    # A variable of the submitting shell overrides the files: ${A-'x'} is x only if A is not set.
    lines += [f"export {name}=${{{name}-{shlex.quote(value)}}}" for name, value in job.variables.items()]
    lines += [f"FIRST=({shlex.join(job.first)})", f"VARIABLES=({shlex.join(job.variables)})"]
    flags: list[list[str]] = []
    for word in job.words:
        if word.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(word)
    lines += ["set -- \\", " \\\n".join(f"    {shlex.join(flag)}" for flag in flags), ""]
    return "\n".join(lines)


def seconds(time: str) -> int:
    """The seconds of a time limit in sbatch's form.  Raises UserError of one line."""
    form = "(?:(N)-(N)(?::(N))?(?::(N))?|(?:(N):)?(N):(N)|(N))"
    found = re.fullmatch(form.replace("N", "[0-9]{1,9}"), time)
    if not found:
        raise UserError(f"--time {time[:40]}: use minutes, HH:MM:SS or D-HH:MM:SS")
    days, day_hours, day_minutes, day_seconds, hours, minutes, rest, alone = (int(part or 0) for part in found.groups())
    hours, minutes, rest = hours + day_hours, minutes + day_minutes + alone, rest + day_seconds
    total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if total < 60:
        raise UserError(f"--time {time}: use a minute or more")
    return total


def steps_of(given: Mapping[str, list[str]], asked: int | None = None) -> int:
    """How many steps a command line trains; `asked` if it does not say.  Raises UserError of one line."""
    said = asked
    if "--train-iters" in given:
        said = _number(given, "--train-iters")
    elif "--train-samples" in given and "--global-batch-size" in given:  # a batch ramp-up does not change it
        samples, batch = _number(given, "--train-samples"), _number(given, "--global-batch-size")
        if samples < batch:  # Megatron would train no step, and end with exit code 0
            raise UserError(f"--train-samples {samples}: fewer than --global-batch-size {batch}; use {batch} or more")
        said = samples // batch
    if said is None:
        raise UserError(
            "--train-iters: missing; give it, or --train-samples and --global-batch-size, or launch --steps N"
        )
    if asked not in (None, said):  # Megatron follows its flags
        raise UserError(f"--steps {asked}: the flags say {said}; remove it, or change --train-iters or --train-samples")
    return said


def _number(given: Mapping[str, list[str]], flag: str) -> int:
    values = given[flag]
    number = whole_number(values[0]) if len(values) == 1 else None
    if number is None:
        raise UserError(f"{flag} {' '.join(values)[:40]}: use a whole number of at most 18 digits")
    if not number:
        raise UserError(f"{flag} {values[0]}: use 1 or more")
    return number
