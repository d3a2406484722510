"""Which megatron_fp8 this is, for people: the version of pyproject.toml, and the commit."""

import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
COMMIT = "COMMIT.txt"  # of the package's folder, if setup.py has built it


def commit() -> str:
    """Of the checkout, with "-dirty" if files were changed, or of what was built; "" if it is not known."""
    try:
        if (FOLDER.parent / ".git").exists():
            command = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty", "--match="]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        return (FOLDER / COMMIT).read_text().strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def described() -> str:
    """As "0.1.0, commit 4dbfdcd"."""
    from . import __version__  # a look through all packages, which no verb waits for

    found = commit()
    return __version__ + (f", commit {found}" if found else "")
