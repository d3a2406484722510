"""Run any Megatron-LM script, unchanged, with the FP8 plugin installed.

    torchrun --nproc-per-node 8 -m megatron_fp8 pretrain_gpt.py <Megatron's flags> --fp8-level O1

The script may lie in a Megatron-LM checkout, whose megatron package then comes first, or anywhere else.
"""

import sys

from .entry import one_line_errors, run_script

if __name__ == "__main__":
    with one_line_errors():
        run_script(sys.argv[1:])
