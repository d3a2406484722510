"""Print the command line that --args-file would make of some files.

    megatron-fp8 args model/gpt-7b layout/gpt-7b-32gpus recipe/gpt-7b -- --fp8-level O3
    eval "torchrun --nproc-per-node 8 pretrain_gpt_fp8.py $(megatron-fp8 args model/gpt-7b mine.yaml)"
    eval "$(megatron-fp8 args --variables mine.yaml)"

Quoted for a shell. What stands behind -- wins over the files, as on a command line.
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
    flags = parser.add_argument("flags", nargs=REMAINDER, metavar="-- FLAGS", help="of the command line")
    flags.required = False  # argparse would list them as missing beside FILE


def run(args: Namespace) -> int:
    """Print one line; or a line a variable."""
    if "--variables" in args.flags:  # argparse gives all that follows the files to the command line
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
    """As the bytes that the shell, whose words some of it are, has for it."""
    try:
        content = os.fsencode(text)
    except UnicodeEncodeError as error:
        said = f"{text[error.start]!a}: the character set of this shell ({error.encoding}) has no such character"
        raise UserError(f"{said}; set LC_ALL=C.UTF-8") from None
    sys.stdout.buffer.write(content)
