"""A GPU and its network for the cost model, read from a file of configs/hardware or a user's file of the same form.

Each file gives the source of every value. The rates are those within a training step, not of a kernel alone: a GPU that
never idles is limited by power (docs/performance.md).
"""

import math
from dataclasses import dataclass, fields
from pathlib import Path

from ...errors import UserError
from ...flags.yaml_file import load_yaml
from ...shipped import shipped

# The model divides by none of these.
_MAY_BE_0 = ("beside_allocator_gb", "fp8_forward_fixed_k", "fp8_backward_fixed_k", "bf16_fixed_k", "attention_length",
             "attention_head", "border_ms", "layer_gap_ms", "host_ms", "host_layer_ms", "collective_ms")  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """configs/hardware/h200.yaml explains each number; GB are 10^9 bytes."""

    name: str
    memory_gb: float
    beside_allocator_gb: float
    peak_bf16_tflops: float
    peak_fp8_tflops: float
    fp8_forward_tflops: float
    fp8_forward_fixed_k: float
    fp8_backward_tflops: float
    fp8_backward_fixed_k: float
    bf16_tflops: float
    bf16_fixed_k: float
    head_tflops: float
    attention_tflops: float
    attention_length: float
    attention_head: float
    copy_gb_s: float
    border_ms: float
    layer_gap_ms: float
    host_ms: float
    host_layer_ms: float
    gpus_per_node: int
    nvlink_gb_s: float
    network_gb_s: float
    collective_ms: float

    def room(self, cap_gb: float | None = None) -> float:
        """GB that torch's allocator may use; cap_gb: a lower or higher limit, by hand."""
        return self.memory_gb - self.beside_allocator_gb if cap_gb is None else cap_gb

    def pass_ms(self, moved: float) -> float:
        """Milliseconds to move `moved` bytes of the GPU's memory."""
        return moved / self.copy_gb_s / 1e6


def known() -> dict[str, Path]:
    """{name: file} of the hardware that the package ships."""
    return {file.stem: file for file in sorted(shipped("configs/hardware").glob("*.yaml"))}


def load(name: str) -> Hardware:
    """The hardware of a shipped name or of a file's path.  Raises UserError if the file is incomplete or wrong."""
    path = known().get(name, Path(name))
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise UserError(f"--hardware {name}: {what}; give a YAML file, or one of {', '.join(known())}")
    given = load_yaml(path, f"--hardware {name}", "see configs/hardware/h200.yaml")
    if not isinstance(given, dict):
        raise UserError(f"--hardware {name}: has no lines NAME: VALUE; see configs/hardware/h200.yaml")
    for field in fields(Hardware):
        if field.name not in given:
            raise UserError(f"--hardware {name}: {field.name} is missing; add it, as in configs/hardware/h200.yaml")
        value = given[field.name]
        if field.name == "name":
            if not isinstance(value, str):
                raise UserError(f"--hardware {name}: name is {value}; give a word, as in h200.yaml")
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UserError(f"--hardware {name}: {field.name} is {value}; give a number, as in h200.yaml")
        if value == 0 and field.name not in _MAY_BE_0:
            raise UserError(f"--hardware {name}: {field.name} is {value}; give more than 0, as in h200.yaml")
        if field.name == "gpus_per_node" and not isinstance(value, int):
            raise UserError(f"--hardware {name}: {field.name} is {value}; give a whole number")
    if unknown := sorted(given.keys() - {field.name for field in fields(Hardware)}):
        raise UserError(f"--hardware {name}: {unknown[0]} is not a name that the model knows; remove it")
    return Hardware(**given)
