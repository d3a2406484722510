"""Tell a bug from rounding: run the command with changes that must not change the result, or only by rounding.

    check             the change                                                         must be
    repeat            none                                                               equal
    recompute         full recomputation of activations, on or off                       equal
    tp gather         sequence parallelism gathers activations in FP8, or in BF16        within 2^-10 of a number:
                                                                                         a BF16 gather rounds twice
    save and reload   half of the steps, a checkpoint, the other half from it            equal
    overlap           gradients and weights travel beside computation, or not            equal with two data-parallel
                                                                                         ranks, else within rounding
    micro-batches     half the size, or a smaller divisor; twice the size if it is 1     within rounding

Equal: losses and gradient norms of all steps, bit for bit (a norm covers every gradient). If not even `repeat` is
equal, the other checks that need equality cannot show anything and are skipped; --deterministic-mode makes it equal.

Within rounding: the largest difference of the losses, and that of the norms, is at most

    limit = 64 d    at least 2^-12 v, at most 0.05 v

where d is the effect of the same change on the BF16 twin (the command with BF16 GEMMs, FP32 gradients and FP32 states)
and v the number itself. E5M2 rounds by up to 2^-3 of a number, BF16 by up to 2^-9: 64 times less. The twin's losses may
be equal, because its rows are rounded alike in any split, while an FP8 scale belongs to one micro-batch. With 512
positions, the tests' model, losses at O2 and O3 moved by up to 3e-5 of v; hence the 2^-12. A bug, such as a micro-batch
that counts twice, changes the norm by a large part of itself, and the twin may have it too; hence the 5 %. All four
runs are without dropout, whose masks depend on the split. (With more than two ranks stock Megatron adds FP32 gradients
in an order that depends on its buckets.)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from ....errors import UserError
from ....flags.level import CELLS, is_stock
from ....metrics import LOSS
from ..sweep.plan_file import flag_value
from .run import NO_DROPOUT, Refused, curves, has_dropout, other_micro_batches, replicas, says_fp8, size_of, without

Curves = dict[str, dict[int, float]]
_COMPARED = (LOSS, "grad_norm")
_ROUNDING = 64
_LEAST, _MOST = 2.0**-12, 0.05  # bounds of a limit, as shares of the number
_TWICE = 2.0**-10  # share of a number, for the second rounding of a BF16 gather; the tests' model moved by 2.8e-4
_RECOMPUTE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-activations")
_LOADING = (
    *("--load", "--finetune", "--ckpt-step", "--pretrained-checkpoint", "--no-load-optim", "--no-load-rng"),
    *("--no-save-optim", "--no-save-rng"),
)
_OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
_TWIN = "--fp8-level O1 --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32".split()


class Skipped(Exception):
    """The check says nothing about this command; the text is the reason."""


@dataclass(frozen=True)
class Finding:
    """The largest difference that a check found, its number and step, and the limit."""

    difference: float
    name: str
    step: int
    limit: float = 0.0

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit

    def __str__(self) -> str:
        what = self.name.replace("_", " ")
        allowed = f"; allowed {self.limit:.3g}" if self.limit else ""
        return f"largest difference {self.difference:.3g} ({what}, step {self.step}){allowed}"


@dataclass
class Trials:
    """The runs of a command that are compared; each is made once.

    Attributes:
        command: the user's, without the flags that write.
        processes, timeout: of a run, see trial/run.py's curves.
        first, steps: the command's first step, and how many steps to make.
        folder: for the runs.
    """

    command: Sequence[str]
    processes: int
    timeout: float | None
    first: int
    steps: int
    folder: Path

    def __post_init__(self) -> None:
        self._made: dict[tuple[str, ...], Curves] = {}
        self._numbers = count()

    def run(self, command: Sequence[str] | None = None, steps: int | None = None, again: bool = False) -> Curves:
        """{name: {step: value}} of the loss and the gradient norm of a run.

        command: default: the user's. steps: default: `self.steps`. again: run even if this run was made before.
        """
        words = (*(self.command if command is None else command), "--log-interval", "1")
        if words not in self._made or again:
            folder = self.folder / f"run{next(self._numbers)}"
            found = curves(words, self.processes, folder, self.timeout, steps or self.steps)
            self._made[words] = {name: curve for name, curve in found.items() if name in _COMPARED}
        return self._made[words]

    def size(self, flag: str) -> int:
        """A flag's number; 1 if the command does not have it."""
        return size_of(self.command, flag) or 1

    @property
    def data_parallel(self) -> int:
        """The number of data-parallel ranks."""
        return replicas(self.command, self.processes)

    @property
    def in_fp8(self) -> bool:
        """Whether the command has a level, or emulates FP8."""
        return says_fp8(self.command)

    def twin(self) -> list[str]:
        """The command in BF16: the same layers and engine, with no further rounding."""
        if not self.in_fp8:
            raise Skipped("the command has no level: it is its own BF16 twin")
        ours = {word.partition("=")[0] for word in self.command if word.startswith("--fp8-")} - {"--fp8-attention"}
        return [*without(self.command, ours), *_TWIN]


def differences(one: Curves, other: Curves) -> list[Finding]:
    """For each number its largest difference between two runs, with the step; infinite if one run lacks a step."""
    found = []
    for name in sorted(one.keys() | other.keys()):
        mine, its = one.get(name, {}), other.get(name, {})
        by_step = {step: _apart(mine.get(step), its.get(step)) for step in sorted(mine.keys() | its.keys())}
        step = max(by_step, key=by_step.__getitem__)
        found.append(Finding(by_step[step], name, step))
    return found


def _apart(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return math.inf
    same = a == b or (math.isnan(a) and math.isnan(b))
    return 0.0 if same else abs(a - b) if math.isfinite(a - b) else math.inf


def _worst(findings: list[Finding]) -> Finding:
    """The finding that is farthest beyond, or nearest to, its limit."""
    return max(findings, key=lambda f: (not f.passed, f.difference / f.limit if f.limit else f.difference))


def _equal(one: Curves, other: Curves) -> Finding:
    return _worst(differences(one, other))


def _finite_where(run: Curves, other: Curves) -> bool:
    """Whether a run has a finite number at every step at which the other has one."""
    return all(math.isfinite(run.get(name, {}).get(k, math.nan)) for name, curve in other.items() for k in curve)


def _within_rounding(trials: Trials, change: Callable[[Sequence[str]], list[str]]) -> Finding:
    def both(command: Sequence[str]) -> tuple[Curves, Curves]:
        plain = [*command, *(NO_DROPOUT if has_dropout(command) else ())]
        return trials.run(plain), trials.run(change(plain))

    twin = trials.twin()
    ours = both(trials.command)
    twins = both(twin)
    if not all(_finite_where(run, ours[0]) for run in twins):
        raise Skipped("the BF16 twin is not finite, or ends early; take an earlier --load, or a lower --lr")
    its = {f.name: f.difference for f in differences(*twins)}
    findings = []
    for f in differences(*ours):
        value = abs(ours[0].get(f.name, {}).get(f.step, math.nan))
        limit = min(max(_ROUNDING * its.get(f.name, 0.0), _LEAST * value), _MOST * value)
        findings.append(Finding(f.difference, f.name, f.step, limit if math.isfinite(value) else 0.0))
    return _worst(findings)


def repeat(trials: Trials) -> Finding:
    """Run the command twice."""
    once = trials.run()
    return _equal(once, trials.run(again=True))


def recompute(trials: Trials) -> Finding:
    """Run with and without full recomputation."""
    changed = without(trials.command, _RECOMPUTE)
    if flag_value(tuple(trials.command), "--recompute-granularity") != "full":
        changed += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    return _equal(trials.run(), trials.run(changed))


def tp_gather(trials: Trials) -> Finding:
    """Gather activations in FP8 and in BF16."""
    command, flag = tuple(trials.command), "--fp8-tp-gather"
    level = flag_value(command, "--fp8-level")
    if trials.size("--tensor-model-parallel-size") == 1 or "--sequence-parallel" not in command:
        raise Skipped("no tensor and sequence parallelism")
    in_bf16 = flag_value(command, "--fp8-emulate") or flag_value(command, "--fp8-gemm") == "bf16"
    if level is None or is_stock(level) or in_bf16:
        raise Skipped("no FP8 GEMMs")
    cell = next(cell for cell in CELLS if cell.flag == flag)
    other = "bf16" if (flag_value(command, flag) or cell.at(level)) == "fp8" else "fp8"
    mine = trials.run()
    found = differences(mine, trials.run([*command, flag, other]))
    values = [abs(mine.get(f.name, {}).get(f.step, math.nan)) for f in found]
    limits = [_TWICE * value if math.isfinite(value) else 0.0 for value in values]
    return _worst([replace(f, limit=limit) for f, limit in zip(found, limits, strict=True)])


def save_and_reload(trials: Trials) -> Finding:
    """Run half of the steps, save, and run the rest from the checkpoint."""
    half, checkpoint = trials.steps // 2, str(trials.folder / "checkpoint")
    last = str(trials.first + half - 1)
    saving = ["--save", checkpoint, "--save-interval", last, "--exit-interval", last]  # exits by itself after saving
    before = trials.run([*without(trials.command, ("--no-save-optim", "--no-save-rng")), *saving], steps=half)
    after = trials.run([*without(trials.command, _LOADING), "--load", checkpoint], steps=trials.steps - half)
    names = before.keys() | after.keys()
    return _equal(trials.run(), {name: {**before.get(name, {}), **after.get(name, {})} for name in names})


def overlap(trials: Trials) -> Finding:
    """Run data-parallel communication overlapped with computation, and not."""
    if trials.data_parallel == 1:
        raise Skipped("no data parallelism")

    def change(command: Sequence[str]) -> list[str]:
        if "--overlap-grad-reduce" in command:
            return without(command, _OVERLAP)
        sharded = "--use-distributed-optimizer" in command
        return [*command, *_OVERLAP[: 1 + sharded]]

    if trials.data_parallel > 2:
        return _within_rounding(trials, change)
    return _equal(trials.run(), trials.run(change(trials.command)))


def micro_batches(trials: Trials) -> Finding:
    """Run with micro-batches of another size."""
    flags = other_micro_batches(trials.command, trials.processes)
    if flags is None:
        raise Skipped("no other --micro-batch-size fits --global-batch-size")
    return _within_rounding(trials, lambda command: [*command, *flags])


CHECKS: Mapping[str, Callable[[Trials], Finding]] = {
    "repeat": repeat,
    "recompute": recompute,
    "tp gather": tp_gather,
    "save and reload": save_and_reload,
    "overlap": overlap,
    "micro-batches": micro_batches,
}


def report(trials: Trials) -> int:
    """Make every check and print a line for each. Returns 1 if one failed, else 0.

    Raises UserError if the command does not run, makes too few steps, or gives no finite number.
    """
    _check_says_something(trials.run(), trials.steps)
    failed, repeats = False, True
    for name, check in CHECKS.items():
        try:
            if not repeats and check is not micro_batches:
                raise Skipped("the command does not repeat itself; add --deterministic-mode")
            finding = check(trials)
            verdict, text = "PASS" if finding.passed else "FAIL", str(finding)
            repeats &= finding.passed or check is not repeat
        except Skipped as reason:
            verdict, text = "skipped", str(reason)
        except Refused as error:
            verdict, text = "skipped", "; ".join(error.args)
        except UserError as error:
            verdict, text = "FAIL", str(error)
        failed |= verdict == "FAIL"
        print(f"{name:17}{verdict:9}{text}", flush=True)
    return int(failed)


def _check_says_something(found: Curves, steps: int) -> None:
    """Raise UserError for a run with too few numbers for the checks to mean anything."""
    made = len({step for curve in found.values() for step in curve})
    if made != steps:
        remedy = "raise --train-iters or lower --steps (a NaN ends it too: take an earlier --load)"
        raise UserError(f"the command ends after {made} of {steps} steps; {remedy}")
    for name, curve in found.items():
        if not any(map(math.isfinite, curve.values())):
            what = name.replace("_", " ")
            raise UserError(f"the command's {what} is finite in no step; take an earlier --load, or a lower --lr")
