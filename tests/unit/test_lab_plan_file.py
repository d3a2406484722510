"""Plan files: the runs that follow from them, and a one-line error for each mistake."""

import re

import pytest
from lab_runs import PLAN
from launch import ROOT

from megatron_fp8.errors import UserError
from megatron_fp8.tools.lab.sweep.plan_file import MOST_RUNS, SweepPlan, flag_value, read_plan


def plan_of(tmp_path, text):
    (tmp_path / "plan.yaml").write_text(text)
    return read_plan(tmp_path / "plan.yaml")


FULL = """
command: >
  train.py --bf16 --lr 1e-3
  --min-lr=1e-4 --log-interval 10
steps: 50
seeds: [7, 3]
arms:
  BF16:
  "E8M3, cut": --fp8-emulate E8M3:truncate --fp8-emulate-layers 'a b'
learning_rates: [1x, 3e-3, 0.5x]
data:
  text: --train-data-path a
  code: --train-data-path b --save {run}/c
processes: 2
timeout: 90
"""


def test_a_plan_is_every_combination_in_pairs(tmp_path):
    plan = plan_of(tmp_path, FULL)
    runs = plan.runs()
    assert len(runs) == len({(r.arm, r.seed, r.learning_rate, r.data) for r in runs}) == 2 * 2 * 3 * 2
    assert (plan.processes, plan.timeout, plan.steps) == (2, 90.0, 50)
    for bf16, e8m3 in zip(runs[::2], runs[1::2], strict=True):  # the arms of a pair follow each other
        assert (bf16.arm, e8m3.arm) == ("BF16", "E8M3, cut")
        assert (bf16.seed, bf16.learning_rate, bf16.data) == (e8m3.seed, e8m3.learning_rate, e8m3.data)
        extra = ["--fp8-emulate", "E8M3:truncate", "--fp8-emulate-layers", "a b"]
        assert [word for word in e8m3.command if word not in extra] == list(bf16.command)
        assert flag_value(bf16.command, "--seed") == str(bf16.seed)
        assert flag_value(bf16.command, "--train-iters") == "50"
    rates = {(r.learning_rate, *(float(flag_value(r.command, flag)) for flag in ("--lr", "--min-lr"))) for r in runs}
    assert rates == {(1e-3, 1e-3, 1e-4), (3e-3, 3e-3, 3e-4), (5e-4, 5e-4, 5e-5)}
    assert flag_value(runs[0].command, "--log-interval") == "10"
    assert flag_value(runs[0].command, "--data-cache-path") == "{run}/cache"


def test_a_short_plan(tmp_path):
    plan = plan_of(tmp_path, "{command: -m megatron_fp8 s.py --lr 1, steps: 5, seeds: 2, arms: {a: }}")
    assert plan.seeds == (1, 2) and plan.learning_rates == (1.0,) and list(plan.data) == ["data"]
    words = plan.runs()[0].command
    assert words[:3] == ("-m", "megatron_fp8", "s.py") and flag_value(words, "--log-interval") == "1"
    assert flag_value(words, "--min-lr") is None


@pytest.mark.parametrize(
    "change, message",
    [
        (("steps: 100", ""), "steps: missing; add it"),
        (("steps: 100", "steps: 0"), "steps: 0: must be a whole number from 1"),
        (("steps: 100", "steps: 1e2"), "steps: '1e2': must be a whole number from 1"),
        (("steps: 100", "stepz: 100"), "stepz: no such key; use command, steps"),
        (("seeds: 3", "seeds: [1, 2, 1]"), "seeds: .1, 2, 1.: one is repeated; give each once"),
        (("seeds: 3", "seeds: yes"), "seeds: True: must be a number of seeds, or a list"),
        (("seeds: 3", "seeds: []"), "seeds: ..: must be a number of seeds, or a list"),
        (("--gap 0.05", "--seed 4"), "arms: E8M3: --seed 4: is the same for all arms; set it under seeds:"),
        (("--gap 0.05", "--lr=1"), "arms: E8M3: --lr 1: is the same for all arms; set it under learning_rates:"),
        (("--gap 0.05", "'--x \"'"), "arms: E8M3: .*: No closing quotation; close the quotes"),
        (("--lr 0.1", "--lr 0.1 --train-iters 4"), "command: --train-iters 4: .* set it under steps:"),
        (("--lr 0.1", ""), "command: no --lr; add it"),
        (("arms:", "faster: {E9: --x}\narms:"), "faster: E9: no such arm; use BF16, E8M3"),
        (("arms:", "faster: {E8M3: --seed 2}\narms:"), "faster: E8M3: --seed 2: .* set it under seeds:"),
        (("arms:", "faster: {E8M3: --save here}\narms:"), "--save here: all runs would write there; put {run} into it"),
        (("--lr 0.1", "--lr abc"), "command: --lr abc: must be a number"),
        (("--lr 0.1", "--lr 0.1 --save here"), "--save here: all runs would write there; put {run} into it"),
        (("train.py", "--x"), "command: must begin with a script, or -m and a module"),
        (("BF16:", "no:"), "arms: False: a name must be text; put it in quotes"),
        (("BF16:", "E8M3:"), "E8M3: is given twice; give it once"),
        (("arms:", "learning_rates: [0x]\narms:"), "learning_rates: '0x': must be a number, or a multiple"),
        (("arms:", "learning_rates: [-1]\narms:"), "learning_rates: -1: must be a number, or a multiple"),
        (("arms:", "learning_rates: [1x, 0.1]\narms:"), "learning_rates: .*: one is repeated; give each once"),
        (("arms:", "timeout: soon\narms:"), "timeout: 'soon': must be seconds, above 0"),
        (("arms:", "processes: true\narms:"), "processes: True: must be a whole number from 1"),
        (("arms:", "data: []\narms:"), "data: ..: must be one or more of NAME: FLAGS"),
        (("steps: 100", "steps: [100"), "not YAML: "),
        (("steps: 100", "steps: !!timestamp x"), "not YAML: "),
        (("steps: 100", "steps: !!python/object:os.system x"), "not YAML: could not determine a constructor"),
        (("steps: 100", "steps: !!map x"), "not YAML: "),
        (("steps: 100", f"steps: {'[' * 5000}"), "values are nested more than 50 deep"),
        (("seeds: 3", "seeds: 100000000000"), "seeds: 100000000000: too many; a plan has at most 100,000 runs"),
        (("seeds: 3", "seeds: [99999999999999999999]"), "seeds: 9{20}: must be a whole number from 1 to 2147483647"),
        (("--lr 0.1", "--lr 0 --min-lr 0"), "command: --lr 0: must be above 0"),
        (("arms:", "learning_rates: [1e-323x]\narms:"), "learning_rates: '1e-323x': is 0; use a multiple that is"),
        (("BF16:", '"a\\eb":'), r"arms: 'a.x1bb': a name is of printable characters; remove the others"),
        (("arms:", "timeout: .nan\narms:"), "timeout: nan: must be seconds, above 0"),
        (("--gap 0.05", '"--gap \\0"'), "arms: E8M3: .*: holds a character that no command line can"),
        (("BF16:", '"\\uD800":'), "a name is of printable characters|not YAML"),
        ((PLAN, "text"), "not a mapping of keys"),
    ],
)
def test_a_wrong_plan_is_one_line(tmp_path, change, message):
    with pytest.raises(ValueError) as caught:
        plan_of(tmp_path, PLAN.replace(*change))
    line = str(caught.value)
    assert line.startswith(f"{tmp_path}/plan.yaml: ") and "\n" not in line
    assert re.search(message, line), line


def test_bytes_that_are_no_text_are_one_line(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"command: \xff\xfe\n")
    with pytest.raises(ValueError, match="not UTF-8 text, from byte 9 on; give a plan file"):
        read_plan(path)


@pytest.mark.parametrize("seeds, rates, arms, runs", [(10_000, 3000, 100, "3,000,000,000"), (100_000, 2, 1, "200,000")])
def test_a_plan_s_product_is_counted_before_it_is_made(tmp_path, monkeypatch, seeds, rates, arms, runs):
    """A plan of 3 x 10^9 runs never ended and printed nothing."""
    monkeypatch.setattr(SweepPlan, "runs", lambda plan: pytest.fail("made"))
    path = tmp_path / "plan.yaml"
    names = ", ".join(f"a{i}: ''" for i in range(arms))
    listed = ", ".join(f"{i}x" for i in range(1, rates + 1))
    path.write_text(f"command: t.py --lr 1\nsteps: 1\nseeds: {seeds}\narms: {{{names}}}\nlearning_rates: [{listed}]\n")
    with pytest.raises(UserError) as caught:
        read_plan(path)
    product = f"{seeds} seeds x {rates} learning rates x 1 data sets x {arms} arms"
    assert str(caught.value) == f"{path}: {product} are {runs} runs; leave some out, a plan has at most 100,000"


def test_the_largest_plan_is_read(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(f"command: t.py --lr 1\nsteps: 1\nseeds: {MOST_RUNS}\narms: {{a: ''}}\n")
    assert len(read_plan(path).runs()) == MOST_RUNS


def test_every_shipped_plan_can_be_read():
    """docs/lab.md says how many runs the first experiment has."""
    plans = {path.stem: read_plan(path) for path in (ROOT / "configs/lab").glob("*.yaml")}
    assert all(plan.runs() for plan in plans.values())
    first = plans["first"].runs()
    assert len(first) == 9 and "nine runs of a tiny GPT" in (ROOT / "docs/lab.md").read_text()
    assert not any("data/" in " ".join(run.command) for run in first)  # it needs no file
