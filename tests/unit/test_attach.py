"""No file but its own writes an attribute of an owned weight, or of its casts: what it is told is in its methods."""

import ast

import pytest
from launch import ROOT

PACKAGE = ROOT / "megatron_fp8"
OWN = "engine/owned_weight.py"
# Other objects have attributes of these names.
OTHERS = {"args.fp8", "args.rank", "engine.config", "entry.key", "part.config", "sys.path"}


def attributes(package, *classes: str) -> set[str]:
    """What the classes' own methods set."""
    tree = ast.parse((package / OWN).read_text())
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    assert len(found) == len(classes)
    return {place.attr for one in found for place in written(one) if ast.unparse(place.value) == "self"}


def written(tree: ast.AST):
    """Every attribute that is set, deleted or written into, by a statement, a loop, a `with` or a call of setattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            if isinstance(node.value, ast.Attribute):
                yield node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "delattr"):
            owner, name = [*node.args, None, None][:2]
            if isinstance(name, ast.Constant):
                yield ast.Attribute(owner, name.value, ast.Store(), lineno=node.lineno)


def strangers(package) -> list[str]:
    """'file:line what' of each write from outside."""
    names, found = attributes(package, "OwnedWeight", "Casts"), []
    for path in sorted(package.rglob("*.py")):
        file = str(path.relative_to(package))
        if file == OWN:
            continue
        for place in written(ast.parse(path.read_text())):
            what = ast.unparse(place)
            if place.attr in names and ast.unparse(place.value) != "self" and what not in OTHERS:
                found.append(f"{file}:{place.lineno} {what}")
    return found


def test_the_attributes_are_found():
    assert {"param", "sink", "_stored", "events", "step", "pending", "fp8", "scaling", "slots"} <= attributes(
        PACKAGE, "OwnedWeight", "Casts"
    )


def test_nothing_else_writes_into_an_owned_weight():
    assert strangers(PACKAGE) == []


@pytest.mark.parametrize(
    "line",
    [
        "weight.sink = None",
        "weight.pending += 1",
        "weight.step, weight.events = 1, None",
        "module.owned._stored: object = None",
        "weight.casts.slots = (0, 1)",
        "weight.forwards[0] += 1",
        "for weight.step in range(3): pass",
        "setattr(weight, 'events', None)",
        "del weight.scratch",
    ],
)
def test_a_planted_write_is_found(line, tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / OWN).write_text((PACKAGE / OWN).read_text())
    (tmp_path / "engine" / "other.py").write_text(f"def f(weight, module):\n    self.sink = weight.sink\n    {line}\n")
    assert strangers(tmp_path) != []
