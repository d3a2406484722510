"""Triton's grouped products fit the shared memory of the GPUs they are for. Triton's compiler needs no GPU."""

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_fp8.gemm import grouped_triton
from megatron_fp8.gemm.grouped_triton import ELSEWHERE, FAST, FLOAT32, PROMOTED

KIB = {90: 227, 100: 227, 120: 99, 89: 99}  # that a block may have, by compute capability
POINTERS = {"scale_a_ptr": "*fp32", "scale_b_ptr": "*fp32", "first_ptr": "*i32", "expert_ptr": "*i32"}
NIGHTLY = pytest.mark.slow  # 120 has as little
CASES = [
    *((90, shape, name) for shape, name in ((FAST, "rows"), (PROMOTED, "rows"), (PROMOTED, "bf16"), (FLOAT32, "fp32"))),
    *((capability, ELSEWHERE, name) for capability in (100, 120) for name in ("rows", "bf16", "fp32")),
    *(pytest.param(89, ELSEWHERE, name, marks=NIGHTLY) for name in ("rows", "bf16", "fp32")),
]


@pytest.mark.parametrize(("capability", "shape", "name"), CASES)
def test_shared_memory(capability, shape, name, tmp_path, monkeypatch):
    """name: rows, or sums of that type, which are added."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows, fast = name == "rows", shape is FAST
    kernel = grouped_triton._rows_kernel if rows else grouped_triton._sums_kernel
    one, out = "" if rows else "1, ", "fp32" if name == "fp32" else "bf16"
    types = POINTERS | dict.fromkeys(("experts", "M", "N", "K"), "i32") | {
        "a": f"tensordesc<{'fp8e4nv' if fast else 'fp8e5'}[128, 128]>",
        "b": f"tensordesc<fp8e4nv[{'1, ' if rows else ''}{shape.columns}, 128]>",
        "d": f"tensordesc<{out}[{one}128, {shape.columns // (2 if shape.split else 1)}]>",
    }  # fmt: skip
    constants = {"BM": 128, "BN": shape.columns, "BK": 128, "BLOCKS": 132, "PROMOTE": None if fast else 128,
                 "OUT": tl.float32 if name == "fp32" else tl.bfloat16, "FLATTEN": shape.flatten, "SPLIT": shape.split,
                 "ADD": True}  # fmt: skip
    names = [parameter.name for parameter in kernel.params]
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {name: constants[name] for name in names if name in constants})
    how = {"num_warps": shape.warps, "num_stages": shape.stages}
    made = compiled(source, target=GPUTarget("cuda", capability, 32), options=how)
    assert 0 < made.metadata.shared <= KIB[capability] << 10


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_shape_of_a_gpu(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    hopper = grouped_triton._on_hopper.__wrapped__(torch.device("cuda"))
    assert hopper == (capability == (9, 0))
    monkeypatch.setattr(grouped_triton, "_on_hopper", lambda device: hopper)
    for dtype, promote, tuned in (
        (torch.bfloat16, 0, FAST), (torch.bfloat16, 128, PROMOTED), (torch.float32, 128, FLOAT32)
    ):  # fmt: skip
        assert grouped_triton._shape(torch.empty(0, dtype=dtype), promote) is (tuned if hopper else ELSEWHERE)
