"""A sweep's plan: a YAML file of arms, seeds, learning rates and data sets, and the runs that follow from it.

    command: >                              shared by all runs: a script, or -m and a module, and its flags
      pretrain_gpt_fp8.py --num-layers 4 ... --lr 1e-3 --min-lr 1e-4
    steps: 400                              of each run
    seeds: 8                                1 to 8; or a list
    arms:                                   NAME: flags to add; the others are compared with the first
      BF16: ""
      E8M3: --fp8-emulate E8M3:truncate
    learning_rates: [1x, 10x]               times the command's --lr and --min-lr; 3e-4: that --lr (default: [1x])
    data:                                   NAME: flags to add (default: the command's data)
      python: --train-data-path data/python_train --valid-data-path data/python_heldout
    processes: 1                            of each run, on one machine (default: 1)
    timeout: 3600                           seconds, after which a run has failed (default: none)
    faster:                                 ARM: flags that change no number of its runs (default: none)
      E8M3: --no-create-attention-mask-in-dataloader

A run is an arm, a seed, a learning rate and a data set. Runs of one seed get the same --seed in all arms, so they have
the same initial weights and the same data in the same order. Therefore an arm's flags must not set any of these.
`{run}` in a flag stands for the run's own folder, as in --save {run}/checkpoint; a shared folder would mix the runs.

The flags of `faster` are no part of what a run is: those that are done stay valid when the flags change. So they must
not change any number. The store names them with the code that ran a run.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ....errors import UserError
from ....flags.yaml_file import load_yaml

OWN = {"--seed": "seeds", "--train-iters": "steps"}  # {flag that the plan sets: the key for it}
RATES = {"--lr": "learning_rates", "--min-lr": "learning_rates"}
FOLDER = "{run}"
ELSEWHERE = "change to the folder that its path starts from, or give the whole path"  # the remedy for a script
UNNAMED = "data"  # the name of the data set if the plan names none
LARGEST = 2**31 - 1  # step and seed: the limit that Megatron, numpy and SQLite share
MOST_RUNS = 100_000  # of a plan: seeds x learning rates x data sets x arms
_WRITTEN = ("--save", "--tensorboard-dir", "--wandb-save-dir")
_KEYS = ("command", "steps", "seeds", "arms", "learning_rates", "data", "processes", "timeout", "faster")


def is_name(value: Any) -> bool:
    """Whether a value can name an arm, a data set or a number: text of printable characters."""
    return isinstance(value, str) and value.isprintable()


def split_words(flag: str, value: str) -> list[str]:
    """The words of a flag's value, split as a shell does; raises UserError if a quote is not closed."""
    try:
        return shlex.split(value)
    except ValueError:
        raise UserError(f"{flag} {value!r}: a quote is not closed; close it") from None


@dataclass(frozen=True)
class SweepRun:
    """One run: its names, and its command (a script, or -m and a module, and flags), with `{run}` not yet replaced."""

    arm: str
    seed: int
    learning_rate: float
    data: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class SweepPlan:
    """A plan file's content. Arms and data by name, in the file's order; learning rates are absolute."""

    command: tuple[str, ...]
    steps: int
    seeds: tuple[int, ...]
    arms: dict[str, tuple[str, ...]]
    learning_rates: tuple[float, ...]
    data: dict[str, tuple[str, ...]]
    processes: int = 1
    timeout: float | None = None
    faster: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def runs(self) -> list[SweepRun]:
        """All runs; those that are compared with each other are adjacent."""
        return [
            SweepRun(arm, seed, rate, data, self._command(arm, seed, rate, data))
            for seed in self.seeds
            for data in self.data
            for rate in self.learning_rates
            for arm in self.arms
        ]

    def _command(self, arm: str, seed: int, rate: float, data: str) -> tuple[str, ...]:
        words = [*self.command, *self.data[data], *self.arms[arm]]
        words += ["--seed", str(seed), "--train-iters", str(self.steps), "--lr", f"{rate:g}"]
        smallest, largest = flag_value(self.command, "--min-lr"), flag_value(self.command, "--lr")
        if smallest is not None:
            assert largest is not None  # read_plan has checked it
            words += ["--min-lr", f"{float(smallest) * rate / float(largest):g}"]
        if flag_value(words, "--log-interval") is None:
            words += ["--log-interval", "1"]
        if flag_value(words, "--data-cache-path") is None:  # two runs at once must not write the same index files
            words += ["--data-cache-path", f"{FOLDER}/cache"]
        return tuple(words)

    def outline(self) -> dict[str, Any]:
        """What a report needs, for JSON: names in the file's order, and steps."""
        content = asdict(self)
        return {
            "arms": list(self.arms),
            "data": list(self.data),
            **{key: content[key] for key in ("seeds", "learning_rates", "steps", "processes")},
        }


def flag_value(words: list[str] | tuple[str, ...], flag: str) -> str | None:
    """The value of a flag on a command line; the last one, as in argparse. None if it is not there."""
    value = None
    for word, after in zip_longest(words, words[1:]):
        if word == flag:
            value = after
        elif word.startswith(flag + "="):
            value = word.removeprefix(flag + "=")
    return value


def read_plan(path: str | Path) -> SweepPlan:
    """Read the plan from a YAML file. Raises UserError with one line: file, key, value, remedy."""
    content = load_yaml(path, remedy="give a plan file")
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a mapping of keys; see `megatron-fp8 lab sweep --help`")
    try:
        return _plan(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _plan(content: dict[Any, Any]) -> SweepPlan:
    for key in content:
        if key not in _KEYS:
            raise UserError(f"{key}: no such key; use {', '.join(_KEYS)}")
    for key in ("command", "steps", "seeds", "arms"):
        if key not in content:
            raise UserError(f"{key}: missing; add it")
    command = _words("command", content["command"])
    if not command or (command[0].startswith("-") and command[0] != "-m"):
        raise UserError("command: must begin with a script, or -m and a module")
    multiplied = flag_value(command, "--lr")
    if multiplied is None:
        raise UserError("command: no --lr; add it, learning rates are multiples of it")
    for flag in RATES:
        if (rate := flag_value(command, flag)) is not None and not _is_rate(rate):
            raise UserError(f"command: {flag} {rate}: must be a number")
    if float(multiplied) == 0:
        raise UserError(f"command: --lr {multiplied}: must be above 0, learning rates are multiples of it")
    _refuse("command", command, OWN)
    plan = SweepPlan(
        command,
        _whole("steps", content["steps"]),
        _seeds(content["seeds"]),
        _named("arms", content["arms"]),
        _rates(content.get("learning_rates", ["1x"]), float(multiplied)),
        _named("data", content.get("data", {UNNAMED: ""})),
        _whole("processes", content.get("processes", 1)),
        _timeout(content.get("timeout")),
        _named("faster", content["faster"]) if "faster" in content else {},
    )
    for name in plan.faster:
        if name not in plan.arms:
            raise UserError(f"faster: {name}: no such arm; use {', '.join(plan.arms)}")
    _check_count(plan)
    for arm, flags in plan.arms.items():
        for data in plan.data.values():
            for flag in _WRITTEN:
                folder = flag_value([*command, *data, *flags, *plan.faster.get(arm, ())], flag)
                if folder is not None and FOLDER not in folder:
                    remedy = f"put {FOLDER} into it, their own folder"
                    raise UserError(f"{flag} {folder}: all runs would write there; {remedy}")
    return plan


def _check_count(plan: SweepPlan) -> None:
    """Check the number of runs before they are made: a short plan may have a huge product."""
    sizes = {"seeds": plan.seeds, "learning rates": plan.learning_rates, "data sets": plan.data, "arms": plan.arms}
    if (count := math.prod(map(len, sizes.values()))) > MOST_RUNS:
        product = " x ".join(f"{len(of)} {what}" for what, of in sizes.items())
        raise UserError(f"{product} are {count:,} runs; leave some out, a plan has at most {MOST_RUNS:,}")


def _words(key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, str):
        raise UserError(f"{key}: {value!r}: must be text; put it in quotes")
    _check_characters(key, value)
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise UserError(f"{key}: {value!r}: {error}; close the quotes") from None


def _check_characters(key: str, value: str) -> None:
    """Refuse NUL and half a surrogate pair, which YAML's escapes allow but no command line or file name does."""
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(f"{key}: {value!r}: holds a character that no command line can; remove it")


def _named(key: str, value: Any) -> dict[str, tuple[str, ...]]:
    """{name: flags}."""
    if not isinstance(value, Mapping) or not value:
        raise UserError(f"{key}: {value!r}: must be one or more of NAME: FLAGS")
    for name, flags in value.items():
        if not isinstance(name, str):
            raise UserError(f"{key}: {name!r}: a name must be text; put it in quotes")
        if not is_name(name):
            raise UserError(f"{key}: {name!a}: a name is of printable characters; remove the others")
        _refuse(f"{key}: {name}", _words(f"{key}: {name}", flags), {**OWN, **RATES})
    return {name: _words(f"{key}: {name}", flags) for name, flags in value.items()}


def _refuse(where: str, words: tuple[str, ...], flags: Mapping[str, str]) -> None:
    for flag, key in flags.items():
        if (value := flag_value(words, flag)) is not None:
            raise UserError(f"{where}: {flag} {value}: is the same for all arms; set it under {key}:")


def _whole(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise UserError(f"{key}: {value!r}: must be a whole number from 1 to {LARGEST}")
    return value


def _seeds(value: Any) -> tuple[int, ...]:
    if isinstance(value, int) and value > MOST_RUNS:
        raise UserError(f"seeds: {value!r}: too many; a plan has at most {MOST_RUNS:,} runs")
    seeds = list(range(1, value + 1)) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(seeds, list) or not seeds:
        raise UserError(f"seeds: {value!r}: must be a number of seeds, or a list of whole numbers")
    found = tuple(_whole("seeds", seed) for seed in seeds)
    if len(set(found)) < len(found):
        raise UserError(f"seeds: {value!r}: one is repeated; give each once")
    return found


def _rates(value: Any, base: float) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise UserError(f"learning_rates: {value!r}: must be a list, such as [1x, 10x]")
    rates = []
    for item in value:
        number = str(item).removesuffix("x")
        if not _is_rate(number) or float(number) == 0:
            raise UserError(f"learning_rates: {item!r}: must be a number, or a multiple such as 10x")
        rate = float(number) * (base if number != str(item) else 1)
        if not 0 < rate < math.inf:
            raise UserError(f"learning_rates: {item!r}: is {rate:g}; use a multiple that is above 0 and finite")
        rates.append(float(f"{rate:g}"))
    if len(set(rates)) < len(rates):
        raise UserError(f"learning_rates: {value!r}: one is repeated; give each once")
    return tuple(rates)


def _is_rate(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"timeout: {value!r}: must be seconds, above 0")
    return float(value)
