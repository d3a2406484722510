"""Count the kernels that Triton compiles in this process, and those that it finds in its cache, with Triton's listener.

Triton keeps a compiled kernel in a folder that all processes of a machine read: $TRITON_CACHE_DIR, or ~/.triton/cache.
The key is the kernel's source, its constants, its arguments' types, which of them are 1 or multiples of 16, the GPU's
architecture and Triton's version. torch.compile's kernels (stock's fused parts) have a cache of their own and are not
counted.
"""

from typing import Any


class Kernels:
    """Attributes: compiled, found: hashes of kernels that were compiled, or were cached; seconds: of compiling."""

    def __init__(self) -> None:
        self.compiled: set[str] = set()
        self.found: set[str] = set()
        self.seconds = 0.0

    def listen(self) -> None:
        """Make Triton report what it compiles from now on."""
        import triton

        triton.knobs.compilation.listener = self._hear

    def _hear(self, *, metadata: dict[str, Any], times, cache_hit: bool, **_: Any) -> None:
        (self.found if cache_hit else self.compiled).add(metadata["hash"])
        self.seconds += 0.0 if cache_hit else times.total / 1e6

    def counts(self) -> dict[str, Any]:
        """The counts and the folder of the cache, for a line of JSON."""
        import triton

        return {
            "compiled": len(self.compiled), "in_cache": len(self.found - self.compiled),
            "compile_seconds": self.seconds, "cache": triton.knobs.cache.dir,
        }  # fmt: skip
