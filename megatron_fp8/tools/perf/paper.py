"""FP8-LM's tables 5, 7 and 8 (arXiv 2310.18313, second version) beside the cost model's for the same hardware.

The paper's GPUs and software of 2023 are not ours. A fit corrects for that: one factor on time and one offset of memory
(`Fit`), from the paper's three BF16 rows alone, applied to all rows. The FP8 rows are therefore predictions. Rows for
O3 use the same fit. Times are the GPU's, not the host's: the BF16 rows show that the paper's hosts took less than our
host's 4.15 ms a layer and micro-batch, but not how much less.

The paper's GB of memory are read as 10^9 bytes, as written; its communication volumes are GiB, 2^30 bytes
(test_cost_model.py). If its memory were GiB, the offset would be 11 GiB, and one row less would be within 10 %.
"""

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from . import collectives, flops
from .hardware import Hardware
from .job import MODELS
from .step import Estimate, estimate, stages
from .systems import PAPERS, SYSTEMS, System
from .workload import Workload

FILE = Path(__file__).with_name("fp8lm.csv")
_GIB = 2**30
_SEQUENCE = 2048


class Published(NamedTuple):
    """A row of the paper; None if the paper gives no figure. Memory in the paper's GB, volume in GiB, shares in %."""

    model: str
    gpus: int
    global_batch: int
    system: str
    micro_batch: int
    memory_gb: float
    samples: float
    tflops: float
    mfu: float
    comm: float
    volume: float
    least_gb: float | None
    most_gb: float | None
    activation_comm: float | None
    activation_gb: float | None


class Fit(NamedTuple):
    """time: divide the model's samples/s by it; memory: GB added to the model's."""

    time: float
    memory: float


@dataclass(frozen=True)
class Row:
    """A row: the paper's figures (None for a system of ours), and the model's figures under the fit."""

    published: Published | None
    workload: Workload
    estimate: Estimate
    fit: Fit

    @property
    def samples(self) -> float:
        return _samples(self.estimate) / self.fit.time

    @property
    def tflops(self) -> float:
        """Counted as in the paper."""
        w = self.workload
        return flops.papers_step(w) / w.global_batch * self.samples / w.gpus / 1e12

    @property
    def memory_gb(self) -> float:
        return self.estimate.peak + self.fit.memory

    @property
    def least_and_most_gb(self) -> tuple[float, float]:
        """The range over pipeline stages; data-parallel ranks are alike."""
        peaks = [(sum(held.values()) + sum(beside.values())) / 1e9 for held, beside in stages(self.workload)]
        return min(peaks) + self.fit.memory, max(peaks) + self.fit.memory

    @property
    def volume(self) -> float:
        return collectives.weight_volume(self.workload) / _GIB

    @property
    def activation_gb(self) -> float:
        return collectives.activation_volume(self.workload) / _GIB

    def deviation(self, name: str) -> float | None:
        """The model's relative deviation from the paper; None if the paper gives no figure."""
        theirs = getattr(self.published, name, None)
        return getattr(self, name) / theirs - 1 if theirs else None


def published() -> list[Published]:
    with FILE.open(newline="") as file:
        return [_row(row) for row in csv.DictReader(file)]


def _row(row: dict[str, str]) -> Published:
    last = ("least_gb", "most_gb", "activation_comm", "activation_gb")
    return Published(
        row["model"], int(row["gpus"]), int(row["tokens"]) // _SEQUENCE, row["system"], int(row["micro_batch"]),
        *(float(row[name]) for name in ("memory_gb", "samples", "tflops", "mfu", "comm", "volume")),
        *(float(row[name]) if row[name] else None for name in last),
    )  # fmt: skip


def workload(model: str, system: System, micro_batch: int, global_batch: int) -> Workload:
    """A model of the paper in its layout, with overlap, the usual way to run Megatron-LM."""
    return Workload(
        MODELS[model], system, _SEQUENCE, micro_batch, global_batch,
        sequence_parallel=MODELS[model].tensor_model_parallel_size > 1, overlap_reduce=True, overlap_gather=True,
    )  # fmt: skip


def rows(on: Hardware) -> list[Row]:
    """All rows of Table 5. Each FP8-LM row is followed by O3 in its place."""
    theirs = published()
    found = {row: estimate(workload(row.model, PAPERS[row.system], row.micro_batch, row.global_batch), on)
             for row in theirs}  # fmt: skip
    fit = _fit([(row, e) for row, e in found.items() if row.system == "BF16"])
    listed = []
    for row, e in found.items():
        listed.append(Row(row, e.workload, e, fit))
        if row.system == "FP8-LM":
            ours = estimate(workload(row.model, SYSTEMS["O3"], row.micro_batch, row.global_batch), on)
            listed.append(Row(None, ours.workload, ours, fit))
    return listed


def _fit(bf16: Sequence[tuple[Published, Estimate]]) -> Fit:
    times = [_samples(e) / row.samples for row, e in bf16]
    memory = [row.memory_gb - e.peak for row, e in bf16]
    return Fit(statistics.geometric_mean(times), statistics.mean(memory))


def _samples(e: Estimate) -> float:
    """Samples a second, if only the GPUs' time counts."""
    return e.workload.global_batch / e.gpu_ms * 1e3
