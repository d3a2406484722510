"""Milliseconds of memory-bound kernels: systems.py gives bytes an element; here the elements are counted."""

from .hardware import Hardware
from .systems import FP8_HEAD, RESIDUAL_IN_GEMM, STOCK_STATE, UNREPAIRED_SPLIT
from .workload import Workload


def layer(w: Workload, hardware: Hardware) -> dict[str, float]:
    """{kind: ms} of a layer's forward and backward pass, for a micro-batch on one rank."""
    system, job, tensor, trained = w.system, w.job, w.tensor, not w.job.frozen_base
    hidden = job.hidden_size / w.split
    heads, qkv, fc1, ffn = (size / tensor for size in (w.heads, w.heads + 2 * w.groups, w.fc1, w.ffn))
    if system.level and system.transpose:  # here norms, activations and the join of QKV's gradients cast their outputs
        cast = heads + 2 * hidden
    else:
        cast = (2 * hidden + heads + ffn) + (qkv + fc1 + 2 * hidden)
    split = system.qkv
    if system.level is None and not w.repaired:
        split = UNREPAIRED_SPLIT
    in_gemm = system.ours and w.fp8 and tensor == 1 and not w.dropout
    residual = RESIDUAL_IN_GEMM if in_gemm else system.residual
    rope = job.position_embedding_type == "rope"
    moved = {
        "norm": system.norm * 2 * hidden,
        "cast": system.cast * cast * w.fp8,
        "activation": system.activation * (0.6 * fc1 + 0.4 * ffn),
        "rotary, QKV": split * qkv + system.rope * (w.heads + w.groups) / tensor * rope,
        "residual adds": residual * 2 * hidden,
    }
    weights = sum(rows * columns for rows, columns, _ in job.linear_sizes) / tensor
    of_weights = {"cast": _of_a_weight(w) * weights, "gradient adds": system.add * weights * trained}
    kinds = moved | of_weights  # in this order
    return {kind: hardware.pass_ms(w.tokens * moved.get(kind, 0) + of_weights.get(kind, 0)) for kind in kinds}


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
    return {
        "cross-entropy": hardware.pass_ms(size * w.tokens * w.vocabulary / w.tensor),
        "norm": hardware.pass_ms(w.system.norm * w.tokens * w.job.hidden_size / w.split),
    }


def table(w: Workload, hardware: Hardware) -> float:
    """Ms of the gradient of an embedding or a head, for a micro-batch."""
    if w.job.frozen_base:
        return 0.0
    return hardware.pass_ms(w.system.table * w.vocabulary * w.job.hidden_size / w.tensor)


def step(w: Workload, hardware: Hardware, linears: float, others: float) -> dict[str, float]:
    """{kind: ms} of a step's optimizer and copies. linears, others: numbers of parameters on the rank."""
    if w.job.frozen_base:
        return {}
    of_owners = (w.system.state * linears + STOCK_STATE * others) / w.job.data_parallel_size
    return {
        "optimizer": hardware.pass_ms(of_owners),
        "copies": hardware.pass_ms(w.system.other * (linears + others)),
    }
