"""Launching a kernel again without what Triton does anew at each launch.

Triton 3.6 reads its environment, parses options, makes text of them and compares every global that a kernel names, each
time: 10 us of the host, twice what binding the arguments and finding the kernel takes. A training step of a small
model has five hundred launches and waits for the host. So a `Launched` kernel keeps what Triton compiled, by the key
that Triton itself goes by: its own binder makes it of the arguments, and types, divisibility and constants are in it as
Triton sees them. What is not in the key does not change while a process trains: options from the environment, and a
kernel's globals.

The first launch of a key is Triton's own, and so is every launch while hooks are set (a profiler's), under the
interpreter, and with another version of Triton, whose insides may differ.

    @launched
    @triton.jit
    def _kernel(...): ...
"""

import functools
from typing import Any

import torch
import triton

_KNOWN = ("3.6.",)  # versions whose JITFunction.run is known to do what `_launch` does
_hooks = triton.knobs.runtime


def launched(kernel: Any) -> Any:
    """`kernel`, launched as before: kernel[grid](*args, **constants and options)."""
    known = isinstance(kernel, triton.JITFunction) and triton.__version__.startswith(_KNOWN)
    return Launched(kernel) if known else kernel


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own serves kernels too, and looks through its arguments for constants of theirs:
    1.9 us of the host for 0.1, 35 times a layer."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least that is n, 1 or more, or above; as `cdiv`."""
    return 1 << (n - 1).bit_length()


class Launched:
    """See the top of the file. What it lacks is the kernel's."""

    def __init__(self, kernel: triton.JITFunction):
        self._kernel = kernel
        self._binders: dict[int, Any] = {}  # by device
        self._ready: dict[tuple, tuple | None] = {}

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
    """Whether there is one: Triton has a chain of them, in whose place a function may be put, or None."""
    return bool(getattr(hook, "calls", hook))


def _prepared(compiled: Any) -> tuple | None:
    """(the launcher, the kernel's function, what it is given before the kernel's arguments) of what Triton compiled;
    None where a launch needs memory of its own, which Triton allocates."""
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
