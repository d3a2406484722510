"""LoRA: adapters train on a frozen base, in Megatron's own training loop, with a level or without one.

    torchrun --nproc-per-node 8 examples/lora.py pretrain_gpt_fp8.py <its flags> --sft --fp8-level O3
    LORA_RANK=32 torchrun --nproc-per-node 8 examples/lora.py dpo_gpt_fp8.py <its flags> --fp8-level O3

A run begins with a base that has no adapters by --pretrained-checkpoint BASE --dist-ckpt-strictness log_unexpected.
`megatron-fp8 convert to-hf CKPT OUT --merge-adapters` adds the adapters to the weights.

Beside each linear of a layer stands y = W x + B A x. W is frozen: at O3 it is one E4M3 byte a weight, without gradient
and state. A and B are BF16 parameters, trained by stock's optimizer; B begins as 0. The norms, the embedding and the
head are frozen too. With tensor parallelism each rank has its part of A or of B.

Source: Hu et al. (arXiv 2106.09685), with alpha = rank.
"""

import functools
import os
import runpy
import sys
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

LINEARS = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"
COLUMN = "linear_qkv", "linear_fc1"  # divided by outputs over tensor parallelism; the others by inputs


class Lora(torch.nn.Module):
    """base(x) + B A x, on each tensor-parallel rank its part.

    Args:
        base: one of Megatron's or our parallel linears, whose result is (y, bias).
        name: the linear's in the whole model: A's first values, N(0, 1 / inputs), follow from it in any layout.
        rank: of B A.
    """

    def __init__(self, base: torch.nn.Module, name: str, rank: int):
        from megatron.core import mpu

        super().__init__()
        self.base, (n, k), ranks = base, base.weight.shape, mpu.get_tensor_model_parallel_world_size()
        self.column = name.endswith(COLUMN)
        whole = k if self.column else k * ranks
        first = torch.randn(rank, whole, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if not self.column:
            first = first.chunk(ranks, 1)[mpu.get_tensor_model_parallel_rank()]
        gated = base.config.gated_linear_unit and name.endswith("linear_fc1")
        kind = {"device": base.weight.device, "dtype": torch.bfloat16}
        self.lora_a = torch.nn.Parameter((first * whole**-0.5).to(**kind))
        # Over tensor parallelism a rank has a part of each half of a gated linear's outputs.
        shape = (2, n // 2, rank) if gated else (n, rank)
        self.lora_b = torch.nn.Parameter(torch.zeros(shape, **kind))
        (self.lora_b if self.column else self.lora_a).tensor_model_parallel = True
        self.on = True

    def enable_adapter_layers(self) -> None:
        self.on = True

    def disable_adapter_layers(self) -> None:
        """For DPO: the policy without its adapters is the reference (dpo_gpt_fp8.py)."""
        self.on = False

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """What a checkpoint holds. The linear's weight has the name and the form that it has without an adapter."""
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        found = self.base.sharded_state_dict(f"{prefix}base.", sharded_offsets, metadata)
        replace_prefix_for_sharding(found, f"{prefix}base.", prefix)
        if self.lora_b.dim() == 3:  # stock's MLP does it to the linear that it finds under its own name
            whole = (metadata or {}).get("singleton_local_shards", False)
            weight = f"{prefix}base.weight"
            found[weight] = apply_swiglu_sharded_factory(found[weight], sharded_offsets, whole)
        cut = {"lora_b": self.lora_b.dim() - 2} if self.column else {"lora_a": 1}
        tensors = {"lora_a": self.lora_a, "lora_b": self.lora_b}
        return found | make_sharded_tensors_for_checkpoint(tensors, prefix, cut, sharded_offsets)

    def forward(self, x, *args):
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        y, bias = self.base(x, *args)
        if not self.on:
            return y, bias
        reduce = copy_to_tensor_model_parallel_region if self.column else reduce_from_tensor_model_parallel_region
        if getattr(self.base, "layer_norm_weight", None) is None:
            low = F.linear(x, self.lora_a)
        else:  # made again in the backward pass, so that x is kept alone
            low = checkpoint(self._of_norm, x, use_reentrant=False, preserve_rng_state=False)
        return y + F.linear(reduce(low), self.lora_b.flatten(0, -2)), bias

    def _of_norm(self, x: torch.Tensor) -> torch.Tensor:
        """A norm(x). At a level the norm is in the linear's module, and W reads its result: so must A."""
        base, config = self.base, self.base.config
        gain = base.layer_norm_weight + 1 if config.layernorm_zero_centered_gamma else base.layer_norm_weight
        if config.normalization == "RMSNorm":
            normed = F.rms_norm(x, gain.shape, gain, config.layernorm_epsilon)
        else:
            normed = F.layer_norm(x, gain.shape, gain, base.layer_norm_bias, config.layernorm_epsilon)
        return F.linear(normed, self.lora_a)


def check(config) -> None:
    """Raise UserError for a model that these adapters do not fit."""
    from megatron_fp8.errors import UserError

    for flag, given, needs in (
        ("--sequence-parallel", config.sequence_parallel, "whole sequences on each rank"),
        ("--num-experts", config.num_moe_experts, "dense layers"),
        ("--multi-latent-attention", config.multi_latent_attention, "an attention with linear_qkv"),
    ):
        if given:
            raise UserError(f"{flag}: the adapters of examples/lora.py need {needs}; remove the flag")


def add_adapters(model: torch.nn.Module, rank: int) -> None:
    """Freeze a GPTModel, and give each linear of its layers an adapter. Call it before the optimizer is made."""
    check(model.config)
    model.requires_grad_(False)
    if model.pre_process and model.config.recompute_granularity == "full":
        # A layer that is recomputed whole gives its adapters gradients only if its input asks for one. A frozen
        # embedding's result does not, and then no layer's does: nothing would be trained.
        model.embedding.register_forward_hook(lambda module, given, embedded: embedded.requires_grad_())
    for layer in model.decoder.layers:
        for path in LINEARS:
            parent, _, last = path.partition(".")
            module = getattr(layer, parent)
            setattr(module, last, Lora(getattr(module, last), f"{layer.layer_number} {path}", rank))


def install(rank: int) -> None:
    """Let Megatron's training loop add adapters to each model that it builds, before it is distributed."""
    from megatron.training.models import dist_utils

    stock = dist_utils.prepare_existing_model_chunks_for_distributed_training

    @functools.wraps(stock)
    def prepare(model_list, *args, **kwargs):
        for model in model_list:
            add_adapters(model, rank)
        return stock(model_list, *args, **kwargs)

    dist_utils.prepare_existing_model_chunks_for_distributed_training = prepare


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from megatron_fp8.plugin import install as install_plugin

    rank = os.environ.get("LORA_RANK", "16")
    if not rank.isdecimal() or int(rank) < 1:
        sys.exit(f"LORA_RANK={rank}: use a whole number of 1 or more")
    if not sys.argv[1:] or not Path(sys.argv[1]).is_file():
        sys.exit(f"examples/lora.py {' '.join(sys.argv[1:2])}: name the training script first, as pretrain_gpt_fp8.py")
    install_plugin()
    install(int(rank))
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
