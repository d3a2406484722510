"""An operation's plain form and its kernel's function have one signature."""

import importlib
import inspect

import pytest

from megatron_fp8 import ops
from megatron_fp8.ops import adam

OPERATIONS = {name: op for name, op in vars(ops).items() if hasattr(op, "__wrapped__")}


def differences(plain, kernel) -> list[str]:
    """Parameters whose name, kind, default or type is not the same, and the type of the result."""
    one, other = inspect.signature(plain), inspect.signature(kernel)
    mine, theirs = [*map(str, one.parameters.values())], [*map(str, other.parameters.values())]
    found = [f"{a} != {b}" for a, b in zip(mine, theirs, strict=False) if a != b]
    kinds = [[p.kind for p in signature.parameters.values()] for signature in (one, other)]
    if len(mine) != len(theirs) or kinds[0] != kinds[1]:
        found.append(f"({', '.join(mine)}) != ({', '.join(theirs)})")
    if one.return_annotation != other.return_annotation:
        found.append(f"-> {one.return_annotation} != -> {other.return_annotation}")
    return found


def test_the_kernels_signature_is_the_plain_forms():
    assert len(OPERATIONS) > 20
    for name, op in OPERATIONS.items():
        kernel = inspect.getclosurevars(op).nonlocals["kernel"]()
        assert kernel.__name__ == name and not differences(op.__wrapped__, kernel)
    assert not differences(adam.adam_step, importlib.import_module(f"{ops.__name__}.triton.adam").adam_step)


def test_the_plain_form_has_the_docstring():
    for name, op in OPERATIONS.items():
        assert op.__name__ == name and op.__doc__ == op.__wrapped__.__doc__ and not op.__doc__.startswith("See ")


def one(x: int, *, y: float = 1.0) -> None: ...


def renamed(x: int, *, z: float = 1.0) -> None: ...


def positional(x: int, y: float = 1.0) -> None: ...


def another_default(x: int, *, y: float = 2.0) -> None: ...


def another_type(x: float, *, y: float = 1.0) -> None: ...


def one_less(x: int) -> None: ...


def another_result(x: int, *, y: float = 1.0) -> int: ...


@pytest.mark.parametrize("kernel", [renamed, positional, another_default, another_type, one_less, another_result])
def test_a_planted_difference_is_found(kernel):
    assert differences(one, kernel) and not differences(one, one)
