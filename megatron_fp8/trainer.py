"""A level for trainers that build Megatron's models and optimizers without its parser and its training loop.

    import megatron_fp8

    megatron_fp8.enable("O3")              # before the model is built
    model = GPTModel(config, spec, ...)    # its linears are FP8's
    optimizer = get_megatron_optimizer(optimizer_config, [DistributedDataParallel(...)])

examples/core_loop.py is such a trainer, of 110 lines. The flags are a run's (docs/flags.md), without those that
Megatron's training loop serves: logs, probes, graphs, checkpoints. The model's own configuration says the rest.

get_megatron_optimizer and finalize_model_grads are hooked in megatron.core, and in every module that has imported them
by now; a module that is imported later finds ours.

Not there: checkpoints of the optimizer's state, which need Megatron's arguments; what a level adapts of stock's flags
(docs/flags.md), so that the model's configuration must fit.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from . import hooks
from .errors import UserError, did_you_mean
from .flags import emulate, gemm, gradients, level
from .flags.config import (
    ACTIVATIONS,
    AS_LOADED,
    ATTENTION,
    BF16_LAYERS,
    EXPERTS,
    LM_HEAD,
    add_fp8_arguments,
    config_from_args,
)
from .flags.level import LEVEL, is_stock
from .flags.skips import MAX_SKIPPED
from .flags.usage import one_line_usage_errors
from .rebind import Hook
from .run import Run

# The table's rows on Megatron's training loop, which a trainer may have all the same.
_LOOP = "megatron.training."
_FLAGS = {
    flag.name
    for flag in (*level.FLAGS, *gradients.FLAGS, *gemm.FLAGS, *emulate.FLAGS)
    if flag not in (LEVEL, gradients.HIERARCHY)
} | {flag.name for flag in (BF16_LAYERS, LM_HEAD, EXPERTS, ACTIVATIONS, AS_LOADED, ATTENTION, MAX_SKIPPED)}
_OF_STOCK = {"--fp8-format", "--fp8-recipe", "--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo"}
_MICRO_BATCHES = {"grad_accum": "bf16"}  # how many a step has is the trainer's to know


def trainers_run(level: str, flags: Mapping[str, Any]) -> Run:
    """A run, hooked in, of a level and other flags, named as enable() names them.

    Raises UserError for level O0, a flag that is not known or needs Megatron's training loop, and a wrong value.
    """
    if is_stock(level):
        raise UserError(f"megatron_fp8.enable: level {level} is stock Megatron; leave the call out")
    args = _parsed([f"{LEVEL.name}={level}", *_words({**_MICRO_BATCHES, **flags})])
    run = Run(args, config_from_args(args, of_model=False), parsed=False)
    try:
        run.enabled(row for row in (*hooks.RUN, *hooks.TRAINER) if _is_there(row))
    except BaseException:
        run.end()
        raise
    return run


def _is_there(row: Hook) -> bool:
    """Whether what a row hooks is of megatron.core, or of a training loop that this process has imported."""
    module = row.owner
    return not module.startswith(_LOOP) or module in sys.modules


def _words(flags: Mapping[str, Any]) -> list[str]:
    """The flags as on a command line."""
    words = []
    for name, value in flags.items():
        flag = f"--fp8-{name.replace('_', '-')}"
        if flag not in _FLAGS | _OF_STOCK:
            known = [known.removeprefix("--fp8-").replace("-", "_") for known in sorted(_FLAGS | _OF_STOCK)]
            hint = did_you_mean(name, known)
            raise UserError(
                f"megatron_fp8.enable: {name}={value!r}: no flag that works without Megatron's training loop{hint}; "
                f"there are {', '.join(known)}"
            )
        if value is not False and value is not None:
            words.append(flag if value is True else f"{flag}={value}")
    return words


def _parsed(words: list[str]) -> argparse.Namespace:
    """Megatron's arguments of a run in BF16 with these flags, and all others at their defaults."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser("megatron_fp8.enable", allow_abbrev=False)
    add_fp8_arguments(add_megatron_arguments(parser))
    one_line_usage_errors(parser)
    args = parser.parse_args(["--bf16", *words])
    args.rank, args.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return args
