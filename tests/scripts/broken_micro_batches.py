"""Train with a planted bug: gradients are divided by one micro-batch too many, losses are not."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_fp8.plugin import install

install()
from megatron.core.pipeline_parallel import schedules

stock = schedules.forward_step_calc_loss


def forward_step_calc_loss(*args):
    *before, micro_batches, store, size, is_last = args
    return stock(*before, micro_batches + 1, store, size, is_last)


schedules.forward_step_calc_loss = forward_step_calc_loss
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
