"""Steps as graphs (engine/step_graph.py) on one to four ranks, over gloo, with a tape for a CUDA graph (tests/tape.py):
each run has the losses, gradient norms and evaluations, to the last bit, of the one without."""

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron

from megatron_fp8.tools.lab.sweep.plan_file import read_plan

PLAIN, TAPE, FETCHED = "pretrain_gpt_fp8.py", "tests/scripts/train_on_tape.py", "tests/scripts/fetched_keys.py"
GRAPH = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2"
FLAGS = "--fp8-log-exact --train-iters 7 --lr-decay-iters 10 --eval-iters 1 --eval-interval 4 --split 8,1,1".split()
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
VIRTUAL = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
CASES = {"data": (2, f"--fp8-level O3 {SHARDED}")}
CONTEXT = "--context-parallel-size 2 --attention-backend auto"
MORE = {
    "sequence": (2, "--fp8-level O3 --tensor-model-parallel-size 2 --sequence-parallel"),
    "one": (1, "--fp8-level O3 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "virtual": (2, f"--fp8-level O3 {VIRTUAL}"),
    "context": (2, f"--fp8-level O3 {CONTEXT}"),
    "context-sequence": (4, f"--fp8-level O3 {CONTEXT} --tensor-model-parallel-size 2 --sequence-parallel {SHARDED}"),
    "context-recomputed": (2, f"--fp8-level O3 {CONTEXT} {RECOMPUTED} {SHARDED}"),
    "loss-chunks": (2, "--fp8-level O3 --fp8-loss-chunks 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "data-O1": (2, "--fp8-level O1"),
    "data-O2-replicated": (2, "--fp8-level O2 --overlap-grad-reduce"),
    "data-fp8-sums": (2, "--fp8-level O2 --fp8-grad-accum fp8 --micro-batch-size 1 --use-distributed-optimizer"),
    "data-shared": (2, f"--fp8-level O1 --fp8-grad-reduce shared {SHARDED}"),
    "data-two-levels": (4, f"--fp8-level O3 --fp8-grad-reduce-hierarchy 2 {SHARDED} --ddp-bucket-size 20000"),
    "data-in-buckets": (2, f"--fp8-level O3 {SHARDED} --ddp-bucket-size 20000"),
    "data-per-token": (2, f"--fp8-level O3 {SHARDED} --calculate-per-token-loss"),
    "data-spiky": (2, f"--fp8-level O3 {SHARDED} --check-for-spiky-loss"),
    # The same gradients are found large in both runs, and the step runs again.
    "large-gradients": (
        1,
        "--fp8-level O3 --check-for-large-grads --no-check-for-nan-in-loss-and-grad --error-injection-rate 3 "
        "--error-injection-type transient_error",
    ),
    "tensor": (2, "--fp8-level O2 --tensor-model-parallel-size 2"),
    "tensor-data": (4, f"--fp8-level O3 --tensor-model-parallel-size 2 --sequence-parallel {SHARDED}"),
    "pipeline": (2, "--fp8-level O3 --pipeline-model-parallel-size 2"),
    "pipeline-data": (4, f"--fp8-level O3 --pipeline-model-parallel-size 2 {SHARDED}"),
    "virtual-data": (4, f"--fp8-level O3 {VIRTUAL} {SHARDED} --micro-batch-size 1"),
    "virtual-without-overlap": (
        4,
        "--fp8-level O2 --num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 "
        "--no-overlap-p2p-communication",
    ),
    "pipeline-tensor": (4, "--fp8-level O3 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
    "stages-of-nothing-else": (
        4,
        "--fp8-level O3 --num-layers 2 --pipeline-model-parallel-layout E|t|t|L --pipeline-model-parallel-size 4",
    ),
    "next-tokens": (2, f"--fp8-level O3 --mtp-num-layers 1 {SHARDED}"),
    "logged": (2, f"--fp8-level O3 --fp8-log-interval 3 {SHARDED}"),
    "spikes": (2, "--fp8-level O3 --fp8-on-spike bf16-fallback --fp8-spike-sigma 0.5 --fp8-spike-window 16"),
    "recomputed": (2, f"--fp8-level O3 {SHARDED} {RECOMPUTED}"),
    "ramp": (1, "--fp8-level O3 --step-batch-size-schedule 0:4,1024:8"),
    "clip-none": (2, f"--fp8-level O3 {SHARDED} --clip-grad 0"),
}


PLANS = {name: read_plan(ROOT / f"configs/lab/{name}.yaml") for name in ("evidence_l0", "table6", "grad_scaling")}
FASTER = [(name, arm) for name, plan in PLANS.items() for arm in plan.faster]


def check(
    nproc: int, flags: str, graphs: int = 1, script: str = TAPE, plain_script: str = PLAIN, asked: str = GRAPH
) -> list[str]:
    """Compare a run on the tape with the same without; its lines."""
    every = [*TINY_GPT, *FLAGS, *flags.split()]
    if "--step-batch-size-schedule" in every:
        at = every.index("--global-batch-size")
        del every[at : at + 2]
    taped = run_megatron(nproc, [*every, *asked.split()], script=script, timeout=300)
    plain = run_megatron(nproc, every, script=plain_script, timeout=300)
    assert sum("is a CUDA graph from now on" in line for line in taped.lines) == graphs
    exact = [[line for line in run.lines if "exact lm loss" in line] for run in (taped, plain)]
    assert exact[0] == exact[1] and len(exact[0]) == 7
    assert taped.validation_losses == plain.validation_losses != []
    return taped.lines


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_are_the_steps(case):
    check(*CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_replayed_steps_are_the_steps_in_more_layouts(case):
    check(*MORE[case], graphs=2 if case == "ramp" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name, arm", FASTER)
def test_what_makes_the_runs_of_a_plan_faster_changes_no_bit(name, arm):
    """Of one rank, and of two with one micro-batch ("by halves") and two."""
    plan, usual = PLANS[name], "--use-distributed-optimizer --cross-entropy-loss-fusion --attention-backend auto"
    check(plan.processes, f"{' '.join(plan.arms[arm])} {usual}", asked=" ".join(plan.faster[arm]))


@pytest.mark.slow
def test_replayed_steps_that_fetch_keys_are_the_steps():
    flags = "--fp8-level O3 --context-parallel-size 4 --attention-backend auto"
    check(4, flags, script=FETCHED, plain_script=FETCHED)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["local", "transformer_engine"])
def test_graphs_of_layers_become_graphs_of_steps(asked):
    run = run_megatron(1, [*TINY_GPT, *FLAGS, "--fp8-level", "O1", "--cuda-graph-impl", asked], script=TAPE)
    assert f"[fp8] --cuda-graph-impl {asked}: full_iteration instead" in "\n".join(run.lines)
    assert any("is a CUDA graph from now on" in line for line in run.lines)


@pytest.mark.slow  # when "auto" wants one: tests/unit/test_step_graph.py
def test_auto_records_if_the_gpu_waits_for_its_host():
    """A CPU that stands for one is always done."""
    run = run_megatron(2, [*TINY_GPT, *FLAGS, "--fp8-level", "O3", "--fp8-step-graph", "auto"], script=TAPE)
    plain = run_megatron(2, [*TINY_GPT, *FLAGS, "--fp8-level", "O3"])
    assert any("is a CUDA graph from now on" in line for line in run.lines)
    exact = [[line for line in r.lines if "exact lm loss" in line] for r in (run, plain)]
    assert exact[0] == exact[1] and len(exact[0]) == 7


@pytest.mark.parametrize(
    "layout", [pytest.param("--tensor-model-parallel-size 2", marks=pytest.mark.slow), SHARDED]
)
def test_a_rank_that_cannot_record_makes_all_go_on_without(layout):
    nproc = 2
    flags = [*TINY_GPT, *FLAGS, "--fp8-level", "O3", *layout.split()]
    run = run_megatron(nproc, [*flags, *GRAPH.split()], script="tests/scripts/train_unrecorded.py", timeout=300)
    plain = run_megatron(nproc, flags, timeout=300)
    without = [line for line in run.lines if "the run goes on without a CUDA graph" in line]
    assert len(without) == 1 and f"rank {nproc - 1}: CUDA error: operation not permitted" in without[0]
    exact = [[line for line in r.lines if "exact lm loss" in line] for r in (run, plain)]
    assert exact[0] == exact[1] and len(exact[0]) == 7
