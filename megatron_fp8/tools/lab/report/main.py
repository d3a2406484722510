"""`megatron-fp8 lab report STORE --out DIR`: what a sweep's runs show, and what they cannot show, as HTML and Markdown.

    report.html             one file with all pictures in it
    report.md, figures/     the same
    runs.html, runs.md      all that depends on time and place: speeds, machines, versions, ends of failed logs

The report itself depends on the runs' curves alone. So a sweep that was killed and continued gives, byte for byte, the
report of one that was not.
"""

import math
from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from ....checkpoint.files import write_whole
from ....errors import UserError
from ....metrics import STEP_MS
from ..files import refuse_link_of_others
from ..sweep.progress import duration
from ..sweep.rows import ENDED, FAILED, NOT_FINITE
from ..sweep.store import Store
from .curves import began, steps_ratio
from .document import Log, Picture, Section, Table, between, counted, number
from .results import Result, Results, healthy
from .sections import sections
from .statistics import mean, mean_band, median

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff }
body { max-width: 75rem; margin: auto; padding: 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc }
p, ul { max-width: 60rem } nav a { margin-right: 1rem }
div.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.87rem; font-variant-numeric: tabular-nums }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th { vertical-align: bottom; white-space: normal } th.word, td.word { text-align: left }
tbody tr:nth-child(even) { background: #f6f6f6 }
figure { margin: 1rem 0 } figcaption { color: #555; font-size: 0.87rem } svg { max-width: 100%; height: auto }
pre { background: #f6f6f6; padding: 0.6rem; overflow-x: auto; font-size: 0.8rem }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<nav>
{%- for section in sections %}
<a href="#s{{ loop.index }}">{{ section.title }}</a>
{%- endfor %}
</nav>
{%- for section in sections %}
<section id="s{{ loop.index }}">
<h2>{{ section.title }}</h2>
{%- for block in section.blocks %}
{%- if block is string %}
<p>{{ block }}</p>
{%- elif block.heads is defined %}
<div class="wide"><table>
<thead><tr>
{%- for head in block.heads %}<th scope="col"{{ word if loop.index <= block.labels }}>{{ head }}</th>{% endfor -%}
</tr></thead>
<tbody>
{%- for row in block.rows %}
<tr>{% for cell in row %}<td{{ word if loop.index <= block.labels }}>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody>
</table></div>
{%- elif block.svg is defined %}
<figure role="img" aria-label="{{ block.caption }}">
{{ block.svg | safe }}<figcaption>{{ block.caption }}</figcaption>
</figure>
{%- elif block.text is defined %}
<pre>{{ block.text }}</pre>
{%- else %}
<ul>
{%- for line in block %}
<li>{{ line }}</li>
{%- endfor %}
</ul>
{%- endif %}
{%- endfor %}
</section>
{%- endfor %}
</body>
</html>
"""


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 lab report`."""
    parser.add_argument("store", help="a store of `lab sweep --store`; the sweep may still be running")
    parser.add_argument("--out", required=True, help="folder for the report; made if it is missing")
    within = "test if final losses are equal within so many per cent (TOST)"
    parser.add_argument("--within", metavar="PERCENT", type=float, help=within)
    parser.add_argument("--baseline", metavar="ARM", help="compare the other arms with this one (the plan's first)")


def run(args: Namespace) -> int:
    """Write the report."""
    if args.within is not None and not 0 < args.within < math.inf:
        raise UserError(f"--within {args.within:g}: use per cent of the loss, above 0")
    store = Store(args.store)
    try:
        if not any(row.state in ENDED for row in store.runs()):
            raise UserError(f"{args.store}: no run has ended well yet; wait for the first, or see its .runs folder")
        results = Results(store, args.baseline)
    finally:
        store.close()
    folder = Path(args.out)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: is a file; name a folder")
    pages = {
        "report": (_title(results), sections(results, args.within)),
        "runs": (f"{results.name}: when, where and how fast it ran", [_speed(results), _where(results)]),
    }
    refuse_link_of_others(folder / "figures")
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        written = [file for name, page in pages.items() for file in write(folder, name, *page)]
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}; mend that, or name another folder") from None
    print(f"written: {', '.join(map(str, written))}")
    return 0


def _title(results: Results) -> str:
    seeds = len({row.seed for row in results.rows})
    others = ", ".join(results.arms[1:])
    return (
        f"{results.name}: {f'{others} against {results.baseline}' if others else results.baseline}; "
        f"{counted(len(results.rates), 'learning rate')}, {counted(seeds, 'seed')}, {results.length}"
    )


def write(folder: Path, name: str, title: str, content: list[Section]) -> list[Path]:
    """Write NAME.html, NAME.md and its pictures into a folder that has a folder figures. Returns the pages."""
    pages = {folder / f"{name}.html": html(title, content), folder / f"{name}.md": markdown(title, content)}
    for path, text in pages.items():
        write_whole(path, text)
    for picture in (block for section in content for block in section.blocks if isinstance(block, Picture)):
        write_whole(folder / "figures" / f"{picture.name}.svg", picture.svg)
    return list(pages)


def html(title: str, content: list[Section]) -> str:
    """A self-contained page."""
    from jinja2 import Environment  # megatron-fp8[lab], and torch, bring it
    from markupsafe import Markup

    template = Environment(autoescape=True).from_string(_PAGE)
    return template.render(title=title, sections=content, word=Markup(' class="word"'))


def markdown(title: str, content: list[Section]) -> str:
    """The same as Markdown, with pictures in figures/."""
    parts = [f"# {_escaped(title)}"]
    for section in content:
        parts.append(f"## {_escaped(section.title)}")
        for block in section.blocks:
            if isinstance(block, Table):
                align = ["---" if i < block.labels else "---:" for i in range(len(block.heads))]
                rows = [[_escaped(cell) for cell in row] for row in (block.heads, *block.rows)]
                lines = [f"| {' | '.join(row)} |" for row in (rows[0], align, *rows[1:])]
                parts.append("\n".join(lines))
            elif isinstance(block, Picture):
                parts.append(f"![{_escaped(block.caption)}](figures/{block.name}.svg)")
            elif isinstance(block, Log):
                parts.append("\n".join("    " + line for line in block.text.splitlines()))
            elif isinstance(block, str):
                parts.append(_escaped(block))
            else:
                parts.append("\n".join(f"- {_escaped(line)}" for line in block))
    return "\n\n".join(part for part in parts if part) + "\n"


def _escaped(text: str) -> str:
    for character in "\\`*_|<[":
        text = text.replace(character, "\\" + character)
    return text


def _milliseconds(run: Result) -> float:
    """The median time of a step, without the first tenth; NaN if it was not logged."""
    if STEP_MS not in run.series:
        return math.nan
    steps, times = run.series[STEP_MS]
    made = steps - began(steps)
    return median(times[made > 0.1 * made[-1]])


def _speed(results: Results) -> Section:
    rows = []
    for cell, runs in results.cells():
        row = [*results.named(cell), number(median([_milliseconds(run) for run in runs]), ".1f")]
        pairs = healthy(results.pairs(cell)) if cell.arm != results.baseline else []
        raw = np.array([_milliseconds(base) / _milliseconds(other) for base, other in pairs])
        matched = raw * np.array([steps_ratio(base.losses, other.losses) for base, other in pairs])
        for ratios in (raw, matched):
            logs = np.log(ratios[np.isfinite(ratios)])
            row += [number(math.exp(mean(logs)), ".3f"), between(np.exp(mean_band(logs)), ".3f")]
        rows.append(row)
    labels = results.labels()
    heads = [*labels, "ms a step", "speed-up", "95 % band", "loss-matched", "95 % band"]
    text = (
        f"Against {results.baseline}, over pairs in which neither run diverged. Loss-matched: the speed-up times the "
        "ratio of steps to the same loss. Megatron logged the times while other runs may have shared the machine; for "
        "reliable speed-ups, sweep with --jobs 1."
    )
    return Section("Speed", [text, Table(heads, rows, len(labels))])


def _dates(results: Results) -> list[str]:
    """A sentence with the first run's start and the last run's end; empty if they are not known."""
    began = [row.started for row in results.rows if row.started]
    ended = [row.ended for row in results.rows if row.ended]
    if not began or not ended:
        return []
    first, last = (datetime.fromtimestamp(moment, UTC) for moment in (min(began), max(ended)))
    return [f"From {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC."]


def _where(results: Results) -> Section:
    rows = []
    for row in results.rows:
        seconds = duration(row.ended - row.started) if row.ended and row.started else "-"
        words = [row.data, f"{row.learning_rate:g}", row.arm, str(row.seed), row.state]
        rows.append([*words, str(row.attempt), seconds, row.machine or "-", row.code or "-"])
    heads = ["data", "learning rate", "arm", "seed", "state", "attempt", "time", "machine", "version"]
    section = Section("Runs", [*_dates(results), Table(heads, rows, 5)])
    for row in results.rows:
        if row.state in (FAILED, NOT_FINITE) and row.error:
            section.blocks += [f"{row.name}: {row.state}", Log(row.error)]
    return section
