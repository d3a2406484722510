"""Takes a launch command apart: number of GPUs, script, flags.

    VAR=x srun -N 16 torchrun --nproc-per-node 8   -m megatron_fp8 pretrain_gpt.py   --num-layers 96 --bf16 ...
    launcher: 16 x 8 GPUs                          script                            flags

The launcher is torchrun, in any spelling, srun, both, or none.  The number of GPUs is unknown (None) if the launcher
takes it from the job's environment.
"""

import argparse
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import UserError
from .args_file import expand
from .flag import whole_number

Flags = list[tuple[str, list[str]]]
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "run.py")


@dataclass(frozen=True)
class Launch:
    """What a command starts.

    Attributes:
        script: Python's arguments: a script, or -m, a module and a script.
        flags: each flag of the script with its values, in order, including those from --args-file.
        gpus: how many; None if the command does not say.
        variables: environment variables that the command or its files set.
    """

    script: list[str]
    flags: Flags
    gpus: int | None
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A job's flags, and its launcher's numbers. The script need not exist.

    Attributes:
        words: the flags, as they were given.
        gpus, variables: as in Launch.
        script: its name, without folders; None if only flags are given.
    """

    words: list[str]
    gpus: int | None
    variables: dict[str, str]
    script: str | None = None


def job_of(words: Sequence[str]) -> Job:
    """Read a whole launch command, or only its flags. A leading "--" is dropped.  Raises UserError if it is neither."""
    words = list(words[1:] if words[:1] == ["--"] else words)
    if not words or words[0].startswith("-"):
        return Job(words, None, {})
    first, place = _script_at(words)
    if place is None:
        raise UserError(f"{words[0]}: not a flag, and no script follows; put the job's flags or its command behind --")
    script = os.path.basename(words[place])
    return Job(words[place + 1 :], _gpus(words[:first]), _variables(words[:first]), script)


def take_apart(words: Sequence[str]) -> Launch:
    """The parts of a launch command.  Raises UserError if it names no script, or one that does not exist here."""
    first, place = _script_at(words)
    if place is None:
        raise UserError("the command names no script; give the whole command: -- torchrun ... SCRIPT.py FLAGS")
    if not os.path.isfile(words[place]):
        raise UserError(f"{words[place]}: no such script here; go to the folder where the job starts")
    variables = _variables(words[:first])
    found = expand(words[place + 1 :], {**os.environ, **variables})
    script, flags = list(words[first : place + 1]), list(flags_of(found.words))
    return Launch(script, flags, _gpus(words[:first]), found.variables | variables)


def _script_at(words: Sequence[str]) -> tuple[int, int | None]:
    """(index of the first word that is Python's, index of the script); (0, None) without a script."""
    place = next((i for i, word in enumerate(words) if _is_script(word)), None)
    if place is None:
        return 0, None
    return (place - 2 if words[max(place - 2, 0) : place] == ["-m", "megatron_fp8"] else place), place


def words_of(flags: Flags) -> list[str]:
    """Flags and their values as words of a command line."""
    return [word for flag, values in flags for word in (flag, *values)]


def _is_script(word: str) -> bool:
    return word.endswith(".py") and not word.startswith("-") and os.path.basename(word) not in _TORCHRUN


def flags_of(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag of a command line with its values, in order."""
    flag, values = "", list[str]()
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            if flag or values:
                yield flag, values
            flag, _, value = word.partition("=")
            values = [value] if value else []
        else:
            values.append(word)
    if flag or values:
        yield flag, values


def _variables(launcher: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in launcher:
        if given := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL):
            found[given[1]] = given[2]
        elif word != "env":
            break
    return found


def _gpus(launcher: Sequence[str]) -> int | None:
    """How many processes the launcher starts in all, one per GPU."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, *options in (
        ("nodes", "--nnodes", "--nodes", "-N"),
        ("each", "--nproc-per-node", "--nproc_per_node"),
        ("tasks", "--ntasks", "-n"),
        ("tasks_a_node", "--ntasks-per-node"),
        ("gpus_a_node", "--gpus-per-node"),
    ):
        parser.add_argument(*options, dest=name, nargs="?", default="1", const="")
    given, _ = parser.parse_known_args([word for word in launcher if word != "-m"])
    torchrun = any(os.path.basename(word) in _TORCHRUN for word in launcher)
    of_slurm = given.gpus_a_node.rpartition(":")[2] if given.tasks_a_node == "1" else given.tasks_a_node  # TYPE:N
    numbers = [given.nodes, given.each if torchrun else of_slurm]
    if not torchrun and given.tasks != "1":
        numbers = [given.tasks]
    counts = [whole_number(number) or 0 for number in numbers]  # 0: "gpu", or a variable that is not set here
    return math.prod(counts) or None
