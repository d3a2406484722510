"""A step as one CUDA graph (engine/step_graph.py), on one GPU and on two: each run has the losses, gradient norms and
evaluations, to the last bit, of the one that its host launches kernel by kernel."""

import pytest
import torch
from megatron_runs import TINY_GPT, run_megatron, script_path

pytestmark = pytest.mark.gpu
GRAPH = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2"
NEVER = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 1000"
BOTH = "--no-check-for-nan-in-loss-and-grad --fp8-log-exact --eval-iters 2 --eval-interval 4 --split 8,1,1"
STEPS = "--train-iters 12"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
VIRTUAL = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
# Two experts a token: the sum of two rows does not depend on the order in which stock's atomics add them.
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --fp8-experts --moe-grouped-gemm "
EXPERTS += "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
# The GPU picks the rows of a rank's experts (layers/gathered_dispatch.py).
GATHERED = f"{EXPERTS} --moe-token-dispatcher-type allgather --expert-model-parallel-size 2"
CASES = {
    "O1": (1, "--fp8-level O1"),
    "O2-dropout": (1, "--fp8-level O2 --attention-dropout 0.1 --hidden-dropout 0.1"),
    "O3": (1, "--fp8-level O3"),
    "O3-checked": (1, "--fp8-level O3 --check-for-nan-in-loss-and-grad --check-for-spiky-loss"),
    "O3-just-in-time": (1, "--fp8-level O3 --fp8-recipe tensorwise --keep-fp8-transpose-cache"),
    "O3-all": (1, "--fp8-level O3 --fp8-lm-head --fp8-activations"),
    "O3-loss-chunks": (1, "--fp8-level O3 --fp8-lm-head --fp8-loss-chunks 3"),
    "O3-fp8-sums": (1, "--fp8-level O3 --fp8-grad-accum fp8"),
    "O3-recomputed": (
        1,
        "--fp8-level O3 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "O1-looked-at": (1, "--fp8-level O1 --fp8-log-interval 3"),
    "O3-spikes": (1, "--fp8-level O3 --fp8-on-spike skip --fp8-spike-sigma 0.5 --fp8-spike-window 16 --train-iters 24"),
    "O3-more-micro-batches": (1, "--fp8-level O3 --step-batch-size-schedule 0:4,1536:8"),
    "O3-overlapped": (1, f"--fp8-level O3 {SHARDED}"),
    "O3-per-token": (1, "--fp8-level O3 --calculate-per-token-loss --accumulate-allreduce-grads-in-fp32"),
    "O3-next-tokens": (1, "--fp8-level O3 --mtp-num-layers 1"),
    "O1-experts": (1, f"--fp8-level O1 {EXPERTS}"),
    "O3-experts": (1, f"--fp8-level O3 {EXPERTS} --moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 64"),
    "O3-experts-recomputed": (
        1,
        f"--fp8-level O3 {EXPERTS} --recompute-granularity selective --recompute-modules moe",
    ),
    "data-experts": (2, f"--fp8-level O3 {EXPERTS} {SHARDED}"),
    "tensor-experts": (
        2,
        f"--fp8-level O3 {EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
    ),
    "ranks-experts": (2, f"--fp8-level O3 {GATHERED} --fp8-grad-accum fp8 --moe-router-dtype fp32"),
    "ranks-experts-recomputed": (
        2,
        f"--fp8-level O3 {GATHERED} {SHARDED} --moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 64 "
        "--recompute-granularity selective --recompute-modules moe",
    ),
    "ranks-experts-sequence": (
        2,
        f"--fp8-level O1 {GATHERED} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
    ),
    "data-O1": (2, f"--fp8-level O1 {SHARDED}"),
    "data-bf16": (
        2,
        "--fp8-level O1 --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32 --use-distributed-optimizer",
    ),
    "data-O2-replicated": (2, "--fp8-level O2 --attention-dropout 0.1 --hidden-dropout 0.1"),
    "data-O3": (2, f"--fp8-level O3 {SHARDED} --ddp-bucket-size 20000"),
    "data-fp8-sums": (2, f"--fp8-level O3 {SHARDED} --fp8-grad-accum fp8 --micro-batch-size 1"),
    "data-shared": (2, f"--fp8-level O1 --fp8-grad-reduce shared {SHARDED}"),
    "tensor-O1": (2, "--fp8-level O1 --tensor-model-parallel-size 2"),
    "tensor-O3": (2, "--fp8-level O3 --tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline-O2": (2, "--fp8-level O2 --pipeline-model-parallel-size 2"),
    "virtual-O3": (2, f"--fp8-level O3 {VIRTUAL}"),
}


def flags_of(case: str) -> tuple[int, list[str]]:
    nproc, given = CASES[case]
    flags = [*TINY_GPT, *BOTH.split(), *STEPS.split(), *given.split()]
    if "--step-batch-size-schedule" in flags:
        at = flags.index("--global-batch-size")
        del flags[at : at + 2]
    return nproc, [flag for flag in flags if flag != "--check-for-nan-in-loss-and-grad"]


def exact(run) -> list[str]:
    return [line for line in run.lines if "exact lm loss" in line]


def same(graphed, plain, steps: int) -> None:
    assert any("is a CUDA graph from now on" in line for line in graphed.lines), "\n".join(graphed.lines[-40:])
    assert exact(graphed) == exact(plain) and len(exact(plain)) == steps
    assert str(graphed.grad_norms) == str(plain.grad_norms)  # a skipped step's loss is NaN
    assert graphed.validation_losses == plain.validation_losses != []


@pytest.mark.parametrize("case", CASES)
def test_graphed_steps_are_the_steps(case):
    nproc, flags = flags_of(case)
    if nproc > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    graphed = run_megatron(nproc, [*flags, *GRAPH.split()], gpu=True, timeout=120)
    # If a graph is asked for, Megatron keeps its generators in another form, and draws other first weights of experts.
    plain = run_megatron(nproc, [*flags, *(NEVER.split() if "experts" in case else [])], gpu=True, timeout=120)
    assert not any("is a CUDA graph from now on" in line for line in plain.lines)
    same(graphed, plain, 24 if case == "O3-spikes" else 12)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rows_that_the_gpu_picks_are_stocks():
    """Without a graph, beside stock's dispatcher, which counts them on the host: as long as a token has at most two."""
    nproc, flags = flags_of("ranks-experts")
    flags += NEVER.split()
    picked = run_megatron(nproc, flags, gpu=True, timeout=120)
    script = "tests/scripts/stocks_dispatcher.py"
    stocks = run_megatron(nproc, flags, script=script, env={"PYTHONPATH": script_path()}, gpu=True, timeout=120)
    assert sum("stock's dispatchers: 2" in line for line in stocks.lines) == nproc
    assert exact(picked) == exact(stocks) and len(exact(picked)) == 12
    assert picked.grad_norms == stocks.grad_norms and picked.validation_losses == stocks.validation_losses != []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_graphed_run_resumes_as_the_run(tmp_path):
    nproc, flags = flags_of("tensor-O3")
    saving = f"--save {tmp_path} --save-interval 6".split()
    run_megatron(nproc, [*flags, *saving, *GRAPH.split(), "--exit-interval", "6"], gpu=True, timeout=120)
    resumed = run_megatron(nproc, [*flags, *saving, *GRAPH.split(), "--load", str(tmp_path)], gpu=True, timeout=120)
    plain = run_megatron(nproc, flags, gpu=True, timeout=120)
    assert any("is a CUDA graph from now on" in line for line in resumed.lines)
    assert exact(resumed) == exact(plain)[6:] and len(exact(resumed)) == 6


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", ["tensor-O3", "data-O3"])
def test_delayed_launches_change_nothing(case):
    """Fifty steps, each rank's host late by a random time before each replay, its sums and its steps."""
    nproc, flags = flags_of(case)
    flags += "--train-iters 54 --eval-interval 1000".split()
    late = "tests/scripts/train_with_delays.py"
    graphed = run_megatron(nproc, [*flags, *GRAPH.split()], script=late, gpu=True, timeout=150)
    plain = run_megatron(nproc, flags, gpu=True, timeout=150)
    assert exact(graphed) == exact(plain) and len(exact(plain)) == 54


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_cannot_record_makes_all_go_on_without():
    nproc, flags = flags_of("tensor-O3")
    script = "tests/scripts/train_unrecorded.py"
    run = run_megatron(nproc, [*flags, *GRAPH.split()], script=script, gpu=True, timeout=150)
    plain = run_megatron(nproc, flags, gpu=True, timeout=120)
    assert sum("the run goes on without a CUDA graph: " in line for line in run.lines) == 1
    assert exact(run) == exact(plain) and len(exact(plain)) == 12
