"""The script of this repository that IN_FP32 names, pretrain_gpt_fp8.py if none, in which BF16 means FP32. So rounding
does not hide what layouts compute otherwise. It needs a process of its own: modules keep types that they have read."""

import os
import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
torch.bfloat16 = torch.float32
torch.Tensor.bfloat16 = torch.Tensor.float
torch.nn.Module.bfloat16 = torch.nn.Module.float

from megatron_fp8.plugin import install

install()  # before Megatron is imported

if __name__ == "__main__":
    runpy.run_path(str(ROOT / os.environ.get("IN_FP32", "pretrain_gpt_fp8.py")), run_name="__main__")
