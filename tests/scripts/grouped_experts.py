"""owned_experts.py with --moe-grouped-gemm, whose undefined memory is poisoned; says how often experts ran together,
and how many products would on a GPU have copied all of their weights first, or been a loop over their gradients.

    grouped_experts.py [FLAGS]      FP8_TEST_LOOP=1  they run one by one nevertheless
                                    FP8_TEST_DISPATCHER=stock  rows are sorted, and counted on the host, as in stock
"""

import atexit
import os
import runpy
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8 import ops
from megatron_fp8.engine.bank import Bank
from megatron_fp8.gemm import grouped
from megatron_fp8.layers import experts, model
from megatron_fp8.ops.groups import TILE

rows, sums, cast, together = grouped.rows, grouped.sums, ops.quantize_groups, experts.experts_together
lie_together = grouped.together
calls = copies = loops = 0


def lying_together(tensors):
    global copies
    copies += grouped.spaced(tensors) is None
    return lie_together(tensors)


def poisoned_rows(a, weights, out, **how):
    return rows(a, weights, out.fill_(torch.nan), **how)


def poisoned_sums(dy, x, into, accumulate=False):
    global loops
    loops += grouped.spaced(into) is None
    for place in into if not accumulate else ():
        place.fill_(torch.nan)
    sums(dy, x, into, accumulate=accumulate)


def poisoned_cast(x, groups, *args, **kwargs):
    payload, columns = cast(x, groups, *args, **kwargs)
    end = int(groups.first[-1]) * TILE
    for codes in (None if payload is None else payload[end:], None if columns is None else columns[:, end:]):
        if codes is not None:
            codes.view(torch.uint8).fill_(0x7F)
    return payload, columns


def counted(*args):
    global calls
    calls += 1
    return together(*args)


grouped.rows, grouped.sums, ops.quantize_groups = poisoned_rows, poisoned_sums, poisoned_cast
grouped.together = lying_together
experts.experts_together = counted
if os.environ.get("FP8_TEST_LOOP"):
    Bank.ready = False
if os.environ.get("FP8_TEST_DISPATCHER") == "stock":
    model.keep_counts_here = lambda chunk: None
# In one write, so that two ranks' lines do not mix.
atexit.register(lambda: os.write(1, f"\ntogether {calls}\ncopied {copies}\nlooped {loops}\n".encode()))
runpy.run_path(str(ROOT / "tests/scripts/owned_experts.py"), run_name="__main__")
