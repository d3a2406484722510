"""The gaps of docs/evidence.md that are in stores of the lab, which runs diverged, and how experts were loaded."""

import lzma
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from evidence_files import RESULTS
from evidence_gaps import LAST, Gap
from make_flags_doc import table

from megatron_fp8.metrics import LOSS
from megatron_fp8.tools.lab.report.document import Table
from megatron_fp8.tools.lab.report.results import Result, Results
from megatron_fp8.tools.lab.report.routing_section import routing
from megatron_fp8.tools.lab.report.statistics import detectable_rate, fisher, wilson
from megatron_fp8.tools.lab.sweep.store import Store

TE_ARM = "TE FP8"  # an arm of configs/lab/evidence_l0.yaml


def packed(name: str) -> Path:
    """The file of a committed store."""
    return RESULTS / f"lab/{name}.sqlite.xz"


def opened(name: str, folder: str) -> Results:
    """The judged runs of a committed store."""
    path = Path(folder) / f"{name}.sqlite"
    path.write_bytes(lzma.decompress(packed(name).read_bytes()))
    store = Store(str(path))
    try:
        return Results(store)
    finally:
        store.close()


def last_steps(run: Result) -> float:
    """Mean training loss of a run's last hundred steps."""
    return float(run.series[LOSS][1][-LAST:].mean())


def of_store(results: Results, loss) -> Iterator[tuple[float, Gap]]:
    """(learning rate, gap) of each cell of a store against its baseline's."""
    base = {cell.rate: runs for cell, runs in results.cells() if cell.arm == results.baseline}
    for cell, runs in results.cells():
        if cell.arm != results.baseline:
            ours, theirs = ({run.row.seed: loss(run) for run in some} for some in (runs, base[cell.rate]))
            yield cell.rate, Gap(cell.arm, results.baseline, ours, theirs)


def same_batches(one: Result, other: Result) -> bool:
    """Whether two runs saw the same batches in the same order: each is harder or easier than the last for any arm.

    In the committed runs the last hundred steps' changes of the loss correlate at 0.999 or more if the seed is the
    same, and at 0.3 or less if it is not.
    """
    last = (np.diff(run.series[LOSS][1][-LAST:]) for run in (one, other))
    return bool(np.corrcoef(*last)[0, 1] > 0.9)


def of_l0(results: Results, loss) -> Iterator[Gap]:
    """Gaps of L0's arms, of the seeds whose runs one commit made. What is compared was chosen before the runs.

    An arm is compared with the mean of a seed's two runs in BF16, which has half of one run's chance. Runs of
    Transformer Engine may be of another commit, because this project computes nothing in them; what they share with
    the others then has to show, in losses that rise and fall with the same batches.
    """
    runs = {(cell.arm, run.row.seed): run for cell, some in results.cells() for run in some}
    bf16, halves = results.baseline, "BF16 by halves"
    both = f"{bf16} and by halves"
    for arm, reference, of in (
        (halves, bf16, (bf16,)),
        *((arm, both, (bf16, halves)) for arm in ("O1", "O3", TE_ARM)),
        *(("O3", "O1", ("O1",)), ("O1", TE_ARM, (TE_ARM,)), ("O3", TE_ARM, (TE_ARM,))),
    ):
        ours, theirs = {}, {}
        for seed in sorted(seed for name, seed in runs if name == arm):
            found = [runs[name, seed] for name in of if (name, seed) in runs]
            of_ours = {run.row.code for run in (runs[arm, seed], *found) if run.row.arm != TE_ARM}
            paired_up = TE_ARM not in (arm, *of) or all(same_batches(runs[arm, seed], run) for run in found)
            if len(found) == len(of) and len(of_ours) == 1 and paired_up:
                ours[seed] = loss(runs[arm, seed])
                theirs[seed] = statistics.mean(map(loss, found))
        if ours or TE_ARM not in (arm, reference):
            yield Gap(arm, reference, ours, theirs)


def spread(results: Results) -> str:
    """The report's table on routing."""
    (of,) = [block for block in routing(results).blocks if isinstance(block, Table)]
    return table(of.heads, of.rows)


def falls(results: Results, references: Sequence[str]) -> str:
    """How many runs of each arm diverged, by rate."""
    count = {
        (cell.rate, cell.arm): (sum(run.divergence is not None for run in runs), len(runs))
        for cell, runs in results.cells()
    }
    rows = []
    for (rate, arm), (fallen, runs) in count.items():
        low, high = wilson(fallen, runs)
        p = [
            "-" if arm == other or (rate, other) not in count else f"{fisher(fallen, runs, *count[rate, other]):.3f}"
            for other in references
        ]
        between, least = f"{100 * low:.0f} to {100 * high:.0f} %", f"{100 * detectable_rate(runs, runs):.0f} %"
        rows.append([f"{rate:g}", arm, f"{fallen} of {runs}", between, *p, least])
    heads = ["rate", "arm", "diverged", "interval", *(f"p against {other}" for other in references), "told from 0 at"]
    return table(heads, rows)
