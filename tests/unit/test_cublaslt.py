"""The binding of cuBLASLt, without a GPU: the library's own descriptors, and a matmul that computes what they say.

The descriptors are made by the real library, which needs no driver for that. What a GPU would run is replaced by
`Library.cublasLtMatmul`, which reads the descriptors back and multiplies on the CPU. The rest is in
tests/gpu/test_cublaslt_cuda.py.
"""

import ctypes
import itertools
import re
import sys
from ctypes import byref
from pathlib import Path

import pytest
import torch
from launch import forked

from megatron_fp8.engine.gradients import DenseStore, GradSink
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops import Epilogue, Product, announce, cublaslt, gemm, gemm_search, reference, wgrad
from megatron_fp8.ops.cublaslt import CUDA_TYPES, DESC, PREF, SUCCESS, Choice, CublasLtError, Heuristic, Problem
from megatron_fp8.ops.gemm import CublasLt, ScaledMM, register, use

if not cublaslt.bound():
    pytest.skip(f"no cuBLASLt: {cublaslt.why_not()}", allow_module_level=True)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
M, N, K = 32, 48, 80
DTYPES = {number: dtype for dtype, number in CUDA_TYPES.items()}


class Library:
    """The real library, but for what needs a GPU."""

    def __init__(self, real):
        self._real, self.calls = real, []
        self.favourites = [b"\1" * 64, b"\2" * 64]  # of the heuristic
        self.works_with = None

    def __getattr__(self, name):
        return getattr(self._real, name)

    def cublasLtCreate(self, made):
        made._obj.value = 1
        return SUCCESS

    def cublasLtMatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, count, found, returned):
        for one, favourite in zip(found, self.favourites, strict=False):
            one.algo = cublaslt.Algo.from_buffer_copy(favourite)
        returned._obj.value = min(count, len(self.favourites))
        return SUCCESS if self.favourites else cublaslt.NOT_SUPPORTED

    def cublasLtMatmulAlgoCheck(self, handle, operation, a, b, c, d, algo, result):
        return SUCCESS if self.works_with in (None, bytes(algo._obj)) else cublaslt.NOT_SUPPORTED

    def operation(self, desc):
        values = {}
        for name, (number, kind) in DESC.items():
            held = kind()
            assert self.cublasLtMatmulDescGetAttribute(desc, number, byref(held), ctypes.sizeof(held), None) == SUCCESS
            values[name] = held.value
        return values

    def matrix(self, at, layout):
        """The memory as the layout has it, (rows, columns), by columns."""
        values = []
        for number, kind in ((0, ctypes.c_uint32), (2, ctypes.c_uint64), (3, ctypes.c_uint64), (4, ctypes.c_int64)):
            held = kind()
            get = self.cublasLtMatrixLayoutGetAttribute
            assert get(layout, number, byref(held), ctypes.sizeof(held), None) == SUCCESS
            values.append(held.value)
        dtype, (rows, columns, ld) = DTYPES[values[0]], values[1:]
        size = ((columns - 1) * ld + rows) * dtype.itemsize
        memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(at), dtype=dtype)
        return memory.as_strided((rows, columns), (1, ld))

    def cublasLtMatmul(self, handle, desc, alpha, a, a_of, b, b_of, beta, c, c_of, d, d_of, algo, room, size, stream):
        value = self.operation(desc)
        alpha, beta = (ctypes.c_float.from_address(scalar).value for scalar in (alpha, beta))
        self.calls.append((value, beta, ctypes.string_at(algo, 64), (room, size, stream)))
        first, second, out = self.matrix(a, a_of).double(), self.matrix(b, b_of).double(), self.matrix(d, d_of)
        first, second = (x.t() if value[f"TRANS{name}"] else x for x, name in ((first, "A"), (second, "B")))
        y = alpha * first @ second
        for name in ("A_SCALE_POINTER", "B_SCALE_POINTER"):
            if value[name]:
                y = y * ctypes.c_float.from_address(value[name]).value
        y = y + beta * self.matrix(c, c_of) if beta else y
        if value["EPILOGUE"] == cublaslt.EPILOGUE_BIAS:
            kind = DTYPES[value["BIAS_DATA_TYPE"]]
            raw = (ctypes.c_uint8 * (len(y) * kind.itemsize)).from_address(value["BIAS_POINTER"])
            y = y + torch.frombuffer(raw, dtype=kind).double()[:, None]
        if value["AMAX_D_POINTER"]:
            ctypes.c_float.from_address(value["AMAX_D_POINTER"]).value = float(y.abs().max())
        if value["D_SCALE_POINTER"]:
            y = y * ctypes.c_float.from_address(value["D_SCALE_POINTER"]).value
        out.copy_(y)
        return SUCCESS


@pytest.fixture
def lib(monkeypatch):
    lib = Library(cublaslt.library())
    monkeypatch.setattr(cublaslt, "library", lambda: lib)
    monkeypatch.setattr(cublaslt, "handle", lambda device: 1)
    monkeypatch.setattr(cublaslt, "_stream", lambda device: 7)
    monkeypatch.setattr(cublaslt, "_current_device", lambda: -1)
    monkeypatch.setattr(cublaslt, "_plans", {})
    yield lib
    cublaslt.look_up = cublaslt.on_plan = None


@pytest.fixture
def served(lib):
    """The backend serves the CPU."""

    class Here(CublasLt):
        devices = ("cpu",)

    register(Here(ScaledMM()))
    yield lib
    register(CublasLt(ScaledMM()))
    use("reference")


def scaled(m, k, fmt=E4M3, scale=20.0):
    payload, columns = reference.quantize(torch.randn(m, k), fmt, torch.tensor(scale), transpose=True)
    return ScaledTensor(payload, torch.tensor(1 / scale), columns)


def exact(a, b):
    return a.dequantize().double() @ b.dequantize().double().t()


def close(got, expected, within=1e-6):
    return (got.double() - expected).abs().max() <= within * expected.abs().max()


# What the header says


def header(name):
    for folder in sys.path:
        for path in Path(folder).glob(f"nvidia/*/include/{name}"):
            return path.read_text()
    pytest.skip(f"no {name} here")


def enumerators(name):
    return {key: int(value, 0) for key, value in re.findall(r"(CU\w+)\s*=\s*(\d\w*)[,\s]", header(name))}


def test_every_number_is_the_headers():
    lt, types = enumerators("cublasLt.h"), enumerators("library_types.h")
    status = enumerators("cublas_api.h")
    assert {f"CUBLASLT_MATMUL_DESC_{name}": n for name, (n, _) in DESC.items()}.items() <= lt.items()
    assert {f"CUBLASLT_MATMUL_PREF_{name}": n for name, (n, _) in PREF.items()}.items() <= lt.items()
    config = {"algorithm": "ID", "tile": "TILE_ID", "split-k": "SPLITK_NUM", "stages": "STAGES_ID"}
    for name, number in cublaslt.CONFIG.items():
        assert lt[f"CUBLASLT_ALGO_CONFIG_{config.get(name, 'CLUSTER_SHAPE_ID')}"] == number
    assert lt["CUBLASLT_EPILOGUE_BIAS"] == cublaslt.EPILOGUE_BIAS
    assert lt["CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE"] == cublaslt.REDUCTION_COMPUTE_TYPE
    names = {FP32: "32F", FP16: "16F", BF16: "16BF", torch.float8_e4m3fn: "8F_E4M3", torch.float8_e5m2: "8F_E5M2"}
    assert {types[f"CUDA_R_{names[dtype]}"]: dtype for dtype in CUDA_TYPES} == DTYPES
    assert status["CUBLAS_COMPUTE_32F"] == cublaslt.COMPUTE_32F and status["CUBLAS_OP_T"] == cublaslt.OP_T
    assert status["CUBLAS_STATUS_NOT_SUPPORTED"] == cublaslt.NOT_SUPPORTED


def test_structures_have_the_sizes_that_the_header_says():
    text = header("cublasLt.h")
    words = re.search(r"uint64_t data\[(\d+)\];\s*} cublasLtMatmulAlgo_t", text)[1]
    assert ctypes.sizeof(cublaslt.Algo) == 8 * int(words) == 64
    body = re.search(r"typedef struct \{([^}]*)\} cublasLtMatmulHeuristicResult_t", text)[1]
    fields = re.findall(r"^\s*(\w+) (\w+)(?:\[(\d+)\])?;", body, re.M)
    assert [kind for kind, _, _ in fields] == ["cublasLtMatmulAlgo_t", "size_t", "cublasStatus_t", "float", "int"]
    assert ctypes.sizeof(Heuristic) == 64 + 8 + 4 + 4 + 4 * int(fields[-1][2]) == 96


# Calls


@pytest.mark.parametrize("a_rows", [True, False])
@pytest.mark.parametrize("b_rows", [True, False])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize("pad", [0, 3])
def test_any_layout_of_bf16(lib, a_rows, b_rows, out_dtype, pad):
    def matrix(rows, columns, by_rows):
        x = torch.randn(rows, columns + pad) if by_rows else torch.randn(columns, rows + pad).t()
        return x[:rows, :columns].to(BF16) if not pad else x.to(BF16)[:rows, :columns]

    a, b = matrix(M, K, a_rows), matrix(N, K, b_rows)
    memory = torch.randn(M, N + pad).to(out_dtype)
    before, out = memory.clone(), memory[:, :N]
    expected = a.double() @ b.double().t()
    within = 1e-6 if out_dtype is FP32 else 2**-8
    assert cublaslt.product(a, b, out, add=True) is out
    assert close(out, expected + before[:, :N].double(), within)
    cublaslt.product(a, b, out)
    assert close(out, expected, within) and torch.equal(memory[:, N:], before[:, N:])
    assert [beta for _, beta, _, _ in lib.calls] == [1.0, 0.0]


@pytest.mark.parametrize(("one", "other"), [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("bias", [None, BF16])
@pytest.mark.parametrize("add", [False, True])
def test_fp8_with_scales_bias_and_sum(lib, one, other, bias, add):
    a, b = scaled(M, K, one, 3.0), scaled(N, K, other, 7.0)
    before = torch.randn(M, N)
    out, vector = before.clone(), None if bias is None else torch.randn(N).to(bias)
    scales = {"a_scale": a.scale_inv, "b_scale": b.scale_inv}
    cublaslt.product(a.payload, b.payload, out, bias=vector, add=add, fast_accum=not add, **scales)
    expected = exact(a, b) + (0 if vector is None else vector.double()) + (before.double() if add else 0)
    assert close(out, expected)
    (value, _, _, (room, size, stream)), *_ = lib.calls
    assert (value["TRANSA"], value["TRANSB"]) == (cublaslt.OP_T, cublaslt.OP_N)  # what Hopper has for FP8
    assert value["FAST_ACCUM"] == (not add) and (room, size, stream) == (None, 0, 7)


def test_fp8_result_with_its_scale_and_amax(lib):
    a, b, scale, amax = scaled(M, K), scaled(N, K), torch.tensor(0.5), torch.tensor(9e9)
    out = torch.empty(M, N, dtype=E4M3.dtype)
    scales = {"a_scale": a.scale_inv, "b_scale": b.scale_inv}
    cublaslt.product(a.payload, b.payload, out, out_scale=scale, amax=amax, **scales)
    assert close(out.float() / scale, exact(a, b), 2**-4) and close(amax, exact(a, b).abs().max())
    cublaslt.product(a.payload, b.payload, out, amax=amax, **scales)  # the scale of the call before is forgotten
    assert close(out.float(), exact(a, b), 2**-4)


def test_a_plan_is_made_once_a_shape_and_follows_the_scales(lib):
    a, b = scaled(M, K), scaled(N, K)
    made = []
    cublaslt.on_plan = made.append
    for factor in (1.0, 2.0, 3.0):
        out = torch.empty(M, N)
        scale = a.scale_inv * factor
        cublaslt.product(a.payload, b.payload, out, a_scale=scale, b_scale=b.scale_inv)
        assert close(out, factor * exact(a, b))
    cublaslt.product(a.payload, b.payload, out, a_scale=scale, b_scale=b.scale_inv, add=True)
    assert [str(plan.problem) for plan in made] == [
        "32 x 48 x 80 E4M3 x E4M3 -> FP32",
        "32 x 48 x 80 E4M3 x E4M3 -> FP32, added",
    ]
    assert cublaslt.plans() == made and made[0].problem.flops == 2 * M * N * K


def test_an_addresss_alignment_is_part_of_the_shape(lib):
    memory = torch.randn(M * K + 1).to(BF16)
    b, out = torch.randn(N, K).to(BF16), torch.empty(M, N)
    for offset in (0, 1):
        a = memory[offset : M * K + offset].view(M, K)
        cublaslt.product(a, b, out)
        assert close(out, a.double() @ b.double().t())
    assert [plan.problem.align for plan in cublaslt.plans()] == [16, 2]


@pytest.mark.parametrize(
    ("a", "out"),
    [
        (torch.empty(M, 2 * K)[:, ::2], torch.empty(M, N)),
        (torch.empty(1, K).expand(M, K), torch.empty(M, N)),
        (torch.empty(M, K), torch.empty(N, M).t()),
        (torch.empty(M, K), torch.empty(M, N + 1)),
        (torch.empty(M, K + 1), torch.empty(M, N)),
        (torch.empty(M, K).to(E4M3.dtype), torch.empty(M, N)),
    ],
    ids=["both strides", "no stride", "out by columns", "another out", "another k", "no scales"],
)
def test_what_no_gemm_reads_is_refused(lib, a, out):
    with pytest.raises(ValueError, match=r"GEMM|product"):
        cublaslt.product(a, torch.empty(N, K, dtype=a.dtype), out)


def test_a_failure_names_the_status_and_the_shape(lib):
    lib.favourites = []
    with pytest.raises(CublasLtError, match=r"CUBLAS_STATUS_NOT_SUPPORTED: 32 x 48 x 80 BF16 x BF16 -> FP32"):
        cublaslt.product(torch.zeros(M, K, dtype=BF16), torch.zeros(N, K, dtype=BF16), torch.empty(M, N))


# The seam


@pytest.mark.parametrize("bias", [None, BF16, FP32])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_backend_does_what_it_fuses(served, bias, residual, dtype):
    a, b = scaled(M, K), scaled(N, K)
    epilogue = {"bias": None if bias is None else torch.randn(N).to(bias)}
    epilogue["residual"] = torch.randn(M, N) if residual else None
    expected = exact(a, b) + sum(part.double() for part in epilogue.values() if part is not None)
    within = 1e-6 if dtype is FP32 else 2**-7
    assert close(gemm(a, b, Epilogue(dtype=dtype, **epilogue)), expected, within)
    before = torch.randn(M, N).to(dtype)
    into = before.clone()
    assert gemm(a, b, Epilogue(into=into, accumulate=True, **epilogue)) is into
    assert close(into, expected + before.double(), within)
    added_by_the_gemm = served.calls[-1][1] == 1.0
    assert added_by_the_gemm == (not residual)


@pytest.mark.parametrize("storage", ["bf16", "fp32"])
def test_a_dense_store_writes_the_first_gradient_and_adds_the_others_in_the_gemm(served, storage):
    store = DenseStore(1, 2048 + N * K, storage, "cpu")
    store.dense().fill_(5.0)  # of an earlier step
    sink = GradSink(store, 2048, torch.Size((N, K)), (0, 0, 0))
    sink.begin_step(1)
    expected = 0
    for _ in range(3):
        x, dy = scaled(M, K), scaled(M, N, E5M2)
        sink.take(Product(dy.T, x.T))
        expected = expected + dy.dequantize().double().t() @ x.dequantize().double()
    within = 1e-6 if storage == "fp32" else 2**-7
    assert close(store.dense()[2048:].view(N, K), expected, within) and (store.dense()[:2048] == 5).all()
    assert [beta for _, beta, _, _ in served.calls] == [0.0, 1.0, 1.0]
    assert not any(value["FAST_ACCUM"] for value, *_ in served.calls)


def test_without_the_library_torch_serves_and_a_warning_says_why(monkeypatch):
    monkeypatch.setattr(cublaslt, "bound", lambda: False)
    asked = []
    otherwise = ScaledMM()
    monkeypatch.setattr(otherwise, "product", lambda *call: asked.append(call), raising=False)
    backend = CublasLt(otherwise)
    with pytest.warns(UserWarning, match="cuBLASLt is not bound"):
        assert backend.fuses == frozenset()
    backend.product(1, 2, 3, True)
    assert asked == [(1, 2, 3, True)]


@pytest.mark.parametrize("main", [FP32, BF16])
@pytest.mark.parametrize("bound", [True, False])
def test_the_stand_in_for_apex_adds_a_weight_gradient(lib, main, bound, monkeypatch):
    monkeypatch.setattr(cublaslt, "bound", lambda: bound)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for x, dy in (
        (torch.randn(M, K).to(BF16), torch.randn(M, N).to(BF16)),
        (torch.randn(M, 2 * K).to(BF16)[:, :K], torch.ones(1, 1, dtype=BF16).expand(M, N)),
        (torch.empty(0, K, dtype=BF16), torch.empty(0, N, dtype=BF16)),
        (torch.randn(M, K), torch.randn(M, N)),
    ):
        if x.dtype is FP32 and main is BF16:
            continue
        main_grad = torch.randn(N, K).to(main)
        expected = main_grad.double() + dy.double().t() @ x.double()
        getattr(wgrad.MODULE, f"wgrad_gemm_accum_fp{32 if main is FP32 else 16}")(x, dy, main_grad)
        assert close(main_grad, expected, 1e-6 if main is FP32 and (bound or x.dtype is FP32) else 2**-6)
    assert len(lib.calls) == (2 if bound else 0)


# What is chosen, and kept


def test_what_was_searched_is_used_if_it_runs_here(lib):
    a, b, out = torch.zeros(M, K).to(BF16), torch.zeros(N, K).to(BF16), torch.empty(M, N)
    searched = Choice("03" * 64, 0.5, 0.75)
    for works, expected in ((b"\3" * 64, b"\3" * 64), (b"\4" * 64, lib.favourites[0])):
        lib.works_with = works
        cublaslt.look_up = lambda problem: searched
        cublaslt.renew()
        cublaslt.product(a, b, out)
        assert lib.calls[-1][2] == expected
        described = cublaslt.plans()[0].described()
        assert described.endswith("(first choice 0)") == (expected == works)


def test_the_file_is_added_to_in_one_step_and_a_broken_one_is_as_none(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_FP8_CACHE", str(tmp_path))
    file = gemm_search.path("NVIDIA H200 (x)", 130100)
    assert file == tmp_path / "gemm/NVIDIA-H200-x--cublas130100.json"
    one, two = Choice("01" * 64, 1.0, 2.0), Choice("02" * 64, 3.0, 4.0)
    assert gemm_search.load(file) == {}
    gemm_search.save(file, {"a": one})
    gemm_search.save(file, {"b": two})
    assert gemm_search.load(file) == {"a": one, "b": two} and list(file.parent.iterdir()) == [file]
    for broken in ("", "[]", "{", '{"a": 3}', '{"a": {"algo": "zz"}}', '{"a": {"algo": "01", "ms": 1}}'):
        file.write_text(broken)
        assert gemm_search.load(file) == {}
    with pytest.raises(TypeError):
        gemm_search.save(file, {"a": Choice(b"1", 1.0, 2.0)})  # cannot be written
    assert file.read_text() == broken and list(file.parent.iterdir()) == [file]


def test_rank_0_searches_what_no_file_has_and_the_rest_use_it(lib, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_FP8_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    asked = []

    def search(problem, device):
        asked.append(str(problem))
        if problem.add:
            raise CublasLtError("cuBLASLt: nothing ran")
        return Choice("02" * 64, 1.0, 2.0)

    monkeypatch.setattr(gemm_search, "search", search)
    a, b, out = torch.zeros(M, K).to(BF16), torch.zeros(N, K).to(BF16), torch.zeros(M, N)
    assert gemm_search.read() == 0
    try:
        for add in (False, True):
            cublaslt.product(a, b, out, add=add)
        lines = gemm_search.tune()
        name = "32 x 48 x 80 BF16 x BF16 -> FP32"
        assert asked == [name, f"{name}, added"] and "first choice stays" in lines[1]
        cublaslt.product(a, b, out)
        assert lib.calls[-1][2] == b"\2" * 64
        assert gemm_search.read() == 1
        gemm_search.tune()
        assert asked == [name, f"{name}, added"]  # the one is in the file, the other was not met again
    finally:
        gemm_search.forget()
    cublaslt.product(a, b, out)
    assert lib.calls[-1][2] == lib.favourites[0]


def test_texts_of_problems_tell_them_apart():
    shape = dict.fromkeys(Problem._fields, 16) | {"a": BF16, "b": BF16, "d": FP32, "bias": None}
    shape |= dict.fromkeys(("a_rows", "b_rows"), True) | dict.fromkeys(("fast_accum", "add", "amax"), False)
    other = {"m": 32, "n": 32, "k": 32, "a": FP16, "b": FP16, "d": BF16, "a_ld": 32, "b_ld": 32, "d_ld": 32, "align": 8}
    other |= {"a_rows": False, "b_rows": False, "fast_accum": True, "bias": BF16, "add": True, "amax": True}
    assert set(other) == set(Problem._fields)
    texts = set()
    for one, two in itertools.combinations_with_replacement(other, 2):
        texts.add(str(Problem(**(shape | {one: other[one], two: other[two]}))))
    assert len(texts) == len(other) * (len(other) + 1) // 2


def test_each_shape_is_said_once(served):
    said = []
    undo = announce.announce("cpu", said.append)
    a, b = scaled(M, K), scaled(N, K)
    for _ in range(2):
        gemm(a, b, fast_accum=True)
    undo()
    gemm(b, a)
    assert len(said) == 1 and said[0].startswith("GEMM 32 x 48 x 80 E4M3 x E4M3 -> BF16, fast: cublaslt")
    use("reference")
    undo = announce.announce("cpu", said.append)
    for _ in range(2):
        gemm(a, b, Epilogue(into=torch.zeros(M, N), accumulate=True))
    undo()
    gemm(a, a)
    assert said[1:] == ["GEMM 32 x 48 x 80 E4M3 x E4M3 -> FP32: reference"]  # which adds nothing itself


RANKS = """
import torch, torch.distributed as dist
from megatron_fp8.ops import cublaslt, gemm_search
from megatron_fp8.ops.cublaslt import Choice, Problem
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.cuda.get_device_name = lambda: f"GPU {rank}"
torch.cuda.current_device, torch.cuda.empty_cache = lambda: 0, lambda: None
bf16, how = torch.bfloat16, (True, True, 32, 32, 16, 16, False, None, False, False)
problems = [Problem(m, 16, 32, bf16, bf16, bf16, *how) for m in (16, 32, 48)]
met = [problems[:2], problems[1:]][rank]
cublaslt.plans = lambda: [type("Plan", (), {"problem": problem}) for problem in met]
searched = []
gemm_search.search = lambda problem, device: searched.append(problem) or Choice(f"{problem.m:02d}" * 64, 1.0, 2.0)
assert gemm_search.read() == 0
lines = gemm_search.tune()
assert len(searched) == len(lines) == (3 if rank == 0 else 0), (rank, searched)
assert [cublaslt.look_up(problem).algo[:2] for problem in problems] == ["16", "32", "48"]
gemm_search.forget()
assert cublaslt.look_up is None and gemm_search.read() == 3  # rank 0's file: the other's has another name
assert [cublaslt.look_up(problem).algo[:2] for problem in problems] == ["16", "32", "48"]
dist.destroy_process_group()
"""


def test_all_ranks_use_rank_0s_search(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    env = {"CUDA_VISIBLE_DEVICES": "", "MEGATRON_FP8_CACHE": str(tmp_path)}
    forked(2, [str(tmp_path / "ranks.py")], tmp_path / "log", timeout=250, env=env)
    assert [file.name for file in (tmp_path / "gemm").iterdir()] == [f"GPU-0-cublas{cublaslt.version()}.json"]
