"""docs/evidence.md is what the committed results say, README and docs/levels.md agree with it, and TOST is TOST."""

import re
import sys

import make_evidence_doc
import numpy as np
import pytest
from launch import ROOT
from make_evidence_doc import Gap
from scipy import stats

from megatron_fp8.tools.lab.report.statistics import equivalence, equivalence_power, equivalence_seeds, paired

PAGE = make_evidence_doc.PAGE


def rows(arm: str, reference: str, section: str) -> list[str]:
    """The cells of the page's one row of these two in a section, from the seeds on."""
    text = re.search(rf"^## {re.escape(section)}.*?(?=^## |\Z)", PAGE.read_text(), re.M | re.S)[0]
    (row,) = re.findall(rf"^\| {re.escape(arm)} \| {re.escape(reference)} \| (.*) \|$", text, re.M)
    return row.split(" | ")


@pytest.mark.slow
def test_the_page_is_what_the_results_say(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["make_evidence_doc.py", "--check"])
    assert make_evidence_doc.main() == 0, "run python tools/make_evidence_doc.py"
    stale = tmp_path / "evidence.md"
    stale.write_text(PAGE.read_text().replace("+0.23 %", "+0.22 %", 1))
    monkeypatch.setattr(make_evidence_doc, "PAGE", stale)
    assert make_evidence_doc.main() == 1 and "evidence.md is stale" in capsys.readouterr().err


def test_csv_rows_are_fresh():
    """The quick half of the check above: tables that need no store."""
    text = PAGE.read_text()
    for gaps in (make_evidence_doc.real_text(), make_evidence_doc.storage(), make_evidence_doc.tensor_sums()):
        found = [f"| {' | '.join(gap.row())} |" for gap in gaps]
        assert len(found) > 2 and [row for row in found if row not in text] == []


def test_readme_and_levels_agree():
    section = "FP8 GEMMs and weights"
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    levels = (ROOT / "docs/levels.md").read_text().replace("**", "")
    seeds, gap, interval, *_ = rows("O3", "BF16, TE's layers", section)
    low, high = map(float, re.findall(r"[+-][\d.]+", interval))
    assert f"{low:+.1f} to {high:+.1f} % (mean {gap})" in readme and seeds == "4"
    assert f"| O3 | {gap}, interval {interval} |" in levels
    _, gap, interval, _, verdict, _ = rows("O3", "TE's FP8", section)
    assert f"(95 % interval {interval})" in readme and verdict.startswith("yes")
    assert f"{gap}, interval {interval} |" in levels
    needed = rows("O3", "BF16, TE's layers", section)[-1]
    assert f"at this spread that needs {needed} (two" in levels
    assert "within half a per cent" in levels


def test_runs_that_are_too_few_decide_nothing():
    """The eleven runs of L0, with their numbers of pairs."""
    section = "FP8 gradients sent over two ranks"
    assert "11 of 48 runs are done" in PAGE.read_text()
    for arm, seeds in (("BF16 by halves", "2"), ("O1", "2"), ("O3", "1")):
        found = rows(arm, "BF16", section)
        assert found[0] == seeds and found[4] == "too few seeds" and found[5] == "-"


@pytest.mark.parametrize("n, spread, word", [(8, 0.1, "yes"), (8, 4.0, "not shown"), (3, 0.001, "too few seeds")])
def test_verdicts(n, spread, word):
    noise = np.random.default_rng().normal(0, 1, n)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    theirs = {seed: 100.0 for seed in range(n)}
    gap = Gap("a", "b", {seed: 100 + spread * noise[seed] for seed in range(n)}, theirs)
    assert gap.row()[6].startswith(word)
    far = Gap("a", "b", {seed: 103 + 0.1 * noise[seed] for seed in range(n)}, theirs)
    assert far.row()[6] == ("no" if n > 3 else word)
    assert far.row()[3] == "+3.00 %"


def test_equivalence_is_two_one_sided_tests():
    differences = np.random.default_rng().normal(0.1, 0.3, 9)
    for bound in (0.05, 0.5, 2.0):
        above = stats.ttest_1samp(differences, -bound, alternative="greater").pvalue
        below = stats.ttest_1samp(differences, bound, alternative="less").pvalue
        assert equivalence(paired(differences), bound) == pytest.approx(max(above, below), rel=1e-9)
    assert np.isnan(equivalence(paired(differences[:1]), 1.0))


def test_power_is_the_share_of_simulated_experiments():
    noise = np.random.default_rng(3).normal(0, 1, (20_000, 6))
    error = noise.std(1, ddof=1) / 6**0.5
    shown = np.abs(noise.mean(1)) < 1.2 - stats.t.ppf(0.95, 5) * error
    assert equivalence_power(1.2, 6) == pytest.approx(shown.mean(), abs=0.015)
    needed = equivalence_seeds(1.2)
    assert equivalence_power(1.2, needed) >= 0.9 > equivalence_power(1.2, needed - 1)
    assert equivalence_seeds(0.0) is None and equivalence_seeds(1e-4) is None
