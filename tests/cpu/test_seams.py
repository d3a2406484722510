"""The engine's seams in Megatron's real loop: a second set of weights, and an observer, that no other file knows of."""

import pytest
from megatron_runs import TINY_GPT, run_megatron, script_path

SCRIPT, HALVES = "tests/scripts/two_sets.py", "tests/scripts/halves.py"
EXACT = "--fp8-level O1 --fp8-grad-accum fp32 --fp8-grad-reduce fp32 --use-distributed-optimizer".split()
STEPS = 3
nightly = pytest.mark.slow
FEW = ["--train-iters", str(STEPS), "--lr-decay-iters", "10"]


def run(flags, script=SCRIPT, nproc=2):
    return run_megatron(nproc, [*TINY_GPT, *FEW, *flags], script=script, env={"PYTHONPATH": script_path()})


def said(found, word):
    return [line.partition(word)[2].strip() for line in found.lines if line.startswith(word)]


def test_two_sets_train_as_one_does_and_an_observer_sees_every_cast():
    two, one = run(EXACT), run(EXACT, "pretrain_gpt_fp8.py")
    assert said(two, "sets")[0] == "[('fc2.', 2), ('', 6)]"
    assert len(two.losses) == STEPS and two.losses == one.losses
    assert two.grad_norms == pytest.approx(one.grad_norms, rel=1e-6)  # the sum over sets has another order
    casts = 8 * 2 * STEPS  # linears, micro-batches of each of two ranks
    assert said(two, "seen")[0] == str({"role 0": casts, "role 1": casts, "steps": STEPS})


@nightly  # a set with groups of its own stays
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_two_sets_are_saved_and_resumed(level, tmp_path):
    flags = ["--fp8-level", level, "--use-distributed-optimizer", "--save", str(tmp_path), "--save-interval", "2"]
    whole = run(flags)
    again = run([*flags, "--load", str(tmp_path), "--ckpt-step", "2"])
    assert again.losses == whole.losses[2:] != [] and again.grad_norms == whole.grad_norms[2:]


@pytest.mark.parametrize(
    "flags", [pytest.param("O2", marks=nightly), "O3", pytest.param("O3 --fp8-ckpt-compact", marks=nightly)]
)
def test_a_set_with_groups_of_its_own_is_saved_and_resumed(flags, tmp_path):
    """As experts: each half of the ranks has other weights, and nothing of one half's is the other's replica."""
    flags = f"--fp8-level {flags} --use-distributed-optimizer --fp8-log-interval 2 --fp8-on-spike log".split()
    flags += ["--save", str(tmp_path), "--save-interval", "2"]
    whole, again = (run(f, HALVES, nproc=4) for f in (flags, [*flags, "--load", str(tmp_path), "--ckpt-step", "2"]))
    assert again.losses == whole.losses[2:] != [] and again.grad_norms == whole.grad_norms[2:]
    digests = {tuple(line.split()[:2]): line.split()[2] for line in said(whole, "rank ")}
    assert digests == {tuple(line.split()[:2]): line.split()[2] for line in said(again, "rank ")}
    halves = [digests[str(rank), f"half{rank // 2}."] for rank in range(4)]
    assert halves[0] == halves[1] != halves[2] == halves[3]
    assert len({digests[str(rank), "linears"] for rank in range(4)}) == 1
