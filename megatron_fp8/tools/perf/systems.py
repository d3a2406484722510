"""The systems that the cost model compares. One table holds all their differences.

The bytes of the memory-bound passes are *effective*: the time of a pass in a profiled step, times the bandwidth of a
copy, over its number of elements (benchmarks/results, profile_ms: train_step_fused.csv for `te-delayed` of shapes 7b
and llama and `bf16` of 7b, train_step_hosts.csv's call 19 for O3 of 7b and llama). The share that overlap leaves bare
comes from profile_collectives of train_step_dp4.csv and _tp4.csv, of TE's runs and ours. benchmarks/kernels.py has the
purely arithmetic bytes.

    norm        an element of a norm's input, forward and backward, with the casts in it
    cast        an element of the linears' inputs and output gradients that a separate pass casts
    transpose   an element of a weight, every micro-batch (W^T of an E4M3 weight)
    activation  an element of fc1's output (without a gate: twice that of fc2's input)
    qkv, rope   an element of q, k, v, split and joined; of q and k, rotated
    loss        a logit
    residual    an element of the residual stream, an addition
    table       an element of an embedding or head, every micro-batch: its gradient
    state       an element of a linear's weight in the optimizer's step, on the rank that owns it
    other       a parameter of the rank, a step: zeroed gradients, copies
    add         an element of a weight, every micro-batch: its gradient, if a separate pass accumulates it

Bytes of routed experts are of train_step_experts.csv, two shapes on one H200 (profile_ms, above what the dense parts
take). Ours are of 87ba6a2, all others of 300f155:

    ROUTED_ACTIVATION  as `activation`, for a routed row: probabilities are multiplied in; CAST_ACTIVATION: of ours
                       together, whose casts it is a part of
    PERMUTE            an element of the routed rows: router, sort, tokens to rows and rows to tokens, both passes, by
                       torch's functions; fused (--moe-permute-fusion) by Transformer Engine's kernels; here: of ours
                       together and all on the rank, whose casts gather and whose results are added up
    REJOIN             by arithmetic: rows that are split by expert and joined, or padded and cut again

In attention, as `rope`: NORM_ROTATE is RMSNorm of q and k with their rotation, both ways, by benchmarks/fused_qkv.py
(6fd244fe); LATENT_ROPE is latent attention's, by Megatron's kernels (383538b2). Torch's passes, which remain for other
norms of q and k, are UNFUSED_ROPE and, as `norm`, QK_NORM (87ba6a2).

`host` is not a pass: it is the host's milliseconds in a step above ours (GPT-125M, 185.3 against 135.6 in one call).
`tensor_host` is the factor by which tensor parallelism lengthens the host's time for a layer: 10.4 against 6.3 ms in
BF16, 12.5 against 7.9 with Transformer Engine, 13.3 against 6.2 at O3 (docs/performance.md, where a step waits for its
host).

HOST_EXPERTS has the host's time for a layer's experts and micro-batch, in parts of a layer's: what it takes however
few there are on the rank, and for each. Ours: whole DeepSeek-V2-Lite on an H200 (eight.csv, 95e7bb9); the part for each
was counted on a CPU. Transformer Engine's: four layers, two micro-batches, delayed scaling (docs/performance.md; means
of two): 570 ms with 128 experts, 444 with 64 and latent attention. So the first number has latent attention's time in
it. One by one in BF16 128 experts took 1,693 on another, slower host.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...errors import UserError
from ...flags.level import CELLS
from .job import BYTES, STATES

ROUTED_ACTIVATION, CAST_ACTIVATION = 27.0, 13.0
PERMUTE, PERMUTE_FUSED, PERMUTE_HERE, REJOIN = 130.0, 55.0, 14.0, 8.0
NORM_ROTATE, LATENT_ROPE = 18.7, 10.0
UNFUSED_ROPE, QK_NORM = 125.0, 74.0
HOST_EXPERTS = {"one by one": (0.0, 0.25), "te": (6.0, 0.059), "ours": (2.8, 0.003)}
STOCK_STATE = 49.6  # FP32 Adam, norm and clipping of stock's optimizer; embeddings and norms have it at our levels too


@dataclass(frozen=True)
class System:
    """Attributes:
    level: --fp8-level, None for stock and Transformer Engine.
    ours: whether it is this package: tensor-parallel traffic overlaps GEMMs, and the LM head leaves no gradient.
    fp8: whether the linears' GEMMs are in FP8.
    weight_copies: bytes a weight beside the optimizer's table (E4M3 and its transpose, both kept).
    input_bytes: bytes an element of a linear's input kept for the backward pass.
    logits: bytes a logit at the loss's peak.
    keeps_wgrads: whether a spare gradient of each shape is kept for Megatron (Transformer Engine's dummies, BF16).
    gather_bytes: bytes an element of an activation gathered over the tensor-parallel ranks.
    bare_*: the share of a collective's time that overlap leaves bare: of tensor parallelism (not used for ours), of
        gradients, of weights.
    gradient_wire, weight_wire: bytes a linear's weight in the data-parallel reduction and gather.
    """

    name: str
    title: str
    level: str | None
    ours: bool
    fp8: bool
    weight_copies: float
    input_bytes: int
    logits: int
    keeps_wgrads: bool
    gather_bytes: int
    bare_tensor: float
    bare_gradients: float
    bare_weights: float
    gradient_wire: float
    weight_wire: float
    norm: float
    cast: float
    transpose: float
    activation: float
    qkv: float
    rope: float
    loss: float
    residual: float
    table: float
    state: float
    other: float
    add: float = 0
    host: float = 0
    tensor_host: float = 1


_BLOCKS = 1 + 1 / 128
_BF16 = System(
    "bf16", "stock BF16", None, False, False, 0, 2, 10, True, 2, 0.68, 0.5, 0.25, 4, 2,
    norm=17, cast=0, transpose=0, activation=15.3, qkv=0, rope=25, loss=49.5, residual=13, table=34,
    state=STOCK_STATE, other=21, host=50, tensor_host=1.65,
)  # fmt: skip
_TE = replace(_BF16, name="te", title="TE FP8", fp8=True, weight_copies=2, input_bytes=1, cast=4.85, tensor_host=1.6)
_O1 = System(
    "O1", "O1", "O1", True, True, 0, 1, 2, False, 2, 0.68, 0.05, 0.4, _BLOCKS, 2,
    norm=15.6, cast=4.6, transpose=2.3, activation=12, qkv=4.8, rope=9.4, loss=7, residual=5.9, table=5,
    state=27.4, other=6.5, tensor_host=2.15,
)  # fmt: skip
_O2 = replace(_O1, name="O2", title="O2", level="O2", state=15.6)
_O3 = replace(_O2, name="O3", title="O3", level="O3", state=13.9, gather_bytes=1, weight_wire=1)
# The paper's own implementation: TE's layers of 2023, its states, E4M3 weights with their transpose, E4M3 on the wire.
# A kernel adds a micro-batch's gradient in E4M3. The tensor has one scale, so the kernel passes over both twice: it
# reads three bytes, then three again, and writes one (add_to_fp8 of MS-AMP, operators/arithmetic).
_PAPER = replace(
    _TE, name="fp8-lm", title="FP8-LM", level="O3", weight_copies=1, gradient_wire=1, weight_wire=1, gather_bytes=1,
    keeps_wgrads=False, state=15, add=7,
)  # fmt: skip

# --fp8-param-gather: Transformer Engine keeps E4M3 and its transpose in place of BF16, and gathers E4M3. Arithmetic.
TE_GATHERS_FP8 = replace(_TE, weight_copies=0, weight_wire=1)

SYSTEMS = {system.name: system for system in (_BF16, _TE, _O1, _O2, _O3)}
PAPERS = {"BF16": _BF16, "TE FP8": _TE, "FP8-LM": _PAPER}
UNREPAIRED_SPLIT = 19.6  # bytes of `qkv` if Megatron's stale import makes TE concatenate (benchmarks/README.md)
RESIDUAL_IN_GEMM = 2  # bytes of `residual` if our GEMM reads it in its epilogue: arithmetic, not measured
# Bytes of a weight and micro-batch that Transformer Engine's graphs of layers copy or clear beyond its layers without
# graphs: 4.25, 4.6 and 4.7 at micro-batches 1, 2 and 4 of GPT-175B's layers at TP 4 (eight.csv). Counted for its graphs
# of whole steps too, of which no profile was read: a 7B slice at micro-batch 1 is 517 ms for 543 measured so, 489 else.
TE_GRAPH_COPIES = 4.5
LOGITS_AGAIN = 2  # bytes a logit of --fp8-loss-chunks: the loss reads the logits that are computed again
FP8_HEAD = 2  # bytes a logit of --fp8-lm-head: the cast of its gradient, in both layouts


def chosen(name: str, flag: str = "--systems") -> System:
    if name not in SYSTEMS:
        raise UserError(f"{flag} {name}: no such system; use {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def asked_for(system: System, overrides: Mapping[str, str]) -> System:
    """A level's system with flags that change its weights and states: the bytes gathered, and the bytes Adam moves."""
    assert system.level is not None
    level = {cell.name: cell.at(system.level) for cell in CELLS}
    cells = level | dict(overrides)
    wire = 1 if cells["weight"] == "fp8" else 2
    return replace(system, weight_wire=wire, state=system.state + _moved(cells) - _moved(level))


def _moved(cells: Mapping[str, str]) -> float:
    """Bytes an element that Adam reads and writes for the states and the weight (ops/adam.py), without the gradient."""
    weight = 1 if cells["weight"] == "fp8" else 2
    return 2 * sum(BYTES[cells[state]] for state in STATES) + weight * (2 if cells["master"] == "remainder" else 1)
