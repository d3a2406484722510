"""Stock Megatron-LM trains in FP8 with one more flag, --fp8-level; other trainers by enable(). To import it changes
nothing."""

from typing import Any


def enable(level: str = "O3", **flags: Any) -> None:
    """Train what this process builds from now on at a level, without Megatron's parser: plugin.enable, trainer.py."""
    from .plugin import enable

    enable(level, **flags)


def __getattr__(name: str) -> str:
    """`__version__`: the installed package's version, or "unknown" for a checkout that is not installed.

    Looked up on demand: training never needs it.
    """
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("megatron-fp8")
    except PackageNotFoundError:
        return "unknown"
