"""One training run of the lab. Its numbers come from the plugin's metrics file, its text goes to log.txt.

The numbers are those of megatron_fp8/metrics.py, under names that date from when they were parsed from the log.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....metrics import VARIABLE, Reader
from ....processes import TorchRun
from ..files import make_empty

NUMBERS = "metrics.jsonl"  # in a run's folder
NOT_LOADED = (
    "the command wrote no numbers: it does not load megatron_fp8; begin it with pretrain_gpt_fp8.py, or with "
    "-m megatron_fp8 and the script (--fp8-level is not needed)"
)
_RENAMED = {"sharpness_mean": "sharpness", "centred_sharpness_mean": "centred", "log_z_mean": "log_z"}
# Megatron's messages, and pretrain_gpt.py's, when a value that is not finite ends a run. The text of the exception is
# needed, because no number shows it.
_NOT_FINITE = re.compile(r"Unexpected result (tensor\()?(nan|-?inf)|found (NaN|Inf) in", re.IGNORECASE)


class Training(TorchRun):
    """A run in progress.

    Args:
        command: a script, or -m and a module, and flags; "{run}" in it is replaced by `folder`.
        processes: how many, on this machine.
        folder: the run's own. Files of an earlier attempt are deleted; it gets log.txt and metrics.jsonl.
        environment: variables to add to this process's.

    Attributes:
        not_finite: whether it reported that it ends because a loss or a gradient is not finite.
        last: the last step that it reported.
    """

    def __init__(self, command: Sequence[str], processes: int, folder: Path, environment: Mapping[str, str]):
        make_empty(folder)
        self.not_finite, self.last = False, 0
        self._metrics = Reader(folder / NUMBERS)
        words = [word.replace("{run}", str(folder)) for word in command]
        ours = {**environment, VARIABLE: str(self._metrics.path)}
        super().__init__(words, processes, folder / "log.txt", ours, own_session=True)

    @property
    def loads_plugin(self) -> bool:
        """Whether the command has created its metrics file; the plugin does so before the first step."""
        return self._metrics.path.exists()

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """(Step, {name: value}) for all that has been logged since the last call."""
        self.not_finite |= any(map(_NOT_FINITE.search, self.lines()))
        found = self._metrics.read()
        self.last = max([self.last, *(step for step, _ in found)])
        return [(step, {_RENAMED.get(name, name): x for name, x in values.items()}) for step, values in found]
