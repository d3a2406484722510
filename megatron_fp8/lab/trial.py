"""A training command that a verb of the lab takes from the user, and runs to see what becomes of it.

    megatron-fp8 lab VERB ... --processes 2 -- pretrain_gpt_fp8.py --num-layers 4 ...

The command is a plan's (plan_file.py): a script, or -m and a module, and flags; `{run}` in it is the run's own folder.
"""

import argparse
import contextlib
import select
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from .runner import LOSS, Training

_WAIT = 0.5  # seconds to wait for output


def add_command(parser: argparse.ArgumentParser) -> None:
    """The command, after every other argument (`args.command`), and how it is run: --processes and --timeout.

    A command that is missing, or begins with a flag other than -m, is a ValueError when arguments are parsed.
    """
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="of each run, on this machine (1)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="after which a run has failed (none)")
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
            raise ValueError("no training command; give it last: -- pretrain_gpt_fp8.py FLAGS...")
        if words[0].startswith("-") and words[0] != "-m":
            raise ValueError(f"{words[0]}: the command must begin with a script, or -m and a module; put it last")
        if words[0] != "-m" and not Path(words[0]).is_file():
            raise ValueError(f"{words[0]}: no such script here; start where its path begins")
        setattr(namespace, self.dest, words)


def without(command: Sequence[str], flags: Collection[str]) -> list[str]:
    """The command without these flags and what follows each up to the next flag."""
    kept, dropping = [], False
    for word in command:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in flags
        if not dropping:
            kept.append(word)
    return kept


def curves(
    command: Sequence[str], processes: int, folder: Path, timeout: float | None = None, steps: int | None = None
) -> dict[str, dict[int, float]]:
    """Run the command and read its log.

    Args:
        command, processes, folder: runner.Training's; an earlier run's folder is deleted.
        timeout: seconds, after which the run has failed.
        steps: take so many (after --load, so many more) and stop the run in the next; None: let it end by itself.

    Returns:
        {name: {step: value}} of all that runner.read_line reads. A run that ended by itself because something was
        not finite counts as one that ended well: its curves are shorter.

    Raises ValueError with the end of the log for a run that failed.
    """
    found: dict[str, dict[int, float]] = {}
    training = Training(command, processes, folder, {})
    try:
        with _ended_like_ctrl_c():
            while True:
                code = training.poll()  # before reading: what is printed until the end is then there
                for step, values in training.read():
                    for name, value in values.items():
                        found.setdefault(name, {})[step] = value
                if steps is not None and len(made := sorted(found.get(LOSS, ()))) > steps:
                    last = made[steps - 1]  # which nothing more is printed of
                    return {name: {k: v for k, v in curve.items() if k <= last} for name, curve in found.items()}
                late = timeout is not None and time.monotonic() - training.started > timeout
                if code is not None or late:
                    break
                if training.silent:
                    time.sleep(_WAIT)
                else:
                    select.select([training], [], [], _WAIT)
        if code != 0 and not training.not_finite:
            reason = f"took more than --timeout {timeout:g} s" if code is None else f"failed with exit code {code}"
            raise ValueError(f"the run in {folder} {reason}, at step {training.last}\n{training.end()}")
        return found
    finally:
        training.close()


@contextlib.contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """Let a signal that ends this process end the run too: the run is in a session of its own."""
    numbers = signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
