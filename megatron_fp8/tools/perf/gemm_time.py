"""Milliseconds of the GEMMs and of attention in a layer, and of the head, for a micro-batch on one rank.

A GEMM takes 2 M N (K + fixed_k) FLOPs at the rate of one with a long K. fixed_k is the fixed cost of a tile (prologue,
epilogue), expressed as extra terms of the sum over K. The files of configs/hardware say where rates were measured.

Routed experts multiply the rows that come to them if all experts get as many (`experts`). Together, a rank's experts
have a share of the dense rate. One after the other, or on Transformer Engine's streams, each product takes 4 us more
than its FLOPs. Both were measured on an H200, at 1,536 rows an expert (benchmarks/results/grouped_gemm.csv: our
kernels, torch._grouped_mm in BF16, and cuBLASLt's GEMMs on four streams in a graph). No product is faster than memory
brings its operands: with few rows an expert the weights and their gradients are the bound.
"""

from typing import NamedTuple

from .hardware import Hardware
from .workload import Workload

_TOGETHER = {"fp8": 0.86, "bf16": 0.90}  # of the dense rate, for padded rows
_ALONE_MS = 0.004  # of an expert's product, above its FLOPs
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


def _rates(h: Hardware, fp8: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """(TFLOP/s, fixed_k) of forward and of backward products."""
    if fp8:
        return (h.fp8_forward_tflops, h.fp8_forward_fixed_k), (h.fp8_backward_tflops, h.fp8_backward_fixed_k)
    return (h.bf16_tflops, h.bf16_fixed_k), (h.bf16_tflops, h.bf16_fixed_k)


def products(w: Workload, hardware: Hardware, moe: bool = False) -> list[Product]:
    """The Products of a layer's linears: attention's, and the MLP's or the shared experts'."""
    tokens, tensor = w.tokens, w.tensor
    one, other = _rates(hardware, w.fp8)
    found = []
    for rows, columns, across in w.job.layer(moe):
        n, k = (rows // tensor, columns) if across else (rows, columns // tensor)
        wgrad = 0.0 if w.job.frozen_base else _product(n, k, tokens, *other)
        backward = _product(tokens, k, n, *other), wgrad
        found.append(Product(across, columns, rows, _product(tokens, n, k, *one), *backward))
    return found


def linears(w: Workload, hardware: Hardware, moe: bool = False) -> tuple[float, float]:
    """(Forward, backward) ms of a layer's linears, and of multi-latent attention's down projections in BF16."""
    found = products(w, hardware, moe)
    forward, backward = sum(one.forward for one in found), sum(one.dgrad + one.wgrad for one in found)
    for n, k in w.job.down:
        sizes = w.tokens / w.split, n, k
        forward += _product(*sizes, hardware.bf16_tflops, hardware.bf16_fixed_k)
        backward += (2 - w.job.frozen_base) * _product(*sizes, hardware.bf16_tflops, hardware.bf16_fixed_k)
    return forward, backward


def experts(w: Workload, hardware: Hardware) -> tuple[float, float]:
    """(Forward, backward) ms of a layer's routed experts."""
    count, rows, fp8 = w.job.local_experts, w.padded_rows, w.experts_fp8
    one, other = _rates(hardware, fp8)
    share, more = 1.0, count * _ALONE_MS
    if w.together and not (fp8 and w.system.level is None):  # TE's FP8 experts have a GEMM each
        share, more = _TOGETHER["fp8" if fp8 else "bf16"], 0.0
    operand, summed = 1 if fp8 else 2, 4 if w.experts_owned else 8  # BF16, FP32: read, added to, written

    def ms(flops: float, moved: float) -> float:
        return max(flops / share + more, hardware.pass_ms(moved))

    forward = backward = 0.0
    for n, k in w.job.expert:
        weights, x, y = count * n * k, rows * k, rows * n
        forward += ms(_product(rows, n, k, *one), operand * (weights + x) + 2 * y)
        backward += ms(_product(rows, k, n, *other), operand * (weights + y) + 2 * x)
        wgrad = count * _product(n, k, rows / count, *other)
        backward += ms(wgrad, operand * (x + y) + summed * weights)
    return forward, backward


def head(w: Workload, hardware: Hardware) -> tuple[float, float]:
    """(Forward, backward) ms of the LM head."""
    flops = 2 * w.tokens * w.job.hidden_size * w.vocabulary / w.tensor / 1e9
    backward = flops if w.job.frozen_base else 2 * flops
    if w.loss_chunks > 1:
        backward += flops  # the logits again
    if w.fp8_head:
        return flops / hardware.fp8_forward_tflops, backward / hardware.fp8_backward_tflops
    return flops / hardware.head_tflops, backward / hardware.head_tflops


def attention(w: Workload, hardware: Hardware) -> tuple[float, float]:
    """(Forward, backward) ms of a layer's core attention. Context-parallel ranks share the square evenly.

    Of its seven products four sum over a key's channels or make them, three a value's.
    """
    of_key, of_value = w.job.channels
    flops = w.tokens * w.sequence * (4 * w.query_channels + 3 * w.output_channels) / w.tensor
    head = (of_key + of_value) / 2
    slower = (1 + hardware.attention_length / w.sequence) * (1 + hardware.attention_head / head)
    both = flops * slower / hardware.attention_tflops / 1e9
    return both * _FORWARD_OF_ATTENTION, both * (1 - _FORWARD_OF_ATTENTION)
