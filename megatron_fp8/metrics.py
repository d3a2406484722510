"""Writes a run's numbers as JSON for other programs, if MEGATRON_FP8_METRICS=FILE is set.

The last rank, which prints Megatron's log, appends these lines:

    {"step": 10, "loss": 5.0161709785461426, "grad_norm": 0.79812, ...}     an iteration that Megatron logs
    {"step": 10, "update_norm": 0.024193801, ...}                           other measurements of the iteration
    {"step": 10, "validation_loss": 1.829636}                               an evaluation
    {"linears_in_bf16": ["decoder.layers.0.mlp.linear_fc1", ...]}           without a step: about the whole run
    {"device": "NVIDIA H100 80GB HBM3"}                                     the same, once a start; "cpu" without a GPU

A line has one object; a step may have several lines. Floats have all their digits; NaN and Infinity are written like
Python's json does. A run that resumes appends. The file is created at the start: if it is missing, the command does not
load this package. monitor/training_log.py and monitor/writers.py say what the numbers are.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import UserError

VARIABLE = "MEGATRON_FP8_METRICS"
STEP = "step"
# Names that our programs read. The other names are Megatron's and the monitors'.
LOSS, VALIDATION_LOSS = "loss", "validation_loss"
STEP_MS, SKIPPED = "elapsed_time_per_iteration_ms", "number_of_skipped_iterations"
LINEARS = "linears_in_bf16"
DEVICE = "device"


def begin() -> bool:
    """Create the run's file, if the variable is set and the file is missing; return whether the variable is set.

    Raises UserError if the file cannot be created.
    """
    file = os.environ.get(VARIABLE)
    if not file:
        return False
    try:
        if _is_writer():
            Path(file).open("a").close()
    except OSError as error:
        raise UserError(f"{VARIABLE} {file}: {error.strerror}; name a file in an existing folder") from None
    return True


def record(values: Mapping[str, Any], step: int | None = None) -> None:
    """Append a line, if the run has a file and this rank writes it. step: None for facts about the whole run.

    Spaces and hyphens in names become underscores: "update-norm" is update_norm.
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
    """Reads the steps in a run's file while it grows."""

    def __init__(self, path: Path):
        self.path, self._offset = path, 0

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """(step, {name: value}) for each complete line since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        self._offset += len(whole) + bool(whole)
        lines = map(json.loads, whole.splitlines())
        return [(line.pop(STEP), line) for line in lines if STEP in line]


def facts(path: Path) -> dict[str, Any]:
    """The contents of the lines without a step, in a run's file."""
    lines = map(json.loads, path.read_bytes().rpartition(b"\n")[0].splitlines())
    return {name: value for line in lines if STEP not in line for name, value in line.items()}
