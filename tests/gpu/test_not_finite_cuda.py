"""The FP8 codes that every casting kernel writes for NaN, infinities and values beyond a format's maximum.

The expected codes are constants here, not the result of a cast. `encode` (numerics/formats.py) writes the same on the
CPU. PTX's cvt.satfinite alone would turn an infinity into the largest number, and hide it.
tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import copy
import math

import pytest
import torch
from test_ops_cuda import DEVICE, INTERPRETED, formats, named_parts, put

from megatron_fp8.numerics import BLOCK, E4M3, E5M2, ScaledTensor
from megatron_fp8.numerics.blocks import SHARD_UNIT, PackedBlocks
from megatron_fp8.numerics.noise import noise_seed
from megatron_fp8.ops import reference, reference_activation, reference_norm, reference_qkv
from megatron_fp8.ops.adam import AdamHyper
from megatron_fp8.ops.adam import adam_step as plain_adam_step
from megatron_fp8.ops.reference_activation import blocks_for
from megatron_fp8.ops.triton import activation, blocks, cast, norm, qkv
from megatron_fp8.ops.triton.adam import adam_step

pytestmark = [pytest.mark.smoke] if INTERPRETED else [pytest.mark.gpu, pytest.mark.smoke]
INF, NAN, HUGE = math.inf, math.nan, 3e38
BAD = [NAN, INF, -INF, HUGE, -HUGE]
# The codes of (maximum, infinity, NaN).
CODES = {E4M3: (0x7E, 0x7F, {0x7F, 0xFF}), E5M2: (0x7B, 0x7C, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF})}
ONE = torch.tensor(1.0)
by_four = pytest.mark.parametrize("rows", [12, 11], ids=["words", "bytes"])  # how the kernel writes columns


def planted(rows: int, columns: int = 144, dtype=torch.bfloat16) -> torch.Tensor:
    """Small numbers, with BAD[i] in every 3 * (i + 1)-th column of row i + 1."""
    x = torch.linspace(-2, 2, rows * columns).view(rows, columns)
    for i, value in enumerate(BAD):
        x[i + 1, i :: 3 * (i + 1)] = value
    return x.to(dtype)


def codes(payload: torch.Tensor) -> torch.Tensor:
    """The payload's bytes on the CPU, as int, with -1 for every NaN."""
    fmt = E4M3 if payload.dtype == E4M3.dtype else E5M2
    found = payload.cpu().contiguous().view(torch.uint8).int()
    return found.masked_fill_(torch.isin(found, torch.tensor(sorted(CODES[fmt][2]))), -1)


def stated(fmt) -> list[int]:
    """The codes of BAD."""
    largest, infinity, nan = CODES[fmt]
    return [-1, *(-1 if code in nan else code for code in (infinity, infinity | 128)), largest, largest | 128]


def check(payload, x, fmt) -> None:
    """Check that the codes of bad values are the stated ones, and all others are numbers below the largest."""
    found, x = codes(payload).flatten(), x.flatten()
    bad = torch.zeros(x.shape, dtype=torch.bool)
    for value, code in zip(BAD, stated(fmt), strict=True):
        here = x.isnan() if math.isnan(value) else x == torch.tensor(value).to(x.dtype)
        assert here.any() and (found[here] == code).all(), value
        bad |= here
    assert (found[~bad] >= 0).all() and ((found[~bad] & 127) < CODES[fmt][0]).all()


def agree(got, expected) -> None:
    """Check that NaN (at least one), infinities and maxima are in the same places. Other numbers may differ."""
    fmt = E4M3 if expected.dtype == E4M3.dtype else E5M2
    mine, theirs = codes(got), codes(expected)
    special = sorted({-1, *stated(fmt)})
    for code in special:
        assert torch.equal(mine == code, theirs == code), code
    assert (theirs == -1).any() and not (theirs == -1).all()


@formats
@by_four
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cast(fmt, rows, dtype):
    x = planted(rows, dtype=dtype)
    check(cast.quantize(put(x), fmt, put(ONE)), x, fmt)
    payload, payload_t = cast.quantize(put(x), fmt, put(ONE), transpose=True)
    check(payload, x, fmt)
    check(payload_t.t(), x, fmt)
    payload, payload_t, _ = cast.quantize_bias_grad(put(x), fmt, put(ONE), columns=True)
    check(payload, x, fmt)
    check(payload_t.t(), x, fmt)


@formats
@by_four
def test_join_qkv(fmt, rows):
    """Without rotation, with a part of each head rotated, and with whole heads rotated."""
    for d in (0, 16, 48):
        grads = [planted(rows, 48 * heads).view(rows, 1, heads, 48) for heads in (2, 1, 1)]
        angles = (None, None) if d == 0 else (torch.ones(rows, d), torch.zeros(rows, d))
        how = {"fmt": fmt, "columns": True}
        on_device = [None if t is None else put(t) for t in (*grads, *angles)]
        got = qkv.join_qkv(*on_device, scale=put(ONE), **how)
        for mine, theirs in zip(got, reference_qkv.join_qkv(*grads, *angles, scale=ONE, **how), strict=True):
            agree(mine, theirs)
            assert (codes(mine) == stated(fmt)[3]).any()


@formats
@by_four
@pytest.mark.parametrize("kind", ["squared_relu", "swiglu"])
def test_activations(fmt, rows, kind):
    x = planted(rows, 288 if kind == "swiglu" else 144)
    dy = planted(rows, 144).flip(0)
    kept = [blocks_for(t, kind) for t in (put(x), x)]
    got = activation.activate_quantize(put(x), kind, fmt, put(ONE), columns=True, kept=kept[0])
    expected = reference_activation.activate_quantize(x, kind, fmt, ONE, columns=True, kept=kept[1])
    for mine, theirs in zip(got, expected, strict=True):
        agree(mine, theirs)
    assert torch.equal(codes(kept[0].payload), codes(kept[1].payload))
    again = [torch.empty(144, rows, dtype=E4M3.dtype, device=device) for device in (DEVICE, "cpu")]
    back = {"columns": True, "bias_grad": True}
    back_on_device = {**back, "again": (put(ONE), again[0])}
    got = activation.activate_backward_quantize(put(dy), put(x), kind, fmt, put(ONE), **back_on_device)
    expected = reference_activation.activate_backward_quantize(dy, x, kind, fmt, ONE, again=(ONE, again[1]), **back)
    for mine, theirs in zip((*got[:2], again[0]), (*expected[:2], again[1]), strict=True):
        agree(mine, theirs)


@formats
@by_four
@pytest.mark.parametrize("rms", [True, False], ids=["rmsnorm", "layernorm"])
def test_norms(fmt, rows, rms):
    """One value that is not finite makes its whole row visibly wrong, and no other row."""
    x, how = planted(rows), {"rms": rms, "zero_centered": False}
    weight = torch.ones(x.shape[1], dtype=x.dtype)
    weight[5] = 1e30  # beyond the format in the good rows
    kept = [torch.empty(x.shape, dtype=E4M3.dtype, device=device) for device in (DEVICE, "cpu")]
    arguments = put(x), put(weight), None, 1e-5, fmt, put(ONE)
    expected = reference_norm.norm_quantize(x, weight, None, 1e-5, fmt, ONE, columns=True, kept=kept[1], **how)
    for got in (
        norm.norm_quantize(*arguments, columns=True, kept=kept[0], **how),
        (norm.norm_quantize(*arguments, **how)[0], expected[1]),
        norm.norm_requantize(kept[0], put(weight), None, fmt, put(ONE), zero_centered=False, columns=True),
    ):
        for mine, theirs in zip(got[:2], expected[:2], strict=True):
            agree(mine, theirs)
    agree(*kept)
    assert (codes(expected[0]) & 127 == CODES[fmt][0]).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks(dtype):
    """Nothing saturates, because each block has its own scale."""
    x = planted(16, BLOCK, dtype).flatten()
    lost = ~x.isfinite()
    noise = torch.rand(x.shape)
    packed = [PackedBlocks.zeros(1, SHARD_UNIT, device) for device in (DEVICE, "cpu")]
    blocks.add_blocks(put(x), packed[0], noise_seed(1, 2, 3))
    reference.add_blocks(x, packed[1], noise_seed(1, 2, 3))
    cases = [
        (blocks.quantize_blocks(put(x)).payload, reference.quantize_blocks(x).payload),
        (
            blocks.quantize_blocks(put(x), "stochastic", put(noise)).payload,
            reference.quantize_blocks(x, "stochastic", noise).payload,
        ),
        (packed[0].payload.flatten(), packed[1].payload.flatten()),
    ]
    for got, expected in cases:
        assert torch.equal(codes(got), codes(expected))
        assert torch.equal(codes(got) == -1, lost)


def test_adam():
    """Averages and weight, if the gradient or the weight is not finite or beyond the format."""
    n, hyper = 16 * BLOCK, AdamHyper(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=3)
    gradient = planted(16, BLOCK, torch.float32).flatten()
    w = torch.linspace(-1, 1, n)
    w[-3:], w[:3] = torch.tensor([INF, -INF, NAN]), torch.tensor([1e4, -1e4, 3.5])
    zeros = torch.zeros(n)
    payload = torch.zeros(n, dtype=torch.uint8).view(E4M3.dtype)
    state = [reference.quantize_blocks(zeros), reference.quantize_blocks(zeros), w, ScaledTensor(payload, ONE)]
    there = [
        type(part)(**{name: put(t.clone()) for name, t in named_parts(part)})
        if not isinstance(part, torch.Tensor)
        else put(part.clone())
        for part in state
    ]
    here = copy.deepcopy(state)
    scale = torch.tensor(128.0)
    adam_step(put(gradient), *there, hyper, put(ONE), put(scale))
    plain_adam_step(gradient, *here, hyper, ONE, scale)
    for mine, theirs in zip(there, here, strict=True):
        if not isinstance(mine, torch.Tensor):
            agree(mine.payload, theirs.payload)
    weight = codes(there[3].payload)
    assert (weight[-3:] == -1).all() and weight[:3].tolist() == [0x7E, 0xFE, 0x7E]
    assert torch.equal(codes(there[0].payload) == -1, ~gradient.isfinite())
