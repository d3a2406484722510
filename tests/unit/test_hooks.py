"""The table of hooks: its page is fresh, Megatron is as it says, every hook is undone, and a run leaves nothing."""

import itertools
import sys
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from launch import ROOT
from megatron_runs import SIX_STEPS, TINY_GPT, run_megatron

from megatron_fp8 import cpu
from megatron_fp8.rebind import NOTHING, PACKAGE, Hook, Rebound, When, find

ALWAYS = When("always")


@pytest.fixture(scope="module")
def rows():
    """All rows: of modules and classes, of objects, and of a warm process."""
    if cpu.needed():
        cpu.install()
    from megatron_fp8 import hooks
    from megatron_fp8.tools.rehearsal import ranks

    rows = [*hooks.of_modules(), *hooks.on_objects(), *ranks.HOOKS]
    for row in rows:
        find(row.owner)
    cpu.uninstall()  # which has put some of them
    return rows


def held(owner) -> dict:
    return dict(owner if isinstance(owner, dict) else vars(owner))


def test_the_page_is_what_the_code_says(rows, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import make_hooks_doc

    cpu.uninstall()  # which the tool installs
    monkeypatch.setattr(sys, "argv", ["make_hooks_doc.py", "--check"])
    assert make_hooks_doc.main() == 0, "run python tools/make_hooks_doc.py"
    page, stale = tmp_path / "hooks.md", make_hooks_doc.PAGE.read_text().replace("train_step", "train_steps", 1)
    page.write_text(stale)
    monkeypatch.setattr(make_hooks_doc, "PAGE", page)
    assert make_hooks_doc.main() == 1 and "hooks.md is stale" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["make_hooks_doc.py"])
    assert make_hooks_doc.main() == 0 and page.read_text() != stale
    assert all(f"`{row.owner}.{row.name}`" in page.read_text() and row.why in page.read_text() for row in rows)


def test_megatron_is_the_one_that_the_table_knows(rows):
    for row in rows:
        original = getattr(find(row.owner), row.name, NOTHING)
        if not row.of_object:
            owner = find(row.owner)
            row.check(owner.get(row.name, NOTHING) if isinstance(owner, dict) else getattr(owner, row.name, NOTHING))
        elif callable(original):
            row.check(original)  # else it is an object's alone, and checked on the object


def test_every_row_says_who_and_why(rows):
    for row in rows:
        assert row.why.endswith(".") and row.when.text, row
        if not row.maker.startswith("run."):
            found = find(f"megatron_fp8.{row.maker}")
            assert callable(found) or row.of_object, row
    assert len({(row.owner, row.name, row.maker, row.when.text) for row in rows}) == len(rows)


def test_what_the_run_makes_is_there(rows):
    """"run.step": an attribute of Run; "run.checks.look": of what its first one is annotated to be, by now."""
    from megatron_fp8 import hooks
    from megatron_fp8.parsed_runs import ParsedRuns
    from megatron_fp8.run import Run

    text = (ROOT / "dpo_gpt_fp8.py").read_text()  # tests/cpu/test_dpo_runs.py runs it
    for row, name in ((hooks.SCORING, "SCORING"), (hooks.REFERENCE, "REFERENCE")):
        assert f"def {row.maker.removeprefix('run.')}(self, stock)" in text and f"plugin.put(hooks.{name}, " in text
        assert all((row.owner, row.name) != (other.owner, other.name) for other in (*hooks.RUN, *hooks.BUILT))
    run = Run(SimpleNamespace(check_for_nan_in_loss_and_grad=True), None)
    for row in rows:
        if row.maker.startswith("run.") and row not in (hooks.SCORING, hooks.REFERENCE):
            first, *rest = row.maker.split(".")[1:]
            if first in ("step_graph", "parse_args"):
                assert hasattr(run, first) or hasattr(ParsedRuns, first)
                continue
            found = getattr(run, first)
            assert callable(getattr(found, rest[0]) if rest else found), row


def test_every_hook_of_a_module_or_class_is_undone(rows):
    for row in (row for row in rows if not row.of_object):
        owner, rebound = find(row.owner), Rebound()
        if not row.maker.startswith("run."):
            find(f"{PACKAGE}.{row.maker}")  # imports its module, which else would be new in sys.modules
        before = held(owner)
        row.put(rebound, MagicMock())
        assert held(owner).get(row.name, NOTHING) is not before.get(row.name, NOTHING), row
        rebound.put_back()
        after = held(owner)
        assert after.keys() == before.keys() and all(after[name] is before[name] for name in before), row


class Unchanged:
    """A run whose makers return what they are given."""

    def __getattr__(self, name):
        return self

    def __call__(self, stock):
        return stock


def test_rows_of_one_name_fit_on_top_of_each_other(rows):
    """Once --load without --save ended a run: one row's wrapper had no longer the signature that the next row knows."""
    by_name = defaultdict(list)
    for row in rows:
        if not row.of_object and not row.signature.startswith("holds "):
            by_name[row.owner, row.name].append(row)
    several = [same for same in by_name.values() if len(same) > 1]
    assert several
    for same in several:
        for first, second in itertools.permutations(same, 2):
            rebound = Rebound()
            try:
                first.put(rebound, Unchanged())
                second.put(rebound, Unchanged())
            finally:
                rebound.put_back()


def test_every_hook_of_an_object_is_undone(rows):
    for row in (row for row in rows if row.of_object):
        target = torch.nn.Module.__new__(type("Object", (torch.nn.Module,), {}))
        torch.nn.Module.__init__(target)
        holds = row.signature.removeprefix("holds ") if row.signature.startswith("holds ") else ""
        if holds == "bool":
            target.__dict__[row.name] = True
        elif holds:
            setattr(target, row.name, type(holds, (torch.nn.Module,), {})())
        else:
            parameters = row.signature.removeprefix("None or ").replace("...", "*given").replace(" ", ", ")
            function = eval(f"lambda {parameters}: None")
            setattr(type(target) if parameters.startswith("self") else target, row.name, function)
        before, children = held(target), dict(target._modules)
        value = False if holds == "bool" else torch.nn.Identity() if holds else lambda *given: None
        undo = row.on(target, value)
        assert getattr(target, row.name) is value
        undo()
        assert held(target) == before and target._modules == children, row


class Base:
    value = 3

    def method(self, first, second):
        return first, second


class Derived(Base):
    pass


def row(owner, name, signature):
    return Hook(f"{__name__}.{owner}", name, "cpu.doing_nothing", signature, ALWAYS, "A test.")


def test_what_a_base_class_has_is_the_base_classes_again():
    rebound = Rebound()
    row("Derived", "method", "self first").put(rebound)
    assert "method" in vars(Derived) and Base().method(1, 2) == (1, 2)
    rebound.put_back()
    assert "method" not in vars(Derived) and Derived().method(1, 2) == (1, 2)


@pytest.mark.parametrize(
    ("name", "signature", "said"),
    [
        ("method", "self second", r"Base\.method: \(self, first, second\); it was written for \(self, second, "),
        ("method", "self first second third", r"written for \(self, first, second, third, "),
        ("value", "holds bool", r"Base\.value: int; it was written for bool; use mega"),
        ("value", "holds nothing", r"Base\.value: int; it was written for nothing"),
        ("absent", "", r"Base\.absent: nothing; it was written for "),
        ("value", "self first", r"Base\.value: int; it was written for \(self, first, \.\.\.\)"),
        ("absent", "holds int", r"Base\.absent: nothing; it was written for int"),
    ],
)
def test_what_is_not_known_is_refused_and_left_alone(name, signature, said):
    rebound, before = Rebound(), dict(vars(Base))
    with pytest.raises(RuntimeError, match=said):
        row("Base", name, signature).put(rebound)
    assert not rebound and dict(vars(Base)) == before


def test_a_script_may_set_any_function_in_an_official_field():
    """As trainers do with finalize_model_grads_func, whose parameters have names of their own."""
    from megatron_fp8.engine.build import HOOKS

    official = next(hook for hook in HOOKS if hook.name == "finalize_model_grads_func")
    for theirs in (None, lambda chunks, **rest: None, lambda: None):
        config = SimpleNamespace(finalize_model_grads_func=theirs)
        official.on(config, print)()
        assert config.finalize_model_grads_func is theirs
    with pytest.raises(RuntimeError, match=r"finalize_model_grads_func: int; it was written for \(\.\.\.\)"):
        official.on(SimpleNamespace(finalize_model_grads_func=3), print)


def test_a_module_whose_import_is_blocked_is_not_there(monkeypatch):
    """None in sys.modules makes an import fail, as if nothing were installed."""
    monkeypatch.setitem(sys.modules, "fp8_blocked", None)
    make = "gemm.fused_wgrad.stand_in"
    rebound, always = Rebound(), When("always")
    with pytest.raises(RuntimeError, match="NoneType"):
        Hook("sys.modules", "fp8_blocked", make, "holds nothing", always, "A test.").put(rebound)
    Hook("sys.modules", "fp8_blocked", make, "None or holds nothing", always, "A test.").put(rebound)
    assert sys.modules["fp8_blocked"] is not None
    rebound.put_back()
    assert sys.modules["fp8_blocked"] is None


def test_rows_are_put_together_or_not_at_all():
    rebound, before = Rebound(), dict(vars(Base))
    never = Hook(f"{__name__}.Base", "value", "no.such.maker", "", When("never", lambda run: False), "A test.")
    with pytest.raises(RuntimeError, match=r"Base\.value: int"):
        rebound.put([row("Base", "method", "self"), never, row("Base", "value", "holds bool")], None)
    assert not rebound and dict(vars(Base)) == before
    rebound.put([row("Base", "method", "self"), never], None)
    assert Base.method is not before["method"]
    rebound.put_back()
    assert dict(vars(Base)) == before


def test_names_that_are_not_there_and_keys_go_again():
    table, target = {}, SimpleNamespace(children=1)
    rebound = Rebound()
    rebound.replace(table, "key", 1)
    rebound.replace(target, "new", 2)
    rebound.replace(target, "children", 3)
    assert table == {"key": 1} and vars(target) == {"new": 2, "children": 3}
    rebound.put_back()
    assert table == {} and vars(target) == {"children": 1} and not rebound


def test_an_attribute_that_another_wrapper_holds_is_that_again():
    """As --logits-save-dir puts a loss on the model itself."""
    target = Base()
    theirs = target.method = lambda _first, _second: 5
    hook = Hook(f"{__name__}.Base", "method", "", "self first second", ALWAYS, "A test.", of_object=True)
    undo = hook.on(target, lambda first, second: theirs(first, second) + 1)
    assert target.method(1, 2) == 6
    undo()
    assert target.method is theirs


def test_an_owner_that_is_not_there_is_said():
    with pytest.raises(ModuleNotFoundError):
        find("no_such_package.module")
    with pytest.raises(AttributeError, match="no_such_name"):
        find("megatron_fp8.rebind.no_such_name")


def left(*flags: str, env: dict[str, str] | None = None) -> tuple[list[str], int, int]:
    """What a run leaves, how many hooks it had, how many values were compared."""
    script = "tests/scripts/leaves_nothing.py"
    model = [flag for flag in TINY_GPT if flag != "--no-rope-fusion"]  # so that the rotary embedding's tables are ours
    lines = run_megatron(2, [*model, *SIX_STEPS, *flags], script=script, env=env).lines
    words = "left", "hooked", "there"
    found = {word: [line.split(" ", 1)[1] for line in lines if line.startswith(f"{word} ")] for word in words}
    return found["left"], int(found["hooked"][-1]), int(found["there"][-1])


def test_a_run_leaves_nothing(tmp_path):
    """After uninstall() every name is the original object, and the package's modules hold what they held."""
    what = f"--fp8-level O3 --fp8-log-interval 2 --fp8-log-update-norm --save {tmp_path} --save-interval 3"
    what += " --eval-iters 1 --eval-interval 2 --split 9,1,0 --fp8-lm-head --fp8-log-gemm --fp8-sharpness-interval 3"
    what += " --train-iters 3"
    found, hooked, there = left(*what.split())
    assert not found and hooked > 30 and there > 2000


@pytest.mark.slow
def test_what_a_run_would_leave_is_found():
    """If nothing is forgotten: bytes that were sent, tables of the rotary embedding, lines."""
    found, *_ = left("--fp8-level", "O1", env={"FORGET_NOTHING": "1"})
    assert {"comm.wire.sent_bytes", "layers.self_attention._kept", "run._print_once"} <= {
        name.removeprefix("megatron_fp8.") for name in found
    }
    assert "megatron.training.training.get_megatron_optimizer" in found
