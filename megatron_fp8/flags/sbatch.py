"""What a script's #SBATCH lines take of what a user gave."""

import re
from pathlib import Path

from ..errors import UserError


def check_options(options: str) -> None:
    """UserError for an --sbatch whose rest would be a command of the script."""
    if re.match(r"[^-]", options) or "\n" in options:
        raise UserError(f"--sbatch {options!r}: give options, which begin with a dash, on one line")


def check_path(what: str, path: Path) -> None:
    """UserError for a path that Slurm's own quotes cannot hold."""
    if re.search(r'["\\\n]', str(path)):
        raise UserError(f"{what} {str(path)!r}: Slurm takes no quote, backslash or line break in a path; use another")


def output(folder: Path, name: str) -> str:
    """The option for a file of output in a folder, in whose own name Slurm is to fill in nothing."""
    return f'--output="{str(folder).replace("%", "%%")}/{name}"'
