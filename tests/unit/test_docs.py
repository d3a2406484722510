"""Pages name links, files, verbs and flags that exist; README, its picture and docs/results.md show measured rows."""

import argparse
import ast
import csv
import itertools
import re
from pathlib import Path

import make_results_figure
import pytest
from launch import ROOT

from megatron_fp8.cli import VERBS

TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^ *```.*?^ *```", re.M | re.S)
FILE = re.compile(r"(?<![\w/.$~-])((?:[\w-]+/)*[\w-]+\.(?:py|md|csv|yaml|sh|svg|xz|cuh|sbatch))\b")
# What a page calls a file without: the folder that it is about.
FOLDERS = ". megatron_fp8 megatron_fp8/ops megatron_fp8/gemm megatron_fp8/tools megatron_fp8/tools/perf".split()
FOLDERS += "benchmarks benchmarks/results tools tests/unit".split()
# What a reader is told to write, what a run writes, and Megatron's script.
ELSEWHERE = {"mine.yaml", "a.yaml", "b.yaml", "report.md", "runs.md", "loss.svg", "pretrain_gpt.py"}
ELSEWHERE |= {f"megatron_fp8/{name}.py" for name in ("gemm/decoded", "monitor/largest", "monitor/first_step")}
ELSEWHERE.add("tests/unit/test_decoded.py")
# torchrun's, Slurm's, nvidia-smi's, pip's; and those that `megatron-fp8 memory` makes of an argument's name.
OTHERS = set(
    "--rdzv-id --rdzv-backend --rdzv-endpoint --partition --signal --export --query-gpu --data-parallel-size".split()
) | {"--master-port", "--no-deps", "--dpo-reference", "--frozen-base"}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings in GitHub's form: lower case, hyphens for blanks, no other signs."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    return broken


def missing_files(page: Path) -> list[str]:
    named = {name for name in FILE.findall(page.read_text()) if name not in ELSEWHERE and not name.startswith("runs/")}
    folders = [page.parent, *(ROOT / folder for folder in FOLDERS)]
    return sorted(name for name in named if not any((folder / name).exists() for folder in folders))


def own_flags() -> set[str]:
    """The flags of our verbs, scripts and benchmarks: all flag-like words in their sources."""
    words = set((ROOT / "scripts/slurm/train.sbatch").read_text().split())
    folders = (ROOT / folder for folder in ("megatron_fp8", "benchmarks", "tools"))
    for files in (ROOT.glob("*.py"), *(folder.rglob("*.py") for folder in folders)):
        for path in files:
            nodes = ast.walk(ast.parse(path.read_text()))
            words |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {word for word in words if re.fullmatch(r"--[a-z][a-z0-9-]*", word)}


def unknown_flags(text: str, known: set[str]) -> set[str]:
    """Only whole flags count: not "--log-interval-th", nor one that three dots cut."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9](?<!-th)(?![\w-]| \.\.\.)", text)) - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page):
    assert broken_links(page) == [] and missing_files(page) == []


def test_verbs_exist():
    verbs = {verb for page in PAGES for verb in re.findall(r"(?:^|`)megatron-fp8 +([a-z]+)\b", page.read_text(), re.M)}
    assert len(verbs) > 8 and verbs <= set(VERBS)


def test_flags_exist(parser: argparse.ArgumentParser):
    known = OTHERS | own_flags() | {flag for action in parser._actions for flag in action.option_strings}
    pages = [page for page in PAGES if page.name != "flags.md"]  # flags.md is generated from the code
    assert {page.name: found for page in pages if (found := unknown_flags(page.read_text(), known))} == {}


@pytest.mark.parametrize("page, least", [("README.md", 10), ("docs/results.md", 30)])
def test_steps_are_measured(page, least):
    """A step with its memory is a row of a CSV, and the last column what O3 gains on Transformer Engine."""
    results = ROOT / "benchmarks/results"
    files = [*results.glob("train_step*.csv"), results / "eight.csv"]
    rows = [row for file in files for row in csv.DictReader(file.read_text().splitlines())]
    # The CSVs' "GB" are 1,000 MiB, as Megatron's log counts; the pages' are 10^9 bytes.
    measured = [(float(row["ms"]), *(float(row[name]) * 1.048576 for name in ("gb", "gb_peak"))) for row in rows]
    step = re.compile(r"([\d.]+) \((?:[a-z ]+; )?([\d.]+) / ([\d.]+)\)")
    table = re.search(r"^\| ms a step.*?\n\n", (ROOT / page).read_text(), re.M | re.S)[0].replace("*", "")
    shown = [tuple(map(float, found)) for found in step.findall(table)]
    assert len(shown) > least
    for one in shown:
        assert any(max(abs(a - b) for a, b in zip(one, row, strict=True)) < 0.051 for row in measured), one
    gains = 0
    for line in table.strip().splitlines()[2:]:
        *_, te, ours, gain = (cell.strip() for cell in line.strip("|").split("|"))
        if gain:
            gains += 1
            ratio = float(step.match(te)[1]) / float(step.match(ours)[1])
            assert abs(ratio - float(gain)) < 0.6 * 10 ** -len(gain.partition(".")[2]), line
    assert gains >= 5


def test_the_picture_shows_table_5():
    """docs/figures/results.svg has the figures of the CSV's rows today, and README's text for it too."""
    with make_results_figure.RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    svg = make_results_figure.PICTURE.read_text()
    said = re.search(r"!\[(.*?)\]\(docs/figures/results.svg\)", README)[1]
    out = 0
    for machine, system in itertools.product(make_results_figure.MACHINES, make_results_figure.SYSTEMS):
        row = make_results_figure.best(rows, system, machine)
        if row is None:
            out += 1
            continue
        tokens, held = f"{float(row['Tokens/sec/GPU']):,.0f}", f"{float(row['Held GB']):.0f}"
        assert f">  {tokens}  (micro-batch {row['MBS']})<" in svg and f">  {held}<" in svg
        assert re.search(rf"{tokens} and {held}\b", said), (machine, system)
    assert out == svg.count("out of memory") / 2 == 2  # a panel each
    one, two = (
        [float(make_results_figure.best(rows, name, machine)["Tokens/sec/GPU"]) for name in make_results_figure.SYSTEMS]
        for machine in ("one H200", "two H200s")
    )
    readme = re.sub(r"\s+", " ", README)
    words = f"{one[2] / one[1]:.2f} times as fast as Transformer Engine's FP8 and {one[2] / one[0]:.2f} times as fast"
    assert f"On one H200 O3 is {words} as stock BF16" in readme
    assert f"on two H200s it is {two[2] / two[1]:.2f} and {two[2] / two[0]:.2f} times as fast" in readme


def test_readme_is_a_door():
    """It is short, and names no commit."""
    assert len(README.splitlines()) < 120
    assert re.findall(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b", README) == []


def test_a_gb_is_the_same_in_all_pages():
    """10^9 bytes, as README says; docs/results.md alone tells of Megatron's, which are 1,000 MiB."""
    assert "A GB is 10^9 bytes" in README
    assert [page.name for page in PAGES if re.search(r"(1,000|thousand)\s+MiB", page.read_text())] == ["results.md"]


def test_what_does_not_exist_is_found(tmp_path):
    page = tmp_path / "page.md"
    links = "# A heading\n[good](#a-heading) [bad](#no-heading) [gone](no.md)\n"
    page.write_text(f"{links}`gemm/interface.py` `ops/no.py` --no --lr, every --log-interval-th\n")
    assert broken_links(page) == ["#no-heading", "no.md"] and missing_files(page) == ["no.md", "ops/no.py"]
    assert unknown_flags(page.read_text(), {"--lr"}) == {"--no"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_code_begin_and_end_on_their_own_lines(page):
    fences = [line.strip() for line in page.read_text().splitlines() if "```" in line]
    assert all(re.fullmatch("```[a-z]*", line) for line in fences) and len(fences) % 2 == 0
