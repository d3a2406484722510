"""Milliseconds of the GEMMs and of attention in a layer, and of the head, for a micro-batch on one rank.

A GEMM takes 2 M N (K + fixed_k) FLOPs at the rate of one with a long K. fixed_k is the fixed cost of a tile (prologue,
epilogue), expressed as extra terms of the sum over K. The files of configs/hardware say where rates were measured.
"""

from typing import NamedTuple

from .hardware import Hardware
from .workload import Workload

_FORWARD_OF_ATTENTION = 0.26  # 2 of 7 FLOPs at 440 TFLOP/s, 5 of 7 at 390: cuDNN's kernels on an H200


def _product(m: float, n: float, k: float, tflops: float, fixed_k: float) -> float:
    return 2 * m * n * (k + fixed_k) / tflops / 1e9


class Product(NamedTuple):
    """A linear's GEMMs of a micro-batch, in ms. across: column-parallel; k, n: sizes of the whole weight."""

    across: bool
    k: int
    n: int
    forward: float
    dgrad: float
    wgrad: float


def products(w: Workload, hardware: Hardware) -> list[Product]:
    """The Products of a layer's four linears."""
    tokens, tensor = w.tokens, w.tensor
    h = hardware
    one = (h.fp8_forward_tflops, h.fp8_forward_fixed_k) if w.fp8 else (h.bf16_tflops, h.bf16_fixed_k)
    other = (h.fp8_backward_tflops, h.fp8_backward_fixed_k) if w.fp8 else one
    found = []
    for rows, columns, across in w.job.linear_sizes:
        n, k = (rows // tensor, columns) if across else (rows, columns // tensor)
        wgrad = 0.0 if w.job.frozen_base else _product(n, k, tokens, *other)
        backward = _product(tokens, k, n, *other), wgrad
        found.append(Product(across, columns, rows, _product(tokens, n, k, *one), *backward))
    return found


def linears(w: Workload, hardware: Hardware) -> tuple[float, float]:
    """(Forward, backward) ms of a layer's four linears."""
    four = products(w, hardware)
    return sum(one.forward for one in four), sum(one.dgrad + one.wgrad for one in four)


def head(w: Workload, hardware: Hardware) -> tuple[float, float]:
    """(Forward, backward) ms of the LM head."""
    flops = 2 * w.tokens * w.job.hidden_size * w.vocabulary / w.tensor / 1e9
    backward = flops if w.job.frozen_base else 2 * flops
    if w.fp8_head:
        return flops / hardware.fp8_forward_tflops, backward / hardware.fp8_backward_tflops
    return flops / hardware.head_tflops, backward / hardware.head_tflops


def attention(w: Workload, hardware: Hardware) -> tuple[float, float]:
    """(Forward, backward) ms of a layer's core attention. Context-parallel ranks share the square evenly."""
    flops = 7 * w.tokens * w.sequence * w.heads / w.tensor
    slower = (1 + hardware.attention_length / w.sequence) * (1 + hardware.attention_head / w.channels)
    both = flops * slower / hardware.attention_tflops / 1e9
    return both * _FORWARD_OF_ATTENTION, both * (1 - _FORWARD_OF_ATTENTION)
