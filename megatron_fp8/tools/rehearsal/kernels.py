"""The kernels that Triton compiles in this process, and those that it finds in its cache, counted by its own listener.

Triton keeps a compiled kernel in a folder that all processes of a machine read: $TRITON_CACHE_DIR, or ~/.triton/cache.
What names it there is its source, its constants, its arguments' types, which of them are 1 or multiples of 16, the
GPU's architecture and Triton's version. What torch.compile makes (stock's fused parts) is in a cache of its own, and is
not counted.
"""

from typing import Any


class Kernels:
    """Attributes: compiled, found: hashes, of kernels that were compiled and that were there; seconds: of compiling."""

    def __init__(self) -> None:
        self.compiled: set[str] = set()
        self.found: set[str] = set()
        self.seconds = 0.0

    def listen(self) -> None:
        """Have Triton say what it compiles from now on."""
        import triton

        triton.knobs.compilation.listener = self._hear

    def _hear(self, *, metadata: dict[str, Any], times, cache_hit: bool, **_: Any) -> None:
        (self.found if cache_hit else self.compiled).add(metadata["hash"])
        self.seconds += 0.0 if cache_hit else times.total / 1e6

    def counts(self) -> dict[str, Any]:
        """For a line of JSON; with the folder of the cache."""
        import triton

        return {
            "compiled": len(self.compiled), "in_cache": len(self.found - self.compiled),
            "compile_seconds": self.seconds, "cache": triton.knobs.cache.dir,
        }  # fmt: skip
