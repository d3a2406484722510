"""Checks and formats a user's values for the #SBATCH lines of a Slurm script."""

import re
from pathlib import Path

from ..errors import UserError


def check_options(options: str) -> None:
    """Raise UserError for an --sbatch value that could end up as a command of the script."""
    if re.match(r"[^-]", options) or "\n" in options:
        raise UserError(f"--sbatch {options!r}: not options; give options that begin with a dash, on one line")


def check_path(what: str, path: Path) -> None:
    """Raise UserError for a path that cannot stand in Slurm's quotes."""
    if re.search(r'["\\\n]', str(path)):
        raise UserError(f"{what} {str(path)!r}: Slurm allows no quote, backslash or line break in a path; use another")


def output(folder: Path, name: str) -> str:
    """The --output option for a file in a folder. Slurm fills in patterns (%j) in `name`, but not in the folder."""
    return f'--output="{str(folder).replace("%", "%%")}/{name}"'
