"""Write docs/evidence.md: every claim of accuracy, from the committed results alone.

python tools/make_evidence_doc.py            write it
python tools/make_evidence_doc.py --check    exit 1 if it is not what the results say

A minute, most of it to open the stores. A gap is an arm's loss less the reference's with the same seed, in per cent of
the reference's mean loss; a gap of accuracies is in points.
"""

import csv
import itertools
import lzma
import math
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from made_page import write_or_check
from make_flags_doc import table

from megatron_fp8.metrics import LOSS
from megatron_fp8.tools.lab.report.document import Table
from megatron_fp8.tools.lab.report.results import Result, Results
from megatron_fp8.tools.lab.report.routing_section import routing
from megatron_fp8.tools.lab.report.statistics import (
    FEW,
    detectable_gap,
    detectable_rate,
    equivalence,
    equivalence_words,
    fisher,
    paired,
    t_interval,
    wilson,
)
from megatron_fp8.tools.lab.sweep.plan_file import read_plan
from megatron_fp8.tools.lab.sweep.store import Store

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "benchmarks" / "results"
BOUND = 0.5  # per cent or points: two losses or accuracies that differ by less are called equal
POINTS = "points"  # the unit of gaps between accuracies
L0 = ROOT / "configs/lab/evidence_l0.yaml"
TE_ARM = "TE FP8"  # one of its arms
LAST = 100  # steps whose training loss is averaged
PAPER = {  # FP8-LM's Table 6 and Figure 7: {(arm, compared with): what they say of the arm}
    ("#2a", "#1"): "equal",
    ("#2b", "#2a"): "worse",
    ("#3", "#2a"): "worse",
    ("#4", "#2a"): "diverges",
    ("O3", "#1"): "-",
    ("O3", "#2a"): "-",
}
SAID = {"equal": "{} equals {}", "worse": "{} is worse than {}", "diverges": "{} diverges"}
SCALINGS = (("block", "FP32"), ("auto", "FP32"), ("pre", "auto"), ("post", "auto"))
INTRODUCTION = f"""\
# Evidence on accuracy

*Written by `python tools/make_evidence_doc.py` from benchmarks/results: change those, or that file.*

After this page you know every claim that this project makes of its losses, and how far each is known. It is for those
who have to decide if FP8 is as good as BF16. [levels.md](levels.md#what-is-known-of-the-loss) says the same in words.

| column | |
|---|---|
| gap | loss less the reference's with the same seed and data: mean over seeds, in per cent of the reference's loss; \
of accuracies, in points: hundredths of all pairs |
| interval | 95 %, of the t-test, which assumes normally distributed gaps: what remains possible |
| seen | the smallest gap that this t-test would have seen with probability 0.8: a smaller one may have been missed |
| within {BOUND:g} % | two one-sided tests at 5 % (TOST): yes, if both show that the gap is within -+{BOUND:g} %; no, \
if the interval lies outside; else not shown. With fewer than {FEW} seeds the test decides nothing here |
| needed | seeds with which that test would say yes, power 0.9, if the true gap is 0 and the spread is this one |

Rows that share a reference share its runs: they are not independent. A row is one test, without correction for the
others. If all true gaps were 0, one interval in twenty would leave 0 out by chance. If all were {BOUND:g} %, one test
in twenty would say "yes" by mistake. TOST looks at the 90 % interval, so a "yes" may stand beside a 95 % interval that
is a little wider than -+{BOUND:g} %. A result for one model says nothing about another.
"""
UNKNOWN = """\
- Training of more than 26 M tokens: no losses of longer runs, or of models of more than 135 M parameters, were
  compared. Divergence after 200 billion tokens (arXiv 2409.12517) is out of reach.
- Other text: each table has one kind, and held-out text is of that kind.
- Quality on downstream tasks: none was measured but the choice between pairs of functions after DPO.
- FP8 gradients over many ranks: two ranks in the first table, simulated ones in [gradients.md](gradients.md).
- Mantissas and exponents of other lengths, and sharpness as a warning, are no levels: [lab_results.md](lab_results.md)
  has their stores and tests. Losses after ten to a hundred steps, in other pages, show that a level works, and nothing
  finer.
"""


class Gap(NamedTuple):
    """Losses of two arms, seed by seed: {seed: nats}. unit: of a gap; with POINTS they are shares of right answers."""

    arm: str
    reference: str
    ours: dict[int, float]
    theirs: dict[int, float]
    unit: str = "%"

    def differences(self) -> np.ndarray:
        """Per cent of the reference's mean loss, or points, of the seeds that both have."""
        seeds = sorted(self.ours.keys() & self.theirs.keys())
        base = statistics.mean(self.theirs[seed] for seed in seeds) if seeds else math.nan
        base = 1.0 if self.unit == POINTS else base
        return np.array([100 * (self.ours[seed] - self.theirs[seed]) / base for seed in seeds])

    def row(self) -> list[str]:
        """The cells of the page's table."""
        found = paired(self.differences())
        low, high = t_interval(found)
        between, seen = "-", "-"
        if found.n > 1:
            between = f"{low:+.2f} to {high:+.2f} {self.unit}"
            seen = f"{detectable_gap(found.deviation, found.n):.2f} {self.unit}"
        gap = "-" if math.isnan(found.mean) else f"{found.mean:+.2f} {self.unit}"
        cells = str(found.n), gap, between, seen, *equivalence_words(found, BOUND)
        return [self.arm, self.reference, *cells]

    def said(self) -> str:
        """The same as a sentence's part."""
        _, _, seeds, gap, interval, _, verdict, _ = self.row()
        many = f"{seeds} seed{'s' * (seeds != '1')}"
        return f"{gap} ({f'interval {interval}, ' * (interval != '-')}{many}); within {BOUND:g} {self.unit}: {verdict}"


def gaps(rows: Sequence[Gap]) -> str:
    """A table; rows: of one unit."""
    within = f"within {BOUND:g} {rows[0].unit}"
    heads = ("arm", "compared with", "seeds", "gap", "interval", "seen", within, "needed")
    return table(heads, [gap.row() for gap in rows])


def in_short(
    sent: Sequence[Gap],
    real: Sequence[Gap],
    tuned: Mapping[str, Sequence[Gap]],
    others: Sequence[Gap],
    claims: Sequence[str] = (),
) -> str:
    """The page's first answers: the rows that README and levels.md speak of, and all tests of losses together.

    tuned: {task: gaps}, of post-training; others: gaps of losses; claims: sentences on FP8-LM's.
    """
    of = {(gap.arm, gap.reference): gap for gap in real}
    te, bf16 = of["O3", "TE's FP8"], of["O3", "BF16, TE's layers"]
    of_tuned = [gap for some in tuned.values() for gap in some if gap.unit != POINTS]
    found = (paired(gap.differences()) for gap in (*sent, *real, *of_tuned, *others))
    tests = [test for test in found if test.n >= FEW]
    equal, told = [equivalence(test, BOUND) for test in tests], [test.t for test in tests]
    strict = 0.05 / len(tests)
    lines = [
        f"O3 and Transformer Engine's FP8, 85 M parameters: {te.said()}.",
        f"O3 and BF16 of Transformer Engine's layers, 85 M parameters: {bf16.said()}.",
        *(
            f"{gap.arm} with FP8 gradients that are sent, and "
            f"{"Transformer Engine's FP8" if gap.reference == TE_ARM else 'our own layers in BF16'}: {gap.said()}."
            for gap in sent
        ),
        *(
            f"{task} against stock BF16: "
            + "; ".join(f"{gap.arm}: {gap.said().partition(';')[0]}" for gap in some if "FP16" not in gap.arm) + "."
            for task, some in tuned.items()
        ),
        *claims,
        f"All {len(tests)} rows of losses with {FEW} seeds or more{", FP8-LM's arms aside" * bool(claims)}: "
        f"{sum(p < 0.05 for p in equal)} are shown to be "
        f"within {BOUND:g} %, {sum(p < strict for p in equal)} after Bonferroni's correction for so many tests. In "
        f"{sum(p < 0.05 for p in told)} the interval leaves out 0, in {sum(p < strict for p in told)} "
        "after correction.",
    ]
    return "\n".join(wrapped(f"- {line}", "  ") for line in lines)


# ---- a model of 85 M parameters on real text


def read(name: str) -> list[dict[str, str]]:
    """A CSV's rows."""
    csv.field_size_limit(10**8)
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def real_text() -> Iterator[Gap]:
    """The last hundred steps' training loss, and the held-out loss, of the runs of 800 steps; the last row counts."""
    curves = {
        (row["arm"], int(row["seed"])): [float(loss) for loss in row["losses"].split()]
        for row in read("real_text.csv")
        if row["steps"] == "800"
    }
    names = {
        "O0": "BF16, stock's layers",
        "O0, TE": "BF16, TE's layers",
        "TE": "TE's FP8",
        "O3, all": "O3 with FP8 head, activations, gradients",
    }
    for arm, reference in (
        *(("O2", "O0, TE"), ("O3", "O0, TE"), ("O3, all", "O0, TE"), ("TE", "O0, TE")),
        *(("O3", "TE"), ("O3, all", "O0"), ("O0", "O0, TE")),
    ):
        seeds = sorted(seed for name, seed in curves if name == arm and (reference, seed) in curves)
        end = min(len(curves[name, seed]) for name in (arm, reference) for seed in seeds)
        ours, theirs = (
            {seed: statistics.mean(curves[name, seed][end - LAST : end]) for seed in seeds} for name in (arm, reference)
        )
        until = "" if end == 800 else f", to step {end}"
        yield Gap(names.get(arm, arm) + until, names[reference], ours, theirs)


# ---- a whole model, tuned


def tuned(stage: str, column: str, file: str = "smollm2.csv") -> list[Gap]:
    """Of each arm of SmolLM2's runs against stock BF16 at the end of a stage; the last row of each run counts."""
    unit = POINTS if column == "accuracy" else "%"
    of: dict[str, dict[int, float]] = {}
    for row in sorted(read(file), key=lambda row: row["arm"]):
        if row["stage"] == stage:
            of.setdefault(row["arm"], {})[int(row["seed"])] = float(row[column])
    return [Gap(arm, "stock BF16", found, of["O0"], unit) for arm, found in of.items() if arm != "O0"]


def evaluated_alike(file: str = "smollm2_judged.csv") -> tuple[str, ...]:
    """Held-out losses of SFT's weights in each arm's own arithmetic, and of the same weights with BF16 GEMMs in all
    arms: how much of a gap is learnt. Nothing if there is no such file."""
    if not (RESULTS / file).exists():
        return ()
    own, alike = (tuned(stage, "heldout_loss", file) for stage in ("sft", "sft judged"))
    return (
        f"The same SFT once more ([{file}](../benchmarks/results/{file})), each arm evaluated in its own arithmetic:",
        gaps(own),
        "The weights that these runs saved, all evaluated with BF16 GEMMs. What is left of a gap is learnt; what is "
        "gone was the evaluation's own rounding:",
        gaps(alike),
    )


# ---- stores


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


class Beside(NamedTuple):
    """An arm beside another at a rate: the gap of the pairs in which neither diverged, and how many of the arm's runs
    did, of how many pairs."""

    rate: float
    gap: Gap
    fallen: int
    pairs: int

    def verdict(self, says: str) -> str:
        """Whether the runs reproduce what the paper says; the page has the rule."""
        if self.pairs < FEW:
            return "too few seeds"
        found, (least, most) = paired(self.gap.differences()), wilson(self.fallen, self.pairs)
        falls, few = least > 0.5, found.n < FEW
        low, high = (math.nan, math.nan) if few else t_interval(found)
        within = not few and equivalence(found, BOUND) <= 0.05
        shown, refuted = {
            "equal": (within and not self.fallen, falls or low > BOUND or high < -BOUND),
            "worse": (falls or low > 0, within or high < 0),
            "diverges": (falls, most < 0.5),
        }[says]
        return "reproduced" if shown else "not" if refuted else "cannot tell"

    def row(self, says: str) -> list[str]:
        """The cells of the page's table."""
        arm, reference, seeds, gap, interval, seen, within, _ = self.gap.row()
        word = f"within {BOUND:g} %: {within}" if says == "-" else self.verdict(says)
        fallen = f"{self.fallen} of {self.pairs}"
        return [f"{self.rate:g}", arm, reference, says, seeds, gap, interval, seen, fallen, word]


def of_pairs(results: Results, pairs: Iterable[tuple[str, str]]) -> Iterator[Beside]:
    """Held-out losses of pairs of arms, at each rate, the largest first. A seed counts if one commit made both runs."""
    runs = {(cell.rate, cell.arm, run.row.seed): run for cell, some in results.cells() for run in some}
    for rate, (arm, reference) in itertools.product(sorted(results.rates, reverse=True), pairs):
        seeds = sorted(seed for its, name, seed in runs if (its, name) == (rate, arm))
        both = [(runs[rate, arm, seed], runs.get((rate, reference, seed))) for seed in seeds]
        made = [(one, other) for one, other in both if other and one.row.code == other.row.code]
        well = [pair for pair in made if pair[0].divergence is None and pair[1].divergence is None]
        ours, theirs = ({pair[i].row.seed: pair[i].validation_loss for pair in well} for i in (0, 1))
        fallen = sum(one.divergence is not None for one, _ in made)
        if made:
            yield Beside(rate, Gap(arm, reference, ours, theirs), fallen, len(made))


def fp8_lm(folder: str) -> tuple[dict[str, tuple[str, ...]], list[Gap], list[str]]:
    """What the stores of FP8-LM's ablations say, if there are any.

    Returns sections, gaps of our levels' losses, and sentences on the paper's claims.
    """
    sections: dict[str, tuple[str, ...]] = {}
    ours: list[Gap] = []
    claims: list[str] = []
    if packed("table6").exists() and (found := list(of_pairs(states := opened("table6", folder), PAPER))):
        sections["FP8-LM's Table 6 and Figure 7, GPT-125M"] = of_states(states, found)
        ours += [b.gap._replace(arm=f"O3, rate {b.rate:g}") for b in found if b.gap[:2] == ("O3", "#1")]
        for rate, some in itertools.groupby(found, lambda beside: beside.rate):
            judged = [(b, says) for b in some if (says := PAPER[b.gap[:2]]) in SAID]
            words = "; ".join(f"{SAID[says].format(*b.gap)}: {b.verdict(says)}" for b, says in judged)
            claims += [f"FP8-LM's Table 6, GPT-125M, rate {rate:g}: {words}."] * bool(words)
    if packed("grad_scaling").exists() and (found := list(of_pairs(sent := opened("grad_scaling", folder), SCALINGS))):
        sections["FP8-LM's scaling of gradients, GPT-125M, two ranks"] = of_scalings(sent, found)
        ours += [b.gap for b in found if b.gap.arm == "block"]
    return sections, ours, claims


def so_far(results: Results) -> str:
    """How many runs of a store are done, and what they saw."""
    name, done = results.name, sum(len(runs) for _, runs in results.cells())
    return (
        f"{done} of {len(results.rows)} runs of [configs/lab/{name}.yaml](../configs/lab/{name}.yaml), which says what "
        f"the arms are, [the store](../benchmarks/results/lab/{name}.sqlite.xz). A run sees 6.6 of 43 million tokens "
        f"of English manuals. Held-out loss after {results.steps} steps, of 0.26 million tokens, nats a token."
    )


def of_states(results: Results, found: Sequence[Beside]) -> tuple[str, ...]:
    """FP8-LM's claims on masters and moments, with our verdicts."""
    heads = "rate", "arm", "compared with", "paper", "seeds", "gap", "interval", "seen", "diverged", "verdict"
    return (
        f"{so_far(results)} One GPU a run: nothing is sent. The paper trains for much longer. #0, FP32 throughout, was "
        "not run. The second moment of #4 is not the paper's: we store its root, in blocks.",
        '"Paper" is what FP8-LM says of the arm beside the other. The verdict is "reproduced" if the runs show it: '
        f"equal, if the gap is within -+{BOUND:g} % (TOST) and no run diverged; diverges, if the 95 % interval of the "
        "share of runs that diverged (Wilson's; a run without a loss at its end, or far above its best) lies above a "
        'half; worse, if it does, or the gap\'s interval lies above 0. The verdict is "not" if the runs show the '
        f"contrary: of equal, the gap's interval lies outside -+{BOUND:g} %; of worse, the gap is within "
        f"-+{BOUND:g} %, or its interval lies below 0; of diverges, the share's interval lies below a half. Otherwise "
        "they cannot tell. A run that diverged has no gap.",
        table(heads, [beside.row(PAPER[beside.gap[:2]]) for beside in found]),
    )


def of_scalings(results: Results, found: Sequence[Beside]) -> tuple[str, ...]:
    """Losses by the way in which gradients are scaled for the wire."""
    return (
        f'{so_far(results)} "block" is what O1 to O3 send; "auto", "pre" and "post" are the paper\'s. It compares '
        f"errors, not losses; [gradients.md](gradients.md) does too. {sum(b.fallen for b in found)} runs diverged.",
        gaps([beside.gap for beside in found]),
    )


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


# ---- others


def tensor_sums() -> Iterator[Gap]:
    """Held-out loss with tensor-parallel sums in FP8; the last row of each run counts."""
    of: dict[tuple[str, str], dict[int, float]] = {}
    for row in read("tp_sums_train.csv"):
        of.setdefault((row["tp"], row["arm"]), {})[int(row["seed"])] = float(row["heldout_loss"])
    for (tp, arm), losses in sorted(of.items()):
        reference = "O3, bf16" if arm.startswith("O3,") and arm != "O3, bf16" else "stock BF16"
        if arm != reference and losses.keys() & of.get((tp, reference), {}).keys():
            yield Gap(f"TP {tp}: {arm}", reference, losses, of[tp, reference])


def storage() -> Iterator[Gap]:
    """Mean training loss of the last 20 steps that all have, by the storage of 128 micro-batches' gradients."""
    curves = {
        (row["system"], int(row["seed"])): [float(loss) for loss in row["losses"].split()]
        for row in read("grad_storage.csv")
    }
    end = min(map(len, curves.values()))
    of: dict[str, dict[int, float]] = {}
    for (system, seed), losses in curves.items():
        of.setdefault(system, {})[seed] = statistics.mean(losses[end - 20 : end])
    for system in ("O1 fp8", "O1 bf16", "O0"):
        yield Gap({"O0": "stock BF16"}.get(system, system), "O1 fp32", of[system], of["O1 fp32"])


def table6() -> Iterator[Gap]:
    """Held-out loss of FP8-LM's Table 6 in miniature."""
    held: dict[tuple[str, float], dict[int, float]] = {}
    for row in read("table6.csv"):
        if row["heldout"]:
            held.setdefault((row["arm"], float(row["lr"])), {})[int(row["seed"])] = float(row["heldout"])
    for (arm, rate), losses in held.items():
        if arm != "0":
            name = arm if arm.startswith("O") else f"#{arm}"
            yield Gap(f"{name}, rate {rate:g}", "#0, FP32", losses, held["0", rate])


def stress() -> Iterator[str]:
    """The stress suite's verdicts, a table a store of a machine."""
    from megatron_fp8.tools.stress.every import suite
    from megatron_fp8.tools.stress.store import read as read_points
    from megatron_fp8.tools.stress.suite import verdicts, worst

    for store in sorted((RESULTS / "lab").glob("stress*.csv")):
        points, rows = read_points(store), []
        for one in suite(points):
            found = verdicts(one, points)
            for arm in dict.fromkeys(verdict.arm for verdict in found):
                if case := worst(verdict for verdict in found if verdict.arm == arm):
                    most = f"{one.limits[case.case]:g} {one.unit}"
                    low, high = case.interval
                    between = "-" if math.isnan(low) else f"{low:.3g} to {high:.3g}"
                    numbers = str(case.n), f"{case.mean:.3g}", between, most, case.word
                    rows.append([f"{one.name} {one.title}", arm, case.case, *numbers])
        devices = ", ".join(sorted({point.device for point in points}))
        yield f"[lab/{store.name}](../benchmarks/results/lab/{store.name}), {devices}:"
        yield table(("stress", "recipe", "its worst case", "seeds", "judged", "interval", "at most", "verdict"), rows)


def page() -> str:
    """The text of docs/evidence.md."""
    with tempfile.TemporaryDirectory() as folder:
        names = "evidence_l0", "evidence_moe", "levels", "ramp", "lottery"
        l0, moe, levels, ramp, lottery = (opened(name, folder) for name in names)
        trained, held_out = (list(of_l0(l0, loss)) for loss in (last_steps, lambda run: run.validation_loss))
        done, planned = sum(len(runs) for _, runs in l0.cells()), len(read_plan(L0).runs())
        moe_trained, moe_held_out = (
            [gap for _, gap in of_store(moe, loss)] for loss in (last_steps, lambda run: run.validation_loss)
        )
        moe_done, routed = sum(len(runs) for _, runs in moe.cells()), spread(moe)
        of_levels = list(of_store(levels, lambda run: run.validation_loss))
        by_rate = [gap._replace(arm=f"{gap.arm}, rate {rate:g}") for rate, gap in of_levels]
        falls_in_ramp, falls_in_lottery = falls(ramp, ("FP32", "BF16")), falls(lottery, ("FP32",))
        of_paper, of_ours, claims = fp8_lm(folder)
    real, states, stored, sums = (list(of()) for of in (real_text, table6, storage, tensor_sums))
    sft, dpo, judged = tuned("sft", "heldout_loss"), tuned("dpo", "accuracy"), tuned("judged", "accuracy")
    drawn = tuned("sft", "heldout_loss", "smollm2_sft.csv")
    of_smollm2 = {
        "SFT of SmolLM2-135M": sft,
        "SFT of SmolLM2-135M with drawn masters": [gap for gap in drawn if gap.arm in ("O1", "O3, BF16 GEMMs")],
        "DPO of SmolLM2-135M": dpo,
    }
    sent = [gap for gap in trained if gap.arm in ("O1", "O3") and gap.reference != "O1"]
    rest = [gap for gap in (*trained, *held_out) if gap not in sent]
    with_te = (
        f'"{TE_ARM}" is stock with Transformer Engine\'s layers, its delayed scaling with the history of O1 and O3, '
        "and FP32 gradients; this project computes nothing in it, so its commit does not count. "
    )
    with_te *= any(TE_ARM in (gap.arm, gap.reference) for gap in trained)
    sections = {
        "In short": (in_short(sent, real, of_smollm2, [*by_rate, *rest, *states, *stored, *sums, *of_ours], claims),),
        "FP8 gradients sent over two ranks, GPT-125M, a real vocabulary": (
            f"{done} of {planned} runs of configs/lab/evidence_l0.yaml are done"
            + ("." if done == planned else "; the others wait.")
            + " A run sees 26 of 43 million tokens of English manuals."
            + ' "BF16 by halves" is BF16 with another order of sums: its gap is chance. O1 and O3 are compared with '
            f"the mean of both. {with_te}A seed counts if one commit made all runs of it that a row compares. Training "
            f"loss of the last {LAST} of 800 steps, nats a token:",
            gaps(trained),
            "Held-out loss after the last step, of 0.5 million tokens:",
            gaps(held_out),
        ),
        "Experts in FP8: 8, of which a token takes 2, in GPT-125M's shape": (
            f"{moe_done} of {len(moe.rows)} runs of configs/lab/evidence_moe.yaml, [the "
            "store](../benchmarks/results/lab/evidence_moe.sqlite.xz). A run sees 13 of 43 million tokens of English "
            "manuals, on one GPU: nothing is sent. O3 stores gradients in FP8. Training loss of the last "
            f"{LAST} of 800 steps, nats a token:",
            gaps(moe_trained),
            "Held-out loss after the last step, of 0.5 million tokens:",
            gaps(moe_held_out),
            "Routing, the mean of the last quarter of a run's steps ([lab.md](lab.md#routing) explains the numbers). "
            '"Elsewhere": the share of a layer\'s tokens that sit on other experts than in the run of BF16 with the '
            "same seed."
            + (' That of "BF16 by halves" is chance.' if "| BF16 by halves |" in routed else
               " What chance alone gives is not known: no run of BF16 with another order of sums is done."),
            routed,
        ),
        "FP8 GEMMs and weights, 85 M parameters on Python source": (
            "[real_text.csv](../benchmarks/results/real_text.csv): 800 steps of 32,768 bytes, training loss of the "
            "last hundred steps that both have, nats a byte. Gradients were not sent, and stored in BF16 except in "
            "rows that say FP8.",
            gaps(real),
        ),
        "SmolLM2-135M-Instruct tuned on Python functions": (
            "[smollm2.csv](../benchmarks/results/smollm2.csv), [what it shows](post_training.md#a-real-model-"
            "smollm2-135m-instruct): SFT of 210 steps, held-out loss, nats a token of the answers. A seed is an order "
            "of the data.",
            gaps(sft),
            "The same SFT of other runs, with masters drawn at every level "
            "([smollm2_sft.csv](../benchmarks/results/smollm2_sft.csv)):",
            gaps(drawn),
            *evaluated_alike(),
            "Then, after the SFT of the first table, DPO of 357 steps, each run from its own SFT: the share of right "
            "pairs among the same held-out ones. Each arm was judged in its own arithmetic, and FP8's noise most "
            "likely judges levels too low. The interval is of seeds alone: other pairs would widen it.",
            gaps(dpo),
            *(("The same weights, all judged with BF16 GEMMs:", gaps(judged)) if judged else ()),
        ),
        "Levels and learning rates, 3.4 M parameters": (
            "[The store](../benchmarks/results/lab/levels.sqlite.xz): 300 steps, FP8 gradients in storage, held-out "
            "loss, nats a byte. No gap from 0 stands after correction for nine tests.",
            gaps(by_rate),
        ),
        "Divergence at rates that no one trains with": (
            'A GPT-2 of 3.4 M parameters without clipping. "Told from 0 at" is the smallest rate of divergence that '
            "Fisher's test tells from that of an arm that never diverges, power 0.8. Runs of one seed are counted as "
            "independent. The ramp, a warm-up over half of the run:",
            falls_in_ramp,
            "The lottery, almost no warm-up:",
            falls_in_lottery,
        ),
        "States in few bits, 2.6 M parameters": (
            "[table6.csv](../benchmarks/results/table6.csv), [what it shows](table6.md): 150 steps, held-out loss, "
            "nats a byte.",
            gaps(states),
        ),
        **of_paper,
        "Gradients of 128 micro-batches, 13 M parameters": (
            "[grad_storage.csv](../benchmarks/results/grad_storage.csv): training loss of the last 20 steps that all "
            "have, nats a byte.",
            gaps(stored),
        ),
        "Sums of tensor parallelism in FP8": (
            "[tp_sums_train.csv](../benchmarks/results/tp_sums_train.csv): held-out loss, nats a byte.",
            gaps(sums),
        ),
        "The stress suite": (
            "[lab.md](lab.md#stress) says what is planted, what is judged, and when an arm is robust or fragile. The "
            "limits are ours; some were set after first runs at toy size. Plants are small models, or numbers drawn at "
            "random: a fragile recipe can fail as these do. A robust one has passed these tests and no others.",
            *stress(),
        ),
        "What cannot be known from all this": (UNKNOWN,),
    }
    parts = [INTRODUCTION]
    for title, content in sections.items():
        parts += [f"## {title}", *map(wrapped, content)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def wrapped(part: str, indent: str = "") -> str:
    """A paragraph in lines of the pages' width; tables, lists and what has lines of its own as they are."""
    if "\n" in part or part.startswith("#"):
        return part
    kept = part.replace(" %", "\0%")  # a number and its per cent stay together
    return textwrap.fill(kept, 120, subsequent_indent=indent, break_on_hyphens=False).replace("\0%", " %")


def main() -> int:
    return write_or_check(PAGE, page(), "make_evidence_doc.py", __doc__.splitlines()[0])


if __name__ == "__main__":
    sys.exit(main())
