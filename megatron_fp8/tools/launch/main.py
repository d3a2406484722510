"""Write a Slurm job from files of flags, and submit it.

    megatron-fp8 launch model/gpt-7b layout/gpt-7b-32gpus recipe/pretrain recipe/gpt-7b recipe/data --nodes 4 --submit
    megatron-fp8 launch mine.yaml --nodes 2 --level O3 --flags="--lr 1e-4" --sbatch="--partition=gpu --account=me"

The flags are those that --args-file makes from the files (`megatron-fp8 args`), with --level and --flags on top.
If torch and Megatron are installed here, they are checked as the job's rank 0 would check them. They are written into
the job's script as they are now: a job that Slurm restarts runs the same command, even if the files have changed.

FOLDER gets NAME.sbatch, the log of each job, checkpoints/ unless --save names another folder, and a record of each job:
command, commit and changes, packages, environment without likely secrets. `touch FOLDER/exit` makes the job save and
end for good. The top of scripts/slurm/train.sbatch explains when a job restarts, and why a second job does not start
while one trains there.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from ...errors import UserError, did_you_mean
from ...flags import sbatch
from ...flags.args_file import A_VARIABLE, ARGS_FILE, check_characters, expand, find, read
from ...flags.command import Launch, flags_of
from ...shipped import shipped
from .missing_files import unseen
from .script import Settings, check_sbatch, last_saved, seconds, steps_of, write_script
from .shell import check_variables, quoted

_FIRST = ("--load", "--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-step", "--pretrained-checkpoint")
_OWN = ("--exit-signal", "--exit-signal-handler", "--exit-duration-in-mins")
_SCRIPT = "pretrain_gpt_fp8.py"
_LEVELS = ("O0", "O1", "O2", "O3")


# Options of sbatch that a user may give to launch by mistake. An option that would make an abbreviation of launch's own
# ambiguous (--node, --cont) is left out.
_OF_SBATCH = """--account/-A --partition/-p --qos/-q --constraint/-C --reservation --gres --mem --cpus-per-task/-c
    --exclude/-x --dependency/-d --begin/-b --licenses/-L --comment --mail-type --mail-user""".split()


class _OfSbatch(Action):
    """An option of sbatch. launch has it only for an error line that says where it belongs."""

    def __call__(self, parser, namespace, values, option_string=None):
        given, option = option_string, self.option_strings[0]
        if self.nargs != 0:
            given = f"{given} {values}"
            option += f"={shlex.quote(values) if re.search(r'[^!-~]|[#\'\"]', values) else values}"
        raise UserError(f"{given}: an option of sbatch; write --sbatch={quoted(option)}")


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 launch`."""
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="YAML files, or shipped ones' names: model/gpt-7b")
    add("--nodes", type=int, required=True, metavar="N")
    add("--level", choices=_LEVELS, help="--fp8-level; overrides the files")
    add("--flags", action="append", metavar="FLAGS", help='flags that override the files: --flags="--lr 1e-4"')
    add("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node, each with one task (8); 0: none")
    add("--tasks-per-node", type=int, metavar="N", help="tasks of a node without GPUs")
    add("--time", default="24:00:00", metavar="TIME", help="time limit, in sbatch's form (24:00:00)")
    add("--name", metavar="NAME", help="the job's name (default: the first file's)")
    add("--folder", metavar="FOLDER", help="the job's folder, on storage that all nodes share (runs/NAME)")
    add("--cluster", action="append", metavar="NAME", help="a site's variables: a file, or a shipped one's name")
    add("--container", metavar="IMAGE", help="run in this image, with pyxis and enroot")
    add("--mounts", action="append", metavar="FROM:TO,...", help="more mounts than this folder and FOLDER")
    add("--script", metavar="FILE", help=f"the training script ({_SCRIPT})")
    add("--python", metavar="PROGRAM", help="the Python that runs it (this one; in a container python)")
    add("--sbatch", action="append", metavar="OPTIONS", help='options of sbatch: --sbatch="--partition=gpu -A me"')
    add("--steps", type=int, metavar="N", help="steps of the whole training, if the flags do not say")
    add("--max-restarts", type=int, default=100, metavar="N", help="restarts until the job ends as failed (100)")
    add("--submit", action="store_true", help="submit the job too")
    for names in _OF_SBATCH:
        add(*names.split("/"), action=_OfSbatch, help=SUPPRESS)
    add("--exclusive", action=_OfSbatch, nargs=0, help=SUPPRESS)


def run(args: Namespace) -> int:
    """Write the script, and submit it if asked. Returns the exit code."""
    shells = dict(os.environ)  # before the check, because torch and Megatron set variables in it
    args.flags, args.sbatch = " ".join(args.flags or ()), " ".join(args.sbatch or ())  # if given twice, both count
    args.mounts = ",".join(args.mounts or ())
    if args.gpus_per_node < 0:
        raise UserError(f"--gpus-per-node {args.gpus_per_node}: use 0 or more")
    if args.gpus_per_node and args.tasks_per_node is not None:
        remedy = "remove it, or add --gpus-per-node 0"
        raise UserError(f"--tasks-per-node {args.tasks_per_node}: each GPU of a node gets one task; {remedy}")
    if not args.gpus_per_node and args.tasks_per_node is None:
        raise UserError("--gpus-per-node 0: add --tasks-per-node N")
    tasks = args.gpus_per_node or args.tasks_per_node
    for flag, number in (("--nodes", args.nodes), ("--tasks-per-node", tasks), ("--max-restarts", args.max_restarts),
                         ("--steps", 1 if args.steps is None else args.steps)):  # fmt: skip
        if number < 1:
            raise UserError(f"{flag} {number}: use 1 or more")
        if number >= 10**18:  # a shell cannot count with it
            raise UserError(f"{flag} {number}: use a number of at most 18 digits")
    seconds(args.time)
    name = args.name or Path(args.files[0]).stem
    if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise UserError(f"--name {name}: use letters, digits, '.', '_' and '-'; '.' and '..' are folders")
    if args.mounts and not args.container:
        raise UserError(f"--mounts {args.mounts}: no container; add --container, or remove it")
    sbatch.check_options(args.sbatch)
    check_sbatch(args.sbatch)
    words, variables = _read(args)
    given = _given(words)
    for flag in _OWN:
        if flag in given:
            raise UserError(f"{flag}: the job's script sets it, from the time limit; remove it")
    if "--save-interval" not in given:
        raise UserError("--save-interval: missing; a killed job resumes from its last save: add it")
    if len(saves := given.get("--save", ["default"])) != 1 or not saves[0]:
        raise UserError(f"--save {' '.join(saves)}".rstrip() + ": use one folder, or remove it")
    folder = Path(args.folder or f"runs/{name}").absolute()
    for what, place in (("--folder", folder), ("the current folder", Path.cwd())):
        sbatch.check_path(what, place)
    first = [word for flag in _FIRST if flag in given for word in (flag, *given[flag])]
    save = given.get("--save") or [str(folder / "checkpoints")]
    words = [word for flag, values in flags_of(words) if flag not in (*_FIRST, "--save") for word in (flag, *values)]
    settings = Settings(
        name=name,
        nodes=args.nodes,
        tasks_per_node=tasks,
        gpus_per_node=args.gpus_per_node,
        time=args.time,
        folder=folder,
        save=Path(save[0]).absolute(),
        steps=steps_of(given, args.steps),
        words=words,
        first=first,
        variables=variables,
        script=_script(args.script),
        python=args.python or ("python" if args.container else sys.executable),
        container=_image(args.container or ""),
        mounts=args.mounts,
        sbatch=args.sbatch,
        max_restarts=args.max_restarts,
    )
    if args.container:
        for what, place in (("--folder", folder), ("--save", settings.save), ("the current folder", Path.cwd()),
                            ("--script", settings.script.parent)):  # fmt: skip
            if re.search("[,:]", str(place)):
                raise UserError(f"{what} {place}: a --container mount cannot contain ',' or ':'; use another")
    goes_on = _of_first_start(settings, given)
    checked = _check(settings, words, variables)
    path = write_script(settings)
    print(f"{path}: {settings.steps} steps on {args.nodes} x {tasks} {'GPUs' if args.gpus_per_node else 'CPU tasks'}")
    said = "its flags passed Megatron's and the level's checks"
    print(said if checked else "its flags were not checked: torch and Megatron are not installed here")
    for line in [*goes_on, *unseen(settings, given)]:
        print(f"note: {line}")
    if not args.submit:
        print(f"submit it: sbatch {shlex.quote(str(path))}")
        return 0
    job = _submit(path, shells)
    log, stop = (shlex.quote(str(folder / name)) for name in (f"log-{job}.txt", "exit"))
    print(f"job {job}; what it waits for: squeue -j {job}; its log: {log}; to end it for good: touch {stop}")
    return 0


def _read(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """(the command line's words, the variables of the files and the cluster). The shell's own variables override both.
    """
    try:
        flags = shlex.split(args.flags)
    except ValueError as error:
        raise UserError(f"--flags {args.flags}: {error}; close the quote") from None
    if flags and not flags[0].startswith("-"):  # it would become one more file
        raise UserError(f"--flags {args.flags!r}: flags begin with a dash; add it")
    words = [ARGS_FILE.name, *args.files, *flags]
    if args.level:
        words += ["--fp8-level", args.level]
    own = read(str(find(name)) for name in args.files).variables
    variables = expand(words, {name: value for name, value in os.environ.items() if name not in own}).variables
    for site in args.cluster or ():
        variables |= _cluster(site)
    check_variables(variables, in_job=True)
    return expand(words, os.environ).words, variables


def _cluster(name: str) -> dict[str, str]:
    """The variables in a site's file: lines NAME=VALUE."""
    path = Path(name)
    if not path.is_file():
        folder = shipped("configs/cluster")
        path = folder / f"{name.removesuffix('.env')}.env"
        if not path.is_file():
            close = did_you_mean(name, [file.stem for file in folder.glob("*.env")])
            raise UserError(f"--cluster {name}: no such file, and none of that name is shipped{close}; give its path")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"--cluster {name}: not a text file; write lines NAME=VALUE") from None
    variables = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ")
        if not text or text.startswith("#"):
            continue
        variable, equals, value = text.partition("=")
        check_characters(f"{path}:{number}", text)
        if not equals or not A_VARIABLE.fullmatch(variable):
            raise UserError(f"{path}:{number}: {text}: write NAME=VALUE")
        if "$" in value or value.startswith("~"):  # the script quotes values, so a shell does not expand them
            raise UserError(f"{path}:{number}: {text}: $ and ~ are not expanded; write it out, or set it in the shell")
        try:
            words = shlex.split(value, comments=True)
        except ValueError as error:
            raise UserError(f"{path}:{number}: {text}: {error}; close the quote") from None
        if len(words) > 1:
            raise UserError(f"{path}:{number}: {text}: a variable has one value; quote it, or put # before a comment")
        variables[variable] = "".join(words)
    return variables


def _of_first_start(job: Settings, given: Mapping[str, list[str]]) -> list[str]:
    """The note about flags for a first start, if the job would resume from an earlier job's checkpoint."""
    step, loads = last_saved(job.save), given.get("--load", [])
    elsewhere = bool(loads) and Path(loads[0]).absolute() != job.save
    if not step or not job.first or (not elsewhere and job.first[:1] == ["--load"] and len(job.first) == 2):
        return []
    if "--ckpt-step" in given and not elsewhere:
        remedy = f"train into another --save, with --load {shlex.quote(str(job.save))}"
        raise UserError(f"--ckpt-step {' '.join(given['--ckpt-step'])}: {job.save} has step {step} too, and a job "
                        f"resumes from its last step; {remedy}")  # fmt: skip
    flags = " ".join(job.first)
    return [f"{flags}: only for a first start, so not used; this job resumes from step {step} in {job.save}"]


def _image(given: str) -> str:
    """A container's image. A file becomes an absolute path: for pyxis a bare name is a registry's."""
    return str(Path(given).absolute()) if given and Path(given).is_file() else given


def _given(words: list[str]) -> dict[str, list[str]]:
    return dict(flags_of(words))


def _script(given: str | None) -> Path:
    path = Path(given) if given else shipped(_SCRIPT)
    if not path.is_file():
        raise UserError(f"--script {path}: no such script; give its path")
    return path.absolute()


def _check(settings: Settings, words: list[str], variables: Mapping[str, str]) -> bool:
    """Check the flags if torch and Megatron are here; returns whether.  Raises UserError if the job would refuse them.
    """
    if not all(map(importlib.util.find_spec, ("torch", "megatron"))):
        return False
    from ..rehearsal import ranks

    ranks.warm_up(str(settings.script.parent))
    from ..rehearsal.job import examine

    gpus = settings.nodes * settings.tasks_per_node
    flags = list(flags_of([*words, "--save", str(settings.save)]))
    launch = Launch([str(settings.script)], flags, gpus, dict(variables))
    job = examine(launch, gpus)
    if job.error:
        raise UserError(*(f"on {gpus} rank{'s' * (gpus > 1)}: {reason}" for reason in job.error.split("\n")))
    if job.missing:
        print(f"not on this machine: {job.missing}")
    return True


def _submit(path: Path, environment: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" in environment:  # inside a job: the new job would inherit its CPUs and placement
        kept = ("SLURM_CONF", "SLURM_JWT")
        environment = {name: value for name, value in environment.items() if name in kept or name[:6] != "SLURM_"}
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        remedy = f"on a node that has it: sbatch {shlex.quote(str(path))}"
        raise UserError(f"--submit: no sbatch here; {remedy}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UserError(f"--submit: sbatch: {said[-1] if said else f'exit code {done.returncode}'}; see {path}")
    return done.stdout.strip().split(";")[0]
