"""Experts together (--moe-grouped-gemm) against experts one by one, in Megatron's real loop: all bits are equal."""

import json
import re

import pytest
from megatron_runs import TINY_GPT, run_megatron, script_path

OWNED = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type none"
OWNED += " --fp8-experts --moe-grouped-gemm --fp8-log-exact --train-iters 3 --lr-decay-iters 10"
ALONE = "--use-distributed-optimizer"
SPREAD = f"{ALONE} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"


def experts(flags: str, ranks: int = 1, **env: str):
    """(exact losses, {key of a weight and rank: what owned_experts.py says of it}, passes that were grouped)"""
    env = {"PYTHONPATH": script_path(), **env}
    command = [*TINY_GPT, *f"{OWNED} --global-batch-size {4 * ranks} {flags}".split()]  # two micro-batches a rank
    run = run_megatron(ranks, command, script="tests/scripts/grouped_experts.py", env=env, timeout=300)
    found = [json.loads(line.removeprefix("expert ")) for line in run.lines if line.startswith("expert {")]
    for weight in found:
        del weight["gradients"]  # of those that came one by one
    together, copied, looped = (
        [int(n) for n in re.findall(rf"^{what} (\d+)$", "\n".join(run.lines), re.MULTILINE)]
        for what in ("together", "copied", "looped")
    )
    assert copied == looped == [0] * ranks  # the weights of a product lie together as they are, and so do the gradients
    exact = re.findall(r"exact lm loss ([^\s;]+)", "\n".join(run.lines))
    assert len(exact) == 3
    return exact, run.grad_norms, {(line["key"], line["rank"]): line for line in found}, together


CASES = [
    ("--fp8-level O3 --fp8-grad-accum fp8", 1),
    (f"--fp8-level O1 {SPREAD}", 2),
    ("--fp8-level O2 --keep-fp8-transpose-cache", 1),
    *(
        pytest.param(f"--fp8-level {flags}", ranks, marks=pytest.mark.slow)
        for flags, ranks in [
            (f"O2 {SPREAD} --overlap-grad-reduce --overlap-param-gather", 2),
            (f"O3 {SPREAD} --fp8-grad-accum fp32 --recompute-granularity selective --recompute-modules moe", 2),
            (f"O3 {ALONE} --fp8-grad-accum bf16 --fp8-partition greedy --moe-ffn-hidden-size 80", 2),
            ("O3 --moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input", 1),
            (f"O3 {SPREAD} --num-experts 2 --keep-fp8-transpose-cache", 2),  # one expert a rank
            (f"O3 {ALONE} --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 0.5", 1),
            ("O1 --moe-aux-loss-coeff 0.5 --moe-router-load-balancing-type aux_loss --no-bias-swiglu-fusion", 1),
        ]
    ),
]


@pytest.mark.parametrize(("flags", "ranks"), CASES)
def test_together_and_one_by_one(flags, ranks):
    """From the first step on, whose scales are its own: losses, norms, weights, moments and scales."""
    *grouped, together = experts(flags, ranks)
    *looped, none = experts(flags, ranks, FP8_TEST_LOOP="1")
    passes = 3 * 2 * (2 if "recompute" in flags else 1)  # three steps, two layers; recomputation makes each twice
    assert none == [0] * ranks and len(together) == ranks and all(n and n % passes == 0 for n in together)
    assert grouped == looped


def test_an_expert_without_a_token():
    """All tokens go to expert 1; the others' gradients are zeros, and their scales stay as they are."""
    flags = f"--fp8-level O3 {SPREAD} --overlap-grad-reduce --moe-router-topk 1 --moe-router-pre-softmax"
    *grouped, together = experts(flags, 2, FP8_TEST_ONLY="1")
    *looped, _ = experts(flags, 2, FP8_TEST_ONLY="1", FP8_TEST_LOOP="1")
    assert grouped == looped and sum(together) > 0


HERE = "--fp8-level O3 --moe-token-dispatcher-type alltoall"
RECOMPUTED = "--recompute-granularity selective --recompute-modules moe"


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (HERE, 1),
        *(
            pytest.param(f"{HERE} {more}", ranks, marks=pytest.mark.slow)
            for more, ranks in [
                (f"{RECOMPUTED} --moe-shared-expert-intermediate-size 64", 1),
                (f"{ALONE} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", 2),
                (f"{ALONE} --moe-aux-loss-coeff 0.5 --moe-router-load-balancing-type aux_loss", 2),
                ("--mtp-num-layers 1 --fp8-log-interval 2", 1),
                ("--moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input --num-experts 1", 1),
            ]
        ),
    ],
)
def test_rows_that_stay_on_their_rank_need_no_stock_dispatcher(flags, ranks):
    """Its counts are not read (tests/unit/test_local_dispatch.py), and no bit is another."""
    here, stocks = experts(flags, ranks), experts(flags, ranks, FP8_TEST_DISPATCHER="stock")
    assert here == stocks and all(here[-1])
