"""pretrain_gpt_fp8.py, where all that engine/step_end.py answers is asked of stock too: a rank fails where they differ,
in a digit or in type, and prints how often it compared them."""

import os
import runpy
import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8 import run
from megatron_fp8.engine.step_end import SameEverywhere

compared = []


def beside(stock, ours):
    def both(value, group=None):
        found, expected = ours(value, group=group), stock(value, group=group)
        assert found == expected and type(found) is type(expected), (value, found, expected)
        compared.append(found)
        return found

    return both


class BesideStock(SameEverywhere):
    def logical_and(self, stock):
        return beside(stock, super().logical_and(stock))

    def largest(self, stock):
        return beside(stock, super().largest(stock))


run.SameEverywhere = BesideStock
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
print(f"\nrank {os.environ['RANK']} compared {len(compared)}\n", end="", flush=True)
