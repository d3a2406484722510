"""Milliseconds of memory-bound kernels: systems.py gives bytes an element; here the elements are counted."""

from .hardware import Hardware
from .systems import (
    CAST_ACTIVATION,
    FP8_HEAD,
    LATENT_ROPE,
    LOGITS_AGAIN,
    NORM_ROTATE,
    PERMUTE,
    PERMUTE_FUSED,
    PERMUTE_HERE,
    QK_NORM,
    REJOIN,
    RESIDUAL_IN_GEMM,
    ROUTED_ACTIVATION,
    STOCK_STATE,
    TE_GRAPH_COPIES,
    UNFUSED_ROPE,
    UNREPAIRED_SPLIT,
)
from .workload import Workload


def layer(w: Workload, hardware: Hardware, moe: bool = False) -> dict[str, float]:
    """{kind: ms} of a layer's forward and backward pass, for a micro-batch on one rank. moe: if it has experts."""
    system, job, tensor, trained = w.system, w.job, w.tensor, not w.job.frozen_base
    hidden = job.hidden_size / w.split
    qkv = (w.query_channels + w.key_channels + w.value_channels) / tensor
    heads, fc1, ffn = (size / tensor for size in (w.output_channels, *w.mlp(moe)))
    blocks = 1 + bool(fc1)  # attention, and an MLP of linears
    if system.level and system.transpose:  # here norms, activations and the join of QKV's gradients cast their outputs
        cast = heads + blocks * hidden
        if job.multi_latent_attention:  # the up projections' gradients are not joined
            cast += sum(rows for rows, _, across in job.attention if across) / tensor
    else:
        cast = (blocks * hidden + heads + ffn) + (qkv + fc1 + blocks * hidden)
    split = system.qkv
    if system.level is None and not w.repaired:
        split = UNREPAIRED_SPLIT
    in_gemm = system.ours and w.fp8 and tensor == 1 and not w.dropout
    residual = RESIDUAL_IN_GEMM if in_gemm else system.residual
    rope, normed = system.rope * (job.position_embedding_type == "rope"), system.norm * _of_qk_norms(w)
    if system.level and job.multi_latent_attention:
        rope *= LATENT_ROPE / system.rope
    elif system.level and job.qk_layernorm and job.normalization == "RMSNorm":
        rope, normed = rope * NORM_ROTATE / system.rope, 0.0
    elif system.level and job.qk_layernorm:
        rope, normed = rope * UNFUSED_ROPE / system.rope, QK_NORM * _of_qk_norms(w)
    moved = {
        "norm": system.norm * 2 * hidden + normed,
        "cast": system.cast * cast * w.fp8,
        "activation": system.activation * (0.6 * fc1 + 0.4 * ffn),
        "rotary, QKV": split * qkv + rope * (w.query_channels + w.key_channels) / tensor,
        "residual adds": residual * 2 * hidden,
    }
    weights = sum(rows * columns for rows, columns, _ in job.layer(moe)) / tensor
    of_weights = {"cast": _of_a_weight(w) * weights, "gradient adds": (system.add + _of_a_sum(w)) * weights * trained}
    if w.graphed and w.fp8 and system.level is None:
        of_weights["graphs' copies"] = TE_GRAPH_COPIES * weights
    routed = _routed(w) if moe else {}
    kinds = moved | of_weights | routed  # in this order
    return {
        kind: hardware.pass_ms(w.tokens * moved.get(kind, 0) + of_weights.get(kind, 0) + routed.get(kind, 0))
        for kind in kinds
    }


def _of_qk_norms(w: Workload) -> float:
    """Channels a token of --qk-layernorm's norms: of each head, or of what latent attention projects up."""
    if w.job.multi_latent_attention:
        return sum(w.job.qk_norms) / w.split
    return (w.query_channels + w.key_channels) / w.tensor * w.job.qk_layernorm


def _routed(w: Workload) -> dict[str, float]:
    """{kind: bytes} of a layer's routed experts and their router. The router's product is not counted."""
    job, h = w.job, w.job.hidden_size
    (fc1, _), (_, ffn) = job.expert
    weights = job.local_experts * (fc1 * h + h * ffn)
    rows, ours = w.padded_rows, w.system.level is not None
    joined = ours and w.together and job.swiglu  # the activation function is a part of the casts
    cast = w.system.cast * rows * (2 * h + (fc1 + ffn) * (not joined)) * w.experts_fp8
    cast += 2 * rows * (h + fc1 * joined) * w.picks  # x and fc1's output are read once more
    permute = (PERMUTE_FUSED if w.permute_fused else PERMUTE) + REJOIN * (ours or not w.together)
    here = w.picks or (w.dispatcher == "alltoall" and job.expert_ranks == 1 and not w.permute_fused)
    if ours and w.together and here:
        permute = PERMUTE_HERE
    if job.expert_model_parallel_size > 1 and job.local_experts > 1 and w.dispatcher == "alltoall":
        permute += 16  # from the order of ranks to that of experts and back, forward and backward
    return {
        "cast": cast + _of_a_weight(w) * weights * (w.experts_owned or not ours),
        "gradient adds": _of_a_sum(w) * weights * w.experts_owned,
        "activation": (CAST_ACTIVATION if joined else ROUTED_ACTIVATION) * rows * (0.6 * fc1 + 0.4 * ffn),
        "permutation": permute * w.rows * h,
    }


def _of_a_sum(w: Workload) -> float:
    """Bytes an element, every micro-batch, to add a weight's gradient in blocks of FP8 (engine/grad_store.py): the
    BF16 gradient is read, and the sum written, and from a step's second micro-batch on read before. Arithmetic."""
    in_fp8 = (w.cells() or {}).get("grad_accum") == "fp8"
    return (3 + 4 * (w.micro_batches - 1)) / w.micro_batches * in_fp8


def _of_a_weight(w: Workload) -> float:
    """Bytes an element, every micro-batch, to prepare a weight for its GEMMs."""
    if w.fp8:  # kept transposes are made only in a step's first micro-batch
        return w.system.transpose / (w.micro_batches if w.keeps_transposes else 1)
    cells = w.cells()
    # A weight stored in E4M3 is decoded to BF16 for the forward and for the backward pass: reads 1 byte, writes 2.
    return 2 * 3 if cells and cells["weight"] == "fp8" else 0


def loss(w: Workload, hardware: Hardware) -> dict[str, float]:
    """{kind: ms} of the last stage's work outside its layers, for a micro-batch."""
    size = w.system.loss + (2 * FP8_HEAD if w.fp8_head else 0)
    if w.loss_chunks > 1:
        size += LOGITS_AGAIN
    return {
        "cross-entropy": hardware.pass_ms(size * w.tokens * w.vocabulary / w.tensor),
        "norm": hardware.pass_ms(w.system.norm * w.tokens * w.job.hidden_size / w.split),
    }


def table(w: Workload, hardware: Hardware) -> float:
    """Ms of the gradient of an embedding or a head, for a micro-batch."""
    if w.job.frozen_base:
        return 0.0
    return hardware.pass_ms(w.system.table * w.vocabulary * w.job.hidden_size / w.tensor)


def step(w: Workload, hardware: Hardware, linears: float, others: float, experts: float = 0) -> dict[str, float]:
    """{kind: ms} of a step's optimizer and copies. linears, others, experts: numbers of parameters on the rank."""
    if w.job.frozen_base:
        return {}
    of_owners = (w.system.state * linears + STOCK_STATE * others) / w.job.data_parallel_size
    state = w.system.state if w.experts_owned else STOCK_STATE
    of_owners += state * experts / (w.job.expert_data_parallel_size if experts else 1)
    return {
        "optimizer": hardware.pass_ms(of_owners),
        "copies": hardware.pass_ms(w.system.other * (linears + others + experts)),
    }
