"""Compare runs: losses, gradient norms, step times, memory; and check whether two runs are equal.

    megatron-fp8 compare before.jsonl after.jsonl                        the others are compared with the first
    megatron-fp8 compare O0=bf16.log O3=o3.log --steps 1:200 --figure loss.svg
    megatron-fp8 compare run.jsonl --export-result expected.jsonl        write losses and norms, like torchtitan
    megatron-fp8 compare run.jsonl --import-result expected.jsonl --assert-equal

A run is [NAME=]PATH: a file that MEGATRON_FP8_METRICS names (every digit), Megatron's log (seven), or TensorBoard's
folder (FP32). Runs of two forms are compared to the digits of the coarser. A loss in a log or metrics file is the mean
of --log-interval steps; in TensorBoard it is one step's. If runs differ in that, a line says so, and --assert-equal and
--tolerance are refused. The second loss that Megatron logs after a start, resumed or not, is a mean that contains the
first loss again. A loss is left out, and a line says so, if it is not the mean of the same steps as the other run's.

--assert-equal compares losses and gradient norms at the same steps, and the validation losses that both runs have. Exit
code 0: no difference; 1: a difference, --tolerance exceeded, or no common step; 2: a mistake in the command.
"""

import json
import math
import statistics
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ...errors import UserError
from ...flags.flag import whole_number
from ...metrics import LOSS, SKIPPED, STEP, STEP_MS, VALIDATION_LOSS
from .figures import curves
from .output import FORMATS, check_figure, render
from .runs import GRAD_NORM, MEAN_OF, Run, read, same

_WARM_UP = 3  # steps whose time does not count


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 compare`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="[NAME=]PATH of a metrics file, a log or a folder")
    parser.add_argument("--steps", metavar="A:B", help="compare only these; either end may be left out")
    parser.add_argument("--assert-equal", action="store_true", help="require equal losses and norms at the same steps")
    parser.add_argument("--tolerance", type=float, metavar="X", help="largest relative difference of losses allowed")
    parser.add_argument("--export-result", metavar="FILE", help="write the first run's losses and norms to FILE")
    parser.add_argument("--import-result", metavar="FILE", help="compare with an exported file")
    parser.add_argument("--figure", metavar="FILE", help="curves of losses and of their differences")
    parser.add_argument("--format", choices=FORMATS, default="text")


def run(args: Namespace) -> int:
    """Print the comparison; returns the exit code."""
    check_figure(args.figure)
    words = [args.import_result] * bool(args.import_result) + args.runs
    runs = [read(word) for word in words]
    _tell_apart(runs, words)
    if args.tolerance is not None and not args.tolerance >= 0:
        raise UserError(f"--tolerance {args.tolerance}: use 0 or more")
    if len(runs) < 2 and (args.assert_equal or args.tolerance is not None):
        raise UserError("--assert-equal, --tolerance: there is one run; give another, or --import-result FILE")
    first, others = runs[0], runs[1:]
    said = [line for other in others if (line := unlike(first, other))]
    if said and (args.assert_equal or args.tolerance is not None):
        raise UserError(f"--assert-equal, --tolerance: {said[0]}; log all at one --log-interval (TensorBoard has 1)")
    _keep(runs, args.steps)
    if args.export_result:
        _export(runs[-1 if args.import_result else 0], args.export_result)
    rows = [row(run, first) for run in runs]
    columns = list(dict.fromkeys(column for cells in rows for column in cells))
    print(render([{column: cells.get(column, "") for column in columns} for cells in rows], args.format))
    said += [line for other in others for line in left_out(first, other)]
    if slow := [run.name for run in runs if run.on_cpu and run.series(STEP_MS)]:
        said.append(f"{', '.join(slow)}: trained on a CPU, which emulates FP8; its times do not tell how fast a GPU is")
    found = [line for other in others for line in differences(first, other)] if args.assert_equal else []
    found += [f"{other.name}: no step in common with {first.name}"
              for other in others if not _common(first, other, LOSS)]  # fmt: skip
    if args.tolerance is not None:
        for other in others:
            largest = _largest(first, other, LOSS)
            within = largest <= args.tolerance  # False if one is NaN
            line = f"{other.name}: losses differ by {largest:.3e}, {'within' if within else 'more than'} --tolerance "
            (said if within else found).append(f"{line}{args.tolerance:g}")
    said += found or ["equal"] * args.assert_equal
    if said:
        comment = "# " * (args.format == "csv")  # like `table`, for programs that read the rows
        print("\n" + "\n".join(comment + line for line in said))
    if args.figure:
        _draw(runs, args.figure)
    return int(bool(found))


def row(run: Run, first: Run) -> dict[str, str]:
    """A run's cells, with its differences from the first run."""
    losses, norms = run.series(LOSS), run.series(GRAD_NORM)
    times = [ms for step, ms in run.series(STEP_MS).items() if step > min(run.steps) + _WARM_UP - 1]
    validations = {name: list(run.series(name).values())[-1] for name in run.validations()}
    tail = list(losses.values())[-max(1, len(losses) // 10) :]
    cells = {
        "run": run.name, "form": run.form, "steps": f"{min(losses)}..{max(losses)} ({len(losses)})",
        "last loss": f"{tail[-1]:.6f}", "of the last tenth": f"{statistics.fmean(tail):.6f}",
        "last norm": f"{list(norms.values())[-1]:.4f}" if norms else "",
        "ms a step": f"{statistics.median(times):.1f}" if times else "",
        "GB held / peak": f"{run.memory[0]:.1f} / {run.memory[1]:.1f}" if run.memory else "",
        "skipped": f"{sum(run.series(SKIPPED).values()):.0f}" if run.series(SKIPPED) else "",
        **{"validation" + name.removeprefix(VALIDATION_LOSS).replace("_", " ", 1): f"{loss:.6f}"
           for name, loss in validations.items()},
    }  # fmt: skip
    if run is first:
        return cells | {"loss: largest, mean difference": "", "norm: largest": "", "x faster": ""}
    before = [ms for step, ms in first.series(STEP_MS).items() if step > min(first.steps) + _WARM_UP - 1]
    common = _common(first, run, LOSS)
    signed = [run.steps[step][LOSS] - first.steps[step][LOSS] for step in common]
    return cells | {
        "loss: largest, mean difference": f"{_largest(first, run, LOSS):.2e} relative, "
        f"{statistics.fmean(signed):+.2e}" if signed else "no step in common",
        "norm: largest": f"{_largest(first, run, GRAD_NORM):.2e}" if _common(first, run, GRAD_NORM) else "",
        "x faster": f"{statistics.median(before) / statistics.median(times):.3f}" if before and times else "",
    }  # fmt: skip


def unlike(first: Run, other: Run) -> str | None:
    """A line that says why the runs' losses cannot be compared; None if they can, or if it is not known."""
    if None in (first.interval, other.interval) or first.interval == other.interval:
        return None
    mine, theirs = (f"means of {run.interval} steps" if run.interval != 1 else "of single steps"
                    for run in (first, other))  # fmt: skip
    return f"{other.name}: its losses are {theirs}, {first.name}'s are {mine}"


def differences(first: Run, other: Run) -> list[str]:
    """A line for each difference between the runs."""
    found = []
    for name in (LOSS, GRAD_NORM, *first.validations()):
        mine, theirs = first.series(name), other.series(name)
        if name != LOSS and not (mine and theirs):
            continue
        only = (mine.keys() ^ theirs.keys()) - _within(first) - _within(other)
        if name in (LOSS, GRAD_NORM) and only:
            found.append(f"{other.name}: {name} at steps {_listed(sorted(only))} in one of the two only")
        unequal = [
            step for step in _common(first, other, name)
            if not same(*(first.rounded(name, other.rounded(name, value)) for value in (mine[step], theirs[step])))
        ]  # fmt: skip
        if unequal:
            step = unequal[0]
            pair = f"{mine[step]!r} and {theirs[step]!r}"
            found.append(f"{other.name}: {name} differs at {len(unequal)} steps, first at step {step}: {pair}")
    return found


def left_out(first: Run, other: Run) -> list[str]:
    """A line for the losses left out because they are means of other steps; none if no loss can be compared."""
    if unlike(first, other):
        return []
    steps = sorted((first.series(LOSS).keys() & other.series(LOSS).keys()) - {*_common(first, other, LOSS)})
    steps += sorted(_within(first) & other.series(LOSS).keys() | _within(other) & first.series(LOSS).keys())
    if not steps:
        return []
    return [f"{other.name}: loss at step {_listed(steps)} not compared: either it or {first.name}'s is a mean with "
            "earlier steps in it"]  # fmt: skip


def _within(run: Run) -> set[int]:
    """Steps that have no line of their own: a later line's loss is their mean."""
    means = {step: length for step, length in run.mean_of.items() if length > 1}
    return {step - i for step, length in means.items() for i in range(1, length)} - run.steps.keys()


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def _common(first: Run, other: Run, name: str) -> list[int]:
    """Steps at which both runs have the value. For losses: only means of the same steps, as far as that is known."""
    found = first.series(name).keys() & other.series(name).keys()
    if name == LOSS:
        one, two = first.mean_of, other.mean_of
        found = {step for step in found if one.get(step, two.get(step)) == two.get(step, one.get(step))}
    return sorted(found)


def _largest(first: Run, other: Run, name: str) -> float:
    """The largest relative difference; infinite if only one of the two is finite; NaN without a common step."""
    found = [math.nan] if not _common(first, other, name) else []
    for step in _common(first, other, name):
        a, b = first.steps[step][name], other.steps[step][name]
        if same(a, b):
            found.append(0.0)
        elif math.isfinite(a) and math.isfinite(b):
            found.append(abs(b - a) / max(abs(a), 1e-30))
        else:
            return math.inf
    return max(found)


def _keep(runs: list[Run], steps: str | None) -> None:
    """Leave only the steps A:B."""
    if steps is None:
        return
    low, colon, high = steps.partition(":")
    first, last = whole_number(low or "0"), whole_number(high) if high else math.inf
    if not colon or first is None or last is None:
        raise UserError(f"--steps {steps}: use A:B, such as 10:200, :200 or 10:")
    for run in runs:
        run.steps = {step: values for step, values in run.steps.items() if first <= step <= last}
        if not run.series(LOSS):
            raise UserError(f"--steps {steps}: {run.name} has no loss there; name steps that it has")


def _export(run: Run, path: str) -> None:
    lines = []
    for step, values in sorted(run.steps.items()):
        kept = {name: values[name] for name in (LOSS, GRAD_NORM, *run.validations()) if name in values}
        if LOSS in kept and step in run.mean_of:
            kept[MEAN_OF] = run.mean_of[step]
        lines += [json.dumps({STEP: step, **kept})] if kept else []
    try:
        Path(path).write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise UserError(f"--export-result {path}: {error.strerror}; name a file in a folder that is there") from None


def _tell_apart(runs: list[Run], words: list[str]) -> None:
    """Rename runs that share a name: to their paths, or with numbers if they are one file.

    Raises UserError if the user gave the same name twice.
    """
    for name in [name for name, count in Counter(run.name for run in runs).items() if count > 1]:
        alike = [(run, word) for run, word in zip(runs, words, strict=True) if run.name == name]
        if any(word.startswith(f"{name}=") for _, word in alike):
            raise UserError(f"{name}: two runs have this name; give each its own, as NAME={Path(words[-1]).name}")
        for i, (run, word) in enumerate(alike):
            again = sum(word == other for _, other in alike[:i])
            other_files = len({word for _, word in alike}) > 1
            run.name = (word if other_files else name) + (f" ({again + 1})" if again else "")


def _draw(runs: list[Run], path: str) -> None:
    first, *others = runs
    gaps = {run.name: {step: run.steps[step][LOSS] - first.steps[step][LOSS] for step in _common(first, run, LOSS)}
            for run in others}  # fmt: skip
    curves(path, {run.name: run.series(LOSS) for run in runs}, gaps)
