"""Experts in `megatron-fp8 estimate` and `plan`: the counts against tensors, tables and measured figures."""

import argparse
import csv
import json
from collections import defaultdict
from dataclasses import replace

import architecture
import pytest
import torch
from kept import LENGTH, TOKENS, WIDTH, kept
from launch import ROOT
from test_latent_estimate import DEEPSEEK

from megatron_fp8.errors import UserError
from megatron_fp8.ops.groups import groups_of_chosen
from megatron_fp8.tools.perf import (
    activations,
    collectives,
    flops,
    gemm_time,
    hardware,
    job_flags,
    memory,
    memory_bound,
    plan,
)
from megatron_fp8.tools.perf.step import estimate
from megatron_fp8.tools.perf.systems import SYSTEMS
from megatron_fp8.tools.perf.workload import Workload

H200 = hardware.load("h200")
QWEN = (  # train_step.py's shape qwen3-moe: four layers of Qwen3-30B-A3B
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 32 --kv-channels 128 --group-query-attention "
    "--num-query-groups 4 --qk-layernorm --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --ffn-hidden-size 6144 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 "
    "--vocab-size 151935 --untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 4096 "
    "--hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --bf16 --use-distributed-optimizer "
    "--moe-token-dispatcher-type alltoall"
)
TOGETHER = "--moe-grouped-gemm --fp8-level O3 --fp8-experts"


def workload(flags: str = TOGETHER, gpus: int = 1, system: str | None = None) -> Workload:
    return job_flags.workload(job_flags.parse(f"{QWEN} {flags}".split()), gpus, system)


# Time.


def test_products_take_the_time_of_grouped_gemm_csv():
    """Each linear of two models within 12 %, and the sum of each way within 3 %."""
    sizes = {"DeepSeek-V2-Lite": (2048, 1408), "Qwen3-30B-A3B": (2048, 768)}
    ways = {"tables": "O3", "torch BF16": "bf16", "loop 4 streams graph": "te"}
    best: dict[tuple, float] = defaultdict(lambda: 1e9)
    with (ROOT / "benchmarks/results/grouped_gemm.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            way = "tables" if row["way"].startswith("tables") else row["way"]
            if way in ways:
                key = way, row["model"], int(row["experts"]), int(row["rows"]), row["gemm"].split()[1]
                best[*key, row["gemm"]] = min(best[*key, row["gemm"]], float(row["ms"]))
    measured: dict[tuple, float] = defaultdict(float)
    for (*key, kind, _), ms in best.items():
        measured[*key, "forward" if kind == "forward" else "backward"] += ms
    assert len(measured) == 2 * 3 * 2
    sums = defaultdict(lambda: [0.0, 0.0])
    for (way, model, experts, rows, kind), ms in measured.items():
        hidden, width = sizes[model]
        w = workload()
        job = replace(w.job, hidden_size=hidden, num_experts=experts, moe_ffn_hidden_size=width)
        w = replace(w, job=job, system=SYSTEMS[ways[way]], sequence=rows * experts, micro_batch=1, topk=1)
        assert w.rows == rows * experts
        found = gemm_time.experts(w, H200)[kind == "backward"]
        assert found == pytest.approx(ms, rel=0.12), (way, model, kind)
        sums[way][0] += found
        sums[way][1] += ms
    for found, ms in sums.values():
        assert found == pytest.approx(ms, rel=0.03)


def test_few_rows_an_expert_are_bound_by_weights():
    """An expert's weights are read and its gradients added to, however few its rows are."""
    few = replace(workload(), sequence=64, micro_batch=1, global_batch=1)
    (fc1, hidden), (_, width) = few.job.expert
    weights = 128 * (fc1 * hidden + hidden * width)
    forward, backward = gemm_time.experts(few, H200)
    assert forward >= H200.pass_ms(weights) and backward >= H200.pass_ms((1 + 4) * weights)
    assert gemm_time.experts(replace(few, system=SYSTEMS["bf16"]), H200)[1] >= H200.pass_ms((2 + 8) * weights)
    assert gemm_time.experts(replace(few, sequence=8), H200)[1] > 0.9 * backward


def test_what_a_flag_does_to_the_experts():
    """They are in FP8 if a level owns them, and together if the flag says so."""
    both, one, none, stock, te = (
        workload(flags, system=system)
        for flags, system in (
            (TOGETHER, None), ("--fp8-level O3 --fp8-experts", None), ("--fp8-level O3 --moe-grouped-gemm", None),
            (TOGETHER, "bf16"), (TOGETHER, "te"),
        )
    )  # fmt: skip
    assert [w.experts_fp8 for w in (both, one, none, stock, te)] == [True, True, False, False, True]
    assert [w.experts_owned for w in (both, one, none, stock, te)] == [True, True, False, False, False]
    assert [w.together for w in (both, one, none, stock, te)] == [True, False, False, True, True]
    together, apart, in_bf16 = (estimate(w, H200).parts for w in (both, one, none))
    assert together["experts"] < apart["experts"] < in_bf16["experts"]
    assert in_bf16["optimizer"] > 2 * together["optimizer"]
    assert not workload(f"{TOGETHER} --fp8-gemm bf16").together


def test_passes_of_routed_rows():
    """A layer's passes grow with the experts a token; without them they are attention's."""
    w = workload()
    rows = 2 * 4096 * 8
    assert (w.rows, w.padded_rows) == (rows, rows + 128 * 64)
    once, twice = (memory_bound.layer(replace(w, topk=k), H200, moe=True) for k in (8, 16))
    assert twice["permutation"] == pytest.approx(2 * once["permutation"])
    assert once["activation"] < twice["activation"] < 2 * once["activation"]  # the padding stays
    others = {"permute_fused": True}, {"dispatcher": "allgather"}
    fused, sent = (memory_bound.layer(replace(w, **other), H200, moe=True)["permutation"] for other in others)
    assert once["permutation"] < fused < 0.5 * sent  # in the casts, by Transformer Engine, by torch
    dense = memory_bound.layer(w, H200)
    assert set(once) - set(dense) == {"permutation"} and once["norm"] == dense["norm"]


@pytest.mark.parametrize("system, name", [("O3", "O3-experts-grouped"), ("te", "te-tensorwise-experts")])
def test_four_layers_as_measured(system, name):
    """train_step_experts.csv: memory and products. At O3 later commits have other steps; the other's scaling is not the
    estimate's."""
    with (ROOT / "benchmarks/results/train_step_experts.csv").open(newline="") as file:
        wanted = {"gpu": "NVIDIA H200", "commit": "300f155", "shape": "qwen3-moe", "system": name}
        (row,) = (row for row in csv.DictReader(file) if wanted.items() <= row.items())
    found = estimate(workload(f"{TOGETHER} {'--moe-permute-fusion' * (system == 'te')}", system=system), H200)
    thousand_mib = 2**20 / 1e6
    assert found.held == pytest.approx(float(row["gb"]) * thousand_mib, rel=0.01)
    assert found.peak == pytest.approx(float(row["gb_peak"]) * thousand_mib, rel=0.02)
    products = sum(ms for kind, ms in json.loads(row["profile_ms"]).items() if kind.startswith("FP8 GEMM"))
    assert found.parts["linears"] + found.parts["experts"] == pytest.approx(products, rel=0.06)


@pytest.mark.parametrize(("shape", "flags", "commit", "error"), [
    ("qwen3-moe --num-layers=8", f"{QWEN} --num-layers 8", "6fd244fe", 0.059),
    ("qwen3-moe --num-layers=8 --fp8-grad-accum=fp8", f"{QWEN} --num-layers 8 --fp8-grad-accum fp8", "6fd244fe", 0.043),
    ("deepseek-moe", DEEPSEEK, "383538b2", 0.027),
])  # fmt: skip
def test_whole_step_graphs_as_measured(shape, flags, commit, error):
    """error: how much longer the estimate is. DeepSeek's row sets the bytes of its rotation."""
    with (ROOT / "benchmarks/results/train_step_experts.csv").open(newline="") as file:
        wanted = {"commit": commit, "shape": shape, "system": "O3-experts-graph"}
        (row,) = (row for row in csv.DictReader(file) if wanted.items() <= row.items())
    graph, plain = (
        estimate(job_flags.workload(job_flags.parse(f"{flags} {TOGETHER} {more}".split()), 1), H200)
        for more in ("--cuda-graph-impl full_iteration", "")
    )
    assert graph.gpu_ms - graph.parts["gaps"] == pytest.approx(float(row["profile_busy"]), rel=0.031)
    assert graph.ms == graph.gpu_ms < plain.host_ms == plain.ms and graph.host_ms == 0
    assert graph.ms / float(row["ms"]) - 1 == pytest.approx(error, abs=0.001)
    thousand_mib = 2**20 / 1e6
    assert graph.held == pytest.approx(float(row["gb"]) * thousand_mib, rel=0.003)
    assert graph.peak == pytest.approx(float(row["gb_peak"]) * thousand_mib, rel=0.017)


def test_graphs_that_training_does_not_record(capsys):
    """As in training: not with experts on several ranks, and a line says so; a level's flag is none of stock's."""
    ep = f"{TOGETHER} --fp8-step-graph on --expert-model-parallel-size 2 --global-batch-size 8"
    assert not workload(ep, gpus=2).graphed
    line = "[fp8] --fp8-step-graph on: a level has no CUDA graph with --expert-model-parallel-size"
    assert capsys.readouterr().err.splitlines() == [line]
    one = f"{TOGETHER} --fp8-step-graph on"
    assert [workload(one, system=system).graphed for system in ("O3", "bf16")] == [True, False]
    assert capsys.readouterr().err == ""


def test_layers_with_experts_among_dense_ones():
    """Two of four: half of each kind's time."""
    all_, none, some = (
        estimate(workload(f"{TOGETHER} --moe-layer-freq {freq}"), H200)
        for freq in ("1", "[0,0,0,0]", "[0,1,0,1]")
    )
    for kind in ("linears", "experts", "permutation", "activation", "cast"):
        assert some.parts[kind] == pytest.approx((all_.parts[kind] + none.parts.get(kind, 0)) / 2, rel=1e-6)
    assert "experts" not in none.parts
    assert some.memory["activations"] == pytest.approx((all_.memory["activations"] + none.memory["activations"]) / 2)


def test_shared_experts_are_linears():
    without, shared = workload(), workload(f"{TOGETHER} --moe-shared-expert-intermediate-size 2816")
    assert len(gemm_time.products(without, H200, moe=True)) == 2
    fc1, fc2 = gemm_time.products(shared, H200, moe=True)[2:]
    assert (fc1.n, fc1.k, fc2.n, fc2.k) == (2 * 2816, 2048, 2048, 2816)
    assert gemm_time.experts(without, H200) == gemm_time.experts(shared, H200)
    more = flops.step(shared) - flops.step(without)
    assert more == 6 * 4 * 4096 * 4 * 3 * 2816 * 2048


def test_flops_are_megatrons():
    from megatron.training.training import num_floating_point_operations

    for more in ("", "--moe-shared-expert-intermediate-size 2816", "--moe-layer-freq [0,1,1,0]"):
        flags = job_flags.parse(f"{QWEN} {more}".split())
        args = flags.args
        args.padded_vocab_size = 152_064 - 128
        args.world_size = 1
        w = job_flags.workload(flags, 1)
        assert flops.step(w) == pytest.approx(num_floating_point_operations(args, 4), rel=1e-3)


# Traffic.


@pytest.mark.parametrize("parallel, sent", [
    ("--expert-model-parallel-size 4", {"tokens": 8 * 3 / 4}),
    ("--expert-model-parallel-size 4 --moe-token-dispatcher-type allgather", {"tokens": 3}),
    ("--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
     {"tokens": 8 / 2 / 2, "tokens: parts": 8 / 2}),
    ("--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
     "--expert-tensor-parallel-size 1", {"tokens": 8 / 2 / 2}),
    ("", {}),
])  # fmt: skip
def test_tokens_are_sent(parallel, sent):
    """In copies of a micro-batch's tokens, four times a layer: top 8 of them by all-to-all, all of them by gathers."""
    w = workload(f"{TOGETHER} --global-batch-size 8 {parallel}", gpus=4)
    found = {k: t for k, t in collectives.micro_batches(w, H200).items() if k.startswith("tokens")}
    copy = 2 * 2 * 4096 * 2048 * 4 * w.micro_batches * 4
    assert {kind: t.inside / copy for kind, t in found.items()} == {k: pytest.approx(v) for k, v in sent.items()}
    assert all(t.bare == t.ms and t.between == 0 for t in found.values())
    assert w.rows == 2 * 4096 * 8 / w.tensor * (w.job.expert_ranks // w.job.expert_model_parallel_size)


RECOMPUTED = "--recompute-granularity selective --recompute-modules moe"


@pytest.mark.parametrize("split", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
@pytest.mark.parametrize(("recompute", "passes"), [("", 4), (RECOMPUTED, 6)])
def test_tokens_are_sent_in_fp8(recompute, passes, split):
    """Half the bytes of each pass to the experts: one forward, one more if it is made again, one backward."""
    flags = f"{TOGETHER} --global-batch-size 8 --expert-model-parallel-size 2 {recompute} {split}"
    wide, forward, both = (
        collectives.micro_batches(workload(f"{flags} {more}", gpus=4), H200)
        for more in ("", "--fp8-dispatch forward", "--fp8-dispatch both")
    )
    kinds = [kind for kind in wide if kind.startswith("tokens")]
    assert len(kinds) == (2 if split else 1)
    for kind in kinds:
        each = wide[kind].inside / passes
        assert forward[kind].inside == pytest.approx(wide[kind].inside - (passes - 2) / 2 * each / 2)
        assert both[kind].inside == pytest.approx(wide[kind].inside - passes / 2 * each / 2)
        assert both[kind].bare == both[kind].ms < forward[kind].ms < wide[kind].ms


def test_two_nodes_share_the_experts():
    """Of 16 parts 8 go to the other node, by the rank's own port."""
    w = workload(f"{TOGETHER} --global-batch-size 32 --expert-model-parallel-size 16", gpus=16)
    tokens = collectives.micro_batches(w, H200)["tokens"]
    assert tokens.between / tokens.inside == pytest.approx(8 / 7)
    assert tokens.ms == pytest.approx(tokens.between / H200.network_gb_s / 1e6, rel=0.02)


@pytest.mark.parametrize("owned", [True, False])
def test_gradients_of_experts_go_over_expert_data_parallelism(owned):
    flags = TOGETHER if owned else "--fp8-level O3"
    for size, alike in ((1, 4), (2, 2), (4, 1)):
        w = workload(f"{flags} --global-batch-size 8 --expert-model-parallel-size {size}", gpus=4)
        found = estimate(w, H200)
        count = sum(w.job.experts())
        assert count == 4 * 128 // size * 3 * 768 * 2048
        assert ("gradients: experts" in found.traffic) == (alike > 1)
        if alike > 1:
            wire = 1 + 1 / 128 if owned else 4
            assert found.traffic["gradients: experts"].inside == pytest.approx(wire * count * (alike - 1) / alike)
            weights = found.traffic["weights: experts"].inside
            assert weights == pytest.approx((1 if owned else 2) * count * (alike - 1) / alike)


# Memory.


GATHERED = "--moe-token-dispatcher-type allgather --cuda-graph-impl full_iteration"


@pytest.mark.parametrize(("size", "router"), [(2, "--moe-router-dtype fp32"), (32, "")])
def test_rows_that_the_gpu_picks(size, router):
    """Room as the tables have it, of 64 experts or of 4. Kept are x of all tokens, fc1's output and the tables."""
    flags = f"{TOGETHER} --global-batch-size {2 * size} --expert-model-parallel-size {size} {router}"
    sent, plain, w = (
        workload(f"{flags} {more}", gpus=size)
        for more in ("--cuda-graph-impl full_iteration", "--moe-token-dispatcher-type allgather", GATHERED)
    )
    assert [one.picks for one in (sent, plain, w)] == [False, False, True] and not sent.graphed
    assert plain.room_rows == plain.padded_rows == w.padded_rows
    tokens, experts = 2 * 4096 * size, 128 // size
    given, read = groups_of_chosen(torch.empty(tokens, experts, dtype=torch.bool, device="meta"), 8)
    assert w.room_rows == given.rows
    probability = 4 if router else 2
    tables = given.source.nbytes + read.source.nbytes + read.table.nbytes + tokens * experts * probability
    rows = 2 * tokens * 2048 + 2 * given.rows * 2 * 768 + tables
    moe = replace(w, recompute="selective", modules=("moe",))
    assert activations.layer(w, True) - activations.layer(moe, True) == pytest.approx(rows)
    tokens_sent = [collectives.micro_batches(one, H200)["tokens"].inside for one in (replace(w, router_fp32=False), w)]
    assert tokens_sent[1] / tokens_sent[0] == pytest.approx(1.5 if router else 1)


def test_states_are_the_memory_reports():
    w = workload(f"{TOGETHER} --expert-model-parallel-size 2 --global-batch-size 4", gpus=2)
    (rank,) = memory.ranks_bytes(w.job, w.cells(), ranks=[0])
    e = estimate(w, H200)
    assert rank.linears[memory.SCRATCH] + rank.experts[memory.SCRATCH] == 64 * 2 * 768 * 2048  # all experts' W^T
    assert e.held == pytest.approx(rank.all / 1e9 + e.memory["buffers"])
    assert sum(rank.experts.values()) > 0.5 * rank.all


def test_kept_transposes_of_experts_are_a_byte_a_weight_in_a_step(capsys):
    """`memory` and `estimate` agree: no scratch, and W^T of linears and experts from the first backward pass on."""
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    job = f"{TOGETHER} --expert-model-parallel-size 2 --global-batch-size 16 --keep-fp8-transpose-cache"
    assert memory.run(parser.parse_args(["--gpus", "2", "--", *QWEN.split(), *job.split()])) == 0
    text = capsys.readouterr().out
    w = workload(job, gpus=2)
    weights = sum(w.job.linears()) + sum(w.job.experts())
    assert sum(w.job.experts()) > 0.5 * weights and memory.SCRATCH not in text
    assert f"--keep-fp8-transpose-cache: no scratch. W^T of all linears and of experts, {weights / 1e9:.3f} GB" in text
    e = estimate(w, H200)
    assert e.memory["kept transposes"] == pytest.approx(weights / 1e9) and memory.SCRATCH not in e.memory
    assert memory.run(parser.parse_args(["--gpus", "2", "--fp8-gemm", "bf16", "--", *QWEN.split(), *job.split()])) == 0
    assert "W^T" not in capsys.readouterr().out


TINY = (
    f"--hidden-size {WIDTH} --ffn-hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
    f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --num-experts 2 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 384 --fp8-gemm fp8"
)


@pytest.mark.parametrize("more", [
    "", "--fp8-experts", "--fp8-experts --moe-shared-expert-intermediate-size 320",
    "--fp8-experts --moe-router-dtype fp32 --moe-token-dispatcher-type allgather",
])  # fmt: skip
def test_a_layer_keeps_what_is_counted(more):
    with architecture.started():
        measured = kept(f"{TINY} {more}")
    size = f"--vocab-size 100 --num-layers 1 --micro-batch-size {TOKENS // LENGTH} --hidden-dropout 0"
    w = job_flags.workload(job_flags.parse(f"{TINY} {more} {size} --bf16 --fp8-level O1".split()), 1)
    norm = 2 * WIDTH  # the input of the norm before the experts
    assert activations.layer(w, moe=True) / TOKENS - norm == pytest.approx(measured, rel=0.02)


def test_recomputation_of_experts_keeps_the_norms_output():
    """--recompute-modules moe: what is left is attention's, and the norms' inputs and outputs."""
    w = workload()
    again = replace(w, recompute="selective", modules=("moe",))
    (fc1, hidden), (_, width) = w.job.expert
    rows = w.padded_rows * (hidden + 2 * fc1 + width)
    freed = activations.layer(w, moe=True) - activations.layer(again, moe=True)
    assert freed == pytest.approx(rows, rel=0.02)
    assert activations.layer(w) == activations.layer(again)
    more = estimate(again, H200).parts["recomputation"]
    assert more == pytest.approx(4 * w.micro_batches * gemm_time.experts(w, H200)[0])
    with pytest.raises(UserError, match="moe_act: not modelled; core_attn, layernorm, mlp, moe are"):
        activations.layer(replace(again, modules=("moe_act",)), moe=True)


# A slice of Qwen3-30B-A3B with 50,304 words on an H100 whose host takes 1.5 times the estimate's time for a layer.


@pytest.mark.parametrize("system, flags, ms, held, peak", [
    ("te", "--moe-grouped-gemm --moe-permute-fusion", 765, 51.8, 58.9),
    ("O3", "--fp8-level O3", 1693, 45.7, 50.6),
])  # fmt: skip
def test_a_slice_as_measured(system, flags, ms, held, peak):
    w = workload(f"{flags} --vocab-size 50303", system=system)
    h100 = hardware.load("h100-80gb-sxm")
    found, slow = estimate(w, h100), estimate(w, replace(h100, host_ms=36 * 1.5, host_layer_ms=6.2))
    thousand_mib = 2**20 / 1e6
    assert found.held == pytest.approx(held * thousand_mib, rel=0.01)
    assert found.peak == pytest.approx(peak * thousand_mib, rel=0.02)
    assert slow.ms == slow.host_ms == pytest.approx(ms, rel=0.1)


# Commands.


def test_a_plan_tries_every_size_of_expert_parallelism():
    flags = job_flags.parse(f"{QWEN} {TOGETHER} --num-layers 8 --num-experts 8 --global-batch-size 16".split())
    found = plan.search(flags, 4, "O3", H200, None)
    sizes = {c.layout.expert for c in found if (c.layout.tensor, c.layout.pipeline) == (1, 1)}
    assert sizes == {1, 2, 4}
    for c in found:
        tensor, expert = c.layout.tensor, c.layout.expert
        assert 4 // c.layout.pipeline % (expert * tensor) == 0 and f", EP {expert}" in str(c.layout)
        if c.best:
            assert c.best.workload.job.expert_model_parallel_size == expert
            assert c.best.workload.sequence_parallel == (tensor > 1)
    one = job_flags.parse(f"{QWEN} {TOGETHER} --num-experts 8 --expert-tensor-parallel-size 1 "
                          "--global-batch-size 16".split())  # fmt: skip
    assert any((c.layout.tensor, c.layout.expert) == (4, 4) for c in plan.search(one, 4, "O3", H200, None))


def test_what_a_level_switches_off_is_off_in_all_columns_and_said(capsys):
    """Stock and Transformer Engine have these; without a level they are refused."""
    off = "--moe-shared-expert-overlap", "--overlap-moe-expert-parallel-comm", "--cuda-graph-impl transformer_engine"
    flags = f"{QWEN} --moe-grouped-gemm --fp8-level O3"
    found = job_flags.parse([*flags.split(), *" ".join(off).split()])
    said = capsys.readouterr().err.splitlines()
    assert found.left_out == off and [line.partition(": ")[0] for line in said] == [f"[fp8] {flag}" for flag in off]
    for system in "te", "O3":
        assert job_flags.workload(found, 1, system) == job_flags.workload(job_flags.parse(flags.split()), 1, system)


@pytest.mark.parametrize("flags, message", [
    ("--tensor-model-parallel-size 2", "only with --sequence-parallel; add it"),
    ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type flex: not modelled; remove it"),
    ("--moe-expert-capacity-factor 1.5", "--moe-expert-capacity-factor 1.5: not modelled"),
    ("--moe-shared-expert-overlap", "--moe-shared-expert-overlap: not modelled"),
    ("--cuda-graph-impl full_iteration", "full_iteration with stock BF16's experts: not modelled; name levels alone"),
    ("--fp8-step-graph on --fp8-level O3 --fp8-experts --expert-model-parallel-size 1 --global-batch-size 8",
     "--fp8-step-graph on with O3's experts: not modelled; add --moe-grouped-gemm"),
    ("--expert-model-parallel-size 3", "--expert-model-parallel-size 3: does not divide --num-experts 128"),
])  # fmt: skip
def test_what_is_not_modelled_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        workload(flags, gpus=2)
