"""A step as one CUDA graph (engine/step_graph.py): each run has the losses, gradient norms and evaluations, to the last
digit, of the one that its host launches kernel by kernel."""

import pytest
from megatron_runs import TINY_GPT, run_megatron

pytestmark = pytest.mark.gpu
GRAPH = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2"
BOTH = "--no-check-for-nan-in-loss-and-grad --eval-iters 2 --eval-interval 4 --split 8,1,1 --train-iters 12"
CASES = {
    "O1": "--fp8-level O1",
    "O2-dropout": "--fp8-level O2 --attention-dropout 0.1 --hidden-dropout 0.1",
    "O3": "--fp8-level O3",
    "O3-just-in-time": "--fp8-level O3 --fp8-recipe tensorwise --keep-fp8-transpose-cache",
    "O3-all": "--fp8-level O3 --fp8-lm-head --fp8-activations",
    "O3-recomputed": "--fp8-level O3 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "O1-looked-at": "--fp8-level O1 --fp8-log-interval 3",
    "O3-spikes": "--fp8-level O3 --fp8-on-spike skip --fp8-spike-sigma 0.5 --fp8-spike-window 16 --train-iters 24",
    "O3-more-micro-batches": "--fp8-level O3 --step-batch-size-schedule 0:4,1536:8",  # tokens: from step 7 on
    "O3-overlapped": "--fp8-level O3 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "O3-per-token": "--fp8-level O3 --calculate-per-token-loss --accumulate-allreduce-grads-in-fp32",
}


@pytest.mark.parametrize("case", CASES)
def test_graphed_steps_are_the_steps(case):
    flags = [*TINY_GPT, *BOTH.split(), *CASES[case].split()]
    if "--step-batch-size-schedule" in flags:
        at = flags.index("--global-batch-size")
        del flags[at : at + 2]
    graphed = run_megatron(1, [*flags, *GRAPH.split()], gpu=True, timeout=120)
    assert sum("is a CUDA graph from now on" in line for line in graphed.lines) == 1
    plain = run_megatron(1, flags, gpu=True, timeout=120)
    assert str(graphed.losses) == str(plain.losses)  # a skipped step's is NaN
    assert str(graphed.grad_norms) == str(plain.grad_norms)
    assert len(plain.losses) >= 12 and graphed.validation_losses == plain.validation_losses != []
