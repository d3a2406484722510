"""One training run of the lab: its numbers from the file that the plugin writes, its words in log.txt.

The numbers are those of megatron_fp8/metrics.py, under the names that stores have had since they were read of the log.
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
# Megatron's words where it ends a run for such a value; so do pretrain_gpt.py's. An exception's, which ends the process
# wherever it is: no number says it.
_NOT_FINITE = re.compile(r"Unexpected result (tensor\()?(nan|-?inf)|found (NaN|Inf) in", re.IGNORECASE)


class Training(TorchRun):
    """A run in progress.

    Args:
        command: a script, or -m and a module, and flags; "{run}" in it is replaced by `folder`.
        processes: so many on this machine.
        folder: the run's own. What an earlier attempt left there is deleted; it gets log.txt and metrics.jsonl.
        environment: variables to set beside those of this process.

    Attributes:
        not_finite: whether it said that it ends for a loss or a gradient that is not finite.
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
        """Whether the command has begun a file of numbers; it does so before its first step."""
        return self._metrics.path.exists()

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """(Step, {name: value}) of all that has been logged since the last call."""
        self.not_finite |= any(map(_NOT_FINITE.search, self.lines()))
        found = self._metrics.read()
        self.last = max([self.last, *(step for step, _ in found)])
        return [(step, {_RENAMED.get(name, name): x for name, x in values.items()}) for step, values in found]
