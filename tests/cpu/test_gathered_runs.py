"""Steps as graphs with experts on several ranks (layers/gathered_dispatch.py), over gloo, with a tape for a CUDA graph
(tests/tape.py) and all undefined memory poisoned: losses, norms, evaluations, weights, moments and scales are those of
stock's all-gather dispatcher without a graph, to the last bit."""

import json
import re

import pytest
from megatron_runs import TINY_GPT, run_megatron, script_path

OWNED = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type allgather "
OWNED += "--fp8-experts --moe-grouped-gemm --fp8-log-exact --train-iters 6 --lr-decay-iters 10 "
OWNED += "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
OWNED += "--eval-iters 1 --eval-interval 4 --split 8,1,1 --use-distributed-optimizer"
GRAPH = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2"
RECOMPUTED = "--recompute-granularity selective --recompute-modules moe"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
EP = "--expert-model-parallel-size"


def trained(ranks: int, flags: str, script: str, **env: str):
    """(exact losses, norms, evaluations, {key of a weight and rank: what owned_experts.py says of it}, lines)"""
    command = [*TINY_GPT, *f"{OWNED} --global-batch-size {4 * ranks} {flags}".split()]
    env = {"PYTHONPATH": script_path(), **env}
    run = run_megatron(ranks, command, script=f"tests/scripts/{script}.py", env=env, timeout=300)
    found = [json.loads(line.removeprefix("expert ")) for line in run.lines if line.startswith("expert {")]
    for weight in found:
        del weight["gradients"]  # of those that came one by one
    exact = re.findall(r"exact lm loss ([^\s;]+)", "\n".join(run.lines))
    assert len(exact) == 6 and found and run.validation_losses
    weights = {(line["key"], line["rank"]): line for line in found}
    return (exact, run.grad_norms, run.validation_losses, weights), run.lines


CASES = {
    "two ranks": (2, f"--fp8-level O3 {EP} 2 --fp8-grad-accum fp8"),
    **{
        name: pytest.param(ranks, flags, marks=pytest.mark.slow)
        for name, (ranks, flags) in {
            "O1": (2, f"--fp8-level O1 {EP} 2 --overlap-grad-reduce --overlap-param-gather"),
            "O2": (2, f"--fp8-level O2 {EP} 2 {RECOMPUTED} --moe-shared-expert-intermediate-size 64"),
            "one rank": (1, "--fp8-level O3 --moe-layer-freq [0,1]"),
            "one expert a rank": (2, f"--fp8-level O3 {EP} 2 --num-experts 2 --moe-router-topk 1 "
                                     "--moe-router-pre-softmax --keep-fp8-transpose-cache"),
            "four ranks": (4, f"--fp8-level O3 {EP} 4 --num-experts 8"),
            "replicas of experts": (4, f"--fp8-level O3 {EP} 2"),
            "pipeline": (4, f"--fp8-level O3 {EP} 2 --pipeline-model-parallel-size 2"),
            "tensor": (2, f"--fp8-level O3 {EP} 2 {SP} --expert-tensor-parallel-size 1"),
            "parts of experts": (2, f"--fp8-level O3 {SP}"),
            "parts on ranks": (4, f"--fp8-level O3 {SP} {EP} 2"),
            "next tokens": (2, f"--fp8-level O3 {EP} 2 --mtp-num-layers 1"),
            "latent attention": (2, f"--fp8-level O3 {EP} 2 --multi-latent-attention --kv-lora-rank 32 "
                                    "--qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16 --mtp-num-layers 1"),
            "FP32 router, GELU": (2, f"--fp8-level O3 {EP} 2 --moe-router-dtype fp32 --no-bias-swiglu-fusion"),
            "looked at": (2, f"--fp8-level O3 {EP} 2 --fp8-log-interval 3"),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "flags"), CASES.values(), ids=CASES)
def test_a_replayed_step_is_the_step(ranks, flags):
    taped, lines = trained(ranks, f"{flags} {GRAPH}", "experts_on_tape")
    assert sum("is a CUDA graph from now on" in line for line in lines) == 1, "\n".join(lines[-30:])
    stocks, lines = trained(ranks, flags, "owned_experts")
    assert taped == stocks and not any("is a CUDA graph" in line for line in lines)


@pytest.mark.slow  # tests/unit/test_gathered_dispatch.py stays: no row at all, and few, bit for bit
def test_a_rank_without_a_row():
    """All tokens of all ranks go to expert 1, so the second rank's experts get none."""
    flags = f"--fp8-level O3 {EP} 2 --moe-router-topk 1 --moe-router-pre-softmax"
    taped, lines = trained(2, f"{flags} {GRAPH}", "experts_on_tape", FP8_TEST_ONLY="1")
    assert any("is a CUDA graph from now on" in line for line in lines)
    stocks, _ = trained(2, flags, "owned_experts", FP8_TEST_ONLY="1")
    assert taped == stocks
