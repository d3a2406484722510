"""Imports between rooms are those of the table "Folders" in docs/architecture.md, and none goes upwards.

A room is a folder or a module at the top of megatron_fp8. A new import between rooms needs an entry in the table, and
must go downwards.
"""

import ast
import functools
import re
import shutil

from launch import ROOT

PACKAGE, PAGE = ROOT / "megatron_fp8", ROOT / "docs/architecture.md"
# `borrowed` is a method of EngineOptimizer in a file of its own; it imports that class only to name its type.


@functools.cache
def statements(text: str) -> tuple[list[ast.stmt], set[ast.stmt]]:
    """A module's imports, and those among them that stand under `if TYPE_CHECKING:`."""
    kinds, tree = (ast.Import, ast.ImportFrom), ast.parse(text)
    every = list(ast.walk(tree))
    guards = [node for node in every if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    guarded = {node for guard in guards for node in ast.walk(guard) if isinstance(node, kinds)}
    return [node for node in every if isinstance(node, kinds)], guarded


@functools.cache
def imports(package, types: bool = True) -> set[tuple[str, str]]:
    """(file, module) for each import inside the package, at any depth; both are relative to the package.

    types: whether those under `if TYPE_CHECKING:` count, which no process makes.
    """
    found = set()
    for path in package.rglob("*.py"):
        file = path.relative_to(package)
        inside = [package.name, *file.parent.parts]
        every, guarded = statements(path.read_text())
        for node in every if types else [node for node in every if node not in guarded]:
            if isinstance(node, ast.Import):
                modules = [alias.name.split(".") for alias in node.names]
            else:
                above = inside[: len(inside) + 1 - node.level] if node.level else []
                modules = [[*above, *(node.module or "").split("."), alias.name] for alias in node.names]
            for first, *rest in ([part for part in parts if part] for parts in modules):
                if first == package.name and rest != ["__version__"]:  # which is the package's own word, and no room's
                    found.add((str(file), ".".join(rest)))
    return found


def room(name: str, package) -> str:
    """Of a file ("ops/triton/adam.py"), or of a module and a name in it ("gemm.plans.Plan"). In tools/, each folder."""
    first, *rest = re.split(r"[/.]", name)
    if first == "tools" and rest:
        inside = rest[0] if (package / first / rest[0]).is_dir() else f"{rest[0]}.py"
        return "tools" if inside == "__init__.py" else f"tools/{inside}"
    return first if (package / first).is_dir() else f"{first}.py"


def between_rooms(package) -> set[tuple[str, str]]:
    pairs = {(room(file, package), room(module, package)) for file, module in imports(package)}
    return {(one, other) for one, other in pairs if one not in (other, "__init__.py")}  # the package's face is no room


def users_of_references(package) -> set[str]:
    """Files outside ops/ and gemm/ that import a reference implementation."""
    found = {file for file, name in imports(package) if name.startswith("ops.reference")}
    return {file for file in found if not file.startswith(("ops/", "gemm/"))}


def file_of(module: str, package) -> str:
    """The file that a module, or a name in it, comes from: "gemm.plans.Plan" is in gemm/plans.py."""
    parts = module.split(".") if module else []
    for length in range(len(parts), -1, -1):
        file = "/".join(parts[:length])
        for candidate in (f"{file}.py", f"{file}/__init__.py".lstrip("/")):
            if (package / candidate).is_file():
                return candidate
    raise AssertionError(module)


def circles(package) -> list[set[str]]:
    """The sets of files of one room that reach each other by imports at any depth, those in functions included."""
    reached: dict[str, set[str]] = {}
    for file, module in imports(package, types=False):
        other = file_of(module, package)
        if other != file and room(file, package) == room(other, package):
            reached.setdefault(file, set()).add(other)
    grows = True
    while grows:
        grows = False
        for files in reached.values():
            more = set().union(*(reached.get(file, ()) for file in files)) - files
            files |= more
            grows = grows or bool(more)
    found = []
    for file in sorted(reached):
        circle = {other for other in reached[file] if file in reached.get(other, ())}
        if circle and circle not in found:
            found.append(circle)
    return found


def table(text: str) -> dict[str, list[str]]:
    """{room: the rooms it imports}, in the order of the document."""
    section = re.search(r"^## Folders$(.*?)^## ", text, re.M | re.S)[1]
    rows = re.findall(r"^\| `([\w./]+?)/?` \|.*\| ([^|]+) \|$", section, re.M)
    return {name: [] if listed == "nothing" else listed.split(", ") for name, listed in rows}


def upwards(rooms: dict[str, list[str]]) -> list[tuple[str, str]]:
    """What is listed and does not come before the row that lists it; without any, there is no circle."""
    order = list(rooms)
    return [(a, b) for a, listed in rooms.items() for b in listed if b not in order[: order.index(a)]]


def test_the_table_has_the_codes_imports():
    rooms = table(PAGE.read_text())
    listed = {(one, other) for one, others in rooms.items() for other in others}
    there = {room(str(path.relative_to(PACKAGE)), PACKAGE) for path in PACKAGE.rglob("*.py")} - {"__init__.py", "tools"}
    assert set(rooms) == there
    found = between_rooms(PACKAGE)
    assert len(found) > 30
    assert listed == found, f"listed only: {listed - found}; imported only: {found - listed}"


def test_a_room_imports_what_comes_before_it():
    assert upwards(table(PAGE.read_text())) == []


def test_no_training_process_imports_a_tool():
    pairs = between_rooms(PACKAGE)
    assert [(one, other) for one, other in pairs if other.startswith("tools") and not one.startswith("tools")] == []


def test_no_other_room_imports_a_reference():
    assert users_of_references(PACKAGE) == set()


def test_no_two_files_of_a_room_import_each_other():
    assert circles(PACKAGE) == []


def test_a_planted_circle_is_found(tmp_path):
    """One of imports at the top of two files, and one that an import in a function closes."""
    copy = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    planted = {
        "tools/perf/job.py": "def f():\n    from . import memory",  # memory imports job
        "numerics/formats.py": "from .scaled import ScaledTensor",
    }
    for file, lines in planted.items():
        with (copy / file).open("a") as end:
            end.write(f"\n{lines}\n")
    found = circles(copy)
    assert len(found) == 2
    assert {"numerics/formats.py", "numerics/scaled.py"} <= found[0]
    assert {f"tools/perf/{name}.py" for name in ("job", "memory", "job_flags", "systems", "workload")} <= found[1]


def test_planted_imports_are_found(tmp_path):
    """Upward imports are found in the code, at any depth, and in the table if it lists them."""
    planted = {
        ("monitor/spikes.py", "def f():\n    from ..tools.lab.sweep import store"): ("monitor", "tools/lab"),
        ("numerics/formats.py", "import megatron_fp8.gemm.interface as gemm"): ("numerics", "gemm"),
        ("ops/triton/adam.py", "from ... import plugin"): ("ops", "plugin.py"),
        ("errors.py", "if True:\n    from .flags.usage import add_verb"): ("errors.py", "flags"),
    }
    copy = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, lines in planted:
        with (copy / file).open("a") as end:
            end.write(f"\n{lines}\n")
    assert between_rooms(copy) - between_rooms(PACKAGE) == set(planted.values())
    rooms = table(PAGE.read_text())
    for one, other in planted.values():
        rooms[one].append(other)
    assert set(upwards(rooms)) == set(planted.values())


def test_a_planted_import_of_a_reference_is_found(tmp_path):
    for folder in ("ops/triton", "engine"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "module.py").write_text(f"from {tmp_path.name}.ops.reference_norm import norm\n")
    assert users_of_references(tmp_path) == {"engine/module.py"}
