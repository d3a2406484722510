"""One step of Adam in one Triton kernel, which reads, decodes, updates, rounds and writes every state once.

ops/adam.py defines the step and counts its bytes; numerics/master.py defines the formats. The kernel takes a state's
format from its pointers: whether there are exponents, and the payload's type. Each combination in use is compiled once,
and once more for sizes that do not fill the last program. The rates, which are float arguments, and the tensors'
addresses cause no compilation.

    (exponents)   float8 BlockScaled, float16 Block16
    (none)        float32, bfloat16; int16 for the remainder
    weight        float8 for E4M3; bfloat16

A program owns whole blocks and reads them before it writes, so the step in place needs no copy. Offsets are 64-bit.
Its blocks belong to one weight: if there are several, each has a multiple of the blocks of a program.

Time. At 15 bytes an element and 4.1 TB/s, an H200's memory delivers an element every 3.7 ps; its 132 processors issue
about 110 instructions in that time. Compiled for it (ptxas 12.8), the step with BlockScaled m, Block16 v and the
remainder takes 51 with a BF16 weight, 73 with an E4M3 weight and its amax; 33 with FP32 states. A v that is rounded by
a draw takes four more, and no register. These keep them few:

- The square root and 1 / x are the approximate instructions. Correct rounding would take 16 and 26 more, and branches.
- max|block| is a float maximum that keeps NaN: one instruction, including |x|.
- Four codes leave the conversion to FP8 in one register, in the order in which they are stored. They pass through the
  opaque zero that cast.py explains (a compiler bug).
- Halves of 32-bit words need no shift: the low half of an FP32 is its remainder to BF16, and the low half of
  1.5 * 2^23 + x, where float32's ulp is 1, is x rounded to nearest even as an int16.

ptxas moves a load down to its first use, and would then wait for memory twice: for the averages, and for master and
weight. So all loads are before a barrier, except the gradient's scale, which every later line depends on.

Rounding. m, v, the decay, and the stored formats of w agree with ../adam.py bit for bit, except for the sign and
payload of NaN; enable_fp_fusion=False keeps the compiler from fusing products and sums that are not written as fma. The
update of w is approximate, in one fma, so that w is rounded once:

    w = w - (1 + d) * step_size * m / (sqrt(v) * root_correction + eps)        |d| < 2^-21

(2^-23 each from the root and 1 / x, 2^-24 each from an fma and a product). sqrt.approx.ftz treats denormals as zero, so
the kernel takes the root of v * 2^24: right for every v below 2^104, and infinite from there on, so that w only decays.
(2^104 is the square of a gradient of 10^16; the square of 10^20 is infinite anyway.) An eps below 2^-126 may count as
zero. If v is stored as its root, the root is correctly rounded for every v.
Source: PTX ISA, sqrt.approx.ftz.f32, rcp.approx.ftz.f32, cvt.rn.satfinite.e4m3x2.f32.
"""

import torch
import triton
import triton.language as tl

from ...numerics.blocks import BLOCK
from ...numerics.master import Block16
from ...numerics.scaled import ScaledTensor
from ..adam_states import AdamHyper, Gradient, State
from .blocks import _rows
from .cast import as_type
from .launch import cdiv, launched

_BLOCK = tl.constexpr(BLOCK)
ADAM_BLOCKS, ADAM_WARPS = 16, 4  # blocks of 128 and warps a program; half the blocks if a state is float32
# These pointers differ in alignment from weight to weight, and are read byte by byte or once: no reason to recompile.
_ANYWHERE = [
    "grad_exponents_ptr", "m_exponents_ptr", "v_exponents_ptr", "master_exponents_ptr",
    "grad_scale_ptr", "old_scale_inv_ptr", "scale_ptr", "amax_ptr",
]  # fmt: skip
# four float32 $1 .. $4 -> their codes in one word $0; $5 .. $8 are zero
_CODES_ASM = tl.constexpr(
    "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; xor.b32 $0, $0, $5;}"
)
_ONE_AND_A_HALF = tl.constexpr(1.5 * 2**23)


@triton.jit
def _codes(y, zero):
    """float32 y -> its E4M3 codes, uint8; infinities saturate too."""
    return tl.inline_asm_elementwise(_CODES_ASM, "=r,r,r,r,r,r,r,r,r", [y, zero], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _larger(a, b):
    """The larger of a and b; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _elements(ptr, first, ROWS: tl.constexpr):
    """Pointers (ROWS, 128) to the elements of ROWS blocks from block `first` on."""
    local = tl.arange(0, ROWS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    return ptr + first.to(tl.int64) * _BLOCK + local


@triton.jit
def _load(ptr, exponents_ptr, first, inside):
    """A state's values as float32 (ROWS, 128); undefined in rows that are not `inside` (ROWS,)."""
    ROWS: tl.constexpr = inside.shape[0]
    values = tl.load(_elements(ptr, first, ROWS), mask=inside[:, None]).to(tl.float32)
    if exponents_ptr is not None:
        byte = tl.load(exponents_ptr + first + tl.arange(0, ROWS), mask=inside).to(tl.int32)
        # Byte 0 stands for 2^-127, a denormal, whose bits are not byte << 23.
        values *= tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)[:, None]
    return values


@triton.jit
def _store(x, ptr, exponents_ptr, first, inside, zero, DECAYS: tl.constexpr = False):
    """Round float32 x (ROWS, 128) to the state's format and store it. DECAYS: round E4M3 subnormals towards zero."""
    ROWS: tl.constexpr = inside.shape[0]
    pointers = _elements(ptr, first, ROWS)
    if exponents_ptr is None:
        tl.store(pointers, x.to(ptr.dtype.element_ty), mask=inside[:, None])
    else:
        # As in blocks.py and numerics/master.py: NaN counts as infinity; the sum carries into the exponent if the
        # significand is above the format's largest.
        HALF: tl.constexpr = ptr.dtype.element_ty == tl.float16
        CARRY: tl.constexpr = 0x1FFF if HALF else 0x1FFFFF
        EXPONENT: tl.constexpr = 15 if HALF else 8
        largest = tl.minimum(tl.reduce(tl.abs(x), 1, _larger).to(tl.int32, bitcast=True), 0x7F800000)
        byte = tl.maximum(((largest + CARRY) >> 23) - EXPONENT, 0)
        y = x * ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]
        if HALF:
            tl.store(pointers, y.to(tl.float16), mask=inside[:, None])
        else:
            if DECAYS:
                y = tl.where(tl.abs(y) < 2.0**-6, (y * 2.0**9).to(tl.int32).to(tl.float32) * 2.0**-9, y)
            codes = _codes(tl.fma(x, 0.0, y), zero)  # x * 0 is NaN for an infinite x, else zero
            tl.store(pointers.to(tl.pointer_type(tl.uint8), bitcast=True), codes, mask=inside[:, None])
        tl.store(exponents_ptr + first + tl.arange(0, ROWS), byte.to(tl.uint8), mask=inside)


@triton.jit
def _decode(code):
    """The float32 values of E4M3 codes, uint8."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _join_e4m3(code, remainder):
    """join_e4m3 of numerics/master.py, without the scale: an E4M3 code and its int16 remainder -> float32."""
    rounded = _decode(code)
    # The ulp is 2^-3 of the binade; a subnormal has the ulp of 2^-6 (bits 121 << 23). The unit is 2^-19 of the binade.
    binade = tl.maximum(rounded.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    return tl.fma(remainder.to(tl.float32), (binade - (19 << 23)).to(tl.float32, bitcast=True), rounded)


@triton.jit
def _e4m3_remainder(y, code):
    """split_e4m3's remainder (numerics/master.py): float32 y minus its E4M3 code, as int16 in units of ulp * 2^-16."""
    rounded = _decode(code)
    # Inverting the exponent's bits turns the binade 2^e into 2^(1 - e), which is 2^-18 of the factor from y to units.
    inverse = tl.minimum(~rounded.to(tl.int32, bitcast=True) & 0x7F800000, (255 - 121) << 23)
    steps = (y - rounded) * inverse.to(tl.float32, bitcast=True)
    steps = tl.minimum(tl.maximum(steps, -32767 * 2.0**-18), 32767 * 2.0**-18)
    whole = tl.fma(steps, 2.0**18, _ONE_AND_A_HALF).to(tl.int32, bitcast=True)
    return tl.where(rounded == rounded, whole, 0).to(tl.int16)


@triton.jit
def _drawn(v, a, b):
    """_drawn of ../adam.py."""
    bits = v.to(tl.uint32, bitcast=True)
    drawn = (bits + ((bits * a + b) >> 19)) & 0xFFFFE000
    return tl.where(v < float("inf"), drawn.to(tl.float32, bitcast=True), v)


@launched
@triton.jit(
    do_not_specialize=["grad_exponents_pitch", "scale_inv_pitch", "each", "blocks", "a", "b", "zero"],
    do_not_specialize_on_alignment=_ANYWHERE,
)
def _adam_kernel(
    grad_ptr, grad_exponents_ptr, grad_pitch, grad_exponents_pitch, grad_scale_ptr,
    m_ptr, m_exponents_ptr, v_ptr, v_exponents_ptr, master_ptr, master_exponents_ptr,
    weight_ptr, old_scale_inv_ptr, scale_inv_pitch, scale_ptr, amax_ptr, each, blocks,
    beta1, complement1, beta2, complement2, eps, step_size, root_correction, weight_decay,
    a: tl.uint32, b: tl.uint32, zero,
    RANKS: tl.constexpr, DECOUPLED: tl.constexpr, DRAWN: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """each: the blocks of a weight. If DECOUPLED, the argument weight_decay is the factor 1 - lr * weight_decay. EVEN:
    ROWS divides blocks. DRAWN: v is rounded by the draw with a and b."""
    SCALED_WEIGHT: tl.constexpr = weight_ptr.dtype.element_ty == tl.float8e4nv
    REMAINDER: tl.constexpr = master_ptr.dtype.element_ty == tl.int16
    V_IS_ROOT: tl.constexpr = v_ptr.dtype.element_ty == tl.float8e4nv
    if SCALED_WEIGHT:
        weight_ptr = as_type(weight_ptr, tl.uint8)
    elif REMAINDER:
        weight_ptr = as_type(weight_ptr, tl.int16)
    first = tl.program_id(0) * ROWS
    number = first // each if SCALED_WEIGHT else 0  # of the weight
    inside = tl.full((ROWS,), True, tl.int1) if EVEN else first + tl.arange(0, ROWS) < blocks
    mask = inside[:, None]

    m = _load(m_ptr, m_exponents_ptr, first, inside)
    v = _load(v_ptr, v_exponents_ptr, first, inside)
    if REMAINDER:
        remainder = tl.load(_elements(master_ptr, first, ROWS), mask=mask)
        top = tl.load(_elements(weight_ptr, first, ROWS), mask=mask)
    else:
        w = _load(master_ptr, master_exponents_ptr, first, inside)
    if SCALED_WEIGHT:
        old_scale_inv, scale = tl.load(old_scale_inv_ptr + number * scale_inv_pitch), tl.load(scale_ptr + number)
    if RANKS == 1:
        g = _load(grad_ptr, grad_exponents_ptr, first, inside)
    else:
        g = tl.zeros((ROWS, _BLOCK), tl.float32)
        for rank in tl.range(0, RANKS, loop_unroll_factor=4):
            payload = grad_ptr + rank * tl.cast(grad_pitch, tl.int64)
            exponents = grad_exponents_ptr + rank * tl.cast(grad_exponents_pitch, tl.int64)
            g += _load(payload, exponents, first, inside)
    tl.debug_barrier()

    grad_scale = tl.load(grad_scale_ptr)
    if grad_exponents_ptr is None:
        g *= grad_scale
    else:
        g = tl.fma(g, grad_scale, 0.0)  # never -0, like the reference's sum, which starts from 0
    if V_IS_ROOT:
        v *= v
    if REMAINDER and SCALED_WEIGHT:
        w = _join_e4m3(top, remainder) * old_scale_inv
    elif REMAINDER:
        w = ((top.to(tl.int32) << 16) + remainder.to(tl.int32)).to(tl.float32, bitcast=True)

    if not DECOUPLED:
        g += w * weight_decay
    m = m * beta1 + g * complement1
    v = v * beta2 + g * g * complement2
    if V_IS_ROOT:
        root = tl.sqrt_rn(v)
    else:
        root = tl.sqrt(v * 2.0**24)
        root_correction *= 2.0**-12
    if DECOUPLED:
        w *= weight_decay
    w = tl.fma(m * _reciprocal(tl.fma(root, root_correction, eps)), -step_size, w)

    _store(m, m_ptr, m_exponents_ptr, first, inside, zero, DECAYS=True)
    if DRAWN:  # compiled code has uint32 words, as annotated; the interpreter turns large ones into int64
        v = _drawn(v, a.to(tl.uint32), b.to(tl.uint32))
    _store(root if V_IS_ROOT else v, v_ptr, v_exponents_ptr, first, inside, zero)
    if SCALED_WEIGHT:
        y = w * scale
        code = _codes(tl.fma(y, 0.0, y), zero)
        tl.store(_elements(weight_ptr, first, ROWS), code, mask=mask)
        if REMAINDER:
            tl.store(_elements(master_ptr, first, ROWS), _e4m3_remainder(y, code), mask=mask)
    elif REMAINDER:
        bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FFF0000)
        tl.store(_elements(weight_ptr, first, ROWS), ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)
        tl.store(_elements(master_ptr, first, ROWS), bits.to(tl.int16), mask=mask)
    else:
        tl.store(_elements(weight_ptr, first, ROWS), w.to(tl.bfloat16), mask=mask)
    if not REMAINDER:
        _store(w, master_ptr, master_exponents_ptr, first, inside, zero)
    if amax_ptr is not None:
        magnitude = tl.where(v < float("inf"), tl.abs(w), float("nan"))
        largest = tl.reduce(tl.where(mask, magnitude, 0.0), None, _larger)
        tl.atomic_max(as_type(amax_ptr, tl.int32) + number, largest.to(tl.int32, bitcast=True), sem="relaxed")


def _pointers(state: State) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(payload, exponents or None)."""
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
    """See ops.adam.adam_step. No checks here; a ScaledTensor needs a weight_scale."""
    if isinstance(gradient, torch.Tensor):
        gradients = (gradient.contiguous(), None, 0, 0)
        ranks = 1
    else:
        payload, exponents = map(_rows, gradient)
        gradients = (payload, exponents, payload.stride(0), exponents.stride(0))
        ranks = len(payload)
    states = (*_pointers(exp_avg), *_pointers(exp_avg_sq), *_pointers(master))
    blocks = each = states[0].numel() // BLOCK
    if isinstance(weight, ScaledTensor):
        inverse = weight.scale_inv
        pitch, each = (inverse.stride(0), blocks // len(inverse)) if inverse.dim() else (0, blocks)
        weights = (weight.payload, inverse, pitch, weight_scale)
    else:
        weights = (weight, None, 0, None)
    decay = 1 - hyper.lr * hyper.weight_decay if hyper.decoupled else hyper.weight_decay
    rates = (
        hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, hyper.eps,
        hyper.step_size, hyper.root_correction, decay,
    )  # fmt: skip
    draw = hyper.draw if isinstance(exp_avg_sq, Block16) else None
    # 16 bytes a thread are eight elements of a 16-bit type, or four of float32.
    rows = ADAM_BLOCKS // 2 if any(state.dtype == torch.float32 for state in states[::2]) else ADAM_BLOCKS
    _adam_kernel[(cdiv(blocks, rows),)](
        *gradients, grad_scale, *states, *weights, amax_out, each, blocks,
        *map(float, rates), *(draw or (0, 0)), 0,
        RANKS=ranks, DECOUPLED=hyper.decoupled, DRAWN=draw is not None, ROWS=rows, EVEN=blocks % rows == 0,
        num_warps=ADAM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
