"""Overlapped runs are bit for bit the waiting one's, with the host stumbling at every collective.

What a CPU cannot show, a kernel that is not waited for, tests/gpu/test_overlap.py does by the same script.
"""

import pytest
from megatron_runs import TINY_GPT, run_megatron
from overlapped import OVERLAP, digests, prepare


@pytest.mark.parametrize("level", ["O3", pytest.param("O1", marks=pytest.mark.slow)])
def test_trials_are_equal_and_a_fault_shows(level, tmp_path):
    flags = prepare([*TINY_GPT, "--fp8-level", level, "--ddp-bucket-size", "4000", "--train-iters", "3"], tmp_path)
    (waiting,) = digests(flags, 1)
    overlapped = [*flags, *OVERLAP.split()]
    assert digests(overlapped, 2, PRESSURE="1") == [waiting] * 2
    assert digests(overlapped, 1, PRESSURE="1", BREAK="sent") != [waiting]


@pytest.mark.parametrize("level", ["O3", pytest.param("O1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stages", ["", pytest.param("--num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
                                                     marks=pytest.mark.slow)])  # fmt: skip
def test_stages_wait_for_their_norms(stages, level):
    """On a stage without an embedding the first layer's norm is used first. Its weight comes from two ranks: it
    must wait for it."""
    flags = f"--fp8-level {level} --pipeline-model-parallel-size 2 --use-distributed-optimizer --train-iters 3"
    flags += f" --clip-grad 0 --lr 1e-2 --lr-warmup-iters 0 --fp8-log-exact {stages}"
    waiting, overlapped = (run_megatron(4, [*TINY_GPT, *flags.split(), *more.split()]) for more in ("", OVERLAP))
    assert exact(overlapped.lines) == exact(waiting.lines)


@pytest.mark.slow  # the norms of stages stay
def test_a_shared_experts_gate_waits():
    """With --moe-shared-expert-overlap stock would read its weight before the module's own hook; a level switches that
    off."""
    flags = (
        "--fp8-level O1 --num-experts 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
        "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate "
        "--use-distributed-optimizer --train-iters 3 --clip-grad 0 --ddp-bucket-size 4000 --lr 1e-2 "
        "--lr-warmup-iters 0 --fp8-log-exact"
    )
    both = f"{OVERLAP} --moe-shared-expert-overlap"
    waiting, overlapped = (run_megatron(2, [*TINY_GPT, *flags.split(), *more.split()]) for more in ("", both))
    assert exact_losses(overlapped.lines) == exact_losses(waiting.lines)


def exact_losses(lines: list[str]) -> list[str]:
    """Without the norm, whose last digit goes by stock's buckets."""
    return [line.split(";")[0].split()[-1] for line in exact(lines)]


def exact(lines: list[str]) -> list[str]:
    """Losses and gradient norms with all their digits."""
    found = [line[line.index("[fp8] iteration") :] for line in lines if "[fp8] iteration" in line]
    assert len(found) == 3, lines[-20:]
    return found
