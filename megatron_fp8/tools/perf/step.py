"""An estimate: the memory of every rank and the time of a step, summed from the other modules.

    stage     forward and backward of its layers, passes and products, the bare part of its collectives, gaps
    pipeline  sum of the stages' times + (m - 1) times the slowest; interleaved, the sum's part divided by the chunks
    GPU       pipeline + optimizer + the bare part of the data-parallel collectives + the gap at a step's ends
    step      the longer of the GPU's time and the host's

Memory is that of torch's allocator, and the peak is its counters' peak. `room` also allows for memory outside it, and
for what a graph takes that no counter has: its activations' memory stays its own while the optimizer works.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from . import activations, collectives, flops, gemm_time, memory_bound
from .collectives import Traffic
from .hardware import Hardware
from .job import STATES, Job
from .memory import SCRATCH, Rank, ranks_bytes
from .systems import HOST_EXPERTS
from .workload import MOE, Workload

_WORKSPACE = 90e6  # cuBLAS's workspace and small buffers, in every system; 85 to 120 MB were measured
_GRAPH_POOL = 70e6  # memory that a CUDA graph adds, in every system measured: 66 MiB or little more
# What a graph that holds NCCL's collectives takes beside torch's allocator, above the hardware's beside_allocator_gb.
# Measured once, on both ranks of a run on two H200s (383538b2): 6.9 GB in all, at most 4.1 before the recording.
_GRAPH_WITH_NCCL = 3.9
_OUTSIDE = "graph, outside torch's allocator"
# The share of the gaps between a layer's kernels that a CUDA graph leaves; fitted to three runs of small micro-batches.
_GRAPH_GAPS = 1 / 4
# Milliseconds that a graph's GPU is idle between the kernels of a layer's experts, some 300 small ones a micro-batch:
# profile_span less profile_busy of two models' four layers (train_step_experts.csv, 87ba6a2).
_GAPS_OF_EXPERTS = 0.42


@dataclass(frozen=True)
class Estimate:
    """Attributes:
    held, peak: GB (10^9 bytes) of torch's allocator between two steps and at most, on the rank with the largest peak.
    memory: {kind: GB} of that rank at its peak; stage: its pipeline stage.
    of_graph: {kind: GB} that a graph needs beside the peak (`_of_graph`).
    parts: {kind: ms} of the slowest stage's GPU and of the rest of the step; they add up to gpu_ms.
    traffic: {kind: Traffic} of a rank of the slowest stage.
    """

    workload: Workload
    hardware: Hardware
    held: float
    peak: float
    stage: int
    memory: dict[str, float]
    of_graph: dict[str, float]
    parts: dict[str, float]
    traffic: dict[str, Traffic]
    gpu_ms: float
    host_ms: float

    @property
    def ms(self) -> float:
        return max(self.gpu_ms, self.host_ms)

    @property
    def samples_a_second(self) -> float:
        return self.workload.global_batch / self.ms * 1e3

    @property
    def tokens_a_second(self) -> float:
        """Tokens a second and GPU."""
        return self.samples_a_second * self.workload.sequence / self.workload.gpus

    @property
    def tflops(self) -> float:
        """Model TFLOP/s a GPU, as Megatron's log counts them."""
        return flops.step(self.workload) / self.workload.gpus / self.ms / 1e9

    def mfu(self, peak_tflops: float) -> float:
        return self.tflops / peak_tflops

    @property
    def bubble(self) -> float:
        """Share of the step's GPU time that is pipeline bubble."""
        return self.parts.get("pipeline bubble", 0.0) / self.gpu_ms

    @property
    def bare(self) -> float:
        """Share of the step's GPU time in which only a collective runs."""
        return sum(traffic.bare for traffic in self.traffic.values()) / self.gpu_ms

    def room(self, cap_gb: float | None = None) -> float:
        """GB left on a GPU, or under a cap on the allocator; negative if the job does not fit."""
        return _room(self.peak, self.of_graph, self.hardware, cap_gb)

    def days(self, tokens: float) -> float:
        return tokens / (self.tokens_a_second * self.workload.gpus) / 86400


def estimate(w: Workload, hardware: Hardware) -> Estimate:
    """The Estimate of a workload.  Raises UserError if something in it is not modelled."""
    held, peak, stage, memory, of_graph = _memory(w)
    of_first = {stage: _stage(w, hardware, stage) for stage in set(w.job.first_alike)}
    passing = [of_first[stage] for stage in w.job.first_alike]
    m, times = w.micro_batches, [sum(parts.values()) for parts in passing]
    slowest = max(range(w.pipeline), key=times.__getitem__)
    parts = {kind: m * ms for kind, ms in passing[slowest].items()}
    in_passes = collectives.micro_batches(w, hardware, slowest)
    with_experts = sum(w.job.of_stage(slowest))
    gaps = w.layers * hardware.layer_gap_ms * (_GRAPH_GAPS if w.graphed else 1)
    gaps += with_experts * _GAPS_OF_EXPERTS * w.graphed
    waits = sum(of_kind.bare for of_kind in in_passes.values()) / m + gaps  # of each stage, for a micro-batch
    parts["pipeline bubble"] = (sum(times) - times[slowest] + (w.pipeline - 1) * waits) / w.virtual
    counts = sum(w.job.linears(slowest)), sum(w.job.others(slowest)), sum(w.job.experts(slowest))
    parts |= memory_bound.step(w, hardware, *counts)
    traffic = collectives.step(w, hardware, *counts) | in_passes
    for kind, of_kind in traffic.items():
        parts[f"bare: {kind.partition(':')[0]}"] = parts.get(f"bare: {kind.partition(':')[0]}", 0.0) + of_kind.bare
    parts["gaps"] = hardware.border_ms + m * gaps
    parts = {kind: ms for kind, ms in parts.items() if ms}
    host = 0 if w.graphed else hardware.host_ms + w.system.host + _host(w, hardware)
    return Estimate(w, hardware, held, peak, stage, memory, of_graph, parts, traffic, sum(parts.values()), host)


def _host(w: Workload, hardware: Hardware) -> float:
    """The host's milliseconds for the layers of a step.

    Without virtual stages Megatron synchronizes the host with the GPU whenever a stage receives
    (megatron.core.pipeline_parallel.p2p_communication: batch_p2p_sync). So the host has a bubble too. With virtual
    stages it launches ahead of what has not come.
    """
    layer = hardware.host_layer_ms * (w.system.tensor_host if w.job.tensor_model_parallel_size > 1 else 1)
    of_experts = _host_of_experts(w) * hardware.host_layer_ms
    times = [w.layers * layer + sum(w.job.of_stage(stage)) * of_experts for stage in range(w.pipeline)]
    bubble = sum(times) - max(times) if w.virtual == 1 else 0
    return w.micro_batches * max(times) + bubble


def _host_of_experts(w: Workload) -> float:
    """The host's time for a layer's routed experts, in parts of a layer's."""
    of_all, of_each = HOST_EXPERTS["one by one" if not w.together else "ours" if w.system.level else "te"]
    return of_all + of_each * w.job.local_experts


def _stage(w: Workload, hardware: Hardware, stage: int) -> dict[str, float]:
    """{kind: ms} of a stage's forward and backward pass for a micro-batch."""
    parts: dict[str, float] = {}
    for moe, layers in w.kinds(stage):
        for kind, ms in _layer(w, hardware, moe, stage).items():
            parts[kind] = parts.get(kind, 0.0) + layers * ms
    if w.job.dpo_reference and stage == w.pipeline - 1:
        parts["reference's pass"] += gemm_time.head(w, hardware)[0]
    tables = 0
    if stage == 0:
        tables += 1
    if stage == w.pipeline - 1:
        parts["LM head"] = sum(gemm_time.head(w, hardware))
        for kind, ms in memory_bound.loss(w, hardware).items():
            parts[kind] = parts.get(kind, 0.0) + ms
        tables += 1
    parts["tables' gradients"] = tables / 2 * memory_bound.table(w, hardware)
    return parts


def _layer(w: Workload, hardware: Hardware, moe: bool, stage: int) -> dict[str, float]:
    """{kind: ms} of a layer's forward and backward pass for a micro-batch. moe: whether it has experts."""
    linear, attention = gemm_time.linears(w, hardware, moe), gemm_time.attention(w, hardware)
    experts = gemm_time.experts(w, hardware) if moe else (0.0, 0.0)
    passes = memory_bound.layer(w, hardware, moe)
    parts = {"linears": sum(linear), "attention": sum(attention), "experts": sum(experts), **passes}
    # A third of the memory-bound passes' time is the forward pass's.
    forward = linear[0] + attention[0] + experts[0] + sum(passes.values()) / 3
    if w.recompute == "full":
        parts["recomputation"] = w.again("layer") * forward
    else:
        sizes = [rows * columns for rows, columns, _ in w.job.layer(moe)]
        mlp = linear[0] * sum(sizes[len(w.job.attention) :]) / sum(sizes) + experts[0]
        parts["recomputation"] = attention[0] * w.again("core_attn") + mlp * w.again(MOE if moe else "mlp")
    if w.job.dpo_reference:
        parts["reference's pass"] = forward
    return parts


def room(w: Workload, hardware: Hardware, cap_gb: float | None = None) -> float:
    """GB left on a GPU, or under a cap on the allocator: an estimate's `room`, without its time."""
    _, peak, _, _, of_graph = _memory(w)
    return _room(peak, of_graph, hardware, cap_gb)


def _room(peak: float, of_graph: dict[str, float], hardware: Hardware, cap_gb: float | None) -> float:
    taken = peak + sum(gb for kind, gb in of_graph.items() if cap_gb is None or kind != _OUTSIDE)
    return hardware.room(cap_gb) - taken


def _memory(w: Workload) -> tuple[float, float, int, dict[str, float], dict[str, float]]:
    """(GB held, GB at the peak, stage, {kind: GB} at the peak) of the rank with the largest peak; `_of_graph`."""
    which = _fullest(w)
    found = {
        stage: (sum(held.values()), held | beside)
        for stage, (held, beside) in zip(which, stages(w, which), strict=True)
    }
    peaks = {stage: sum(kinds.values()) / 1e9 for stage, (_, kinds) in found.items()}
    stage = max(peaks, key=peaks.__getitem__)
    held, kinds = found[stage]
    in_gb = {kind: size / 1e9 for kind, size in kinds.items() if size}
    return held / 1e9, sum(in_gb.values()), stage, in_gb, _of_graph(w, peaks)


def _of_graph(w: Workload, peaks: dict[int, float]) -> dict[str, float]:
    """{kind: GB} that a level's whole-step graph needs beside the peak. peaks: {stage: GB}.

    Its memory holds a step's activations also when no replay runs, and nothing else may use it. So the optimizer's
    temporaries come on top. torch counts no activation outside a replay, so its counters' peak does not show this.
    """
    if not (w.graphed and w.system.ours):
        return {}
    ranks = _ranks(w)
    fullest = max(gb + _optimizer_temporaries(w, ranks[stage]) / 1e9 for stage, gb in peaks.items())
    found = {"optimizer, beside the graph's memory": fullest - max(peaks.values()), _OUTSIDE: 0.0}
    if w.gpus > 1:
        found[_OUTSIDE] = _GRAPH_WITH_NCCL
    return {kind: gb for kind, gb in found.items() if gb}


def _optimizer_temporaries(w: Workload, rank: Rank) -> float:
    """Bytes that stock's optimizer makes and frees in its step for what a level does not own.

    Gradients in BF16 (--grad-reduce-in-bf16) are copied to FP32 first, all of them. A level clips in place
    (engine/clip.py) and has torch's Adam step in one kernel (engine/chain.py), which make nothing. Nor does its own.
    """
    experts = 0 if w.job.fp8_experts else rank.experts.get("exp_avg", 0)
    return (rank.others.get("exp_avg", 0) + experts) * w.job.grad_reduce_in_bf16


@lru_cache(maxsize=32)
def _first_ranks(job: Job, cells: tuple[tuple[str, str], ...] | None) -> tuple[Rank, ...]:
    """Data-parallel rank 0 of each stage. The micro-batch does not change its bytes, so estimates share them."""
    own = sorted(set(job.first_alike))
    of_own = ranks_bytes(job, None if cells is None else dict(cells), stages=own, ranks=[0])
    found = dict(zip(own, of_own, strict=True))
    return tuple(found[stage] for stage in job.first_alike)


def _ranks(w: Workload) -> tuple[Rank, ...]:
    cells = w.cells()
    return _first_ranks(w.job, None if cells is None else tuple(cells.items()))


def _keeps_what_came(w: Workload) -> bool:
    """Whether a level holds its gradients in FP8 twice: as they are sent, and what has come from all ranks.

    Without a graph what came takes the place of what was sent (engine/grad_store.py). A graph has both addresses.
    """
    cells = w.cells() or {}
    in_fp8 = (cells.get("grad_accum"), cells.get("grad_reduce")) == ("fp8", "block")
    return w.graphed and in_fp8 and w.job.data_parallel_size > 1


def _fullest(w: Workload) -> list[int]:
    """The pipeline stages one of which has the largest peak: one of each kind.

    Of stages that are alike the first keeps the most activations. Kept transposes take less if a step has no more
    micro-batches than a stage keeps.
    """
    first: dict[tuple[int, bool], int] = {}
    for stage, alike in enumerate(w.job.first_alike):
        more = w.keeps_transposes and w.micro_batches > activations.in_flight(w, stage)
        first.setdefault((alike, more), stage)
    return list(first.values())


def stages(w: Workload, which: Iterable[int] | None = None) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """For each pipeline stage, or for some: ({kind: bytes} held between two steps, {kind: bytes} on top of it at the
    peak)."""
    system, table = w.system, w.vocabulary * w.job.hidden_size / w.tensor
    ranks = _ranks(w)
    for stage in range(w.pipeline) if which is None else which:
        rank = ranks[stage]
        kinds: dict[str, float] = {}
        for part in (rank.linears, rank.others, rank.experts):
            for kind, size in part.items():
                name = "optimizer states" if kind in STATES else kind
                kinds[name] = kinds.get(name, 0.0) + size
        if system.weight_copies:
            kinds["weight"] += system.weight_copies * (sum(w.job.linears(stage)) + sum(w.job.experts(stage)))
        if _keeps_what_came(w):
            kinds["grad"] += rank.linears["grad"]
        if w.keeps_transposes:
            kinds.pop(SCRATCH, None)  # activations.py counts the kept transposes
        kinds["buffers"] = _WORKSPACE + _GRAPH_POOL * w.graphed
        if system.keeps_wgrads and not w.job.frozen_base:
            shapes = {(rows, columns) for moe, _ in w.kinds(stage) for rows, columns, _ in w.job.layer(moe)}
            kinds["buffers"] += 2 * sum(rows * columns for rows, columns in shapes) / w.tensor
            kinds["buffers"] += 2 * sum(rows * columns for rows, columns in w.job.expert) * any(w.job.of_stage(stage))
            kinds["buffers"] += 2 * table * (stage == w.pipeline - 1)
        yield kinds, activations.peak(w, stage)
