"""Stand-ins for cuBLASLt and the CUTLASS library, which compute the GEMMs on the CPU.

The real cuBLASLt makes the descriptors, which needs no driver; `CublasLibrary.cublasLtMatmul` reads them. `Clock` gives
the time: a run takes as long as a table says, and longer with every run, as on a GPU that gets hot.
"""

import contextlib
import ctypes
from ctypes import byref

import pytest
import torch

from megatron_fp8.gemm import cublaslt, cublaslt_library, plans, search, timing
from megatron_fp8.gemm.cublaslt_library import CUDA_TYPES, DESC, SUCCESS
from megatron_fp8.gemm.cutlass import CUTLASS, _describe
from megatron_fp8.gemm.interface import Planned, ScaledMM, register, use
from megatron_fp8.numerics import E4M3
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops import reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
M, N, K = 32, 48, 80
DTYPES = {number: dtype for dtype, number in CUDA_TYPES.items()}


class Clock:
    """Milliseconds for torch.cuda.Event. `costs` has the time of each plan (default 1); each run takes longer."""

    now, heat, costs = 0.0, 0.0, {}

    def ran(self, what):
        self.heat += 0.01
        self.now += self.costs.get(what, 1.0) * (1 + self.heat)


class Event:
    clock = Clock()

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = self.clock.now

    def elapsed_time(self, end):
        return end.at - self.at


class CublasLibrary:
    """The real library, except for the functions that need a GPU."""

    def __init__(self, real):
        self._real, self.calls, self.in_place = real, [], []
        self.favourites = [b"\1" * 64, b"\2" * 64]  # the heuristic's algorithms
        self.works_with = None

    def __getattr__(self, name):
        return getattr(self._real, name)

    def cublasLtCreate(self, made):
        made._obj.value = 1
        return SUCCESS

    def cublasLtMatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, count, found, returned):
        for one, favourite in zip(found, self.favourites, strict=False):
            one.algo = cublaslt_library.Algo.from_buffer_copy(favourite)
        returned._obj.value = min(count, len(self.favourites))
        return SUCCESS if self.favourites else cublaslt_library.NOT_SUPPORTED

    def cublasLtMatmulAlgoCheck(self, handle, operation, a, b, c, d, algo, result):
        return SUCCESS if self.works_with in (None, bytes(algo._obj)) else cublaslt_library.NOT_SUPPORTED

    def operation(self, desc):
        values = {}
        for name, (number, kind) in DESC.items():
            held = kind()
            assert self.cublasLtMatmulDescGetAttribute(desc, number, byref(held), ctypes.sizeof(held), None) == SUCCESS
            values[name] = held.value
        return values

    def attribute(self, layout, number, kind):
        held = kind()
        get = self.cublasLtMatrixLayoutGetAttribute
        assert get(layout, number, byref(held), ctypes.sizeof(held), None) == SUCCESS
        return held.value

    def matrix(self, at, layout):
        """The matrix (rows, columns) in memory, column-major, as its layout describes."""
        kinds = {0: ctypes.c_uint32, 2: ctypes.c_uint64, 3: ctypes.c_uint64, 4: ctypes.c_int64}
        number, rows, columns, ld = (self.attribute(layout, *one) for one in kinds.items())
        dtype = DTYPES[number]
        size = ((columns - 1) * ld + rows) * dtype.itemsize
        memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(at), dtype=dtype)
        return memory.as_strided((rows, columns), (1, ld))

    def cublasLtMatmul(self, handle, desc, alpha, a, a_of, b, b_of, beta, c, c_of, d, d_of, algo, room, size, stream):
        value = self.operation(desc)
        alpha, beta = (ctypes.c_float.from_address(scalar).value for scalar in (alpha, beta))
        self.calls.append((value, beta, ctypes.string_at(algo, 64), (room, size, stream)))
        self.in_place.append(c == d)
        Event.clock.ran(ctypes.string_at(algo, 64))
        if DTYPES[self.attribute(a_of, 0, ctypes.c_uint32)] in plans.FP8:
            assert not (a | b | c | d | (value["BIAS_POINTER"] or 0)) % 16  # Hopper's kernels need this
        first, second, out = self.matrix(a, a_of).double(), self.matrix(b, b_of).double(), self.matrix(d, d_of)
        first, second = (x.t() if value[f"TRANS{name}"] else x for x, name in ((first, "A"), (second, "B")))
        y = alpha * first @ second
        for name in ("A_SCALE_POINTER", "B_SCALE_POINTER"):
            if value[name]:
                y = y * ctypes.c_float.from_address(value[name]).value
        y = y + beta * self.matrix(c, c_of) if beta else y
        if value["EPILOGUE"] == cublaslt_library.EPILOGUE_BIAS:
            kind = DTYPES[value["BIAS_DATA_TYPE"]]
            raw = (ctypes.c_uint8 * (len(y) * kind.itemsize)).from_address(value["BIAS_POINTER"])
            y = y + torch.frombuffer(raw, dtype=kind).double()[:, None]
        out.copy_(y)
        return SUCCESS


class CutlassLibrary:
    """Kernels given as (a, b, out, promote, tile), with csrc/abi.h's numbers for the types."""

    KERNELS = (
        (0, 0, 2, 0, (128, 256)),
        (0, 0, 2, 0, (128, 128)),
        (1, 0, 3, 128, (128, 256)),
        (0, 0, 2, 128, (128, 128)),
    )
    TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32)

    def __init__(self):
        self.calls, self.status = [], 0

    def mfp8_kernels(self):
        return len(self.KERNELS)

    def mfp8_describe(self, index, info):
        a, b, d, promote, (m, n) = self.KERNELS[index]
        info._obj.__init__(a, b, d, promote, m, n, 2, 1, 0, 4, 0)

    def mfp8_gemm(self, index, args):
        args, (a, b, d, promote, tile) = args._obj, self.KERNELS[index]
        self.calls.append((tile, promote, args.swizzle, args.raster))
        Event.clock.ran((tile, args.swizzle, args.raster))
        if self.status:
            return self.status

        def read(at, code, *shape):
            assert at % 16 == 0
            size = torch.Size(shape).numel() * self.TYPES[code].itemsize
            return torch.frombuffer((ctypes.c_uint8 * size).from_address(at), dtype=self.TYPES[code]).view(shape)

        y = read(args.a, a, args.m, args.k).double() @ read(args.b, b, args.n, args.k).double().t()
        y = y * ctypes.c_float.from_address(args.scale_a).value * ctypes.c_float.from_address(args.scale_b).value
        y = y + read(args.bias, 2, args.n).double() if args.bias else y
        y = y + read(args.c, d, args.m, args.n).double() if args.c else y
        read(args.d, d, args.m, args.n).copy_(y)
        return 0


@pytest.fixture
def lib(monkeypatch):
    """The stand-in for cuBLASLt."""
    lib = CublasLibrary(cublaslt.library())
    for module in (cublaslt, cublaslt_library):
        monkeypatch.setattr(module, "library", lambda: lib)
    monkeypatch.setattr(cublaslt, "handle", lambda device: 1)
    monkeypatch.setattr(plans, "_stream", lambda device: 7)
    monkeypatch.setattr(plans, "_current_device", lambda: -1)
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "maker_of", lambda problem: cublaslt.CUBLASLT)
    monkeypatch.setattr(Event, "clock", Clock())
    yield lib
    search.forget()
    plans.on_plan = None


@pytest.fixture
def cutlass(lib, monkeypatch):
    """The stand-in for the CUTLASS library, already built."""
    library = CutlassLibrary()
    monkeypatch.setattr(CUTLASS, "_library", library)
    monkeypatch.setattr(CUTLASS, "version", "0123456789abcdef")
    monkeypatch.setattr(CUTLASS, "kernels", tuple(_describe(library, index) for index in range(library.mfp8_kernels())))
    return library


@pytest.fixture
def timed(lib, monkeypatch, tmp_path):
    """torch.cuda's events read the clock, and a folder is there for the results of a search."""
    monkeypatch.setenv("MEGATRON_FP8_CACHE", str(tmp_path))
    monkeypatch.setattr(timing, "FLUSH", 1024)
    monkeypatch.setattr(timing, "LOAD_MS", 30.0)
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    for name, stand_in in {
        "Event": Event,
        "device": contextlib.nullcontext,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "get_device_name": lambda: "GPU",
        "current_device": lambda: -1,
        "current_stream": lambda: type("Stream", (), {"cuda_stream": 7}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **how: (Event.clock.ran("BF16"), real(*args, **how)))
    return Event.clock


@pytest.fixture
def served(lib):
    """The backend "cublaslt" serves the CPU."""
    yield from serve("cublaslt", None, lib)


@pytest.fixture
def served_cutlass(cutlass):
    """The backend "cutlass" serves the CPU."""
    yield from serve("cutlass", CUTLASS.takes, cutlass)


def serve(name, ours, library):
    class Here(Planned):
        devices = ("cpu",)

    before = plans.maker_of
    register(Here(name, ScaledMM(), ours))
    yield library
    register(Planned(name, ScaledMM(), ours), serve=False)
    use("reference")
    plans.serve(before)


def scaled(m, k, fmt=E4M3, scale=20.0):
    payload, columns = reference.quantize(torch.randn(m, k), fmt, torch.tensor(scale), transpose=True)
    return ScaledTensor(payload, torch.tensor(1 / scale), columns)


def exact(a, b):
    return a.dequantize().double() @ b.dequantize().double().t()


def close(got, expected, within=1e-6):
    return (got.double() - expected).abs().max() <= within * expected.abs().max()
