"""What README.md and docs/ (results.md, levels.md, performance.md) say is what the committed rows say, recomputed.

A sentence stands here as the page has it, with its figures left open.  A changed figure, row or page fails.
"""

import csv
import lzma
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
from launch import ROOT
from scipy import stats

from megatron_fp8.numerics.master import split_e4m3
from megatron_fp8.tools.lab.report.results import Results
from megatron_fp8.tools.lab.report.statistics import fisher
from megatron_fp8.tools.lab.sweep.store import Store

LAST = 100  # steps that a run is judged by
REAL_TEXT = ROOT / "benchmarks/results/real_text.csv"
BF16_TE, TE = "O0, TE", "TE"


@pytest.fixture(scope="module")
def curves() -> dict[tuple[str, int], list[float]]:
    """{(arm, seed): losses, nats a byte} of the runs of 800 steps on real text; the last row of each counts."""
    csv.field_size_limit(10**8)
    with REAL_TEXT.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["steps"] == "800"]
    return {(row["arm"], int(row["seed"])): [float(loss) for loss in row["losses"].split()] for row in rows}


def page(name: str) -> str:
    """A page's text, blanks and line breaks run together."""
    return re.sub(r"\s+", " ", (ROOT / name).read_text()).replace("**", "")


def less(curves: dict, arm: str, reference: str) -> tuple[float, float, float, int, float, float]:
    """(mean, low, high, last step, reference's loss, p) of an arm's loss less another's over the last steps that both
    have: per cent of the reference's loss, the 95 % interval of a t-test over seeds."""
    seeds = sorted(seed for name, seed in curves if name == arm and (reference, seed) in curves)
    end = min(len(curves[name, seed]) for name in (arm, reference) for seed in seeds)
    of = [[statistics.mean(curves[name, seed][end - LAST : end]) for seed in seeds] for name in (arm, reference)]
    gaps = [one - other for one, other in zip(*of, strict=True)]
    mean, loss = statistics.mean(gaps), statistics.mean(of[1])
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    half = stats.t.ppf(0.975, len(gaps) - 1) * error
    p = 2 * stats.t.sf(abs(mean / error), len(gaps) - 1)
    assert len(seeds) == 4  # the pages say so
    return 100 * mean / loss, 100 * (mean - half) / loss, 100 * (mean + half) / loss, end, loss, float(p)


def interval(found: tuple) -> str:
    return f"{found[0]:+.2f} %, interval {found[1]:+.2f} to {found[2]:+.2f} %"


def test_gaps_on_real_text_are_the_rows(curves):
    levels = page("docs/levels.md")
    against = {arm: less(curves, arm, BF16_TE) for arm in ("O2", "O3", "O3, all", TE)}
    assert {found[3] for found in against.values()} == {800}
    assert f"BF16 with Transformer Engine's layers, {against['O3'][4]:.3f} nats a byte" in levels
    everything = "O3 with `--fp8-lm-head --fp8-activations --fp8-grad-accum fp8`"
    assert f"| O2 | {interval(against['O2'])} | |" in levels
    assert f"| O3 | {interval(against['O3'])} | {interval(less(curves, 'O3', TE))} |" in levels
    assert f"| {everything} | {interval(against['O3, all'])} | |" in levels
    assert f"| Transformer Engine's FP8 | {interval(against[TE])} | |" in levels
    noise = less(curves, "O0", BF16_TE)
    assert f"differ by {interval(noise)}, on steps {noise[3] - LAST + 1} to {noise[3]}" in levels
    found = less(curves, "O3, all", "O0")
    words = f"{found[0]:.2f} % above stock's own BF16 on steps {found[3] - LAST + 1} to {found[3]}"
    assert f"{words}, interval {found[1]:+.2f} to {found[2]:+.2f} % (p {found[5]:.2f})" in levels


def test_readmes_accuracy_is_the_rows(curves):
    readme = page("README.md")
    te, bf16 = less(curves, "O3", TE), less(curves, "O3", BF16_TE)
    assert f"(95 % interval {te[1]:+.2f} to {te[2]:+.2f} %)" in readme and max(-te[1], te[2]) < 0.405
    assert f"the interval is wider: {bf16[1]:+.1f} to {bf16[2]:+.1f} % (mean {bf16[0]:+.2f} %)" in readme
    words = "four seeds of a GPT of 85 M parameters (GPT-125M's layers, a vocabulary of 257 bytes), 800 steps, "
    assert f"{words}{800 * 32 * 1024 // 10**6} M bytes (12 MB" in readme
    width, layers, rows = 768, 12, 384
    parameters = layers * (4 * width**2 + 3 * 2048 * width + 2 * width) + width + rows * width
    assert f"a GPT of {parameters / 1e6:.0f} M parameters" in readme


def test_seeds_that_half_a_per_cent_needs(curves):
    """Two one-sided tests at 5 % with power 0.9, a true gap of zero, the spread that O3's four seeds have."""
    gaps = [
        statistics.mean(curves["O3", seed][-LAST:]) - statistics.mean(curves[BF16_TE, seed][-LAST:])
        for seed in (1, 2, 3, 4)
    ]
    bound = 0.005 * less(curves, "O3", BF16_TE)[4] / statistics.stdev(gaps)

    def power(n: int) -> float:
        """Both tests reject: the mean within bound less t s / sqrt(n); by simulation of s, exactly in the mean."""
        t, grid = stats.t.ppf(0.95, n - 1), (torch.arange(2000).double() + 0.5).numpy() / 2000
        s = (stats.chi2.ppf(grid, n - 1) / (n - 1)) ** 0.5
        room = (bound - t * s / math.sqrt(n)).clip(0) * math.sqrt(n)
        return float((2 * stats.norm.cdf(room) - 1).mean())

    needed = next(n for n in range(3, 200) if power(n) >= 0.9)
    assert f"at this spread that needs {needed} (two" in page("docs/levels.md")


def test_o3_leads_by_one_step(curves):
    log = page("docs/performance.md")
    third = [curves["O0", seed][2] - curves["O3", seed][2] for seed in (1, 2, 3, 4)]
    assert f"third loss is {min(third):.2f} to {max(third):.2f} nats below" in log
    assert f"(seed 1: {curves['O3', 1][2]:.3f} and {curves['O0', 1][2]:.3f})" in log
    end = min(len(curves[arm, seed]) for arm in ("O0", "O3") for seed in (1, 2, 3, 4))
    leads = [[curves["O3", seed][step] < curves["O0", seed][step] for seed in (1, 2, 3, 4)] for step in range(3, end)]
    below, above = sum(map(all, leads)), sum(not any(lead) for lead in leads)
    words = f"of the {end - 3} steps after it that both have, O3 is below in all four seeds in {below}"
    assert f"{words}, and in no seed in {above}." in log


def test_what_a_weight_shows_of_the_first_update():
    """1e-3 after a 160th of the warm-up's steps, on weights of N(0, 0.02)."""
    update = 1e-3 / 160
    assert f"is {update:.2e}".replace("e-0", "e-") in page("docs/performance.md")
    torch.manual_seed(0)
    master = torch.randn(1 << 21) * 0.02
    weight = master.bfloat16()
    shown = ((weight.float() + update).bfloat16().float() - weight.float()).mean() / update
    assert f"show {100 * shown:.0f} % of it" in page("docs/performance.md")
    scale = torch.tensor(2.0**12)
    before, after = (split_e4m3(at, scale)[0].float() / scale for at in (master, master + update))
    assert 0.9 < (after - before).mean() / update < 1.1


def opened(name: str, folder: Path) -> Results:
    """The judged runs of a committed store."""
    path = folder / f"{name}.sqlite"
    path.write_bytes(lzma.decompress((ROOT / f"benchmarks/results/lab/{name}.sqlite.xz").read_bytes()))
    store = Store(str(path))
    try:
        return Results(store)
    finally:
        store.close()


def test_the_ramp_is_the_stores(tmp_path):
    results = opened("ramp", tmp_path)
    falls = {
        cell.arm: (sum(run.divergence is not None for run in runs), len(runs))
        for cell, runs in results.cells()
        if cell.rate == 0.12
    }
    of = {arm: f"{fallen} of {runs}" for arm, (fallen, runs) in falls.items()}
    levels, lab = page("docs/levels.md"), page("docs/lab_results.md")
    words = f"diverges in {of['FP32']} runs in FP32, in {of['BF16']} in BF16, in {of['O1']} at O1 and "
    assert f"{words}in {of['O3']} at O3" in levels and falls["FP32"][0] == 0
    words = f"diverges in {of['O3']} runs at O3, in {of['BF16']} in BF16 and in none in FP32"
    assert words in page("README.md")
    p = {arm: fisher(*falls[arm], *falls["FP32"]) for arm in ("O1", "O3", "E8M3 truncate")}
    both = tuple(one + other for one, other in zip(falls["O1"], falls["O3"], strict=True))
    assert f"O3 against FP32: Fisher's p {p['O3']:.3f}, O1 {p['O1']:.3f}" in levels
    assert f"both levels against BF16: {fisher(*both, *falls['BF16']):.2f}." in levels
    words = f"O3: p {p['O3']:.3f} against FP32, {fisher(*falls['O3'], *falls['BF16']):.2f} against BF16"
    assert words in page("README.md")
    assert f"O3 p {p['O3']:.3f}, O1 and E8M3 {p['O1']:.3f}" in lab and p["O1"] == p["E8M3 truncate"]
    assert f"both levels together {both[0]} of {both[1]}, p {fisher(*both, *falls['FP32']):.3f}" in lab


def test_the_levels_are_the_stores(tmp_path):
    """None of 96 diverged; of nine gaps none stands after correction."""
    results = opened("levels", tmp_path)
    cells = list(results.cells())
    assert sum(len(runs) for _, runs in cells) == 96 and not any(run.divergence for _, runs in cells for run in runs)
    base = {
        cell.rate: {run.row.seed: run.validation_loss for run in runs} for cell, runs in cells if cell.arm == "BF16"
    }
    p, seen = [], {}
    for cell, runs in cells:
        if cell.arm != "BF16":
            gaps = [run.validation_loss - base[cell.rate][run.row.seed] for run in runs]
            p.append(stats.ttest_1samp(gaps, 0).pvalue)
            spread = statistics.stdev(gaps) / statistics.mean(base[cell.rate].values())
            seen[cell.rate, cell.arm] = 100 * spread * detectable(len(gaps), 0.05 / 9)
    assert len(p) == 9 and sum(one < 0.05 for one in p) == 1 and min(p) > 0.05 / 9
    lowest = min(rate for rate, _ in seen)
    worst = [max(gap for (rate, _), gap in seen.items() if (rate == lowest) == low) for low in (True, False)]
    words = f"seen a gap of {worst[0]:.1f} % at the lowest rate and of {worst[1]:.0f} % at the others"
    assert words in page("docs/levels.md")


def detectable(n: int, alpha: float) -> float:
    """The mean, in standard deviations of n differences, that a two-sided t-test at alpha sees with power 0.8."""
    limit = stats.t.ppf(1 - alpha / 2, n - 1)
    effects = [i / 1000 for i in range(100, 6000)]
    return next(e for e in effects if stats.nct.sf(limit, n - 1, e * math.sqrt(n)) >= 0.8)


def test_throughputs_are_what_table_5_has():
    """Tokens a second, micro-batch and peak of each cell, and the quotient of the row; Llama's row is a step's."""
    with (ROOT / "benchmarks/results/table5.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["Outcome"] == "ok"]
    measured = {(int(row["Tokens/sec/GPU"]), int(row["MBS"])): float(row["Peak GB"]) for row in rows}
    table = re.search(r"^\| tokens a second and GPU.*?\n\n", (ROOT / "docs/results.md").read_text(), re.M | re.S)
    assert table
    shown = 0
    for line in table[0].replace("*", "").splitlines()[2:]:
        found = [
            (int(tokens.replace(",", "")), int(mbs), float(peak))
            for tokens, mbs, peak in re.findall(r"([\d,]{5,}) \((\d+), ([\d.]+)\)", line)
        ]
        if "Llama" not in line:
            assert all(abs(measured[tokens, mbs] - peak) < 0.051 for tokens, mbs, peak in found), line
            shown += len(found)
        if gain := re.search(r"\| ([\d.]+) \|$", line):
            digits = len(gain[1].partition(".")[2])
            assert abs(found[2][0] / found[1][0] - float(gain[1])) <= 0.6 * 10**-digits, line
    assert shown >= 9


def test_whole_models_with_experts_are_the_rows():
    """Milliseconds, tokens a second and memory of docs/performance.md's table, and docs/results.md's of two rows."""
    with (ROOT / "benchmarks/results/eight.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["shape"].startswith(("qwen3-30b", "deepseek-v2"))]
    rows = list({(row["shape"], row["system"]): row for row in rows}.values())  # the last of each counts
    ms = [[float(row[name]) for name in ("ms", "ms_min", "ms_max")] for row in rows]
    tokens = [f"{8 * 4096e3 / took / int(row['nproc']):,.0f}" for row, (took, *_) in zip(rows, ms, strict=True)]
    gb = [[f"{1.048576 * float(row[name]):.1f}" for name in ("gb", "gb_peak")] for row in rows]
    text = page("docs/performance.md")
    assert "| ".join([f"{took:,.0f} ({low:,.0f} to {high:,.0f}) " for took, low, high in ms]) in text
    assert f"| tokens a second and GPU | {' | '.join(tokens)} |" in text
    assert f"| GB after a step / peak | {' | '.join(map(' / '.join, gb))} |" in text
    assert f"makes Qwen3 {ms[0][0] / ms[3][0]:.2f} times as fast" in text
    assert f"makes DeepSeek {ms[1][0] / ms[2][0]:.2f} times as fast" in text
    text = page("docs/results.md")
    assert f"{tokens[2]} tokens a second for DeepSeek-V2-Lite" in text and f"(peak {gb[2][1]} GB; 95e7bb9)" in text
    assert f"{tokens[3]} on each of two for Qwen3-30B-A3B ({gb[3][1]} GB; 08764dd4), {tokens[0]} without one" in text


def test_readmes_layers_with_experts_are_the_rows():
    """Milliseconds and GB of one call's three systems, and the factor."""
    with (ROOT / "benchmarks/results/train_step_experts.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["shape"] == "qwen3-moe --num-layers=8"]
    of = {row["system"]: row for row in rows if row["commit"] == "6fd244fe"}
    cells = [
        f"{float(row['ms']):.1f} ({1.048576 * float(row['gb']):.1f} / {1.048576 * float(row['gb_peak']):.1f})"
        for row in (of["bf16-experts"], of["te-delayed-experts-graph"], of["O3-experts-graph"])
    ]
    factor = float(of["te-delayed-experts-graph"]["ms"]) / float(of["O3-experts-graph"]["ms"])
    assert f"`--fp8-experts`, graphs, one H200 | {' | '.join(cells)} | {factor:.2f} |" in page("README.md")


def test_the_routed_layer_is_the_rows():
    """docs/performance.md's table, "counts 4 : 1" being the skewed ones, and what it says of imbalance and BF16."""
    with (ROOT / "benchmarks/results/routed_layer.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["what"] == "systems"]
    ms = {(row["model"], row["counts"], row["name"]): (float(row["ms"]), float(row["burst ms"])) for row in rows}
    text = re.sub(r"\s+", " ", (ROOT / "docs/performance.md").read_text())
    others = ("together", 2), ("by Triton", 2), ("grouped BF16", 2), ("BF16", 1)
    for model in ("DeepSeek-V2-Lite", "Qwen3-30B-A3B"):
        for counts, shown in (("equal", ""), ("skewed", ", counts 4 : 1")):
            took, burst = ms[model, counts, "fused"]
            mine = f"**{took:.2f}**" if counts == "equal" else f"{took:.2f}"
            cells = " | ".join(f"{ms[model, counts, name][0]:.{digits}f}" for name, digits in others)
            assert f"| {model}{shown} | {mine} ({burst:.2f}) | {cells} |" in text
    deepseek, qwen = (
        [ms[model, counts, "fused"][0] for counts in ("equal", "skewed")]
        for model in ("DeepSeek-V2-Lite", "Qwen3-30B-A3B")
    )
    cost = [100 * (skewed / equal - 1) for equal, skewed in (deepseek, qwen)]
    assert f"Imbalance of 4 : 1 costs {cost[0]:.1f} and {cost[1]:.1f} %" in text
    models = dict.fromkeys(model for model, *_ in ms)
    gain = [ms[model, "equal", "grouped BF16"][0] / ms[model, "equal", "fused"][0] for model in models]
    assert f"{gain[0]:.2f} and {gain[1]:.2f} times as fast as torch's grouped BF16" in text


def test_tensor_parallelism_over_four_is_the_rows():
    """Steps, memory and factors of README.md, docs/results.md and docs/performance.md, of arms of one call each."""
    with (ROOT / "benchmarks/results/eight.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["shape"].startswith("175b") and row["nproc"] == "4"]
    of = {(row["commit"], row["system"], row["mbs"]): row for row in rows}
    for commit, size in (("08764dd4", "1"), ("08764dd4", "2"), ("679d2ac", "4")):
        te, stock, ours = (of[commit, system, size] for system in ("te-delayed-graph", "bf16", "O3-graph"))
        cells = [
            f"{float(row['ms']):.1f} ({1.048576 * float(row['gb']):.1f} / {1.048576 * float(row['gb_peak']):.1f})"
            for row in (stock, te, ours)
        ]
        factors = [float(row["ms"]) / float(ours["ms"]) for row in (te, stock)]
        cell = f"{' | '.join(cells)} | {factors[0]:.2f} |"
        assert cell in page("docs/results.md") and (size != "1" or cell in page("README.md"))
        peak = float(ours["gb_peak"]) / float(stock["gb_peak"])
        assert f"| {size} | {factors[0]:.2f} | {factors[1]:.2f} | {peak:.2f} |" in page("docs/performance.md")


def test_the_longest_sequences_are_the_rows():
    """docs/long_context.md's table: what fits with its peak, and what does not."""
    with (ROOT / "benchmarks/results/long_context.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["shape"] == "llama3-8b"]
    starts = {
        "O3-fp8-activations": "| O3 with `--fp8-activations` | ",
        "O3-long": "| the same with",
        "bf16": "| stock BF16",
        "te-delayed": "| Transformer Engine FP8, delayed",
    }
    lines = (ROOT / "docs/long_context.md").read_text().replace("**", "").splitlines()
    assert {row["system"] for row in rows} == set(starts)
    for row in rows:
        start = starts[row["system"]]
        (line,) = (line for line in lines if line.startswith(start) and "fit" in line)
        cell = line.split(" | ")[int(row["nproc"])]
        length = f"{int(row['sequence']):,}"
        assert (f"{length} do not" if row["outcome"] == "out of memory" else f"({float(row['peak_gb']):.1f}") in cell
        assert length in cell
    fits = {row["system"]: int(row["sequence"]) for row in rows if row["nproc"] == "2" and row["peak_gb"]}
    times = fits["O3-fp8-activations"] / fits["bf16"]
    assert f"takes {times:.1f} times as long a sequence as stock BF16" in page("docs/long_context.md")
