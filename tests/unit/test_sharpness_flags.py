"""The --fp8-sharpness flags, a step's line and scalars, and `lab sharpness`'s command line and table."""

import argparse
import json

import pytest
from commands import MODEL, O1, error_of

from megatron_fp8.flags.config import adapt_stock_args, config_from_args
from megatron_fp8.flags.sharpness import SharpnessPlan, sharpness_from_args
from megatron_fp8.monitor import sharpness as monitor
from megatron_fp8.monitor import writers
from megatron_fp8.monitor.logit_sharpness import Sharpness
from megatron_fp8.tools.lab.trial import checkpoint_sharpness

ROW = {"count": 512, "not_finite": 3, "mean": 0.1623, "min": 0.1, "q05": 0.11, "median": 0.15, "q95": 0.2, "q99": 0.3}
SUMMARY = {name: {**ROW, "max": float(i)} for i, name in enumerate(Sharpness._fields)}


def planned(parse, *argv):
    args = parse(*argv)
    config = config_from_args(args)
    if config is not None:
        adapt_stock_args(args, config)
    return sharpness_from_args(args)


@pytest.mark.parametrize("run", [MODEL, [*MODEL, "--fp8-level", "O0"], O1], ids=["no level", "O0", "O1"])
def test_at_every_level_and_without_one(parse, run):
    assert planned(parse, *run) is None and planned(parse, *run, "--fp8-sharpness-interval", "0") is None
    assert planned(parse, *run, "--fp8-sharpness-interval", "7") == SharpnessPlan(7, None, 0)
    evaluated = planned(parse, *run, "--fp8-sharpness-eval", "found.json", "--fp8-sharpness-iterations", "10")
    assert evaluated == SharpnessPlan(0, "found.json", 10)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--fp8-sharpness-interval -1", "--fp8-sharpness-interval -1: use 0"),
        ("--fp8-sharpness-eval=", "--fp8-sharpness-eval '': an empty name; give one"),
        ("--fp8-sharpness-eval x --fp8-sharpness-iterations -2", "--fp8-sharpness-iterations -2: use 0"),
        ("--fp8-sharpness-interval 5 --fp8-sharpness-iterations 10", "add --fp8-sharpness-eval FILE"),
        ("--fp8-sharpness-interval 5 --cuda-graph-impl full_iteration", "--cuda-graph-impl full_iteration with --fp8"),
        ("--fp8-sharpness-eval x --cuda-graph-modules full_iteration", "with --fp8-sharpness-eval x: hides the logits"),
        ("--fp8-sharpness-eval x --cuda-graph-scope full_iteration", "--cuda-graph-scope full_iteration with --fp8"),
        ("--fp8-sharpness-interval 5 --overlap-moe-expert-parallel-comm", "--overlap-moe-expert-parallel-comm with"),
    ],
)
def test_what_cannot_work_is_refused(parse, flags, words):
    assert words in error_of(planned, parse, *MODEL, *flags.split())


def test_search_needs_scipy(parse, monkeypatch):
    monkeypatch.setattr("megatron_fp8.packages.installed", lambda module: False)
    flags = [*MODEL, "--fp8-sharpness-eval", "x"]
    line = "--fp8-sharpness-iterations 1: needs the package scipy, which is not installed; pip install scipy, or use 0"
    assert error_of(planned, parse, *flags, "--fp8-sharpness-iterations", "1") == line
    assert planned(parse, *flags) == SharpnessPlan(0, "x", 0)


def test_what_a_level_switches_off_hides_nothing(parse):
    flags = "--fp8-sharpness-interval 5 --cuda-graph-impl full_iteration --overlap-moe-expert-parallel-comm"
    assert planned(parse, *O1, *flags.split()) == SharpnessPlan(5, None, 0)


def test_the_log_gets_a_line_and_the_writers_the_scalars(capsys, monkeypatch):
    written = {}

    class Writer:
        def add_scalar(self, name, value, step):
            written[name, step] = value

        def log(self, values, step):
            written.update({("wandb", name, step): value for name, value in values.items()})

    monkeypatch.setattr(writers, "get_tensorboard_writer", Writer)
    monkeypatch.setattr(writers, "get_wandb_writer", Writer)
    monitor.log(SUMMARY, 40)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "[fp8] iteration 40: sharpness 0.1623 %; centred 0.1623 %; log Z 0.1623; not finite 3"
    names = ("sharpness", "centred_sharpness", "log_z")
    expected = {
        (f"fp8-sharpness/{name}_{column}", 40) for name in names for column in ("mean", "median", "q95", "q99", "max")
    }
    assert set(written) == expected | {("wandb", *key) for key in expected}
    assert written["fp8-sharpness/sharpness_q99", 40] == 0.3
    assert written["wandb", "fp8-sharpness/centred_sharpness_max", 40] == 1.0


def test_a_step_without_a_loss_logs_no_sharpness(capsys, monkeypatch):
    monkeypatch.setattr(writers, "get_tensorboard_writer", lambda: None)
    monkeypatch.setattr(writers, "get_wandb_writer", lambda: None)
    lost = {**ROW, "count": 0, "mean": float("nan")}
    monitor.log({name: {**lost, "max": float("nan")} for name in Sharpness._fields}, 6)
    monitor.log({name: {**lost, "not_finite": 0} for name in Sharpness._fields}, 7)
    monitor.log(None, 8)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[fp8] iteration 6: sharpness nan %; centred nan %; log Z nan; not finite 3"
    nothing = "no sharpness: the model computed no loss of next tokens"
    assert lines[1:] == [f"[fp8] iteration {i}: {nothing}" for i in (7, 8)]


def verb(*argv):
    parser = argparse.ArgumentParser()
    checkpoint_sharpness.add_arguments(parser)
    return checkpoint_sharpness.run(parser.parse_args(argv))


def test_the_verbs_run(tmp_path, monkeypatch, capsys):
    """The command that it runs, and what it prints of the file."""
    script, file = tmp_path / "train.py", tmp_path / "out.json"
    script.touch()
    commands = []
    found = {"iteration 3 on validation set": {"tokens": SUMMARY, "last": None}}

    def curves(command, processes, folder, timeout):
        commands.append(([*command], processes, timeout))
        if "--nothing" not in command:
            (folder.parent / "found.json").write_text(json.dumps(found))

    monkeypatch.setattr(checkpoint_sharpness, "curves", curves)
    options = ("--iterations", "4", "--json", str(file), "--processes", "2", "--timeout", "9")
    assert verb(*options, "--", str(script), "--load", "here") == 0
    ((command, *others),) = commands
    assert others == [2, 9.0] and command[:3] == [str(script), "--load", "here"]
    assert {"--skip-train", "--exit-on-missing-checkpoint"} < set(command)
    assert command[command.index("--fp8-sharpness-iterations") + 1] == "4"
    assert json.loads(file.read_text()) == found
    assert "iteration 3 on validation set\n512 positions, 3 more not finite" in capsys.readouterr().out
    assert "evaluated nothing" in error_of(verb, "--", str(script), "--load", "here", "--nothing")
    assert "add --load DIR" in error_of(verb, "--", str(script), "--seed", "3")
    commands.clear()
    last = ("--", str(script), "--load", "here", "--tensorboard-dir", "logs", "--fp8-log-grad-snr")
    assert "--iterations -1: use 0 (not done) or more" in error_of(verb, "--iterations", "-1", *last)
    assert "no/found.json: no such folder" in error_of(verb, "--json", str(tmp_path / "no/found.json"), *last)
    assert "is a folder; name a file" in error_of(verb, "--json", str(tmp_path), *last)
    assert not commands
    with pytest.raises(OSError, match="No space left"):
        verb("--json", "/dev/full", *last)
    assert "iteration 3 on validation set\n512" in capsys.readouterr().out
    assert not {"--tensorboard-dir", "logs", "--fp8-log-grad-snr"} & set(commands[0][0])


def test_a_table_has_every_number_under_its_head():
    last = {name: {**ROW, "max": 7.0} for name in ("closed_form", "lbfgsb")}
    lines = checkpoint_sharpness.table("a set", {"tokens": SUMMARY, "last": last}).splitlines()
    assert lines[0] == "a set" and len(lines) == 1 + 2 + 4 + 2 + 2
    heads = lines[2].split()
    for line, (name, row) in zip(lines[3:7], SUMMARY.items(), strict=True):
        assert line.lower().startswith(name[:3].lower()) and len(line) == len(lines[2])
        assert [float(value) for value in line[16:].split()] == [row[head] for head in heads]
    assert lines[7] == "512 last tokens, 3 more not finite" and lines[10].endswith("7")
