"""Tensor parallelism in real gloo groups of 2 and 4 processes: sums, linears, and overlap of collectives and GEMMs.

For each size, one group of processes does everything once (`work`) and saves each rank's results for the tests.
"""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_parts import OneWeight
from gloo_ranks import run_ranks
from test_reduce import in_blocks

from megatron_fp8 import gemm
from megatron_fp8.comm import tensor, wire
from megatron_fp8.layers import parallel
from megatron_fp8.layers.linear import product
from megatron_fp8.layers.parcel import Parcel, plan
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import DelayedScaling

SHAPES = {"blocks": (8, 4, 512), "odd": (4, 3, 50)}  # (s, b, h) of a sum; one of 4 ranks has 4096 or 150 elements
POISONS = ("nan", "inf")


def part(shape, rank: int) -> torch.Tensor:
    """A rank's contribution to a sum."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).bfloat16()


# --- the processes


def work(rank: int, ranks: int):
    return {
        **sums(rank),
        "linears": [linear(rank, ranks, *case) for case in cases()],
        "order": order(rank, ranks),
    }


def sums(rank: int) -> dict:
    group, found = dist.group.WORLD, {}

    def record(name, stages):
        wire.sent_bytes.clear()
        found[name] = wire.Flight(stages).land().clone(), Counter(wire.sent_bytes)

    for (name, shape), scatter, fp8 in itertools.product(SHAPES.items(), (False, True), (False, True)):
        record((name, scatter, fp8), tensor.add(part(shape, rank), group, scatter, fp8))
    ranks = group.size()
    mine = part(SHAPES["blocks"], rank).view(ranks, -1)
    others = torch.cat([mine[:rank], mine[rank + 1 :]])
    for fp8 in (False, True):
        room = torch.full((1 if fp8 else ranks, mine.shape[1]), torch.nan, dtype=torch.bfloat16)
        flight = wire.Flight(tensor.add_early(others, room, group, fp8))
        room[-1] = mine[rank]
        found["early", fp8] = flight.land(), None
    for value, scatter in itertools.product(POISONS, (False, True)):
        x = part(SHAPES["blocks"], rank)
        if rank == 1:
            x.view(-1)[7] = float(value)
        record((value, scatter), tensor.add(x, group, scatter, True))
    record("gather", tensor.gather(part((2, 3, 5), rank), group))
    return found


# Values of -1, 0 and 1, with 16 terms a rank: each rank's sums are exact in E4M3, so every layout gives the same bits.
TERMS, OUT, B = 16, 32, 2


def cases():
    yield from itertools.product(
        ("column", "row"), (True, False), ("bf16", "fp8"), ("bf16", "fp8", "forward", "backward"), (0, 1 << 60)
    )


def whole_problem(ranks: int, kind: str):
    """x (s, b, K), W (N, K) and dy (s, b, N)."""
    g = torch.Generator().manual_seed(5)
    k, n = (OUT, TERMS * ranks) if kind == "column" else (TERMS * ranks, OUT)

    def some(*shape):
        return torch.randint(-1, 2, shape, generator=g).bfloat16()

    return some(8 * ranks, B, k), some(n, k), some(8 * ranks, B, n)


def a_rank_alone():
    """A group of this rank alone."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    return groups[dist.get_rank()]


_alone = None


def prepared(rank, ranks, kind, sequence, gather, how):
    """The rank's x and dy, and a function that computes y from x."""
    global _alone
    _alone = _alone or a_rank_alone()
    x, w, dy = whole_problem(ranks, kind)
    cut = {"column": 0, "row": 1}[kind]
    one = OneWeight(w.chunk(ranks, cut)[rank].contiguous(), _alone)
    config = one.weight.config
    config.tp_gather, config.tp_reduce_scatter = gather, how
    one.weight.casts.scaling = DelayedScaling([E4M3, E5M2], 4, "max", 0, "cpu")
    one.weight.casts.scaling.warm, one.weight.casts.slots = True, (0, 1)
    if kind == "column":
        x, dy = (x.chunk(ranks, 0)[rank] if sequence else x), dy.chunk(ranks, 2)[rank].contiguous()
    else:
        x, dy = x.chunk(ranks, 2)[rank].contiguous(), (dy.chunk(ranks, 0)[rank] if sequence else dy)
    x = x.clone().requires_grad_()

    def forward():
        column = kind == "column"
        call = plan(
            one.weight, dist.group.WORLD, sequence, column and not sequence, training=True, sum_y=not column
        )
        return product(x, torch.zeros(0, requires_grad=True), Parcel(call))

    return one, x, dy, forward


def linear(rank, ranks, kind, sequence, gather, how, split_from):
    parallel.SPLIT_FROM = split_from
    wire.sent_bytes.clear()
    one, x, dy, forward = prepared(rank, ranks, kind, sequence, gather, how)
    y = forward()
    forwards = Counter(wire.sent_bytes)
    y.backward(dy)
    dw = one.bucket.grads.dense()[: one.weight.param.numel()].clone()  # the bucket is padded
    amaxes = one.weight.casts.scaling.amax.clone()
    return y.detach(), x.grad, dw, amaxes, forwards, wire.sent_bytes - forwards


class Handle:
    def __init__(self, name, handle, log):
        self._of = name, handle, log

    def wait(self):
        name, handle, log = self._of
        log.append(f"wait for {name}")
        handle.wait()


def order(rank, ranks):
    """The order of starts and waits for a column-parallel and a row-parallel linear, forward and backward."""
    found = {}
    names = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "sum", "all_to_all_single": "sum"}
    originals = {name: getattr(dist, name) for name in names}
    multiply = gemm.gemm

    def logged(name, start):
        def started(*args, **kwargs):
            log.append(names[name])
            return Handle(names[name], start(*args, **kwargs), log)

        return started

    def logged_gemm(a, b, *args, **kwargs):
        log.append("GEMM")
        return multiply(a, b, *args, **kwargs)

    for kind, how in itertools.product(("column", "row"), ("bf16", "fp8")):
        parallel.SPLIT_FROM, log = 0, []
        one, _, dy, forward = prepared(rank, ranks, kind, True, "fp8", how)
        one.weight.take_gradient = lambda product, log=log: log.append("wgrad")
        try:
            for name, start in originals.items():
                setattr(dist, name, logged(name, start))
            gemm.gemm = logged_gemm
            y = forward()
            log.append("backward")
            y.backward(dy)
        finally:
            for name, start in originals.items():
                setattr(dist, name, start)
            gemm.gemm = multiply
        found[kind, how] = log
    return found


@pytest.fixture(scope="module", params=(2, 4))
def run(request, tmp_path_factory):
    """.ranks and .found[rank][name]."""
    ranks, folder = request.param, tmp_path_factory.mktemp("ranks")
    found = run_ranks(work, ranks, folder)
    return SimpleNamespace(ranks=ranks, found=found)


# --- sums


def in_fp8(x: torch.Tensor) -> torch.Tensor:
    """x after it was sent by another rank in FP8, in whole blocks or padded."""
    flat = torch.nn.functional.pad(x.float().flatten(), (0, -x.numel() % 128))
    return in_blocks(flat)[: x.numel()].float().nan_to_num(0.0)  # a block of zeros has no exponent


def own_sum(shape, ranks: int, rank: int) -> torch.Tensor:
    """A rank's part of the sum in FP32: its own contribution, then the others' in rank order."""
    rows = [part(shape, r).view(ranks, -1)[rank] for r in range(ranks)]
    total = rows[rank].float()
    for r in range(ranks):
        if r != rank:
            total = total + in_fp8(rows[r])
    return total


@pytest.mark.parametrize("name", SHAPES)
def test_a_part_of_a_sum_in_fp8_is_rounded_when_sent_and_at_the_end(run, name):
    s, b, h = SHAPES[name]
    for rank, found in enumerate(run.found):
        got, _ = found[name, True, True]
        assert got.shape == (s // run.ranks, b, h) and got.dtype == torch.bfloat16
        assert torch.equal(got.flatten(), own_sum(SHAPES[name], run.ranks, rank).bfloat16())
        exact = sum(part(SHAPES[name], r).double().view(run.ranks, -1)[rank] for r in range(run.ranks))
        error = (got.double().flatten() - exact).norm() / exact.norm()
        assert error == pytest.approx(0.0265 * ((run.ranks - 1) / run.ranks) ** 0.5, rel=0.15)


def test_all_of_a_sum_in_fp8_is_the_same_on_all_ranks(run):
    shape = SHAPES["blocks"]
    totals = [own_sum(shape, run.ranks, rank) for rank in range(run.ranks)]
    expected = torch.cat([in_fp8(total) for total in totals]).view(shape).bfloat16()
    assert all(torch.equal(found["blocks", False, True][0], expected) for found in run.found)
    odd = [found["odd", False, True][0] for found in run.found]
    exact = sum(part(SHAPES["odd"], r).double() for r in range(run.ranks))
    assert all(torch.equal(one, odd[0]) for one in odd) and odd[0].shape == SHAPES["odd"]
    assert (odd[0].double() - exact).norm() / exact.norm() < 0.045


@pytest.mark.parametrize("name", SHAPES)
def test_a_sum_in_bf16(run, name):
    exact = sum(part(SHAPES[name], r).double() for r in range(run.ranks))
    for rank, found in enumerate(run.found):
        own = exact.view(run.ranks, -1)[rank]
        assert (found[name, True, False][0].double().flatten() - own).norm() / own.norm() < 5e-3
        assert (found[name, False, False][0].double() - exact).norm() / exact.norm() < 5e-3


def test_an_early_sum_reads_its_own_part_late(run):
    for rank, found in enumerate(run.found):
        assert torch.equal(found["early", True][0], found["blocks", True, True][0].flatten())
        exact = sum(part(SHAPES["blocks"], r).double().view(run.ranks, -1)[rank] for r in range(run.ranks))
        assert torch.equal(found["early", False][0], exact.bfloat16())  # rounded once


def test_bytes_of_a_sum(run):
    """2 bytes an element in BF16, 1 + 1/128 in FP8, for the parts sent; twice that if all ranks get the whole sum."""
    s, b, h = SHAPES["blocks"]
    leaving = s * b * h * (run.ranks - 1) // run.ranks
    for found in run.found:
        for scatter, fp8 in itertools.product((False, True), (False, True)):
            bytes_ = leaving * (1 if scatter else 2) * (129 / 128 if fp8 else 2)
            assert found["blocks", scatter, fp8][1] == {tensor.SUMS: bytes_}
        whole, sent = found["gather"]
        assert sent == {tensor.GATHERS: (run.ranks - 1) * 2 * 3 * 5 * 2}
        assert torch.equal(whole, torch.cat([part((2, 3, 5), r) for r in range(run.ranks)]))


@pytest.mark.parametrize("value", POISONS)
def test_the_non_finite_becomes_nan(run, value):
    for rank, found in enumerate(run.found):
        assert not found[value, False][0].flatten()[7].isfinite()
        assert found[value, False][0].flatten()[128:].isfinite().all()
        assert found[value, True][0].flatten()[7].isfinite() == (rank != 0)


# --- linears


def test_every_way_gives_the_bits_of_one_process(run):
    for kind in ("column", "row"):
        x, w, dy = (t.double() for t in whole_problem(run.ranks, kind))
        y, dx, dw = x @ w.T, dy @ w, dy.flatten(0, 1).T @ x.flatten(0, 1)
        assert y.abs().sum() and y.abs().max() > 4
        for rank, found in enumerate(run.found):
            for case, got in zip(cases(), found["linears"], strict=True):
                if case[0] != kind:
                    continue
                sequence = case[1]
                if kind == "column":
                    expected = y.chunk(run.ranks, 2)[rank], dx.chunk(run.ranks, 0)[rank] if sequence else dx
                    expected += (dw.chunk(run.ranks, 0)[rank],)
                else:
                    expected = y.chunk(run.ranks, 0)[rank] if sequence else y, dx.chunk(run.ranks, 2)[rank]
                    expected += (dw.chunk(run.ranks, 1)[rank],)
                for name, one, other in zip(("y", "dx", "dW"), got, expected, strict=False):
                    way = {("row", "y"): "forward", ("column", "dx"): "backward"}.get((kind, name))
                    if not sequence and case[3] in ("fp8", way) and way:
                        other = in_fp8(other)  # the sum is cast to be gathered
                    assert torch.equal(one.double().flatten(), other.flatten()), (case, name)
                assert got[3].tolist() == [1, 1], case  # amax of both operands


def test_the_bytes_that_a_linear_sends(run):
    """Gathers of x (forward and backward) or dy, sums of y or dx. All in FP8 takes 1/2 + 1/128 of BF16's bytes."""
    tokens = 8 * run.ranks * B
    share = (run.ranks - 1) / run.ranks
    for found in run.found:
        for (kind, sequence, gather, how, _), got in zip(cases(), found["linears"], strict=True):
            gathered, summed = tokens * OUT * share, tokens * OUT * share
            gathered *= 1 if gather == "fp8" else 2
            forward, backward = (
                2048 * (run.ranks - 1) * 129 / 128 if how in ("fp8", way) else summed * 2  # padded to 2048 elements
                for way in ("forward", "backward")
            )
            if not sequence:
                gathered, forward, backward = 0, 2 * forward, 2 * backward
            expected = {
                "column": (Counter(tp_gather=gathered), Counter(tp_gather=gathered, tp_sum=backward)),
                "row": (Counter(tp_sum=forward), Counter(tp_gather=gathered)),
            }[kind]
            assert tuple(map(Counter, got[4:])) == tuple(+counts for counts in expected)


@pytest.mark.parametrize("how", ["bf16", "fp8"])
def test_collectives_overlap_with_gemms(run, how):
    for rank, found in enumerate(run.found):
        # The rank's own rows, and those of the ranks before and after it.
        others = ["GEMM"] * (1 if rank in (0, run.ranks - 1) else 2)
        column, row = found["order"]["column", how], found["order"]["row", how]
        assert column == [
            *("gather", "GEMM", "wait for gather", *others, "backward"),
            *("gather", "GEMM", "sum", "wait for gather", "wgrad", "wait for sum"),
        ]
        assert row == [
            *(*others, "sum", "GEMM", "wait for sum", "backward"),
            *("gather", "GEMM", "wait for gather", *others, "wgrad"),
        ]
