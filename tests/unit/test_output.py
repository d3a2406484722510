"""The output of the verbs: a page's tables are aligned, or rich's on a terminal, or stay Markdown on request."""

import re

import pytest

from megatron_fp8 import packages
from megatron_fp8.tools.perf.output import render, show

PAGE = """# A rehearsal
| | stock BF16 | O3 |
|---|---|---|
| **step, ms** | 12 | 3 |
| GB [10^9] |  | 45.1 |

Said of `it`.
    a command with `quotes` and **stars**"""
TEXT = """A rehearsal
-----------
           stock BF16  O3
step, ms   12          3
GB [10^9]              45.1

Said of it.
    a command with `quotes` and **stars**
"""


def test_a_page_is_aligned_text_or_the_markdown_it_was(capsys):
    show(PAGE, "text")
    assert capsys.readouterr().out == TEXT
    show(PAGE, "markdown")
    assert capsys.readouterr().out == PAGE + "\n"


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_terminal_gets_richs_tables_where_rich_is(has_rich, capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(packages, "installed", lambda module: has_rich)
    show(PAGE, "text")
    shown = capsys.readouterr().out
    assert (shown == TEXT) != has_rich and ("───" in shown) == has_rich
    rows = [{"run": "O3", "ms": "12"}, {"run": "[a]", "ms": "3"}]
    for said in (shown, render(rows, "text")):
        assert "|---" not in said and "[10^9]" in shown
    assert ("───" in render(rows, "text")) == has_rich and "[a]" in render(rows, "text")
    assert re.match(r"\| run \| ms \|\n\|---\|---\|\n", render(rows, "markdown"))
