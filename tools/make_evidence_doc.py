"""Write docs/evidence.md: every claim of accuracy, from the committed results alone.

python tools/make_evidence_doc.py            write it
python tools/make_evidence_doc.py --check    exit 1 if it is not what the results say

A minute, most of it to open the stores. A gap is an arm's loss less the reference's with the same seed, in per cent of
the reference's mean loss; a gap of accuracies is in points.
"""

import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from evidence_files import evaluated_alike, real_text, storage, stress, table6, tensor_sums, tuned
from evidence_fp8_lm import fp8_lm
from evidence_gaps import BOUND, LAST, POINTS, Gap, gaps
from evidence_stores import TE_ARM, falls, last_steps, of_l0, of_store, opened, spread
from made_page import write_or_check

from megatron_fp8.tools.lab.report.statistics import FEW, equivalence, paired
from megatron_fp8.tools.lab.sweep.plan_file import read_plan

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "evidence.md"
L0 = ROOT / "configs/lab/evidence_l0.yaml"
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
        "and FP32 gradients; this project computes nothing in it, so its commit does not count. A seed of it counts if "
        "its losses rise and fall with the others', as on the same batches: seed 1's do not, for the others' runs of "
        "that seed are of an older text. "
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
