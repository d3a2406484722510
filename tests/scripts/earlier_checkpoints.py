"""Train and save as earlier versions did: stock's part of the optimizer state in stock's default form."""

import runpy
import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8 import plugin
from megatron_fp8.flags import stock as stock_flags

stock_flags.TABLE[:] = [row for row in stock_flags.TABLE if row.flag != "--dist-ckpt-optim-fully-reshardable"]
plugin.install()
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
