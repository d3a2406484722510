"""owned_experts.py on the CPU, its graphs tapes (tests/tape.py), its undefined memory poisoned (poisoned_experts.py).

    experts_on_tape.py [FLAGS]
"""

import runpy
import sys

from launch import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/scripts")]

import tape

tape.install()

import poisoned_experts

from megatron_fp8 import ops
from megatron_fp8.gemm import grouped

poisoned_experts.poison()
grouped.rows, grouped.sums, ops.quantize_groups = map(tape.Whole, (grouped.rows, grouped.sums, ops.quantize_groups))
runpy.run_path(str(ROOT / "tests/scripts/owned_experts.py"), run_name="__main__")
