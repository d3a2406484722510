"""`operation`: one operation, computed in two ways, by the device of its first argument.

    CUDA        the kernel's function, of the same name, in ops/triton/
    elsewhere   plain PyTorch, the reference that tests compare the kernel with

The reference has the docstring. The kernel's function has the same signature (tests/unit/test_operations.py). Its file
is imported when the operation first gets a CUDA tensor, so a machine without a GPU does not need Triton.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any


def operation[F: Callable[..., Any]](plain: F, kernels: str) -> F:
    """`plain`; but on a CUDA tensor, the function of its name in ops/triton/`kernels`.py."""

    @functools.cache
    def kernel() -> F:
        return getattr(importlib.import_module(f".triton.{kernels}", __package__), plain.__name__)

    @functools.wraps(plain)
    def op(x, *args, **kwargs):
        return (kernel() if x.is_cuda else plain)(x, *args, **kwargs)

    return op  # type: ignore[return-value]
