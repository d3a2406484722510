"""The command line: --help works, and a mistake gives one line."""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import types

import pytest
from commands import error_of
from launch import ROOT

import megatron_fp8
from megatron_fp8 import cli, version
from megatron_fp8.__main__ import run_script
from megatron_fp8.errors import UserError, check_all
from megatron_fp8.flags import usage as entry
from megatron_fp8.flags.level import resolve
from megatron_fp8.tools.lab import main as lab


def test_help_with_a_bare_percent_sign_prints():
    parser = argparse.ArgumentParser(prog="train")
    parser.add_argument("--bad", help="use 50% of it, 20% scaled")
    parser.add_argument("--mixed", default=3, help="at most 5% (default: %(default)s), or 10%% in %(prog)s")
    parser.add_argument("--good", default=4, help="default: %(default)s, 20%%")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    with pytest.raises((TypeError, ValueError)):
        parser.format_help()
    entry.escape_bad_help(parser)
    text = parser.format_help()
    for words in ("use 50% of it, 20% scaled", "at most 5% (default: 3), or 10% in train", "default: 4, 20%"):
        assert words in text


def test_wrong_flags_are_one_line(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int)
    entry.one_line_usage_errors(parser)
    for wrong in (["--sise", "3"], ["--size", "x"]):
        with pytest.raises(SystemExit) as stop, entry.one_line_errors():
            parser.parse_args(wrong)
        assert stop.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_each_of_several_mistakes_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop, entry.one_line_errors():
        check_all(["--size 3: use 4", "--name a\nb: use c", "--size 3: use 4"])
    lines = ["megatron_fp8: --size 3: use 4", r"megatron_fp8: --name a\nb: use c"]
    assert stop.value.code == 2 and capsys.readouterr().err.splitlines() == lines
    check_all([])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--flags", "--lr=1"], '; write --flags="--lr=1", with the equals sign'),
        (["--size", "2", "-f", "--partition=gpu -A me"], '; write --flags="--partition=gpu -A me", with the equals'),
        (["--fl", "-x"], '; write --flags="-x", with the equals sign'),
        (["--flags", "--size", "2"], ""),  # --flags lacks its value
        (["--flags"], ""),
    ],
)
def test_a_value_that_begins_with_a_dash(words, hint):
    """For launch --flags and --sbatch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-f", "--flags")
    parser.add_argument("--size")
    parser.add_argument("--partition", help=argparse.SUPPRESS)  # as launch has sbatch's options
    entry.one_line_usage_errors(parser)
    said = error_of(parser.parse_args, words)
    assert said.startswith(f"-f/--flags: expected one argument{hint}") and ("write" in said) == bool(hint)


def test_a_whole_command_that_is_unknown_is_not_repeated(capsys):
    parser = argparse.ArgumentParser()
    entry.one_line_usage_errors(parser)
    with pytest.raises(SystemExit), entry.one_line_errors():
        parser.parse_args([word for n in range(50) for word in (f"--a{n}", "1")])
    assert "unrecognized arguments: --a0 1 --a1 1 --a2 1 --a3 1 --a4 1 ... and 90 more words" in capsys.readouterr().err


@pytest.fixture
def look(monkeypatch):
    """look(*words): the arguments of a verb with --own, --more and flags behind --."""
    verb = types.ModuleType("a_verb")
    verb.add_arguments = lambda parser: (
        parser.add_argument("--own"),
        parser.add_argument("--more", default=""),
        parser.add_argument("flags", nargs=argparse.REMAINDER),
    )
    verb.run = lambda args: args
    monkeypatch.setitem(sys.modules, "a_verb", verb)
    parser = argparse.ArgumentParser()
    verbs = {"look": entry.Verb("a_verb", "looks")}
    entry.add_verb(parser, verbs)
    return lambda *words: entry.run_verb("tool", verbs, parser.parse_args(["look", *words]))


@pytest.mark.parametrize("words", [["--", "--size", "3"], ["--own", "1", "--", "--size", "3"]])
def test_what_stands_behind_two_dashes_is_not_the_verbs_own(look, words):
    assert look(*words).flags[-2:] == ["--size", "3"]


def test_an_empty_value_is_a_mistake_but_where_it_is_the_default(look):
    """For example --own "$NAME" with NAME unset."""
    for words in (["--own", ""], ["--own="]):
        assert "--own '': an empty value" in error_of(look, *words)
    args = look("--more", "", "--", "--name", "")
    assert (args.more, args.flags[-2:]) == ("", ["--name", ""])


def test_flags_that_lack_their_two_dashes_are_told_so(look):
    assert "unrecognized arguments: --size; put a training run's flags behind --" in error_of(look, "--size", "3")
    assert "--onw, did you mean --own? (" in error_of(look, "--onw", "--", "3")


@pytest.mark.parametrize("words, verbs", [((), cli.VERBS), (("lab",), lab.VERBS)])
def test_help_says_a_word_of_every_verb(words, verbs, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and max(map(len, lines)) <= 120
    for name, verb in verbs.items():
        assert [line for line in lines if re.fullmatch(rf"  {name} +{re.escape(verb.help)}", line)]


def test_help_and_a_misspelt_word_wait_for_nothing_heavy():
    verbs = [[verb] for verb in cli.VERBS if verb != "lab"] + [["lab", verb] for verb in lab.VERBS]
    verbs += [["convert", "to-hf"], ["convert", "to-megatron"]]
    text = f"""import contextlib, sys
from megatron_fp8.cli import main
for words in {verbs}:
    for more in (["--help"], ["--misspelt", "x"]):
        with contextlib.suppress(SystemExit):
            main([*words, *more])
        assert not {{"torch", "megatron"}} & set(sys.modules), words"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_version_is_pyprojects(capsys, monkeypatch):
    def nowhere(name):
        raise importlib.metadata.PackageNotFoundError(name)

    here = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert megatron_fp8.__version__ == here
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"megatron-fp8 {version.described()}\n"
    monkeypatch.setattr(importlib.metadata, "version", nowhere)  # a checkout that is not installed
    assert megatron_fp8.__version__ == "unknown"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = megatron_fp8.nothing


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_verb", interrupted)
    assert cli.main(["doctor"]) == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_an_output_that_is_closed_is_none(closed, tmp_path):
    command = f"{sys.executable} -m megatron_fp8.cli args model/gpt-7b {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("--num-layers" in done.stdout) == (closed == "2>&-")


def test_python_m_megatron_fp8_wants_a_script(capsys):
    run_script(["-h"])
    assert capsys.readouterr().out.startswith("usage: python -m megatron_fp8 SCRIPT")
    assert error_of(run_script, []).startswith("no script given; usage: python -m megatron_fp8 SCRIPT")


def test_a_full_disk_is_one_line():
    """Also if the output would only be written when the process ends."""
    command = [sys.executable, "-m", "megatron_fp8.cli", "args", "model/gpt-7b"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    said = "megatron_fp8: the output: No space left on device; free some space, or write elsewhere\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_file_that_cannot_be_opened_is_one_line_and_an_error_of_no_file_is_a_bug(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "run_verb", lambda *_: tmp_path.read_text())
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare"])
    said = f"megatron_fp8: {tmp_path}: Is a directory; give another\n"
    assert (stop.value.code, capsys.readouterr().err) == (2, said)
    monkeypatch.setattr(cli, "run_verb", lambda *_: os.close(-1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        cli.main(["compare"])


def test_a_mistake_is_one_line_and_reaches_torchrun(capsys, monkeypatch, tmp_path):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    with pytest.raises(SystemExit) as stop, entry.one_line_errors():
        resolve("O7", {})
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("megatron_fp8: --fp8-level O7") and line.count("\n") == 1
    assert json.loads(report.read_text())["message"]["message"] == line.strip()


def test_a_mistake_found_as_the_model_is_built_is_no_longer_a_line(capsys):
    """Megatron raises it again for every enclosing module, with the module's name appended."""
    from megatron.core.transformer.spec_utils import build_module

    class Inner:
        def __init__(self):
            raise UserError("--hidden-size 72: use a multiple of 16")

    class Fp8Outer:
        def __init__(self):
            build_module(Inner)

    with pytest.raises(SystemExit), entry.one_line_errors():
        build_module(Fp8Outer)
    assert capsys.readouterr().err == "megatron_fp8: --hidden-size 72: use a multiple of 16\n"


def test_other_errors_keep_their_traceback():
    with pytest.raises(ValueError, match="not ours"), entry.one_line_errors():
        raise ValueError("not ours")
    with pytest.raises(ValueError, match="invalid literal"), entry.one_line_errors():
        int("x")
    with pytest.raises(KeyError), entry.one_line_errors():
        resolve.__globals__["no such name"]


def test_refused_flags_are_named():
    args = argparse.Namespace(sft=False, logits_load_dir=None)
    flags = {"sft": "--sft", "logits_load_dir": "--logits-load-dir", "newer": "--newer"}
    entry.refuse_flags(args, flags, "use another script")
    args.logits_load_dir = "there"
    with pytest.raises(ValueError, match="--logits-load-dir there is not supported here: use"):
        entry.refuse_flags(args, flags, "use another script")


def test_a_reader_that_has_enough_is_no_error():
    """As in `megatron-fp8 args FILE | head -1`: the reader may have ended before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "megatron_fp8.cli", "args", "model/gpt-7b"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("words", [[], ["lab"]])
def test_a_program_alone_prints_its_help(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0 and "verbs:" in capsys.readouterr().out


def test_python_m_megatron_fp8_has_a_version(capsys):
    run_script(["--version"])
    assert capsys.readouterr().out == f"megatron_fp8 {version.described()}\n"


def test_the_commit_is_gits_or_what_was_built(monkeypatch, tmp_path):
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    found = version.commit()
    if head:  # else these tests are of an archive
        assert head.startswith(found.removesuffix("-dirty")) and len(found) > 6
        assert version.described() == f"{megatron_fp8.__version__}, commit {found}"
    monkeypatch.setattr(version, "FOLDER", tmp_path)
    assert version.commit() == "" and version.described() == megatron_fp8.__version__
    (tmp_path / version.COMMIT).write_text("0123abc\n")
    assert version.described() == f"{megatron_fp8.__version__}, commit 0123abc"


def test_a_line_stays_one_line_whatever_is_in_it(capsys):
    with pytest.raises(SystemExit), entry.one_line_errors():
        raise UserError("--name a\nb\x1b[2J: no such name")
    assert capsys.readouterr().err == "megatron_fp8: --name a\\nb\\x1b[2J: no such name\n"


@pytest.mark.slow  # imports Megatron twice in processes of their own
def test_a_warning_about_a_class_that_no_gpt_uses_is_not_shown():
    text = "{}import megatron.core.models.mimo.config.base_configs"
    hidden = "from megatron_fp8.flags.usage import hide_missing_package_warnings as hide; hide(); "
    shown, silent = (
        subprocess.run([sys.executable, "-c", text.format(first)], capture_output=True, text=True, check=True).stderr
        for first in ("", hidden)
    )
    assert "MimoModelConfig is experimental" in shown and "Mimo" not in silent
