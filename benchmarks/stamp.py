"""What a benchmark's rows say of the code that was measured; and that this code is what a benchmark imports.

Imported before megatron_fp8 it puts this checkout first, whatever is installed: `python benchmarks/X.py` measures what
lies beside it, and `commit` names it. The tools (launch.py, ...) are found too.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]


def commit() -> str:
    """The commit, with "-dirty" where files were changed; COMMIT of the environment, for a copy without .git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--match="]
    git = subprocess.run(command, capture_output=True, text=True)
    return os.environ.get("COMMIT") or git.stdout.strip() or "unknown"
