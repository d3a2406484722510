"""The report: well-formed, self-contained, independent of the order of runs, and right in its statements."""

import html.parser
import math
import re
import warnings
import xml.etree.ElementTree as ElementTree
import zlib
from argparse import ArgumentParser
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from lab_runs import reports

from megatron_fp8.errors import UserError
from megatron_fp8.tools.lab.report import document, onset_section, plots, sections, statistics
from megatron_fp8.tools.lab.report.curves import smooth
from megatron_fp8.tools.lab.report.document import Log, Picture, Section, Table
from megatron_fp8.tools.lab.report.main import _milliseconds, add_arguments, markdown
from megatron_fp8.tools.lab.report.main import html as as_html
from megatron_fp8.tools.lab.report.main import run as write_report
from megatron_fp8.tools.lab.report.results import Cell, Results
from megatron_fp8.tools.lab.sweep.plan_file import UNNAMED, SweepPlan
from megatron_fp8.tools.lab.sweep.rows import DONE, FAILED, NOT_FINITE
from megatron_fp8.tools.lab.sweep.store import Store
from megatron_fp8.tools.palette import COLOURS

STEPS = 120
GAP = 0.03


def plan(seeds=8, rates=(1e-3, 1e-2), data=("d",), arms=("BF16", "E8M3", "broken")) -> SweepPlan:
    flags = {arm: () for arm in arms}
    return SweepPlan(
        ("train.py", "--lr", "1e-3"), STEPS, tuple(range(1, seeds + 1)), flags, rates, {d: () for d in data}
    )


def curve(row, diverges: bool) -> list[tuple[int, str, float]]:
    """A run's points; they depend on the run alone."""
    rng = np.random.default_rng(zlib.crc32(row.name.encode()))
    data = np.random.default_rng(row.seed)
    points = []
    for step in range(1, STEPS + 1):
        loss = 2 + 4 * math.exp(-step * row.learning_rate * 30) + 0.02 * data.normal() + 0.002 * rng.normal()
        loss += GAP * (row.arm == "E8M3") + 0.3 * diverges * max(0, step - 80)
        points += [(step, "loss", loss), (step, "grad_norm", 1 + 0.1 * rng.normal())]
        points += [(step, "elapsed_time_per_iteration_ms", 8.0 if row.arm == "BF16" else 5.0)]
        if step % 2 == 0:
            points.append((step, "sharpness", 0.1 + 0.001 * rng.normal() + 0.01 * diverges * max(0, step - 50)))
    return [*points, (STEPS, "validation_loss", loss + 0.1)]


def fill(path, of=None, order=None, diverges=lambda row: False, without=(), start=0) -> Store:
    """A store of a plan whose runs have ended, in this order of seeds; the arm "broken" has failed.

    start: the step of the checkpoint that they began from.
    """
    store = Store(path, create=True)
    store.add(replace(of or plan(), steps=start + STEPS))
    rows = []
    while row := store.claim("version 1"):
        rows.append(row)
    for row in sorted(rows, key=order or (lambda row: row.id)):
        if row.arm == "broken":
            store.finish(row, FAILED, 3, "exit code 3\nhttp://example.com <b>the cause</b> | `x`")
            continue
        points = [(start + step, name, value) for step, name, value in curve(row, diverges(row))]
        store.write(row, [point for point in points if point[1] not in without])
        store.finish(row, DONE, 0)
    return store


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a store of eight seeds; at the high rate seven of E8M3's runs diverge. It is only read."""
    folder = tmp_path_factory.mktemp("report")
    fill(folder / "sweep.sqlite", diverges=at_the_edge).close()
    return folder


@pytest.fixture(scope="module")
def report(folder) -> dict[str, str]:
    """That store's report."""
    return reports(folder)


@pytest.fixture
def drawn(monkeypatch):
    """{name: its panels} of pictures that are drawn but not written, which takes most of a report's time."""
    from matplotlib.figure import Figure

    found = {}

    def picture(name, caption, rows, columns, draw, panel=None):
        found[name] = Figure().subplots(rows, columns, squeeze=False)
        draw(found[name])
        return Picture(name, caption, "<svg/>")

    monkeypatch.setattr(plots, "picture", picture)
    return found


def at_the_edge(row) -> bool:
    return row.arm == "E8M3" and row.learning_rate == 1e-2 and row.seed != 3


class Page(html.parser.HTMLParser):
    """A page's tags, which must be balanced, its links, ids, tables and text."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text: str):
        super().__init__()
        self.open, self.links, self.ids, self.names = [], [], [], []
        self.tables, self.text, self.styles = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "srcset", "action"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)
            if name == "style":
                self.styles.append(value)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] == "style":
            self.styles.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


@pytest.mark.parametrize("name", ["report.html", "runs.html"])
def test_a_page_is_well_formed_and_needs_nothing_else(report, name):
    page = Page(report[name])
    assert report[name].startswith("<!DOCTYPE html>")
    assert all(link.startswith("#") for link in page.links) and page.links
    assert not {"script", "img", "iframe", "object", "embed", "base"} & set(page.names)
    assert not re.search(r"@import|url\((?!#)", " ".join(page.styles))
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links} <= set(page.ids)
    used = set(re.findall(r"url\(#([^)]*)\)", report[name]))
    assert used <= set(page.ids)
    assert all(len(row) == len(table[0]) for table in page.tables for row in table)


def test_pictures_are_files_too_and_are_xml(report):
    pictures = {name: text for name, text in report.items() if name.startswith("figures/")}
    assert {"figures/losses.svg", "figures/divergence.svg", "figures/gaps.svg", "figures/learning_rates.svg"} <= set(
        pictures
    )
    assert {"figures/signal_sharpness.svg", "figures/signal_grad_norm.svg"} <= set(pictures)
    for name, text in pictures.items():
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert text in report["report.html"] and f"({name})" in report["report.md"]


def cells(line: str) -> list[str]:
    return [re.sub(r"\\(.)", r"\1", cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize("name", ["report", "runs"])
def test_both_forms_have_the_same_tables(report, name):
    tables, before = [], ""
    for line in report[f"{name}.md"].splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                tables.append([])
            if not re.fullmatch(r"[|\- :]+", line):
                tables[-1].append(cells(line))
        before = line
    assert tables == Page(report[f"{name}.html"]).tables and len(tables) >= 2


def table(report, head: str) -> list[dict[str, str]]:
    """The rows of the first table with this head, by head."""
    found = next(table for table in Page(report["report.html"]).tables if head in table[0])
    return [dict(zip(found[0], row, strict=True)) for row in found[1:]]


def test_rates_and_tests_are_those_of_the_runs(report):
    rows = table(report, "Fisher p")
    assert [(row["learning rate"], row["arm"], row["runs"], row["diverged"]) for row in rows] == [
        ("0.001", "BF16", "8", "0"),
        ("0.001", "E8M3", "8", "0"),
        ("0.01", "BF16", "8", "0"),
        ("0.01", "E8M3", "8", "7"),
    ]
    last = rows[-1]
    low, high = statistics.wilson(7, 8)
    assert last["Wilson 95 %"] == f"{100 * low:.0f} .. {100 * high:.0f} %" and last["rate"] == "88 %"
    assert last["Fisher p"] == f"{statistics.fisher(7, 8, 0, 8):.4f}" and last["McNemar p"] == f"{2 / 2**7:.4f}"
    assert rows[1]["detectable"] == f"{100 * statistics.detectable_rate(8, 8):.0f} %"
    assert last["above initial"] == "7"


def test_gaps_are_those_of_the_pairs(report, folder):
    store = Store(folder / "sweep.sqlite")
    results = Results(store)
    store.close()
    gaps = []
    for seed in range(1, 9):
        values = {}
        for arm in ("BF16", "E8M3"):
            (run,) = [r for r in results.cell(Cell("d", 1e-3, arm)) if r.row.seed == seed]
            values[arm] = run.series["validation_loss"][1][-1]
        gaps.append(values["E8M3"] - values["BF16"])
    row = table(report, "Wilcoxon p")[1]
    test = statistics.paired(np.array(gaps))
    assert row["gap"] == f"{np.mean(gaps):+.4f}" and abs(np.mean(gaps) - GAP) < 0.005 and row["pairs"] == "8"
    assert row["t p"] == document.p_value(test.t) and row["sign p"] == "0.0078" == row["Wilcoxon p"]
    assert row["detectable gap"] == f"{statistics.detectable_gap(test.deviation, 8):.4f}"
    loss = float(table(report, "Wilcoxon p")[0]["mean"])
    share = float(row["detectable share"].removesuffix(" %")) / 100
    assert share == pytest.approx(float(row["detectable gap"]) / loss, rel=0.02)
    last = table(report, "Wilcoxon p")[-1]
    assert (last["healthy runs"], last["pairs"], last["t p"]) == ("1", "1", "-")


def test_the_summary_says_what_is_seen_and_what_cannot_be_seen(report):
    text = " ".join(Page(report["report.html"]).text)
    counts = "0.001, E8M3: 0 of 8 runs diverged, against 0 of 8 of BF16"
    assert f"{counts}: no difference seen; only a rate of 70 % or more" in text
    assert "0.01, E8M3: 7 of 8 runs diverged, against 0 of 8 of BF16: more often (Fisher p 0.0014*)." in text
    assert "Final loss: 1 pair in which neither run diverged, too few for a statement." in text
    assert re.search(r"Final loss \+0.0\d+ nats \(\+1.\d+ %, \+1.\d+ .. \+1.\d+ %\) over 8 pairs: worse", text)
    assert "16 failed of 48 runs are not in this report" in text and "0.001, broken: no run has ended well" in text
    assert "so it covers only the lucky seeds: 0.01, E8M3 (7)." in text
    assert "One data set, d: nothing about others." in text and "centred, log_z, update_norm" in text


def test_the_gap_that_could_have_been_seen_is_said(report):
    """Also if nothing was seen; for a single test, and for one of all comparisons."""
    text = " ".join(Page(report["report.html"]).text)
    row = table(report, "Wilcoxon p")[1]
    said = re.search(
        r"Gaps of the final loss that would have been seen, in % of the baseline's \(t-test, power 0.8\): "
        r"([\d.]+) % at best, ([\d.]+) % at worst; as one of all 2, after Bonferroni's correction, ([\d.]+) % at best",
        text,
    )
    assert said[1] == said[2] == row["detectable share"].removesuffix(" %")
    assert 1.1 < float(said[3]) / float(said[1]) < 1.5


@pytest.mark.parametrize("within, word", [(20.0, "yes (p "), (0.001, "no"), (None, "")])
def test_equal_within_a_bound_is_told(report, folder, drawn, within, word):
    """E8M3's gap at the low rate; the words are those of statistics.equivalence_words, the bound is of the loss."""
    gap = table(report, "Wilcoxon p")[1]
    with closing(Store(folder / "sweep.sqlite")) as store:
        section = sections.sections(Results(store), within)[5]
    assert section.title == "Final loss"
    (found,) = (block for block in section.blocks if hasattr(block, "heads"))
    row = dict(zip(found.heads, found.rows[1], strict=True))
    assert row["relative"] == gap["relative"]
    if within is None:
        assert not any("within" in head for head in found.heads) and "TOST" not in section.blocks[0]
    else:
        assert row[f"within {within:g} %"].startswith(word) and "TOST" in section.blocks[0]
        assert row["pairs needed"].isdigit() == (within == 20)  # else more than anyone has


@pytest.mark.parametrize("bound", ["0", "-1", "nan", "inf"])
def test_a_bound_that_is_none_is_one_line(bound):
    parser = ArgumentParser()
    add_arguments(parser)
    with pytest.raises(UserError, match=f"^--within {bound}: use per cent of the loss, above 0$"):
        write_report(parser.parse_args(["none.sqlite", "--out", "none", "--within", bound]))


def test_a_reports_title_names_its_arms_and_runs(report):
    title = "sweep: E8M3, broken against BF16; 2 learning rates, 8 seeds, 120 steps"
    assert report["report.md"].startswith(f"# {title}\n") and f"<title>{title}</title>" in report["report.html"]
    assert report["runs.md"].startswith("# sweep: when, where and how fast it ran\n")
    assert re.search(r"^From 20\d\d-\d\d-\d\d \d\d:\d\d to 20\d\d-\d\d-\d\d \d\d:\d\d UTC\.$", report["runs.md"], re.M)
    assert "2 comparisons of divergence, and as many of final loss" in report["report.md"]


def test_an_arm_s_flags_are_those_that_the_others_lack(tmp_path, drawn):
    of = plan(2, arms=("BF16", "E8M3"))
    of = replace(of, command=("train.py", "--lr", "1e-3", "--betas", "0.9", "-0.5"))
    of = replace(of, arms={"BF16": ("--fp8-level", "O0"), "E8M3": ("--fp8-level", "O1", "--fp8-emulate", "E8M3:x y")})
    fill(tmp_path / "sweep.sqlite", of, without=("sharpness", "grad_norm")).close()
    written = reports(tmp_path)
    assert [(row["arm"], row["its flags"]) for row in table(written, "its flags")] == [
        ("BF16", "--fp8-level O0"),
        ("E8M3", "--fp8-level O1 --fp8-emulate 'E8M3:x y'"),
    ]
    shared = "train.py --betas 0.9 -0.5 --train-iters 120 --log-interval 1 --data-cache-path '{run}/cache'"
    assert f"\n    {shared}\n" in written["report.md"]


def test_any_arm_may_be_the_baseline(report, folder, drawn):
    with closing(Store(folder / "sweep.sqlite")) as store:
        results = Results(store, "E8M3")
        with pytest.raises(UserError, match=r"^--baseline E8: no such arm; use one of BF16, E8M3, broken$"):
            Results(store, "E8")
    assert results.baseline == "E8M3" and results.arms == ["E8M3", "BF16", "broken"]
    text = markdown("", [section for section in sections.sections(results) if "show" in section.title])
    assert "0.01, BF16: 0 of 8 runs diverged, against 7 of 8 of E8M3: less often (Fisher p 0.0014\\*)." in text
    gap = table(report, "Wilcoxon p")[1]["gap"].removeprefix("+")
    assert f"Final loss -{gap} nats" in text and "better (t-test p" in text


def test_which_falls_first(report):
    """Seven seeds fall at the high rate, all of E8M3. At the low rate all pairs are ties, which give no votes."""
    rows = [[*row.values()] for row in table(report, "sign p") if "earlier" in row]
    assert rows == [
        ["0.001", "E8M3", "pairs", "0", "0", "8", "1.0000"],
        ["0.01", "E8M3", "pairs", "7", "0", "1", "0.0156"],
        ["all", "E8M3", "seeds", "7", "0", "1", "0.0156"],
    ]
    text = " ".join(Page(report["report.html"]).text)
    words = "E8M3: 7 of 8 seeds diverge earlier than BF16's at more learning rates than the opposite"
    assert f"{words} (sign test p 0.0156*; 1 such comparison, marked at 0.05 / 1)." in text


def test_a_seed_has_one_vote(tmp_path):
    """The baseline falls at the low rate, the arm at the two others. So each seed votes that the arm falls earlier."""
    fallen = {("BF16", 3e-3), ("E8M3", 1e-2), ("E8M3", 2e-2)}
    of = plan(6, rates=(3e-3, 1e-2, 2e-2))
    store = fill(tmp_path / "s", of, diverges=lambda row: (row.arm, row.learning_rate) in fallen)
    results = Results(store)
    store.close()
    assert onset_section.by_cell(results) == {
        Cell("d", 3e-3, "E8M3"): (0, 6, 0),
        Cell("d", 1e-2, "E8M3"): (6, 0, 0),
        Cell("d", 2e-2, "E8M3"): (6, 0, 0),
    }
    votes = onset_section.by_seed(results)
    assert votes == {("d", "E8M3"): (6, 0, 0)} and votes["d", "E8M3"].p == pytest.approx(2 / 2**6)


@pytest.mark.parametrize("base, run, expected", [(90, 80, 1), (80, 90, -1), (80, 80, 0), (math.inf, 80, 1)])
def test_earlier(base, run, expected):
    pair = SimpleNamespace(onset=base), SimpleNamespace(onset=run)
    assert onset_section._earlier(pair) == expected


def test_without_a_divergence_nothing_falls(tmp_path, drawn):
    fill(tmp_path / "sweep.sqlite", plan(seeds=3)).close()
    assert "In no pair did one run diverge before the other." in reports(tmp_path)["report.md"]


def test_runs_from_a_checkpoint_are_judged_by_the_steps_that_they_made(report, tmp_path, drawn):
    """The same curves from step 10,000 on give the same report, apart from the numbers of the steps."""
    fill(tmp_path / "sweep.sqlite", diverges=at_the_edge, start=10_000).close()
    begun, later = report, reports(tmp_path)
    for head in ("McNemar p", "Wilcoxon p", "sensitivity", "at 10 %", "within", "median lead", "ratio"):
        expected = table(begun, head)
        for row in expected:
            if row.get("median step", "-") != "-":
                row["median step"] = str(10_000 + int(row["median step"]))
        assert table(later, head) == expected
    assert "48 runs of 120 steps: 3 arms" in begun["report.md"]
    assert "48 runs of 120 steps after step 10000: 3 arms" in later["report.md"]
    assert "Runs of 120 steps after step 10000: nothing about what comes later" in later["report.md"]
    assert Page(later["runs.html"]).tables[0] == Page(begun["runs.html"]).tables[0]


def test_the_first_tenth_of_a_run_is_no_measure_of_its_speed():
    times = np.array([100.0, 100.0] + [1.0, 2.0] * 9)
    for start in (0, 10_000):
        series = {"elapsed_time_per_iteration_ms": (np.arange(start + 1, start + 21), times)}
        assert _milliseconds(SimpleNamespace(series=series)) == 1.5


def test_a_run_that_ended_before_its_first_step_began_where_the_others_did(tmp_path):
    store = Store(tmp_path / "sweep.sqlite", create=True)
    store.add(replace(plan(seeds=1, rates=(1e-3,), arms=("BF16", "E8M3")), steps=10_400))
    for losses in ([3.0] * 200 + [math.nan] * 200, []):
        row = store.claim("")
        store.write(row, [(10_000 + step, "loss", loss) for step, loss in enumerate(losses, 1)])
        store.finish(row, DONE if losses else NOT_FINITE, 0)
    results = Results(store)
    store.close()
    assert (results.start, results.made) == (10_000, 400)
    (lost,), (unborn,) = (results.cell(Cell("d", 1e-3, arm)) for arm in ("BF16", "E8M3"))
    assert lost.divergence == ("not finite", 10_201) and unborn.divergence == ("not finite", 10_001)


def test_the_report_says_if_too_few_runs_diverged(tmp_path, drawn):
    fill(tmp_path / "sweep.sqlite", plan(seeds=3), diverges=at_the_edge).close()
    text = " ".join(Page(reports(tmp_path)["report.html"]).text)
    assert "Too few to judge any signal: at least 3 of either kind are needed" in text
    assert "no difference seen; with so few runs not even a rate of 100 % would be." in text
    assert "over 3 pairs: worse (by the t-test alone, p" in text
    assert "With 3 pairs, the sign test and Wilcoxon's cannot give p <= 0.05 at all" in text


def test_warnings_come_before_the_divergence(tmp_path, drawn):
    fill(tmp_path / "sweep.sqlite", plan(seeds=16), diverges=at_the_edge).close()
    report = reports(tmp_path)
    rows = {(row["signal"], row["as"], row["within"]): row for row in table(report, "within")}
    early = [head for head in next(iter(rows.values())) if head.endswith(" before")]
    assert early == ["1 step before", "6 steps before", "12 steps before"]
    sharp = rows["sharpness", "level", "data set"]
    assert sharp["runs"] == "15, 49" and all(sharp[head].startswith("1.00") for head in early)
    assert 0.2 < float(rows["grad_norm", "level", "data set"][early[1]].split()[0]) < 0.8
    assert rows["sharpness", "rise", "cell"]["runs"] == "15, 1"  # one run of that cell did not
    text = " ".join(Page(report["report.html"]).text)
    assert "judged on the rest, 2, 4, 6, 8, 10, 12, 14, 16: 8 runs that diverged, 24 that did not." in text
    risen = re.search(r"its best so far by \(median\) ([\d.]+) nats 1 step before it, ([\d.]+) nats 6 steps", text)
    assert float(risen[1]) > 0.5 and float(risen[1]) - float(risen[2]) == pytest.approx(5 * 0.3, abs=0.1)
    alarms = {row["signal"]: row for row in table(report, "median lead")}
    assert alarms["sharpness"]["warned"] == "8 of 8" and 15 <= int(alarms["sharpness"]["median lead"]) <= 40


@pytest.mark.parametrize("order", [pytest.param("backwards", marks=pytest.mark.slow), "shuffled"])
def test_the_order_in_which_runs_end_makes_no_difference(report, tmp_path, order):
    shuffled = np.random.default_rng().permutation(1000)
    orders = {
        "backwards": lambda row: -row.id,
        "shuffled": lambda row: shuffled[row.id],
    }
    fill(tmp_path / "sweep.sqlite", diverges=at_the_edge, order=orders[order]).close()
    again = reports(tmp_path)
    assert {k: v for k, v in again.items() if "runs" not in k} == {k: v for k, v in report.items() if "runs" not in k}


@pytest.mark.slow  # the order in which they end stays
def test_the_order_in_which_runs_were_planned_makes_no_difference(report, tmp_path):
    few = Store(tmp_path / "sweep.sqlite", create=True)
    few.add(plan(seeds=3))
    few.close()
    fill(tmp_path / "sweep.sqlite", diverges=at_the_edge).close()  # the others are added later
    assert reports(tmp_path)["report.html"] == report["report.html"]


def test_speed_is_in_the_other_page(report):
    assert "speed-up" not in " ".join(" ".join(row) for t in Page(report["report.html"]).tables for row in t)
    speeds = Page(report["runs.html"]).tables[0]
    row = dict(zip(speeds[0], speeds[2], strict=True))
    assert (row["arm"], row["ms a step"], row["speed-up"]) == ("E8M3", "5.0", "1.600")
    ratio = next(r["ratio"] for r in table(report, "ratio"))
    assert float(speeds[2][speeds[0].index("loss-matched")]) == pytest.approx(1.6 * float(ratio), abs=2e-3)
    assert float(ratio) < 1  # E8M3 is worse


def test_the_ends_of_failed_logs_are_text(report):
    page = Page(report["runs.html"])
    assert "http://example.com <b>the cause</b> | `x`" in "".join(page.text) and "b" not in page.names
    assert "    http://example.com <b>the cause</b> | `x`" in report["runs.md"]
    assert "version 1" in report["runs.html"] and "version 1" not in report["report.html"]


def test_a_plan_that_names_no_data_has_the_commands(tmp_path, drawn):
    fill(tmp_path / "sweep.sqlite", plan(seeds=2, rates=(1e-3,), data=(UNNAMED,), arms=("BF16", "E8M3"))).close()
    text = " ".join(Page(reports(tmp_path)["report.html"]).text)
    assert "learning rate 0.001, the command's data. Runs of one seed" in text
    assert "One data set, the command's: nothing about others." in text


def test_one_arm_one_rate_two_data_sets(tmp_path, drawn):
    fill(tmp_path / "sweep.sqlite", plan(seeds=2, rates=(1e-3,), data=("a", "b"), arms=("BF16",))).close()
    report = reports(tmp_path)
    text = " ".join(Page(report["report.html"]).text)
    assert "no run of an arm other than BF16, so nothing is compared" in text
    assert "Learning-rate sensitivity" not in text and "figures/gaps.svg" not in report
    assert [row["data"] for row in table(report, "Fisher p")] == ["a", "b"]


def test_without_validation_the_training_loss_is_compared(tmp_path, drawn):
    fill(tmp_path / "sweep.sqlite", plan(rates=(1e-3,)), without=("validation_loss", "sharpness", "grad_norm")).close()
    report = reports(tmp_path)
    text = " ".join(Page(report["report.html"]).text)
    assert "The mean training loss of the last 5 % of steps (some runs lack a validation loss)" in text
    assert "Not logged, so not judged: sharpness, centred, log_z, grad_norm, update_norm." in text
    assert abs(float(table(report, "Wilcoxon p")[1]["gap"]) - GAP) < 0.005


def test_a_run_that_ended_itself_has_diverged(tmp_path, drawn):
    store = Store(tmp_path / "sweep.sqlite", create=True)
    store.add(plan(seeds=1, rates=(1e-3,), arms=("BF16", "E8M3", "E8M4")))
    for points in (30, 0, 120):
        row = store.claim("")
        store.write(row, curve(row, False)[: 3 * points])
        store.finish(row, NOT_FINITE if points < 120 else DONE, 1, "found NaN")
    store.close()
    report = reports(tmp_path)
    assert [row["not finite"] for row in table(report, "Fisher p")] == ["1", "1", "0"]
    assert [row["ended by NaN"] for row in table(report, "ended by NaN")] == ["1", "1", "0"]


def test_what_a_run_had_reached_before_it_ended_itself_is_not_its_final_loss(tmp_path):
    """Such a run counts with its first loss, like a run that continues without a finite loss."""
    of = plan(seeds=1, arms=("BF16", "E8M3"))
    store = Store(tmp_path / "sweep.sqlite", create=True)
    store.add(of)
    first = {}
    while row := store.claim(""):
        falls = (row.arm, row.learning_rate) == ("E8M3", 1e-2)
        points = [point for point in curve(row, False) if not falls or point[0] < 100]
        first[row.arm, row.learning_rate] = points[0][2]
        store.write(row, [point for point in points if point[1] == "loss"])
        store.finish(row, NOT_FINITE if falls else DONE, 0)
    results = Results(store)
    store.close()
    assert results.outcome == "training"
    (fallen,) = results.cell(Cell("d", 1e-2, "E8M3"))
    assert fallen.training_loss < 3 and math.isnan(results.final(fallen))
    (other,) = results.cell(Cell("d", 1e-3, "E8M3"))
    start = np.mean([first["E8M3", rate] for rate in of.learning_rates])
    found = sections._sensitivities(results, "d", "E8M3")
    assert found == {1: pytest.approx((start - results.final(other)) / 2)}


def test_the_gaps_that_remain_possible_are_shown(tmp_path, drawn):
    """Without a difference: the gaps that a t-test does not tell from the one seen."""
    fill(tmp_path / "sweep.sqlite", plan(3, (1e-3,), arms=("BF16", "O3"))).close()
    store = Store(tmp_path / "sweep.sqlite")
    results = Results(store)
    store.close()
    pairs = results.pairs(Cell("d", 1e-3, "O3"))
    shares = np.array([results.final(run) - results.final(base) for base, run in pairs])
    shares *= 100 / np.mean([results.final(base) for base, _ in pairs])
    test = scipy.stats.ttest_1samp(shares, 0)
    assert test.pvalue > 0.05  # for these seeds
    low, high = test.confidence_interval()
    text = " ".join(Page(reports(tmp_path)["report.html"]).text)
    interval = f"{shares.mean():+.2f} %, {low:+.2f} .. {high:+.2f} % over 3 pairs"
    assert re.search(rf"with probability 0.8: O3 \({re.escape(interval)}, seen from 0.\d\d %\)\.", text)


def test_pictures_show_what_diverged(report):
    gaps = report["figures/gaps.svg"]
    assert "E8M3 (8 pairs)" in gaps and "E8M3 (1 pair)" in gaps
    cross = re.compile(r'<path id="([^"]+)" d="M -2\.5 2\.5')
    losses = report["figures/losses.svg"]
    (name,) = cross.findall(losses)
    assert losses.count(f'href="#{name}"') == 7  # one for each run


def test_where_no_pair_is_healthy_the_picture_says_so(tmp_path, drawn):
    with closing(fill(tmp_path / "s", plan(2), diverges=lambda row: row.learning_rate == 1e-2)) as store:
        plots.gaps(Results(store))
    said = [text.get_text() for panel in drawn["gaps"].flat for text in panel.texts]
    assert said.count("no pair without a divergence") == 1


def test_a_curve_ends_with_its_last_finite_value():
    values = np.array([4.0, math.nan, 2.0, math.nan, math.nan])
    drawn = plots._drawn(values, 10)
    assert np.array_equal(drawn[:3], smooth(values[:3])) and np.isnan(drawn[3:]).all()
    assert np.isnan(plots._drawn(np.full(3, math.nan), 10)).all()


def test_no_two_arms_look_alike():
    arms = [f"arm {i}" for i in range(28)]
    looks = [tuple(plots._look(SimpleNamespace(arms=arms), arm).values()) for arm in arms]
    assert len(set(looks)) == len(arms)


def test_a_sweep_that_has_just_begun_has_no_report(tmp_path):
    store = Store(tmp_path / "sweep.sqlite", create=True)
    store.add(plan())
    store.close()
    with pytest.raises(ValueError, match="no run has ended well yet; wait for the first"):
        reports(tmp_path)


def test_text_is_escaped_in_both_forms():
    odd = "a|b <i>*x*</i> [y](z) `q` \\ _w_ & c"
    content = [Section(odd, [odd, [odd], Table([odd], [[odd]]), Log(odd), Picture("p", odd, "<svg><g/></svg>")])]
    page = Page(as_html(odd, content))
    # title, h1, nav, h2, p, li, th, td, pre, figcaption
    assert "".join(page.text).count(odd) == 10 and "i" not in page.names
    lines = markdown(odd, content).splitlines()
    assert f"    {odd}" in lines
    plain = [re.sub(r"\\(.)", r"\1", line) for line in lines]
    assert {f"# {odd}", f"## {odd}", odd, f"- {odd}", f"![{odd}](figures/p.svg)"} <= set(plain)
    assert [cells(line) for line in lines if line.startswith("| a")] == [[odd], [odd]]
    for line in lines:
        if not line.startswith("    "):
            assert not re.search(r"(?<![\\!])[<`_*[]", line)


def test_numbers_as_text():
    nan = math.nan
    assert [document.number(x) for x in (1.23456, nan)] == ["1.2346", "-"]
    assert [document.percent(x) for x in (0.125, 0.0, nan)] == ["12 %", "0 %", "-"]
    assert [document.p_value(x) for x in (0.04064, 1e-5, 0.0, 1.0, nan)] == [
        "0.0406",
        "< 0.0001",
        "< 0.0001",
        "1.0000",
        "-",
    ]
    assert document.between((0.1, 0.25), ".1f") == "0.1 .. 0.2" and document.between((nan, 1.0)) == "-"
    assert document.percents((0.004, 0.996)) == "0 .. 100 %"


# Pictures, before matplotlib writes them.


def same(store_file, arms, values, rates=(1e-3, 1e-2), seeds=3) -> Results:
    """Results of runs whose losses (steps,) depend on the learning rate alone."""
    of = replace(plan(seeds, rates, arms=arms), steps=10)
    with closing(Store(store_file, create=True)) as store:
        store.add(of)
        while row := store.claim(""):
            losses = values + 0.1 * math.log10(row.learning_rate)
            store.write(row, [(step, "loss", loss) for step, loss in enumerate(losses.tolist(), 1)])
            store.finish(row, DONE, 0)
        return Results(store)


def test_arms_that_are_equal_lie_on_each_other(tmp_path, drawn):
    """They used to be shifted sideways and joined. Of rising lines the last arm's then lay lowest and looked best."""
    results = same(tmp_path / "s", ("BF16", "O1", "O3"), np.linspace(5.6, 5.5, 10))
    plots.learning_rates(results)
    losses, gaps = drawn["learning_rates"][:, 0]
    lines = {line.get_label(): line for line in losses.get_lines() if not line.get_label().startswith("_")}
    assert list(lines) == ["BF16", "O1", "O3"]
    for line in lines.values():
        assert list(line.get_xdata()) == [1e-3, 1e-2]
        assert list(line.get_ydata()) == list(lines["BF16"].get_ydata())
    widths = [line.get_linewidth() for line in lines.values()]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3  # none hides another
    dots = [line for line in losses.get_lines() if line.get_marker() == "o"]
    assert len({float(line.get_xdata()[0]) for line in dots if len(line.get_xdata())}) == 6  # side by side
    means = [line for line in gaps.get_lines() if line.get_marker() == "o"]
    assert len(means) == 4 and all(line.get_ydata()[0] == 0 for line in means)
    assert {line.get_color() for line in means} == {COLOURS["O1"], COLOURS["O3"]}


def test_the_axis_of_the_losses_fits_them(tmp_path, drawn):
    """For losses from 5.56 to 5.50 the axis used to reach 6.1."""
    plots.losses(same(tmp_path / "s", ("BF16", "O3"), np.linspace(5.56, 5.5, 10) + 0.3, rates=(1e-3,)))
    low, high = drawn["losses"][0, 0].get_ylim()
    assert 5.5 < low < 5.53 and 5.56 < high < 5.57


def test_names_are_no_mathematics(tmp_path):
    """matplotlib reads text between two dollars as mathematics, and raises if it cannot."""
    results = same(tmp_path / "s", ("$\\frac$", "a$b_$"), np.linspace(5.6, 5.5, 10), seeds=2)
    (picture,) = plots.learning_rates(results)
    assert "$\\frac$" in picture.svg and "a$b_$" in picture.svg


def test_a_name_in_any_script_is_drawn_without_a_warning(tmp_path):
    results = same(tmp_path / "s", ("基準", "🦙"), np.linspace(5.6, 5.5, 10), seeds=2)
    with warnings.catch_warnings(action="error"):
        (picture,) = plots.learning_rates(results)
    assert "基準" in picture.svg and "🦙" in picture.svg


def test_a_loss_of_zero_has_gaps_without_a_share(tmp_path, drawn):
    content = sections.sections(same(tmp_path / "s", ("BF16", "O3"), np.zeros(10), rates=(1.0,)), within=0.5)
    (final,) = [section for section in content if section.title == "Final loss"]
    (of,) = [block for block in final.blocks if isinstance(block, Table)]
    row = dict(zip(of.heads, of.rows[1], strict=True))
    assert row["gap"] == "+0.0000" and row["relative"] == row["detectable share"] == "-"
