"""Compare the cost model with SimuMax on the cases that SimuMax publishes.

    python benchmarks/published_cases.py

24 steps of stock Megatron in BF16 with Transformer Engine on eight B200s: Llama 3 at 70B's width with 12 layers and at
405B's with 4, sequence 4,096, micro-batch 1, fused cross-entropy, distributed optimizer, no recomputation. MooreThreads
measured them and SimuMax predicted them: docs/b200/b200_release_v1.2_summary.md at 4dcaae5 (results/simumax_b200.csv).

SimuMax's hardware file was measured on those B200s, operator by operator. Ours is the H200's. It gets one factor on
time from one of the B200 cases (FACTOR_FROM), and no host time; memory has no factor.
"""

import argparse
import csv
from dataclasses import dataclass, replace

from stamp import ROOT

from megatron_fp8.tools.perf import hardware
from megatron_fp8.tools.perf.job import Job
from megatron_fp8.tools.perf.step import estimate
from megatron_fp8.tools.perf.systems import SYSTEMS
from megatron_fp8.tools.perf.workload import Workload

FILE = ROOT / "benchmarks/results/simumax_b200.csv"
FACTOR_FROM = ("llama3-70b", 2, 8)  # model, tensor-parallel ranks, micro-batches
_LLAMA = Job(
    12, 8192, 64, num_query_groups=8, ffn_hidden_size=28672, vocab_size=128_256, swiglu=True, normalization="RMSNorm",
    position_embedding_type="rope", untie_embeddings_and_output_weights=True, disable_bias_linear=True,
)  # fmt: skip
MODELS = {
    "llama3-70b": _LLAMA,
    "llama3-405b": replace(
        _LLAMA, hidden_size=16384, num_attention_heads=128, num_query_groups=16, ffn_hidden_size=53248
    ),
}


@dataclass(frozen=True)
class Case:
    """A published case: measured milliseconds and GiB, and the relative errors of SimuMax and of our model."""

    name: str
    ms: float
    gib: float
    simumax_ms: float
    simumax_gib: float
    ours_ms: float
    ours_gib: float
    gave_the_factor: bool


def cases() -> list[Case]:
    with FILE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    estimates = [estimate(_workload(row), hardware.load("h200")) for row in rows]
    keys = [(row["model"], int(row["tensor"]), int(row["micro_batches"])) for row in rows]
    one = keys.index(FACTOR_FROM)
    factor = estimates[one].gpu_ms / float(rows[one]["ms"])
    found = []
    for row, key, e in zip(rows, keys, estimates, strict=True):
        ms, gib = float(row["ms"]), float(row["gib"])
        name = f"{row['model']}, {row['layers']} layers, TP {row['tensor']}, PP {row['pipeline']}, DP {row['data']}"
        found.append(Case(
            f"{name}, {row['micro_batches']} micro-batches", ms, gib,
            float(row["simumax_ms"]) / ms - 1, float(row["simumax_gib"]) / gib - 1,
            e.gpu_ms / factor / ms - 1, e.peak * 1e9 / 2**30 / gib - 1, key == FACTOR_FROM,
        ))  # fmt: skip
    return found


def _workload(row: dict[str, str]) -> Workload:
    tensor, data = int(row["tensor"]), int(row["data"])
    job = replace(
        MODELS[row["model"]], num_layers=int(row["layers"]), tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=int(row["pipeline"]), data_parallel_size=data,
    )  # fmt: skip
    return Workload(
        job, SYSTEMS["bf16"], sequence=4096, micro_batch=1, global_batch=int(row["micro_batches"]) * data,
        sequence_parallel=tensor > 1,
    )  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{'':58} {'ms':>6} {'SimuMax':>8} {'ours':>7}  {'GiB':>6} {'SimuMax':>8} {'ours':>6}")
    for c in cases():
        ours = "factor" if c.gave_the_factor else f"{c.ours_ms:+.1%}"
        time, memory = f"{c.ms:6.1f} {c.simumax_ms:+8.1%} {ours:>7}", f"{c.gib:6.2f} {c.simumax_gib:+8.1%}"
        print(f"{c.name:58} {time}  {memory} {c.ours_gib:+6.1%}")


if __name__ == "__main__":
    main()
