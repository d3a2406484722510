"""Write docs/hooks.md from the table in megatron_fp8/hooks.py, and the rows on objects.

python tools/make_hooks_doc.py            write it
python tools/make_hooks_doc.py --check    exit 1 if it is not what the code says
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from megatron_fp8 import cpu

if cpu.needed():
    cpu.install()  # before Megatron is imported

from made_page import write_or_check
from make_flags_doc import table

from megatron_fp8 import hooks
from megatron_fp8.rebind import PACKAGE, Hook, find
from megatron_fp8.tools.rehearsal import ranks

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hooks.md"
INTRODUCTION = """\
# Hooks

*Written by `python tools/make_hooks_doc.py` from megatron_fp8/hooks.py and the rows beside the code that they name:
change those.*

What of Megatron-LM, torch and Python stands for something of ours, from `plugin.install()` to `plugin.uninstall()`. Of
each name: what makes ours of the original, how the original must begin (else `install()`, or the run, ends with its
name), when ours is there, and why. Rows of one name wrap each other, the last outermost. Nothing is changed by an
import. Without a level, and at O0, a run is bit for bit stock Megatron's; if it saves over a level's checkpoint it
takes the seal away, and if it would load a level's optimizer state it is told that it cannot.

CUDA's names on a machine without a GPU are not in the table: `cpu.py` lists them.
"""
MODULES = """\
## Modules and classes

`uninstall()` puts every original back.
"""
OBJECTS = """\
## Single objects

Of a model, its optimizer or its configuration. They live as long as the object: models already built keep them after
`uninstall()`. `Hook.on` returns what undoes one.
"""
WARM = """\
## A warm process

`tools/rehearsal/ranks.py` forks the ranks of rehearsals and tests from one that has imported everything. They are in
that process and its ranks; `ranks.hooked.put_back()` undoes them.
"""


def where(hook: Hook) -> str:
    """What makes ours: the file and the name in it."""
    if hook.maker.startswith("run."):
        return f"`{hook.maker}`"
    module, names = hook.maker, ""
    while not isinstance(find(f"{PACKAGE}.{module}"), type(sys)):
        module, _, name = module.rpartition(".")
        names = f"{name}.{names}" if names else name
    file = f"{module.replace('.', '/')}.py"
    return f"`{names}` in {file}" if names else file


def row(hook: Hook) -> tuple[str, ...]:
    original = hook.signature and f"`{hook.signature}`"
    return f"`{hook.owner}.{hook.name}`", where(hook), original, hook.when.text, hook.why


def rows(hooks: Iterable[Hook]) -> str:
    return table(("name", "ours", "the original", "when", "why"), map(row, hooks))


def page() -> str:
    """The text of docs/hooks.md."""
    parts = MODULES, rows(hooks.of_modules()), OBJECTS, rows(hooks.on_objects()), WARM, rows(ranks.HOOKS)
    return "\n".join((INTRODUCTION, *parts))


def main() -> int:
    return write_or_check(PAGE, page(), "make_hooks_doc.py", __doc__.splitlines()[0])


if __name__ == "__main__":
    sys.exit(main())
