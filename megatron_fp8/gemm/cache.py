"""Where a machine keeps what was built or measured on it: $MEGATRON_FP8_CACHE, or ~/.cache/megatron_fp8."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Raises OSError where it is nowhere, as the user nobody has no home."""
    try:
        return Path(os.environ.get("MEGATRON_FP8_CACHE") or Path.home() / ".cache" / "megatron_fp8")
    except RuntimeError as error:
        raise OSError(str(error)) from error
