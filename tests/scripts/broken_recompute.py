"""Train with a planted bug: a linear's first forward pass, of activations that are recomputed, is off by 2^-7.

Without recomputation there is no such pass, and nothing is wrong.
"""

import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_fp8.plugin import install

install()
from megatron_fp8.layers.linear import _OwnedLinear

stock = _OwnedLinear._forward_impl


def forward(self, *args, **kwargs):
    y = stock(self, *args, **kwargs)
    return y if torch.is_grad_enabled() or not self.training else y * (1 + 2**-7)


_OwnedLinear._forward_impl = forward
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
