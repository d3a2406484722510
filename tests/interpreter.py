"""Triton's interpreter, made right and made fast, in a process that runs files of tests/gpu without a GPU.

    {file} {every}, a line each on stdin   ->   [exit code, "what pytest printed"], a line of JSON each on stdout

Of each test's cases each `every`th is run, the first among them.

A process of its own, since triton decides at its import whether to interpret; it forks one for each file, so that torch
and triton are imported once. What it mends: float conversions round halves up, lose carries and break FP8 subnormals,
so they are torch's, made to saturate as PTX's cvt.satfinite does; the maximum keeps a NaN, which a GPU's drops; a loop
to a bound known at the launch fails on a new numpy; inline assembly there is none. Triton 3.9's takes only bool for a
mask, and no constant that an operator has made a tensor. What only a GPU can show: those
instructions themselves, what ptxas makes of the kernels, and the GEMM.

A tenth of the interpreter's time computes; the rest says again what is known. Here the language is patched once, not at
every call of a function, a type is made once for each shape, and like operands are seen to be alike at once. The check
of each sum of integers for an overflow, whose finding is thrown away, is not made: a fifth of the time.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
from collections import Counter

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

TYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}


def convert(data, source, target, rounding):
    values = torch.from_numpy(data.copy()).view(TYPES[source]).float()
    if TYPES[target].itemsize == 1:
        largest = torch.finfo(TYPES[target]).max
        values = values.clamp(-largest, largest)
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[TYPES[target].itemsize]
    return values.to(TYPES[target]).view(bits).numpy()


@triton.jit
def converted(y, zero, E4M3: tl.constexpr):
    fp8: tl.constexpr = tl.float8e4nv if E4M3 else tl.float8e5
    return y.to(fp8).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def converted_pair(low, high, zero, E4M3: tl.constexpr):
    return converted(low, zero, E4M3) | converted(high, zero, E4M3) << 8


@triton.jit
def converted_quad(y, zero):
    return converted(y, zero, True).to(tl.uint8)


@triton.jit
def reciprocal(x):
    return 1.0 / x


@triton.jit
def exp2(x):
    return tl.exp2(x)


def mend() -> None:
    """The interpreter's errors, and the kernels' assembly."""
    from megatron_fp8.ops.triton import activation, adam, cast

    interpreter._convert_float = convert
    builder = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    cast.convert, cast.convert_pair, cast.convert_quad = converted, converted_pair, converted_quad
    adam._codes, adam._reciprocal = converted_quad, reciprocal
    activation.exp2, activation.reciprocal = exp2, reciprocal
    core.tensor.__index__ = lambda self: self.handle.data.item()
    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store
    to_tensor = semantic.TritonSemantic.to_tensor

    def truth(mask):
        if isinstance(mask, np.ndarray):  # of a tensor descriptor
            return mask
        return interpreter.TensorHandle(mask.data.astype(bool), tl.int1)

    builder.create_masked_load = lambda self, at, mask, *rest, **how: masked_load(self, at, truth(mask), *rest, **how)
    builder.create_masked_store = lambda self, at, value, mask, *rest, **how: masked_store(
        self, at, value, truth(mask), *rest, **how
    )
    semantic.TritonSemantic.to_tensor = lambda self, x, *rest: to_tensor(self, getattr(x, "value", x), *rest)


def hasten() -> None:
    """Without another result, but for the order of sums over tiles."""
    from megatron_fp8.ops.triton import adam, sums

    sums.COLUMNS = 1024  # fewer programs
    sums.FEWEST_PROGRAMS = 1  # several tiles a program, where there are as many: a GPU's large matrices have them
    one_by_one = interpreter.ReduceOps.apply_impl

    def reduce(self, values):
        if self.combine_fn is adam._larger:
            return self.min_max(values[0], val_reduce_op=np.max)
        return one_by_one(self, values)

    interpreter.ReduceOps.apply_impl = reduce
    interpreter._patch_lang(hasten)  # for good: this process compiles nothing
    nothing_to_undo = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda fn: nothing_to_undo
    # Made of seven operations, for an assertion that only a builder with `debug` keeps.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    numpys, blocks, shapes = {}, {}, {(): ((), core.constexpr(1))}
    find, make = interpreter._get_np_dtype, core.block_type.__init__
    meaning = semantic.TritonSemantic
    same, cast, broadcast = core.dtype.__eq__, meaning.cast, meaning.broadcast_impl_value

    def numpys_type(dtype):
        if dtype.name not in numpys:
            numpys[dtype.name] = find(dtype)
        return numpys[dtype.name]

    def block_type(self, element_ty, shape):
        key = element_ty.name, *[getattr(size, "value", size) for size in shape]
        if key not in blocks:
            make(self, element_ty, shape)
            blocks[key] = dict(vars(self))
            shapes[key[1:]] = core.tuple([core.constexpr(size) for size in key[1:]]), core.constexpr(self.numel)
            blocks[key]["in_constexpr"] = shapes[key[1:]]
        vars(self).update(blocks[key])

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.in_constexpr if type.is_block() else shapes[()]

    def is_same(self, other):
        return self is other or same(self, other)

    def cast_other(self, value, dtype, *rounding):
        return value if value.dtype is dtype else cast(self, value, dtype, *rounding)

    def broadcast_other(self, left, right):
        shapes = [side.type.shape.values if side.type.is_block() else None for side in (left, right)]
        return (left, right) if shapes[0] == shapes[1] else broadcast(self, left, right)

    interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__ = numpys_type, block_type, tensor
    core.dtype.__eq__, meaning.cast, meaning.broadcast_impl_value = is_same, cast_other, broadcast_other


class Thinned:
    """A plugin of pytest: of each test's cases each `every`th, the first among them."""

    def __init__(self, every: int):
        self._every = every

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seen: Counter[str] = Counter()
        kept = []
        for item in items:
            name = item.nodeid.partition("[")[0]
            if seen[name] % self._every == 0:
                kept.append(item)
            seen[name] += 1
        items[:] = kept


def run(file: str, every: int) -> tuple[int, str]:
    """pytest's exit code for that file, in a fork, and all that was printed."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                # Hypothesis, which nothing here uses, would be imported by each to say that it found nothing.
                words = [file, "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
                code = pytest.main(words, plugins=[Thinned(every)])
                sys.stdout.flush()
            os._exit(code)
        status = os.waitpid(child, 0)[1]
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")


if __name__ == "__main__":
    hasten()
    mend()
    gc.freeze()  # of what is there nothing goes away, and no fork looks for it again
    for line in sys.stdin:
        file, every = line.split()
        print(json.dumps(run(file, int(every))), flush=True)
