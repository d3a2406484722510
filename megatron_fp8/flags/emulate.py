"""The --fp8-emulate flags: which GEMM operands a run rounds to which format, in which linears and steps.

    --fp8-emulate SPEC              E8M3                                    all three operands
                                    weight=E8M3,activation=E8M3:truncate    the named ones; the third is not rounded
                                    E4M3,gradient=E5M2:nearest:tensor       all three, a named one in its own format
    --fp8-emulate-layers PATTERNS   'decoder.layers.[0-3].*,*.linear_fc2'   which linears (default: all of them)
    --fp8-emulate-lm-head           the LM head too
    --fp8-emulate-from-step N       from step N on (default 1, the first)
    --fp8-emulate-until-step N      before step N (default: to the end)

A format is FORMAT[:ROUNDING][:SCALING]; numerics/emulation.py defines it. A pattern is a shell pattern (* ? [...]) for
the linear's whole path in the model; layers are numbered from 0 over all pipeline stages, as in the statistics' names.
From step A until step B are B - A steps. An operand is rounded once; each GEMM reads the rounded one:

    forward   y = e(x) e(W)^T          dgrad   dx = e(dy) e(W)          wgrad   dW = e(dy)^T e(x)

x is the activation, W the weight, dy the gradient, e the rounding. Validation is emulated like training. Under tensor
parallelism a rank rounds the parts that its own GEMM reads: a scale per tensor is then one per part, and a scale per
row one per part of a row. Without scales and noise a number is rounded alike in every layout.
"""

from argparse import Namespace
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ..errors import UserError
from .flag import Flag, Values, filled, refuse, whole

if TYPE_CHECKING:  # the lab's verbs import this file, and their --help must not wait for torch
    from ..numerics.emulation import EmulatedFormat

OPERANDS = ("weight", "activation", "gradient")
LM_HEAD = "output_layer"
BF16_FLAG = "--fp8-bf16-layers"  # config.py defines the flag


@dataclass(frozen=True)
class EmulationPlan:
    """What the flags say.

    Attributes:
        weight, activation, gradient: how each operand is rounded; None: not at all.
        layers: patterns; a linear is emulated if its path matches one.
        lm_head: whether the LM head is emulated.
        from_step, until_step: emulate in steps from_step, ..., until_step - 1, counted from 1; None: to the end.
    """

    weight: "EmulatedFormat | None"
    activation: "EmulatedFormat | None"
    gradient: "EmulatedFormat | None"
    layers: tuple[str, ...] = ("*",)
    lm_head: bool = False
    from_step: int = 1
    until_step: int | None = None

    def __str__(self) -> str:
        """For example "weight E8M3:truncate:none, gradient E5M2:nearest:tensor; linears *; LM head; steps 1 to 99"."""
        operands = [f"{operand} {how}" for operand in OPERANDS if (how := getattr(self, operand)) is not None]
        parts = [", ".join(operands), f"linears {','.join(self.layers)}", *(["LM head"] if self.lm_head else [])]
        if self.from_step > 1 or self.until_step is not None:
            end = f" to {self.until_step - 1}" if self.until_step is not None else " on"
            parts.append(f"steps {self.from_step}{end}")
        return "; ".join(parts)

    def for_operand(self, path: str, layer_number: int, operand: str, step: int) -> "EmulatedFormat | None":
        """How to round `operand` ("weight", "activation" or "gradient") in a step, from 1; None: not at all.

        path, layer_number: OwnedWeight's, or LM_HEAD and any number.
        """
        assert operand in OPERANDS
        started = step >= self.from_step and (self.until_step is None or step < self.until_step)
        return getattr(self, operand) if started and self.covers(path, layer_number) else None

    def covers(self, path: str, layer_number: int) -> bool:
        """Whether a linear is emulated in some step. If no linear is, --fp8-emulate-layers is a mistake."""
        return self.lm_head if path == LM_HEAD else matches(self.layers, linear_name(path, layer_number))


EMULATE = Flag(
    "--fp8-emulate",
    "Round the operands of the linears' BF16 GEMMs to FORMAT[:ROUNDING][:SCALING], all three (E8M3) or the named ones "
    "(weight=E4M3,activation=E4M3:nearest:tensor). Without --fp8-level the rest of the run is stock BF16.",
    Values("SPEC"),
)
LAYERS = Flag(
    "--fp8-emulate-layers",
    "Emulate only these linears, such as 'decoder.layers.[0-3].*,*.linear_fc2'. Default: all.",
    Values("PATTERNS"),
)
WITH_HEAD = Flag("--fp8-emulate-lm-head", "Emulate the LM head too.", field="lm_head")
FROM_STEP = Flag("--fp8-emulate-from-step", "Emulate from step N on (default 1, the first).", whole(1), "from_step")
UNTIL_STEP = Flag("--fp8-emulate-until-step", "Emulate before step N (default: to the end).", whole(1), "until_step")
FLAGS = (EMULATE, LAYERS, WITH_HEAD, FROM_STEP, UNTIL_STEP)


def linear_name(path: str, layer_number: int) -> str:
    """A linear's whole path in the model, from OwnedWeight's `path` and `layer_number`; LM_HEAD stays LM_HEAD."""
    return path.replace(".layers.", f".layers.{layer_number - 1}.", 1)


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a linear's whole path matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def read_patterns(flag: str, value: str) -> tuple[str, ...]:
    """The patterns in a flag's value. Raises UserError of one line for an empty one."""
    patterns = tuple(value.split(","))
    if not all(patterns):
        raise UserError(f"{flag} {value!r}: an empty pattern; give one, or remove the comma")
    return patterns


def emulation_from_args(args: Namespace) -> EmulationPlan | None:
    """The plan of a run's arguments; None: nothing is emulated. Raises UserError of one line: flag, value, remedy."""
    if EMULATE.given(args) is None:
        refuse(args, FLAGS, ": nothing is emulated; add --fp8-emulate")
        return None
    layers = LAYERS.given(args)
    patterns = ("*",) if layers is None else read_patterns(LAYERS.name, layers)
    more = filled(args, (WITH_HEAD, FROM_STEP, UNTIL_STEP)) | read_operands(EMULATE.given(args))
    plan = EmulationPlan(layers=patterns, **more)
    if plan.until_step is not None and plan.until_step <= plan.from_step:
        raise UserError(
            f"{UNTIL_STEP.shown(args)}: emulation starts with step {plan.from_step}; use {plan.from_step + 1} or more"
        )
    return plan


def read_operands(text: str) -> "dict[str, EmulatedFormat | None]":
    """{operand: format or None} from --fp8-emulate's value. Raises UserError of one line."""
    from ..numerics.emulation import EmulatedFormat

    found: dict[str, EmulatedFormat] = {}
    for item in text.split(","):
        operand, equals, name = item.rpartition("=")
        if equals and operand not in OPERANDS:
            raise UserError(f"--fp8-emulate {text}: no operand {operand!r}; use {', '.join(OPERANDS)}")
        try:
            how = EmulatedFormat.parse(name)
        except ValueError as error:
            raise UserError(f"--fp8-emulate {text}: {error}") from None
        if how.scaling != "none" and not how.scaled:
            raise UserError(
                f"--fp8-emulate {text}: {name} has float32's exponents and needs no scale; remove :{how.scaling}"
            )
        if operand in found:
            raise UserError(f"--fp8-emulate {text}: {operand or 'a format for all'} is given twice; give it once")
        found[operand] = how
    everywhere = found.pop("", None)
    return {operand: found.get(operand, everywhere) for operand in OPERANDS}
