"""Collectives of a step on one rank: bytes inside a node and between nodes, their time, and the exposed ("bare") part.

Ranks are numbered as in Megatron: tensor parallelism innermost, then context, data, pipeline. In a ring of n ranks each
rank sends (n - 1) / n of the payload. If the ring leaves the node, all its ranks in a node share their ports. In an
all-to-all each rank sends as much, but different data to every rank, so data for another node leaves by the rank's own
port.

    data        reduction of gradients: 4 bytes a parameter of stock's (FP32 reduce-scatter; --grad-reduce-in-bf16: 2),
                1 + 1/128 of our linears (an all-to-all of blocks; with --fp8-grad-reduce-hierarchy inside a node, then
                between nodes); gather of weights: 2 (BF16) or 1 (E4M3). Embeddings, head, norms: stock's 6 (4)
    tensor      with sequence parallelism, a layer and micro-batch: forward a gather and a reduce-scatter for each of
                attention and MLP, backward the same and the gather of the linear's input once more
    pipeline    an activation forward and a gradient backward, a micro-batch and boundary
    tokens      of layers with experts, to the ranks that have the experts and back (`_dispatch`)
    context     keys and values forward, and again backward with their gradients. A level sends 3/4 of the gradients,
                and of keys and values if it fetches them (layers/context_exchange.py). The bare share is assumed

If recomputation repeats part of a layer's forward pass, the collectives of that part are repeated too.

The bare shares come from profiled steps (systems.py: bare_*). A collective that cannot overlap is fully bare. For our
tensor parallelism the share follows from the GEMM beside each collective (layers/parallel.py): `_beside_gemms`. Even a
hidden collective costs time: the profiles of two ranks (train_step_tp2.csv, four calls) show 3 to 7 ms bare, and
forward GEMMs that take 7 to 10 ms longer than Transformer Engine's, whose gathers are bare. That is half of the 21 ms
that the collectives would take alone.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from .gemm_time import products
from .hardware import Hardware
from .workload import MOE, Workload

_BARE_CONTEXT = 0.3
_OF_HIDDEN = 0.5  # ms added to a step by each ms of a tensor-parallel collective that a GEMM hides


class Traffic(NamedTuple):
    """Traffic of one rank in a step: bytes sent inside its node and to other nodes, ms taken, and ms added to the step
    (the bare part, and what the rest slows the GEMMs beside it)."""

    inside: float
    between: float
    ms: float
    bare: float


def step(w: Workload, hardware: Hardware, linears: float, others: float, experts: float = 0) -> dict[str, Traffic]:
    """{kind: Traffic} of data parallelism in a step. linears, others, experts: numbers of parameters on the rank."""
    found = {}
    ranks, stride = w.job.data_parallel_size, w.tensor
    s, of_stocks = w.system, w.job.stock_gradient
    wire = min(s.gradient_wire, of_stocks)
    if ranks > 1 and not w.job.frozen_base:
        bare = s.bare_gradients if w.overlap_reduce else 1.0
        reduce = _all_to_all if s.ours else _ring
        found["gradients: linears"] = reduce(w, hardware, ranks, stride, wire * linears, bare)
        # Only our buckets are launched as they fill; stock's reductions under a level come at the end.
        late = 1.0 if s.level else bare
        found["gradients: all else"] = _ring(w, hardware, ranks, stride, of_stocks * others, late)
        bare = s.bare_weights if w.overlap_gather else 1.0
        found["weights: linears"] = _ring(w, hardware, ranks, stride, s.weight_wire * linears, bare)
        found["weights: all else"] = _ring(w, hardware, ranks, stride, 2 * others, bare)
    alike = w.job.expert_data_parallel_size if experts else 1
    if alike > 1:
        owned, stride = w.experts_owned, w.job.expert_ranks
        bare = s.bare_gradients if w.overlap_reduce and (owned or s.level is None) else 1.0
        reduce, wire = (_all_to_all, wire) if owned else (_ring, of_stocks)
        found["gradients: experts"] = reduce(w, hardware, alike, stride, wire * experts, bare)
        bare = s.bare_weights if w.overlap_gather else 1.0
        wire = s.weight_wire if owned or s.level is None else 2
        found["weights: experts"] = _ring(w, hardware, alike, stride, wire * experts, bare)
    return found


def micro_batches(w: Workload, hardware: Hardware, stage: int = 0) -> dict[str, Traffic]:
    """{kind: Traffic} of the collectives inside a stage's passes, for all micro-batches of a step."""
    found: dict[str, Traffic] = {}
    for moe, layers in w.kinds(stage):
        for of_kind in (_tensor(w, hardware, moe, layers), _dispatch(w, hardware, layers) if moe else {}):
            for kind, traffic in of_kind.items():
                before = found.get(kind, Traffic(0, 0, 0, 0))
                found[kind] = Traffic(*(a + b for a, b in zip(before, traffic, strict=True)))
    if w.pipeline > 1:
        size = 2 * w.tokens * w.job.hidden_size / w.split
        times = 2 * w.micro_batches * w.virtual
        crosses = w.gpus > hardware.gpus_per_node
        rate = hardware.network_gb_s if crosses else hardware.nvlink_gb_s
        ms = times * (size / rate / 1e6 + hardware.collective_ms)
        found["pipeline"] = Traffic(0 if crosses else times * size, times * size if crosses else 0, ms, ms)
    if w.context > 1:
        often = (2 + w.again("core_attn")) * (0.75 if w.fetches else 1) + (0.75 if w.keys else 1)
        size = often * 2 * (w.key_channels + w.value_channels) / w.tensor * w.tokens * w.context
        rounds = w.micro_batches * w.layers
        found["context"] = _ring(w, hardware, w.context, w.tensor, size, _BARE_CONTEXT, rounds)
    return found


def _dispatch(w: Workload, hardware: Hardware, layers: int) -> dict[str, Traffic]:
    """{kind: Traffic} of routed tokens, for `layers` layers with experts. Nothing hides it.

    all-to-all    rows to the ranks of their experts and back, forward and backward; then over the parts of an expert,
                  if tensor parallelism cuts them, gathers and reduce-scatters. In BF16; with --fp8-dispatch half the
                  bytes to the experts, forward or both ways
    all-gather    all tokens to all ranks that share the experts, and sums of theirs back, forward and backward, in
                  BF16; sums of results, and their gradients, in the type of the probabilities
    """
    job = w.job
    forward, each = 1 + w.again(MOE), w.micro_batches * layers
    token, passes = 2.0 * job.hidden_size * w.tokens / w.split, 2 * forward + 2
    ranks, parts = job.expert_ranks, job.expert_ranks // job.expert_model_parallel_size
    if w.dispatcher == "allgather":
        mean = token * ranks * (1.5 if w.router_fp32 else 1)  # half of the passes are of results
        return {"tokens": _ring(w, hardware, ranks, 1, mean, 1.0, passes * each)} if ranks > 1 else {}
    narrow = {"off": 0, "forward": forward, "both": forward + 1}[w.fp8_dispatch]
    sent = ((passes - narrow) * each, token * w.topk), (narrow * each, token * w.topk / 2)  # (how often, bytes)
    found = {}
    if job.expert_model_parallel_size > 1:
        flat = replace(w, two_levels=False)  # that is how gradients go
        kinds = [_all_to_all(flat, hardware, job.expert_model_parallel_size, parts, size, 1.0) for _, size in sent]
        found["tokens"] = _added([often * part for part in one] for (often, _), one in zip(sent, kinds, strict=True))
    if parts > 1:
        found["tokens: parts"] = _added(_ring(w, hardware, parts, 1, size * parts, 1.0, often) for often, size in sent)
    return found


def _added(some: Iterable[Iterable[float]]) -> Traffic:
    return Traffic(*(sum(part) for part in zip(*some, strict=True)))


def _tensor(w: Workload, hardware: Hardware, moe: bool, layers: int) -> dict[str, Traffic]:
    """{kind: Traffic} of tensor parallelism for attention and, if there is one, for an MLP of linears."""
    if w.tensor == 1:
        return {}
    times = w.micro_batches * layers
    size = 2.0 * w.tokens * w.job.hidden_size
    bare = w.system.bare_tensor
    mlp = int(w.mlp(moe)[0] > 0)
    blocks = 1 + mlp
    forward = blocks + w.again("attention") + mlp * w.again(MOE if moe else "mlp")  # forward passes of them
    if not w.sequence_parallel:  # an all-reduce each, forward and backward, for attention and for the MLP
        y, dx = _summed(w)
        return {"tensor: sums": _ring(w, hardware, w.tensor, 1, size * (forward * y + blocks * dx), 1.0, times)}
    if w.system.ours:
        return _beside_gemms(w, hardware, moe, layers)
    gathers = (forward + blocks) * w.system.gather_bytes / 2 + blocks  # x, as it is sent, both ways; dy in BF16
    sums = forward + blocks
    return {
        "tensor: gathers": _ring(w, hardware, w.tensor, 1, gathers * size, bare, times, forward + 2 * blocks),
        "tensor: reduce-scatters": _ring(w, hardware, w.tensor, 1, sums * size, bare, times, sums),
    }


def _summed(w: Workload) -> tuple[float, float]:
    """Bytes an element of y, and of dx, when they are summed over tensor-parallel ranks."""
    how = w.overrides or {}
    fp8 = how.get("tp_reduce_scatter", "bf16") if w.system.ours and w.fp8 else "bf16"
    y, dx = (1 + 1 / 128 if fp8 in ("fp8", way) else 2.0 for way in ("forward", "backward"))
    return y, dx


def _beside_gemms(w: Workload, hardware: Hardware, moe: bool, layers: int) -> dict[str, Traffic]:
    """Traffic of our tensor parallelism under sequence parallelism, and the part that its GEMMs do not hide.

        forward    x gathered: beside the own rows' GEMM, in BF16 beside nothing; y summed: beside the own rows' GEMM
        backward   x gathered: beside dgrad; dx summed: beside wgrad; dy gathered: like x in the forward pass
    """
    times, how = w.micro_batches * layers, w.overrides or {}
    fp8 = w.fp8 and how.get("tp_gather", "fp8" if w.system.gather_bytes == 1 else "bf16") == "fp8"
    a_row, (of_y, of_dx) = 1.0 if fp8 else 2.0, _summed(w)
    gathers: list[tuple[float, float, float]] = []  # (bytes, ms of what runs beside, how often in a layer)
    sums: list[tuple[float, float, float]] = []
    mlp, of_attention = MOE if moe else "mlp", len(w.job.attention)
    for place, product in enumerate(products(w, hardware, moe)):
        forward = 1 + w.again("attention" if place < of_attention else mlp)
        x, y = w.tokens * product.k, w.tokens * product.n
        own, back = product.forward / w.tensor, product.dgrad / w.tensor
        if product.across:
            gathers += [(x * a_row, own * fp8, forward), (x * a_row, product.dgrad, 1)]
            sums.append((of_dx * x, product.wgrad, 1))
        else:
            gathers.append((y * a_row, back * fp8, 1))
            sums.append((of_y * y, own, forward))

    def total(sent: list[tuple[float, float, float]]) -> Traffic:
        each = [(_ring(w, hardware, w.tensor, 1, payload, 1.0, often * times), often * times * hidden)
                for payload, hidden, often in sent]  # fmt: skip
        inside, between, ms = (sum(part) for part in zip(*(one[:3] for one, _ in each), strict=True))
        bare = sum(max(0.0, one.ms - hidden) for one, hidden in each)
        return Traffic(inside, between, ms, bare + _OF_HIDDEN * (ms - bare))

    return {"tensor: gathers": total(gathers), "tensor: reduce-scatters": total(sums)}


def _ring(
    w: Workload,
    hardware: Hardware,
    ranks: int,
    stride: int,
    payload: float,
    bare: float,
    times: float = 1,
    calls: float = 1,
) -> Traffic:
    """`times` ring collectives of `payload` bytes each, over ranks that lie `stride` GPUs apart."""
    a_node = min(ranks, max(1, hardware.gpus_per_node // stride))  # of these ranks in one node
    sent = times * payload * (ranks - 1) / ranks
    between = sent / a_node if ranks > a_node else 0.0
    rate = min(hardware.nvlink_gb_s, a_node * hardware.network_gb_s) if between else hardware.nvlink_gb_s
    ms = sent / rate / 1e6 + times * calls * hardware.collective_ms
    return Traffic(sent - between, between, ms, ms * bare)


def _all_to_all(
    w: Workload, hardware: Hardware, ranks: int, stride: int, payload: float, bare: float
) -> Traffic:
    """One all-to-all of `payload` bytes over ranks `stride` GPUs apart. If w.two_levels: inside nodes, then between."""
    a_node = min(ranks, max(1, hardware.gpus_per_node // stride))
    inside, between = payload * (a_node - 1) / ranks, payload * (ranks - a_node) / ranks
    if w.two_levels:
        inside, between = payload * (a_node - 1) / a_node, between / a_node
    times = inside / hardware.nvlink_gb_s / 1e6, between / hardware.network_gb_s / 1e6
    ms = (sum(times) if w.two_levels else max(times)) + hardware.collective_ms
    return Traffic(inside, between, ms, ms * bare)


def weight_volume(w: Workload) -> float:
    """Bytes of gradients and weights that a rank sends in a step, counted as in FP8-LM's Table 5: without padding and
    scales, and with embedding and head on the same rank."""
    job, ranks = w.job, w.job.data_parallel_size
    a_weight = 2 if w.system.gradient_wire < 2 else 6
    linears = sum(rows * columns for rows, columns, _ in job.linear_sizes) * job.num_layers / (w.tensor * w.pipeline)
    tables = 2 * job.vocab_size * job.hidden_size / w.tensor
    return (linears * a_weight + tables * 6) * (ranks - 1) / ranks


def activation_volume(w: Workload) -> float:
    """Bytes of activations that a rank receives in a micro-batch, counted as in Table 7: gathers of column-parallel
    inputs and the reduce-scatters of their gradients."""
    a_gather = w.system.gather_bytes
    size = w.tokens * w.job.hidden_size * (w.tensor - 1) / w.tensor
    return 2 * (2 * a_gather + 2) * size * w.layers
