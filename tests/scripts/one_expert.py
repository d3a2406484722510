"""Train a model of one expert, or the dense one that it should equal: with first weights and noise by their names in
the dense one, and with nothing fused between the parts of a dense MLP."""

import functools
import runpy
import sys
import zlib

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from megatron_fp8.engine.weight_groups import WeightGroups
from megatron_fp8.layers.linear import Fp8ColumnParallelLinear
from megatron_fp8.numerics.noise import noise_seed

ONLY = "experts.local_experts.0."
wrap = DistributedDataParallel.__init__


def take_apart(linear):
    """Norm, then linear, as experts have them: with the norm's result in BF16."""
    linear.begin = lambda x: (None, x)
    norm, weight = linear._norm, linear.layer_norm_weight
    linear.forward = lambda x: Fp8ColumnParallelLinear.forward(linear, norm(x, weight, None))


@functools.wraps(wrap)
def wrapped(self, config, ddp_config, module, *args, **kwargs):
    model = unwrap_model(module)
    for name, parameter in model.named_parameters():
        name = name.replace(ONLY, "").replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator) + ("norm" in name))
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "linear_fc1"):
            take_apart(layer.mlp.linear_fc1)
            layer.mlp.linear_fc2.register_forward_hook(lambda *seen: None)  # then the activation is made in BF16
    wrap(self, config, ddp_config, module, *args, **kwargs)


def identity(self, weight, seed):
    return noise_seed(seed, self.rank, weight.layer_number, *weight.path.replace(ONLY, "").encode())


DistributedDataParallel.__init__, WeightGroups.identity = wrapped, identity
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
