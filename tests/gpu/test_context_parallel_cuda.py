"""Context-parallel attention's kernels on CUDA, each rank of N in turn in one process, against FP64.

What ranks send each other is handed over here: K and V whole, and what falls on other ranks' keys is added up.
"""

import contextlib
import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_fp8.layers import context_parallel
from megatron_fp8.layers.attention import _fastest_first
from megatron_fp8.layers.context_exchange import Block, own_chunks
from megatron_fp8.layers.packed import Documents

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SHAPES = [  # s, b, np, ng, hn, hv
    (2048, 2, 8, 8, 128, 128),
    (4096, 1, 8, 2, 128, 128),
    (768, 2, 6, 3, 64, 64),
    (1024, 1, 4, 4, 192, 128),
    (1024, 1, 4, 4, 40, 24),
]
NAMES = ("out", "dq", "dk", "dv")


def problem(shape, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """q, k, v, dy: (s, b, heads, width), fresh random data."""
    s, b, heads, groups, width, of_values = shape
    seed = torch.seed() % 2**32
    print(f"torch.manual_seed({seed})")  # shown when the test fails
    torch.manual_seed(seed)
    sizes = ((heads, width), (groups, width), (groups, of_values), (heads, of_values))
    return [torch.randn(s, b, *size, device=DEVICE, dtype=dtype) for size in sizes]


def exact(q, k, v, dy, ends=()) -> list[torch.Tensor]:
    """ends: of documents."""
    operands = [t.double().requires_grad_() for t in (q, k, v)]
    q, k, v = (t.permute(1, 2, 0, 3) for t in operands)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=DEVICE).triu(1)
    for end in ends:
        future[end:, :end] = True
    logits = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[3])).masked_fill_(future, -torch.inf)
    out = (logits.softmax(-1) @ v).permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, operands, dy.double())]


class Handed:
    """A rank's exchange that takes the other ranks' pairs from `wholes`, and adds gradients to `totals`.

    own: the rank's tokens; parts: (first query, tokens, chunks if they are one rank's) of each of the other blocks.
    """

    def __init__(self, pairs, group, *, own, parts, wholes, totals):
        self.own, self.parts, self.totals, self.count = own, parts, totals, len(parts)
        width = pairs.shape[3] // 2 if sum(t.shape[3] for t in wholes) < pairs.shape[3] else None
        self.widths = [width or t.shape[3] for t in wholes]  # padded alike, or not at all
        padded = [F.pad(t, (0, n - t.shape[3])) for t, n in zip(wholes, self.widths, strict=True)]
        self.whole = torch.cat(padded, -1)

    def blocks(self):
        for first, tokens, *chunks in self.parts:
            self.tokens = tokens
            yield Block(first, self.whole[tokens], *chunks)

    def send(self, gradients):
        self._add(self.tokens, *gradients)

    def add_received(self, dk, dv):
        self._add(self.own, dk, dv)

    def _add(self, tokens, *gradients):
        for total, part in zip(self.totals, gradients, strict=True):
            total.index_add_(0, tokens, part[..., : total.shape[3]].float())


def by_ranks(ranks: int, joined: bool, q, k, v, dy, monkeypatch, ends=()) -> list[torch.Tensor]:
    """The same of `ranks` ranks; dk and dv are sums in FP32 of what each has of them.

    joined: all earlier ranks' keys are one block, and all later ranks'; else each rank's are, as with documents.
    """
    longest = max(b - a for a, b in itertools.pairwise(ends)) if ends else 0
    chunks = torch.arange(len(q), device=DEVICE).view(ranks * 2, -1)
    halves = torch.stack([torch.stack([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)])  # (N, 2, c)
    out, dq = torch.empty_like(dy), torch.empty_like(q)
    totals = [torch.zeros(t.shape, device=DEVICE) for t in (k, v)]
    for rank in range(ranks):
        own = halves[rank].flatten()
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        earlier, between = list(halves[:rank, 0]), [both.flatten() for both in halves[rank + 1 :]]
        if joined:
            earlier, between = ([torch.cat(tokens)] if tokens else [] for tokens in (earlier, between))
        parts = [*((0, tokens) for tokens in earlier), *((len(own) // 2, tokens) for tokens in between)]
        documents = None
        if ends:
            others = [*((i,) for i in range(rank)), *(own_chunks(i, ranks) for i in range(rank + 1, ranks))]
            parts = [(*part, chunks) for part, chunks in zip(parts, others, strict=True)]
            documents = Documents(torch.tensor(ends, dtype=torch.int32, device=DEVICE), longest, group)
        handed = functools.partial(Handed, own=own, parts=parts, wholes=(k, v), totals=totals)
        monkeypatch.setattr(context_parallel, "Fetched" if ends else "Gathered", handed)
        operands = [t[own].requires_grad_() for t in (q, k, v)]
        with _fastest_first():
            y = context_parallel.attention(*operands, 1 / math.sqrt(q.shape[3]), group, documents=documents)
        y.backward(dy[own].flatten(2))
        out[own], dq[own] = y.detach().view(-1, *dy.shape[1:]), operands[0].grad
    return [out, dq, *totals]


@pytest.fixture(params=["as it comes", "flash", "deterministic"])
def kernel(request):
    """The kernel that torch takes, its flash kernel as the only fused one, and what deterministic algorithms leave."""
    torch.use_deterministic_algorithms(request.param == "deterministic")
    flash = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    with flash if request.param == "flash" else contextlib.nullcontext():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("ranks", "joined"), [(2, True), (4, True), (4, False)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_near_float64(shape, ranks, joined, kernel, monkeypatch):
    """Within 4 units of BF16's last place in the mean, as the kernels without context parallelism are."""
    given = problem(shape)
    for name, value, right in zip(NAMES, by_ranks(ranks, joined, *given, monkeypatch), exact(*given), strict=True):
        error = (value.double() - right).norm() / right.norm()
        assert error < 4 * 2**-9, (name, error.item())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_documents_near_float64(shape, ranks, monkeypatch):
    """One of no token, one of one, and one over several chunks: the kernel sees documents without queries or keys."""
    shape = (shape[0], 1, *shape[2:])
    ends = [0, 100, 100, 101, shape[0] // 3, shape[0] - 7, shape[0]]
    given = problem(shape)
    found = by_ranks(ranks, False, *given, monkeypatch, ends)
    for name, value, right in zip(NAMES, found, exact(*given, ends), strict=True):
        error = (value.double() - right).norm() / right.norm()
        assert error < 4 * 2**-9, (name, error.item())


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_a_block_has_the_logarithm_of_its_sum(shape, kernel):
    """Natural, in FP32, as merging takes it."""
    q, k, v, _ = problem(shape)
    scale = 1 / math.sqrt(q.shape[3])
    with _fastest_first():
        chosen = context_parallel._kernel(q, k, v)
    operands = [context_parallel._heads(t) for t in (q[len(q) // 2 :], k, v)]
    _, lse, _ = chosen.forward(*operands, False, scale)
    _, right, _ = context_parallel._REFERENCE.forward(*operands, False, scale)
    assert lse.dtype == torch.float32 and lse.shape == right.shape
    assert (lse - right).abs().max() < 1e-3
