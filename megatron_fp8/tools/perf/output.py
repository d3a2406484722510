"""How the verbs print tables and pages, and how a figure is checked and saved.

    text        aligned columns; on a terminal a table of rich, if rich is installed (megatron-fp8[viz])
    markdown    for a document
    csv, json   for programs

A page (`show`) is written as Markdown. As text, its tables look like those of `render`.
"""

import csv
import io
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from ... import packages
from ...errors import UserError

FORMATS = ("text", "markdown", "csv")
PAGE_FORMATS = FORMATS[:2]
MIB = 2**20 / 1e9  # a MiB, the unit of Megatron's log, in GB of 10^9 bytes, the unit of all figures here
_REMEDY = "name a .svg, .png or .pdf in a folder that is there"
_WIDE = 100  # columns of a terminal
type Rows = Sequence[dict[str, str]]


def render(rows: Rows, form: str) -> str:
    """Rows of {column: cell} in one of FORMATS, with the columns of the first row.

    As text: empty columns are left out, and the table is transposed if only that fits a terminal.
    """
    if not rows:
        return ""
    columns = list(rows[0])
    cells = [columns, *([row.get(column, "") for column in columns] for row in rows)]
    if form == "csv":
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(cells)
        return file.getvalue().rstrip("\n")
    if form == "markdown":
        lines = ["| " + " | ".join(line) + " |" for line in cells]
        return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])
    kept = [i for i in range(len(columns)) if any(line[i] for line in cells[1:])]
    cells = [[line[i] for i in kept] for line in cells]
    lines, turned = _aligned(cells), _aligned(list(zip(*cells, strict=True)))
    fits = max(map(len, turned)) <= _WIDE < max(map(len, lines))
    return _as_text(list(zip(*cells, strict=True)) if fits else cells)


def show(page: str, form: str) -> None:
    """Print a page of Markdown, as Markdown or as text."""
    print(page if form == "markdown" else _page_as_text(page))


def _page_as_text(page: str) -> str:
    said: list[str] = []
    lines = page.splitlines()
    while lines:
        count = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
        if count:
            cells = [_plain(line).strip()[1:-1].split("|") for line in lines[:count] if not line.startswith("|---")]
            said.append(_as_text([[cell.strip() for cell in line] for line in cells]))
        elif heading := re.match("#+ ", lines[0]):
            title = lines[0][heading.end() :]
            said += [title, "-" * len(title)]
        else:
            said.append(_plain(lines[0]))
        del lines[: count or 1]
    return "\n".join(said)


def _plain(line: str) -> str:
    return line if line.startswith("    ") else re.sub(r"[*][*]|`", "", line)  # indented: commands and logs


def _as_text(cells: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the header."""
    if not (sys.stdout.isatty() and packages.installed("rich")):
        return "\n".join(_aligned(cells))
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in cells[0]:
        table.add_column(_unmarked(title))
    for line in cells[1:]:
        table.add_row(*map(_unmarked, line))
    console = Console()
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip("\n")


def _unmarked(cell: str) -> str:
    """Escape brackets, which rich would read as markup."""
    from rich.markup import escape

    return escape(cell)


def merged(rows: Rows, columns: Mapping[str, Sequence[str]]) -> Rows:
    """Rows with fewer, wider columns for text: each title's cell joins the cells of its columns."""
    width = {name: max((len(row.get(name, "")) for row in rows), default=0)
             for names in columns.values() for name in names}  # fmt: skip

    def cell(row: dict[str, str], names: Sequence[str]) -> str:
        if len(names) == 1:
            return row.get(names[0], "")
        return " ".join(row.get(name, "").rjust(width[name]) for name in names if width[name]).rstrip()

    return [{title: cell(row, names) for title, names in columns.items()} for row in rows]


def alike(rows: Rows, columns: Sequence[str]) -> dict[str, str]:
    """The columns, among `columns`, that have the same cell in all rows: {column: cell}."""
    return {name: rows[0][name] for name in columns if rows and len({row[name] for row in rows}) == 1}


def paragraph(words: str, form: str) -> str:
    """A paragraph in the given form: lines that fit a terminal, a comment of CSV, or as it is."""
    return {"text": textwrap.fill(words, _WIDE), "csv": f"# {words}"}.get(form, words)


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def check_figure(path: str | None) -> None:
    """Raise UserError if a --figure cannot be saved. Call it before measuring or printing."""
    if path is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--figure {path}: {packages.needs('matplotlib', 'leave it out')}") from None
    file, why = Path(path), ""
    if not file.suffix:  # matplotlib would append one and write another file than the user named
        why = "the name has no ending"
    elif file.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        why = f"no figure is written as {file.suffix}"
    elif not file.absolute().parent.is_dir():
        why = "no such folder"
    if why:
        raise UserError(f"--figure {path}: {why}; {_REMEDY}")


def save(figure, path: str) -> None:
    """Write a figure in the format of its file's ending.  Raises UserError if that fails."""
    try:
        figure.savefig(Path(path))
    except (OSError, ValueError) as error:
        raise UserError(f"--figure {path}: {error}; {_REMEDY}") from None
