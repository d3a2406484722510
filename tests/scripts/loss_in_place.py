"""Train; at the end a line says how many losses were ours, and how many of their gradients took the logits' place."""

import runpy
import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.layers import cross_entropy as layer

calls = {"losses": 0, "in place": 0}


def counted(name, key):
    stock = getattr(layer, name)

    def call(*given):
        calls[key] += 1
        return stock(*given)

    setattr(layer, name, call)


counted("cross_entropy", "losses")
counted("increment_version", "in place")
try:
    runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
finally:
    print(f"calls {calls}\n", end="", flush=True)
