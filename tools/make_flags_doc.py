"""Write docs/flags.md from the tables in the code.

python tools/make_flags_doc.py            write it
python tools/make_flags_doc.py --check    exit 1 if it differs from the code
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from made_page import write_or_check

from megatron_fp8.flags.config import ALL
from megatron_fp8.flags.level import CELLS, LEVELS
from megatron_fp8.flags.stock import ADAPTED, GIVEN, HONOURED, IRRELEVANT, NOTED, REFUSED, TABLE, Row

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
INTRODUCTION = """\
# Flags

*Written by `python tools/make_flags_doc.py` from the tables in flags/ and tests/architecture_cases.py: change those.*

Search this page for a flag: [levels](#levels), [our flags](#our-flags), and [what a level does with Megatron's own
flags](#stock-flags-under-a-level): honours, changes or refuses them.

`--fp8-level` sets all rows (*cells*) of the first table at once; O0, the default, is stock Megatron-LM. Each cell also
has a flag of its own, which changes that cell alone. A value that this version does not have is refused, never
replaced.
"""
STOCK = {
    HONOURED: "Honoured: with the meaning they have in stock",
    NOTED: "Honoured, with a log line about what the level does not cover",
    ADAPTED: "Changed, with a log line: the result is the same",
    REFUSED: "Refused, with the remedy",
}
STOCK_INTRODUCTION = """\
## Stock flags under a level

A flag in none of these tables does not affect precision, the linears, gradients, weights or the optimizer, and works as
in stock. Without a level, one thing is refused: `--fp8-format` together with `--transformer-impl local`, because stock
Megatron then silently trains in BF16.
"""
IRRELEVANT_INTRODUCTION = """\
## Stock flags with similar names that do not concern a level
"""


MODEL_INTRODUCTION = """\
## Stock flags of the model

tests/unit/test_architecture.py builds a level's model and the model of stock's Transformer Engine layers with each of
these flags. Both have the same parameters, modules and attributes, the same loss of each token and the same gradients:

{}.

The other flags that shape a model are in the tables above, or there is nothing to compare:
"""


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(head), ["---"] * len(list(head)), *map(list, body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def levels() -> str:
    head = ("cell", "flag", "what", *LEVELS, "available")
    body = (
        (c.name, f"`{c.flag}`", c.meaning, "stock", *c.levels, ", ".join(c.available))
        for c in CELLS
    )
    return table(head, body)


def own_flags() -> str:
    return table(("flag", "values", "meaning"), ((f"`{f.name}`", f.values.shown, f.meaning) for f in ALL))


def stock_flags(verdict: str) -> str:
    def when(row: Row) -> str:
        return row.when.text + (f", if `{row.missing}` is not installed" if row.missing else "")

    def change(row: Row) -> str:
        return row.note + (f" (`{row.field}` of Fp8Config)" if row.field else "")

    head = ("flag", "when", "remedy" if verdict == REFUSED else "under a level")
    return table(head, ((f"`{r.flag}`", when(r), change(r)) for r in TABLE if r.verdict == verdict))


def model_flags() -> str:
    """The flags that are compared and are in no table; for the others, why they are not compared."""
    sys.path.insert(0, str(ROOT / "tests"))
    from architecture_cases import EXCLUDED, case_lines

    in_tables = {row.flag for row in TABLE if row.verdict != HONOURED}
    refused = {row.flag for row in TABLE if row.verdict == REFUSED and row.when is GIVEN}
    words = [case.replace("=", " ").split() for case in case_lines()]
    compared = dict.fromkeys(case[0] for case in words if not refused & set(case))
    names = ", ".join(f"`{flag}`" for flag in compared if flag not in in_tables)
    reasons = ((reason, " ".join(f"`{flag}`" for flag in flags.split())) for reason, flags in EXCLUDED.items())
    return MODEL_INTRODUCTION.format(names) + "\n" + table(("why", "flags"), reasons)


def page() -> str:
    """The text of docs/flags.md."""
    parts = [
        INTRODUCTION,
        "## Levels\n",
        levels(),
        "## Our flags\n",
        own_flags(),
        STOCK_INTRODUCTION,
    ]
    for verdict, title in STOCK.items():
        parts += [f"### {title}\n", stock_flags(verdict)]
    parts.append(model_flags())
    reasons = ((f"`{flag}`", reason) for flag, reason in IRRELEVANT.items())
    return "\n".join([*parts, IRRELEVANT_INTRODUCTION, table(("flag", "why"), reasons)])


def main() -> int:
    return write_or_check(PAGE, page(), "make_flags_doc.py", __doc__.splitlines()[0])


if __name__ == "__main__":
    sys.exit(main())
