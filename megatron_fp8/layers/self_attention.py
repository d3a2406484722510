"""Self-attention whose QKV product is split, and its queries and keys rotated, in one kernel a direction.

    forward   qkv = x W^T  ──►  q, k, v      rotated where they lie, or written once (ops.split_qkv)
    backward  dq, dk, dv   ──►  d qkv        turned back and gathered (ops.join_qkv)

With --qk-layernorm, if it is RMSNorm, a kernel for q and one for k normalise each head too (ops.norm_rotate). They read
the product where it lies, and it is kept for the backward pass; v stays a part of it.

Stock's splits with torch and concatenates the gradients; its rotary embedding, without Transformer Engine, is a dozen
element-wise kernels on BF16. The rest of a layer is stock's own forward pass, which gets no rotary embedding then.

Rotation is fused unless --no-rope-fusion is given, which means stock's arithmetic: cos, sin and products rounded to
BF16. Stock's path also rotates what comes after another norm of q and k, generation, and angles that differ from sample
to sample or from q to k. Of packed sequences both are given each token's own angles (packed.py). Where a rank gathers
other ranks' QKV (fewer groups than tensor-parallel ranks), and with output gates, it splits too.
"""

from typing import NamedTuple

import torch
from megatron.core.transformer.attention import SelfAttention

from .. import ops
from ..flags.config import Fp8Config
from ..ops.source import Payloads
from .attention import TorchAttention
from .function import Function
from .linear import Fp8ColumnParallelLinear, hooked
from .norm import Norm, NormKind
from .packed import Documents, documents_of, same_memory
from .parcel import Parcel, carried


class Rotary(NamedTuple):
    """cos and sin (s, d) in FP32, or None for no rotation; interleaved: whether a pair lies side by side."""

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    interleaved: bool = False


class JoinedGradient:
    """d qkv as a Source, (s * b, groups * (heads_per_group + 2) * hn), of dq, dk and dv."""

    def __init__(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, rotary: Rotary):
        self._gradients, self._rotary = (dq, dk, dv), rotary

    def cast(self, fmt, scale, *, rows, columns, amax_out) -> Payloads:
        cos, sin, interleaved = self._rotary
        return ops.join_qkv(
            *self._gradients, cos, sin, interleaved=interleaved, fmt=fmt, scale=scale, rows=rows, columns=columns,
            amax_out=amax_out,
        )  # fmt: skip

    def values(self) -> torch.Tensor:
        cos, sin, interleaved = self._rotary
        return ops.join_qkv(*self._gradients, cos, sin, interleaved=interleaved)


class SplitQkv(Function):
    """mixed (s, b, groups * (heads_per_group + 2) * hn), which is used up -> q, k, v, as ops.split_qkv.

    maker: the parcel that mixed carries, if its linear takes the gradient in FP8.
    """

    @staticmethod
    def forward(ctx, mixed, groups: int, heads_per_group: int, rotary: Rotary, paired: bool, maker: Parcel | None):
        ctx.rotary, ctx.shape, ctx.maker = rotary, mixed.shape, maker
        cos, sin, interleaved = rotary
        return ops.split_qkv(mixed, groups, heads_per_group, cos, sin, interleaved=interleaved, paired=paired)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        joined = JoinedGradient(dq, dk, dv, ctx.rotary)
        mixed = joined.values().view(ctx.shape) if ctx.maker is None else ctx.maker.post(joined, ctx.shape, dq)
        return mixed, None, None, None, None, None


class NormedSplitQkv(Function):
    """mixed, as in SplitQkv but left as it is, and the norms' weights (hn,) -> q and k, normalised and rotated; v."""

    @staticmethod
    def forward(
        ctx, mixed, q_weight, k_weight, groups: int, heads_per_group: int, rotary: Rotary, paired: bool,
        maker: Parcel | None, kind: NormKind,
    ):  # fmt: skip
        s, b, width = mixed.shape
        r, hn = heads_per_group, width // (groups * (heads_per_group + 2))
        how = {"zero_centered": kind.zero_centered, "interleaved": rotary.interleaved}
        ctx.save_for_backward(mixed, q_weight, k_weight)
        ctx.how, ctx.maker = (groups, r, rotary, kind.eps, how), maker
        heads = mixed.view(s, b, groups, r + 2, hn)
        k, v = None, heads[..., r + 1, :]
        if paired:
            pairs = mixed.new_empty(s, b, groups, 2 * hn)
            k, v = pairs[..., :hn], pairs[..., hn:].copy_(v)
        q = ops.norm_rotate(heads[..., :r, :], q_weight, kind.eps, rotary.cos, rotary.sin, **how)
        k = ops.norm_rotate(heads[..., r : r + 1, :], k_weight, kind.eps, rotary.cos, rotary.sin, **how, out=k)
        return q, k, v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        mixed, q_weight, k_weight = ctx.saved_tensors
        groups, r, (cos, sin, _), eps, how = ctx.how
        heads = mixed.view(*mixed.shape[:2], groups, r + 2, dv.shape[-1])
        dq, dq_weight = ops.norm_rotate_backward(dq, heads[..., :r, :], q_weight, eps, cos, sin, **how)
        dk, dk_weight = ops.norm_rotate_backward(dk, heads[..., r : r + 1, :], k_weight, eps, cos, sin, **how)
        joined = JoinedGradient(dq, dk, dv, Rotary())
        d_mixed = joined.values().view(mixed.shape) if ctx.maker is None else ctx.maker.post(joined, mixed.shape, dq)
        return d_mixed, dq_weight, dk_weight, None, None, None, None, None, None


_KEPT = 2  # tables: of training, and of a validation with another length
_kept: list[tuple[torch.Tensor, int, float, tuple[torch.Tensor, torch.Tensor]]] = []


def cos_sin(angles: torch.Tensor, mscale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (s, d) in FP32, times mscale, of angles (s, 1, 1, d); all layers share them.

    What is kept goes by the memory of `angles`, which is held so that none other can take its place, and by torch's
    count of writes to it: recomputation brings another tensor of the same memory. A CUDA graph that is being captured
    computes them anew, for the angles that will be there when it runs.
    """
    fixed = not angles.is_inference() and not (angles.is_cuda and torch.cuda.is_current_stream_capturing())
    if fixed:
        for kept, version, scale, tables in _kept:
            if version == angles._version and scale == mscale and same_memory(kept, angles):
                return tables
    with torch.no_grad():
        flat = angles.detach()[:, 0, 0].float()
        cos, sin = ((t if mscale == 1.0 else t * mscale).contiguous() for t in (flat.cos(), flat.sin()))
    if fixed:
        _kept.insert(0, (angles.detach(), angles._version, mscale, (cos, sin)))
        del _kept[_KEPT:]
    return cos, sin


def forget_tables() -> None:
    """Forget the tables of a run that has ended."""
    _kept.clear()


class FusedSelfAttention(SelfAttention):
    """Stock's SelfAttention, split and rotated as above; the parameters are stock's."""

    def __init__(self, *args, fp8_config: Fp8Config, **kwargs):
        super().__init__(*args, **kwargs)
        config = self.config
        no_rotation = config.no_rope_freq and config.no_rope_freq[self.layer_number - 1]
        self._splits = config.num_query_groups >= self.world_size and not config.test_mode
        self._rotates = (
            *(self._splits, fp8_config.fuses_rotary, not no_rotation),
            *(not config.attention_output_gate, not config.fused_single_qkv_rope),
        )
        self._rotary = Rotary()  # of the forward pass under way
        # Other ranks are sent both in one tensor.
        self._pairs = config.context_parallel_size > 1 and isinstance(self.core_attention, TorchAttention)

    def forward(self, hidden_states, attention_mask, *args, **kwargs):
        documents, length = self._documents(kwargs), hidden_states.shape[0]
        if self.config.sequence_parallel:
            length *= self.world_size
        if self._fuses(args, kwargs):
            angles = kwargs.pop("rotary_pos_emb")
            tables = cos_sin(angles, self._yarn_concentration_factor)
            if documents is not None:
                tables = tuple(documents.by_position(table, length) for table in tables)
            self._rotary = Rotary(*tables, self.config.rotary_interleaved)
        elif documents is not None and isinstance(angles := kwargs.get("rotary_pos_emb"), torch.Tensor):
            kwargs["rotary_pos_emb"] = documents.by_position(angles, length)
        try:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        finally:
            self._rotary = Rotary()

    def _documents(self, kwargs) -> Documents | None:
        """The documents of a call for packed sequences, which stock then takes for one sample. None for any other call,
        or if the core attention is not ours."""
        params = kwargs.get("packed_seq_params")
        if params is None or params.qkv_format != "thd" or not isinstance(self.core_attention, TorchAttention):
            return None
        kwargs["packed_seq_params"] = documents_of(params)
        return kwargs["packed_seq_params"]

    def _fuses(self, args, kwargs) -> bool:
        """Whether this call's rotation is done with the split."""
        angles = kwargs.get("rotary_pos_emb")
        unusual = ("key_value_states", "inference_context", "inference_params")
        packed = kwargs.get("packed_seq_params")
        return (
            all(self._rotates)
            and self._norms_fuse()
            and not args
            and all(kwargs.get(name) is None for name in unusual)
            and (packed is None or isinstance(packed, Documents))
            and isinstance(angles, torch.Tensor)
            and angles.dim() == 4
            and angles.shape[1:3] == (1, 1)
        )

    def _norms_fuse(self) -> bool:
        """Whether the rotation may follow the norms of q and k, if there are any, in one kernel."""
        norms = self.q_layernorm, self.k_layernorm
        if norms == (None, None):
            return True
        ours = all(type(norm) is Norm and norm.kind.rms and not hooked(norm) for norm in norms)
        return ours and norms[0].kind == norms[1].kind

    def get_query_key_value_tensors(
        self, hidden_states, key_value_states=None, output_gate: bool = False, split_qkv: bool = True
    ):
        """Stock's, with what `forward` has left it to rotate."""
        if output_gate or not split_qkv or not self._splits:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        mixed, _ = self.linear_qkv(hidden_states)
        maker = carried(mixed)
        if hooked(self.linear_qkv) or not isinstance(self.linear_qkv, Fp8ColumnParallelLinear):
            mixed, maker = mixed.clone(), None  # the split uses it up; a hook or a wrapper of the linear may keep it
        groups = self.num_query_groups_per_partition
        heads_per_group = self.num_attention_heads_per_partition // groups
        how = groups, heads_per_group, self._rotary, self._pairs, maker
        if self._rotary.cos is not None and self.q_layernorm is not None:
            norms = self.q_layernorm, self.k_layernorm
            return NormedSplitQkv.apply(mixed, *(norm.weight for norm in norms), *how, norms[0].kind)
        q, k, v = SplitQkv.apply(mixed, *how)
        q = q if self.q_layernorm is None else self.q_layernorm(q)
        k = k if self.k_layernorm is None else self.k_layernorm(k)
        return q, k, v
