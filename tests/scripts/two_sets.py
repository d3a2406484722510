"""Train with the second linears of the MLPs as a set of their own, and someone who counts casts and steps."""

import atexit
import dataclasses
import runpy
import sys
from collections import Counter

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron_fp8.engine import weight_groups
from megatron_fp8.engine.events import Observer
from megatron_fp8.engine.optimizer import EngineOptimizer


class Counting(Observer):
    """A new observer."""

    def cast(self, weight, role, x, q):
        seen[f"role {role}"] += 1

    def end_step(self):
        seen["steps"] += 1


seen: Counter[str] = Counter()
build = EngineOptimizer.__init__


def watched(self, *args):
    build(self, *args)
    self.events.subscribe(Counting())
    print(f"sets {[(owned.of.name, len(owned.weights)) for owned in self.sets]}\n", end="", flush=True)


EngineOptimizer.__init__ = watched
# A second set, under its own name in noise and checkpoints.
second = {"name": "fc2.", "has": lambda w: w.path.endswith("linear_fc2")}
weight_groups.register(lambda linears: dataclasses.replace(linears, **second))
atexit.register(lambda: print(f"seen {dict(sorted(seen.items()))}\n", end="", flush=True))
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
