"""Megatron's parser, led to a run: each time it has read a command line, a run ends and the next begins."""

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

from . import cpu, hooks
from .errors import UserError
from .flags import args_file, checks
from .flags.checkpoint_args import take_over
from .flags.checks import check_data_files, check_script
from .flags.config import add_fp8_arguments, asks_for_level, check_yaml, config_from_args
from .flags.level import LEVEL, is_stock
from .flags.optional import check_packages
from .flags.probe import probe_from_args
from .flags.sharpness import sharpness_from_args
from .flags.stock_faults import check_faults
from .flags.usage import escape_bad_help, one_line_usage_errors
from .rebind import Rebound
from .run import Run, claim_folders, say


class ParsedRuns:
    """Of a process with the plugin: Megatron's parser reads the flags of one run after another.

    Args:
        begins: a run begins with its flags; else they are read and checked, and left as they are asked for.

    Attributes:
        run: the present one, or None. Megatron parses its flags again as training begins: then the next run begins.
        hooked: undoes what stays from run to run.
    """

    def __init__(self, begins: bool):
        self.begins = begins
        self.expects_level = begins and _asks_for_level(sys.argv)
        self.run: Run | None = None
        self.hooked, self._until_read = Rebound(), Rebound()
        self.hooked.put(hooks.PROCESS, self)
        self._until_read.put(hooks.UNTIL_READ, self)

    def end(self) -> None:
        """Put everything back."""
        self.end_run()
        self.hooked.put_back()

    def end_run(self) -> None:
        """Put back what waits for flags, or what a run has asked for."""
        self._until_read.put_back()
        if self.run is not None:
            self.run.end()
            self.run = None

    def parse_args(self, stock: Callable) -> Callable:
        """Megatron's parse_args: reads the flags of a run, and begins it."""

        def parse_args(extra_args_provider=None, ignore_unknown_args=False):
            def provider(parser):
                if extra_args_provider is not None:
                    parser = extra_args_provider(parser)
                parser = add_fp8_arguments(parser)
                escape_bad_help(parser)
                one_line_usage_errors(parser)
                args_file.check(parser, ignore_unknown_args)
                return parser

            args_file.apply()  # if the script was not started by us
            check_yaml(sys.argv[1:])
            args = stock(provider, ignore_unknown_args)
            say(args_file.lines())
            self.end_run()
            self._read(args)
            return args

        return parse_args

    def _read(self, args) -> None:
        if self.begins and asks_for_level(args):
            _read_checkpoint_args(args)
        config = config_from_args(args)
        if self.begins:
            check_packages(args)
            check_data_files(args)
            checks.check_files(args)
            cpu.check_node(args)
        say(cpu.adapt_args(args))
        if config is not None:
            check_script(config.level)
            check_faults(args)
        probe = probe_from_args(args, config is not None and (config.gemm == "fp8" or config.emulate is not None))
        sharpness = sharpness_from_args(args)
        if self.begins:
            self.run = Run(args, config, probe, sharpness)
            self.run.flags_read()


def _asks_for_level(words: list[str]) -> bool:
    """Whether a command line that is not parsed yet asks for a level. Its last value counts; O0 is stock, unless it
    emulates."""
    asked = None
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name == LEVEL.name:
            asked = value or following
    emulates = asked is not None and any(word.startswith("--fp8-emulate") for word in words)
    return emulates or not is_stock(asked)


def not_read(stock: Callable) -> Callable[..., Any]:
    """GPTModel.__init__ until the flags are read."""

    def init(self, *args, **kwargs):
        raise UserError(
            f"{LEVEL.name}: the script builds a GPTModel and has not called megatron.training.arguments.parse_args, as "
            f"Megatron Bridge does: nothing would be in FP8; remove {LEVEL.name}, and call megatron_fp8.enable() "
            "before the model is built"
        )

    return functools.wraps(stock)(init)


def _read_checkpoint_args(args) -> None:
    """--use-checkpoint-args, before we read the flags: Megatron sets some by a checkpoint when its parser is done.

    Then it is not asked for any more, since Megatron would undo what a level adapts.  If it cannot be, Megatron says
    so itself.
    """
    if not args.use_checkpoint_args or not (args.load or args.pretrained_checkpoint):
        return
    if args.non_persistent_ckpt_type == "local":
        return
    import megatron.training.checkpointing as checkpointing

    claim_folders(args)  # a checkpoint may have to be put back before it can be read
    reading = Run(args, None)
    try:
        for hook in hooks.LOADING:
            hook.put(reading.hooked, reading)
        for folder in "pretrained_checkpoint", "load":
            found = checkpointing.load_args_from_checkpoint(args, load_arg=folder)
            if isinstance(found, tuple):  # else there are none
                say(list(take_over(args, found[1])))
    finally:
        reading.end()
    args.use_checkpoint_args = False
