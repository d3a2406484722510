"""Stock Megatron-LM trains in FP8 with one more flag, --fp8-level. To import it changes nothing."""


def __getattr__(name: str) -> str:
    """`__version__`: that of pyproject.toml, as the installed package's metadata have it; "unknown" of a checkout that
    is not installed. Looked up when it is asked for: training never does."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("megatron-fp8")
    except PackageNotFoundError:
        return "unknown"
