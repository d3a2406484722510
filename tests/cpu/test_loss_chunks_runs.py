"""--fp8-loss-chunks in Megatron's own loop: the losses of the run without it. As a graph: test_step_graph_ranks.py."""

import pytest
from megatron_runs import TINY_GPT, run_megatron

BASE = [*TINY_GPT, *"--train-iters 4 --lr-decay-iters 10 --global-batch-size 4 --seq-length 128".split(),
        *"--max-position-embeddings 128".split()]  # fmt: skip
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --fp8-activations"
TIED = [flag for flag in BASE if flag != "--untie-embeddings-and-output-weights"]


@pytest.mark.parametrize(
    ("nproc", "flags", "base"),
    [
        pytest.param(1, "", BASE, marks=pytest.mark.slow),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel", TIED),
        pytest.param(1, "--fp8-lm-head", BASE, marks=pytest.mark.slow),
        pytest.param(2, "--tensor-model-parallel-size 2", BASE, marks=pytest.mark.slow),
        pytest.param(2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", TIED,
                     marks=pytest.mark.slow),
        pytest.param(2, "--pipeline-model-parallel-size 2 --use-distributed-optimizer", BASE, marks=pytest.mark.slow),
        pytest.param(2, f"--context-parallel-size 2 --attention-backend auto {RECOMPUTED}", BASE,
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_losses_and_norms_are_those_without(nproc, flags, base):
    """A part's products round as the whole's do; the weight's gradient adds up in another order."""
    given = [*base, "--fp8-level", "O3", *flags.split()]
    whole, parts = run_megatron(nproc, given), run_megatron(nproc, [*given, "--fp8-loss-chunks", "3"])
    assert parts.losses == pytest.approx(whole.losses, rel=3e-3 if "head" in flags else 1e-4)
    assert parts.grad_norms == pytest.approx(whole.grad_norms, rel=1e-2, abs=2e-3)
