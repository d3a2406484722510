"""FP8-LM's tables beside the cost model's figures and the measurements of this repository.

    megatron-fp8 table 5                              throughput and memory: published, modelled, deviation
    megatron-fp8 table 5 --format markdown --figure table5.svg
    megatron-fp8 table 5 --run --te-path DIR          first measure the paper's 7B and 13B on this machine's GPUs
    megatron-fp8 table 7 | 8                          communication of activations; memory over GPUs

The model's rows are for the paper's GPUs, H100 80 GB. A factor on time and an offset of memory come from the paper's
BF16 rows alone; the rest is predicted (tools/perf/paper.py). With --run each system trains in its own process, one
after the other, at one micro-batch and at the largest that fits, without a cap and under --cap-gb. --results holds all
measurements so far, in the columns of Megatron Bridge's performance tables. docs/estimate.md has an example.

Text fits a terminal: several figures share a cell, and values that all rows share are printed once above them. Markdown
and CSV have a column for every figure. A CSV is one table: with --results, that of the measurements.
"""

import statistics
from argparse import ArgumentParser, Namespace
from itertools import pairwise

from ...errors import UserError
from . import hardware, table_run
from .figures import Bar, bars
from .output import FORMATS, Rows, alike, check_figure, merged, paragraph, render
from .paper import Row, rows

_TITLES = {
    "5": "FP8-LM, Table 5: 32 GPUs for 7B and 13B, 128 for 175B",
    "7": "FP8-LM, Table 7: communication of activations, GiB a micro-batch",
    "8": "FP8-LM, Table 8: peak memory of the emptiest and the fullest GPU, GB",
}
# As text: {a column's title: the columns joined under it}.
_TEXT_5 = {
    "model": ["model"],
    "system": ["system"],
    "MBS": ["MBS"],
    "samples/s": ["samples/s", "samples/s: model", "samples/s: +-"],
    "TFLOP/s": ["TFLOP/s", "TFLOP/s: model"],
    "memory GB": ["memory GB", "memory GB: model", "memory GB: +-"],
    "sent GiB": ["weights sent GiB", "weights sent GiB: model"],
    "MFU %": ["MFU %", "MFU %: model"],
    "comm %": ["comm %", "bare comm %: model"],
}
_MS = "ms, least, most, model, +-"
_TEXT_MEASURED = {
    "System": ["System"],
    **{name: [name] for name in table_run.SETTING},
    "MBS": ["MBS"],
    "tokens/s": ["Tokens/sec/GPU"],
    "TFLOP/s": ["Model TFLOP/sec/GPU"],
    _MS: ["ms", "ms least", "ms most", "ms: model", "ms: +-"],
    "peak GB, model, +-": ["Peak GB", "GB: model", "GB: +-"],
}


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 table`."""
    parser.add_argument("table", choices=_TITLES)
    parser.add_argument("--hardware", default="h100-80gb-sxm", metavar="NAME", help="for the model (h100-80gb-sxm)")
    parser.add_argument("--format", choices=FORMATS, default="text")
    parser.add_argument("--figure", metavar="FILE", help="also save bars of the figures: .svg, .png or .pdf")
    table_run.add_arguments(parser)


def run(args: Namespace) -> int:
    """Measure if --run is given, and print. Returns 1 if a run failed."""
    table_run.check(args)
    check_figure(args.figure)
    if (args.run or args.results) and args.table != "5":
        raise UserError(f"table {args.table}: only table 5 has measured rows; remove --run and --results")
    found = rows(hardware.load(args.hardware))
    code = table_run.run(args) if args.run else 0
    measured = table_run.results(args) if args.table == "5" else []  # before any output: it may fail
    if args.format == "csv" and args.results:  # a CSV is one table
        print(render(measured, args.format))
        return code
    print(paragraph(f"{_TITLES[args.table]}; model: {args.hardware}", args.format) + "\n")
    lines: Rows = {"5": _table_5, "7": _table_7, "8": _table_8}[args.table](found)
    if args.table == "5" and args.format == "text":
        print(paragraph(_said_once(lines), args.format) + "\n")
        lines = merged(lines, _TEXT_5)
    if args.format == "csv":
        for above, line in pairwise(lines):  # our O3 is not in the paper; it has the model of the row above
            line["model"] = line["model"] or above["model"]
    print(render(lines, args.format))
    if args.table == "5":
        print("\n" + paragraph(_deviations(found), args.format))
        _print_measured(measured, args.format)
    if args.figure:
        _draw(args.table, args.figure, found, measured)
    return code


def _said_once(lines: Rows) -> str:
    """The line above table 5's text: values that its rows leave out."""
    layouts = {line["model"]: line["TP/PP/DP"] for line in lines if line["model"]}
    peaks = {line["peak TFLOP/s"]: "BF16" if line["system"] == "BF16" else "FP8" for line in lines}
    return (
        "In a cell: the paper's figure, the model's, its deviation. MFU is of "
        + " and ".join(f"{peak} TFLOP/s ({numbers})" for peak, numbers in peaks.items())
        + "; comm %: all in the paper, bare in the model. TP/PP/DP: "
        + ", ".join(f"{model} {layout}" for model, layout in layouts.items())
        + "."
    )


def _print_measured(results: Rows, form: str) -> None:
    said = "Measured on hardware at hand, a table for each call: one host and one commit"
    if results and form == "csv":
        print("\n" + paragraph(f"{said}: --results {table_run.RESULTS}", form))
        return
    if not results or form != "text":
        print("\n" + paragraph(said + ":" if results else "Measured on hardware at hand: nothing yet (--run)", form))
        if results:
            print("\n" + render(results, form))
        return
    calls = [tuple(line[name] for name in table_run.CALL) for line in results]
    print("\n" + paragraph(f"{said}.", form))
    for one in dict.fromkeys(calls):
        lines = [line for line, of in zip(results, calls, strict=True) if of == one]
        same = alike(lines, table_run.SETTING)
        settings = "; ".join(f"{name} {value}" for name, value in same.items() if value)
        print("\n" + paragraph(f"All rows: {settings}. Tokens and TFLOP/s are a GPU's.", form) + "\n")
        shown = merged(lines, {title: names for title, names in _TEXT_MEASURED.items() if title not in same})
        for cells, line in zip(shown, lines, strict=True):
            cells[_MS] = cells[_MS] or line["Outcome"]  # without a figure, say why
        print(render(shown, form))


def _names(row: Row) -> dict[str, str]:
    w, p = row.workload, row.published
    return {
        "model": p.model if p else "",
        "system": p.system if p else f"our {w.system.title}",
        "TP/PP/DP": f"{w.tensor}/{w.pipeline}/{w.data}",
        "MBS": str(w.micro_batch),
    }


def _pair(row: Row, name: str, form: str, title: str) -> dict[str, str]:
    """Cells: the published figure, the model's, the deviation."""
    theirs, deviation = getattr(row.published, name, None), row.deviation(name)
    return {
        title: format(theirs, form) if theirs else "",
        f"{title}: model": format(getattr(row, name), form),
        "+-": f"{deviation:+.1%}" if deviation is not None else "",
    }


def _table_5(found: list[Row]) -> list[dict[str, str]]:
    listed = []
    for row in found:
        cells = _names(row)
        for name, form, title in (
            ("samples", ".1f", "samples/s"), ("tflops", ".0f", "TFLOP/s"), ("memory_gb", ".1f", "memory GB"),
            ("volume", ".1f", "weights sent GiB"),
        ):  # fmt: skip
            pair = _pair(row, name, form, title)
            deviation = pair.pop("+-")
            cells |= pair
            if name in ("samples", "memory_gb"):
                cells[f"{title}: +-"] = deviation
        peak = row.estimate.hardware.peak_fp8_tflops if row.workload.system.fp8 else 989.5
        cells["MFU %"] = f"{row.published.mfu:.1f}" if row.published else ""
        cells["MFU %: model"] = f"{100 * row.tflops / peak:.1f}"
        cells["peak TFLOP/s"] = f"{peak:g}"
        cells["comm %"] = f"{row.published.comm:.1f}" if row.published else ""
        cells["bare comm %: model"] = f"{100 * row.estimate.bare:.1f}"
        listed.append(cells)
    return listed


def _deviations(found: list[Row]) -> str:
    fp8 = [row for row in found if row.published and row.published.system != "BF16"]
    fit = found[0].fit

    def said(name: str, bound: float) -> str:
        inside = sum(abs(row.deviation(name) or 0) <= bound for row in fp8)
        worst = max(fp8, key=lambda row: abs(row.deviation(name) or 0))
        p, most = worst.published, worst.deviation(name)
        assert p is not None and most is not None
        worst_of = f"{p.model} {p.system}, MBS {p.micro_batch}"
        return f"{inside} of {len(fp8)} within {bound:.0%} (worst {most:+.1%}: {worst_of})"

    return (
        f"From the BF16 rows: time x {fit.time:.2f}, memory {fit.memory:+.1f} GB. FP8 rows, predicted: samples/s "
        f"{said('samples', 0.15)}; memory {said('memory_gb', 0.10)}."
    )


def _table_7(found: list[Row]) -> list[dict[str, str]]:
    of = [row for row in found if row.published and row.published.activation_gb]
    return [_names(row) | _pair(row, "activation_gb", ".4f", "GiB")
            | {"rate %": f"{row.published.activation_comm:.1f}" if row.published else ""} for row in of]  # fmt: skip


def _table_8(found: list[Row]) -> list[dict[str, str]]:
    listed = []
    for row in found:
        if row.published is None or row.published.least_gb is None or row.published.most_gb is None:
            continue
        least, most = row.least_and_most_gb
        listed.append(_names(row) | {
            "least GB": f"{row.published.least_gb:.2f}", "most GB": f"{row.published.most_gb:.2f}",
            "least: model": f"{least:.2f}", "most: model": f"{most:.2f}",
            "most: +-": f"{most / row.published.most_gb - 1:+.1%}",
        })  # fmt: skip
    return listed


def _draw(table: str, path: str, found: list[Row], results: Rows) -> None:
    """Table 5 is drawn in tokens a second and GPU, because the measurements, drawn beside it, have other layouts."""
    name, label = {"5": ("samples", "tokens/s a GPU"), "7": ("activation_gb", "GiB"), "8": ("memory_gb", "GB")}[table]
    needed = {"5": "samples", "7": "activation_gb", "8": "most_gb"}[table]
    listed, model = [], ""
    for row in found:
        named = _names(row)
        model = named["model"] or model  # our O3 is not in the paper; it has the model of the row above
        if table == "5" or getattr(row.published, needed, None):
            unit = row.workload.sequence / row.workload.gpus if table == "5" else 1
            theirs = getattr(row.published, name, None)
            listed.append(Bar(
                f"{model} {named['system']}, MBS {named['MBS']}", named["system"],
                theirs and theirs * unit, getattr(row, name) * unit,
            ))  # fmt: skip
    panels = {_TITLES[table]: listed}
    for machine in dict.fromkeys(line["GPU"] for line in results):
        title = f"Measured on {machine}; a line: least and most of several"
        panels[title] = _measured_bars([line for line in results if line["GPU"] == machine])
    bars(path, panels, "published, measured" if results else "published", label)


def _measured_bars(results: Rows) -> list[Bar]:
    """Bars in tokens/s a GPU of the successful runs without a cap; several runs of one case become their median."""
    cases: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for line in results:
        if line["Outcome"] == "ok" and not line["Cap GB"]:
            cases.setdefault((line["Model"], line["#-GPUs"], line["System"], line["MBS"]), []).append(line)
    found = []
    for (model, gpus, system, micro_batch), lines in cases.items():
        speeds = [float(line["Tokens/sec/GPU"]) for line in lines]
        ms = [float(line["ms: model"]) for line in lines if line.get("ms: model")]
        tokens = int(lines[0]["GBS"]) * int(lines[0]["Sequence Length"]) / int(gpus)
        found.append(Bar(
            f"{model} {system}, MBS {micro_batch}, {gpus} GPU{'s' * (gpus != '1')}", system, statistics.median(speeds),
            1e3 * tokens / ms[0] if ms else None, (min(speeds), max(speeds)) if len(speeds) > 1 else None,
        ))  # fmt: skip
    return found
