"""Print the command line that --args-file would make of some files.

    megatron-fp8 args model/gpt-7b layout/gpt-7b-32gpus recipe/gpt-7b -- --fp8-level O3
    eval "torchrun --nproc-per-node 8 pretrain_gpt_fp8.py $(megatron-fp8 args model/gpt-7b mine.yaml)"
    eval "$(megatron-fp8 args --variables mine.yaml)"

Quoted for a shell. What stands behind -- wins over the files, as on a command line.
"""

import os
import shlex
from argparse import REMAINDER, ArgumentParser, Namespace

from ..errors import UserError
from ..flags.args_file import ARGS_FILE, expand


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
        for name, value in found.variables.items():
            print(f"export {name}={shlex.quote(value)}")
    else:
        print(shlex.join(found.words))
    return 0
