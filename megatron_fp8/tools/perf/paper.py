"""FP8-LM's tables 5, 7 and 8 (arXiv 2310.18313, second version) beside the cost model's on the same hardware.

The paper's GPUs and software of 2023 are not ours: from its three BF16 rows, and from nothing else, come one factor on
time and one offset of memory (`Fit`), which all rows get; the FP8 rows are then predictions. O3 has rows too, under the
same fit: what it would do there. Times are the GPU's: those rows show that the paper's hosts took less than our host's
4.15 ms a layer and micro-batch, and not how much less.

Its GB of memory are taken for 10^9 bytes, as they are written; those of its communication volumes are 2^30
(test_cost_model.py). Read as 2^30 the offset would be 11 GiB, and one row less within 10 %.
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
    """A row of the paper; None where it has no figure. Memory in its GB, volume in GiB, shares in percent."""

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
    """time: factor on the model's; memory: GB to be added to it."""

    time: float
    memory: float


@dataclass(frozen=True)
class Row:
    """A published row, or None for a system of ours, and what the model says under the fit."""

    published: Published | None
    workload: Workload
    estimate: Estimate
    fit: Fit

    @property
    def samples(self) -> float:
        return _samples(self.estimate) / self.fit.time

    @property
    def tflops(self) -> float:
        """As the paper counts them."""
        w = self.workload
        return flops.papers_step(w) / w.global_batch * self.samples / w.gpus / 1e12

    @property
    def memory_gb(self) -> float:
        return self.estimate.peak + self.fit.memory

    @property
    def least_and_most_gb(self) -> tuple[float, float]:
        """Over pipeline stages; data-parallel ranks are alike."""
        peaks = [(sum(held.values()) + sum(beside.values())) / 1e9 for held, beside in stages(self.workload)]
        return min(peaks) + self.fit.memory, max(peaks) + self.fit.memory

    @property
    def volume(self) -> float:
        return collectives.weight_volume(self.workload) / _GIB

    @property
    def activation_gb(self) -> float:
        return collectives.activation_volume(self.workload) / _GIB

    def deviation(self, name: str) -> float | None:
        """Of the model from the paper, relative."""
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
    """A model of the paper in its layout; overlapped, as Megatron-LM is run."""
    return Workload(
        MODELS[model], system, _SEQUENCE, micro_batch, global_batch,
        sequence_parallel=MODELS[model].tensor_model_parallel_size > 1, overlap_reduce=True, overlap_gather=True,
    )  # fmt: skip


def rows(on: Hardware) -> list[Row]:
    """All rows of Table 5, each followed by what O3 would do in its place."""
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
    """A second of the GPUs alone."""
    return e.workload.global_batch / e.gpu_ms * 1e3
