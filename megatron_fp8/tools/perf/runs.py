"""Read a run for comparison from this package's metrics, Megatron's log, or TensorBoard's files.

    form         loss                             path
    metrics      the iteration's, every digit     FILE.jsonl (MEGATRON_FP8_METRICS), or FILE of --export-result
    log          as printed, seven digits         any other file with Megatron's iteration lines
    tensorboard  FP32                             a folder with events.out.tfevents.* files, or such a file

With --log-interval above 1, a loss of the first two forms is the mean of the iterations since the last line, without
skipped ones; NaN if all were skipped. If the mean is NaN, Megatron prints no loss; if all were skipped, it prints 0.
Megatron does not reset the mean after a start's first line, so the second line's mean contains the first iteration
again: its loss and whether it was skipped.

TensorBoard has each iteration's own loss, skipped ones included. It has all evaluations under one tag: after the last
step the test set's comes second. With several validation sets each form has a name for each set. TensorBoard's files
are records of protocol buffers, of which few fields are needed, so they are read here without TensorBoard's package.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...metrics import DEVICE, LOSS, SKIPPED, STEP, STEP_MS, VALIDATION_LOSS, VARIABLE
from .output import MIB

GRAD_NORM, TEST_LOSS = "grad_norm", "test_loss"
TENSORBOARD = "tensorboard"  # a form
MEAN_OF = "mean_of"  # a key of --export-result's file: its loss is the mean of this many steps
_ITERATION = re.compile(r"iteration +(\d{1,18})/ *\d+ \|")
_NUMBER = r" *(-?(?:\d+\.?\d*(?:E[-+]\d+)?|NAN|INF)) \|"  # the bar behind it shows that the number is whole
_TITLES = {LOSS: "lm loss", GRAD_NORM: "grad norm", STEP_MS: "elapsed time per iteration (ms)",
           SKIPPED: "number of skipped iterations"}  # fmt: skip
_PRINTED = {name: re.compile(rf"\| {re.escape(title)}:{_NUMBER}", re.I) for name, title in _TITLES.items()}
_EVALUATION = re.compile(
    rf"validation(?:-(.+?))? loss at iteration (\d{{1,18}})( on test set)? .*?\| lm loss value:{_NUMBER}", re.I
)
_START = "[before the start of training step]"
# The first line of a run without a GPU (cpu.py), and its entry among Megatron's printed arguments.
_ON_CPU = re.compile(r"\[fp8\] no CUDA device|^ +distributed_backend \.+ gloo$", re.M)
_TAGS = {"lm loss": LOSS, "grad-norm": GRAD_NORM, "iteration-time": STEP_MS}
_VALIDATION_TAG = re.compile(r"lm loss validation(?:-(.+))?")


@dataclass
class Run:
    """Attributes:
    steps: {step: {name: value}}, with metrics.py's names.
    interval: steps between two lines (--log-interval); None if not known.
    mean_of: {step: n}: the step's loss is the mean of the n steps up to it; only where n is known.
    rounded: (name, value) -> the value in this form's precision.
    memory: (GB held, GB at the peak) of 10^9 bytes, if the file says.
    on_cpu: whether the file says that the run had no GPU.
    """

    name: str
    form: str
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    interval: int | None = None
    mean_of: dict[int, int] = field(default_factory=dict)
    rounded: Callable[[str, float], float] = lambda name, value: value
    memory: tuple[float, float] | None = None
    on_cpu: bool = False

    def series(self, name: str) -> dict[int, float]:
        """{step: value} of the steps that have the value."""
        return {step: values[name] for step, values in sorted(self.steps.items()) if name in values}

    def validations(self) -> list[str]:
        """The names of its validation losses, one for each validation set."""
        return sorted({name for values in self.steps.values() for name in values if name.startswith(VALIDATION_LOSS)})


def read(word: str) -> Run:
    """Read the run of [NAME=]PATH.  Raises UserError if the path has no run."""
    name, sign, path = word.partition("=")
    if not sign or Path(word).exists():
        name, path = Path(word).name or word, word
    place = Path(path)
    if not path or not place.exists():
        said = path or repr(word)
        raise UserError(f"{said}: no such run; give a metrics file, Megatron's log, or TensorBoard's folder")
    if place.is_dir() or place.name.startswith("events.out.tfevents"):
        run = _tensorboard(name, place)
    else:
        try:
            text = place.read_text(errors="replace")  # read once: it may be a pipe
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; give a file that can be read") from None
        is_metrics = place.suffix == ".jsonl" or _begins_with_a_step(text)
        run = _metrics(name, path, text) if is_metrics else _log(name, text)
    if not run.series(LOSS):
        raise UserError(f"{path}: there is no step with a loss in it; give the log of the last rank, which prints them")
    return run


def _begins_with_a_step(text: str) -> bool:
    """Whether the text is in --export-result's form; the file may have any name."""
    try:
        first = json.loads(text.partition("\n")[0])
    except ValueError:
        return False
    return isinstance(first, dict) and STEP in first


def _metrics(name: str, path: str, text: str) -> Run:
    run = Run(name, "metrics")
    lines = text.splitlines()
    starts: list[list[int]] = [[]]
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            step = values.pop(STEP, None)
            step = None if step is None else int(step)
            found = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
        except (ValueError, TypeError, AttributeError, OverflowError):
            if 1 < number == len(lines) and not text.endswith("\n"):
                break  # the last line of a run that was killed while it wrote
            said = f"line {number} is not the JSON object of a step; give a file that {VARIABLE} named"
            raise UserError(f"{path}: {said}") from None
        if step is None:
            if DEVICE in values:
                starts.append([])
                run.on_cpu |= values[DEVICE] == "cpu"
            continue
        if (length := found.pop(MEAN_OF, math.nan)) >= 1:
            run.mean_of[step] = round(min(length, step))
        run.steps.setdefault(step, {}).update(found)
        if STEP_MS in values:
            starts[-1].append(step)
    _note_means(run, starts, again=False)
    return run


def _log(name: str, text: str) -> Run:
    digits = {LOSS: ".6E", GRAD_NORM: ".3f", STEP_MS: ".1f"}
    run = Run(name, "log", rounded=lambda key, value: float(format(value, digits.get(key, ".6E"))))
    run.on_cpu = bool(_ON_CPU.search(text))
    starts: list[list[int]] = [[]]
    for line in text.splitlines():
        if found := _ITERATION.search(line):
            values = {key: float(value[1]) for key, printed in _PRINTED.items() if (value := printed.search(line))}
            if SKIPPED in values and (LOSS not in values or values[LOSS] == 0 < values[SKIPPED]):
                values[LOSS] = math.nan  # a line without the skipped count was cut off
            step = int(found[1])
            run.steps.setdefault(step, {}).update(values)
            if starts[-1] and step <= starts[-1][-1]:  # a start whose first lines are missing from the file
                starts.append([])
            starts[-1].append(step)
        elif _START in line:
            starts.append([])
        elif found := re.search(r"memory \(MB\) \| allocated: ([\d.]+) \| max allocated: ([\d.]+)", line):
            memory = float(found[1]) * MIB, float(found[2]) * MIB
            run.memory = max(run.memory or memory, memory, key=lambda pair: pair[1])
        elif found := _EVALUATION.search(line):
            validation = _of_set(TEST_LOSS if found[3] else VALIDATION_LOSS, found[1])
            run.steps.setdefault(int(found[2]), {})[validation] = float(found[4])
    _note_means(run, starts, again=True)
    return run


def _of_set(name: str, validation_set: str | None) -> str:
    """A loss's name in metrics.py's file. validation_set: one of --multiple-validation-sets, or None."""
    return name if validation_set is None else f"{name}_{re.sub('[ -]', '_', validation_set)}"


def _note_means(run: Run, starts: Iterable[list[int]], again: bool) -> None:
    """Set the run's interval and mean_of from the steps of each start's lines.

    A start's first line has the first iteration alone. again: the second line's mean contains it once more. If two
    lines are farther apart than the interval, the lines between were lost, and no mean contains their steps.
    """
    starts = [steps for steps in starts if steps]
    regular = [step for steps in starts for step in steps[1:]]  # Megatron logs every multiple of the interval
    run.interval = math.gcd(*regular) if len(regular) > 1 else None
    for steps in starts:
        run.mean_of[steps[0]] = 1
        run.mean_of |= {b: min(b - a, run.interval or b) for a, b in pairwise(steps)}
        if again and len(steps) > 1:
            run.mean_of[steps[1]] += 1


def _tensorboard(name: str, path: Path) -> Run:
    files = sorted(path.glob("**/events.out.tfevents*")) if path.is_dir() else [path]
    run = Run(name, TENSORBOARD, rounded=lambda key, value: struct.unpack("f", struct.pack("f", value))[0])
    for file in files:
        try:
            _add_events(run, file)
        except (IndexError, struct.error, TypeError, AttributeError):
            raise UserError(f"{file}: damaged, or not a file of TensorBoard; give another") from None
    return run


def _add_events(run: Run, file: Path) -> None:
    found: dict[int, dict[str, float]] = {}
    for record in _records(file.read_bytes()):
        event = dict(_fields(record))
        for number, summary in _fields(event.get(5, b"")):
            value = dict(_fields(summary)) if number == 1 else {}
            tag = value.get(1, b"").decode(errors="replace")
            evaluated = not tag.endswith((" ppl", " vs samples")) and _VALIDATION_TAG.fullmatch(tag)
            name = _of_set(VALIDATION_LOSS, evaluated[1]) if evaluated else _TAGS.get(tag)
            if name and isinstance(value.get(2), float):
                values = found.setdefault(event.get(2, 0), {})
                if not evaluated or name not in values:  # the test set's follows under the same tag
                    values[name] = value[2] * (1000 if name == STEP_MS else 1)  # the tag is in seconds
    for step, values in found.items():
        run.steps.setdefault(step, {}).update(values)
        run.mean_of[step] = run.interval = 1


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a TFRecord file; an incomplete last one is left out."""
    place = 0
    while place + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        data = content[place + 12 : place + 12 + length]
        if len(data) < length:
            return
        yield data
        place += length + 16


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(Number, value) of a protocol buffer's fields: int, float, or bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(message):
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
        elif wire in (1, 5):
            size, form = (8, "<d") if wire == 1 else (4, "<f")
            yield number, struct.unpack_from(form, message, place)[0]
            place += size
        elif wire == 2:
            size = varint()
            yield number, message[place : place + size]
            place += size
        else:
            return


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
