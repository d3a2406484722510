"""The gradient reductions in real gloo groups of 2, 4 and 8 processes, against rounding and sums in FP64.

For each size, one group of processes does every reduction once (`work`) and saves each rank's results for the tests.
"""

import functools
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_parts import Known, parts_of
from exact import magnitudes, same
from gloo_ranks import run_ranks

from megatron_fp8 import ops
from megatron_fp8.comm import wire
from megatron_fp8.comm.reduce import node_groups, reduce_blocks, reduce_fp32
from megatron_fp8.comm.shared import SharedScale
from megatron_fp8.numerics import E4M3
from megatron_fp8.numerics.auto_scaling import ScalingRule
from megatron_fp8.numerics.blocks import PackedBlocks

SIZES = (2, 4, 8)
LEVELS = {2: (), 4: (2,), 8: (2, 4)}  # ranks in a node
KINDS = ("gaussian", "student")
N = 2 * 2048  # elements of a shard
NODE_OF_TWO = "2 in a node, of every other rank"  # the data-parallel groups are the even and the odd ranks
POISONS = (float("nan"), float("inf"), -float("inf"))

SHARED_N, PADDING, STEPS = 640, 96, 8
GRID = torch.tensor([float(value) for value in magnitudes(E4M3)], dtype=torch.float64)
RULES = {
    "pre": ScalingRule("pre"),
    "post": ScalingRule("post"),
    "auto": ScalingRule("auto", threshold=4e-3, window=3),
    "every other step": ScalingRule("auto", threshold=4e-3, window=5, backoff=0.25, initial=0.9, interval=2),
}
SAME, ZERO, GAUSSIAN = 0, 2, 3  # tensors of the shared reduction


# --- data, the same in the processes and in the tests


def gradient(kind: str, ranks: int, rank: int) -> torch.Tensor:
    """(ranks * N,) FP32, Gaussian or Student's t with 3 degrees of freedom, of a different magnitude on every rank."""
    draw = torch.Generator().manual_seed(1000 * ranks + 10 * rank + KINDS.index(kind))
    x = torch.randn(ranks * N, generator=draw, dtype=torch.float64)
    if kind == "student":
        x /= torch.randn(3, ranks * N, generator=draw, dtype=torch.float64).square().mean(0).sqrt()
    return (x * 2.0 ** (rank % 3 - 8)).float()


def poisoned(ranks: int, rank: int, culprit: int, value: float) -> torch.Tensor:
    x = gradient("gaussian", ranks, rank)
    if rank == culprit:
        x[place(ranks, culprit)] = value
    return x


def poisonings(ranks: int) -> list[tuple[int, float]]:
    """(culprit, value): with two ranks all combinations; with more, each rank with one of the values."""
    if ranks == 2:
        return list(itertools.product(range(ranks), POISONS))
    return [(culprit, POISONS[culprit % len(POISONS)]) for culprit in range(ranks)]


def place(ranks: int, culprit: int) -> int:
    """The index at which the culprit's gradient is poisoned, in the shard of the next rank but one."""
    return (culprit + 2) % ranks * N + 300 + culprit


def spans(ranks: int) -> list[tuple[int, int, int]]:
    """Five tensors of odd sizes, across the shards' ends, and padding; they are tensors 2 to 6 of seven."""
    sizes = [517, 1, 129, 400]
    sizes.append(ranks * SHARED_N - PADDING - sum(sizes))
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [(end - size, end, 2 + t) for t, (end, size) in enumerate(zip(ends, sizes, strict=True))]


def tensors_of_a_step(ranks: int, rank: int, step: int) -> torch.Tensor:
    """A rank's gradients. The first tensor is the same on all ranks; the third is zero on all."""
    x = torch.zeros(ranks * SHARED_N)
    for t, (a, b, _) in enumerate(spans(ranks)):
        draw = torch.Generator().manual_seed(7 * step + 100 * t + (0 if t == SAME else 1000 * (rank + 1)))
        x[a:b] = torch.randn(b - a, generator=draw) * 10.0 ** (-t) * (t != ZERO)
    return x


# --- the processes


def added_up(payload: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    return ops.reference.sum_blocks(payload, exponents, torch.empty(payload.shape[1]))


class Recorder:
    """Does a rank's reductions; found[name] is the result of each, sent[name] the bytes that it sent."""

    def __init__(self):
        self.found, self.sent = {}, {}

    def __call__(self, name, stages):
        reduced = wire.Flight(stages).land()
        self.sent[name] = Counter(wire.sent_bytes)
        wire.sent_bytes.clear()
        values = reduced.look().clone()
        part = 128 * max(1, values.numel() // 128 // 4)  # four or five of them
        parts = [reduced.gradient(at, min(at + part, values.numel())) for at in range(0, values.numel(), part)]
        # for Adam: dense, or payload and exponents
        parts = [p if isinstance(p, torch.Tensor) else added_up(*p) for p in parts]
        self.found[name] = SimpleNamespace(
            values=values, square_sum=reduced.square_sum(), in_parts=torch.cat(parts).float()
        )
        return reduced


def work(rank: int, ranks: int):
    record = Recorder()
    for part in (reduce_in_blocks, reduce_poisoned, reduce_with_shared_scales, refuse_nodes):
        part(rank, ranks, record)
    if ranks == 4:
        agree_over_tensor_parallelism(rank, record)
        reduce_a_padded_bucket(rank, ranks, record)
    return record.found, record.sent


def pack(x: torch.Tensor) -> PackedBlocks:
    return ops.quantize_blocks(x, out=PackedBlocks.empty(x.numel() // N, N, "cpu"))


def reduce_in_blocks(rank, ranks, record):
    group = dist.group.WORLD
    nodes = {local: node_groups(group, local) for local in LEVELS[ranks]}
    if ranks == 8:
        halves = [dist.new_group(list(range(parity, 8, 2))) for parity in (0, 1)]
        nodes[NODE_OF_TWO] = node_groups(halves[rank % 2], 2)
    for kind in KINDS:
        x = gradient(kind, ranks, rank)
        packed = pack(x)
        record(f"{kind} block", reduce_blocks(packed, group, True))
        room = pack(torch.ones_like(x))
        reduced = record(f"{kind} block, in place", reduce_blocks(packed, group, True, receive=room))
        assert reduced.packed.data.data_ptr() == room.data.data_ptr()
        record(f"{kind} block, all", reduce_blocks(packed, group, False))
        for name, cut in nodes.items():
            share = pack(x[: 4 * N]) if name == NODE_OF_TWO else packed
            inside = halves[rank % 2] if name == NODE_OF_TWO else group
            record(f"{kind} levels {name}", reduce_blocks(share, inside, True, cut))
        record(f"{kind} fp32", reduce_fp32(x.clone(), group, True))
        record(f"{kind} fp32, all", reduce_fp32(x.clone(), group, False))


def reduce_poisoned(rank, ranks, record):
    group = dist.group.WORLD
    nodes = node_groups(group, 2)
    for culprit, value in poisonings(ranks):
        x = poisoned(ranks, rank, culprit, value)
        name = f"{culprit} {value}"
        record(f"{name} block", reduce_blocks(pack(x), group, True))
        record(f"{name} block, all", reduce_blocks(pack(x), group, False))
        record(f"{name} fp32", reduce_fp32(x.clone(), group, True))
        if nodes is not None:
            record(f"{name} levels", reduce_blocks(pack(x), group, True, nodes))


def reduce_with_shared_scales(rank, ranks, record):
    group = dist.group.WORLD
    sizes = [11, 13, *(b - a for a, b, _ in spans(ranks))]
    for name, rule in RULES.items():
        for sharded in (True, False):
            shared = SharedScale(rule, sizes, group, group, sharded, "cpu")
            for step in range(1, STEPS + 1):
                x = tensors_of_a_step(ranks, rank, step)
                kept, mu = x.clone(), shared.mu.clone()
                run = f"{name} {sharded} {step}"
                record(run, shared.reduce(x, spans(ranks)))
                assert torch.equal(x, kept)
                shared.end_step(step)
                record.sent[f"{run}, end"] = Counter(wire.sent_bytes)
                wire.sent_bytes.clear()
                record.found[run].mu, record.found[run].next_mu = mu, shared.mu.clone()
    for value in POISONS:
        shared = SharedScale(RULES["pre"], sizes, group, group, True, "cpu")
        x = tensors_of_a_step(ranks, rank, 1)
        if rank == 1:
            x[spans(ranks)[GAUSSIAN][0] + 77] = value
        record(f"poisoned {value}", shared.reduce(x, spans(ranks)))
    shared = SharedScale(RULES["pre"], sizes, group, group, False, "cpu")
    x = tensors_of_a_step(ranks, rank, 1)
    if rank == 0:
        x[:] = 0
    record("no gradient on rank 0", shared.reduce(x, spans(ranks)))


def refuse_nodes(rank, ranks, record):
    group = dist.group.WORLD
    assert node_groups(group, 1) is None and node_groups(group, ranks) is None
    try:
        node_groups(group, 3)
    except ValueError as error:
        record.found["refusal"] = str(error)


def agree_over_tensor_parallelism(rank, record):
    """Ranks 0 and 2, and 1 and 3, are data-parallel groups; only the first tensor-parallel shard saturates."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shared = SharedScale(
        ScalingRule("auto", threshold=0.2), [64, 64], groups[rank % 2], dist.group.WORLD, True, "cpu"
    )
    x = torch.zeros(256)
    x[0] = x[64] = 0.5
    if rank % 2 == 0:  # 448 / sqrt 2 from two ranks add up to more than 448
        x[:24] = x[64:92] = 1.0  # 19 % and 22 % of the 128 elements of two shards
    wire.Flight(shared.reduce(x, [(0, 64, 0), (64, 128, 1)])).land()
    shared.end_step(1)
    record.found["tensor parallel mu"] = shared.mu


def reduce_a_padded_bucket(rank, ranks, record):
    """Three steps of a bucket in which all ranks except the first own padding; in the second step a gradient is NaN."""
    from megatron_fp8.engine.bucket import Bucket
    from megatron_fp8.engine.owned_weight import OwnedWeight
    from megatron_fp8.engine.reductions import Block

    group = dist.group.WORLD
    for storage in ("fp32", "bf16", "fp8"):
        param = torch.nn.Parameter(torch.zeros(16, 80, dtype=torch.bfloat16), requires_grad=False)
        weight = OwnedWeight(param, SimpleNamespace(gemm="bf16", weight="bf16", emulate=None, margin=0, seed=1))
        states = {"exp_avg": "fp32", "exp_avg_sq": "fp16", "master": "fp32"}
        cells = SimpleNamespace(grad_accum=storage, partition="even", seed=1, **states)
        bucket = Bucket([weight], parts_of(group, cells, sharded=True, reduction=Block()))
        for step, value in enumerate((1.0, float("nan"), 1.0)):
            bucket.begin_step(step)
            weight.take_gradient(Known(torch.full(param.shape, value)))
            bucket.launch()
            bucket.land()
            record.found[f"padded {storage} {step}"] = bucket.reduced.square_sum()


@pytest.fixture(scope="module", params=[2, 4, pytest.param(8, marks=pytest.mark.slow)])
def run(request, tmp_path_factory):
    """.ranks, and for every reduction .found[rank][name] and .sent[rank][name]."""
    ranks, folder = request.param, tmp_path_factory.mktemp("ranks")
    saved = run_ranks(work, ranks, folder)
    found, sent = zip(*saved, strict=True)
    return SimpleNamespace(ranks=ranks, found=found, sent=sent)


# --- references


def nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """FP64 -> the nearest value of E4M3, ties to the even code, saturating at the maximum."""
    low = (torch.searchsorted(GRID, x.abs(), right=True) - 1).clamp(max=len(GRID) - 2)
    below, above = x.abs() - GRID[low], GRID[low + 1] - x.abs()
    up = (above < below) | ((above == below) & (low % 2 == 1))
    return GRID[low + up].copysign(x)


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    """FP32 -> BlockScaled's values, FP64: each block has the least power of two that fits it into 448."""
    blocks = x.double().view(-1, 128)
    power = 2.0 ** torch.ceil(torch.log2(blocks.abs().amax(1, keepdim=True) / 448))
    return (nearest_e4m3(blocks / power) * power).view(-1)


def added(parts) -> torch.Tensor:
    """The FP32 sum, in order."""
    total = torch.zeros(len(parts[0]))
    for part in parts:
        total += part.float()
    return total


def relative_error(values, exact) -> float:
    return ((values.double() - exact).norm() / exact.norm()).item()


def gradients(run, kind):
    return [gradient(kind, run.ranks, rank) for rank in range(run.ranks)]


def whole(run, name):
    """The ranks' shards side by side."""
    return torch.cat([found[name].values for found in run.found])


# --- blocks


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_rounded_once_and_added_in_order(run, kind):
    every = gradients(run, kind)
    exact = torch.stack(every).double().sum(0)
    expected = added([in_blocks(x) for x in every])
    for name in (f"{kind} block", f"{kind} block, in place"):
        assert torch.equal(whole(run, name), expected)  # each rank has its own shard
    assert 0.02 < relative_error(expected, exact) <= 0.03
    for rank in range(run.ranks):
        assert relative_error(run.found[rank][f"{kind} block"].values, exact[rank * N :][:N]) <= 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_are_bitwise_equal(run, kind):
    every = gradients(run, kind)
    for name, expected in [
        (f"{kind} block, all", in_blocks(added([in_blocks(x) for x in every])).float()),
        (f"{kind} fp32, all", None),
    ]:
        replicas = [found[name].values for found in run.found]
        assert all(torch.equal(r.view(torch.int32), replicas[0].view(torch.int32)) for r in replicas)
        assert expected is None or torch.equal(replicas[0], expected)
    exact = torch.stack(every).double().sum(0)
    assert relative_error(run.found[0][f"{kind} block, all"].values, exact) <= 0.045  # rounded twice


@pytest.mark.parametrize("kind", KINDS)
def test_two_levels_round_twice(run, kind):
    every = gradients(run, kind)
    exact = torch.stack(every).double().sum(0)
    for local in LEVELS[run.ranks]:
        nodes = [added([in_blocks(x) for x in every[a : a + local]]) for a in range(0, run.ranks, local)]
        expected = added([in_blocks(node) for node in nodes])
        assert torch.equal(whole(run, f"{kind} levels {local}"), expected)
        assert 0.025 < relative_error(expected, exact) <= 0.045


def test_two_levels_of_groups_that_interleave(run):
    if run.ranks != 8:
        pytest.skip("needs two data-parallel groups of four")
    for parity in (0, 1):
        parts = [gradient("gaussian", 8, rank)[: 4 * N] for rank in range(parity, 8, 2)]
        nodes = [added([in_blocks(x) for x in parts[a : a + 2]]) for a in (0, 2)]
        got = torch.cat([run.found[r][f"gaussian levels {NODE_OF_TWO}"].values for r in range(parity, 8, 2)])
        assert torch.equal(got, added([in_blocks(node) for node in nodes]))


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_is_the_plain_sum(run, kind):
    every = torch.stack(gradients(run, kind)).double()
    bound = run.ranks * 2.0**-24 * every.abs().sum(0)
    for values in (whole(run, f"{kind} fp32"), run.found[0][f"{kind} fp32, all"].values):
        assert ((values.double() - every.sum(0)).abs() <= bound).all()


def test_a_shards_parts_and_square_sum(run):
    """A shard's parts and its sum of squares, for every reduction of finite gradients."""
    for found in run.found:
        names = [name for name in found if name.startswith((*KINDS, *RULES))]
        assert len(names) >= len(KINDS) * 5 + len(RULES) * 2 * STEPS
        for name in names:
            shard = found[name]
            assert torch.equal(shard.in_parts, shard.values), name
            squares = shard.values.double().square().sum().item()
            assert shard.square_sum.item() == pytest.approx(squares, rel=1e-5), name


def test_nodes_must_divide_the_group(run):
    for found in run.found:
        assert found["refusal"].startswith("--fp8-grad-reduce-hierarchy 3: does not divide ")
        assert f"data-parallel size {run.ranks};" in found["refusal"] and "\n" not in found["refusal"]


# --- bytes


def test_bytes_sent_are_the_formulas(run):
    ranks, elements = run.ranks, run.ranks * N
    one_byte = elements * (ranks - 1) // ranks
    block = one_byte + elements // 128 * (ranks - 1) // ranks
    expected = {
        "block": {"grad_reduce": block},
        "block, in place": {"grad_reduce": block},
        "block, all": {"grad_reduce": 2 * block},
        "fp32": {"grad_reduce": 4 * one_byte},
        "fp32, all": {"grad_reduce": 8 * one_byte},
    }
    for local in LEVELS[ranks]:
        nodes = ranks // local
        sizes = elements + elements // 128
        expected[f"levels {local}"] = {
            "grad_reduce": sizes * (local - 1) // local,
            "grad_reduce_across_nodes": sizes // local * (nodes - 1) // nodes,
        }
    for rank in range(ranks):
        for kind in KINDS:
            for name, counted in expected.items():
                assert run.sent[rank][f"{kind} {name}"] == counted, name


def test_bytes_of_shared_scales_are_the_formulas(run):
    ranks, tensors = run.ranks, 5
    one_byte = ranks * SHARED_N * (ranks - 1) // ranks
    scales = 2 * 4 * tensors * (ranks - 1) // ranks
    counts = 2 * 4 * 2 * (tensors + 2) * (ranks - 1) // ranks
    for sent in run.sent:
        for name in RULES:
            assert sent[f"{name} True 1"] == {"grad_reduce": one_byte, "grad_scales": scales}
            assert sent[f"{name} False 1"] == {"grad_reduce": 2 * one_byte, "grad_scales": scales}
        assert sent["auto True 1, end"] == {"grad_scales": counts}
        assert sent["every other step True 2, end"] == {"grad_scales": counts}
        assert sent["every other step True 1, end"] == sent["pre True 1, end"] == sent["post True 1, end"] == {}


# --- NaN and infinity


@pytest.mark.parametrize("wire_name", ["block", "block, all", "fp32", "levels"])
def test_a_non_finite_gradient_of_any_rank_shows_at_the_owner_and_nowhere_else(run, wire_name):
    if wire_name == "levels" and run.ranks == 2:
        pytest.skip("two ranks have one level")
    clean_name = "gaussian " + {"levels": "levels 2"}.get(wire_name, wire_name)
    for culprit, value in poisonings(run.ranks):
        element = place(run.ranks, culprit)
        block = slice(element // 128 * 128, element // 128 * 128 + (1 if wire_name == "fp32" else 128))
        name = f"{culprit} {value} {wire_name}"
        copies = [found[name].values for found in run.found] if "all" in wire_name else [whole(run, name)]
        clean = run.found[0][clean_name].values if "all" in wire_name else whole(run, clean_name)
        for got in copies:
            assert not got[element].isfinite()
            others = torch.ones(len(got), dtype=torch.bool)
            others[[element] if wire_name == "fp32" else block] = False  # its block is coarse; the step is lost anyway
            assert torch.equal(got[others], clean[others])
        owners = run.found if "all" in wire_name else [run.found[element // N]]
        assert not any(found[name].square_sum.isfinite() for found in owners)


# --- shared scales


@functools.cache
def ring(ranks, mu, step):
    """A step computed here: (shares saturated before and after the sum, (5,) each; the gradients). mu: (7,)."""
    mu, order = torch.tensor(mu[2:]), torch.arange(ranks)
    inputs = torch.stack([tensors_of_a_step(ranks, rank, step) for rank in range(ranks)])
    payload, inverse = torch.zeros_like(inputs, dtype=torch.float64), torch.zeros(ranks * SHARED_N)
    before = []
    for t, (a, b, _) in enumerate(spans(ranks)):
        largest = inputs[:, a:b].abs().amax(1)
        scale = torch.where(largest > 0, torch.tensor(448.0) / largest, 1.0).min() * mu[t]
        payload[:, a:b] = nearest_e4m3((inputs[:, a:b] * scale).double())
        inverse[a:b] = 1 / scale
        before.append((payload[:, a:b].abs() == 448).double().mean().item())
    total = torch.zeros(ranks * SHARED_N, dtype=torch.float64)
    for owner in range(ranks):
        chunk = slice(owner * SHARED_N, (owner + 1) * SHARED_N)
        hops = ((order + owner + 1) % ranks).tolist()  # the owner is last
        total[chunk] = payload[hops[0], chunk]
        for rank in hops[1:]:
            total[chunk] = nearest_e4m3(total[chunk] + payload[rank, chunk])
    after = [(total[a:b].abs() == 448).double().mean().item() for a, b, _ in spans(ranks)]
    return before, after, total.float() * inverse


@pytest.mark.parametrize("name", RULES)
def test_the_ring_is_the_sum_hop_by_hop(run, name):
    for step in range(1, STEPS + 1):
        mu = run.found[0][f"{name} True {step}"].mu
        expected = ring(run.ranks, tuple(mu.tolist()), step)[2]
        assert same(whole(run, f"{name} True {step}").abs(), expected.abs())  # a zero may have any sign
        for found in run.found:
            if torch.equal(found[f"{name} False {step}"].mu, mu):
                assert torch.equal(found[f"{name} False {step}"].values, expected)


@pytest.mark.parametrize("name", RULES)
def test_mu_moves_by_the_share_of_saturated_elements(run, name):
    rule, ranks = RULES[name], run.ranks
    start = {"pre": 1 / ranks, "post": 1.0}.get(name, rule.initial or ranks**-0.5)
    seen = set()
    for sharded in (True, False):
        mu = torch.full((7,), start)
        for step in range(1, STEPS + 1):
            before, after, _ = ring(ranks, tuple(mu.tolist()), step)
            found = [f[f"{name} {sharded} {step}"] for f in run.found]
            assert all(torch.equal(f.mu, mu) for f in found)  # all ranks agree, bit for bit
            if rule.mode == "auto" and step % rule.interval == 0:
                shrinks = [False, False, *(max(pair) > rule.threshold for pair in zip(before, after, strict=True))]
                seen |= set(shrinks)
                grown = mu * 2 ** (rule.interval / rule.window)
                mu = torch.where(torch.tensor(shrinks), mu * rule.backoff, grown)
            for f in found:
                assert f.next_mu.tolist() == pytest.approx(mu.tolist(), rel=3e-7)
            mu = found[0].next_mu
    assert seen == ({True, False} if rule.mode == "auto" else set())


def test_identical_gradients_saturate_without_a_factor_and_not_with_one_over_n(run):
    a, b, _ = spans(run.ranks)[SAME]
    gradient = tensors_of_a_step(run.ranks, 0, 1)[a:b]
    largest, true = gradient.abs().max(), run.ranks * gradient
    post, pre = (whole(run, f"{name} True 1")[a:b] for name in ("post", "pre"))
    assert post.abs().max().item() == pytest.approx(largest.item(), rel=1e-6)  # 448 / s_g; the sum is N times that
    clipped = true.abs() > 1.1 * largest
    assert clipped.any() and post[clipped].abs().tolist() == pytest.approx([largest.item()] * int(clipped.sum()))
    assert pre[true.abs().argmax()].item() == pytest.approx(true[true.abs().argmax()].item(), rel=0.08)
    assert relative_error(pre, true.double()) < 0.1
    assert relative_error(post, true.double()) > 2 * relative_error(pre, true.double())


def test_a_non_finite_gradient_stays_visible_under_a_shared_scale(run):
    a, b, _ = spans(run.ranks)[GAUSSIAN]
    clean = whole(run, "pre True 1")
    for value in POISONS:
        got = whole(run, f"poisoned {value}")
        assert got[a + 77].isnan() and got.isnan().sum() == 1
        others = torch.ones(len(got), dtype=torch.bool)
        others[a:b] = False  # the tensor has no right scale; the step is lost anyway
        assert torch.equal(got[others], clean[others])


def test_a_rank_without_a_gradient_takes_nothing_from_the_others(run):
    others = torch.stack([tensors_of_a_step(run.ranks, rank, 1) for rank in range(1, run.ranks)]).double().sum(0)
    got = run.found[0]["no gradient on rank 0"].values
    for a, b, t in spans(run.ranks):
        if t - 2 != ZERO and b - a > 100:  # with few elements the roundings do not average out
            assert relative_error(got[a:b], others[a:b]) < 0.15


def test_mu_is_one_for_all_tensor_parallel_parts(run):
    if run.ranks != 4:
        pytest.skip("made of two by two ranks")
    start = 2**-0.5
    for found in run.found:
        assert found["tensor parallel mu"].tolist() == pytest.approx([start * 2**0.001, start / 2], rel=1e-6)


@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp8"])
def test_padding_adds_nothing_to_the_norm(run, storage):
    """The receive buffer becomes the next step's padding; after a lost step it holds NaN."""
    if run.ranks != 4:
        pytest.skip("made for four ranks")
    sums = [sum(found[f"padded {storage} {step}"].item() for found in run.found) for step in range(3)]
    assert sums[0] == sums[2] == 16 * 80 * 4**2
    assert sums[1] != sums[1]
