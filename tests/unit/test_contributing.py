"""CONTRIBUTING.md by the book: what its code blocks say is done to a copy of the package, which then trains."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launch import ROOT, forked
from megatron_runs import ANEW, TINY_GPT

PAGE = ROOT / "CONTRIBUTING.md"
SECTIONS = "Add a GEMM backend", "Add an observer", "Add a hook"
FEW = "--train-iters 3 --lr-decay-iters 10 --global-batch-size 2 --fp8-level O3 --fp8-gemm-backend decoded".split()


def blocks(section: str) -> list[tuple[str, str]]:
    """[(language, text)] of a section's code blocks."""
    text = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)


def apply(diff: str, folder: Path) -> None:
    """A block in a diff's form: " context", "-old" and "+new" lines under "--- FILE".

    Each old line, or the one of context, is in the file once; its indentation is the file's.
    """
    header, *lines = diff.splitlines()
    path = folder / header.removeprefix("--- ")
    (at,) = (line[1:].strip() for line in lines if line[0] in " -")
    new = textwrap.dedent("\n".join(line[1:] for line in lines if line[0] == "+")).splitlines()
    there = path.read_text().splitlines()
    (place,) = (i for i, line in enumerate(there) if line.strip() == at)
    indent = there[place][: len(there[place]) - len(there[place].lstrip())] + " " * 4 * at.endswith("(")
    kept = [there[place]] if lines[0][0] == " " else []
    there[place : place + 1] = [*kept, *(indent + line for line in new)]
    path.write_text("\n".join(there) + "\n")


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The repository as somebody has it who did what the page says."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "megatron_fp8", folder / "megatron_fp8", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pretrain_gpt_fp8.py", folder)
    for section in SECTIONS:
        for language, text in blocks(section):
            if language == "diff":
                apply(text, folder)
            else:
                path = folder / re.match(r"# (\S+)\n", text)[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    return folder


@pytest.mark.slow  # the page's test of the backend; the other one trains with it
def test_the_backends_test_passes(copy):
    """And it is a test: the reference is not the same to the bit."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_decoded.py"]
    env = {**os.environ, "PYTHONPATH": str(copy), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def test_it_trains_with_the_backend_the_observer_and_the_hook(copy):
    """One process at O3: the backend multiplies all that is FP8, the observer names a linear each step, and the hook is
    there in the first."""
    count = f"{ANEW}import os; os.chdir({str(copy)!r})\n"
    count += "import atexit, megatron_fp8.gemm.decoded as d; made = []; stock = d.Decoded.product\n"
    count += "d.Decoded.product = lambda *given: made.append(0) or stock(*given)\n"
    count += "atexit.register(lambda: print('products', len(made)))\n"
    count += "import runpy; runpy.run_path('pretrain_gpt_fp8.py', run_name='__main__')"
    (copy / "counted.py").write_text(count)
    env = {"PYTHONPATH": str(copy), "CUDA_VISIBLE_DEVICES": ""}
    said = "\n".join(forked(1, [str(copy / "counted.py"), *TINY_GPT, *FEW], copy / "log", timeout=300, env=env))
    assert len(re.findall(r"^\[fp8\] iteration [123]: largest input [\d.e+-]+ decoder\.layers\.", said, re.M)) == 3
    products = 8 * 3 * 3  # linears, products, steps
    assert int(re.search(r"products (\d+)", said)[1]) == products
    assert len(re.findall(r" lm loss: ", said)) == 3
    assert re.findall(r"^\[fp8\] iteration (\d+): the first step took \d+\.\d s", said, re.M) == ["1"]
