"""Runs kernel tests of tests/gpu on a CPU, in Triton's interpreter: the files that use INTERPRETED (interpreter.py).

The interpreter takes milliseconds for each program of a kernel. So every change runs a twentieth of each test's cases,
the first of each test among them, and the nightly tests run all.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launch import ROOT

from megatron_fp8 import processes

FILES = sorted(path for path in Path(ROOT / "tests/gpu").glob("test_*.py") if "INTERPRETED" in path.read_text())


@pytest.fixture(scope="module")
def interpreter():
    pytest.importorskip("triton")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "tests/interpreter.py"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        processes.stop(psutil.Process(process.pid))


@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(20, id="a twentieth")]
)
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem.removeprefix("test_").removesuffix("_cuda"))
def test_kernels_agree_with_the_reference(file, every, interpreter):
    print(file, every, file=interpreter.stdin, flush=True)
    code, output = json.loads(interpreter.stdout.readline())
    assert code == 0 and " passed" in output, output
