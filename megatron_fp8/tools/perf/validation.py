"""The runs that the cost model was fitted to, and runs held out of the fit: its error on them, recomputed on each call.

measured.csv names the source and the commit of each run. The source "log not kept" means that the figure was noted and
the log is gone. Rows of our levels have the fused kernels (commit e007b60 and later); those that set the model's
numbers are of 75447fb and 37d850e. Rows of stock and Transformer Engine are of any date. MiB are Megatron's, 2^20
bytes. A run is held out if its time and memory set no number of configs/hardware or systems.py. But the formulas were
written with all runs known, and the bare shares come from the profiled collectives of the runs on two and four GPUs.
"""

import csv
import statistics
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from . import hardware
from .job import MODELS as PAPERS
from .job import Job
from .output import MIB
from .step import Estimate, estimate
from .systems import SYSTEMS
from .workload import Workload

FILE = Path(__file__).with_name("measured.csv")
HARDWARE = "h200"
_HOSTS = 4 / 3  # how much slower another host may be than the estimate's: GPT-125M's step took 161 to 210 ms
_GPT = Job(
    8, 4096, 32, vocab_size=50_303, disable_bias_linear=True, max_position_embeddings=2048
)  # benchmarks/train_step.py's shapes
_LLAMA = replace(_GPT, swiglu=True, normalization="RMSNorm", position_embedding_type="rope")
MODELS = {
    "7b": _GPT,
    "7b-whole": replace(_GPT, num_layers=32),
    "13b-whole": replace(_GPT, num_layers=40, hidden_size=5120, num_attention_heads=40),
    "175b": replace(_GPT, num_layers=4, hidden_size=12288, num_attention_heads=96),
    "175b-tp8": replace(  # with TP 2, a rank has what a rank of GPT-175B has with TP 8
        _GPT, hidden_size=12288, num_attention_heads=24, kv_channels=128, ffn_hidden_size=12288, vocab_size=12_799
    ),
    "llama": replace(
        _LLAMA, ffn_hidden_size=14336, num_query_groups=8, untie_embeddings_and_output_weights=True
    ),
    "1b": replace(
        _LLAMA, num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_query_groups=8, vocab_size=128_255
    ),
    "llama3-8b": replace(
        _LLAMA, num_layers=32, ffn_hidden_size=14336, num_query_groups=8, vocab_size=128_255,
        untie_embeddings_and_output_weights=True, max_position_embeddings=8192,
    ),
    "125m": replace(_LLAMA, num_layers=12, hidden_size=768, num_attention_heads=12),
    # Of `table 5 --run`.
    **{f"{name}-paper": replace(PAPERS[name], tensor_model_parallel_size=1) for name in ("7b", "13b")},
}


@dataclass(frozen=True)
class Run:
    """A measured run and its estimate. held, peak: GB, or None if the run's log gave none."""

    row: Mapping[str, str]
    estimate: Estimate
    ms: float
    held: float | None
    peak: float | None

    @property
    def held_out(self) -> bool:
        return self.row["use"] != "calibration"

    @property
    def error_ms(self) -> float:
        """Relative; positive if the estimate is too long."""
        return self.estimate.ms / self.ms - 1

    @property
    def bound_by_host(self) -> bool:
        """Whether the host bounds the step, or might if it were slower by _HOSTS."""
        return self.estimate.host_ms * _HOSTS > self.estimate.gpu_ms

    @property
    def error_peak(self) -> float | None:
        return None if self.peak is None else self.estimate.peak / self.peak - 1

    @property
    def error_held(self) -> float | None:
        return None if self.held is None else self.estimate.held / self.held - 1


def workload(row: Mapping[str, str]) -> Workload:
    gpus, tensor = int(row["gpus"]), int(row["tensor"])
    job = replace(MODELS[row["model"]], tensor_model_parallel_size=tensor, data_parallel_size=gpus // tensor)
    overlap = row["overlap"] == "1"
    return Workload(
        job,
        SYSTEMS[row["system"]],
        sequence=int(row["sequence"]),
        micro_batch=int(row["micro_batch"]),
        global_batch=int(row["global_batch"]),
        sequence_parallel=tensor > 1,
        overlap_reduce=overlap,
        overlap_gather=overlap,
        fp8_head=row["fp8_head"] == "1",
        repaired=row["repaired"] == "1",
        graphed=row["graph"] == "1",
    )


@cache
def runs() -> tuple[Run, ...]:
    with FILE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    on = {name: hardware.load(name) for name in {row["hardware"] for row in rows}}
    return tuple(
        Run(row, estimate(workload(row), on[row["hardware"]]), float(row["ms"]), _gb(row["held_mib"]),
            _gb(row["peak_mib"]))
        for row in rows
    )  # fmt: skip


def _gb(mib: str) -> float | None:
    return float(mib) * MIB if mib else None


def summary(held_out: bool = True) -> dict[str, float]:
    """{"runs", "ms", "host's ms", "GB", and each "at worst"}: medians and maxima of absolute relative errors. "GB" is
    the peak's. "host's ms" is for the steps that the host bounds, or may bound; "ms" is for the others."""
    of = [run for run in runs() if run.held_out == held_out]
    ms = [abs(run.error_ms) for run in of if not run.bound_by_host]
    host = [abs(run.error_ms) for run in of if run.bound_by_host]
    gb = [abs(error) for run in of if (error := run.error_peak) is not None]
    return {
        "runs": len(of), "ms": statistics.median(ms), "ms at worst": max(ms),
        "host's ms": statistics.median(host), "host's ms at worst": max(host),
        "GB": statistics.median(gb), "GB at worst": max(gb),
    }  # fmt: skip


def line() -> str:
    """The text printed below every estimate."""
    s = summary()
    return textwrap.fill(
        f"Error on {s['runs']} runs it was not fitted to (H200 and H100, one to four GPUs): step {s['ms']:.1%} in the "
        f"median, {s['ms at worst']:.1%} at worst, and {s["host's ms at worst"]:.0%} if the host is the bound or "
        f"nearly, because hosts differ; peak memory {s['GB']:.2%}, {s['GB at worst']:.1%}. Nothing was measured beyond "
        "one node, for pipelines, for recomputation or on other GPUs; there the estimate is arithmetic.",
        width=100,
    )
