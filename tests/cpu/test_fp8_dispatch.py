"""Rows sent to experts in FP8 (--fp8-dispatch) against rows sent in BF16, in Megatron's real loop: all bits are equal,
and half the bytes travel."""

import ast
import json
import re

import pytest
from megatron_runs import TINY_GPT, run_megatron, script_path

MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type none"
MOE += " --fp8-experts --moe-grouped-gemm --moe-token-dispatcher-type alltoall --use-distributed-optimizer"
STEPS = "--fp8-log-exact --train-iters 3 --lr-decay-iters 10"


def experts(flags: str, ranks: int, **env: str):
    """(Exact losses, gradient norms, what owned_experts.py says of weights; passes that were grouped; bytes sent)"""
    env = {"PYTHONPATH": script_path(), **env}
    command = [*TINY_GPT, *f"{MOE} {STEPS} {flags}".split()]
    run = run_megatron(ranks, command, script="tests/scripts/dispatched_experts.py", env=env, timeout=300)
    found = [json.loads(line.removeprefix("expert ")) for line in run.lines if line.startswith("expert {")]
    for weight in found:
        del weight["gradients"]
    text = "\n".join(run.lines)
    exact = re.findall(r"exact lm loss ([^\s;]+)", text)
    together = sorted(int(n) for n in re.findall(r"^together (\d+)$", text, re.MULTILINE))
    sent = [ast.literal_eval(counts) for counts in re.findall(r"^sent (\{.*\})$", text, re.MULTILINE)]
    assert len(exact) == 3 and len(sent) == ranks == len(together)
    return (exact, run.grad_norms, {(line["key"], line["rank"]): line for line in found}), together, sent


def total(sent: list[dict[str, int]]) -> dict[str, int]:
    """Bytes of all ranks, by type."""
    return {kind: sum(one.get(kind, 0) for one in sent) for kind in ("uint8", "bfloat16")}


EP2 = "--expert-model-parallel-size 2"
STAGES = "--num-layers 4 --pipeline-model-parallel-size 2"
CASES = [
    (f"O3 {EP2}", 2),
    *(
        pytest.param(f"{level} {flags}", ranks, marks=pytest.mark.slow)
        for level, flags, ranks in [
            ("O1", f"{EP2} --overlap-grad-reduce --overlap-param-gather", 2),
            ("O2", f"{EP2} --recompute-granularity selective --recompute-modules moe", 2),
            ("O3", "--expert-model-parallel-size 4", 4),  # one expert a rank
            ("O3", f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2", 4),
            ("O3", f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", 2),
            ("O3", f"{EP2} --pipeline-model-parallel-size 2", 4),
            ("O3", f"{EP2} --moe-expert-capacity-factor 0.5", 2),
            ("O3", f"{EP2} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", 2),
            ("O3", f"{EP2} --moe-aux-loss-coeff 0.5 --moe-router-load-balancing-type aux_loss", 2),
            ("O3", f"{EP2} --moe-router-dtype fp32 --moe-shared-expert-intermediate-size 64", 2),
            ("O3", f"{EP2} --fp8-amax-compute-algo max --fp8-amax-history-len 4 --fp8-margin 1", 2),
            ("O3", EP2, 4),  # two ranks have the same experts
            ("O3", "--tensor-model-parallel-size 2 --sequence-parallel", 2),  # rows are gathered over parts alone
            ("O1", f"{EP2} --mtp-num-layers 1", 2),
            ("O3", f"{EP2} {STAGES} --num-layers-per-virtual-pipeline-stage 1 --moe-layer-freq [0,1,1,1]", 4),
            ("O3", f"{EP2} {STAGES} --moe-layer-freq [0,0,1,1]", 4),  # the first stage has no expert
            ("O1", f"{EP2} --fp8-log-interval 2", 2),
        ]
    ),
]


@pytest.mark.parametrize("way", ["forward", "both"])
@pytest.mark.parametrize(("flags", "ranks"), CASES)
def test_all_bits_are_those_of_bf16(way, flags, ranks):
    """Losses, norms, weights, moments, and scales, which follow from amaxes."""
    wide, together, before = experts(f"--fp8-level {flags}", ranks)
    narrow, again, after = experts(f"--fp8-level {flags} --fp8-dispatch {way}", ranks)
    assert narrow == wide and again == together and sum(together) > 0
    before, after = total(before), total(after)
    assert before["uint8"] == 0
    if EP2 not in flags and "parallel-size 4" not in flags:
        assert after == before == {"uint8": 0, "bfloat16": 0}
    else:
        forward = 2 if "recompute" in flags else 1  # passes; there is one backward pass, and each goes two ways
        moved, halved = before["bfloat16"] // (2 * forward + 2), forward + (way == "both")
        assert after == {"uint8": halved * moved // 2, "bfloat16": before["bfloat16"] - halved * moved}


@pytest.mark.parametrize("way", ["both", pytest.param("forward", marks=pytest.mark.slow)])
def test_an_expert_and_a_rank_without_a_token(way):
    """All tokens go to expert 1, which is on rank 0."""
    flags = f"--fp8-level O3 {EP2} --overlap-grad-reduce --moe-router-topk 1 --moe-router-pre-softmax"
    wide, *_ = experts(flags, 2, FP8_TEST_ONLY="1")
    narrow, together, sent = experts(f"{flags} --fp8-dispatch {way}", 2, FP8_TEST_ONLY="1")
    assert narrow == wide and together[0] == 0 < together[1] and total(sent)["uint8"] > 0


@pytest.mark.slow
def test_a_hook_on_one_rank_reads_what_was_sent():
    """That rank decodes, and its experts run one by one. They cast to the codes that arrived; but their amax is of
    rounded values too, so later scales differ."""
    flags = f"--fp8-level O3 {EP2}"
    (wide, *_), _, _ = experts(flags, 2)
    (narrow, *_), together, sent = experts(f"{flags} --fp8-dispatch both", 2, FP8_TEST_HOOK="0")
    assert together[0] == 0 < together[1] and total(sent)["uint8"] > 0
    assert narrow[:2] == wide[:2] and [*map(float, narrow)] == pytest.approx([*map(float, wide)], abs=5e-4)


def test_a_hook_on_all_experts_sees_values():
    """Of the gradient too, which comes in FP8."""
    command = [*TINY_GPT, *f"{MOE} {STEPS} --fp8-level O3 {EP2} --fp8-dispatch both".split()]
    env = {"PYTHONPATH": script_path(), "FP8_TEST_LOOK": "0"}
    run = run_megatron(2, command, script="tests/scripts/dispatched_experts.py", env=env, timeout=300)
    (smallest,) = (line for line in run.lines if line.startswith("looked "))
    assert float(smallest.removeprefix("looked ")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--expert-model-parallel-size 2", "--expert-model-parallel-size 4"])
def test_a_resumed_run_goes_on(layout, tmp_path):
    """With the same ranks bit for bit; with others within the bound of layouts."""
    command = [*TINY_GPT, *f"{MOE} {STEPS} --train-iters 4 --fp8-level O3 --fp8-dispatch both".split()]
    save, load = f"{EP2} --save {tmp_path} --save-interval 2", f"{layout} --load {tmp_path} --ckpt-step 2"
    ranks = int(layout[-1])
    whole = run_megatron(2, [*command, *save.split()], timeout=300)
    again = run_megatron(ranks, [*command, *load.split()], timeout=300)
    exact = [re.findall(r"exact lm loss ([^\s;]+)", "\n".join(run.lines)) for run in (whole, again)]
    if ranks == 2:
        assert exact[1] == exact[0][2:] and len(exact[1]) == 2
    assert [*map(float, exact[1])] == pytest.approx([*map(float, exact[0][2:])], abs=2e-3)
