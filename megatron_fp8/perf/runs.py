"""Runs read for comparison: this package's metrics, Megatron's log, TensorBoard's files.

    form         loss is                         of a path
    metrics      the iteration's, every digit    FILE.jsonl (MEGATRON_FP8_METRICS), or FILE of --export-result
    log          as printed, seven digits        any other file with Megatron's iteration lines
    tensorboard  FP32                            a folder with events.out.tfevents.* files, or such a file

With --log-interval above 1 a loss of the first two forms is the mean of the iterations since the last line, but for
skipped ones; NaN where all were. Megatron prints no loss that is NaN, and 0 where all were skipped; and a start's
second line has the first iteration once more, its loss and whether it was skipped.

TensorBoard has each iteration's own loss, a skipped one's too, and all evaluations under one tag: after the last step
that of the test set comes second. Its files are records of protocol buffers, few fields of which are read here: its
package is not needed.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..metrics import LOSS, SKIPPED, STEP, STEP_MS, VALIDATION_LOSS
from .text import MIB

GRAD_NORM, TEST_LOSS = "grad_norm", "test_loss"
TENSORBOARD = "tensorboard"  # a form
_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|")
_NUMBER = r" *(-?(?:\d+\.?\d*(?:E[-+]\d+)?|NAN|INF)) \|"  # whole, as the bar behind it says
_TITLES = {LOSS: "lm loss", GRAD_NORM: "grad norm", STEP_MS: "elapsed time per iteration (ms)",
           SKIPPED: "number of skipped iterations"}  # fmt: skip
_PRINTED = {name: re.compile(rf"\| {re.escape(title)}:{_NUMBER}", re.I) for name, title in _TITLES.items()}
_EVALUATION = re.compile(rf"validation loss at iteration (\d+)( on test set)? .*?\| lm loss value:{_NUMBER}", re.I)
_TAGS = {"lm loss": LOSS, "grad-norm": GRAD_NORM, "iteration-time": STEP_MS, "lm loss validation": VALIDATION_LOSS}


@dataclass
class Run:
    """Attributes:
    steps: {step: {name: value}}, by metrics.py's names.
    rounded: (name, value) -> value as this form of file would have it.
    memory: (GB held, GB at the peak) of 10^9 bytes, where the file says.
    """

    name: str
    form: str
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    rounded: Callable[[str, float], float] = lambda name, value: value
    memory: tuple[float, float] | None = None

    def series(self, name: str) -> dict[int, float]:
        """{step: value} of those that have one."""
        return {step: values[name] for step, values in sorted(self.steps.items()) if name in values}


def read(word: str) -> Run:
    """A run of [NAME=]PATH.  Raises UserError for what is no run's."""
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
        text = place.read_text(errors="replace")  # once: it may be a pipe
        is_metrics = place.suffix == ".jsonl" or _begins_with_a_step(text)
        run = _metrics(name, path, text) if is_metrics else _log(name, text)
    if not run.series(LOSS):
        raise UserError(f"{path}: no step with a loss in it; give the output of the last rank, or another file")
    return run


def _begins_with_a_step(text: str) -> bool:
    """Whether it is --export-result's form, whatever the file is called."""
    try:
        return {STEP, LOSS} <= json.loads(text.partition("\n")[0]).keys()
    except (ValueError, AttributeError):  # no JSON, or no object
        return False


def _metrics(name: str, path: str, text: str) -> Run:
    run = Run(name, "metrics")
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            step = values.pop(STEP, None)
            step = None if step is None else int(step)
        except (ValueError, TypeError, AttributeError):
            if 1 < number == len(lines) and not text.endswith("\n"):
                break  # of a run that was killed as it wrote
            raise UserError(f"{path}: line {number} is no step's JSON object; give a metrics file") from None
        if step is not None:
            run.steps.setdefault(step, {}).update(
                {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
            )
    return run


def _log(name: str, text: str) -> Run:
    digits = {LOSS: ".6E", GRAD_NORM: ".3f", STEP_MS: ".1f"}
    run = Run(name, "log", rounded=lambda key, value: float(format(value, digits.get(key, ".6E"))))
    for line in text.splitlines():
        if found := _ITERATION.search(line):
            values = {key: float(value[1]) for key, printed in _PRINTED.items() if (value := printed.search(line))}
            if SKIPPED in values and (LOSS not in values or values[LOSS] == 0 < values[SKIPPED]):
                values[LOSS] = math.nan  # without a count the line was cut off
            run.steps.setdefault(int(found[1]), {}).update(values)
        elif found := re.search(r"memory \(MB\) \| allocated: ([\d.]+) \| max allocated: ([\d.]+)", line):
            memory = float(found[1]) * MIB, float(found[2]) * MIB
            run.memory = max(run.memory or memory, memory, key=lambda pair: pair[1])
        elif found := _EVALUATION.search(line):
            run.steps.setdefault(int(found[1]), {})[TEST_LOSS if found[2] else VALIDATION_LOSS] = float(found[3])
    return run


def _tensorboard(name: str, path: Path) -> Run:
    files = sorted(path.glob("**/events.out.tfevents*")) if path.is_dir() else [path]
    run = Run(name, TENSORBOARD, rounded=lambda key, value: struct.unpack("f", struct.pack("f", value))[0])
    for file in files:
        try:
            _add_events(run, file)
        except (IndexError, struct.error, TypeError, AttributeError):
            raise UserError(f"{file}: no file of TensorBoard's, or a damaged one; give another") from None
    return run


def _add_events(run: Run, file: Path) -> None:
    found: dict[int, dict[str, float]] = {}
    for record in _records(file.read_bytes()):
        event = dict(_fields(record))
        for number, summary in _fields(event.get(5, b"")):
            value = dict(_fields(summary)) if number == 1 else {}
            tag = value.get(1, b"").decode(errors="replace")
            if tag in _TAGS and isinstance(value.get(2), float):
                name, scale = _TAGS[tag], 1000 if tag == "iteration-time" else 1  # seconds
                values = found.setdefault(event.get(2, 0), {})
                if name != VALIDATION_LOSS or name not in values:  # the test set's comes after it, under the same tag
                    values[name] = value[2] * scale
    for step, values in found.items():
        run.steps.setdefault(step, {}).update(values)


def _records(content: bytes) -> Iterator[bytes]:
    """Of a TFRecord file; a last one that is not whole is left out."""
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
