"""Runs that tell a bug from rounding: each changes something that must not change a run, or only by rounding.

    check             what is changed                                                    must be
    repeat            nothing                                                            equal
    recompute         all activations are computed a second time, or no longer are       equal
    tp gather         sequence parallelism gathers activations in FP8, or in BF16        equal
    save and reload   half of the steps, a checkpoint, the other half from it            equal
    overlap           gradients and weights travel while others compute, or no longer    equal with two data-parallel
                                                                                         ranks, else within rounding
    micro-batches     of half the size, twice as many                                    within rounding

Equal: losses and gradient norms of all steps, bit for bit (`--fp8-log-exact`; a norm takes in every gradient). Where
not even `repeat` is equal, these checks can show nothing, and are left out: --deterministic-mode makes it so.

Within rounding: the largest difference of the losses, and that of the norms, is at most 64 times what the same change
does to the BF16 twin, the command with BF16 GEMMs, FP32 gradients and FP32 states. E5M2 rounds by up to 2^-3 of a
number, BF16 by up to 2^-9: 64 times as much. A bug, such as a micro-batch that counts twice, changes the norm by a
large part of itself.
(More than two ranks: stock Megatron adds FP32 gradients in an order that depends on its buckets.)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..level import CELLS
from .plan_file import flag_value
from .trial import curves, without

Curves = dict[str, dict[int, float]]
_EXACT = "exact_"  # what the names of --fp8-log-exact's numbers begin with
_NORM = "exact_grad_norm"
_ROUNDING = 64
_RECOMPUTE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-activations")
_LOADING = (
    *("--load", "--finetune", "--ckpt-step", "--pretrained-checkpoint", "--no-load-optim", "--no-load-rng"),
    *("--no-save-optim", "--no-save-rng"),
)
_OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
_TWIN = "--fp8-level O1 --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32".split()


class Skipped(Exception):
    """The check says nothing of this command; the reason."""


@dataclass(frozen=True)
class Finding:
    """What a check found: the largest difference of a number, whose and at which step, and what it may be."""

    difference: float
    name: str
    step: int
    limit: float = 0.0

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit

    def __str__(self) -> str:
        what = self.name.removeprefix(_EXACT).replace("_", " ")
        allowed = f"; allowed {self.limit:.3g}" if self.limit else ""
        return f"largest difference {self.difference:.3g} ({what}, step {self.step}){allowed}"


@dataclass
class Trials:
    """The runs of a command that are compared, each made once.

    Attributes:
        command: the user's; what it writes is left out.
        processes, timeout: of a run, as trial.curves takes them.
        first, steps: the step that the command begins with, and how many are made.
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

    def run(self, command: Sequence[str] | None = None, steps: int | None = 0, again: bool = False) -> Curves:
        """{name: {step: value}} of the exact numbers of a run, the user's command by default.

        steps: how many, 0: all; None: until it ends by itself. again: make it also if it was made.
        """
        words = (*(self.command if command is None else command), "--log-interval", "1", "--fp8-log-exact")
        if words not in self._made or again:
            folder = self.folder / f"run{len(self._made) + again}"
            found = curves(words, self.processes, folder, self.timeout, self.steps if steps == 0 else steps)
            self._made[words] = {name: curve for name, curve in found.items() if name.startswith(_EXACT)}
        return self._made[words]

    def size(self, flag: str) -> int:
        """A flag's number; 1 where the command does not have it."""
        return int(flag_value(tuple(self.command), flag) or 1)

    @property
    def data_parallel(self) -> int:
        """The number of data-parallel ranks."""
        model = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
        return max(1, self.processes // math.prod(map(self.size, model)))

    @property
    def in_fp8(self) -> bool:
        """Whether the command has a level, or emulates."""
        level = flag_value(tuple(self.command), "--fp8-level")
        return level not in (None, "O0") or flag_value(tuple(self.command), "--fp8-emulate") is not None

    def twin(self) -> list[str]:
        """The command in BF16: its own layers and engine, nothing rounded further."""
        if not self.in_fp8:
            raise Skipped("the command has no level: it is its own BF16 twin")
        ours = {word.partition("=")[0] for word in self.command if word.startswith("--fp8-")} - {"--fp8-attention"}
        return [*without(self.command, ours), *_TWIN]


def differences(one: Curves, other: Curves) -> list[Finding]:
    """Of each number of the two runs the largest difference and its step; infinite where one of them lacks a step."""
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
    """The one that is farthest from what is allowed."""
    return max(findings, key=lambda f: (not f.passed, f.difference / f.limit if f.limit else f.difference))


def _equal(one: Curves, other: Curves) -> Finding:
    return _worst(differences(one, other))


def _within_rounding(trials: Trials, change: Callable[[Sequence[str]], list[str]]) -> Finding:
    twin = trials.twin()
    ours = differences(trials.run(), trials.run(change(trials.command)))
    its = {f.name: f.difference for f in differences(trials.run(twin), trials.run(change(twin)))}
    return _worst([Finding(f.difference, f.name, f.step, _ROUNDING * its.get(f.name, 0.0)) for f in ours])


def repeat(trials: Trials) -> Finding:
    """The command twice."""
    once = trials.run()
    return _equal(once, trials.run(again=True))


def recompute(trials: Trials) -> Finding:
    """With and without full recomputation."""
    changed = without(trials.command, _RECOMPUTE)
    if flag_value(tuple(trials.command), "--recompute-granularity") != "full":
        changed += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    return _equal(trials.run(), trials.run(changed))


def tp_gather(trials: Trials) -> Finding:
    """The activations' gather in FP8 and in BF16."""
    command, flag = tuple(trials.command), "--fp8-tp-gather"
    level = flag_value(command, "--fp8-level")
    if trials.size("--tensor-model-parallel-size") == 1 or "--sequence-parallel" not in command:
        raise Skipped("no tensor and sequence parallelism")
    if level in (None, "O0") or flag_value(command, "--fp8-emulate") or flag_value(command, "--fp8-gemm") == "bf16":
        raise Skipped("no FP8 GEMMs")
    cell = next(cell for cell in CELLS if cell.flag == flag)
    other = "bf16" if (flag_value(command, flag) or cell.at(level)) == "fp8" else "fp8"
    return _equal(trials.run(), trials.run([*command, flag, other]))


def save_and_reload(trials: Trials) -> Finding:
    """Half of the steps, a checkpoint, and the rest."""
    half, checkpoint = trials.steps // 2, str(trials.folder / "checkpoint")
    last = str(trials.first + half - 1)
    saving = ["--save", checkpoint, "--save-interval", last, "--exit-interval", last]  # ends by itself, as it must
    before = trials.run([*without(trials.command, ("--no-save-optim", "--no-save-rng")), *saving], steps=None)
    after = trials.run([*without(trials.command, _LOADING), "--load", checkpoint], steps=trials.steps - half)
    names = before.keys() | after.keys()
    return _equal(trials.run(), {name: {**before.get(name, {}), **after.get(name, {})} for name in names})


def overlap(trials: Trials) -> Finding:
    """Communication of data parallelism beside computation, and apart from it."""
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
    """Micro-batches of half the size."""
    size = trials.size("--micro-batch-size")
    if size % 2:
        raise Skipped(f"--micro-batch-size {size} has no half")
    whole = flag_value(tuple(trials.command), "--global-batch-size") or str(size * trials.data_parallel)

    def change(command: Sequence[str]) -> list[str]:
        return [*command, "--micro-batch-size", str(size // 2), "--global-batch-size", whole]

    return _within_rounding(trials, change)


CHECKS: Mapping[str, Callable[[Trials], Finding]] = {
    "repeat": repeat,
    "recompute": recompute,
    "tp gather": tp_gather,
    "save and reload": save_and_reload,
    "overlap": overlap,
    "micro-batches": micro_batches,
}


def report(trials: Trials) -> int:
    """Make every check and print a line of each; 1 if one failed, else 0.

    Raises ValueError where the command itself does not run.
    """
    trials.run()
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
        except ValueError as error:
            verdict, text = _not_run(str(error))
        failed |= verdict == "FAIL"
        print(f"{name:17}{verdict:9}{text}", flush=True)
    return int(failed)


def _not_run(error: str) -> tuple[str, str]:
    """Verdict and text of a run that failed: what we refuse in one line is a check that cannot be made."""
    lines = error.strip().splitlines()
    refused = [line.partition("megatron_fp8: ")[2] for line in lines if "megatron_fp8: " in line]
    return ("skipped", refused[0]) if refused else ("FAIL", f"a run ended: {lines[-1]}")
