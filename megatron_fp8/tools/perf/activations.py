"""Bytes of activations at a rank's peak: those kept for the backward pass, and the temporaries beside them.

A layer keeps, for each token (h hidden, A channels of all heads, K of all query groups, U of fc1's output, F of fc2's
input; i: bytes an element of a linear's input, 1 or 2). Divide each by the tensor-parallel ranks that share it:

    norms' inputs 2 x 2h    qkv's input i h     q, k, v 2 (A + 2K)     attention's output 2A, and FP8's cast of it A
    fc1's input i h         fc1's output 2U     fc2's input i F        softmax's sums 4 a head, norms' 16

For GPT that is 32 h in BF16 (the 34 of Korthikanti et al., arXiv 2205.05198, without dropout's masks) and 27 h with FP8
inputs. With --fp8-activations, norms' inputs and fc1's output take one byte and no linear's input is kept: 14 h. A
frozen linear (--frozen-base) keeps no input, but the adapter beside it does, in BF16. Those of qkv, proj and fc1 are
kept anyway, as a norm's input or attention's output. So fc2's is left: 28 h, at every level.

With --qk-layernorm the inputs of the norms of q and k are kept too, 2 (A + K). Multi-latent attention keeps q and k of
one width and v of another, the input norm's output 2h, and an up projection's input, i bytes and 2 if a norm is before.

In a layer with experts the norm's output is kept in BF16 too, for the router, and its input with --fp8-activations.
Each row that comes to an expert keeps i h + 2U + i F of that expert, and 40 bytes of indices and probabilities. If the
GPU picks the rows (Workload.picks), all tokens of all ranks keep 2h, each row that there is room for 2U and 8 bytes of
indices, and each token and expert a probability. Shared experts keep what an MLP does.

The model assumes flash attention. The peak is in the loss (last stage) or in the backward pass of a layer, with as many
micro-batches in flight as the schedule allows.

A layer's backward pass has its peak in the MLP. With a level's context parallelism the peak may be in attention, when
the MLP's activations are freed. `context` counts the tensors of layers/context_exchange.py on the rank that has most.
What Transformer Engine's attention holds is not counted.
"""

from ...errors import UserError
from ...flags.loss_chunks import rows_of_part
from .workload import MODULES, MOE, Workload

_OF_A_ROW = 40  # bytes: where a routed row comes from, four times in int64, and its probability


def layer(w: Workload, moe: bool = False) -> float:
    """Bytes that a layer keeps of a micro-batch, with the workload's recomputation. moe: whether it has experts."""
    if w.recompute == "full" and w.recomputed_layers is None:
        return _checkpoint(w)
    return _saved(w, w.modules if w.recompute == "selective" else (), moe)


def _saved(w: Workload, modules: tuple[str, ...], moe: bool) -> float:
    known = (*MODULES, MOE) if w.job.num_experts else MODULES
    for module in modules:
        if module not in known:
            raise UserError(f"--recompute-modules {module}: not modelled; {', '.join(known)} are")
    tensor, split, frozen = w.tensor, w.split, w.job.frozen_base
    i = 0 if frozen else w.input_bytes
    hidden = w.job.hidden_size / split
    latent = w.job.multi_latent_attention
    kept = w.fp8_activations  # then the linears' inputs are recomputed from the activations kept in FP8
    saved = (2 * (1 if kept else 2) + (moe + latent) * kept) * hidden + 16 / split  # norms' inputs and statistics
    saved += 2 * 2 * hidden * (kept and frozen)  # an adapter keeps them in BF16
    if "layernorm" not in modules:
        saved += ((not latent) + (not moe)) * i * hidden * (not kept) + 2 * hidden * (moe + latent)
    saved += _of_latents(w, i) if latent else _of_qk_norms(w)
    saved += 2 * (w.query_channels + w.key_channels + w.value_channels) / tensor
    # Stock's projection, and an adapter beside one, keeps the output itself, recomputed or not.
    if "core_attn" not in modules or i != 1:
        saved += 2 * w.output_channels / tensor
    saved += 4 * w.job.num_attention_heads / tensor * ("core_attn" not in modules)
    saved += (i == 1 and not kept) * w.output_channels / tensor
    if (MOE if moe else "mlp") not in modules:
        saved += _of_mlp(w, moe)
    elif "layernorm" not in modules and not moe:
        saved += (2 - i) * hidden  # its input is the norm's output in BF16
    saved += 2 * hidden * w.dropout
    return w.tokens * saved


def _of_qk_norms(w: Workload) -> float:
    """Bytes a token that the norms of q and k keep (--qk-layernorm): their inputs, and the sums of each head."""
    job = w.job
    heads = job.num_attention_heads + job.query_groups
    return (2 * (w.query_channels + w.key_channels) + 4 * heads) / w.tensor * job.qk_layernorm


def _of_latents(w: Workload, i: float) -> float:
    """Bytes a token that multi-latent attention keeps before its up projections, beside the norm's output, which the
    down projections read. i: as at the top."""
    job, kept, of_q, of_kv = w.job, w.fp8_activations, w.job.q_lora_rank, w.job.kv_lora_rank
    inputs = 0.0 if kept else i * ((of_q or job.hidden_size) + of_kv)
    if not job.qk_layernorm:
        if i == 2 and not of_q:
            inputs -= i * job.hidden_size  # q's input is the norm's output
        return inputs / w.split
    # In BF16 the part of k that has positions is cut off the same memory.
    norms = (of_q or job.hidden_size) + of_kv if kept else 2 * ((of_q or 0) + of_kv + job.qk_pos_emb_head_dim)
    return (inputs + norms + 8 * len(job.qk_norms)) / w.split


def _of_mlp(w: Workload, moe: bool) -> float:
    """Bytes a token of what the MLP itself keeps: fc1's output, fc2's input; with experts, all that they keep."""
    of_fc1, of_fc2 = (1 + 1 / 128, 0) if w.fp8_activations else (2, w.input_bytes)
    fc1, ffn = w.mlp(moe)
    saved = (of_fc1 * fc1 + (2 if w.job.frozen_base else of_fc2) * ffn) / w.tensor
    if not moe:
        return saved
    if fc1 and w.input_bytes == 1 and not w.fp8_activations:
        saved += w.job.hidden_size / w.split  # the shared experts' input; in BF16 it is the router's
    return saved + _of_rows(w) / w.tokens


def _of_rows(w: Workload) -> float:
    """Bytes that a layer's routed experts keep."""
    i = 1 if w.experts_fp8 else 2
    (fc1, hidden), (_, ffn) = w.job.expert
    if w.picks:
        a_token = 2 * hidden + (4 if w.router_fp32 else 2) * w.job.local_experts + 4 * min(w.topk, w.job.local_experts)
        return w.gathered_tokens * a_token + w.room_rows * (2 * fc1 + 8)
    return w.padded_rows * (i * hidden + 2 * fc1 + i * ffn) + w.rows * _OF_A_ROW


def _checkpoint(w: Workload) -> float:
    return w.tokens * 2 * w.job.hidden_size / w.split


def chunk(w: Workload, stage: int) -> float:
    """Bytes that a model chunk of a stage keeps of a micro-batch. With experts the stage's chunks count as alike."""
    if w.recompute == "full" and w.recomputed_layers is not None:  # --recompute-method block
        again = w.again("layer")
        each = [(count, again * _checkpoint(w) + (1 - again) * _saved(w, (), moe)) for moe, count in w.kinds(stage)]
    else:
        each = [(count, layer(w, moe)) for moe, count in w.kinds(stage)]
    return sum(count * size for count, size in each) / w.virtual


def in_flight(w: Workload, stage: int) -> float:
    """Micro-batches of a whole stage whose activations are kept at once, under 1F1B or interleaved 1F1B."""
    if w.virtual == 1:
        return min(w.micro_batches, w.pipeline - stage)
    chunks = 2 * (w.pipeline - stage - 1) + (w.virtual - 1) * w.pipeline + 1
    return min(w.micro_batches * w.virtual, chunks) / w.virtual


def peak(w: Workload, stage: int) -> dict[str, float]:
    """{kind: bytes} at the peak of a pipeline stage, on top of the bytes held between two steps."""
    waiting = in_flight(w, stage) * chunk(w, stage) * w.virtual
    backward = max(
        max(_backward_of_a_layer(w, moe), _backward_of_attention(w, moe)) for moe, _ in w.kinds(stage)
    )
    found = {"activations": waiting, "a layer's backward pass": backward}
    if stage == w.pipeline - 1:
        rows = max(1, w.sequence // w.context // int(w.split))
        tokens = w.tokens * rows_of_part(rows, w.loss_chunks) / rows  # whose logits exist at a time, in parts twice
        logits = tokens * w.vocabulary / w.tensor * w.system.logits * (1 + (w.loss_chunks > 1))
        hidden = 2 * tokens * w.job.hidden_size
        beside = 2 * 2 * w.tokens * w.job.hidden_size / w.split + hidden * (w.split > 1)
        if w.system.level:
            beside += hidden
            if not w.system.ours:  # the head's weight gradient in BF16, while the logits become their gradient
                beside += 2 * w.vocabulary * w.job.hidden_size / w.tensor
        if w.fp8_head:
            beside += (2 * tokens + w.job.hidden_size) * w.vocabulary / w.tensor  # both gradients' casts; the weight
        if logits + beside > backward:
            found = {"activations": waiting, "logits": logits, "beside the logits": beside}
    return found | _kept_transposes(w, stage)


def _kept_transposes(w: Workload, stage: int) -> dict[str, float]:
    """W^T of all linears in E4M3, made in a step's first backward pass, freed at its update.

    The first backward pass makes them while it frees its micro-batch's activations. If another micro-batch's
    activations take that place, the peak holds both.
    """
    if not (w.keeps_transposes and w.fp8):
        return {}
    of_all = sum(w.job.linears(stage)) + sum(w.job.experts(stage)) * w.experts_fp8
    freed = 0 if w.micro_batches > in_flight(w, stage) else w.virtual * chunk(w, stage)
    return {"kept transposes": max(0, of_all - freed)}


def _backward_of_a_layer(w: Workload, moe: bool) -> float:
    """Bytes made and freed in a layer's backward pass: gradients of hidden states, MLP and a weight; recomputation.

    Beside a frozen base an adapter's gradient of fc2's input takes the place of a weight's. Routed experts have the
    gradients of their rows, in and out, and of what is between them.
    """
    hidden, frozen = w.job.hidden_size, w.job.frozen_base
    fc1, ffn = w.mlp(moe)
    of_mlp = w.tokens * 2 * (ffn * (1 + frozen) + fc1) / w.tensor
    of_mlp += 2 * max(rows * columns for rows, columns, _ in w.job.layer(moe)) / w.tensor * (not frozen)
    if w.fp8_activations and not frozen:  # fc2's operands wait for its weight gradient while fc1's gradient is cast
        of_mlp += w.tokens * (ffn / w.tensor + hidden)
    if moe:
        of_mlp = max(of_mlp, _backward_of_rows(w))
    return w.tokens * 4 * hidden / w.split + of_mlp + _beside(w, moe)


def _backward_of_rows(w: Workload) -> float:
    """Bytes made and freed in the routed experts' backward pass. Gradients stored in FP8 are made in BF16 first, and
    together those of all experts at once."""
    (fc1, hidden), (_, ffn) = w.job.expert
    at_once = w.job.local_experts if w.together and (w.cells() or {}).get("grad_accum") == "fp8" else 1
    return w.room_rows * 2 * (2 * hidden + fc1 + ffn) + at_once * 2 * fc1 * hidden


def _beside(w: Workload, moe: bool) -> float:
    """Bytes that a layer's whole backward pass has: what is recomputed, and a gathered gradient."""
    again = 0.0
    if w.recompute == "full":
        again = _saved(w, (), moe)
    elif w.recompute == "selective":
        again = _saved(w, (), moe) - _saved(w, w.modules, moe)
    return again + 2 * w.tokens * w.job.hidden_size * (w.split > 1)


def _backward_of_attention(w: Workload, moe: bool) -> float:
    """As `_backward_of_a_layer`, when context parallelism's attention runs; 0 without it."""
    if not w.keys or w.context == 1:
        return 0.0
    moving = w.tokens * (4 * w.job.hidden_size / w.split + 2 * w.query_channels / w.tensor)
    return moving + context(w) + _beside(w, moe) - w.tokens * _of_mlp(w, moe)


def context(w: Workload) -> float:
    """Bytes of tensors that a level's context-parallel attention makes and frees in a layer's backward pass.

    Two sizes, on N ranks:    a rank's own K and V, or their gradients        a tensor in BF16 like its queries

        N = 2                 2.5                                             2, the own block's dQ and the other's
        gathered              N + 2.5, as the own block ends                  3, since more blocks' dQ add up in FP32
                              2 N - 1.5, as the last of the others ends       2.5
        fetched, N = 3, 4     N / 2 + 3.5                                     3
        fetched, more         N / 2 + 5, at most 8                            2.5
    """
    n, own = w.context, 2 * w.tokens * (w.key_channels + w.value_channels) / w.tensor
    like_queries = 2 * w.tokens * w.query_channels / w.tensor
    if n == 2:
        return 2.5 * own + 2 * like_queries
    if not w.fetches:
        return max((n + 2.5) * own + 3 * like_queries, (2 * n - 1.5) * own + 2.5 * like_queries)
    if n <= 4:
        return (n / 2 + 3.5) * own + 3 * like_queries
    return min(n / 2 + 5, 8) * own + 2.5 * like_queries
