"""What a benchmark's rows say of the code that was measured."""

import os
import subprocess
from pathlib import Path


def commit() -> str:
    """The commit, with "-dirty" where files were changed; COMMIT of the environment, for a copy without .git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--match="]
    git = subprocess.run(command, capture_output=True, text=True)
    return os.environ.get("COMMIT") or git.stdout.strip() or "unknown"
