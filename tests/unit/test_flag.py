"""Each of our flags is one Flag: the parser, docs/flags.md, the plans and the refusals are made from it."""

import argparse
import dataclasses
import importlib
import pkgutil

import pytest
from commands import MODEL, error_of

import megatron_fp8.flags
from megatron_fp8.flags import config, gradients, log
from megatron_fp8.flags.emulate import EmulationPlan
from megatron_fp8.flags.flag import (
    SWITCH,
    Flag,
    Values,
    filled,
    listed,
    one_of,
    positive,
    refuse,
    whole,
    whole_number,
)
from megatron_fp8.flags.sharpness import SharpnessPlan
from megatron_fp8.flags.usage import one_line_usage_errors
from megatron_fp8.flags.watch import WatchPlan
from megatron_fp8.numerics.auto_scaling import ScalingRule


def test_every_subjects_flags_are_among_all_of_them():
    modules = [
        importlib.import_module(f"megatron_fp8.flags.{m.name}")
        for m in pkgutil.iter_modules(megatron_fp8.flags.__path__)
    ]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, Flag)}
    for module in modules:
        for value in vars(module).values():
            found |= {flag for flag in value if isinstance(flag, Flag)} if isinstance(value, tuple) else set()
    assert found == set(config.ALL)
    assert len({flag.name for flag in config.ALL}) == len(config.ALL)


def test_what_a_flag_fills_is_there():
    plans = (config.Fp8Config, EmulationPlan, SharpnessPlan, WatchPlan, ScalingRule)
    fields = {field.name for plan in plans for field in dataclasses.fields(plan)}
    assert {flag.field for flag in config.ALL} - {""} <= fields


def test_a_new_flag_takes_one_place(monkeypatch, parse):
    """Each flag is in the parser with its help, in the page, and refused without a level."""
    new = Flag("--fp8-new", "Does something new.", whole(2, "twice"), "new")
    monkeypatch.setattr(config, "ALL", (*config.ALL, new))
    parser = config.add_fp8_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--fp8-new", "3"])
    assert "--fp8-new N" in parser.format_help() and "Does something new." in parser.format_help()
    assert filled(args, [new]) == {"new": 3} and new.shown(args) == "--fp8-new 3"
    stock = parse(*MODEL)
    stock.fp8_new = 3
    line = "--fp8-new 3 with no --fp8-level: no effect; add --fp8-level O1, or remove it"
    assert error_of(config.config_from_args, stock) == line

    import make_flags_doc

    monkeypatch.setattr(make_flags_doc, "ALL", (new,))
    assert make_flags_doc.own_flags().splitlines()[2:] == ["| `--fp8-new` | N | Does something new. |"]


def test_whole_numbers():
    taken = {"0": 0, "007": 7, "9" * 18: 10**18 - 1}
    assert {text: whole_number(text) for text in taken} == taken
    assert not any(whole_number(text) for text in ("", " 7", "7\n", "-7", "7.0", "²", "٣", "9" * 19, "9" * 5000))


@pytest.mark.parametrize(
    ("values", "taken", "refused"),
    [
        (one_of("a", "b", "c"), ["a", "c"], {"d": "--x d: no such value; use a, b or c"}),
        (whole(0, "never"), ["0", "7"], {"-1": "--x -1: use 0 (never) or more"}),
        (whole(16), ["16"], {"15": "--x 15: use 16 or more"}),
        (positive(), ["0.1", "1e30"], {v: f"--x {v}: use a number above 0" for v in ("0", "-1", "inf", "nan")}),
        (positive(1), ["1"], {"1.5": "--x 1.5: use a number above 0, at most 1"}),
        (listed("N,...", lambda n: 0 < n < 99, "use s"), ["1,2"], dict.fromkeys(("0", "1,,2", "²", "9" * 500), "--x ")),
        (gradients.HIERARCHY.values, ["off", "node", "8"], dict.fromkeys(("2.5", "0", "²", "9" * 500), "--x ")),
    ],
)  # fmt: skip
def test_values(values, taken, refused):
    flag, parser = Flag("--x", "", values), argparse.ArgumentParser()
    flag.add_to(parser)
    one_line_usage_errors(parser)
    for text in taken:
        assert flag.given(parser.parse_args(["--x", text])) == values.kind(text)
    for text, line in refused.items():
        assert error_of(parser.parse_args, [f"--x={text}"]).startswith(line)


def test_a_flag_that_was_not_given_fills_nothing():
    flags = (
        Flag("--on", "", SWITCH, "on"),
        Flag("--count", "", whole(1), "count"),
        Flag("--text", "", Values("T"), "text"),
    )
    parser = argparse.ArgumentParser()
    for flag in flags:
        flag.add_to(parser)
    assert filled(parser.parse_args([]), flags) == {} == filled(argparse.Namespace(), flags)
    refuse(parser.parse_args([]), flags, " is wrong")
    given = parser.parse_args(["--on", "--count", "3"])
    assert filled(given, flags) == {"on": True, "count": 3}
    assert error_of(refuse, given, flags, ": wrong; use another") == "--on: wrong; use another, or remove it"
    assert error_of(refuse, given, flags[1:], ": wrong") == "--count 3: wrong, or remove it"


def test_what_is_logged_without_a_level(parse):
    args = parse(*MODEL, "--fp8-log-exact")
    assert config.config_from_args(args) is None and log.EXACT.given(args) and not log.logs_update_norm(args)
