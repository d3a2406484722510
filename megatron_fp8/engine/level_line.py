"""The log line that says which parts of a run are in FP8. It comes just before the first iteration's line."""

from ..flags.config import Fp8Config
from .names import ranges
from .owned_weight import told_of_all

_STATES = {"fp32": "FP32", "bf16": "BF16", "fp16": "FP16", "fp8": "FP8", "remainder": "16 bits beside the weight"}
_WIRES = {"block": "FP8 blocks", "shared": "FP8 of one scale", "fp32": "FP32"}


def level_line(fp8: Fp8Config, chunks, gemms: str) -> str:
    """The line, about the whole model; collective as `told_of_all`. gemms: the name of the FP8 GEMMs' backend."""
    linears = dict(told_of_all(chunks, lambda weight: (weight.name, weight.fp8)))
    kept = [name for name, in_fp8 in linears.items() if not in_fp8]
    count = len(linears) - len(kept)
    parts = [f"{fp8.level}: the GEMMs of {count} of {len(linears)} linears are in FP8"]
    if fp8.emulate is not None:  # perhaps without a level
        parts = [f"the GEMMs of the linears are in BF16, their operands rounded: {fp8.emulate}"]
    elif fp8.gemm == "bf16":
        parts[0] += " (--fp8-gemm bf16)"
    if count:
        formats = " and ".join(dict.fromkeys([fp8.forward_format.name.upper(), fp8.grad_format.name.upper()]))
        parts[0] += f" ({formats}, {fp8.recipe} scales, by {gemms})"
    if kept and count:
        parts.append(f"in BF16 are {ranges(kept)}")
    if fp8.lm_head:
        parts.append("the LM head's are too")
    parts += [
        f"weights {_STATES[fp8.weight]}",
        f"moments {_STATES[fp8.exp_avg]} and {_STATES[fp8.exp_avg_sq]}",
        f"masters {_STATES[fp8.master]}",
        f"weight gradients {_STATES[fp8.grad_accum]}, summed over ranks in {_WIRES[fp8.grad_reduce]}",
    ]
    return "; ".join(parts)
