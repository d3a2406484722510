"""FP8-LM's claims in docs/evidence.md: its Table 6, Figure 7 and scaling of gradients, with our verdicts."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from evidence_gaps import BOUND, Gap, gaps
from evidence_stores import opened, packed
from make_flags_doc import table

from megatron_fp8.tools.lab.report.results import Results
from megatron_fp8.tools.lab.report.statistics import FEW, equivalence, paired, t_interval, wilson

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
