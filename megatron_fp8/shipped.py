"""Files that come with the package, configs/, scripts/ and the entry point: in a checkout beside it, in an installed
wheel inside it (setup.py)."""

from pathlib import Path


def shipped(name: str) -> Path:
    """The path of such a file or folder, by its name in the repository."""
    package = Path(__file__).resolve().parent
    inside = [path for path in (package / name, package / "scripts" / name) if path.exists()]
    return inside[0] if inside else package.parent / name
