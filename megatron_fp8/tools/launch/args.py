"""Print the command line that --args-file makes from files.

    megatron-fp8 args model/gpt-7b layout/gpt-7b-32gpus recipe/gpt-7b -- --fp8-level O3
    eval "torchrun --nproc-per-node 8 pretrain_gpt_fp8.py $(megatron-fp8 args model/gpt-7b mine.yaml)"
    eval "$(megatron-fp8 args --variables mine.yaml)"

The output is quoted for a shell. Flags behind -- override the files, as on a command line.
"""

import os
import shlex
import sys
from argparse import REMAINDER, ArgumentParser, Namespace

from ...errors import UserError
from ...flags.args_file import ARGS_FILE, expand
from .shell import check_variables


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 args`."""
    parser.add_argument("--variables", action="store_true", help="print the variables instead, as exports")
    parser.add_argument("files", nargs="+", metavar="FILE", help="YAML files, or shipped ones' names: model/gpt-7b")
    flags = parser.add_argument("flags", nargs=REMAINDER, metavar="-- FLAGS", help="flags that override the files")
    flags.required = False  # else argparse lists them as missing beside FILE


def run(args: Namespace) -> int:
    """Print the command line, or one line for each variable."""
    if "--variables" in args.flags:  # argparse takes all words after the files as FLAGS
        raise UserError("--variables: put it before the files")
    flags = args.flags[1:] if args.flags[:1] == ["--"] else args.flags
    found = expand([ARGS_FILE.name, *args.files, *flags], os.environ)
    if args.variables:
        check_variables(found.variables)
        _put("".join(f"export {name}={shlex.quote(value)}\n" for name, value in found.variables.items()))
    else:
        _put(f"{shlex.join(found.words)}\n")
    return 0


def _put(text: str) -> None:
    """Write text as the bytes that the shell gave us for its words."""
    try:
        content = os.fsencode(text)
    except UnicodeEncodeError as error:
        said = f"{text[error.start]!a}: this shell's character set ({error.encoding}) does not have it"
        raise UserError(f"{said}; set LC_ALL=C.UTF-8") from None
    sys.stdout.buffer.write(content)
