"""Floating-point operations of a step, counted as Megatron-LM's log does and as FP8-LM's paper does.

    Megatron   6 T (W L + V h) + 6 T s A L      T tokens a step, W weights of a layer, A channels of all heads, of
                                                queries and values the mean: causal attention, half of its square,
                                                recomputation not counted; of routed experts those that a token takes,
                                                without the router
    FP8-LM     24 * 3 T L h^2 (1 + s / (6 h) + V / (16 L h))         the whole square; for ffn = 4 h

MFU divides by the peak rate of the linears' format. The output names the peak with every MFU (Megatron-LM #1276).
"""

from .workload import Workload


def step(w: Workload) -> float:
    """FLOPs of a global batch on all GPUs, as Megatron-LM counts them."""
    tokens, job = w.global_batch * w.sequence, w.job
    routed = w.topk * sum(rows * columns for rows, columns, _ in job.mlp(job.expert_width)) if job.num_experts else 0
    weights = sum(sum(rows * columns for rows, columns, _ in job.layer(moe)) + routed * moe for moe in job.moe)
    weights += job.num_layers * sum(rows * columns for rows, columns in job.down)
    attention = w.sequence * (w.query_channels + w.output_channels) / 2 * job.num_layers
    return 6.0 * tokens * (weights + w.vocabulary * job.hidden_size + attention)


def papers_step(w: Workload) -> float:
    """FLOPs of a global batch on all GPUs, as FP8-LM's paper counts them."""
    hidden, layers = w.job.hidden_size, w.job.num_layers
    tokens = w.global_batch * w.sequence
    return 72.0 * tokens * layers * hidden**2 * (
        1 + w.sequence / (6 * hidden) + w.job.vocab_size / (16 * layers * hidden)
    )


def parameters(w: Workload) -> float:
    """Parameters of the whole model; a tied head counts once."""
    job = w.job
    linears = sum(rows * columns for rows, columns, _ in job.linear_sizes) * job.num_layers
    return linears + w.vocabulary * job.hidden_size * (1 + job.untie_embeddings_and_output_weights)
