"""owned_experts.py with --moe-grouped-gemm, whose undefined memory is poisoned; says how often experts ran together,
and how many products would on a GPU have copied all of their weights first, or been a loop over their gradients.

    grouped_experts.py [FLAGS]      FP8_TEST_LOOP=1  they run one by one nevertheless
                                    FP8_TEST_DISPATCHER=stock  rows are sorted, and counted on the host, as in stock
"""

import atexit
import os
import runpy
import sys

from launch import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests/scripts")]
import poisoned_experts

from megatron_fp8.engine.bank import Bank
from megatron_fp8.gemm import grouped
from megatron_fp8.layers import experts, uncounted

together, lie_together = experts.experts_together, grouped.together
calls = copies = 0


def lying_together(tensors):
    global copies
    copies += grouped.spaced(tensors) is None
    return lie_together(tensors)


def counted(*args):
    global calls
    calls += 1
    return together(*args)


poisoned_experts.poison()
grouped.together = lying_together
experts.experts_together = counted
if os.environ.get("FP8_TEST_LOOP"):
    Bank.ready = False
if os.environ.get("FP8_TEST_DISPATCHER") == "stock":
    uncounted.OURS.pop(uncounted.MoEAlltoAllTokenDispatcher)
# In one write, so that two ranks' lines do not mix.
atexit.register(lambda: os.write(1, f"\ntogether {calls}\ncopied {copies}\nlooped {poisoned_experts.loops}\n".encode()))
runpy.run_path(str(ROOT / "tests/scripts/owned_experts.py"), run_name="__main__")
