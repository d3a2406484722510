"""Multi-latent attention (DeepSeek): keys and values are computed from one small vector a token.

    q  = W_uq norm(W_dq x)        or W_q x, without --q-lora-rank
    c, r = W_dkv x                c: --kv-lora-rank numbers, r: one rotated key for all heads
    k, v = W_ukv norm(c)          the norms with --qk-layernorm
    y  = W_o attention(q, [k r], v)

W_q, W_uq, W_ukv and W_o are column- and row-parallel linears with FP8 GEMMs, and the engine owns their weights.  The
down projections W_dq and W_dkv stay in BF16, and stock owns them; they are a few percent of a layer.  As in Megatron's
Transformer Engine spec, every tensor-parallel rank has them whole, and its own tokens under sequence parallelism.  The
local spec cuts them by columns, gathers x for them once more, and forgets to sum r's gradient over the ranks.
--mla-down-proj-fusion makes one column-parallel linear of both. It is switched off here, but both start with the values
that it would have drawn. Megatron's own module does the rest.

On a GPU Megatron's Triton kernels rotate, if --rope-type is yarn and documents are not packed; elsewhere torch does,
and with --no-rope-fusion.
"""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from ..flags.config import Fp8Config
from .linear import Fp8ColumnParallelLinear, Fp8NormColumnParallelLinear, Fp8RowParallelLinear

_HEADS = 8  # of a tile of Megatron's rotation, at most


def of_one_size(tuned):
    """A kernel of Megatron's rotation, tuned[grid](...), that picks the heads of a tile by timing: with a fixed number.

    It divides the number of heads. The kernels mask a tile's heads as if it were the first, so one that does not divide
    them reads and writes the next token's.
    """
    place = tuned.arg_names.index("head_num")

    class OneSize:
        def __getitem__(self, grid):
            def launch(*args):
                tuned.fn[grid](*args, BLOCK_H=math.gcd(args[place], _HEADS))

            return launch

    return OneSize()


class ReplicatedLinear(torch.nn.Module):
    """x -> (y = x W^T in BF16, no bias). W (N, K) is the same on all tensor-parallel ranks; stock Megatron trains it.

    Under sequence parallelism each rank sees its own tokens. Megatron sums the gradients of parameters that are marked
    `sequence_parallel`.
    """

    def __init__(self, input_size: int, output_size: int, *, config, tp_group, drawn: bool = True, **_):
        super().__init__()
        self._tp_group = tp_group
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel
        if config.perform_initialization and drawn:
            with torch.no_grad(), get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                config.init_method(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None

    def get_extra_state(self) -> None:
        """None, as Megatron's own linears have: Transformer Engine's expect an entry of that name in a checkpoint."""

    def set_extra_state(self, state) -> None:
        """Ignored: Transformer Engine's holds the state of its FP8."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        groups = {"tp_group": self._tp_group, "dp_cp_group": ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]}
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, None, sharded_offsets, **groups)


class _PassesForColumnParallel(ModuleSpec):
    """A spec that Megatron accepts, although it accepts only its own classes: it compares the spec with them by `==`.

    To build another linear first and replace it would draw random numbers, and then every later weight would start with
    other values than stock's.
    """

    def __eq__(self, other):
        return other is ColumnParallelLinear


def _can_draw_fused(config) -> bool:
    """Whether stock can train with one linear for W_dq and W_dkv.  Values drawn on the CPU are not gathered here."""
    if config.q_lora_rank is None or not config.perform_initialization or config.use_cpu_initialization:
        return False
    latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
    return config.q_lora_rank % config.tensor_model_parallel_size == latent % config.tensor_model_parallel_size == 0


def _drawn_fused(config, tp_group) -> tuple[torch.Tensor, torch.Tensor]:
    """W_dq and W_dkv as one column-parallel linear would start them; each rank draws a part of both."""
    rows = config.q_lora_rank // tp_group.size(), (config.kv_lora_rank + config.qk_pos_emb_head_dim) // tp_group.size()
    device = torch.cuda.current_device()
    part = torch.empty(sum(rows), config.hidden_size, dtype=config.params_dtype, device=device)
    with torch.no_grad(), get_cuda_rng_tracker().fork():
        config.init_method(part)
    parts = [torch.empty_like(part) for _ in range(tp_group.size())]
    torch.distributed.all_gather(parts, part, group=tp_group)
    of_q, of_kv = zip(*(whole.split(rows) for whole in parts), strict=True)
    return torch.cat(of_q), torch.cat(of_kv)


class LatentAttention(MLASelfAttention):
    """Megatron's MLASelfAttention with our linears; the parameter names are those of its Transformer Engine spec."""

    _drawn: tuple[torch.Tensor, torch.Tensor] | None = None  # the down projections' first values, during __init__

    def __init__(self, config, submodules, *args, fp8_config: Fp8Config, **kwargs):
        self._fp8_config = fp8_config
        super().__init__(config, submodules, *args, **kwargs)
        if self._drawn is not None:
            for module, values in zip((self.linear_q_down_proj, self.linear_kv_down_proj), self._drawn, strict=True):
                module.weight.data.copy_(values)
            self._drawn = None

    def _resolve_qk_norm_config(self, submodules):
        """The class of each part, as Megatron chooses them under Transformer Engine: each linear holds its own norm.

        Megatron asks before it builds the first of them.
        """
        if not submodules.linear_q_down_proj.params.get("drawn", True):
            self._drawn = _drawn_fused(self.config, self.tp_group)
        column = ModuleSpec(Fp8ColumnParallelLinear, {"fp8_config": self._fp8_config})
        fused = ModuleSpec(Fp8NormColumnParallelLinear, {"fp8_config": self._fp8_config})
        up = fused if self.config.qk_layernorm else column
        return {
            "linear_q_proj": up,
            "linear_q_up_proj": up,
            "linear_kv_up_proj": up,
            "q_layernorm": IdentityOp,
            "kv_layernorm": IdentityOp,
        }

    def _qkv_down_projection(self, hidden_states):
        q, kv = super()._qkv_down_projection(hidden_states)
        if not self.config.sequence_parallel:
            # Each rank has some of the heads. So it has a part of the gradient of the key that all heads share.
            latent, shared_key = kv.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
            shared_key = copy_to_tensor_model_parallel_region(shared_key, group=self.tp_group)
            kv = torch.cat([latent, shared_key], dim=-1)
        return q, kv


def is_latent(spec) -> bool:
    """Whether `spec` describes Megatron's multi-latent self-attention."""
    return isinstance(spec, ModuleSpec) and spec.module in (MLASelfAttention, FusedMLASelfAttention)


def convert_latent(attention: ModuleSpec, core_attention, config, fp8: Fp8Config) -> ModuleSpec:
    """A multi-latent attention's spec, of either of Megatron's two modules, with our linears."""
    down = _PassesForColumnParallel(ReplicatedLinear, {"drawn": not (fp8.draws_fused and _can_draw_fused(config))})
    return dataclasses.replace(
        attention,
        module=LatentAttention,
        params={**attention.params, "fp8_config": fp8},
        submodules=dataclasses.replace(
            attention.submodules,
            linear_q_down_proj=down,
            linear_kv_down_proj=down,
            linear_proj=functools.partial(Fp8RowParallelLinear, fp8_config=fp8),
            core_attention=core_attention,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )
