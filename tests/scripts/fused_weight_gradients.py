"""pretrain_gpt_fp8.py as on a GPU: stock's linears and the embedding add their gradients to main_grad themselves.

Each rank prints `added N`: how often the embedding did.
"""

import runpy
import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
import megatron.core.tensor_parallel.layers as layers

from megatron_fp8 import ops
from megatron_fp8.gemm import fused_wgrad

# As if apex were installed, which Megatron may have looked for already.
sys.modules[fused_wgrad.NAME] = layers.fused_weight_gradient_mlp_cuda = fused_wgrad.MODULE
layers._grad_accum_fusion_available = True
added, stock = [0], ops.add_rows


def add_rows(*given):
    added[0] += 1
    stock(*given)


ops.add_rows = add_rows
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
print(f"added {added[0]}\n", end="", flush=True)
