"""Launches Triton kernels with less host time, by caching the compiled kernel for its arguments.

At every launch Triton 3.6 reads its environment, parses the options and formats them as text, and compares all globals
that the kernel uses. This takes 10 us of host time, twice as much as binding the arguments and finding the kernel. A
training step of a small model has five hundred launches and is bound by the host. So a `Launched` kernel caches the
compiled kernel under Triton's own key: Triton's binder computes it from the arguments, with their types, divisibility
and constants. The key leaves out the options from the environment and the kernel's globals. These do not change while a
process trains.

The first launch of a key goes through Triton. So does every launch while hooks are set (by a profiler), under the
interpreter, and with other versions of Triton, whose internals may differ.

    @launched
    @triton.jit
    def _kernel(...): ...
"""

import functools
from typing import Any

import torch
import triton

_KNOWN = ("3.6.",)  # versions of Triton whose JITFunction.run launches as `_launch` does
_hooks = triton.knobs.runtime


def launched(kernel: Any) -> Any:
    """Decorator; the kernel is still launched with kernel[grid](*args, **constants and options)."""
    known = isinstance(kernel, triton.JITFunction) and triton.__version__.startswith(_KNOWN)
    return Launched(kernel) if known else kernel


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. It takes 0.1 us of host time and is called 35 times a layer.

    Triton's own cdiv also serves kernels, searches its arguments for tl.constexpr, and takes 1.9 us.
    """
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; n >= 1. Faster than Triton's, for the same reason as `cdiv`."""
    return 1 << (n - 1).bit_length()


class Launched:
    """A kernel with the cache that the top of the file describes. Other attributes are the kernel's own."""

    def __init__(self, kernel: triton.JITFunction):
        self._kernel = kernel
        self._binders: dict[int, Any] = {}  # by device
        self._ready: dict[tuple, tuple | None] = {}  # by key, what `_prepared` returned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **how: Any) -> None:
        device = _current_device()
        binder = self._binders.get(device)
        if binder is None:
            binder = self._binders[device] = self._kernel.device_caches[device][-1]
        bound, specialization, options = binder(*args, **how)
        key = (device, *specialization, *options.items())
        ready = self._ready.get(key)
        if ready is None:
            self._ready[key] = _prepared(self._kernel[grid](*args, **how))
        elif _watched(_hooks.launch_enter_hook) or _watched(_hooks.launch_exit_hook):
            self._kernel[grid](*args, **how)
        else:
            launch, function, given = ready
            x, y, z = (*grid, 1, 1)[:3]
            launch(x, y, z, _stream(device), function, *given, *bound.values())


def _watched(hook: Any) -> bool:
    """Whether `hook` is set: it is Triton's chain of functions, or a function, or None."""
    return bool(getattr(hook, "calls", hook))


def _prepared(compiled: Any) -> tuple | None:
    """(Triton's launcher, the kernel's function, the launcher's arguments that precede the kernel's).

    None if a launch needs scratch memory: Triton has to allocate it.
    """
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    no_hooks = None, None, None
    return run.launch, compiled.function, (
        *(run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata), *no_hooks
    )  # fmt: skip


def _current_device() -> int:
    return torch._C._cuda_getDevice()


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)
