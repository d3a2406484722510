"""Flag: the definition of one of our flags, used by the parser, --help, docs/flags.md, refusals and readers.

The parser converts and checks each value, so a reader gets a typed and valid one.

To add a flag, add a Flag to FLAGS in its subject's file, and its reader there. config.py joins the subjects.
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
    """The values that a flag accepts.

    Attributes:
        shown: the placeholder in --help: "N", "{auto,pre,post}"; "" for a switch.
        kind: str, int or float.
        test, remedy: whether a value is accepted, and the error text if it is not.
    """

    shown: str
    kind: Callable[[str], Any] = str
    test: Callable[[Any], bool] = lambda value: True
    remedy: str = ""

    def read(self, text: str) -> Any:
        """Convert a word of the command line. Serves as `type` of a parser's argument."""
        try:
            value = self.kind(text)
            taken = self.test(value)
        except ValueError:  # Python also raises it for more digits than int() reads
            taken = False
        if not taken:
            raise ArgumentTypeError(self.remedy)
        return value


SWITCH = Values("")
LARGEST = 10**15  # the largest whole number: results computed from it still fit 64 bits


def whole_number(text: str) -> int | None:
    """The number in a text of 1 to 18 digits, which a shell's arithmetic can hold too; None for any other text.

    Python's int() accepts other digits than 0 to 9, and raises for more than 4,300 of them.
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def named(shown: str) -> Values:
    """A file or a folder. An empty name is refused: it would mean no file, or the current folder."""
    return Values(shown, test=bool, remedy="an empty name; give one")


def one_of(*values: str) -> Values:
    *others, last = values
    remedy = f"no such value; use {', '.join(others)} or {last}"
    return Values(f"{{{','.join(values)}}}", test=lambda value: value in values, remedy=remedy)


def whole(least: int, meaning: str = "", most: int = LARGEST) -> Values:
    """Whole numbers from `least` to `most`. meaning: what `least` means, if it is special (0: never)."""
    limit = "or more" if most == LARGEST else f"to {most}"
    remedy = f"use {least}{f' ({meaning})' if meaning else ''} {limit}"
    return Values("N", int, lambda value: least <= value <= most, remedy)


def positive(most: float = math.inf) -> Values:
    """Finite numbers above 0, up to `most`."""
    limit = "" if math.isinf(most) else f", at most {most:g}"
    return Values("X", float, lambda x: 0 < x <= most and math.isfinite(x), f"use a number above 0{limit}")


def listed(shown: str, test: Callable[[int], bool], remedy: str) -> Values:
    """Whole numbers separated by commas; the value stays text."""
    return Values(shown, test=lambda text: all(test(int(one)) for one in text.split(",")), remedy=remedy)


@dataclass(frozen=True)
class Flag:
    """One of our flags.

    Attributes:
        name: as on the command line: "--fp8-log-interval".
        meaning: for --help and docs/flags.md.
        values: the accepted values.
        field: the field of its subject's plan, or of Fp8Config, that gets its value; "" if its reader computes it.
        needs_level: whether the flag has no effect without a level. A run without a level then refuses it.
    """

    name: str
    meaning: str
    values: Values = SWITCH
    field: str = ""
    needs_level: bool = True

    def add_to(self, parser: _ActionsContainer) -> None:
        """Add it to a parser. The default is None, so that a given flag can be told from one that was not."""
        if self.values is SWITCH:
            parser.add_argument(self.name, action="store_true", default=None, help=self.meaning)
        else:
            parser.add_argument(self.name, metavar=self.values.shown, type=self.values.read, help=self.meaning)

    def given(self, args: Namespace) -> Any:
        """Its value; None if it was not given (with --yaml-cfg the arguments have none of our flags)."""
        return value_of(args, self.name)

    def shown(self, args: Namespace) -> str:
        """The flag with its value: "--fp8-log-interval 7", or "--fp8-ckpt-compact"."""
        return self.name if self.values is SWITCH else f"{self.name} {self.given(args)}"


def value_of(args: Namespace, name: str) -> Any:
    """The value of any flag, ours or stock's, that is stored under its own name; None if there is none."""
    return getattr(args, name[2:].replace("-", "_"), None)


def filled(args: Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """{field: value} of the flags that were given."""
    return {flag.field: value for flag in flags if (value := flag.given(args)) is not None}


def refuse(args: Namespace, flags: Iterable[Flag], why: str) -> None:
    """Raise UserError for the first of the flags that was given. Its line: the flag, `why`, "or remove it"."""
    for flag in flags:
        if flag.given(args) is not None:
            raise UserError(f"{flag.shown(args)}{why}, or remove it")
