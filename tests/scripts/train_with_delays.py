"""pretrain_gpt_fp8.py, its host late by up to 30 ms, at random and by other times on each rank, before each replay of
a graph and each step of the optimizer."""

import functools
import os
import random
import runpy
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_fp8.engine import optimizer, step_graph

lateness = random.Random(int(os.environ["RANK"]))


def late(stock):
    @functools.wraps(stock)
    def call(*args, **kwargs):
        time.sleep(lateness.random() * 0.03)
        return stock(*args, **kwargs)

    return call


if __name__ == "__main__":
    step_graph.Recorded.replay = late(step_graph.Recorded.replay)
    optimizer.EngineOptimizer.step_with_ready_grads = late(optimizer.EngineOptimizer.step_with_ready_grads)
    runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
