"""Run any Megatron-LM script, unchanged, with the FP8 plugin installed.

    torchrun --nproc-per-node 8 -m megatron_fp8 pretrain_gpt.py <Megatron's flags> --fp8-level O1

The script may be anywhere. If it is in a Megatron-LM checkout, that checkout's megatron package is used.
"""

import os
import runpy
import sys

from .errors import UserError
from .flags import args_file
from .flags.usage import hide_missing_package_warnings, one_line_errors
from .version import described

USAGE = "usage: python -m megatron_fp8 SCRIPT [the script's flags] [--fp8-level LEVEL]"


def run_script(argv: list[str]) -> None:
    """Install the plugin and run the script argv[0] as __main__ with argv[1:] as its arguments.

    Raises UserError if there is no script, or it does not exist.
    """
    if not argv:
        raise UserError(f"no script given; {USAGE}")
    if argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    if argv[0] == "--version":
        print(f"megatron_fp8 {described()}")
        return
    if not os.path.isfile(argv[0]):
        raise UserError(f"{argv[0]}: no such script; {USAGE}")
    # Do what `python SCRIPT` does, before the plugin imports Megatron: a checkout's own megatron must come first.
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    args_file.apply()  # before torch is imported: it sets variables
    hide_missing_package_warnings()
    from .plugin import install

    install()
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    with one_line_errors():
        run_script(sys.argv[1:])
