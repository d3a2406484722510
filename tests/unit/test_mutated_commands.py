"""Mistyped command lines of every verb and of training (tests/mutated.py) work or give one line, never a traceback.

Before the parsers checked every value, 12 of the first 1,500 ended in a traceback.
"""

import mutated
import pytest
from commands import error_of

from megatron_fp8 import cli
from megatron_fp8.flags.bounds import BOUNDS, beyond

ALL, AT_ONCE, QUICK = 3000, 250, 48


def check(first: int, count: int) -> None:
    counts, failed = mutated.tried(first, count)
    assert counts.total() == count and not failed, "\n".join(f"{words!r}\n{said}" for words, said in failed)


def test_a_few_mutations_end_without_a_traceback():
    check(0, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL, AT_ONCE))
def test_3000_mutations_end_without_a_traceback(first):
    check(first, AT_ONCE)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("estimate --gpus=--", "--gpus --: use a whole number"),
        ("launch model/gpt-7b --nodes=--", "--nodes --: use a whole number"),
        ("memory --model=--", "--model: invalid choice: '--'"),
        ("memory --num-layers=9223372036854775808", "--num-layers 9223372036854775808: too large; use at most 10000"),
        ("memory --num-layers=0", "--num-layers 0: use 1 or more"),
        ("lab sweep plan.yaml --store=s --jobs=99999999999999999999", "--jobs 99999999999999999999: too large; use"),
        ("estimate --tokens nan", "--tokens nan: use a number above 0"),
        ("compare a b --tolerance nan", "--tolerance nan: not a number; give one, or remove it"),
        ("build --jobs x", "--jobs x: use a whole number"),
        (f"build --jobs {'9' * 5000}", f"{'9' * 60}...: a number of more than 1,000 digits; write a shorter one"),
        ("build --jobs \ud800", "\\ud800: not UTF-8 text, or contains a zero byte; write it in UTF-8"),
    ],
)
def test_what_once_was_a_traceback(words, line, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words.split(" "))
    assert end.value.code == 2 and capsys.readouterr().err.startswith(f"megatron_fp8: {line}")


def test_a_dash_pair_is_the_value_that_our_own_hint_suggests(parser):
    assert parser.parse_args(["--save=--"]).save == "--" and parser.parse_args(["--data-path=--"]).data_path == ["--"]
    assert error_of(parser.parse_args, ["--num-layers=--"]) == "--num-layers --: use a whole number"
    assert error_of(parser.parse_args, ["--save", "--x"]).startswith('--save: expected one argument; write --save="--x')


def test_a_number_is_bounded_by_its_flag():
    for name, (least, most) in BOUNDS.items():
        assert not beyond([name], most) and beyond([name], most + 1).startswith("too large")
        if least is not None:
            assert beyond([name], least - 1) == f"use {least} or more"
    assert beyond(["--other"], 2**63) and beyond(["--other"], [1, 2**63]) and not beyond(["--other"], [1, -5])
    assert beyond(["--other"], float("nan")) and beyond(["--other"], 1e200) and not beyond(["--other"], float("inf"))
    assert not beyond(["--other"], True) and not beyond(["--num-layers"], "text") and beyond(["--num-layers"], 10**19)


def test_the_bounds_are_of_flags_that_exist(parser):
    ours = set("--data-parallel-size --gpus --nodes --ranks --jobs --processes --rank --gpus-per-node".split())
    ours |= set("--timeout --steps --tasks-per-node --max-restarts --top".split())
    assert set(BOUNDS) - ours <= {flag for action in parser._actions for flag in action.option_strings}
