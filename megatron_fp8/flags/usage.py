"""Command-line behaviour: a `--help` that works, one line for a user's mistake, and the verbs of `megatron-fp8`.

pretrain_gpt_fp8.py, `python -m megatron_fp8` and the plugin, which wraps Megatron's argument parser, share it.
It imports nothing heavy, so that a mistake in a command's first word is answered at once.
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
from . import told
from .bounds import beyond
from .stock_errors import remember_flags, stock_mistake, through_callback

_LONG = 60  # characters
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}
_AROUND_IT = re.compile(r"( when instantiating \w+)+$")  # Megatron's build_module adds this, once for each module
# torch adds this in a worker that reads data: a traceback, which ends with the error's own line
_IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker.*\nmegatron_fp8\.errors\.\w+: ", re.DOTALL)
_SHOWN = 12  # most unknown words to show: a whole command may be unknown


class Verb(NamedTuple):
    """A verb of the command line: its module, which is imported when the verb is used, and its line in `--help`."""

    module: str
    help: str


@contextlib.contextmanager
def one_line_errors(of_ranks: bool = True) -> Iterator[None]:
    """End the process with a line on stderr for each of a user's mistakes, and exit code 2.

    of_ranks: the process may be a rank of a run; of mistakes that all ranks meet rank 0 alone prints the lines.

    A user's mistake is a UserError, or a check of Megatron's own that fails before the first step
    (flags/stock_errors.py). Any other exception is a bug, ours or another's, and passes through.
    """
    try:
        yield
    except Exception as error:
        ours = isinstance(error, UserError)
        mistake = None if ours else stock_mistake(error)
        if not ours and mistake is None:
            raise
        messages = [mistake] if mistake is not None else [_bare(str(part)) for part in error.args]
        line = "\n".join(f"megatron_fp8: {_one_line(message)}" for message in messages)
        if of_ranks and told.rank() and told.is_told(line):
            sys.exit(2)
        before = f"{traceback.format_exc()}\n" if not ours and through_callback(error) else ""
        print(f"{before}{line}", file=sys.stderr, flush=True)
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # torchrun ends with a long report of its own; this makes the line its root cause. A job's script reads
            # "passing" there: whether a restart may help (scripts/slurm/train.sbatch).
            passing = isinstance(error, PassingError)
            details = {"py_callstack": before + line, "timestamp": str(int(time.time())), "passing": passing}
            with open(report, "w") as file:
                json.dump({"message": {"message": before + line, "extraInfo": details}}, file)
        if of_ranks and not told.rank():
            told.tell(line)
        sys.exit(2)


def _bare(message: str) -> str:
    """A UserError's line without what torch's data loader and Megatron's builders put around it."""
    return _AROUND_IT.sub("", _IN_WORKER.sub("", message).rstrip("\n"))


def _one_line(message: str) -> str:
    """Escape control characters, such as line breaks in a value."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda found: repr(found[0])[1:-1], message)


def hide_missing_package_warnings() -> None:
    """Silence warnings on import: Megatron's about optional packages and about an experimental class that is not used
    here, torch's about a CUDA toolkit without a GPU."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    absent = r"(Transformer Engine and Apex|Apex|absl.logging) (are|is) not installed|Only transformer-eng"
    warnings.filterwarnings("ignore", message=f"{absent}|MimoModelConfig is", category=UserWarning)


def escape_bad_help(parser: argparse.ArgumentParser) -> None:
    """Make `--help` work if a help text contains a bare % (megatron-core 0.19.2 has some).

    argparse expands help texts with the % operator, which accepts %(name)s and %%. Idempotent.
    """
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%(%|\()?", lambda found: found[0] if found[1] else "%%", action.help)


class _Refused(argparse.ArgumentError):
    """A value that is not accepted: the flag as it was given, and the remedy."""

    def __init__(self, action: argparse.Action, text: str, remedy: str):
        super().__init__(action, f"{shown(text)}: {remedy}")

    def __str__(self) -> str:
        return f"argument {self.argument_name} {self.message}"


def shown(word: str) -> str:
    """A word of the command line for an error line: unprintable characters escaped, long words cut."""
    word = word if word.isprintable() else ascii(word)[1:-1]
    if not word:
        return "''"
    return word if len(word) <= _LONG else f"{word[:_LONG]}..."


def one_line_usage_errors(parser: argparse.ArgumentParser) -> None:
    """Make a wrong flag or value a UserError. argparse would print Megatron's 30,000 characters of usage, or a
    traceback for some of Megatron's value types.

    Every value of a command line passes through here: the flag's type converts it, bounds.py bounds it.
    """
    get_all, parse = parser._get_values, parser.parse_known_args
    given: list[str] = []

    def parse_known_args(args=None, namespace=None):
        given[:] = sys.argv[1:] if args is None else args
        for word in given:
            if re.search("[\0\ud800-\udfff]", word):
                raise UserError(f"{shown(word)}: not UTF-8 text, or contains a zero byte; write it in UTF-8")
            if re.search(r"\d{1000}", word):  # Python's int() reads 4,300
                raise UserError(f"{shown(word)}: a number of more than 1,000 digits; write a shorter one")
        return parse(args, namespace)

    def error(message: str):
        value = re.match(r"(?:.*?: )?argument [^\s:]+ ", message)  # the form of _Refused
        message = re.sub(r"^(.*?: )?argument (?=\S)", r"\1", message)
        if value:
            raise UserError(message)
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        hint = did_you_mean(unknown[1], parser._option_string_actions) if unknown else ""
        if unknown and not hint and any(action.nargs == argparse.REMAINDER for action in parser._actions):
            hint = "; put a training run's flags behind --"
        elif unknown and not hint and "--flags" in parser._option_string_actions:
            hint = '; put a training run\'s flags into --flags="..."'
        elif re.match("unrecognized arguments: [^-]", message) and any(
            action.nargs == argparse.ONE_OR_MORE and not action.option_strings for action in parser._actions
        ):
            hint = "; put it beside the others, before or behind all flags"
        if lacking := re.fullmatch(r"(\S+): expected one argument", message):
            hint = _with_equals_sign(parser, lacking[1].split("/"), given)
        if unknown and len(words := message.split()) > _SHOWN:
            message = " ".join(words[:_SHOWN]) + f" ... and {len(words) - _SHOWN} more words"
        raise UserError(f"{message}{hint} (--help lists every flag)")

    def get_value(action: argparse.Action, text: str):
        convert = parser._registry_get("type", action.type, action.type)
        try:
            value = convert(text)
        except argparse.ArgumentTypeError as error:
            raise _Refused(action, text, str(error)) from None
        except Exception:  # Megatron's types raise any kind of error
            known = ", ".join(getattr(choice, "name", str(choice)) for choice in action.choices or ())
            remedy = f"no such value; use one of {known}" if known else f"use {_KINDS.get(convert, 'another value')}"
            raise _Refused(action, text, remedy) from None
        of_verb = "--use-checkpoint-args" not in parser._option_string_actions  # Megatron's parser has this flag
        if said := beyond(action.option_strings, value, of_verb):
            raise _Refused(action, text, said)
        return value

    def get_values(action: argparse.Action, words: list[str]):
        if not action.option_strings or words != ["--"]:
            return get_all(action, words)
        # argparse takes the value of --FLAG=-- for no value at all.
        value = parser._get_value(action, "--")
        parser._check_value(action, value)
        return value if action.nargs in (None, argparse.OPTIONAL) else [value]

    parser.error = error  # type: ignore[method-assign]
    parser.parse_known_args = parse_known_args  # type: ignore[assignment, method-assign]
    parser._get_value = get_value  # type: ignore[assignment, method-assign]
    parser._get_values = get_values  # type: ignore[assignment, method-assign]
    remember_flags(parser)


def _with_equals_sign(parser: argparse.ArgumentParser, names: list[str], given: list[str]) -> str:
    """The hint for a value that begins with a dash; "" if the next word is another flag of the parser."""
    for flag, value in pairwise(given):
        if value.startswith("-") and any(name.startswith(flag) for name in names):
            other = parser._option_string_actions.get(value.partition("=")[0])
            if other is None or other.help == argparse.SUPPRESS:  # hidden flags exist only for their error line
                return f'; write {names[-1]}="{value}", with the equals sign'
    return ""


def refuse_empty_values(parser: argparse.ArgumentParser) -> None:
    """Make an empty value a mistake: `--cluster "$SITE"` with SITE unset would look like a flag that was not given.

    Not if the default is empty (--flags), nor for words behind --, which are not the verb's own.
    """
    stock = parser._get_value

    def get_value(action: argparse.Action, text: str):
        if not text and action.default != "" and action.nargs not in (argparse.REMAINDER, argparse.PARSER):
            raise _Refused(action, text, "an empty value; give one, or leave it out")
        return stock(action, text)

    parser._get_value = get_value  # type: ignore[assignment, method-assign]


def add_verb(parser: argparse.ArgumentParser, verbs: Mapping[str, Verb]) -> None:
    """Make `parser` accept a verb of {name: Verb} and the verb's own words; `--help` lists the verbs.

    Verb and words are one argument: with two, argparse would drop the -- of `VERB -- FLAGS`.
    """
    parser.add_argument("verb", nargs=argparse.PARSER, choices=verbs, metavar="VERB", help="and its own arguments")
    width = max(map(len, verbs))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["verbs:", *(f"  {name:{width}}  {verb.help}" for name, verb in verbs.items())])
    one_line_usage_errors(parser)


def run_verb(program: str, verbs: Mapping[str, Verb], chosen: argparse.Namespace) -> int:
    """Import the chosen verb's module, parse its words and run it. Returns the exit code.

    The module has `add_arguments(parser)` and `run(args)`.
    """
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
    """Raise UserError for the first argument that is set. flags: {name in args: flag}."""
    for name, flag in flags.items():
        value = getattr(args, name, None)
        if value:
            raise UserError(f"{flag}{'' if value is True else f' {value}'} is not supported here: {remedy}")
