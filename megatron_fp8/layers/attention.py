"""Core attention on torch's scaled_dot_product_attention: BF16, causal, no Transformer Engine needed.

    softmax(Q K^T * scale + causal mask) V        softmax in FP32 inside the kernel, nothing of size s x s stored

On Hopper the cuDNN kernel is the fastest that torch has, so it is asked first: 520 / 406 TFLOP/s forward / backward
at 4 x 32 heads x 2048 x 128 on an H200, against 284 / 217 for the flash kernel.  Grouped-query attention passes the
few K and V heads as they are.
"""

import math

import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention import SDPBackend, sdpa_kernel

_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class TorchAttention(MegatronModule):
    """Causal self-attention with the constructor and call of Megatron's DotProductAttention.

    query (s, b, np, hn), key and value (s, b, ng, hn) -> (s, b, np * hn).  The attention mask is not read: `spec.py`
    chooses stock's attention where anything but causal is configured.  --apply-query-key-layer-scaling divides and
    multiplies the logits back around an FP16 product; in FP32 there is nothing to do.

    Raises ValueError for another mask, a bias, packed sequences, or queries and keys of different lengths.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

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
        if packed_seq_params is not None:
            raise ValueError("packed sequences (--sft) need --fp8-attention te with Transformer Engine installed")
        causal = attn_mask_type in (None, AttnMaskType.causal) and attention_bias is None
        if not causal or query.shape[0] != key.shape[0]:
            raise ValueError(
                "torch's attention is causal self-attention only: for generation with a key-value cache, or another "
                "mask, use --attention-backend unfused"
            )
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # (b, heads, s, hn), views
        dropout = self.dropout if self.training else 0.0
        if dropout and not self.config.sequence_parallel:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                out = self._attend(q, k, v, dropout)
        else:
            out = self._attend(q, k, v, dropout)
        sq, b = query.shape[:2]
        return out.permute(2, 0, 1, 3).reshape(sq, b, -1)

    def _attend(self, q, k, v, dropout):
        with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, scale=self.scale, enable_gqa=k.shape[1] != q.shape[1]
            )
