"""cuBLASLt's constants, structures and functions, copied from its header for ctypes.

The library is the one that torch loaded, from its wheels (nvidia-cublas). tests/unit/test_cublaslt.py compares every
number here with the header.
"""

import ctypes
import functools
import glob
import os
import sys
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import torch

CUDA_TYPES = {  # cudaDataType
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
COMPUTE_32F, OP_N, OP_T = 68, 0, 1
SUCCESS, NOT_SUPPORTED = 0, 15
EPILOGUE_BIAS = 4
DESC = {  # cublasLtMatmulDescAttributes_t: (number, type)
    "TRANSA": (3, c_int32),
    "TRANSB": (4, c_int32),
    "EPILOGUE": (7, c_uint32),
    "BIAS_POINTER": (8, c_void_p),
    "A_SCALE_POINTER": (17, c_void_p),
    "B_SCALE_POINTER": (18, c_void_p),
    "FAST_ACCUM": (25, ctypes.c_int8),
    "BIAS_DATA_TYPE": (26, c_int32),
}
POINTERS = ("A_SCALE_POINTER", "B_SCALE_POINTER", "BIAS_POINTER")  # they may change from call to call
PREF = {  # cublasLtMatmulPreferenceAttributes_t
    "MAX_WORKSPACE_BYTES": (1, c_uint64),
    "REDUCTION_SCHEME_MASK": (3, c_uint32),
    "MIN_ALIGNMENT_A_BYTES": (5, c_uint32),
    "MIN_ALIGNMENT_B_BYTES": (6, c_uint32),
    "MIN_ALIGNMENT_C_BYTES": (7, c_uint32),
    "MIN_ALIGNMENT_D_BYTES": (8, c_uint32),
}
CONFIG = {"algorithm": 0, "tile": 1, "split-k": 2, "stages": 6, "cluster": 8}  # ...AlgoConfigAttributes_t, 4 bytes each
TILES = {"168x128": 197, "176x128": 201, "192x192": 209}  # cublasLtMatmulTile_t; the library's M is our N
REDUCTION_COMPUTE_TYPE = 2
WORKSPACE = 32 << 20  # bytes, as NVIDIA recommends for Hopper


class Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque bytes, with the same meaning in every process that has this version of cuBLASLt."""

    _fields_ = (("data", c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", Algo),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasLtError(RuntimeError):
    """A cuBLASLt call returned a status other than success."""


@functools.cache
def library() -> Any:
    """The library that torch loaded, or None if it cannot be loaded (see `why_not`)."""
    try:
        return _declare(_load())
    except (OSError, AttributeError) as error:
        _problems.append(str(error))
        return None


_problems: list[str] = []


def bound() -> bool:
    return library() is not None


def why_not() -> str:
    """Why the library could not be loaded."""
    return "; ".join(_problems)


def _load() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise OSError("this torch has no CUDA")
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        return ctypes.CDLL(name)  # finds the one that torch has loaded into this process
    except OSError:
        for folder in sys.path:
            for path in glob.glob(os.path.join(folder, "nvidia", "*", "lib", name)):
                return ctypes.CDLL(path)
        raise


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size = c_void_p, c_size_t
    for name, arguments in {
        "cublasLtCreate": [POINTER(pointer)],
        "cublasLtMatmulDescCreate": [POINTER(pointer), c_int, c_int],
        "cublasLtMatmulDescDestroy": [pointer],
        "cublasLtMatmulDescSetAttribute": [pointer, c_int, pointer, size],
        "cublasLtMatmulDescGetAttribute": [pointer, c_int, pointer, size, POINTER(size)],
        "cublasLtMatrixLayoutCreate": [POINTER(pointer), c_int, c_uint64, c_uint64, c_int64],
        "cublasLtMatrixLayoutDestroy": [pointer],
        "cublasLtMatrixLayoutGetAttribute": [pointer, c_int, pointer, size, POINTER(size)],
        "cublasLtMatmulPreferenceCreate": [POINTER(pointer)],
        "cublasLtMatmulPreferenceDestroy": [pointer],
        "cublasLtMatmulPreferenceSetAttribute": [pointer, c_int, pointer, size],
        "cublasLtMatmulAlgoGetHeuristic": [*[pointer] * 7, c_int, POINTER(Heuristic), POINTER(c_int)],
        "cublasLtMatmulAlgoCheck": [*[pointer] * 6, POINTER(Algo), POINTER(Heuristic)],
        "cublasLtMatmulAlgoConfigGetAttribute": [POINTER(Algo), c_int, pointer, size, POINTER(size)],
        "cublasLtMatmul": [*[pointer] * 14, size, pointer],
    }.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, c_int
    lib.cublasLtGetStatusName.argtypes, lib.cublasLtGetStatusName.restype = [c_int], c_char_p
    lib.cublasLtGetVersion.argtypes, lib.cublasLtGetVersion.restype = [], c_size_t
    return lib


def version() -> int:
    """The library's version, such as 130100."""
    return library().cublasLtGetVersion()


def check(status: int, of: object) -> None:
    """Raise CublasLtError unless `status` is success; the text has the status's name and `of`."""
    if status != SUCCESS:
        raise CublasLtError(f"cuBLASLt: {library().cublasLtGetStatusName(status).decode()}: {of}")


@functools.cache
def handle(device: int) -> int:
    """The library's handle for a device, made at first use."""
    made = c_void_p()
    with torch.cuda.device(device):
        check(library().cublasLtCreate(byref(made)), f"a handle of device {device}")
    assert made.value is not None
    return made.value
