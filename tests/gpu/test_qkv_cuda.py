"""ops.split_qkv and ops.join_qkv on CUDA against reference_qkv.py on the CPU.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import math

import pytest
import torch
from test_ops_cuda import DEVICE, INTERPRETED, dtypes, on_gpu_only, put, random_bits, same

from megatron_fp8 import ops
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.ops import reference, reference_qkv

pytestmark = [pytest.mark.usefixtures("fresh_random_data"), *([] if INTERPRETED else [pytest.mark.gpu])]
if INTERPRETED:
    from megatron_fp8.ops.triton.qkv import join_qkv, split_qkv
else:
    join_qkv, split_qkv = ops.join_qkv, ops.split_qkv

INF, NAN = math.inf, math.nan
# s, b, groups, query heads a group, size of a head, rotated numbers of a head
SHAPES = [
    (5, 3, 2, 1, 64, 64),  # an odd number of rows
    (33, 1, 1, 1, 128, 128),
    (7, 2, 2, 4, 128, 128),
    (9, 2, 1, 3, 80, 80),
    (4, 3, 2, 2, 96, 48),
    (3, 3, 5, 1, 80, 20),  # more heads than a program takes, each rotated in part
    (6, 1, 1, 8, 192, 192),
    (2, 2, 1, 1, 16, 2),
    (1, 1, 1, 1, 8, 8),
    (1, 1, 2, 2, 24, 6),
    (34, 2, 2, 1, 64, 0),  # no rotation: cast.py's tiles, written by words
    (7, 3, 3, 4, 48, 0),  # the same, by bytes
    (3, 1, 2, 2, 40, 0),  # heads too narrow for such tiles
    (35, 1, 2, 1, 64, 64),  # whole heads rotated: tiles too, by bytes
    (34, 2, 1, 2, 32, 32),  # the same, by words
    (5, 1, 1, 1, 256, 256),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def tables(s: int, d: int) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """cos and sin of random angles, different for the two numbers of a pair."""
    if not d:
        return None, None
    angles = 100 * torch.randn(s, d)
    return angles.cos(), angles.sin()


def put_all(*tensors):
    return [None if t is None else put(t) for t in tensors]


def check_split(mixed, groups, r, angles, interleaved=False, paired=False) -> None:
    on_device, device_angles = put(mixed.clone()), put_all(*angles)
    how = {"interleaved": interleaved, "paired": paired}
    expected = reference_qkv.split_qkv(mixed.clone(), groups, r, *angles, **how)
    got = split_qkv(on_device, groups, r, *device_angles, **how)
    for one, other in zip(got, expected, strict=True):
        assert same(one, other)
        strides = zip(one.shape, one.stride(), other.stride(), strict=True)
        assert all(mine == its for size, mine, its in strides if size > 1)
        inside = one.untyped_storage().data_ptr() == on_device.untyped_storage().data_ptr()
        assert inside == (1 in (groups, r))


def gradients(shape, dtype, layout="plain"):
    s, b, groups, r, hn, _ = shape
    made = [torch.randn(s, b, heads, hn).to(dtype) for heads in (groups * r, groups, groups)]
    if layout == "attention":  # (b, heads, s, hn) in memory
        made = [t.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for t in made]
    if layout == "wide":
        made = [torch.cat([t, t], dim=2)[:, :, : t.shape[2]] for t in made]
    return made


def on_device(t: torch.Tensor) -> torch.Tensor:
    """t on the device, with the same strides."""
    whole = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return whole.to(DEVICE).as_strided(t.shape, t.stride(), t.storage_offset())


def check_join(grads, angles, interleaved=False, formats=(E4M3, E5M2), scale=0.37) -> None:
    there, device_angles = [on_device(t) for t in grads], put_all(*angles)
    how = {"interleaved": interleaved}
    got = join_qkv(*there, *device_angles, **how)
    assert same(got, reference_qkv.join_qkv(*grads, *angles, **how)) and got.is_contiguous()
    exact = reference_qkv.join_qkv(*(t.float() for t in grads), *angles, **how)
    for fmt in formats:
        rows, columns = reference.quantize(exact, fmt, torch.tensor(scale), transpose=True)
        how |= {"fmt": fmt, "scale": put(torch.tensor(scale))}
        for with_rows, with_columns, largest in ((True, False, 0.0), (False, True, None), (True, True, 1e6)):
            amax_out = None if largest is None else put(torch.tensor(largest))
            one, other = join_qkv(
                *there, *device_angles, **how, rows=with_rows, columns=with_columns, amax_out=amax_out
            )
            assert same(one, rows) if with_rows else one is None
            assert same(other, columns) if with_columns else other is None
            if largest is not None:
                assert same(amax_out, torch.maximum(torch.tensor(largest), reference.amax(exact)))


def product(shape, dtype=torch.bfloat16) -> torch.Tensor:
    s, b, groups, r, hn, _ = shape
    return torch.randn(s, b, groups * (r + 2) * hn).to(dtype)


@shapes
@pairings
def test_split(shape, interleaved):
    s, _, groups, r, _, d = shape
    check_split(product(shape), groups, r, tables(s, d), interleaved)


@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 2, 4, 11, 12)], ids=str)
def test_split_with_each_value_behind_its_key(shape):
    s, _, groups, r, _, d = shape
    check_split(product(shape), groups, r, tables(s, d), paired=True)


@dtypes
@pytest.mark.parametrize("r", [1, 2])
def test_split_of_any_type(dtype, r):
    check_split(product((5, 3, 2, r, 24, 12), dtype), 2, r, tables(5, 12))


def name(x) -> str:
    return getattr(x, "name", str(x))


JOINS = [(shape, E5M2) for shape in SHAPES]
JOINS += [(SHAPES[5], E4M3), pytest.param(SHAPES[2], E4M3, marks=pytest.mark.smoke)]


@pytest.mark.parametrize(("shape", "fmt"), JOINS, ids=name)
def test_join(shape, fmt):
    check_join(gradients(shape, torch.bfloat16), tables(shape[0], shape[-1]), formats=(fmt,))


@pytest.mark.parametrize("shape", [SHAPES[i] for i in (2, 3, 5, 8, 13, 14)], ids=str)
def test_join_interleaved(shape):
    check_join(gradients(shape, torch.bfloat16), tables(shape[0], shape[-1]), True, formats=(E5M2,))


@pytest.mark.parametrize("layout", ["attention", "wide"])
@pytest.mark.parametrize("shape", [(5, 3, 2, 2, 24, 16), (6, 2, 3, 1, 16, 0)], ids=str)
def test_join_of_any_strides(shape, layout):
    check_join(gradients(shape, torch.bfloat16, layout), tables(shape[0], shape[-1]), formats=(E5M2,))


@pytest.mark.parametrize(
    ("dtype", "fmt"),
    [(torch.bfloat16, E4M3), (torch.float16, E5M2), (torch.float32, E4M3), (torch.float32, E5M2)],
    ids=name,
)
def test_join_of_any_type(dtype, fmt):
    shape = (5, 3, 2, 2, 24, 12)
    check_join(gradients(shape, dtype), tables(5, 12), formats=(fmt,), scale=fmt.max / 3)


@pairings
@pytest.mark.parametrize(("r", "d"), [(1, 24), (3, 32)])
def test_any_bits(r, d, interleaved):
    """With denormals, infinities and NaN, and some angles of zero."""
    groups, hn, s, b = 2, 32, 8, 2
    cos, sin = tables(s, d)
    cos[0], sin[0] = 1.0, 0.0
    width = groups * (r + 2) * hn
    mixed = random_bits(s * b * width, torch.bfloat16)[: s * b * width].view(s, b, width)
    check_split(mixed, groups, r, (cos, sin), interleaved)
    parts = reference_qkv.split_qkv(mixed.clone(), groups, r)
    for scale in (0.37,) if interleaved else (2.0**-120, 2.0**126):
        check_join(parts, (cos, sin), interleaved, formats=(E4M3 if r == 1 else E5M2,), scale=scale)


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_amax_shows_the_non_finite(part, bad):
    grads = gradients((5, 3, 2, 2, 24, 16), torch.bfloat16)
    place = [int(torch.randint(n, ())) for n in grads[part].shape]
    grads[part][tuple(place)] = bad
    check_join(grads, tables(5, 16), formats=(E5M2,) if bad > 0 else (E4M3,))


def test_a_gradient_that_is_one_number_everywhere():
    """Autograd's gradient of a sum has strides of zero."""
    grads = [torch.ones(()).expand(4, 2, heads, 16) for heads in (4, 2, 2)]
    angles = tables(4, 16)
    got = join_qkv(*(put(torch.ones(())).expand(t.shape) for t in grads), *put_all(*angles))
    assert same(got, reference_qkv.join_qkv(*grads, *angles))


@pytest.mark.smoke
@pairings
def test_a_rotation_is_undone_by_its_inverse(interleaved):
    """If the two numbers of a pair have one angle, joining what was split is the identity. This needs no reference."""
    s, b, groups, hn = 6, 2, 2, 64
    angles = 10 * torch.randn(s, hn // 2)
    angles = angles.repeat_interleave(2, 1) if interleaved else torch.cat([angles, angles], 1)
    device = put_all(angles.cos(), angles.sin())
    mixed = torch.randn(s, b, groups * 5 * hn)
    parts = split_qkv(put(mixed), groups, 3, *device, interleaved=interleaved)
    back = join_qkv(*parts, *device, interleaved=interleaved)
    assert torch.allclose(back.cpu().view(mixed.shape), mixed, atol=1e-5)


@on_gpu_only
@pytest.mark.parametrize(
    "shape",
    [(2048, 4, 32, 1, 128, 128), (1024, 32, 12, 1, 64, 64), (4096, 2, 8, 4, 128, 128), (2048, 4, 32, 1, 128, 0)],
    ids=str,
)
@pairings
def test_at_full_size_and_again(shape, interleaved):
    """Like the reference on the same GPU, and a hundred times the same bits."""
    s, b, groups, r, hn, d = shape
    mixed = torch.randn(s, b, groups * (r + 2) * hn, dtype=torch.bfloat16, device=DEVICE)
    angles, how = put_all(*tables(s, d)), {"interleaved": interleaved}
    expected = reference_qkv.split_qkv(mixed.clone(), groups, r, *angles, **how)
    grads = [torch.randn_like(t) for t in expected]
    scale = torch.tensor(100.0, device=DEVICE)
    exact = reference_qkv.join_qkv(*grads, *angles, **how)
    payloads = reference_qkv.join_qkv(*grads, *angles, **how, fmt=E5M2, scale=scale, columns=True)
    for _ in range(100):
        for got, right in zip(split_qkv(mixed.clone(), groups, r, *angles, **how), expected, strict=True):
            assert torch.equal(got, right)
        assert torch.equal(join_qkv(*grads, *angles, **how), exact)
        largest = torch.zeros((), device=DEVICE)
        found = join_qkv(*grads, *angles, **how, fmt=E5M2, scale=scale, columns=True, amax_out=largest)
        for got, right in zip(found, payloads, strict=True):
            assert torch.equal(got.view(torch.uint8), right.view(torch.uint8))


@on_gpu_only
def test_offsets_past_2_31():
    s, b, groups, r, hn = 8192, 8, 64, 2, 144  # 2.4e9 elements
    mixed = torch.randn(s, b, groups * (r + 2) * hn, dtype=torch.bfloat16, device=DEVICE)
    assert mixed.numel() > 2**31
    angles = put_all(*tables(s, hn))
    parts = split_qkv(mixed, groups, r, *angles)
    end = reference_qkv.split_qkv(mixed[-4:].clone(), groups, r, *(t[-4:] for t in angles))
    for got, right in zip(parts, end, strict=True):
        assert torch.equal(got[-4:], right)
    exact = reference_qkv.join_qkv(*end, *(t[-4:] for t in angles))
    assert torch.equal(join_qkv(*parts, *angles)[-4 * b :], exact)
    _, columns = join_qkv(*parts, *angles, fmt=E4M3, scale=torch.ones((), device=DEVICE), rows=False, columns=True)
    rows, _ = join_qkv(*end, *(t[-4:] for t in angles), fmt=E4M3, scale=torch.ones((), device=DEVICE))
    assert torch.equal(columns[:, -4 * b :].t().contiguous().view(torch.uint8), rows.view(torch.uint8))
