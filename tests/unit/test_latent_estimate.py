"""Multi-latent attention in `memory`, `estimate` and `plan`: against built models, Megatron and measured runs."""

import csv
import json

import architecture
import pytest
import yaml
from kept import LENGTH, TOKENS, WIDTH, kept
from launch import ROOT

from megatron_fp8.engine.owned_weight import in_forward_order, name_weights, owned_weights
from megatron_fp8.errors import UserError
from megatron_fp8.tools.perf import activations, flops, gemm_time, hardware, job_flags, memory, plan
from megatron_fp8.tools.perf.output import MIB
from megatron_fp8.tools.perf.step import estimate
from megatron_fp8.tools.perf.workload import Workload

H200 = hardware.load("h200")
LATENT = (
    f"--hidden-size {WIDTH} --ffn-hidden-size 256 --num-attention-heads 8 --multi-latent-attention --kv-lora-rank 48 "
    f"--qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 32 --seq-length {LENGTH} --max-position-embeddings "
    f"{LENGTH} --swiglu --position-embedding-type rope --untie-embeddings-and-output-weights"
)
DEEPSEEK = (  # train_step.py's shape deepseek-moe: four layers like DeepSeek-V2-Lite's
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --multi-latent-attention --kv-lora-rank 512 "
    "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --ffn-hidden-size 10944 "
    "--vocab-size 102399 --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 "
    "--moe-shared-expert-intermediate-size 2816 "
    "--untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 4096 --hidden-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 4 --bf16 --use-distributed-optimizer --moe-token-dispatcher-type alltoall"
)
TOGETHER = "--moe-grouped-gemm --fp8-level O3 --fp8-experts"


def workload(flags: str, gpus: int = 1, system: str | None = None) -> Workload:
    return job_flags.workload(job_flags.parse(flags.split()), gpus, system)


# Parameters.


@pytest.mark.parametrize("more", [
    "--disable-bias-linear", "--disable-bias-linear --qk-layernorm", "--disable-bias-linear --q-lora-rank 80",
    "--q-lora-rank 80 --qk-layernorm --normalization RMSNorm", "--qk-layernorm",  # with biases
    "--disable-bias-linear --qk-layernorm --num-experts 4 --moe-ffn-hidden-size 64 --moe-layer-freq [0,1] "
    "--moe-shared-expert-intermediate-size 160 --fp8-experts --normalization RMSNorm",
])  # fmt: skip
def test_the_parameters_are_a_built_models(more):
    """Each linear that the engine owns, in the order of the backward pass; all others together."""
    flags = f"{LATENT} {more} --num-layers 2"
    with architecture.started():
        model = architecture.build(flags.split(), level=True)
        name_weights([model])
        owned = in_forward_order(owned_weights([model]))[::-1]
        sizes = [weight.param.numel() for weight in owned if weight.expert is None]
        experts = [weight.param.numel() for weight in owned if weight.expert is not None]
        counted = {id(weight.param) for weight in owned}
        others = [p.numel() for p in model.parameters() if id(p) not in counted]
    small = "--vocab-size 100 --make-vocab-size-divisible-by 4 --bf16"
    small += " --fp8-level O1" * bool(experts)
    job = job_flags.job(job_flags.parse(f"{flags} {small}".split()).args, 1)
    assert job.linears() == sizes and sorted(job.experts()) == sorted(experts)
    assert sorted(job.others(0)) == sorted(others)


def test_deepseek_v2_lite_has_its_published_number_of_parameters():
    """15.7 G (arXiv 2405.04434); the published model has no norm before W_q, as Megatron has with --qk-layernorm."""
    job = job_flags.job(job_flags.parse(f"{DEEPSEEK} --num-layers 27 --moe-layer-freq [0]+[1]*26".split()).args, 1)
    count = sum(memory.parameters(job)) + memory.expert_parameters(job)
    assert count - 27 * 2048 == 15_706_484_224


def test_qwen3_30b_a3b_has_its_published_number_of_parameters():
    """With the norms of q and k: 30.5 G (arXiv 2505.09388)."""
    model = yaml.safe_load((ROOT / "configs/model/qwen3-30b-a3b.yaml").read_text())["MODEL_ARGS"]
    flags = [word for flag, value in model.items() for word in [flag, *([] if value is True else [str(value)])]]
    job = job_flags.job(job_flags.parse([*flags, "--bf16"]).args, 1)
    assert sum(memory.parameters(job)) + memory.expert_parameters(job) == 30_532_122_624


# What a layer keeps.


@pytest.mark.parametrize("more", [
    *("", "--qk-layernorm", "--q-lora-rank 80", "--q-lora-rank 80 --qk-layernorm"),
    *("--qk-layernorm --fp8-activations", "--q-lora-rank 80 --qk-layernorm --fp8-activations"),
    "--qk-layernorm --num-experts 2 --moe-router-topk 2 --moe-ffn-hidden-size 384 --fp8-experts "
    "--moe-shared-expert-intermediate-size 320",
])  # fmt: skip
def test_a_layer_keeps_what_is_counted(more):
    flags = f"{LATENT} --normalization RMSNorm --disable-bias-linear --fp8-gemm fp8 {more}"
    with architecture.started():
        measured = kept(flags)
    size = f"--vocab-size 100 --num-layers 1 --micro-batch-size {TOKENS // LENGTH} --hidden-dropout 0"
    moe = "--num-experts" in more
    w = workload(f"{flags} {size} --bf16 --fp8-level O1")
    norms = 2 * WIDTH * (1 + moe)  # inputs of the norms that are no linear's
    assert activations.layer(w, moe) / TOKENS - norms == pytest.approx(measured, rel=0.01)


# Time.


def test_flops_are_megatrons():
    from megatron.training.training import num_floating_point_operations

    for more in ("", "--q-lora-rank 1536", "--moe-layer-freq [0,1,1,1]"):
        flags = job_flags.parse(f"{DEEPSEEK} {more}".split())
        flags.args.padded_vocab_size, flags.args.world_size = 102_400, 1
        w = job_flags.workload(flags, 1)
        assert flops.step(w) == pytest.approx(num_floating_point_operations(flags.args, 4), rel=2e-4)


def test_values_of_another_width():
    """Attention's seven products: with values as wide as keys it is ordinary attention."""
    latent = workload(f"{DEEPSEEK} --v-head-dim 192")
    ordinary = workload(DEEPSEEK.replace("--multi-latent-attention", "--kv-channels 192"))
    assert gemm_time.attention(latent, H200) == gemm_time.attention(ordinary, H200)
    half = workload(f"{DEEPSEEK} --v-head-dim 96")
    share = sum(gemm_time.attention(half, H200)) / sum(gemm_time.attention(latent, H200))
    assert share == pytest.approx(5.5 / 7 * (1 + 25 / 144) / (1 + 25 / 192), rel=1e-6)


@pytest.mark.parametrize("system, name", [("O3", "O3-experts-grouped"), ("te", "te-tensorwise-experts")])
def test_four_layers_as_measured(system, name):
    """train_step_experts.csv: memory, attention and products, none of which set a number."""
    with (ROOT / "benchmarks/results/train_step_experts.csv").open(newline="") as file:
        wanted = ("NVIDIA H200", "deepseek-moe", name)
        (row,) = (row for row in csv.DictReader(file) if (row["gpu"], row["shape"], row["system"]) == wanted)
    flags = f"{DEEPSEEK} {TOGETHER} {'--moe-permute-fusion' * (system == 'te')}"
    found, ms = estimate(workload(flags, system=system), H200), json.loads(row["profile_ms"])
    assert found.held == pytest.approx(float(row["gb"]) * 1e3 * MIB, rel=0.015)
    assert found.peak == pytest.approx(float(row["gb_peak"]) * 1e3 * MIB, rel=0.01)
    assert found.parts["attention"] == pytest.approx(ms["attention"], rel=0.07)
    if system == "O3":
        products = sum(time for kind, time in ms.items() if kind.startswith("FP8 GEMM"))
        assert found.parts["linears"] + found.parts["experts"] == pytest.approx(products, rel=0.08)


# Commands.


def test_a_plan_of_deepseek():
    flags = job_flags.parse(f"{DEEPSEEK} {TOGETHER} --global-batch-size 16".split())
    found = plan.search(flags, 2, "O3", H200, None)
    assert any(c.best and c.layout.tensor == 2 for c in found) and any(c.best and c.layout.expert == 2 for c in found)


@pytest.mark.parametrize("flags, message", [
    ("--context-parallel-size 2", "--context-parallel-size 2 with --multi-latent-attention: not modelled; remove one"),
    ("--kv-lora-rank 500", "4096 x 500 elements"),
])  # fmt: skip
def test_what_is_not_modelled_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        workload(f"{DEEPSEEK} {flags}", gpus=2)
