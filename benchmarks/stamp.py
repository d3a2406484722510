"""The commit for a benchmark's rows, and the import path that makes it true.

Importing this before megatron_fp8 puts this checkout first, whatever is installed. So `python benchmarks/X.py` measures
the code beside it, and `commit` names that code. The tools (launch.py, ...) are found too.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]


def commit() -> str:
    """The commit, with "-dirty" if files were changed. The variable COMMIT overrides it, for a copy without .git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--match="]
    git = subprocess.run(command, capture_output=True, text=True)
    return os.environ.get("COMMIT") or git.stdout.strip() or "unknown"


def cpu() -> str:
    """The CPU's kind, for rows that no GPU made."""
    import torch

    return f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}"
