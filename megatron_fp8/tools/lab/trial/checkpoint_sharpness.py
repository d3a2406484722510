"""`megatron-fp8 lab sharpness ... -- COMMAND`: the sharpness of a checkpoint's loss over a data set.

    megatron-fp8 lab sharpness --json sharpness.json -- pretrain_gpt_fp8.py --load DIR --valid-data-path ... FLAGS...

COMMAND is a training command with --load. It is run with --skip-train, so it makes Megatron's own evaluation: --eval-
iters batches of the validation and the test set, at any level and in any layout. For each set the verb prints quantiles
over all positions, and over last tokens by the closed form and by the paper's search (monitor/logit_sharpness.py).
"""

import json
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ....errors import UserError
from ....flags.sharpness import PAPER_ITERATIONS, QUANTILES
from .run import WRITING, add_command, check_folder_of, curves, without

COLUMNS = ("mean", *QUANTILES)
ROWS = {
    "tokens": {"sharpness": "sharpness, %", "centred": "centred, %", "log_z": "log Z, nats", "loss": "loss, nats"},
    "last": {"closed_form": "closed form, %", "lbfgsb": "L-BFGS-B, %"},
}


def add_arguments(parser: ArgumentParser) -> None:
    """The verb's own flags, and the training command."""
    parser.add_argument(
        "--iterations",
        type=int,
        default=PAPER_ITERATIONS,
        metavar="N",
        help=f"of L-BFGS-B on the last token of each sequence (default {PAPER_ITERATIONS}; 0 switches it off)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")
    add_command(parser)


def run(args: Namespace) -> int:
    """Evaluate and print. Returns 0. Raises UserError with one line if the command cannot be measured."""
    given = {word.partition("=")[0] for word in args.command}
    if not given & {"--load", "--pretrained-checkpoint"}:
        raise UserError("the command loads no checkpoint; add --load DIR to it")
    if args.iterations < 0:
        raise UserError(f"--iterations {args.iterations}: use 0 (not done) or more")
    check_folder_of("--json", args.json)
    with tempfile.TemporaryDirectory(prefix="sharpness-") as scratch:
        file = Path(scratch) / "found.json"
        ours = ["--fp8-sharpness-eval", str(file), "--fp8-sharpness-iterations", str(args.iterations)]
        command = [*without(args.command, WRITING), "--skip-train", "--exit-on-missing-checkpoint", *ours]
        curves(command, args.processes, Path(scratch) / "run", args.timeout)
        found = json.loads(file.read_text()) if file.exists() else {}
    if not found:
        raise UserError("the command evaluated nothing; give it --load DIR, --eval-iters N and data to evaluate")
    print("\n\n".join(table(name, parts) for name, parts in found.items()), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def table(name: str, parts: dict[str, dict[str, dict[str, float]] | None]) -> str:
    """The result of an evaluation (the JSON of monitor/sharpness.py) as text."""
    lines = [name]
    for part, title in (("tokens", "positions"), ("last", "last tokens")):
        rows = parts[part]
        if not rows:
            continue
        first = next(iter(rows.values()))
        lines.append(f"{first['count']:,.0f} {title}, {first['not_finite']:,.0f} more not finite")
        lines.append(" " * 16 + "".join(f"{column:>11}" for column in COLUMNS))
        for key, title in ROWS[part].items():
            lines.append(f"{title:<16}" + "".join(f"{rows[key][column]:>11.5g}" for column in COLUMNS))
    return "\n".join(lines)
