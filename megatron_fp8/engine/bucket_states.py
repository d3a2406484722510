"""Adam's states as the engine holds them: allocated, cut, and moved between their formats and FP32.

    cell value   exp_avg, exp_avg_sq, master                                          bytes an element
    fp32         float32                                                              4
    bf16         bfloat16                                                             2
    fp16         Block16: FP16, a power of two for 128 elements                       2 + 1/128
    fp8          BlockScaled: E4M3, a power of two for 128 elements; of exp_avg_sq    1 + 1/128
                 the root is stored
    remainder    int16, the difference between master and weight                      2

ops/adam.py steps them; numerics/master.py says what each keeps.
"""

import torch

from ..numerics.blocks import BLOCK, BlockScaled
from ..numerics.formats import E4M3
from ..numerics.master import Block16
from ..ops.adam_states import State, read_state, write_state

_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "remainder": torch.int16}


def zeros(kind: str, n: int, device: torch.device | str) -> State:
    """A state of n zeros, n a multiple of 128, in the format that a cell's value names."""
    if kind in _PLAIN:
        return torch.zeros(n, dtype=_PLAIN[kind], device=device)
    exponents = torch.zeros(n // BLOCK, dtype=torch.uint8, device=device)
    if kind == "fp16":
        return Block16(torch.zeros(n, dtype=torch.float16, device=device), exponents)
    return BlockScaled(torch.zeros(n, dtype=E4M3.dtype, device=device), exponents)


def part(state: State, start: int, stop: int) -> State:
    """Views of elements start .. stop, multiples of 128."""
    return state[start:stop] if isinstance(state, torch.Tensor) else state.part(start, stop - start)


def tensors(state: State) -> dict[str, torch.Tensor]:
    """The tensors that a state is made of, by name."""
    if isinstance(state, torch.Tensor):
        return {"payload": state}
    return {"payload": state.payload, "exponents": state.exponents}


def read_average(state: State, *, is_square: bool) -> torch.Tensor:
    """The values (n,) of exp_avg, or with `is_square` of exp_avg_sq, in FP32, exactly."""
    values = read_state(state)
    return values * values if is_square and isinstance(state, BlockScaled) else values


def write_average(state: State, values: torch.Tensor, *, is_square: bool) -> None:
    """Round values (n,) FP32 to the state's format, in place."""
    write_state(state, values.sqrt() if is_square and isinstance(state, BlockScaled) else values)
