"""What the matrix of training runs tries, and how it judges, without a run."""

import pytest
from architecture_cases import architecture_flags, case_lines
from training_cases import GROUPS, LEFT_OUT, TRAINING, TRAINING_REFUSED, all_cases, command, pairs, reason
from training_matrix import NEAR, NORM, Outcome, judge, unexpected


def run(*losses: float, norm: float = 1.0, code: int = 0, said: str = "") -> dict:
    values = [{"lm loss": loss} for loss in losses]
    norms = [norm] * len(losses)
    return {"code": code, "case": "--seed 7 --fp16", "losses": values, "norms": norms, "said": [said] if said else []}


def test_every_flag_of_training_is_tried_or_left_out(parser):
    tried = {case.split()[0].partition("=")[0] for case in case_lines(TRAINING + TRAINING_REFUSED)}
    left_out = [flag for flags in LEFT_OUT.values() for flag in flags.split()]
    assert len(left_out) == len(set(left_out)) and not tried & set(left_out)
    groups = [title.strip() for title in GROUPS.replace("\n", " ").split(",")]
    of_groups = [action for group in parser._action_groups if group.title in groups for action in group._group_actions]
    assert len(of_groups) > 250
    flags = {action.option_strings[0] for action in of_groups} - architecture_flags(parser)
    assert sorted(flags - tried - set(left_out)) == [] and sorted(set(left_out) - flags) == []


def test_the_pairs_are_those_of_the_seed():
    assert len(pairs()) == 60 and pairs() == pairs() and pairs() != pairs(seed=36)
    assert len(all_cases()) == len(set(all_cases())) > 500


def test_what_excludes_a_flag_of_every_run_takes_its_place():
    assert "--train-iters" in command("--seed 7") and "--train-iters" not in command("--train-samples 12")


@pytest.mark.parametrize(
    ("stock", "level", "verdict"),
    [
        (run(5.0, 4.0), run(5.0, 4.0), "same"),
        (run(5.0, 4.0), run(5.0, 4.0 * (1 + NEAR / 2)), "same"),
        (run(5.0, 4.0), run(5.0, 4.0 * (1 + NEAR * 2)), "differs"),
        (run(5.0, 4.0), run(5.0 + 1e-6, 4.0), "differs"),
        (run(5.0, 4.0), run(5.0, 4.0, norm=1 + 2 * NORM), "differs"),
        (run(5.0, 4.0), run(5.0), "differs"),
        (run(), run(), "differs"),
        (run(5.0), run(code=2, said="megatron_fp8: --fp16: use --bf16 instead"), "refused"),
        (run(5.0), run(code=2, said="megatron_fp8: --seed 7: use another"), "refused"),
        (run(5.0), run(code=2, said="megatron_fp8: a line without a flag"), "fails"),
        (run(5.0), run(code=2, said="megatron_fp8: --lr 1: a flag of another command"), "fails"),
        (run(5.0), run(code=2, said="megatron_fp8: --seed 7: no; Megatron checks it in arguments.py:1"), "fails"),
        (run(code=1), run(code=2, said="megatron_fp8: --seed 7: no; Megatron checks it in arguments.py:1"), "checked"),
        (run(5.0), run(code=1, said="ValueError: no"), "fails"),
        (run(5.0), run(code=1, said="megatron_fp8: with another exit code"), "fails"),
        (run(code=1, said="ValueError: no"), run(5.0), "alone"),
        (run(code=1, said="ValueError: no"), run(code=1, said="ValueError: no"), "neither"),
    ],
)
def test_judges(stock, level, verdict):
    assert judge(stock, level).verdict == verdict


def test_finds_what_became_something_else():
    plain, flash = (1, "--seed 7"), (1, "--attention-backend flash")
    assert reason(plain) is None and reason(flash) is not None
    assert unexpected({plain: Outcome("same"), flash: Outcome("differs", 1e-5, 1e-5)}) == {}
    assert unexpected({flash: Outcome("same")}) == {}  # a rounding may not show
    for case, outcome in [
        (plain, Outcome("differs", 1e-5, 1e-5)),
        (plain, Outcome("refused")),
        (flash, Outcome("differs", 1e-5, 1e-2)),
        (flash, Outcome("fails")),
        ((1, "--fp16"), Outcome("same")),
    ]:
        assert unexpected({case: outcome}) == {case: outcome}
