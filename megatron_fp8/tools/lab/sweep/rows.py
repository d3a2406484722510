"""Check the content of a store's tables. Whatever wrote them, each value has its type, or a UserError of one line says
which has not.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import UserError
from .plan_file import LARGEST, SweepRun, is_name

WAITING, RUNNING, DONE, FAILED, NOT_FINITE = "waiting", "running", "done", "failed", "not finite"
STATES = (WAITING, RUNNING, DONE, FAILED, NOT_FINITE)
ENDED = (DONE, NOT_FINITE)  # by themselves: there is something to judge
_SHOWN = 60  # characters of a value that a message quotes


class Damaged(UserError):
    """A store whose content is not what a sweep writes."""

    def __init__(self, store: Any, what: str):
        remedy = "put a copy of it there, or sweep into a new one"
        super().__init__(f"{store}: {printable(what)}: the store is damaged; {remedy}")


@dataclass(frozen=True)
class Row:
    """A run's row: columns of the table. Times are Unix seconds; `code` is the version that ran it."""

    id: int
    arm: str
    seed: int
    learning_rate: float
    data: str
    command: tuple[str, ...]
    state: str
    attempt: int
    machine: str | None
    worker: str | None
    started: float | None
    ended: float | None
    exit_code: int | None
    error: str | None
    code: str | None

    @property
    def name(self) -> str:
        """The run's name in messages."""
        return f"{self.arm}, seed {self.seed}, learning rate {self.learning_rate:g}, {self.data}"


def printable(text: str) -> str:
    """A store's text, safe to print: control characters could act on a terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]


def key_of(run: SweepRun | Row) -> tuple[str, int, float, str]:
    """The key of a run within its store."""
    return run.arm, run.seed, run.learning_rate, run.data


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and 0 <= value <= LARGEST


def _is_number(value: Any) -> bool:
    return (_is_whole(value) or isinstance(value, float)) and math.isfinite(value)


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1e11  # the year 5138


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(holds, value))


def _or_nothing(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


_COLUMNS: dict[str, Callable[[Any], bool]] = {
    "id": _is_whole,
    "arm": is_name,
    "seed": _is_count,
    "learning_rate": lambda value: _is_number(value) and value >= 0,
    "data": is_name,
    "command": _list_of(_is_text),
    "state": lambda value: value in STATES,
    "attempt": _is_count,
    "machine": _or_nothing(_is_text),
    "worker": _or_nothing(_is_text),
    "started": _or_nothing(_is_time),
    "ended": _or_nothing(_is_time),
    "exit_code": _or_nothing(_is_whole),
    "error": _or_nothing(_is_text),
    "code": _or_nothing(_is_text),
}
_OUTLINE: dict[str, Callable[[Any], bool]] = {
    "arms": _list_of(is_name),
    "data": _list_of(is_name),
    "steps": lambda value: _is_count(value) and value > 0,
}
COLUMNS = ", ".join(_COLUMNS)


def read_row(store: Any, columns: Sequence[Any]) -> Row:
    """The Row of these COLUMNS."""
    values = dict(zip(_COLUMNS, columns, strict=True))
    values["command"] = read_json(store, f"run {values['id']!r}: command", values["command"])
    _check(store, f"run {values['id']!r}", values, _COLUMNS)
    return Row(**{**values, "command": tuple(values["command"])})


def read_outline(store: Any, outline: Any) -> dict[str, Any]:
    """A plan's outline, as made by SweepPlan.outline."""
    if not isinstance(outline, dict):
        raise Damaged(store, f"the plan is {_quoted(outline)}")
    _check(store, "the plan", {name: outline.get(name) for name in _OUTLINE}, _OUTLINE)
    return outline


def read_json(store: Any, what: str, text: Any) -> Any:
    """The value of a column with JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise Damaged(store, f"{what} is {_quoted(text)}, no JSON") from None


def read_points(store: Any, run: int, rows: Sequence[tuple]) -> dict[str, list[tuple[int, float]]]:
    """{name: (step, value) in rising steps} of a run's rows (name, step, value), in the order of names and steps."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name, step, value in rows:
        if type(step) is not int or not (value is None or type(value) is float):  # a fast, exact test: a million rows
            raise Damaged(store, f"run {run}: a point is {_quoted((name, step, value))}")
        found.setdefault(name, []).append((step, math.nan if value is None else value))
    for name, points in found.items():
        steps = [step for step, _ in points]
        if not is_name(name) or not 0 <= steps[0] <= steps[-1] <= LARGEST or sorted(set(steps)) != steps:
            raise Damaged(store, f"run {run}: the steps of {_quoted(name)} do not rise from 0 to at most {LARGEST}")
    return found


def _check(store: Any, where: str, values: Mapping[str, Any], holds: Mapping[str, Callable[[Any], bool]]) -> None:
    for name, value in values.items():
        if not holds[name](value):
            raise Damaged(store, f"{where}: {name} is {_quoted(value)}")


def _quoted(value: Any) -> str:
    text = ascii(value)  # shows characters that could act on a terminal
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
