"""The flags of dpo_gpt_fp8.py, beside Megatron's and a level's."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

SCRIPT = "dpo_gpt_fp8.py"
HEAD = "head"  # a part of tuning/fingerprint.py's numbers
SCORE, READ = "--dpo-score-reference", "--dpo-reference-scores"


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    group = parser.add_argument_group("dpo")
    group.add_argument("--dpo-beta", type=float, default=0.1, help="A larger beta keeps the policy near the reference.")
    group.add_argument("--dpo-label-smoothing", type=float, default=0.0, help="Assumed share of swapped pairs.")
    group.add_argument("--dpo-sft-weight", type=float, default=0.0, help="Weight of -log p(chosen) per token.")
    group.add_argument(SCORE, metavar="FILE", help="Do not train: score the data as the reference, and write FILE.")
    group.add_argument(READ, metavar="FILE", help="Read the reference's log-probabilities; no reference is built.")
    return parser


def changed(saved: Namespace, args: Namespace) -> Iterator[str]:
    """A line for each part of the loss that a resumed run changes. The numbers of its reference are carried over."""
    older = getattr(saved, "dpo_reference_model", None)  # until 2026-11-26 a checkpoint had one number, of the LM head
    args.dpo_reference = getattr(saved, "dpo_reference", {} if older is None else {HEAD: older})
    for flag in ("--dpo-beta", "--dpo-label-smoothing", "--dpo-sft-weight"):
        name = flag[2:].replace("-", "_")
        theirs, ours = getattr(saved, name, None), getattr(args, name, None)
        if None not in (theirs, ours) and theirs != ours:
            yield f"the run that goes on had {flag} {theirs}, and now has {ours}"
