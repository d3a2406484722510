"""Train and save as earlier versions did: shared experts are stock's parameters, in BF16."""

import runpy
import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron_fp8.layers import spec

spec._with_our_linears = lambda build, fp8: build
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
