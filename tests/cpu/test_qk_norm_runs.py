"""A model with RMSNorm of queries and keys trains the same whether one kernel normalises and rotates, or torch's do."""

import pytest
from megatron_runs import TINY_GPT, run_megatron

NORMED = "--group-query-attention --num-query-groups 2 --qk-layernorm --attention-backend auto --train-iters 4 "
NORMED += "--micro-batch-size 4"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"


def train(ranks: int, flags: str):
    fused = [flag for flag in TINY_GPT if flag != "--no-rope-fusion"]
    return run_megatron(ranks, [*fused, *f"{NORMED} {flags}".split()])


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, f"--fp8-level O3 {TP}"),
        pytest.param(2, "--fp8-level O3 --context-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(2, "--fp8-level O1 --pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(1, "--fp8-level O3 --fp8-activations --apply-layernorm-1p", marks=pytest.mark.slow),
        pytest.param(1, "--fp8-level O2 --recompute-granularity full --recompute-method uniform "
                     "--recompute-num-layers 1", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_losses_are_those_of_the_parts(ranks, flags):
    """BF16 rounds elsewhere, so they differ in their last digits; the same gains are trained, from the same weights."""
    fused, parts = train(ranks, flags), train(ranks, f"{flags} --no-rope-fusion")
    assert fused.losses != parts.losses
    assert fused.losses == pytest.approx(parts.losses, abs=5e-3)
    assert fused.grad_norms == pytest.approx(parts.grad_norms, rel=0.02)
