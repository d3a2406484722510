"""Finds the files that come with the package: configs/, scripts/ and the entry point.

They are beside the package in a checkout, and inside it in an installed wheel (setup.py).
"""

from pathlib import Path


def shipped(name: str) -> Path:
    """The path of a file or folder with this name in the repository."""
    package = Path(__file__).resolve().parent
    inside = [path for path in (package / name, package / "scripts" / name) if path.exists()]
    return inside[0] if inside else package.parent / name
