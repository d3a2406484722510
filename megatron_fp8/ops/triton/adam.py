"""One step of Adam on the GPU, in one pass: every state is read once, decoded, stepped, rounded and written once.

ops/adam.py defines the step and counts its bytes; numerics/master.py defines the formats. The kernel learns a state's
format from its pointers: exponents are there or not, and the payload's type tells the rest. Each combination in use is
compiled once, whatever the rates, which are plain float arguments.

    (exponents)   float8 BlockScaled, float16 Block16
    (none)        float32, bfloat16; int16 for the remainder
    weight        uint8 for E4M3; bfloat16, or its bits as int16 beside a remainder

A program owns whole blocks and reads them before it writes: in place needs no copy. The FP8 code leaves the conversion
through fp8_code's opaque zero (the compiler bug at the top of cast.py), and is decoded again for the remainder.

sqrt and division are the correctly rounded ones, and enable_fp_fusion=False keeps products and sums apart. Offsets are
64-bit. Agreement with reference_adam.py: bit for bit, but for the sign and payload of NaN.
"""

import torch
import triton
import triton.language as tl

from megatron_fp8.numerics.blocks import BLOCK
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops.adam import AdamHyper, Gradient, State, is_remainder
from megatron_fp8.ops.triton.blocks import _load_blocks, _rows, _store_blocks
from megatron_fp8.ops.triton.cast import fp8_code, magnitude_bits

_BLOCK = tl.constexpr(BLOCK)
ADAM_BLOCKS, ADAM_WARPS = 8, 4  # blocks of 128 and warps a program


@triton.jit
def _load(ptr, exponents_ptr, offsets, rows, inside):
    """A state's values as float32 (ROWS, 128); zeros where not inside (ROWS,)."""
    if exponents_ptr is None:
        return tl.load(ptr + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    else:
        return _load_blocks(ptr, exponents_ptr, offsets, rows, inside)


@triton.jit
def _store_block16(x, ptr, exponents_ptr, offsets, rows, inside):
    """Quantise float32 x (ROWS, 128) to Block16 and store it as _load_blocks reads it."""
    largest = tl.minimum(tl.max(magnitude_bits(x), axis=1), 0x7F800000)
    byte = tl.maximum(((largest + 0x1FFF) >> 23) - 15, 0)
    y = x * ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]
    tl.store(ptr + offsets, y.to(tl.float16), mask=inside[:, None])
    tl.store(exponents_ptr + rows, byte.to(tl.uint8), mask=inside)


@triton.jit
def _store(x, ptr, exponents_ptr, offsets, rows, inside, zero):
    """Round float32 x (ROWS, 128) to the state's format and store it."""
    if exponents_ptr is None:
        tl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=inside[:, None])
    elif ptr.dtype.element_ty == tl.float16:
        _store_block16(x, ptr, exponents_ptr, offsets, rows, inside)
    else:
        codes_ptr = ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        _store_blocks(x, None, codes_ptr, exponents_ptr, offsets, rows, inside, zero)


@triton.jit
def _binade(code):
    """The exponent field of E4M3 codes, uint8, as int32; 1 for subnormals, which have binade 1's ulp."""
    return tl.maximum((code.to(tl.int32) >> 3) & 15, 1)


@triton.jit
def _decode(code):
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _e4m3_remainder(y, code):
    """numerics/master.py: what is left of float32 y beside its E4M3 code, int16 in units of ulp * 2^-16."""
    rounded = _decode(code)
    # The unit is 2^(binade - 26), with float32's bits (binade + 101) << 23; these are its reciprocal's.
    steps = (y - rounded) * ((153 - _binade(code)) << 23).to(tl.float32, bitcast=True)
    steps = tl.minimum(tl.maximum(steps, -32767.0), 32767.0)
    whole = (steps + 12582912.0) - 12582912.0  # 1.5 * 2^23, where float32's ulp is 1: rounds to nearest even
    return tl.where(rounded == rounded, whole, 0.0).to(tl.int16)


@triton.jit(do_not_specialize=["zero"])
def _adam_kernel(
    grad_ptr, grad_exponents_ptr, grad_pitch, grad_exponents_pitch, grad_scale_ptr,
    m_ptr, m_exponents_ptr, v_ptr, v_exponents_ptr, master_ptr, master_exponents_ptr,
    weight_ptr, old_scale_inv_ptr, scale_ptr, amax_ptr, blocks,
    beta1, complement1, beta2, complement2, eps, step_size, root_correction, weight_decay, zero,
    RANKS: tl.constexpr, DECOUPLED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """weight_decay is the factor 1 - lr * weight_decay where DECOUPLED."""
    SCALED_WEIGHT: tl.constexpr = weight_ptr.dtype.element_ty == tl.uint8
    REMAINDER: tl.constexpr = master_ptr.dtype.element_ty == tl.int16
    V_IS_ROOT: tl.constexpr = v_ptr.dtype.element_ty == tl.float8e4nv
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = rows.to(tl.int64)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = rows < blocks
    mask = inside[:, None]

    if grad_exponents_ptr is None:
        g = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    else:
        g = tl.zeros((ROWS, _BLOCK), tl.float32)
        for rank in tl.range(0, RANKS, loop_unroll_factor=4):
            payload = grad_ptr + rank * tl.cast(grad_pitch, tl.int64)
            exponents = grad_exponents_ptr + rank * tl.cast(grad_exponents_pitch, tl.int64)
            g += _load_blocks(payload, exponents, offsets, rows, inside)
    g *= tl.load(grad_scale_ptr)
    m = _load(m_ptr, m_exponents_ptr, offsets, rows, inside)
    v = _load(v_ptr, v_exponents_ptr, offsets, rows, inside)
    if V_IS_ROOT:
        v *= v
    if REMAINDER:
        remainder = tl.load(master_ptr + offsets, mask=mask, other=0)
        top = tl.load(weight_ptr + offsets, mask=mask, other=0)
        if SCALED_WEIGHT:
            unit = ((_binade(top) + 101) << 23).to(tl.float32, bitcast=True)
            w = (_decode(top) + remainder.to(tl.float32) * unit) * tl.load(old_scale_inv_ptr)
        else:
            w = ((top.to(tl.int32) << 16) + remainder.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        w = _load(master_ptr, master_exponents_ptr, offsets, rows, inside)

    if not DECOUPLED:
        g += w * weight_decay
    m = m * beta1 + g * complement1
    v = v * beta2 + g * g * complement2
    root = tl.sqrt_rn(v)
    if DECOUPLED:
        w *= weight_decay
    w -= tl.div_rn(m, root * root_correction + eps) * step_size

    _store(m, m_ptr, m_exponents_ptr, offsets, rows, inside, zero)
    _store(root if V_IS_ROOT else v, v_ptr, v_exponents_ptr, offsets, rows, inside, zero)
    if SCALED_WEIGHT:
        y = w * tl.load(scale_ptr)
        code = fp8_code(y, y, zero, True)
        tl.store(weight_ptr + offsets, code, mask=mask)
        if REMAINDER:
            tl.store(master_ptr + offsets, _e4m3_remainder(y, code), mask=mask)
    elif REMAINDER:
        bits = w.to(tl.int32, bitcast=True)
        top = (bits + 0x8000) >> 16
        tl.store(weight_ptr + offsets, tl.where(w == w, top, 0x7FFF).to(tl.int16), mask=mask)
        tl.store(master_ptr + offsets, tl.where(w == w, bits - (top << 16), 0).to(tl.int16), mask=mask)
    else:
        tl.store(weight_ptr + offsets, w.to(tl.bfloat16), mask=mask)
    if not REMAINDER:
        _store(w, master_ptr, master_exponents_ptr, offsets, rows, inside, zero)
    if amax_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(tl.where(mask, magnitude_bits(w), 0)), sem="relaxed")


def _pointers(state: State) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Payload, and exponents if it has them."""
    return (state, None) if isinstance(state, torch.Tensor) else (state.payload, state.exponents)


def adam_step(
    gradient: Gradient,
    exp_avg: State,
    exp_avg_sq: State,
    master: State,
    weight: torch.Tensor | ScaledTensor,
    hyper: AdamHyper,
    grad_scale: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
) -> None:
    """reference_adam.adam_step in one pass."""
    if isinstance(gradient, torch.Tensor):
        gradients = (gradient.contiguous(), None, 0, 0)
        ranks = 1
    else:
        payload, exponents = map(_rows, gradient)
        gradients = (payload, exponents, payload.stride(0), exponents.stride(0))
        ranks = len(payload)
    states = (*_pointers(exp_avg), *_pointers(exp_avg_sq), *_pointers(master))
    if isinstance(weight, ScaledTensor):
        weights = (weight.payload.view(torch.uint8), weight.scale_inv, weight_scale)
    else:
        weights = (weight.view(torch.int16) if is_remainder(master) else weight, None, None)
    decay = 1 - hyper.lr * hyper.weight_decay if hyper.decoupled else hyper.weight_decay
    rates = (
        hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, hyper.eps,
        hyper.step_size, hyper.root_correction, decay,
    )  # fmt: skip
    blocks = states[0].numel() // BLOCK
    _adam_kernel[(triton.cdiv(blocks, ADAM_BLOCKS),)](
        *gradients, grad_scale, *states, *weights, None if amax_out is None else amax_out.view(torch.int32), blocks,
        *map(float, rates), 0,
        RANKS=ranks, DECOUPLED=hyper.decoupled, ROWS=ADAM_BLOCKS, num_warps=ADAM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
