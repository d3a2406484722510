"""`megatron-fp8 lab bisect --folder DIR -- COMMAND`: find the linears that cause most of an FP8 run's gap to BF16.

    megatron-fp8 lab bisect --folder DIR --steps 20 -- pretrain_gpt_fp8.py --fp8-level O2 --load checkpoints ...

The command is compared with its BF16 twin: the same run with all linears in BF16 (--fp8-bf16-layers '*'), the same seed
and data. Start from a checkpoint shortly before the trouble (--load) if there is one, else from the first step. Over
the steps that the twin made,

    gap = sqrt(mean over steps of d^2)        d = |x - y| / |y|, at most 1

where x is the run's loss (or the number that --measure names) and y the twin's; d = 1 if x is missing or not finite.
The noise floor is the gap of a run that differs from the twin only by rounding: the twin with another micro-batch size,
whose gradients are summed in another order. If a run is chaotic, the floor grows from step to step and overtakes the
gap, which does not grow. O1 against BF16 on configs/lab/levels.yaml's GPT: 41 floors over 20 steps, 2 over 60. So more
steps are not better. A gap below five floors is not searched, because the shares below would be noise.

A set of linears removes the share

    (gap of the command - gap with the set in BF16, at least the floor) / (gap of the command - noise floor)

Short runs, one after the other, find a small set that removes --share of it: first over kinds of linears, then over
layers, then over single linears. DIR keeps every run's curves. So the same command continues an interrupted bisect, and
answers at once if no run is missing.

Effects outside GEMMs (gradients and moments in FP8, the wire) are in the twin too, and therefore not in the gap. The
command's own saves are switched off.
"""

import json
import math
import re
import shlex
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....checkpoint.files import write_whole
from ....errors import UserError
from ....flags.emulate import BF16_FLAG, matches, read_operands
from ....metrics import LINEARS, LOSS, facts
from ..sweep.plan_file import flag_value, split_words
from ..sweep.progress import duration
from ..sweep.runner import NUMBERS
from .bisect_search import in_order, patterns, search
from .run import NO_DROPOUT, WRITING, add_command, curves, has_dropout, loaded, other_micro_batches, says_fp8, without

Curves = dict[str, dict[int, float]]

_TWIN = (BF16_FLAG, "*")
_ABOVE = 5.0  # noise floors that a gap must have, so that each share is known to about a quarter
LEAST_POINTS = 3  # of a measure, for a gap to mean anything
_INTERRUPTED = 130  # a shell's exit code for Ctrl-C
_LINEAR = re.compile(r"\w[\w.]*")  # a linear's whole path


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 lab bisect`."""
    parser.add_argument("--folder", required=True, help="folder for results and logs; made if it is missing")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (20)")
    parser.add_argument("--seed", type=int, help="the runs' --seed (default: the command's)")
    parser.add_argument("--measure", default=LOSS, metavar="NAME", help="loss (default), grad_norm, or a logged number")
    parser.add_argument("--share", type=float, default=0.9, help="share of the gap to remove (0.9)")
    parser.add_argument("--floor", metavar="FLAGS", help='change only rounding: --floor="--micro-batch-size 1"')
    add_command(parser)


def run(args: Namespace) -> int:
    """Find the linears and print their flags. Returns 130 if interrupted, else 0."""
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: use 1 or more")
    split_words("--floor", args.floor or "")
    if not 0 < args.share <= 1:
        raise UserError(f"--share {args.share}: use a share above 0 and at most 1")
    if not says_fp8(args.command):
        raise UserError("the command has no GEMM in FP8, nothing to bisect; add --fp8-level or --fp8-emulate to it")
    try:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder {args.folder}: {error.strerror}; name another folder") from None
    try:
        _Bisect(args).run()
    except KeyboardInterrupt:
        print("interrupted; the same command continues", flush=True)
        return _INTERRUPTED
    return 0


def gap(values: Mapping[int, float], twin: Mapping[int, float]) -> float:
    """The gap of two curves, {step: value}, as the top of the file defines it.

    Steps at which the twin is not finite, or zero, are ignored; NaN if there are no others.
    """
    squares = []
    for step, y in twin.items():
        if math.isfinite(y) and y != 0:
            x = values.get(step, math.nan)
            squares.append(min(1.0, abs(x - y) / abs(y)) ** 2 if math.isfinite(x) else 1.0)
    return math.sqrt(sum(squares) / len(squares)) if squares else math.nan


def gemm_flags(command: list[str]) -> list[list[str]]:
    """Lists of flags, each of which returns one kind of GEMM, or one emulated operand, of all linears to BF16."""
    emulate = flag_value(command, "--fp8-emulate")
    if emulate is None:
        wgrad_in_fp8 = flag_value(command, "--fp8-gemm") != "bf16" and "--no-fp8-wgrad" not in command
        return [["--no-fp8-wgrad"]] if wgrad_in_fp8 else []
    used = {operand: how for operand, how in read_operands(emulate).items() if how is not None}
    if len(used) < 2:
        return []
    kept = [",".join(f"{name}={how}" for name, how in used.items() if name != operand) for operand in used]
    return [["--fp8-emulate", text] for text in kept]


class _Results:
    """Curves of runs of the command with other flags, kept in a folder."""

    def __init__(self, args: Namespace):
        self.folder, self._args = Path(args.folder), args
        self.command = [*without(args.command, WRITING), "--log-interval", "1"]
        if args.seed is not None:
            self.command += ["--seed", str(args.seed)]
        self._file = self.folder / "bisect.json"
        self._same = {
            **{"command": self.command, "processes": args.processes, "steps": args.steps},
            "loaded": loaded(self.command),  # because --load takes the newest checkpoint in the folder
        }
        self.linears: list[str] = []  # of the whole model
        self.runs: dict[str, Curves] = {}  # by their flags
        if self._file.is_file():
            found = _read(self._file)
            if found is None:
                remedy = "take another folder"
                raise UserError(f"--folder {self.folder}: bisect.json was not written by `lab bisect`; {remedy}")
            if any(found.get(key) != value for key, value in self._same.items()):
                what = "another command, or of another checkpoint in --load"
                raise UserError(f"--folder {self.folder}: holds runs of {what}; take another folder")
            self.linears, self.runs = found["linears"], found["runs"]

    def of(self, flags: list[str], label: str) -> Curves:
        """The curves of the command with these flags; runs it if that was not done before."""
        key = shlex.join(flags)
        if key in self.runs:
            return self.runs[key]
        count, began = len(self.runs) + 1, time.monotonic()
        print(f"run {count}: {label}", flush=True)
        folder = self.folder.resolve() / "runs" / f"{count:03}"
        args = self._args
        run = curves([*self.command, *flags], args.processes, folder, args.timeout, args.steps)
        self.linears = self.linears or in_order(facts(folder / NUMBERS).get(LINEARS, ()))
        self.runs[key] = run
        content = {**self._same, "linears": self.linears, "runs": self.runs}
        write_whole(self._file, json.dumps(content))
        print(f"    {len(run.get(LOSS, ()))} steps in {duration(time.monotonic() - began)}", flush=True)
        return run


def _read(file: Path) -> dict[str, Any] | None:
    """The content of a bisect's file, with whole steps as keys; None if a bisect did not write it.

    Names of linears are checked, because they become words of a command line.
    """
    try:
        found = json.loads(file.read_text())
        runs = {
            flags: {name: {int(step): _number(value) for step, value in curve.items()} for name, curve in run.items()}
            for flags, run in found["runs"].items()
        }
        named = isinstance(found["linears"], list) and all(map(_LINEAR.fullmatch, found["linears"]))
    except (OSError, TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return None
    return {**found, "runs": runs} if named else None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    return float(value)


class _Bisect:
    def __init__(self, args: Namespace):
        self.args, self.results = args, _Results(args)
        self.measures = [args.measure, "grad_norm" if args.measure == LOSS else LOSS]
        self.kept = flag_value(args.command, BF16_FLAG)  # in BF16 in every run
        self.rows: dict[str, list[str]] = {}  # rows of the table, by label

    def run(self) -> None:
        """Make the missing runs and print the result."""
        twin = self.results.of([*_TWIN], "all linears in BF16, the twin")
        if not twin.get(self.args.measure):
            raise UserError(f"--measure {self.args.measure}: not logged; use one of {', '.join(twin) or 'nothing'}")
        self.twin = {name: twin.get(name, {}) for name in self.measures}
        if not self.results.linears:
            remedy = "give a command that trains Megatron's GPT"
            raise UserError(f"{BF16_FLAG} '*' finds no linear in the command's model; {remedy}")
        self.linears = self.results.linears
        if self.kept is not None:
            kept = tuple(self.kept.split(","))
            self.linears = [name for name in self.linears if not matches(kept, name)]
        if not self.linears:
            raise UserError(f"{BF16_FLAG} {self.kept}: all linears of the command are in BF16; remove it")
        self.whole = self._gap([], "the command")
        if math.isnan(self.whole):
            raise UserError("the BF16 twin itself is not finite; take an earlier --load, or a lower --lr")
        self.floor, remark = self._find_floor()
        print(f"gap of {self.args.measure} {self.whole:.3g}, noise floor {self.floor:.3g}", flush=True)
        if self.whole <= _ABOVE * self.floor or self.whole == 0:
            self._print_table()
            near = f"The gap is less than {_ABOVE:g} times the noise floor: a search in it would find noise."
            print(*filter(None, [near, remark]))
            if steps := self._clear_steps():
                print(f"Over {steps} steps it is {2 * _ABOVE:g} times it: take --steps {steps}, another --folder.")
            else:
                print("Start nearer to the trouble (--load), or with other data (--seed).")
            return
        by_gemm = [(flags, self._removed(flags, shlex.join(flags))) for flags in gemm_flags(self.args.command)]
        chosen = frozenset(search(self.linears, self._removed_by, self.args.share))
        self._print_table()
        self._conclude(chosen, [(flags, share) for flags, share in by_gemm if share >= self.args.share], remark)

    def _find_floor(self) -> tuple[float, str]:
        """The noise floor, and a remark about it."""
        flags = self._floor_flags()
        if flags is None:
            return 0.0, "The noise floor is not known, because no other micro-batch size fits: give --floor FLAGS."
        floor = self._gap([*_TWIN, *flags], f"the twin with {shlex.join(flags)}")
        if self.args.floor is None and has_dropout(self.args.command):
            return floor, f"The floor has other dropout masks: add {shlex.join(NO_DROPOUT)}."
        return floor, ""

    def _floor_flags(self) -> list[str] | None:
        if self.args.floor is not None:
            return split_words("--floor", self.args.floor)
        return other_micro_batches(self.results.command, self.args.processes)

    def _clear_steps(self) -> int | None:
        """The largest number of the steps made over which the gap is far above the floor; None if there is none."""
        flags = self._floor_flags()
        if flags is None:
            return None
        twin = self.twin[self.args.measure]
        command, floor = (self.results.of(f, "").get(self.args.measure, {}) for f in ([], [*_TWIN, *flags]))
        logged = sorted(twin)  # some measures are not logged at every step
        for count in range(len(logged) - 1, LEAST_POINTS - 1, -1):
            first = {step: twin[step] for step in logged[:count]}
            if gap(command, first) > 2 * _ABOVE * gap(floor, first):
                return logged[count - 1] - min(self.results.of([*_TWIN], "")[LOSS]) + 1
        return None

    def _gap(self, flags: list[str], label: str) -> float:
        """The gap of a run; adds its row to the table."""
        run = self.results.of(flags, label)
        gaps = [gap(run.get(name, {}), curve) for name, curve in self.twin.items()]
        self.rows[label] = [f"{value:.3g}" for value in gaps]
        return gaps[0]

    def _removed(self, flags: list[str], label: str) -> float:
        """The share of the command's gap that these flags remove; adds it to the row."""
        before = len(self.results.runs)
        share = (self.whole - max(self.floor, self._gap(flags, label))) / (self.whole - self.floor)
        self.rows[label].append(f"{share:.0%}")
        if len(self.results.runs) > before:
            print(f"    {share:.0%} of the gap removed", flush=True)
        return share

    def _removed_by(self, chosen: frozenset[str]) -> float:
        return self._removed(self._flags(chosen), f"{patterns(chosen, self.linears)} ({len(chosen)})")

    def _flags(self, chosen: frozenset[str]) -> list[str]:
        return [BF16_FLAG, ",".join(filter(None, [self.kept, patterns(chosen, self.linears)]))]

    def _print_table(self) -> None:
        print(f"\nroot mean square of the relative difference from the twin, {self.args.steps} steps")
        width = max(map(len, self.rows)) + 1
        for label, cells in {"in BF16 (linears)": [*self.measures, "removed"], **self.rows}.items():
            print(f"{label:<{width}}" + "".join(f"{cell:>11}" for cell in cells))
        print(flush=True)

    def _conclude(self, chosen: frozenset[str], by_gemm: list[tuple[list[str], float]], remark: str) -> None:
        total = len(self.linears)
        removed = 1.0 if len(chosen) == total else self._removed_by(chosen)
        print(f"{len(chosen)} of {total} linears in BF16 remove {removed:.0%} of the gap of {self.args.measure}:")
        print(shlex.join(self._flags(chosen)))
        if 2 * len(chosen) > total:
            print("The gap is spread over the model. No small part explains it; a finer format or recipe may close it.")
        for flags, share in by_gemm:
            print(f"So does {shlex.join(flags)}, for all linears: {share:.0%}.")
        if remark:
            print(remark)
