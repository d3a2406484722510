"""`--args-file FILE ...`: flags and environment variables from YAML files, read before Megatron parses its arguments.

    ENV_VARS:
      CUDA_DEVICE_MAX_CONNECTIONS: 1           set if the environment has no such variable
    MODEL_ARGS:
      --num-layers: 32                         a flag and its value, unchanged
      --swiglu: true                           a switch; with false or null (~) the flag is left out
      --rampup-batch-size: [32 32 1000000]     several words: also [32, 32, 1000000], or a list over lines
      --moe-layer-freq: ([0]*1+[1]*11)         one word: only a list or [ ] makes several
      --save: ${OUT}/checkpoints               environment variables are filled in; "[${DATA}]" becomes several words

A later file overrides an earlier one. The command line overrides all files: a flag that is typed there is dropped from
them. The command line cannot turn off a switch; a later file can (`--swiglu: false`).  FILE is a path, or the name of a
shipped file such as `model/gpt-7b`.

The format is that of Megatron-LM's functional tests (tests/functional_tests of its repository). A value becomes words
as in their runner. Other keys of those files are for that runner: they are skipped, with a log line.
This module imports nothing heavy: the variables must be set before torch is imported.
"""

import functools
import os
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..errors import UserError, did_you_mean
from ..shipped import shipped
from .flag import Flag, Values
from .yaml_file import load_yaml, safe_loader

ARGS_FILE = Flag(
    "--args-file",
    "Flags and environment variables from YAML files with ENV_VARS and MODEL_ARGS, as in Megatron's functional tests; "
    "a later file overrides an earlier one, the command line overrides all (docs/launch.md).",
    Values("FILE ..."),
    needs_level=False,
)
FLAGS = (ARGS_FILE,)
VARIABLES, MODEL_ARGS = "ENV_VARS", "MODEL_ARGS"
# Keys for Megatron's test runner. They mean nothing to a training run.
_RUNNERS = re.compile(
    r"TEST_TYPE|MODE|METRICS|LAUNCHER|BEFORE_SCRIPT|AFTER_SCRIPT|MODEL_ENV_VARS|BASE_MODEL_ARGS|MODEL_ARGS_\d+"
    r"|(TRAINING_)?SCRIPT_PATH|THROUGHPUT_TEST_PARAMS"
)
A_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_AT_START = ("LD_", "PYTHON", "GLIBC_", "MALLOC_")  # read when a process starts
_BY_TORCH = ("OMP_", "MKL_", "KMP_", "PYTORCH_", "TORCH_")  # some are read when torch is imported


class Given(NamedTuple):
    """The value of a flag or variable (a text, or a list of words) and the file that sets it."""

    value: str | list[str]
    file: str


@dataclass
class Files:
    """Several files, merged.

    Attributes:
        flags: {flag: value}, in command-line order, without the flags that are switched off.
        variables: {name: value}, likewise.
        passed_over: (file, key) of each key that is for Megatron's test runner.
    """

    flags: dict[str, Given] = field(default_factory=dict)
    variables: dict[str, Given] = field(default_factory=dict)
    passed_over: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Expanded:
    """A command line after its files were read.

    Attributes:
        words: the command line without --args-file; the files' flags come first.
        variables: {name: value} to set; the environment does not have them.
        files: their paths.
        origins: {flag: file} of the words that come from files.
        lines: for the log.
    """

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def expand(words: Sequence[str], environment: Mapping[str, str]) -> Expanded:
    """Read the files that a command line names. Raises UserError of one line: file, flag or key, value, remedy."""
    names, rest = _take_out(list(words))
    if not names:
        return Expanded(rest)
    paths = [str(find(name)) for name in names]
    files = read(paths)
    typed = {word.partition("=")[0] for word in rest if word.startswith("-")}
    variables = {
        name: _fill(str(given.value), environment, f"{given.file}: {name}")
        for name, given in files.variables.items()
        if name not in environment
    }
    known = {**variables, **environment}
    front: list[str] = []
    origins = {flag: given.file for flag, given in files.flags.items() if flag not in typed}
    for flag in origins:
        value, place = files.flags[flag].value, f"{files.flags[flag].file}: {flag}"
        many = isinstance(value, list)
        filled = [_fill(word, known, place) for word in value] if many else _fill(str(value), known, place)
        front += _words(flag, value_words(filled, place) or [])
    lines = [f"{file}: {key}: ignored, it is for Megatron's test runner" for file, key in files.passed_over]
    lines.insert(0, f"{ARGS_FILE.name} {' '.join(paths)}: {len(origins)} flags, {len(variables)} variables")
    if named := sorted(name for name in files.variables if name in environment):
        lines.append(f"{', '.join(named)}: the environment's value is used, not the files'")
    return Expanded([*front, *rest], variables, paths, origins, lines)


def read(paths: Iterable[str]) -> Files:
    """Merge the files; variables in values are not filled in yet. Raises UserError of one line."""
    together = Files()
    for path in paths:
        content = _content(path)
        for key in content:
            if _RUNNERS.fullmatch(key):
                together.passed_over.append((path, key))
            elif key not in (VARIABLES, MODEL_ARGS):
                close = did_you_mean(key, (VARIABLES, MODEL_ARGS))
                raise UserError(f"{path}: {key}: no such key{close}; use {VARIABLES} and {MODEL_ARGS}")
        for key, into, name in (
            (VARIABLES, together.variables, A_VARIABLE),
            (MODEL_ARGS, together.flags, re.compile(r"--?[A-Za-z]\S*")),
        ):
            for label, value in _mapping(path, key, content.get(key)):
                if not name.fullmatch(label):
                    shape = "--a-flag" if key == MODEL_ARGS else "A_NAME"
                    raise UserError(f"{path}: {key}: {label}: not the name of a {_kind(key)}; write {shape}: VALUE")
                if label == ARGS_FILE.name:
                    raise UserError(f"{path}: {label}: a file cannot name other files; name them on the command line")
                check_characters(f"{path}: {key}", label)
                for word in value if isinstance(value, list) else [value]:
                    check_characters(f"{path}: {label}", str(word))
                left_out = value_words(value, f"{path}: {label}") is None
                if key == VARIABLES:
                    if isinstance(value, list):
                        raise UserError(f"{path}: {label}: a list; a variable takes one value")
                    left_out = value is None
                into.pop(label, None)  # move it to the end: several flags may set one argument, the last wins
                if not left_out:
                    into[label] = Given(value, path)
    return together


def find(name: str) -> Path:
    """The file at a path, or the shipped file of that name. Raises UserError of one line."""
    folder = shipped("configs")
    tried = [Path(name), folder / name, folder / f"{name}.yaml"]
    for path in tried:
        if path.exists() and not path.is_dir():  # is_file() would refuse a shell's pipe
            return path
    if tried[0].is_dir():
        raise UserError(f"{ARGS_FILE.name} {name}: a folder; name the files in it")
    known = [str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")]
    close = did_you_mean(name.removesuffix(".yaml"), known)
    raise UserError(f"{ARGS_FILE.name} {name}: no such file, and none of that name is shipped{close}; give its path")


# --- in a run


_NONE = Expanded([])
_read = _NONE  # what this process has read


def apply() -> None:
    """Replace --args-file in sys.argv by the files' flags, and set the variables that the environment lacks."""
    global _read
    found = expand(sys.argv[1:], os.environ)
    if not found.files:
        return
    sys.argv[1:] = found.words
    os.environ.update(found.variables)
    late = _AT_START + (_BY_TORCH if "torch" in sys.modules else ())
    if names := [name for name in found.variables if name.startswith(late)]:
        found.lines.append(f"{', '.join(names)}: set too late for this process; set it in the shell instead")
    _read = found


def forget() -> None:
    """Forget the files: the next command line has its own."""
    global _read
    _read = _NONE


def lines() -> list[str]:
    """The log lines about the files that this process has read."""
    return _read.lines


def check(parser: ArgumentParser, unknown: bool) -> None:
    """Make the parser's errors name the file that a flag comes from.

    unknown: flags that this parser does not know are another parser's. If not, such a flag in a file is a UserError.
    """
    options = parser._option_string_actions
    for flag, file in _read.origins.items():
        if flag not in options and not unknown:
            raise UserError(f"{file}: {flag}: no such flag{did_you_mean(flag, options)}; --help lists every flag")
    without_file = parser.error

    def error(message: str):
        wrong = re.match(r"argument ([^\s:]+)", message)
        files = {_read.origins[flag] for flag in (wrong[1].split("/") if wrong else ()) if flag in _read.origins}
        return without_file(f"{files.pop()}: {message}" if files else message)

    parser.error = error  # type: ignore[method-assign]


# --- reading


def _take_out(words: list[str]) -> tuple[list[str], list[str]]:
    """(the files that a command line names, in order; its other words)."""
    names: list[str] = []
    rest: list[str] = []
    taking = False
    for number, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag == ARGS_FILE.name:
            names += [value] if value else []
            taking = not value
            if taking and (number + 1 == len(words) or words[number + 1].startswith("-")):
                raise UserError(f"{ARGS_FILE.name}: no file given; give one or more")
        elif taking and not word.startswith("-"):
            names.append(word)
        else:
            taking = False
            rest.append(word)
    return names, rest


def _words(flag: str, values: list[str]) -> list[str]:
    """A flag and its values as words of a command line. A value that looks like a flag needs the equals sign."""
    if len(values) == 1 and re.match(r"-[^\d.]", values[0]):
        return [f"{flag}={values[0]}"]
    return [flag, *values]


def _fill(text: str, environment: Mapping[str, str], place: str) -> str:
    def value(found: re.Match) -> str:
        name = found[1] or found[2]
        if name not in environment:
            flag = place.rpartition(": ")[2]
            other = f", or give {flag} on the command line" if flag.startswith("-") else ""
            raise UserError(f"{place} {text}: the variable {name} is not set; set it{other}")
        return environment[name]

    filled = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text, flags=re.ASCII)
    if odd := re.search(r"\$\{(?!\w+\})[^}]*\}?", text, re.ASCII):
        raise UserError(f"{place} {text}: {odd[0]}: only ${{NAME}} is filled in; write that, and set the variable")
    return filled


def check_characters(place: str, text: str) -> None:
    """Raise UserError for a character that a command line cannot hold, or that controls the terminal when pasted."""
    if odd := re.search("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]", text):
        raise UserError(f"{place}: contains U+{ord(odd[0]):04X}, which a command line cannot hold; remove it")


def value_words(value: Any, place: str) -> list[str] | None:
    """The words of a flag's value: an empty list for a switch, None if the flag is switched off."""
    if isinstance(value, list):
        for word in value:
            if not isinstance(word, str):
                raise UserError(f"{place}: a list may hold words only; write [a b] or [a, b]")
        return value
    if isinstance(value, dict):
        raise UserError(f"{place}: a mapping; give a word, a list, true, false or null")
    text = "" if value is None else str(value).strip()
    if text.lower() in ("", "false"):
        return None
    if text.lower() == "true":
        return []
    if several := re.fullmatch(r"\[([^]]+)\]", text):
        try:
            return shlex.split(several[1])
        except ValueError as error:
            raise UserError(f"{place} {text}: {error}; close the quote") from None
    return [text]


def _mapping(path: str, key: str, content: Any) -> Iterable[tuple[str, Any]]:
    if content is None:
        return ()
    if not isinstance(content, dict):
        raise UserError(f"{path}: {key}: is not a mapping; below it write a line for each {_kind(key)}")
    return [(str(label), value) for label, value in content.items()]


def _kind(key: str) -> str:
    return "flag" if key == MODEL_ARGS else "variable"


def _content(path: str) -> dict[str, Any]:
    content = load_yaml(path, loader=_loader())
    if not isinstance(content, dict):
        raise UserError(f"{path}: is not a mapping; write {MODEL_ARGS}:, and below it --A-FLAG: VALUE")
    return {str(key): value for key, value in content.items()}


@functools.cache
def _loader() -> type:
    import yaml

    class Loader(safe_loader()):  # type: ignore[misc]
        """Keeps scalars as text. YAML would read 1:30 as 90, 010 as 8, 1_000 as 1000 and off as false."""

        yaml_implicit_resolvers: ClassVar[dict[str, list]] = {}

        def words(self, node):
            """A list's words. Inside [ ] blanks separate words too."""
            found = []
            for item in node.value:
                value = self.construct_object(item, deep=True)
                plain = node.flow_style and isinstance(item, yaml.ScalarNode) and not item.style
                found += str(value).split() if plain else [value]
            return found

    Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""])
    Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
    Loader.add_constructor("tag:yaml.org,2002:seq", Loader.words)
    return Loader
