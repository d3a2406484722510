"""pretrain_gpt_fp8.py, and to the folder $OPS_CALLED what it asked of our operations, a line for each kind of call.

A kind is all that Triton could compile anew for: types and sizes of tensors, flags, numbers, but for floats and seeds.
On the CPU the oracles answer, so these are watched, with Adam's and the GEMM.
"""

import dataclasses
import os
import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from megatron_fp8 import ops
from megatron_fp8.gemm.interface import Reference
from megatron_fp8.ops import adam

WATCHED = {op.__wrapped__.__code__: name for name, op in vars(ops).items() if hasattr(op, "__wrapped__")}
WATCHED |= {adam.adam_step.__code__: "adam_step", Reference.product.__code__: "gemm"}
NOT_CONSTANT = ("seed", "step")  # which differ from call to call, and no kernel is compiled for


def kind(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}({fields({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})})"
    if isinstance(value, tuple | list):
        return f"({' '.join(map(kind, value))})"
    return "float" if isinstance(value, float) else str(value)


def fields(values: dict) -> str:
    return " ".join(f"{name}={kind(value)}" for name, value in values.items() if name not in NOT_CONSTANT)


def watch() -> set[str]:
    """The kinds of calls from now on."""
    called = set[str]()

    def begins(code, offset) -> None:
        frame = sys._getframe(1)
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = {name: frame.f_locals[name] for name in given if name != "self"}
        called.add(f"{WATCHED[code]} {fields(values)}")

    tool = sys.monitoring.PROFILER_ID
    sys.monitoring.use_tool_id(tool, "operations")
    sys.monitoring.register_callback(tool, sys.monitoring.events.PY_START, begins)
    for code in WATCHED:
        sys.monitoring.set_local_events(tool, code, sys.monitoring.events.PY_START)
    return called


if __name__ == "__main__":
    called = watch()
    try:
        runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
    finally:
        file = Path(os.environ["OPS_CALLED"]) / f"rank-{os.environ['RANK']}.txt"
        file.write_text("".join(f"{line}\n" for line in sorted(called)))
