"""The recipes that stresses compare. A name begins with its level, whose colour it gets in every figure.

"As Transformer Engine" and "as FP8-LM" are emulated by our own flags: scaling, formats and sums are theirs, kernels are
ours. If Transformer Engine is installed, it runs too.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Arm:
    """A recipe: a level with flags, as `megatron_fp8.enable` takes them, or Transformer Engine's.

    Attributes:
        name: in tables and figures.
        level, flags: of ours. level None: stock with Transformer Engine's layers; flags are TransformerConfig's.
    """

    name: str
    level: str | None
    flags: dict[str, Any] = field(default_factory=dict)

    def but(self, name: str, **flags: Any) -> "Arm":
        """The same recipe with other flags."""
        return Arm(name, self.level, {**self.flags, **flags})


BF16 = Arm("BF16", "O1", {"gemm": "bf16", "grad_accum": "fp32", "grad_reduce": "fp32"})
O1 = Arm("O1", "O1")
O3 = Arm("O3", "O3")
MARGIN = O3.but("O3, margin 2", margin=2)
HISTORY = O3.but("O3, history 16, max", amax_history_len=16, amax_compute_algo="max")
BOTH = O3.but("O3, history 16, max, margin 1", amax_history_len=16, amax_compute_algo="max", margin=1)
LONG = O3.but("O3, history 1024, max", amax_history_len=1024, amax_compute_algo="max")
CURRENT = O3.but("O3, tensorwise", recipe="tensorwise")
WITHOUT_FC2 = O3.but("O3, fc2 in BF16", bf16_layers="*.linear_fc2")
AS_TE_DELAYED = O1.but("O1 as TE delayed", amax_history_len=1024, amax_compute_algo="max")
AS_TE_CURRENT = O1.but("O1 as TE current", recipe="tensorwise")
AS_PAPER = Arm(
    "O2 as FP8-LM",
    "O2",
    {
        "master": "fp16", "grad_accum": "fp8", "grad_reduce": "shared",
        "amax_history_len": 1024, "amax_compute_algo": "max",
    },
)  # fmt: skip
_TE = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
TE_DELAYED = Arm("TE, delayed", None, _TE)
TE_CURRENT = Arm("TE, current", None, {"fp8": "hybrid", "fp8_recipe": "tensorwise"})
