"""Train with OptimizerConfig.grad_norm_skip_threshold, which has no flag, at the environment's THRESHOLD.

Every step ends with a line: how often a step began, was judged and was ended by those that look on.
"""

import os
import runpy
import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
import megatron.training.training as training

from megatron_fp8.monitor.collect import Monitor
from megatron_fp8.monitor.watch import Watch

stock = training.get_megatron_optimizer_config
calls = {"begin_step": 0, "judge": 0, "end_step": 0}


def with_threshold(args):
    config, overrides = stock(args)
    config.grad_norm_skip_threshold = float(os.environ["THRESHOLD"])
    return config, overrides


def counted(owner, name):
    method = getattr(owner, name)

    def call(self, *given):
        calls[name] += 1
        print(f"calls {calls}\n", end="", flush=True)
        return method(self, *given)

    setattr(owner, name, call)


training.get_megatron_optimizer_config = with_threshold
for owner, name in ((Monitor, "begin_step"), (Watch, "judge"), (Monitor, "end_step")):
    counted(owner, name)
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
