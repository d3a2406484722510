"""The products of all experts at once (grouped.py) as Triton kernels: for GPUs without the library of csrc/.

    rows   D (R', N)    = A (R', K) B_e (N, K)^T
    sums   D_e (M, N)   = A (M, R') B (N, R')^T, summed over expert e's part of R' alone; or added to D_e

A block takes every BLOCKS-th tile of 128 rows by BN columns, along the columns first: the blocks that run at a time
then read few experts' B, and few rows of A, from the L2 cache. The tables of ops/groups.py tell how many tiles there
are and whose they are, so the host waits for no counts, and a recorded launch follows counts that have changed.
Operands are read, and results written, by TMA. Its descriptors have an axis of experts, if a matrix is one of several:
so a tile at an expert's edge neither reads nor writes the next expert's.

Sums: the tensor core sums all of K, or with `promote` that much of it, and the partial sums are added in float32. They
need as many registers as the sums: a thread then keeps 72 bytes in memory, and such a tile of 256 columns is still
faster than one of 128. Triton 3.6 makes no warps that only load on Hopper, as csrc/ has them: it ignores the
hint if 8 warps multiply, and fails to compile if 4 do.

Source: the persistent matrix product of Triton's tutorials; DeepGEMM's "contiguous layout" for the tables.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..ops.groups import TILE, Groups

STEP = 128  # of K
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Shape:
    """A tile's columns, and how a kernel is compiled.

    flatten: the next tile's loads begin while one is written. split: a tile is written in halves, which leaves shared
    memory for one more stage.
    """

    columns: int
    warps: int
    stages: int
    flatten: bool = False
    split: bool = False


# The fastest on an H200 (docs/performance.md). A tile in float32 takes twice the shared memory.
FAST, PROMOTED, FLOAT32 = Shape(256, 8, 4, flatten=True, split=True), Shape(256, 8, 4, split=True), Shape(128, 8, 4)
# On other GPUs these would need more shared memory than there is: 240 KiB of a B200's 227, 176 of an RTX's 99. This one
# needs 96 at most. It has been compiled for them, and not run.
ELSEWHERE = Shape(128, 8, 2, split=True)


@triton.jit(do_not_specialize=["experts"])
def _rows_kernel(
    a, b, d, scale_a_ptr, scale_b_ptr, first_ptr, expert_ptr, experts, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, PROMOTE: tl.constexpr,
    OUT: tl.constexpr, FLATTEN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    tiles = tl.load(first_ptr + experts) * across
    for tile in tl.range(tl.program_id(0), tiles, BLOCKS, flatten=FLATTEN):
        m = tile // across
        n = tile % across
        e = tl.load(expert_ptr + m)
        sums = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            x = a.load([m * BM, k])
            w = b.load([e, n * BN, k]).reshape(BN, BK)
            sums = tl.dot(x, w.T, sums, max_num_imprecise_acc=PROMOTE)
        y = sums * (tl.load(scale_a_ptr + e) * tl.load(scale_b_ptr + e))
        if SPLIT:
            left, right = tl.split(y.reshape(BM, 2, BN // 2).permute(0, 2, 1))
            d.store([m * BM, n * BN], left.to(OUT))
            d.store([m * BM, n * BN + BN // 2], right.to(OUT))
        else:
            d.store([m * BM, n * BN], y.to(OUT))


@triton.jit
def _store_sum(d, e, row, column, y, OUT: tl.constexpr, ADD: tl.constexpr):
    if ADD:
        y += d.load([e, row, column]).reshape(y.shape).to(tl.float32)
    d.store([e, row, column], y.to(OUT).reshape(1, y.shape[0], y.shape[1]))


@triton.jit(do_not_specialize=["experts"])
def _sums_kernel(
    a, b, d, scale_a_ptr, scale_b_ptr, first_ptr, experts, M, N,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, PROMOTE: tl.constexpr,
    OUT: tl.constexpr, FLATTEN: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    each = tl.cdiv(M, BM) * across
    for tile in tl.range(tl.program_id(0), experts * each, BLOCKS, flatten=FLATTEN):
        e = tile // each
        m = tile % each // across
        n = tile % across
        begin = tl.load(first_ptr + e) * BK
        end = tl.load(first_ptr + e + 1) * BK
        sums = tl.zeros((BM, BN), tl.float32)
        for k in range(begin, end, BK):
            x = a.load([m * BM, k])
            w = b.load([n * BN, k])
            sums = tl.dot(x, w.T, sums, max_num_imprecise_acc=PROMOTE)
        y = sums * (tl.load(scale_a_ptr + e) * tl.load(scale_b_ptr + e))
        if SPLIT:
            left, right = tl.split(y.reshape(BM, 2, BN // 2).permute(0, 2, 1))
            _store_sum(d, e, m * BM, n * BN, left, OUT, ADD)
            _store_sum(d, e, m * BM, n * BN + BN // 2, right, OUT, ADD)
        else:
            _store_sum(d, e, m * BM, n * BN, y, OUT, ADD)


@functools.cache
def _blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@functools.cache
def _on_hopper(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


def _shape(d: torch.Tensor, promote: int) -> Shape:
    if not _on_hopper(d.device):
        return ELSEWHERE
    return FLOAT32 if d.dtype == torch.float32 else PROMOTED if promote else FAST


def _described(t: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1] * (t.dim() - 2) + [rows, columns])


def rows(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, groups: Groups,
    promote: int = 0, shape: Shape | None = None,
) -> None:  # fmt: skip
    """Write d (R', N) = a (R', K) b_e^T, for b (E, N, K), of scales (E,). N and K must be multiples of 16.

    Rows beyond the last tile are not written.
    """
    shape = shape or _shape(d, promote)
    experts, n, k = b.shape
    operands = _operands(a, b, d, shape)
    tables = scale_a, scale_b, groups.first, groups.expert
    blocks = _blocks(a.device)
    _rows_kernel[(blocks,)](*operands, *tables, experts, n, k, BLOCKS=blocks, **_constants(d, promote, shape))


def sums(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, groups: Groups,
    add: bool = False, promote: int = 0, shape: Shape | None = None,
) -> None:  # fmt: skip
    """Write d (E, M, N), or add to it, a (M, R') b (N, R')^T of each expert's part of R'. N: a multiple of 16."""
    shape = shape or _shape(d, promote)
    experts, m, n = d.shape
    operands = _operands(a, b, d, shape)
    tables = scale_a, scale_b, groups.first
    blocks = _blocks(a.device)
    constants = _constants(d, promote, shape) | {"ADD": add}
    _sums_kernel[(blocks,)](*operands, *tables, experts, m, n, BLOCKS=blocks, **constants)


def _operands(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, shape: Shape) -> tuple[TensorDescriptor, ...]:
    written = shape.columns // (2 if shape.split else 1)
    return _described(a, TILE, STEP), _described(b, shape.columns, STEP), _described(d, TILE, written)


def _constants(d: torch.Tensor, promote: int, shape: Shape) -> dict:
    tile = {"BM": TILE, "BN": shape.columns, "BK": STEP, "PROMOTE": promote or None, "OUT": _TYPES[d.dtype]}
    how = {"FLATTEN": shape.flatten, "SPLIT": shape.split}
    return tile | how | {"num_warps": shape.warps, "num_stages": shape.stages}
