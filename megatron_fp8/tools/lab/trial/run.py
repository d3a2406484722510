"""Run a training command that the user gives to a verb of the lab.

    megatron-fp8 lab VERB ... --processes 2 -- pretrain_gpt_fp8.py --num-layers 4 ...

The command has the form of a plan's (sweep/plan_file.py): a script, or -m and a module, and flags. `{run}` in it stands
for the run's own folder.
"""

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ....checkpoint.tracker import TRACKER, is_tracker, read_tracker
from ....errors import UserError
from ....flags.flag import whole_number
from ....flags.level import is_stock
from ....metrics import LOSS
from ....processes import ended_like_ctrl_c
from ..sweep.plan_file import ELSEWHERE, flag_value
from ..sweep.runner import NOT_LOADED, Training

WRITING = (  # flags that would mix a trial's output with the user's own, end it early, or change its course
    *("--save", "--save-interval", "--persistent-save-interval", "--non-persistent-save-interval"),
    *("--save-retain-interval", "--save-params-interval", "--save-activations-interval", "--save-wgrads-interval"),
    *("--save-dgrads-interval", "--save-tokens-per-expert-interval", "--async-save", "--logits-save-dir"),
    *("--tensorboard-dir", "--wandb-project", "--wandb-exp-name", "--wandb-entity"),
    *("--wandb-save-dir", "--fp8-log-grad-snr", "--fp8-sharpness-eval", "--fp8-sharpness-iterations"),
    *("--fp8-probe-step", "--fp8-probe-dir", "--exit-interval", "--exit-duration-in-mins"),
    *("--fp8-on-spike", "--fp8-spike-sigma", "--fp8-spike-window"),
)
_OURS = "megatron_fp8: "  # before our one-line errors
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")


class Refused(UserError):
    """A run's own mistakes, in the run's words."""


def add_command(parser: argparse.ArgumentParser) -> None:
    """Add the command, after all other arguments (`args.command`), and --processes and --timeout for its runs.

    Parsing raises UserError if the command is missing or begins with a flag other than -m, or if one of the two numbers
    is not positive.
    """
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes of a run, on this machine (1)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="limit of a run; then it has failed (none)")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        action=_Command,
        metavar="-- COMMAND",
        help="the training run: a script, or -m and a module, and its flags",
    )


class _Command(argparse.Action):
    def __call__(self, parser, namespace, values: Any, option_string=None) -> None:
        words = values[1:] if values[:1] == ["--"] else values
        if not words:
            raise UserError("no training command; give it last: -- pretrain_gpt_fp8.py FLAGS...")
        if words[0].startswith("-") and words[0] != "-m":
            raise UserError(f"{words[0]}: the command must begin with a script, or -m and a module; put it last")
        if words[0] != "-m" and not Path(words[0]).is_file():
            if "--" in words[words is not values :]:  # most likely the value of a misspelt flag
                raise UserError(f"{words[0]}: stands before -- and belongs to no flag there; see --help")
            raise UserError(f"{words[0]}: no such script here; {ELSEWHERE}")
        for flag, number in (("--processes", namespace.processes), ("--timeout", namespace.timeout)):
            if number is not None and not number > 0:
                raise UserError(f"{flag} {number}: use more than 0")
        setattr(namespace, self.dest, words)


def without(command: Sequence[str], flags: Collection[str]) -> list[str]:
    """The command without these flags and their values."""
    kept, dropping = [], False
    for word in command:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in flags
        if not dropping:
            kept.append(word)
    return kept


def loaded(command: Sequence[str]) -> str | None:
    """The iteration that --load would take, by --ckpt-step or the folder: "120", "release"; None if there is none.

    Raises UserError if there is no such folder: Megatron would begin with random weights, and only warn.
    """
    folder, step = (flag_value(tuple(command), flag) for flag in ("--load", "--ckpt-step"))
    if folder is None:
        return None
    if not os.path.exists(folder) and "{run}" not in folder:
        raise UserError(f"--load {folder}: no such folder; name one that --save wrote, or remove the flag")
    if step is not None or not os.path.isfile(Path(folder) / TRACKER):
        return step
    try:
        said = read_tracker(Path(folder))
    except OSError:
        said = "what cannot be read"
    if not is_tracker(said):
        tracker = Path(folder) / TRACKER
        raise UserError(f"{tracker}: says {said[:40]!a}, not a step; name one in --ckpt-step, or repair the file")
    return said


def first_step(command: Sequence[str]) -> int:
    """The command's first step, as Megatron counts: the one after the loaded step, or 1."""
    step = whole_number(loaded(command) or "") or 0
    return 1 if "--finetune" in command else 1 + step


def says_fp8(command: Sequence[str]) -> bool:
    """Whether the command's own words give a level above O0, or emulation."""
    words = tuple(command)
    return not is_stock(flag_value(words, "--fp8-level")) or flag_value(words, "--fp8-emulate") is not None


def replicas(command: Sequence[str], processes: int) -> int:
    """The number of data-parallel ranks of the command."""
    parallel = (f"--{kind}-parallel-size" for kind in ("tensor-model", "pipeline-model", "context"))
    return max(1, processes // math.prod(size_of(command, flag) or 1 for flag in parallel))


def size_of(command: Sequence[str], flag: str) -> int | None:
    """A flag's number; None if the command lacks it, or if it is not a number, which the run will report."""
    return whole_number(flag_value(tuple(command), flag) or "")


def other_micro_batches(command: Sequence[str], processes: int) -> list[str] | None:
    """Flags that split a step of the command into other micro-batches; None if there is no other split."""
    size = size_of(command, "--micro-batch-size") or 0
    total = size_of(command, "--global-batch-size") or size * replicas(command, processes)
    smaller = [n for n in range(size // 2, 0, -1) if size % n == 0]
    larger = [2 * size] if size and total % (2 * size * replicas(command, processes)) == 0 else []
    for other in (smaller + larger)[:1]:
        return ["--micro-batch-size", str(other), "--global-batch-size", str(total)]
    return None


def has_dropout(command: Sequence[str]) -> bool:
    """Whether the command draws dropout masks, which depend on how a step is split."""
    return any(float(flag_value(tuple(command), flag) or 0.1) for flag in NO_DROPOUT[::2])  # 0.1: Megatron's default


def check_folder_of(flag: str, file: str | Path | None) -> None:
    """Raise UserError if a file, given by a flag, is a folder, or if its folder does not exist."""
    if file is not None and Path(file).is_dir():
        raise UserError(f"{flag} {file}: is a folder; name a file")
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise UserError(f"{flag} {file}: no such folder; make it, or name another file")


def curves(
    command: Sequence[str], processes: int, folder: Path, timeout: float | None = None, steps: int | None = None
) -> dict[str, dict[int, float]]:
    """Run the command and read what it logs.

    Args:
        command, processes, folder: as for runner.Training; the folder of an earlier run is deleted.
        timeout: seconds, after which the run has failed.
        steps: after so many steps (after --load, so many more) stop the run in the next one; None: do not stop it.

    Returns:
        {name: {step: value}} of all that it logged. If a run ended itself because a value was not finite, this is not a
        failure; its curves are shorter.

    Raises Refused if one of our one-line errors ended the run. If it failed otherwise, raises UserError, and the end of
    its log is on stderr.
    """
    found: dict[str, dict[int, float]] = {}
    training = Training(command, processes, folder, {})
    with contextlib.closing(training), ended_like_ctrl_c():
        while True:
            code = training.poll()  # before reading, so that the read includes all until the end
            for step, values in training.read():
                for name, value in values.items():
                    found.setdefault(name, {})[step] = value
            if steps is not None and len(made := sorted(found.get(LOSS, ()))) > steps:
                last = made[steps - 1]  # nothing more will be logged for this step
                return {name: {k: v for k, v in curve.items() if k <= last} for name, curve in found.items()}
            if code is not None or training.late(timeout):
                break
            training.wait()
        if code != 0 and not training.not_finite:
            reason = f"took more than --timeout {timeout:g} s" if code is None else f"failed with exit code {code}"
            lines = training.end().splitlines()
            refused = [line.partition(_OURS)[2] for line in lines if _OURS in line]
            if refused and training.first_code() == 2:  # the code of one_line_errors: the lines say why it ended
                raise Refused(*dict.fromkeys(refused))
            print(*lines, sep="\n", file=sys.stderr, flush=True)
            raise UserError(f"the run in {folder} {reason}, at step {training.last}: {(lines or ['no output'])[-1]}")
        if not training.loads_plugin:
            raise UserError(NOT_LOADED)
        return found
