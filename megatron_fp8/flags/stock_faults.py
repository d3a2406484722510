"""Combinations of stock's flags at which megatron-core 0.19 fails in an operation, and in no check of its own: one line
before the run starts.

stock_errors.py makes a line of a check of Megatron's that fails; here is what Megatron does not check.  Each of these
fails without a level too, with the traceback of an operation on None or on an object of another kind, some of them
after hours: at the first evaluation, or when the training is done.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from ..errors import UserError
from .flag import whole_number

_OF_ONE_AXIS = ("pretrain_gpt.py", "pretrain_gpt_fp8.py")  # scripts whose positions are


class Fault(NamedTuple):
    """Arguments, not validated yet, with which Megatron fails if `test` holds of them; `line` has why, and a remedy."""

    test: Callable[[Namespace], bool]
    line: Callable[[Namespace], str]


FAULTS = (
    Fault(
        lambda args: args.eval_interval is None and not args.skip_train and not args.full_validation,
        lambda args: "--eval-interval: missing, and Megatron counts its samples by it; give one, such as 1000",
    ),
    Fault(
        lambda args: args.full_validation and not args.multiple_validation_sets,
        lambda args: "--full-validation: Megatron wants a list of validation sets then; add --multiple-validation-sets",
    ),
    Fault(
        lambda args: not args.pad_vocab_size and args.padded_vocab_size is None,
        lambda args: "--no-pad-vocab-size: Megatron then knows no size of the vocabulary; add --padded-vocab-size N, "
        "or remove the flag",
    ),
    Fault(
        lambda args: not _are_numbers(args.phase_transition_iterations),
        lambda args: f"--phase-transition-iterations {args.phase_transition_iterations}: use whole numbers with commas "
        "between them, such as 1000,2000",
    ),
    Fault(
        lambda args: bool(args.phase_transition_iterations) and not args.train_samples,
        lambda args: f"--phase-transition-iterations {args.phase_transition_iterations}: Megatron counts the last "
        "phase by --train-samples; give that instead of --train-iters, or remove the flag",
    ),
    Fault(
        lambda args: args.position_embedding_type == "mrope" and os.path.basename(sys.argv[0]) in _OF_ONE_AXIS,
        lambda args: "--position-embedding-type mrope: wants positions of three axes, and "
        f"{os.path.basename(sys.argv[0])} gives those of one; use rope",
    ),
)


def check_faults(args: Namespace) -> None:
    """Raise UserError of one line for the first fault that these arguments, parsed and not validated, run into."""
    for fault in FAULTS:
        if fault.test(args):
            raise UserError(fault.line(args))


def _are_numbers(text: str | None) -> bool:
    return not text or all(whole_number(part.strip()) is not None for part in text.split(","))
