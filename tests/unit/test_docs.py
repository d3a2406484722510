"""README and the pages of docs/ name links, files, verbs and flags that exist; README's steps are measured ones."""

import argparse
import ast
import csv
import re
from pathlib import Path

import pytest
from launch import ROOT

from megatron_fp8.cli import VERBS

PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```.*?^ *```", re.M | re.S)
FILE = re.compile(r"(?<![\w/.$~-])((?:[\w-]+/)*[\w-]+\.(?:py|md|csv|yaml|sh|svg|xz|cuh|sbatch))\b")
# What a page calls a file without: the folder that it is about.
FOLDERS = ". megatron_fp8 megatron_fp8/ops megatron_fp8/gemm megatron_fp8/tools megatron_fp8/tools/perf".split()
FOLDERS += "benchmarks benchmarks/results tools tests/unit".split()
# What a reader is told to write, what a run writes, and Megatron's script.
ELSEWHERE = {"mine.yaml", "a.yaml", "b.yaml", "report.md", "runs.md", "loss.svg", "pretrain_gpt.py"}
# torchrun's, Slurm's, nvidia-smi's; and one of `megatron-fp8 memory`, which makes it of an argument's name.
OTHERS = set(
    "--rdzv-id --rdzv-backend --rdzv-endpoint --partition --signal --export --query-gpu --data-parallel-size".split()
)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them: small letters, hyphens for blanks, no other signs."""
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
    """Of our verbs, scripts and benchmarks: the words of their sources that are flags."""
    words = set((ROOT / "scripts/slurm/train.sbatch").read_text().split())
    folders = (ROOT / folder for folder in ("megatron_fp8", "benchmarks", "tools"))
    for files in (ROOT.glob("*.py"), *(folder.rglob("*.py") for folder in folders)):
        for path in files:
            nodes = ast.walk(ast.parse(path.read_text()))
            words |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {word for word in words if re.fullmatch(r"--[a-z][a-z0-9-]*", word)}


def unknown_flags(text: str, known: set[str]) -> set[str]:
    """Of those that are whole: "--log-interval-th" is not, nor what three dots cut off."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9](?<!-th)(?![\w-]| \.\.\.)", text)) - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page):
    assert broken_links(page) == [] and missing_files(page) == []


def test_verbs_exist():
    verbs = {verb for page in PAGES for verb in re.findall(r"(?:^|`)megatron-fp8 +([a-z]+)\b", page.read_text(), re.M)}
    assert len(verbs) > 8 and verbs <= set(VERBS)


def test_flags_exist(parser: argparse.ArgumentParser):
    known = OTHERS | own_flags() | {flag for action in parser._actions for flag in action.option_strings}
    pages = [page for page in PAGES if page.name != "flags.md"]  # which is written from the code
    assert {page.name: found for page in pages if (found := unknown_flags(page.read_text(), known))} == {}


def test_readmes_steps_are_measured():
    """A step with its memory is a row of a CSV, and the last column what O3 gains on Transformer Engine."""
    files = (ROOT / "benchmarks/results").glob("train_step*.csv")
    rows = [row for file in files for row in csv.DictReader(file.read_text().splitlines())]
    # The CSVs' "GB" are 1,000 MiB, as Megatron's log counts; README's are 10^9 bytes.
    measured = [(float(row["ms"]), *(float(row[name]) * 1.048576 for name in ("gb", "gb_peak"))) for row in rows]
    step = re.compile(r"([\d.]+) \((?:[a-z ]+; )?([\d.]+) / ([\d.]+)\)")
    table = re.search(r"^\| ms a step.*?\n\n", (ROOT / "README.md").read_text(), re.M | re.S)[0].replace("*", "")
    shown = [tuple(map(float, found)) for found in step.findall(table)]
    assert len(shown) > 12
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


def test_what_does_not_exist_is_found(tmp_path):
    page = tmp_path / "page.md"
    links = "# A heading\n[good](#a-heading) [bad](#no-heading) [gone](no.md)\n"
    page.write_text(f"{links}`gemm/interface.py` `ops/no.py` --no --lr, every --log-interval-th\n")
    assert broken_links(page) == ["#no-heading", "no.md"] and missing_files(page) == ["no.md", "ops/no.py"]
    assert unknown_flags(page.read_text(), {"--lr"}) == {"--no"}
