"""A run in forked ranks equals the run that torchrun starts, in every digit.

For every change test_metrics_runs.py compares one rank. Here are several: each imports everything anew.
"""

import pytest
from megatron_runs import TINY_GPT, run_megatron

MANY = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(2, "--fp8-level O3"), (4, f"--fp8-level O1 {MANY}")],
    ids=["O3", "four"],
)
def test_forked_ranks_train_as_torchruns(ranks, flags):
    flags = [*TINY_GPT, *flags.split(), "--train-iters", "4"]
    cold, warm = run_megatron(ranks, flags, cold=True), run_megatron(ranks, flags)
    assert len(warm.losses) == 4
    assert (warm.losses, warm.grad_norms) == (cold.losses, cold.grad_norms)
