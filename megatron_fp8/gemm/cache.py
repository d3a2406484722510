"""The folder for files that were built or measured on this machine: $MEGATRON_FP8_CACHE, or ~/.cache/megatron_fp8."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder's path. Raises OSError if the user has no home directory."""
    try:
        return Path(os.environ.get("MEGATRON_FP8_CACHE") or Path.home() / ".cache" / "megatron_fp8")
    except RuntimeError as error:
        raise OSError(str(error)) from error
