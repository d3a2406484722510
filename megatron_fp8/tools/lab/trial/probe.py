"""`megatron-fp8 lab probe`: rounding or bug? Errors of FP8's GEMMs against BF16's, and checks that are exact.

    megatron-fp8 lab probe -- pretrain_gpt_fp8.py FLAGS... --load checkpoint --fp8-level O2
    megatron-fp8 lab probe --step 100 --sort error -- pretrain_gpt_fp8.py FLAGS... --fp8-emulate E8M3:truncate
    megatron-fp8 lab probe --invariants -- pretrain_gpt_fp8.py FLAGS... --fp8-level O3

The command is run up to the step, from its checkpoint if it has --load, and stopped. The table has the error and gain
of each GEMM of every linear, and the effect of rounding on every operand; megatron_fp8/monitor/probe.py explains each
number. Shares and errors are in %.

--invariants runs the command several times. Each time it changes something that must not change the result, or only by
rounding; see tools/lab/trial/invariants.py.

The command's own outputs are switched off: --save, --tensorboard-dir and the like.
"""

import json
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....errors import UserError
from ....flags.args_file import ARGS_FILE
from ....flags.emulate import BF16_FLAG
from ..sweep.plan_file import flag_value
from . import invariants
from .run import WRITING, add_command, check_folder_of, curves, first_step, says_fp8, without

_GEMMS, _OPERANDS = ("fprop", "dgrad", "wgrad"), ("activation", "weight", "gradient")


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 lab probe`."""
    parser.add_argument("--step", type=int, metavar="N", help="the step to probe (the command's first)")
    parser.add_argument("--json", metavar="FILE", help="write the tables' numbers, unrounded, to FILE")
    parser.add_argument("--sort", choices=("error",), help="largest error first (default: the model's order)")
    parser.add_argument("--invariants", action="store_true", help="run the checks instead")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of each run of --invariants (4)")
    add_command(parser)


def run(args: Namespace) -> int:
    """Probe a step and return 0; or run the checks and return 1 if one failed."""
    command = without(args.command, WRITING)
    first = first_step(command)
    with tempfile.TemporaryDirectory() as folder:
        if args.invariants:
            for flag in ("step", "json", "sort"):
                if getattr(args, flag) is not None:
                    raise UserError(f"--{flag} {getattr(args, flag)} with --invariants: no effect; remove one")
            steps = 4 if args.steps is None else args.steps
            if steps < 2:
                raise UserError(f"--steps {steps}: a checkpoint is saved in the middle; use 2 or more")
            trials = invariants.Trials(command, args.processes, args.timeout, first, steps, Path(folder))
            return invariants.report(trials)
        if args.steps is not None:
            raise UserError(f"--steps {args.steps}: only with --invariants; add that, or use --step")
        check_folder_of("--json", args.json)
        step = first if args.step is None else args.step
        if step < first:
            raise UserError(f"--step {step}: the command's first is {first}; use that or a later one")
        if not says_fp8(command) and flag_value(command, ARGS_FILE.name) is None:  # the file may say more
            raise UserError("the command has no GEMM in FP8, nothing to probe; add --fp8-level or --fp8-emulate to it")
        found = probe(command, args.processes, Path(folder), args.timeout, first, step)
    print(table(found, args.sort == "error"), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def probe(
    command: Sequence[str], processes: int, folder: Path, timeout: float | None, first: int, step: int
) -> dict[str, Any]:
    """The result of monitor/probe.py for a step of the command. first: its first step. folder: for the run.

    Raises UserError if the run failed, never reached the step, or has no linear to probe.
    """
    results = folder / "probe"
    flags = ["--log-interval", "1", "--fp8-probe-step", str(step), "--fp8-probe-dir", str(results)]
    curves([*command, *flags], processes, folder / "run", timeout, step - first + 1)
    path = results / f"step-{step}.json"
    if not path.exists():
        earlier = "use an earlier one, or " if step > first else ""
        override = " (after --load with --override-opt_param-scheduler)" if first > 1 else ""
        raise UserError(f"--step {step}: the command ended before it; {earlier}raise --train-iters{override}")
    found = json.loads(path.read_text())
    if not found["linears"]:
        values = {flag: flag_value(tuple(command), flag) for flag in (BF16_FLAG, "--fp8-emulate-layers")}
        why = [f"{flag} {value}" for flag, value in values.items() if value is not None]
        why += [word for word in command if word == "--first-last-layers-bf16"]
        raise UserError(f"{' with '.join(why)}: leaves no linear in FP8, nothing to probe; let it match fewer linears")
    return found


def table(found: dict[str, Any], by_error: bool) -> str:
    """The result of `probe` as text. by_error: sort linears by their largest error."""
    linears = found["linears"]
    if by_error:
        linears = dict(sorted(linears.items(), key=lambda item: -_largest_error(item[1])))
    width = max(map(len, linears)) + 2
    heads = "".join(f"{gemm + ' error %':>15}{'gain':>8}" for gemm in _GEMMS)
    lines = [f"step {found['step']}", "", "GEMM".ljust(width) + heads]
    for name, linear in linears.items():
        cells = (_cell(linear[gemm]["error"], 15, "{:.3f}", 100) + _cell(linear[gemm]["gain"], 8) for gemm in _GEMMS)
        lines.append(name.ljust(width) + "".join(cells))
    columns = ("underflow", "saturation", "kurtosis", "amax", "scale_min", "scale_max")
    titles = ("underflow %", "saturated %", "kurtosis", "amax", "scale from", "to")
    lines += ["", "operand".ljust(width) + f"{'':12}{'format':18}" + "".join(f"{title:>12}" for title in titles)]
    for name, linear in linears.items():
        for operand in _OPERANDS:
            values = linear[operand]
            shares = (_cell(values.get(key), 12, "{:.4f}", 100) for key in columns[:2])
            others = (_cell(values.get(key), 12, "{:.4g}") for key in columns[2:])
            lines.append(name.ljust(width) + f"{operand:12}{values['format']:18}" + "".join([*shares, *others]))
    return "\n".join(lines)


def _largest_error(linear: dict[str, Any]) -> float:
    """A linear's largest error; infinite if one is not finite, so that it comes first."""
    errors = [linear[gemm]["error"] for gemm in _GEMMS]
    return max(float("inf") if error is None else error for error in errors)


def _cell(value: float | None, width: int, form: str = "{:.4f}", factor: float = 1) -> str:
    return ("-" if value is None else form.format(factor * value)).rjust(width)
