"""One flag of ours: the parser, --help, docs/flags.md, its refusals and its reader all take it from here.

The parser reads and checks each value: what comes out of it is typed and taken.

To add one: a Flag among the FLAGS of its subject's file, and its reader there. config.py joins the subjects.
"""

import math
import re
from argparse import ArgumentTypeError, Namespace, _ActionsContainer
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import UserError


@dataclass(frozen=True)
class Values:
    """Which values a flag takes.

    Attributes:
        shown: what stands for one in --help: "N", "{auto,pre,post}"; "" for a switch.
        kind: str, int or float.
        test, remedy: whether a value is taken, and what to say if it is not.
    """

    shown: str
    kind: Callable[[str], Any] = str
    test: Callable[[Any], bool] = lambda value: True
    remedy: str = ""

    def read(self, text: str) -> Any:
        """The value of a word of the command line: the `type` of a parser's argument, a verb's too."""
        try:
            value = self.kind(text)
            taken = self.test(value)
        except ValueError:  # also of more digits than Python reads
            taken = False
        if not taken:
            raise ArgumentTypeError(self.remedy)
        return value


SWITCH = Values("")
LARGEST = 10**15  # of any number: what is computed of it still fits 64 bits


def whole_number(text: str) -> int | None:
    """The number that a word or a file says, in 1 to 18 digits, as a shell counts too; None for any other text.

    Python's int() takes other digits than 0 to 9, and raises for more than 4,300 of them.
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def named(shown: str) -> Values:
    """A file or a folder; an empty name would be none, or the folder that the run started in."""
    return Values(shown, test=bool, remedy="an empty name; give one")


def one_of(*values: str) -> Values:
    *others, last = values
    remedy = f"no such value; use {', '.join(others)} or {last}"
    return Values(f"{{{','.join(values)}}}", test=lambda value: value in values, remedy=remedy)


def whole(least: int, meaning: str = "", most: int = LARGEST) -> Values:
    """Whole numbers from `least`, which has a `meaning` of its own, to `most`."""
    limit = "or more" if most == LARGEST else f"to {most}"
    remedy = f"use {least}{f' ({meaning})' if meaning else ''} {limit}"
    return Values("N", int, lambda value: least <= value <= most, remedy)


def positive(most: float = math.inf) -> Values:
    """Finite numbers above 0, up to `most`."""
    limit = "" if math.isinf(most) else f", at most {most:g}"
    return Values("X", float, lambda x: 0 < x <= most and math.isfinite(x), f"use a number above 0{limit}")


def listed(shown: str, test: Callable[[int], bool], remedy: str) -> Values:
    """Whole numbers divided by commas; the value stays text."""
    return Values(shown, test=lambda text: all(test(int(one)) for one in text.split(",")), remedy=remedy)


@dataclass(frozen=True)
class Flag:
    """A flag of ours.

    Attributes:
        name: as on the command line: "--fp8-log-interval".
        meaning: for --help and docs/flags.md.
        values: which it takes.
        field: of its subject's plan, or of Fp8Config, that its value fills; "" where its reader makes more of it.
        needs_level: whether a run without a level would ignore it. Such a run refuses it.
    """

    name: str
    meaning: str
    values: Values = SWITCH
    field: str = ""
    needs_level: bool = True

    def add_to(self, parser: _ActionsContainer) -> None:
        """Add it to a parser; its default is None, so that what was given can be told."""
        if self.values is SWITCH:
            parser.add_argument(self.name, action="store_true", default=None, help=self.meaning)
        else:
            parser.add_argument(self.name, metavar=self.values.shown, type=self.values.read, help=self.meaning)

    def given(self, args: Namespace) -> Any:
        """Its value as it was given; None where it was not (--yaml-cfg leaves none of ours)."""
        return value_of(args, self.name)

    def shown(self, args: Namespace) -> str:
        """As it was given: "--fp8-log-interval 7", or "--fp8-ckpt-compact"."""
        return self.name if self.values is SWITCH else f"{self.name} {self.given(args)}"


def value_of(args: Namespace, name: str) -> Any:
    """The value of a flag, stock's too, that is called so in the arguments, or None."""
    return getattr(args, name[2:].replace("-", "_"), None)


def filled(args: Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """{field: value} of those flags that were given."""
    return {flag.field: value for flag in flags if (value := flag.given(args)) is not None}


def refuse(args: Namespace, flags: Iterable[Flag], why: str) -> None:
    """Raise UserError of one line for the first of the flags that was given: the flag, `why`, "or remove it"."""
    for flag in flags:
        if flag.given(args) is not None:
            raise UserError(f"{flag.shown(args)}{why}, or remove it")
