"""The cost model against known values: FP8-LM's volumes, Megatron's FLOPs, and every measured run."""

import csv
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from launch import ROOT
from megatron.core.utils import local_multi_tensor_scale
from test_context_memory import Living
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp8.engine.chain import _step_in_one_kernel
from megatron_fp8.engine.clip import scaled_in_place
from megatron_fp8.errors import UserError
from megatron_fp8.tools.perf import (
    activations,
    collectives,
    flops,
    hardware,
    job_flags,
    memory_bound,
    step,
    table_run,
    validation,
)
from megatron_fp8.tools.perf.job import MODELS
from megatron_fp8.tools.perf.step import estimate
from megatron_fp8.tools.perf.systems import PAPERS, SYSTEMS
from megatron_fp8.tools.perf.workload import Workload

GIB = 2**30
H200 = hardware.load("h200")
RESULTS = ROOT / "benchmarks/results"


def paper(model: str, system: str, micro_batch: int = 1, global_batch: int = 2048) -> Workload:
    job = MODELS[model]
    return Workload(job, PAPERS[system], 2048, micro_batch, global_batch, sequence_parallel=True)


def slice_7b(system: str = "O3", **changes) -> Workload:
    return replace(Workload(validation.MODELS["7b"], SYSTEMS[system], 2048, 4, 16), **changes)


def laid_out(w: Workload, tensor: int = 1, pipeline: int = 1, data: int = 1, **changes) -> Workload:
    job = replace(
        w.job, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, data_parallel_size=data
    )
    return replace(w, job=job, sequence_parallel=tensor > 1, **changes)


# Volumes: FP8-LM (arXiv 2310.18313), tables 5 and 7.


@pytest.mark.parametrize(
    "model, bf16, fp8", [("7b", 37.1, 13.9), ("13b", 34.3, 12.3), ("175b", 23.4, 8.2)]
)
def test_weights_communication_is_the_papers(model, bf16, fp8):
    assert collectives.weight_volume(paper(model, "BF16")) / GIB == pytest.approx(bf16, abs=0.06)
    assert collectives.weight_volume(paper(model, "TE FP8")) / GIB == pytest.approx(bf16, abs=0.06)
    assert collectives.weight_volume(paper(model, "FP8-LM")) / GIB == pytest.approx(fp8, abs=0.06)


@pytest.mark.parametrize("model, micro_batch, bf16, fp8", [("13b", 2, 4.6875, 3.125), ("175b", 1, 5.90625, 3.9375)])
def test_activations_communication_is_the_papers(model, micro_batch, bf16, fp8):
    assert collectives.activation_volume(paper(model, "BF16", micro_batch)) / GIB == bf16
    assert collectives.activation_volume(paper(model, "FP8-LM", micro_batch)) / GIB == fp8


@pytest.mark.parametrize(
    "model, gpus, samples, tflops", [("7b", 32, 159.2, 445), ("13b", 32, 79.3, 420), ("175b", 128, 22.4, 386)]
)
def test_the_papers_flops_are_its_formula(model, gpus, samples, tflops):
    per_sample = flops.papers_step(paper(model, "BF16")) / 2048
    assert per_sample * samples / gpus / 1e12 == pytest.approx(tflops, rel=0.05)


# Measured runs.


def test_flops_are_those_of_megatrons_log():
    for name in ("train_step_fused", "train_step_dp4", "train_step_tp4"):
        with (RESULTS / f"{name}.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["shape"] in validation.MODELS]
        assert rows
        runs = {run.row["model"]: run.estimate.workload for run in validation.runs()}
        for row in rows:
            w = replace(runs[row["shape"]], global_batch=int(row["gbs"]))
            logged = float(row["tflops"]) * float(row["ms"]) * int(row["nproc"]) * 1e9
            assert flops.step(w) == pytest.approx(logged, rel=0.01)


def test_measured_runs_match_their_sources():
    """Each row's time, MiB and commit, for the benchmark and call that it names."""
    named = [run for run in validation.runs() if run.row["source"] not in ("log not kept", "table5.csv")]
    assert len(named) > 15
    for run in named:
        name, _, call = run.row["source"].partition(" call ")
        with (RESULTS / name).open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if (float(row["ms"]), row.get("call", "")) == (run.ms, call)]
        assert [row["commit"] for row in rows] == [run.row["commit"]]
        (row,) = rows
        tensor = f" --tensor-model-parallel-size {run.row['tensor']} --sequence-parallel"  # in the names of older files
        shape, *words = row["shape"].replace(tensor, "").split()
        added = [word for word in words if "overlap" not in word]
        papers = f"{shape.removesuffix('-whole')}-paper"  # train_step.py's shape, with the paper's flags
        assert [int(row["nproc"]), int(row["gbs"]), papers if added else shape] == [
            int(run.row["gpus"]), int(run.row["global_batch"]), run.row["model"]
        ]  # fmt: skip
        assert added == (table_run.SHAPES["7b"][1].split() if added else [])
        assert row["gpu"].split()[1].lower() == run.row["hardware"].split("-")[0]
        if len(added) < len(words):
            assert run.row["overlap"] == "1"
        # train_step.py's GB are a thousand MiB, to three digits
        assert [round(float(row[key]) * 1000) for key in ("gb", "gb_peak")] == [
            int(run.row["held_mib"]), int(run.row["peak_mib"])
        ]  # fmt: skip


def test_measured_runs_match_table_5():
    with (RESULTS / "table5.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["Outcome"] == "ok"]
    rows = [row for row in rows if not row["Log"].startswith("train_step_hosts")]  # that file is checked above
    named = [run for run in validation.runs() if run.row["source"] == "table5.csv"]
    assert len(named) == len(rows) > 8
    for run, row in zip(named, rows, strict=True):
        assert float(row["ms"]) == run.ms and row["Commit"] == run.row["commit"]
        assert [f"{row['Model']}-paper", row["#-GPUs"], row["MBS"], row["GBS"]] == [
            run.row[key] for key in ("model", "gpus", "micro_batch", "global_batch")
        ]
        assert float(row["Held GB"]) == pytest.approx(run.held, abs=0.006)  # rounded to a hundredth of a GB
        assert float(row["Peak GB"]) == pytest.approx(run.peak, abs=0.006)


def test_held_out_runs_are_predicted():
    """The bounds that docs/estimate.md states. The page also has the memory figures printed below every estimate."""
    s = validation.summary()
    page, below = (ROOT / "docs/estimate.md").read_text(), " ".join(validation.line().split())
    assert f"peak memory {s['GB']:.2%}, {s['GB at worst']:.1%}." in below
    assert f"bound | {100 * s['ms']:.1f} % | {100 * s['ms at worst']:.1f} % (" in page
    assert f"or nearly | {100 * s["host's ms"]:.0f} % | {100 * s["host's ms at worst"]:.0f} %: hosts differ" in page
    assert f"| peak memory | {100 * s['GB']:.2f} % | {100 * s['GB at worst']:.1f} % (" in page
    head = " ".join(page.split())
    assert f"was off by {100 * s['GB']:.2f} %." in head
    words = f"The step was off by {100 * s['ms']:.1f} % if the GPU limits it, and by "
    assert f"{words}{100 * s["host's ms"]:.0f} %" in head
    assert head.count(f"The {s['runs']} runs") == 1 and f"errors on the other {s['runs']}," in head
    assert s["runs"] >= 8
    assert s["ms"] < 0.03 and s["GB"] < 0.01 and s["host's ms at worst"] < 0.35
    out = [run for run in validation.runs() if run.held_out]
    for run in out:
        assert abs(run.error_peak) < 0.02 and abs(run.error_held) < 0.03, run.row
        one = run.row["micro_batch"] == "1" and run.row["model"] in ("7b", "7b-whole", "7b-paper", "175b-tp8")
        assert run.bound_by_host == ((one or run.row["model"] == "125m") and run.row["graph"] == "0")
        assert run.bound_by_host or abs(run.error_ms) < (0.105 if run.row["graph"] == "1" else 0.07), run.row
    assert len({(run.row["model"], run.row["system"], run.row["gpus"]) for run in out}) >= 8


def test_activations_in_fp8():
    """Whole GPT-7B, --fp8-grad-accum fp8 --fp8-activations: train_step_hosts.csv, call 3."""
    (row,) = (run.row for run in validation.runs() if run.row["commit"] == "5101927d" and run.row["system"] == "O3"
              and run.row["model"] == "7b")  # fmt: skip
    slice_ = validation.workload(row)
    job = replace(slice_.job, num_layers=32)
    found = estimate(replace(slice_, job=job, fp8_activations=True, overrides={"grad_accum": "fp8"}), H200)
    assert found.ms == pytest.approx(1467.8, rel=0.05)
    assert found.peak == pytest.approx(62_383 * 2**20 / 1e9, rel=0.01)
    assert found.held == pytest.approx(47_002 * 2**20 / 1e9, rel=0.01)


def test_calibration_is_no_better_than_it_must_be():
    eight = [run for run in validation.runs() if not run.held_out and run.row["graph"] == "0"]
    assert len(eight) == 8 and max(abs(run.error_ms) for run in eight) < 0.05
    assert validation.summary(held_out=False)["ms at worst"] < 0.08  # one number for three graphs


def test_a_graph_waits_for_no_host():
    """On several GPUs too. With packed documents a level's steps are no graphs."""
    flags = job_flags.parse(
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 8 --global-batch-size 64 --vocab-size 50304 --use-distributed-optimizer "
        "--cuda-graph-impl full_iteration --te-rng-tracker --bf16".split()
    )
    one, two, stock = (job_flags.workload(flags, gpus, system) for gpus, system in ((1, "O3"), (2, "O3"), (2, "bf16")))
    assert [w.graphed for w in (one, two, stock)] == [True, True, True]
    assert not job_flags.workload(flags, 2, "O3", sft=True).graphed
    graph, plain = estimate(one, H200), estimate(replace(one, graphed=False), H200)
    assert graph.host_ms == 0 < graph.gpu_ms == graph.ms < plain.gpu_ms < plain.host_ms == plain.ms
    assert graph.peak - plain.peak == pytest.approx(0.07)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_graph_has_its_memory_while_the_optimizer_works(gpus):
    """So what stock's makes comes on top: BF16 gradients in FP32, and else nothing; with NCCL in the graph, what was
    measured outside torch. Not without a graph, nor with Transformer Engine's optimizer."""
    graph = laid_out(slice_7b(graphed=True), data=gpus)
    wide = replace(graph, job=replace(graph.job, grad_reduce_in_bf16=True))
    tables = 4096 * (graph.vocabulary + 2048) * 4 / 1e9 / gpus  # of tokens and of positions, beside small norms
    outside = {"graph, outside torch's allocator": 3.9} if gpus > 1 else {}
    for w, optimizer in (graph, 0.0), (wide, tables):
        found, plain = estimate(w, H200), estimate(replace(w, graphed=False), H200)
        beside = {"optimizer, beside the graph's memory": pytest.approx(optimizer, rel=0.002)} if optimizer else {}
        assert found.of_graph == {**beside, **outside} and plain.of_graph == {}
        optimizer = sum(found.of_graph.values()) - sum(outside.values())
        assert found.room() == pytest.approx(H200.room() - found.peak - optimizer - sum(outside.values()))
        assert found.room(50) == pytest.approx(50 - found.peak - optimizer)  # a cap is on torch's allocator alone
        for e in found, plain:
            for cap in None, 50.0:
                assert step.room(e.workload, H200, cap) == e.room(cap)
    assert estimate(laid_out(slice_7b("te", graphed=True), data=gpus), H200).of_graph == {}


@pytest.mark.parametrize("level", [True, False])
def test_what_stocks_clip_and_torchs_adam_make(level):
    """Nothing at a level; else as much as a table: what the estimate counts beside a graph's memory."""
    clip = scaled_in_place(local_multi_tensor_scale) if level else local_multi_tensor_scale
    with FakeTensorMode():
        weights = [torch.nn.Parameter(torch.empty(n, device="cuda")) for n in (300, 400, 300)]
        adam = torch.optim.AdamW(weights)
        if level:
            _step_in_one_kernel(SimpleNamespace(optimizer=adam))
        for _ in range(2):
            for w in weights:
                w.grad = torch.empty_like(w)
            grads = [w.grad for w in weights]
            states = [t for state in adam.state.values() for t in state.values()]
            with Living(*weights, *grads, *states) as clipping:
                clip(65536, None, [grads, grads], 0.5)
            with Living(*weights, *grads, *states) as stepping:
                adam.step()
    if level:
        assert clipping.peak == 0 and stepping.peak < 64  # numbers of a few bytes
    else:
        assert clipping.peak >= 4 * 400 and stepping.peak >= 4 * 400


@pytest.mark.parametrize("more", ["", "--fp8-grad-accum bf16"])
def test_a_graph_keeps_what_has_come_from_all_ranks_beside_the_gradients(more):
    """If they are stored and sent in FP8, on several data-parallel ranks."""
    flags = job_flags.parse(
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 8 --vocab-size 50304 --use-distributed-optimizer --cuda-graph-impl full_iteration "
        f"--te-rng-tracker --bf16 --fp8-level O3 {more}".split()
    )
    for gpus in (1, 2):
        graph = job_flags.workload(flags, gpus, global_batch_size=8 * gpus)
        found, plain = (estimate(w, H200).memory["grad"] for w in (graph, replace(graph, graphed=False)))
        second = 12 * 12 * 768**2 * (1 + 1 / 128) / 1e9 if gpus == 2 and not more else 0.0
        assert found - plain == pytest.approx(second, rel=0.02, abs=1e-9)


def test_gemms_take_the_time_of_gemm_csv():
    """Alone on the GPU: forward within 15 %, and faster backward inside a step, whose data cost less power."""
    with (RESULTS / "gemm.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["gemm"] == "forward" and row["name"].startswith("7B")]
    sizes = {"qkv": (12288, 4096), "proj": (4096, 4096), "fc1": (16384, 4096), "fc2": (4096, 16384)}
    assert len(rows) == 4
    for row in rows:
        n, k = sizes[row["name"].split()[1]]
        ms = 2 * 8192 * n * (k + H200.fp8_forward_fixed_k) / H200.fp8_forward_tflops / 1e9
        assert ms == pytest.approx(float(row["first ms"]), rel=0.15)


def test_kept_transposes():
    """--fp8-gemm-search with and without --keep-fp8-transpose-cache: train_step_hosts.csv, call 7."""
    with (RESULTS / "train_step_hosts.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["call"], row["shape"]) == ("7", "7b")]
    (row,) = (row for row in rows if "--keep-fp8-transpose-cache" in row["system"])
    found, without = (estimate(slice_7b(keeps_transposes=keeps), H200) for keeps in (True, False))
    mib_thousands = 2**20 / 1e6  # train_step.py's GB
    assert found.peak == pytest.approx(float(row["gb_peak"]) * mib_thousands, rel=0.002)
    assert found.held == pytest.approx(float(row["gb"]) * mib_thousands, rel=0.002)
    weights = sum(found.workload.job.linears())
    assert found.peak - without.peak == pytest.approx((weights - max(found.workload.job.linears())) / 1e9)
    assert found.parts["cast"] < without.parts["cast"]  # the search for GEMMs is not modelled
    one = slice_7b(keeps_transposes=True, global_batch=4)  # one micro-batch: its transposes replace its activations
    assert estimate(one, H200).peak < estimate(slice_7b(global_batch=4), H200).peak
    short = replace(one, sequence=128)
    beside = estimate(short, H200).memory
    assert beside["activations"] + beside["kept transposes"] == pytest.approx(weights / 1e9)


# Parts.


def test_gpt_layers_keep_32_and_27_bytes():
    """Times tokens and width; softmax and norms add their sums."""
    w = slice_7b("bf16")
    per = w.tokens * w.job.hidden_size
    assert activations.layer(w) / per == pytest.approx(32, abs=0.05)
    assert activations.layer(slice_7b("O3")) / per == pytest.approx(27, abs=0.05)
    eighth = laid_out(w, tensor=8)
    assert activations.layer(eighth) * 8 == pytest.approx(activations.layer(w))
    alone = replace(eighth, sequence_parallel=False)
    assert activations.layer(alone) > 1.5 * activations.layer(eighth)


@pytest.mark.parametrize("system", SYSTEMS)
def test_gpt_layers_of_a_frozen_base_keep_28_bytes(system):
    """Norms' inputs, q, k, v, attention's output, fc1's output and fc2's input, all in BF16, at every level."""
    w = slice_7b(system)
    frozen = replace(w, job=replace(w.job, frozen_base=True))
    assert activations.layer(frozen) / (w.tokens * w.job.hidden_size) == pytest.approx(28, abs=0.05)
    again = replace(frozen, recompute="selective", modules=("core_attn",))
    assert activations.layer(again) == pytest.approx(activations.layer(frozen), rel=2e-3)  # adapters keep its output
    again = replace(frozen, recompute="selective", modules=("mlp",))
    assert activations.layer(again) / (w.tokens * w.job.hidden_size) == pytest.approx(14, abs=0.05)


def test_post_training_as_measured():
    """The memory of benchmarks/results/tuning.csv: SFT, DPO, and LoRA of rank 16, whose states stock holds."""
    with (RESULTS / "tuning.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] in ("sft", "dpo", "dpo-file", "lora")]
    assert len(rows) >= 17 and sum(row["task"] == "lora" for row in rows) >= 3
    systems = {"O3": "O3", "bf16-repaired": "bf16", "te-delayed": "te", "O1-bf16-gemm": "O1"}
    for row in rows:
        cells = {"gemm": "bf16"} if row["system"] == "O1-bf16-gemm" else {}
        if "--fp8-grad-accum fp8" in row["shape"]:
            cells["grad_accum"] = "fp8"
        job = replace(
            slice_7b().job, num_layers=int(row["layers"]), untie_embeddings_and_output_weights=True,
            position_embedding_type="rope", frozen_base=row["task"] == "lora", dpo_reference=row["task"] == "dpo",
        )  # fmt: skip
        sizes = {"micro_batch": int(row["mbs"]), "global_batch": int(row["gbs"])}
        found = estimate(slice_7b(systems[row["system"]], overrides=cells, job=job, **sizes), H200)
        adapters = 18e-9 * 16 * sum(rows + columns for rows, columns, _ in job.linear_sizes) * job.num_layers
        held = found.held + adapters * job.frozen_base
        assert held == pytest.approx(float(row["gb"]), rel=0.015), row
        assert found.peak - found.held == pytest.approx(float(row["gb_peak"]) - float(row["gb"]), rel=0.02), row


def test_a_level_with_gemms_in_bf16():
    """Inputs are kept like stock's and nothing is cast; a weight stored in E4M3 is decoded to BF16."""
    stock, o1, o3 = (slice_7b(name, overrides={"gemm": "bf16"}) for name in ("bf16", "O1", "O3"))
    assert activations.layer(o1) == activations.layer(o3) == activations.layer(stock)
    assert "cast" not in estimate(o1, H200).parts and "cast" in estimate(o3, H200).parts
    assert "kept transposes" not in estimate(replace(o3, keeps_transposes=True), H200).memory


@pytest.mark.parametrize("system", SYSTEMS)
def test_recomputation_takes_time_and_gives_memory(system):
    one, some, all_ = (
        estimate(slice_7b(system, recompute=how, modules=("mlp",)), H200) for how in ("none", "selective", "full")
    )
    assert one.peak > some.peak > all_.peak
    assert one.gpu_ms < some.gpu_ms < all_.gpu_ms < 1.4 * one.gpu_ms
    half = estimate(slice_7b(system, recompute="full", recomputed_layers=4), H200)
    assert all_.peak < half.peak < one.peak and one.gpu_ms < half.gpu_ms < all_.gpu_ms


@pytest.mark.parametrize("system", SYSTEMS)
def test_recomputation_repeats_the_forward_passs_collectives(system):
    """A layer's forward pass gathers the inputs of qkv and fc1 and sums the outputs of proj and fc2."""
    w = laid_out(slice_7b(system), tensor=8)
    plain = estimate(w, H200)

    def more(**how):
        """(Gathers, sums): bytes relative to those without recomputation."""
        found = estimate(replace(w, **how), H200)
        kinds = "tensor: gathers", "tensor: reduce-scatters"
        bare = [found.traffic[kind].bare / plain.traffic[kind].bare for kind in kinds]
        sent = [found.traffic[kind].inside / plain.traffic[kind].inside for kind in kinds]
        assert all((b > 1) == (s > 1) for b, s in zip(bare, sent, strict=True))
        assert found.parts["bare: tensor"] == pytest.approx(sum(found.traffic[kind].bare for kind in kinds))
        return sent

    assert more(recompute="full") == pytest.approx([8 / 6, 6 / 4])
    assert more(recompute="full", recomputed_layers=4) == pytest.approx([7 / 6, 5 / 4])  # of 8
    assert more(recompute="selective", modules=("mlp",)) == pytest.approx([7 / 6, 5 / 4])
    assert more(recompute="selective", modules=("core_attn", "layernorm")) == [1, 1]
    alone = replace(w, sequence_parallel=False)
    sums, twice = (
        estimate(replace(alone, recompute=how), H200).traffic["tensor: sums"] for how in ("none", "full")
    )
    assert (twice.inside, twice.bare) == (pytest.approx(1.5 * sums.inside), twice.ms)


def test_recomputed_attention_passes_keys_and_values_once_more():
    w = replace(slice_7b(), job=replace(slice_7b().job, data_parallel_size=2), context=2)
    once, *again, mlp = (
        estimate(replace(w, recompute=how, modules=modules), H200).traffic["context"].inside
        for how, modules in (("none", ()), ("full", ()), ("selective", ("core_attn",)), ("selective", ("mlp",)))
    )
    assert again == [pytest.approx(once * 4 / 3)] * 2 and mlp == once


def test_micro_batches_in_flight():
    w = laid_out(slice_7b(global_batch=64), pipeline=4)
    assert [activations.in_flight(w, stage) for stage in range(4)] == [4, 3, 2, 1]
    few = replace(w, global_batch=8)
    assert [activations.in_flight(few, stage) for stage in range(4)] == [2, 2, 2, 1]
    chunks = replace(w, virtual=2)  # Megatron's warm-up has 2 (p - i - 1) + (v - 1) p, plus the one in progress
    assert [activations.in_flight(chunks, stage) * 2 for stage in range(4)] == [11, 9, 7, 5]


def test_the_bubble_is_that_of_1f1b():
    w = laid_out(slice_7b(global_batch=64), pipeline=4)
    assert w.micro_batches == 16
    e = estimate(w, H200)
    even = (4 - 1) / 16
    stages = sum(ms for kind, ms in e.parts.items() if kind in ("linears", "attention", "norm", "activation"))
    assert 0 < e.parts["pipeline bubble"] < even * (stages + 300)
    chunks = estimate(replace(w, virtual=2), H200)
    sent = 3 / 16 * e.parts["bare: pipeline"]  # once for each chunk
    assert chunks.parts["pipeline bubble"] == pytest.approx((e.parts["pipeline bubble"] + sent) / 2)


@pytest.mark.parametrize(
    "layout",
    [{}, {"tensor": 2}, {"data": 2, "context": 2}, {"tensor": 8, "graphed": True}, {"tensor": 2, "virtual": 2}],
)
@pytest.mark.parametrize("system", ["bf16", "O3"])
def test_the_bubble_is_the_other_stages_passes(system, layout):
    """It is the other stages' passes, with collectives and gaps: like the slowest's, but without head and loss."""
    w = laid_out(slice_7b(system, global_batch=64), pipeline=4, **layout)
    more = replace(w, global_batch=128)
    e = estimate(w, H200)
    a_pass = (estimate(more, H200).gpu_ms - e.gpu_ms) / (more.micro_batches - w.micro_batches)
    table = e.parts["tables' gradients"] / w.micro_batches  # the same on the first stage as on the last
    at_the_end = e.parts["LM head"] / w.micro_batches + sum(memory_bound.loss(w, H200).values()) + table
    assert e.parts["pipeline bubble"] == pytest.approx((3 * (a_pass - at_the_end) + table) / w.virtual)


def test_the_host_has_the_bubble_too():
    """One stage of a slow host does not launch before the stage before it has sent. A whole-step graph has no host."""
    w, slow = laid_out(slice_7b(micro_batch=1, global_batch=16), pipeline=4), replace(H200, host_layer_ms=50.0)
    e, alone = estimate(w, slow), estimate(laid_out(slice_7b(micro_batch=1, global_batch=16)), slow)
    layers = 16 * 2 * 50.0  # of a stage, for 16 micro-batches
    assert e.ms == e.host_ms == pytest.approx(slow.host_ms + layers * (16 + 3) / 16)
    assert alone.ms == pytest.approx(slow.host_ms + 4 * layers)
    ahead = estimate(replace(w, virtual=2), slow)  # its transfers do not stop the host
    assert ahead.host_ms == pytest.approx(slow.host_ms + layers)
    assert estimate(replace(w, graphed=True), slow).host_ms == 0


def test_parts_add_up():
    for run in validation.runs():
        e = run.estimate
        assert sum(e.parts.values()) == pytest.approx(e.gpu_ms)
        assert sum(e.memory.values()) == pytest.approx(e.peak)
        assert e.held < e.peak and e.ms == max(e.gpu_ms, e.host_ms)


def test_traffic_leaves_the_node_where_ranks_do():
    w = laid_out(slice_7b("bf16", overlap_reduce=True, global_batch=64), data=8)
    inside = estimate(w, H200).traffic["gradients: linears"]
    assert inside.between == 0 and inside.inside == 4 * sum(w.job.linears()) * 7 / 8
    more = laid_out(slice_7b("bf16", overlap_reduce=True, global_batch=64), data=16)
    outside = estimate(more, H200).traffic["gradients: linears"]
    assert outside.between == pytest.approx((outside.inside + outside.between) / 8)
    spread = laid_out(slice_7b("bf16", overlap_reduce=True, global_batch=64), tensor=8, data=2)
    alone = estimate(spread, H200).traffic["gradients: linears"]
    assert alone.inside == 0 and alone.ms > alone.between / (H200.network_gb_s * 1e6)
    waiting = estimate(replace(w, overlap_reduce=False), H200)
    assert waiting.traffic["gradients: linears"].bare == pytest.approx(inside.ms)
    assert inside.bare < inside.ms


def test_an_all_to_all_leaves_the_node_whole():
    """With 16 ranks on two nodes each sends 8 of 16 parts to the other node; in two levels, its node's sum."""
    w = laid_out(slice_7b(overlap_reduce=True, global_batch=64), data=16)
    sent = (1 + 1 / 128) * sum(w.job.linears())
    flat, levels = (estimate(replace(w, two_levels=two), H200).traffic["gradients: linears"] for two in (False, True))
    assert (flat.inside, flat.between) == (sent * 7 / 16, sent * 8 / 16)
    assert (levels.inside, levels.between) == (sent * 7 / 8, sent / 8 / 2)
    assert flat.ms == pytest.approx(flat.between / (H200.network_gb_s * 1e6), rel=0.01) and levels.ms < flat.ms
    one_node = laid_out(slice_7b(global_batch=64), data=8)
    alone = estimate(one_node, H200).traffic["gradients: linears"]
    assert alone == estimate(replace(one_node, two_levels=True), H200).traffic["gradients: linears"]
    assert (alone.inside, alone.between) == (sent * 7 / 8, 0)


def test_levels_hold_less_and_less():
    peaks = [estimate(slice_7b(name), H200).peak for name in ("te", "bf16", "O1", "O2", "O3")]
    assert peaks == sorted(peaks, reverse=True)


# Hardware files.


def test_shipped_hardware_loads():
    assert set(hardware.known()) == {"h100-80gb-sxm", "h200", "h800"}
    h100, h800 = hardware.load("h100-80gb-sxm"), hardware.load("h800")
    assert h100.copy_gb_s == pytest.approx(H200.copy_gb_s * 3.35 / 4.8, rel=0.01) and h100.memory_gb < 86
    assert h800.nvlink_gb_s == pytest.approx(h100.nvlink_gb_s * 400 / 900, rel=0.01)


@pytest.mark.parametrize(
    "change, message",
    [
        (("copy_gb_s: 4200", "copy_gb_s: fast"), "copy_gb_s is fast; give a number"),
        (("copy_gb_s: 4200", ""), "copy_gb_s is missing; add it"),
        (("name: H200 141 GB SXM", ""), "name is missing; add it"),
        (("name: H200 141 GB SXM", "name: 7"), "name is 7; give a word"),
        (("copy_gb_s: 4200", "copy_gb_s: 0"), "copy_gb_s is 0; give more than 0"),
        (("copy_gb_s: 4200", "copy_gb_s: .inf"), "copy_gb_s is inf; give a number"),
        (("host_ms: 36", "host_ms: .nan"), "host_ms is nan; give a number"),
        (("gpus_per_node: 8", "gpus_per_node: 8.5"), "gpus_per_node is 8.5; give a whole number"),
        (("copy_gb_s: 4200", "copy_gb_s: 4200\ncolour: red"), "colour is not a name that the model knows"),
        (("name: H200", "name: [H200"), "not YAML: "),
    ],
)
def test_a_hardware_file_that_is_not_whole_is_refused(tmp_path, change, message):
    file = tmp_path / "mine.yaml"
    file.write_text(hardware.known()["h200"].read_text().replace(*change))
    with pytest.raises(UserError, match=message) as error:
        hardware.load(str(file))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="h300: no such file; give a YAML file, or one of h100-80gb-sxm"):
        hardware.load("h300")
    with pytest.raises(UserError, match=f"{tmp_path}: a folder; give a YAML file"):
        hardware.load(str(tmp_path))


def test_a_binary_hardware_file_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"\x80\xff\x00")
    with pytest.raises(UserError, match=r"--hardware .*mine.yaml: not UTF-8 text, from byte 0 on; see"):
        hardware.load(str(file))


def test_cases_that_others_published(monkeypatch):
    """docs/estimate.md: SimuMax's 24 cases on B200s. Our model has only one factor on time from them."""
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    import published_cases

    found = published_cases.cases()
    assert len(found) == 24 and sum(case.gave_the_factor for case in found) == 1
    eight = [case for case in found if case.name.startswith("llama3-70b, 12 layers, TP 8")]
    others = [case for case in found if case not in eight and not case.gave_the_factor]
    assert (len(eight), len(others)) == (3, 20)
    assert all(abs(case.ours_ms) < 0.081 for case in others) and all(abs(case.ours_ms) < 0.2 for case in eight)
    assert all(0 < case.ours_gib < 0.043 for case in found)
    assert all(abs(case.simumax_ms) < 0.12 and abs(case.simumax_gib) < 0.006 for case in found)
