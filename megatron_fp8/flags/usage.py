"""What a person at the command line meets: `--help` that works, and one line for a mistake.

Shared by pretrain_gpt_fp8.py, `python -m megatron_fp8` and the plugin, which wraps Megatron's argument
parser. Imports nothing heavy, so that a mistake in the first word of a command is answered at once.
"""

import argparse
import contextlib
import importlib
import json
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import PassingError, UserError, did_you_mean
from .bounds import beyond
from .stock_errors import remember_flags, stock_mistake, through_callback

PATIENCE = 10  # seconds
_LONG = 60  # characters
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}
_AROUND_IT = re.compile(r"( when instantiating \w+)+$")  # what Megatron's build_module adds, once for each module
_SHOWN = 12  # words of what no flag is known for: a whole command may be


class Verb(NamedTuple):
    """A word of the command line: the module that does it, imported when it is used, and what `--help` says of it."""

    module: str
    help: str


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line on stderr and exit code 2 for a UserError, or where a check of Megatron's own
    fails before it trains (flags/stock_errors.py).

    Any other exception is a bug, ours or another's, and passes through untouched.
    """
    try:
        yield
    except Exception as error:
        ours = isinstance(error, UserError)
        message = _AROUND_IT.sub("", str(error)) if ours else stock_mistake(error)
        if message is None:
            raise
        if int(os.environ.get("RANK", "0")) > 0:
            # All ranks meet the same mistake: let rank 0 say it. Its exit makes torchrun end the others, so
            # a rank that is still here after a while met one that rank 0 did not.
            time.sleep(PATIENCE)
        line = f"megatron_fp8: {_one_line(message)}"
        if not ours and through_callback(error):
            line = f"{traceback.format_exc()}\n{line}"
        print(line, file=sys.stderr, flush=True)
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # torchrun ends with a long report of its own: this puts the line into it, as the root cause. A job's script
            # reads there whether another start is of use (scripts/slurm/train.sbatch).
            passing = isinstance(error, PassingError)
            details = {"py_callstack": line, "timestamp": str(int(time.time())), "passing": passing}
            with open(report, "w") as file:
                json.dump({"message": {"message": line, "extraInfo": details}}, file)
        sys.exit(2)


def _one_line(message: str) -> str:
    """Of a value that has line breaks, say."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda found: repr(found[0])[1:-1], message)


def hide_missing_package_warnings() -> None:
    """Silence what Megatron says on import, module after module, of optional packages that are not needed; and torch of
    a CUDA toolkit without a GPU."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    absent = r"(Transformer Engine and Apex|Apex|absl.logging) (are|is) not installed|Only transformer-eng"
    warnings.filterwarnings("ignore", message=absent, category=UserWarning)


def escape_bad_help(parser: argparse.ArgumentParser) -> None:
    """Make `--help` work where a help text holds a bare % (megatron-core 0.19.2 has some).

    argparse expands help texts with the % operator, which knows %(name)s and %%. Idempotent.
    """
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%(%|\()?", lambda found: found[0] if found[1] else "%%", action.help)


class _Refused(argparse.ArgumentError):
    """A value that is not taken: the flag as it was given, and what to do."""

    def __init__(self, action: argparse.Action, text: str, remedy: str):
        super().__init__(action, f"{shown(text)}: {remedy}")

    def __str__(self) -> str:
        return f"argument {self.argument_name} {self.message}"


def shown(word: str) -> str:
    """A word of the command line as a line has it: without what a terminal would not print, and not endless."""
    word = word if word.isprintable() else ascii(word)[1:-1]
    if not word:
        return "''"
    return word if len(word) <= _LONG else f"{word[:_LONG]}..."


def one_line_usage_errors(parser: argparse.ArgumentParser) -> None:
    """Make a wrong flag or value a UserError: argparse would print Megatron's 30,000 characters of usage, and for some
    of Megatron's own types of values a traceback.

    Every value of a command line passes here, whatever its flag: typed by the flag's own type, bounded by bounds.py.
    """
    get_all, parse = parser._get_values, parser.parse_known_args
    given: list[str] = []

    def parse_known_args(args=None, namespace=None):
        given[:] = sys.argv[1:] if args is None else args
        for word in given:
            if re.search("[\0\ud800-\udfff]", word):
                raise UserError(f"{shown(word)}: is not UTF-8 text, or has a zero byte in it; write it in UTF-8")
            if re.search(r"\d{1000}", word):  # Python reads 4,300
                raise UserError(f"{shown(word)}: a number of more than 1,000 digits; write a shorter one")
        return parse(args, namespace)

    def error(message: str):
        value = re.match(r"(?:.*?: )?argument [^\s:]+ ", message)  # as _Refused has it
        message = re.sub(r"^(.*?: )?argument (?=\S)", r"\1", message)
        if value:
            raise UserError(message)
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        hint = did_you_mean(unknown[1], parser._option_string_actions) if unknown else ""
        if unknown and not hint and any(action.nargs == argparse.REMAINDER for action in parser._actions):
            hint = "; flags of a training run go behind --"
        if lacking := re.fullmatch(r"(\S+): expected one argument", message):
            hint = _with_equals_sign(parser, lacking[1].split("/"), given)
        if unknown and len(words := message.split()) > _SHOWN:
            message = " ".join(words[:_SHOWN]) + f" ... and {len(words) - _SHOWN} words more"
        raise UserError(f"{message}{hint} (--help lists every flag)")

    def get_value(action: argparse.Action, text: str):
        convert = parser._registry_get("type", action.type, action.type)
        try:
            value = convert(text)
        except argparse.ArgumentTypeError as error:
            raise _Refused(action, text, str(error)) from None
        except Exception:  # Megatron's types fail in any way
            known = ", ".join(getattr(choice, "name", str(choice)) for choice in action.choices or ())
            remedy = f"no such value; use one of {known}" if known else f"use {_KINDS.get(convert, 'another value')}"
            raise _Refused(action, text, remedy) from None
        of_verb = "--use-checkpoint-args" not in parser._option_string_actions  # which Megatron's parser has
        if said := beyond(action.option_strings, value, of_verb):
            raise _Refused(action, text, said)
        return value

    def get_values(action: argparse.Action, words: list[str]):
        if not action.option_strings or words != ["--"]:
            return get_all(action, words)
        # Of --FLAG=--, which argparse takes for no value at all.
        value = parser._get_value(action, "--")
        parser._check_value(action, value)
        return value if action.nargs in (None, argparse.OPTIONAL) else [value]

    parser.error = error  # type: ignore[method-assign]
    parser.parse_known_args = parse_known_args  # type: ignore[assignment, method-assign]
    parser._get_value = get_value  # type: ignore[assignment, method-assign]
    parser._get_values = get_values  # type: ignore[assignment, method-assign]
    remember_flags(parser)


def _with_equals_sign(parser: argparse.ArgumentParser, names: list[str], given: list[str]) -> str:
    """How a flag is given a value that begins with a dash; "" where what follows it is another flag of the parser's."""
    for flag, value in pairwise(given):
        if value.startswith("-") and any(name.startswith(flag) for name in names):
            other = parser._option_string_actions.get(value.partition("=")[0])
            if other is None or other.help == argparse.SUPPRESS:  # those are there for what is said of them
                return f'; write {names[-1]}="{value}", with the equals sign'
    return ""


def refuse_empty_values(parser: argparse.ArgumentParser) -> None:
    """Make an empty value a mistake, as of `--cluster "$SITE"` where SITE is not set: it would pass for a flag that was
    not given.  Where nothing is the default (--flags) it stays one, and what stands behind -- is not the verb's own.
    """
    stock = parser._get_value

    def get_value(action: argparse.Action, text: str):
        if not text and action.default != "" and action.nargs not in (argparse.REMAINDER, argparse.PARSER):
            raise _Refused(action, text, "an empty value; give one, or leave it out")
        return stock(action, text)

    parser._get_value = get_value  # type: ignore[assignment, method-assign]


def add_verb(parser: argparse.ArgumentParser, verbs: Mapping[str, Verb]) -> None:
    """Let `parser` take a verb of {name: Verb} and leave the rest to it; `--help` lists them.

    One argument for both: behind a `verb` of its own argparse would drop the -- of `VERB -- FLAGS`.
    """
    parser.add_argument("verb", nargs=argparse.PARSER, choices=verbs, metavar="VERB", help="and its own arguments")
    width = max(map(len, verbs))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["verbs:", *(f"  {name:{width}}  {verb.help}" for name, verb in verbs.items())])
    one_line_usage_errors(parser)


def run_verb(program: str, verbs: Mapping[str, Verb], chosen: argparse.Namespace) -> int:
    """Import the chosen verb's module, which offers `add_arguments(parser)` and `run(args)`; returns its exit code."""
    verb, *rest = chosen.verb
    module = importlib.import_module(verbs[verb].module)
    parser = argparse.ArgumentParser(
        prog=f"{program} {verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one_line_usage_errors(parser)
    refuse_empty_values(parser)
    module.add_arguments(parser)
    has_verbs = any(action.nargs == argparse.PARSER for action in parser._actions)
    return module.run(parser.parse_args(rest or ["--help"] * has_verbs))


def refuse_flags(args: argparse.Namespace, flags: Mapping[str, str], remedy: str) -> None:
    """Raise UserError for the first argument of `flags` ({name in args: flag}) that is set."""
    for name, flag in flags.items():
        value = getattr(args, name, None)
        if value:
            raise UserError(f"{flag}{'' if value is True else f' {value}'} is not supported here: {remedy}")
