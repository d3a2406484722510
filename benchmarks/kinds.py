"""Kinds of GPU kernels, recognised by their names: ours, torch's, cuBLASLt's, cuDNN's and Transformer Engine's.

Names cannot tell everything. torch's contiguous BF16 additions count as residual adds, though an unfused rotary
embedding makes some too; its strided products count as rotary; all of torch's sorting and indexing counts as embedding,
though experts' rows are sorted by it too, if no fused kernel does it.
A kernel that does two things (norm and cast) counts as the first; compare it with the sum of both floors.
"""

import re

FORWARD, BACKWARD, BF16 = "FP8 GEMM forward", "FP8 GEMM backward", "BF16 GEMM (LM head)"
ATTENTION, ROTARY, NORM, ACTIVATION = "attention", "rotary, QKV", "norm", "activation"
CAST, GRADIENTS, RESIDUAL, LOSS = "cast, transpose", "gradient adds", "residual adds", "cross-entropy"
EMBEDDING, OPTIMIZER, ROUTING = "embedding", "optimizer", "router, permutation"
COPY, COMMUNICATION, OTHER = "copy, memset", "communication", "other"
GEMMS = (FORWARD, BACKWARD, BF16)
# Bound by memory.
PASSES = (CAST, GRADIENTS, NORM, ACTIVATION, ROTARY, LOSS, RESIDUAL, EMBEDDING, ROUTING, OPTIMIZER, COPY, OTHER)
ORDER = (*GEMMS, ATTENTION, *PASSES, COMMUNICATION)

_PATTERNS = (  # (kind, pattern of a clean name); the first match counts
    (COMMUNICATION, r"nccl"),
    # ours, by their first words
    (ROTARY, r"^_(qkv|norm_rotate)_"),
    (NORM, r"^_(norm|parts_sum)_"),  # _parts_sum: also of biases' gradients
    (RESIDUAL, r"^_residual_"),
    (ATTENTION, r"^_attention_"),
    (ACTIVATION, r"^_(activate|weighted)_"),
    (LOSS, r"^_cross_entropy_"),
    (EMBEDDING, r"^_embedding_"),
    (ROUTING, r"^_combine_"),
    (GRADIENTS, r"^_(quantize|add)_kernel"),  # ops/triton/blocks.py
    (OPTIMIZER, r"^_(adam|sum)_kernel"),  # _sum: of ranks' blocks and of squares
    (BACKWARD, r"^_ZN7cutlass\w*float_e5m2"),  # the profiler leaves these names mangled
    (FORWARD, r"^_ZN7cutlass\w*float_e4m3"),
    (CAST, r"^_\w*(flat|tile|cast|transpose|quant|block|groups)"),
    # of experts: ours, and Transformer Engine's
    (ROUTING, r"^_(un)?permute_|^_row_id_map_|chunk_sort_map|sort_chunks_by_map|fused_router|multi_(un)?padding"),
    # libraries
    (ATTENTION, r"fmha|flash|sdpa|cudnn::fusion|softmax_warp|masked_softmax"),
    # nvjet_sm90_ABCSD_: types of A, B, C, sums and D; q is E4M3, r E5M2, t BF16, s FP32
    (BACKWARD, r"nvjet_sm\d+_(r|qr)|cutlass.*e5m2"),
    (FORWARD, r"nvjet_sm\d+_qq|cutlass.*e4m3"),
    (BF16, r"nvjet|gemm|cutlass|xmma|cublas|splitK"),
    (ACTIVATION, r"gelu|silu|swiglu|relu|gated|triton_\w*(sigmoid|tanh|erf)"),
    (LOSS, r"cross_entropy|online_softmax|triton_\w*(_exp_|_max_|_log_|_div_|index_put|copy__mul_unsqueeze)"),
    (OPTIMIZER, r"adam|multi_tensor_apply|lpnorm"),
    (NORM, r"layer_?norm|rms_?norm|normalization|welford|RowwiseMoments|GammaBeta|triton_\w*rsqrt"),
    (ROTARY, r"rope_|rotary|CatArrayBatchedCopy|neg_kernel|^elementwise_kernel<.*nocast<BinaryFunctor<.*MulFunctor"),
    (CAST, r"transformer_engine::.*(cast|transpose|quant|amax|scal|dbias|unary_)|^(cast_)?transpose_optimized"),
    (GRADIENTS, r"^unrolled_elementwise_kernel<CUDAFunctor_add<float>"),  # FP32 += BF16
    (RESIDUAL, r"elementwise_kernel<.*CUDAFunctor_add<BFloat1|triton_\w+_fused_add_\d"),
    # torch's backward pass of an embedding sorts the tokens and adds one segment of equal tokens at a time
    (EMBEDDING, r"compute_grad_weight|sum_and_scatter|krn_partial|radix_sort|unique_by_key"),
    (EMBEDDING, r"gather_kernel|index_?select|indexing_backward|index_elementwise|embedding"),
    (COPY, r"memcpy|memset|copy|FillFunctor"),
)
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS)


def clean(name: str) -> str:
    """A kernel's name without the parts that all of torch's share."""
    return re.sub(r"^void |\(anonymous namespace\)::|at::native::|at_cuda_detail::|c10::", "", name)


def kind_of(name: str) -> str:
    """The kind of a kernel, from its whole name in the profile."""
    name = clean(name)
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)
