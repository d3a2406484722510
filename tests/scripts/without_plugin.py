"""Run pretrain_gpt_fp8.py as stock Megatron on this machine: the plugin's hooks are never installed."""

import runpy
import sys

from launch import ROOT

from megatron_fp8 import cpu, plugin

if cpu.needed():
    cpu.install()
cpu.skip_dataset_compile()
plugin.install = lambda: None
sys.argv += ["--distributed-backend", "gloo"]
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
