"""Train with all products split into a rank's own rows and the others' (layers/parallel.py), as large ones are."""

import runpy
import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.layers import parallel

parallel.SPLIT_FROM = 0
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
