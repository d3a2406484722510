"""A run's numbers for programs: with MEGATRON_FP8_METRICS=FILE the last rank, which prints Megatron's log, writes JSON.

    {"step": 10, "loss": 5.0161709785461426, "grad_norm": 0.79812, ...}     an iteration that Megatron logs
    {"step": 10, "update_norm": 0.024193801, ...}                           what is measured of it beside that
    {"step": 10, "validation_loss": 1.829636}                               an evaluation
    {"linears_in_bf16": ["decoder.layers.0.mlp.linear_fc1", ...]}           without a step: of the whole run
    {"device": "NVIDIA H100 80GB HBM3"}                                     likewise, once a start; "cpu" without a GPU

One object a line, several lines a step, floats with all their digits (NaN and Infinity as Python's json has them). A
run that goes on appends. The file is there from the start: where it is missing, the command does not load this package.
monitor/training_log.py and monitor/writers.py say what the numbers are.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import UserError

VARIABLE = "MEGATRON_FP8_METRICS"
STEP = "step"
# Names that programs look for; the others are Megatron's and the monitors' own.
LOSS, VALIDATION_LOSS = "loss", "validation_loss"
STEP_MS, SKIPPED = "elapsed_time_per_iteration_ms", "number_of_skipped_iterations"
LINEARS = "linears_in_bf16"
DEVICE = "device"


def begin() -> bool:
    """Make the run's file, if it is to have one and has none; whether it is to.

    Raises UserError of one line for a file that cannot be made.
    """
    file = os.environ.get(VARIABLE)
    if not file:
        return False
    try:
        if _is_writer():
            Path(file).open("a").close()
    except OSError as error:
        raise UserError(f"{VARIABLE} {file}: {error.strerror}; name a file in a folder that is there") from None
    return True


def record(values: Mapping[str, Any], step: int | None = None) -> None:
    """Append a line, on the rank that writes, in a run that has a file: numbers of a step, or facts of the run.

    Names get underscores: "update-norm" is update_norm.
    """
    file = os.environ.get(VARIABLE)
    if file and _is_writer():
        named = {name.replace(" ", "_").replace("-", "_"): value for name, value in values.items()}
        line = json.dumps(named if step is None else {STEP: step, **named})
        with open(file, "a") as out:
            out.write(f"{line}\n")


def _is_writer() -> bool:
    """Whether this is the last rank."""
    return int(os.environ.get("RANK", 0)) + 1 == int(os.environ.get("WORLD_SIZE", 1))


class Reader:
    """Reads the steps of a run's file as it grows."""

    def __init__(self, path: Path):
        self.path, self._offset = path, 0

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """(Step, {name: value}) of every whole line since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        self._offset += len(whole) + bool(whole)
        lines = map(json.loads, whole.splitlines())
        return [(line.pop(STEP), line) for line in lines if STEP in line]


def facts(path: Path) -> dict[str, Any]:
    """What the lines without a step say, in the file of a run that has ended, or was."""
    lines = map(json.loads, path.read_bytes().rpartition(b"\n")[0].splitlines())
    return {name: value for line in lines if STEP not in line for name, value in line.items()}
