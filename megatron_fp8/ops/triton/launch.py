"""Launches Triton kernels with less host time: a launcher written for each kernel finds what was compiled before.

At every launch Triton 3.6 asks each argument for its type and divisibility, makes a dictionary of the arguments, reads
its environment, formats the options as text, compares all globals that the kernel uses, and asks the driver about each
pointer. On one CPU this took 20 us of host time, and what is here 4. A training step of a small model has five hundred
launches and is bound by the host.

What Triton compiles for depends on the key of the arguments:

    tensor     its type, and whether its address is a multiple of 16
    integer    its width; whether it is 1; whether it is a multiple of 16
    constant   its value, and so each option (num_warps, ...)

A `Launched` kernel makes such a key, no coarser than Triton's, and keeps for each what Triton launched: the C function
that Triton wrote for the kernel's signature, and the kernel on the device. The launcher that makes the key is itself
written for the kernel's parameters, as Triton writes its own: a loop over 25 parameters takes longer than all the rest.
Pointers are passed as numbers, which Triton's C function takes as they are. The key leaves out options from the
environment and the kernel's globals. These do not change while a process trains.

The first launch of a key goes through Triton. So does every launch while hooks are set (by a profiler), under the
interpreter, on AMD's GPUs, with other versions of Triton, whose internals may differ, and with
MEGATRON_FP8_LAUNCH=triton in the environment: to measure what this saves, or to look whether it is at fault.

    @launched
    @triton.jit
    def _kernel(...): ...

Source: the idea is that of torch's inductor, which calls the C function of a compiled kernel by itself.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import triton

_KNOWN = ("3.6.",)  # versions of Triton whose keys and C functions are those that are meant here
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")  # that kernels here are launched with
_LONG = 1 << 31  # integers from here on have 64 bits
_hooks, _Tensor = triton.knobs.runtime, torch.Tensor


def launched(kernel: Any) -> Any:
    """Decorator; the kernel is still launched with kernel[grid](*args, **constants and options)."""
    ours = os.environ.get("MEGATRON_FP8_LAUNCH") != "triton" and torch.version.hip is None
    known = isinstance(kernel, triton.JITFunction) and triton.__version__.startswith(_KNOWN)
    return Launched(kernel) if known and ours else kernel


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. It takes 0.1 us of host time and is called 35 times a layer.

    Triton's own cdiv also serves kernels, searches its arguments for tl.constexpr, and takes 1.9 us.
    """
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; n >= 1. Faster than Triton's, for the same reason as `cdiv`."""
    return 1 << (n - 1).bit_length()


class Launched:
    """A kernel with its own launcher; see the top of the file. Other attributes are the kernel's own."""

    def __init__(self, kernel: triton.JITFunction):
        self._kernel = kernel
        self._ready: dict[tuple, tuple] = {}  # by key, what `_prepared` returned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    @functools.cached_property
    def _launch(self) -> Callable[..., None]:
        """Launches on a grid: (grid, *args, **constants and options)."""
        made: dict[str, Any] = {}
        exec(_written(self._kernel), globals(), made)
        return made["made_for"](self._ready, self._through_triton)

    def _through_triton(self, key: tuple, grid: tuple[int, ...], args: tuple, options: tuple) -> None:
        """Have Triton launch, and keep for the key what it launched."""
        given = {name: value for name, value in zip(_OPTIONS, options, strict=True) if value is not None}
        prepared = _prepared(self._kernel[grid](*args, **given))
        if prepared is not None:
            self._ready[key] = prepared


def _written(kernel: triton.JITFunction) -> str:
    """The text of a kernel's launcher: for each parameter its part of the key, and what the C function is given."""
    names = [parameter.name for parameter in kernel.params]
    runtime = {parameter.name for parameter in kernel.params if not parameter.is_constexpr}
    lines = [line for parameter in kernel.params if parameter.name in runtime for line in _of_argument(parameter)]
    key = ", ".join([f"{name}_is" if name in runtime else name for name in names] + [*_OPTIONS])
    passed = ", ".join(f"{name}_at" if name in runtime else name for name in names)
    body = "\n        ".join(lines)
    return f"""
def made_for(ready, through_triton):
    def launch(grid, {", ".join(names)}, {", ".join(f"{name}=None" for name in _OPTIONS)}):
        device = _current_device()
        {body}
        key = (device, {key})
        known = ready.get(key)
        if known is None or _watched():
            return through_triton(key, grid, ({", ".join(names)},), ({", ".join(_OPTIONS)},))
        run, function, cooperative, pdl, metadata = known
        x, y, z = (*grid, 1, 1)[:3]
        run(
            x, y, z, _stream(device), function, cooperative, pdl, None, None, metadata, None, None, None, {passed}
        )
    return launch
"""


def _of_argument(parameter: Any) -> list[str]:
    """`_argument` of one parameter, written out for the usual values."""
    name = parameter.name
    specialized = not parameter.do_not_specialize
    aligned = specialized and not parameter.do_not_specialize_on_alignment
    if name.endswith("_ptr"):
        usual = [
            f"if {name} is None:",
            f"    {name}_at = {name}_is = None",
            f"elif isinstance({name}, _Tensor):",
            f"    {name}_at = {name}.data_ptr()",
            f"    {name}_is = {name}.dtype" + f" if not {name}_at % 16 else ({name}.dtype,)" * aligned,
        ]
    else:
        multiple = f"0 if {name} % 16 else 16" if aligned else "0"
        kind = f"1 if {name} == 1 else {multiple}" if specialized else "0"
        usual = [
            f"if type({name}) is int and {-_LONG} <= {name} < {_LONG}:",
            f"    {name}_at = {name}",
            f"    {name}_is = {kind}",
        ]
    return [*usual, "else:", f"    {name}_at, {name}_is = _argument({name})"]


def _argument(value: Any) -> tuple[Any, Any]:
    """(what Triton's C function is given for an argument, its part of the key).

    Raises TypeError for what no kernel here takes.
    """
    if value is None:
        return None, None
    if isinstance(value, _Tensor):
        at = value.data_ptr()
        return at, value.dtype if at % 16 == 0 else (value.dtype,)
    if type(value) is int:
        kind = 1 if value == 1 else 0 if value % 16 else 16
        width = 31 if -_LONG <= value < _LONG else 63 if -(1 << 63) <= value < 1 << 63 else 64
        return value, kind if width == 31 else (width, kind)
    if type(value) in (bool, float):
        return value, type(value)
    raise TypeError(f"a kernel takes tensors, numbers and None, and not {value!r}")


def _watched() -> bool:
    """Whether a hook is set: Triton has a chain of functions, or a script has put a function there, or None."""
    enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _prepared(compiled: Any) -> tuple | None:
    """What a launcher needs of a compiled kernel: Triton's C function, and what it is given of the kernel.

    None if a launch needs scratch memory: Triton has to allocate it.
    """
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    return run.launch, compiled.function, run.launch_cooperative_grid, run.launch_pdl, compiled.packed_metadata


def _current_device() -> int:
    return torch._C._cuda_getDevice()


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)
