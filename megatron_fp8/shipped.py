"""Files that come with the package, configs/ and scripts/: in a checkout beside it, in an installed wheel inside it."""

from pathlib import Path


def shipped(name: str) -> Path:
    """The path of such a file or folder, by its name in the repository."""
    inside, beside = (Path(__file__).resolve().parents[n] / name for n in (0, 1))
    return inside if inside.exists() else beside
