"""Core attention without Transformer Engine: on torch's scaled_dot_product_attention, or in Megatron's unfused kernel.

    softmax(Q K^T * scale + causal mask) V        softmax in FP32 inside the kernel, nothing of size s x s stored

On Hopper cuDNN's kernel is the fastest that torch has, so torch tries it first: 520 / 406 TFLOP/s forward / backward
at 4 x 32 heads x 2048 x 128 on an H200, against 284 / 217 for the flash kernel.  In grouped-query attention the few K
and V heads are passed as they are.  V's heads may have another size (multi-latent attention).  A window, or documents
that do not see each other (--reset-attention-mask), need a mask of booleans; the kernels that read one are slower.
Packed sequences need no mask (packed.py).
"""

import contextlib
import functools
import math

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn.attention import SDPBackend

from ..errors import UserError
from . import context_parallel
from .packed import Documents, attend, documents_of
from .parcel import hold

_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.OVERRIDEABLE,  # of other devices
]
_ORDER = [int(backend) for backend in _FASTEST_FIRST]


@contextlib.contextmanager
def _fastest_first():
    """Have torch try its kernels in this order. torch's own sdpa_kernel also enables each kernel, though all are
    enabled, and does so again at the end: it costs the host 28 us a layer, and this costs 2."""
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(_ORDER)
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


def _window_of(config, layer_number: int) -> int | None:
    """How many keys before its own a query of this layer sees, as in Transformer Engine; None: all.

    Attention is causal, so the part of --window-size about later keys has no effect.
    """
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    return None if config.window_size[0] < 0 else config.window_size[0]


@functools.lru_cache(maxsize=2)
def _causal_band(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(s, s), True where query i sees key j: i - window <= j <= i.  Layers share it."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(-window)


def forget_bands() -> None:
    """Forget the masks of a run that has ended."""
    _causal_band.cache_clear()


class TorchAttention(MegatronModule):
    """Causal self-attention with the constructor and call of Megatron's DotProductAttention.

    query (s, b, np, hn), key (s, b, ng, hn), value (s, b, ng, hv) -> (s, b, np * hv).  With `reads_mask` the attention
    mask (b, 1, s, s), True for hidden keys, is applied too (--reset-attention-mask); else it is not read.
    --apply-query-key-layer-scaling scales the logits down before an FP16 product and up after it; in FP32 there is
    nothing to do.  For packed sequences b is 1, or left out: query (t, np, hn) -> (t, np * hv).

    Raises UserError for another kind of mask, a bias, dropout in packed sequences, queries and keys of different
    lengths, or packed sequences that context parallelism has cut document by document.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        k_channels=None,
        v_channels=None,
        cp_comm_type=None,
        pg_collection=None,
        reads_mask=False,
    ):
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.window = _window_of(config, layer_number)
        self.reads_mask = reads_mask
        self.context = pg_collection.cp if config.context_parallel_size > 1 else None
        self.fetches = cp_comm_type == "p2p"
        if self.context is not None and (self.window is not None or reads_mask or self.dropout):
            raise UserError(
                f"--context-parallel-size {config.context_parallel_size}: without --window-size, "
                "--reset-attention-mask and --attention-dropout only; remove them, or add --fp8-attention te"
            )

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        causal = attn_mask_type in (None, AttnMaskType.causal) and attention_bias is None
        if not causal or query.shape[0] != key.shape[0]:
            raise UserError(
                "torch's attention is causal self-attention only: for generation with a key-value cache, or another "
                "mask, use --attention-backend unfused"
            )
        if packed_seq_params is not None:
            return self._packed(query, key, value, documents_of(packed_seq_params))
        if self.context is not None:
            with _fastest_first():
                return context_parallel.attention(query, key, value, self.scale, self.context, self.fetches)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # (b, heads, s, hn), views
        seen = None
        if self.window is not None or self.reads_mask:
            seen = _causal_band(q.shape[2], self.window, q.device)
        if self.reads_mask:
            if attention_mask is None:
                raise UserError("--reset-attention-mask: no attention mask has come to this layer; remove the flag")
            seen = seen & ~attention_mask
        dropout = self.dropout if self.training else 0.0
        forks = dropout and not self.config.sequence_parallel
        drawing = tensor_parallel.get_cuda_rng_tracker().fork() if forks else contextlib.nullcontext()
        with drawing, _fastest_first():
            grouped = k.shape[1] != q.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, seen, dropout_p=dropout, is_causal=seen is None, scale=self.scale, enable_gqa=grouped
            )
        sq, b = query.shape[:2]
        y = out.permute(2, 0, 1, 3).reshape(sq, b, -1)
        # The kernels' backward pass reads their output, so they keep it; the one in plain torch does not.
        if hasattr(type(out.grad_fn), "_saved_output") and y.data_ptr() == out.data_ptr():
            hold(y)
        return y

    def _packed(self, query, key, value, documents: Documents) -> torch.Tensor:
        if self.dropout and self.training:
            raise UserError(
                "--sft: packed sequences know no dropout: give --attention-dropout 0, or --fp8-attention te"
            )
        if self.context is not None and documents.context is None:
            raise UserError(
                "--context-parallel-size with packed sequences that another script has cut, document by document: run "
                "pretrain_gpt_fp8.py, or add --fp8-attention te"
            )
        if self.context is not None:
            return context_parallel.attention(query, key, value, self.scale, self.context, documents=documents)
        q, k, v = (t.squeeze(1) if t.dim() == 4 else t for t in (query, key, value))
        out = attend(q, k, v, documents, self.window, self.scale)
        y = out.reshape(*query.shape[:-2], -1)
        if out.is_cuda and out.grad_fn is not None and y.data_ptr() == out.data_ptr():
            hold(y)  # the kernel's backward pass reads it
        return y


class UnfusedAttention(DotProductAttention):
    """Megatron's kernel, whose logits take memory (b, np, s, s). Here values may have another size, and windows are as
    above."""

    def __init__(self, config, layer_number, *args, k_channels=None, v_channels=None, **kwargs):
        # A sink (--softmax-type learnable) draws its first value here, and does not in Transformer Engine. So the
        # generator is put back: later weights start as stock's do.
        with torch.random.fork_rng([torch.cuda.current_device()]):
            super().__init__(config, layer_number, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        softmax = self.scale_mask_softmax
        window = _window_of(config, layer_number)
        softmax.window_size = None if window is None else (window, 0)
        # It may choose a fused kernel that knows no window and no mask but the causal one, and does not say so.
        softmax.scaled_masked_softmax_fusion &= config.window_size is None

    def forward(self, *args, packed_seq_params=None, **kwargs):
        if packed_seq_params is not None:
            raise UserError(
                "packed sequences (--sft) are not for Megatron's unfused attention: remove --attention-backend and "
                "--softmax-type, or use --fp8-attention te"
            )
        return super().forward(*args, **kwargs)
