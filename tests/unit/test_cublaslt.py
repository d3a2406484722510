"""The binding of cuBLASLt, and calls through plans, without a GPU (gemm_libraries.py).

The rest is in tests/gpu/test_cublaslt_cuda.py.
"""

import ctypes
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
from gemm_libraries import BF16, DTYPES, FP16, FP32, K, M, N, close, exact, scaled

from megatron_fp8.engine.grad_store import DenseStore, GradSink
from megatron_fp8.gemm import Epilogue, Product, cublaslt, cublaslt_library, fused_wgrad, gemm, gemm_log, plans
from megatron_fp8.gemm.cublaslt import CublasLtError
from megatron_fp8.gemm.cublaslt_library import CUDA_TYPES, DESC, PREF, Heuristic
from megatron_fp8.gemm.interface import Planned, ScaledMM, use
from megatron_fp8.gemm.plans import Problem
from megatron_fp8.numerics import E4M3, E5M2

if not cublaslt.bound():
    pytest.skip(f"no cuBLASLt: {cublaslt.why_not()}", allow_module_level=True)


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
    for name, number in cublaslt_library.CONFIG.items():
        assert lt[f"CUBLASLT_ALGO_CONFIG_{config.get(name, 'CLUSTER_SHAPE_ID')}"] == number
    assert {f"CUBLASLT_MATMUL_TILE_{name}": n for name, n in cublaslt_library.TILES.items()}.items() <= lt.items()
    assert lt["CUBLASLT_EPILOGUE_BIAS"] == cublaslt_library.EPILOGUE_BIAS
    assert lt["CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE"] == cublaslt_library.REDUCTION_COMPUTE_TYPE
    names = {FP32: "32F", FP16: "16F", BF16: "16BF", torch.float8_e4m3fn: "8F_E4M3", torch.float8_e5m2: "8F_E5M2"}
    assert {types[f"CUDA_R_{names[dtype]}"]: dtype for dtype in CUDA_TYPES} == DTYPES
    assert status["CUBLAS_COMPUTE_32F"] == cublaslt_library.COMPUTE_32F
    assert status["CUBLAS_OP_T"] == cublaslt_library.OP_T
    assert status["CUBLAS_STATUS_NOT_SUPPORTED"] == cublaslt_library.NOT_SUPPORTED


def test_structures_have_the_sizes_that_the_header_says():
    text = header("cublasLt.h")
    words = re.search(r"uint64_t data\[(\d+)\];\s*} cublasLtMatmulAlgo_t", text)[1]
    assert ctypes.sizeof(cublaslt_library.Algo) == 8 * int(words) == 64
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
    assert plans.product(a, b, out, add=True) is out
    assert close(out, expected + before[:, :N].double(), within)
    plans.product(a, b, out)
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
    plans.product(a.payload, b.payload, out, bias=vector, add=add, fast_accum=not add, **scales)
    expected = exact(a, b) + (0 if vector is None else vector.double()) + (before.double() if add else 0)
    assert close(out, expected)
    (value, _, _, (room, size, stream)), *_ = lib.calls
    only = (cublaslt_library.OP_T, cublaslt_library.OP_N)  # Hopper's only layout for FP8
    assert (value["TRANSA"], value["TRANSB"]) == only
    assert value["FAST_ACCUM"] == (not add) and (room, size, stream) == (None, 0, 7)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_an_fp8_result_is_refused(lib, fmt):
    a, b, out = scaled(M, K), scaled(N, K), torch.empty(M, N, dtype=fmt.dtype)
    with pytest.raises(ValueError, match=f"a GEMM into {plans.NAMES[fmt.dtype]}"):
        plans.product(a.payload, b.payload, out, a_scale=a.scale_inv, b_scale=b.scale_inv)
    assert not lib.calls


def test_the_oldest_plan_goes_if_too_many_are_kept(lib, monkeypatch):
    """Experts have another number of rows in each call."""
    monkeypatch.setattr(plans, "KEPT", 2)
    b = scaled(N, K)
    for rows in (16, 32, 48, 16):
        a = scaled(rows, K)
        out = torch.empty(rows, N, dtype=BF16)
        plans.product(a.payload, b.payload, out, a_scale=a.scale_inv, b_scale=b.scale_inv)
        assert close(out, exact(a, b), 2**-8)
    assert [str(plan.problem).split()[0] for plan in plans.plans()] == ["48", "16"]


def test_a_plan_is_made_once_a_shape_and_follows_the_scales(lib):
    a, b = scaled(M, K), scaled(N, K)
    made = []
    plans.on_plan = made.append
    for factor in (1.0, 2.0, 3.0):
        out = torch.empty(M, N)
        scale = a.scale_inv * factor
        plans.product(a.payload, b.payload, out, a_scale=scale, b_scale=b.scale_inv)
        assert close(out, factor * exact(a, b))
    plans.product(a.payload, b.payload, out, a_scale=scale, b_scale=b.scale_inv, add=True)
    assert [str(plan.problem) for plan in made] == [
        "32 x 48 x 80 E4M3 x E4M3 -> FP32",
        "32 x 48 x 80 E4M3 x E4M3 -> FP32, added",
    ]
    assert plans.plans() == made and made[0].problem.flops == 2 * M * N * K


def test_an_addresss_alignment_is_part_of_the_shape(lib):
    memory = torch.randn(M * K + 1).to(BF16)
    b, out = torch.randn(N, K).to(BF16), torch.empty(M, N)
    for offset in (0, 1):
        a = memory[offset : M * K + offset].view(M, K)
        plans.product(a, b, out)
        assert close(out, a.double() @ b.double().t())
    assert [plan.problem.align for plan in plans.plans()] == [16, 2]


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
def test_layouts_that_no_gemm_reads_are_refused(lib, a, out):
    with pytest.raises(ValueError, match=r"GEMM|product"):
        plans.product(a, torch.empty(N, K, dtype=a.dtype), out)


def test_a_failure_names_the_status_and_the_shape(lib):
    lib.favourites = []
    with pytest.raises(CublasLtError, match=r"CUBLAS_STATUS_NOT_SUPPORTED: 32 x 48 x 80 BF16 x BF16 -> FP32"):
        plans.product(torch.zeros(M, K, dtype=BF16), torch.zeros(N, K, dtype=BF16), torch.empty(M, N))


@pytest.mark.parametrize(
    ("tiles", "fast", "expected"),
    [
        ((209, 24, 197, 201), True, (201, 209, 24, 197)),
        ((209, 197, None), True, (197, 209, None)),
        ((209, 24), True, (209, 24)),
        ((24, 201, 209), True, (24, 201, 209)),  # another first choice stays
        ((209, 201), False, (209, 201)),
    ],
)
def test_the_fastest_under_load_comes_first(lib, monkeypatch, tiles, fast, expected):
    lib.favourites = [bytes([1 + i]) * 64 for i in range(len(tiles))]
    monkeypatch.setattr(cublaslt, "_setting", lambda algo, name: tiles[bytes(algo)[0] - 1])
    a, b, out = torch.zeros(M, K).to(E4M3.dtype), torch.zeros(N, K).to(E4M3.dtype), torch.empty(M, N, dtype=BF16)
    problem = plans.problem_of(a, b, out, 16, fast, None, False)
    found = cublaslt.CUBLASLT.candidates(problem, 0, (1, 1, 0))
    assert tuple(tiles[bytes.fromhex(one.name)[0] - 1] for one in found) == expected
    (first,) = cublaslt.CUBLASLT.candidates(problem, 0, (1, 1, 0), 1)
    assert first.name == found[0].name


# The seam


@pytest.mark.parametrize("bias", [None, BF16, FP32])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_backend_computes_the_parts_that_it_fuses(served, bias, residual, dtype):
    a, b = scaled(M, K), scaled(N, K)
    epilogue = {"bias": None if bias is None else torch.randn(N).to(bias)}
    epilogue["residual"] = torch.randn(M, N) if residual else None
    expected = exact(a, b) + sum(part.double() for part in epilogue.values() if part is not None)
    within = 1e-6 if dtype is FP32 else 2**-6  # parts that are not fused round again, up to four times
    assert close(gemm(a, b, Epilogue(dtype=dtype, **epilogue)), expected, within)
    assert served.calls[-1][1] == (residual and dtype is FP32)  # a residual of the result's type is C
    before = torch.randn(M, N).to(dtype)
    into = before.clone()
    assert gemm(a, b, Epilogue(into=into, accumulate=True, **epilogue)) is into
    assert close(into, expected + before.double(), within)
    assert served.calls[-1][1] == 1.0 and len(served.calls) == 2


def moved(x, by):
    """A copy of x at an address `by` elements past a multiple of 16 bytes."""
    memory = torch.empty(x.numel() + 16 + by, dtype=x.dtype)
    return memory[by : by + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize("unaligned", ["a", "b", "out", "bias", "residual"])
@pytest.mark.parametrize("add", [False, True])
def test_unaligned_memory_is_copied(lib, unaligned, add):
    a, b, before = scaled(M, K), scaled(N, K), torch.randn(M, N).to(BF16)
    given = {"a": a.payload, "b": b.payload, "out": before.clone(), "bias": torch.randn(N).to(BF16)}
    given |= {} if add else {"residual": torch.randn(M, N).to(BF16)}
    if unaligned not in given:
        return
    results = []
    for by in (0, 1):
        tensors = given | {unaligned: moved(given[unaligned], by)}
        out = tensors["out"]
        scales = {"a_scale": a.scale_inv, "b_scale": b.scale_inv}
        for _ in range(2):  # the second call finds the plan
            out.copy_(before)
            rest = {name: tensors[name] for name in ("bias", "residual") if name in tensors}
            assert plans.product(tensors["a"], tensors["b"], out, add=add, **scales, **rest) is out
        results.append(out)
    assert torch.equal(*results) and len(plans.plans()) == 1
    assert lib.in_place == [add] * 4  # a residual is apart from the result, also with copies
    expected = exact(a, b) + given["bias"].double() + (before if add else given["residual"]).double()
    assert close(results[0], expected, 2**-8)


@pytest.mark.parametrize("into", [False, True])
def test_the_backend_takes_unaligned_memory(served, into):
    a, b, bias = scaled(M, K), scaled(N, K), moved(torch.randn(N).to(BF16), 1)
    out = moved(torch.zeros(M, N, dtype=BF16), 1) if into else None
    got = gemm(a, b, Epilogue(bias=bias, into=out))
    assert close(got, exact(a, b) + bias.double(), 2**-8) and (got is out or not into)


def test_cutlass_runs_the_problems_that_it_takes_and_cublaslt_the_rest(served_cutlass, lib):
    a, b, dy = scaled(M, K), scaled(N, K), scaled(M, N, E5M2)
    bias, residual, grad = torch.randn(N).to(BF16), torch.randn(M, N).to(BF16), torch.randn(N, K)
    before = grad.clone()
    for fast in (True, False):
        y = gemm(a, b, Epilogue(bias=bias, residual=residual), fast_accum=fast)
        assert close(y, exact(a, b) + bias.double() + residual.double(), 2**-8)
    gemm(dy.T, a.T, Epilogue(into=grad, accumulate=True))
    assert close(grad, before.double() + exact(dy.T, a.T))
    assert [promote for _, promote, *_ in served_cutlass.calls] == [0, 128, 128] and not lib.calls
    assert close(gemm(a, b, Epilogue(dtype=FP16, bias=bias.half())), exact(a, b) + bias.double(), 2**-7)
    plans.product(dy.columns.float().to(BF16), a.columns.float().to(BF16), grad, add=True)
    assert len(lib.calls) == 2 and len(served_cutlass.calls) == 3
    made = [(plan.maker, plan.name) for plan in plans.plans()]
    assert made[:3] == [
        ("cutlass", "128x128 2x1 fast 8/0"),
        ("cutlass", "128x128 2x1 promoted/128 8/0"),
        ("cutlass", "128x256 2x1 promoted/128 8/0"),
    ]
    served_cutlass.status = 2
    with pytest.raises(RuntimeError, match=r"8/0: 32 x 48 x 80 E4M3 .*: it does not take this shape"):
        gemm(a, b, Epilogue(bias=bias, residual=residual))


@pytest.mark.parametrize("storage", ["bf16", "fp32"])
def test_a_dense_store_writes_the_first_gradient_and_adds_the_others_in_the_gemm(served, storage):
    store = DenseStore(1, 2048 + N * K, storage, "cpu")
    store.dense().fill_(5.0)  # an earlier step's gradient
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


def test_without_the_library_torch_runs_and_a_warning_says_why(monkeypatch):
    monkeypatch.setattr(cublaslt, "bound", lambda: False)
    asked = []
    otherwise = ScaledMM()
    monkeypatch.setattr(otherwise, "product", lambda *call: asked.append(call), raising=False)
    backend = Planned("cublaslt", otherwise)
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
        getattr(fused_wgrad.MODULE, f"wgrad_gemm_accum_fp{32 if main is FP32 else 16}")(x, dy, main_grad)
        assert close(main_grad, expected, 1e-6 if main is FP32 and (bound or x.dtype is FP32) else 2**-6)
    assert len(lib.calls) == (2 if bound else 0)


def test_each_problem_has_its_own_text():
    shape = dict.fromkeys(Problem._fields, 16) | {"a": BF16, "b": BF16, "d": FP32, "bias": None}
    shape |= dict.fromkeys(("a_rows", "b_rows"), True) | dict.fromkeys(("fast_accum", "add"), False)
    other = {"m": 32, "n": 32, "k": 32, "a": FP16, "b": FP16, "d": BF16, "a_ld": 32, "b_ld": 32, "d_ld": 32, "align": 8}
    other |= {"a_rows": False, "b_rows": False, "fast_accum": True, "bias": BF16, "add": True}
    assert set(other) == set(Problem._fields)
    texts = set()
    for one, two in itertools.combinations_with_replacement(other, 2):
        texts.add(str(Problem(**(shape | {one: other[one], two: other[two]}))))
    assert len(texts) == len(other) * (len(other) + 1) // 2


def test_each_shape_is_logged_once(served):
    said = []
    undo = gemm_log.announce("cpu", said.append)
    a, b = scaled(M, K), scaled(N, K)
    for _ in range(2):
        gemm(a, b, fast_accum=True)
    undo()
    gemm(b, a)
    assert len(said) == 1 and said[0].startswith("GEMM 32 x 48 x 80 E4M3 x E4M3 -> BF16, fast: cublaslt")
    use("reference")
    undo = gemm_log.announce("cpu", said.append)
    for _ in range(2):
        gemm(a, b, Epilogue(into=torch.zeros(M, N), accumulate=True))
    undo()
    gemm(a, a)
    assert said[1:] == ["GEMM 32 x 48 x 80 E4M3 x E4M3 -> FP32: reference"]  # it fuses nothing
