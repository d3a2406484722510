"""Adds adapters (LoRA) to the weights that they stand beside: W + B A, for `convert to-hf --merge-adapters`.

    decoder.layers.mlp.linear_fc2.weight    W    (layers, n, k)
    decoder.layers.mlp.linear_fc2.lora_a    A    (layers, r, k)
    decoder.layers.mlp.linear_fc2.lora_b    B    (layers, n, r), or (layers, 2, n / 2, r) beside a gated linear_fc1

These are the names and shapes of examples/lora.py, at every tensor-parallel size: a checkpoint's tensors are whole. It
has alpha = rank, so B A has no factor. The sum is made in FP32, and rounded once as it is written. Earlier that script
named them `a` and `b`, and at a level A read the norm's input beside linear_qkv and linear_fc1, W its result: B A is no
part of W there.

Rounding may lose an adapter. If W lies on the grid that the sum is rounded to, as an O3 base's does on E4M3's, a change
of less than half a step is gone. So the share of the change that was written is measured, over all linears:

    sum(change * (written - W)) / sum(change^2)         change = B A; 1 if rounding has no bias
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import UserError
from .hf.families import LINEARS, Parameter

FLAG = "--merge-adapters"
KINDS = "lora_a", "lora_b"
EARLIER = "a", "b"


class Adapters:
    """The adapters of a checkpoint.

    Attributes:
        names: of their tensors.
        written, wanted: the sums of the quotient above, over all linears so far.
    """

    def __init__(self, stored: Iterable[str]):
        beside = {module + kind for module in LINEARS for kind in KINDS}
        self.names = {name for name in stored if name in beside}
        self.written = self.wanted = 0.0

    def check(self, folder: Any, stored: Mapping[str, Any], parameters: Iterable[Parameter], layers: int) -> None:
        """Raise UserError unless there are adapters, and all have the shapes above."""
        if earlier := sorted({module + kind for module in LINEARS for kind in EARLIER} & stored.keys()):
            reads = "at a level its A reads the norm's input beside linear_qkv and linear_fc1, and W the norm's result"
            raise UserError(f"{FLAG}: {folder}: {earlier[0]} is of an older examples/lora.py; {reads}: train it again")
        if not self.names:
            raise UserError(f"{FLAG}: {folder} has no adapters named as those of examples/lora.py; remove the flag")
        for parameter in (p for p in parameters if p.is_linear_weight):
            shapes = [tuple(stored[name].size) if name in self.names else None for name in self._beside(parameter)]
            if shapes == [None, None]:
                continue
            a, b = shapes
            rank, (n, k) = a[1] if a is not None and len(a) == 3 else 0, parameter.shape
            if a != (layers, rank, k) or b not in ((layers, n, rank), (layers, 2, n // 2, rank)):
                raise UserError(f"{FLAG}: {folder}: adapters of shapes {a} and {b} do not fit {parameter.name}")

    def changes(
        self, parameter: Parameter, load: Callable[[str], torch.Tensor]
    ) -> Callable[[int], torch.Tensor] | None:
        """B A of a layer, FP32 (n, k), by its index; None if the parameter has no adapter. load: reads a tensor."""
        names = self._beside(parameter)
        if not parameter.is_linear_weight or names[0] not in self.names:
            return None
        a, b = (load(name).float() for name in names)
        return lambda layer: b[layer].flatten(0, -2) @ a[layer]

    def count(self, change: torch.Tensor, weight: torch.Tensor, written: torch.Tensor) -> None:
        """Measure one layer's. weight: before the change; written: after rounding."""
        change = change.double()
        self.wanted += change.square().sum().item()
        self.written += (change * (written.double() - weight.double())).sum().item()

    def line(self) -> str:
        share = self.written / self.wanted if self.wanted else 1.0
        return f"{FLAG}: {len(self.names) // 2} kinds of linears; {100 * share:.1f} % of the change is in the weights"

    def _beside(self, parameter: Parameter) -> list[str]:
        return [parameter.name.removesuffix("weight") + kind for kind in KINDS]
