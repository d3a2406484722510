"""Masters that a file has lost are drawn evenly among the numbers that round to what it has."""

import pytest
import torch

from megatron_fp8.numerics import dither
from megatron_fp8.numerics.dither import dithered, dithered_in_bf16
from megatron_fp8.numerics.formats import E4M3, decode, encode
from megatron_fp8.numerics.master import split_bf16

SCALE = torch.tensor(2.0**11)
N = 1 << 17


def values(spread=0.02):
    seed = torch.seed() % 2**32
    print(f"torch.manual_seed({seed})")
    return spread * torch.randn(N, generator=torch.Generator().manual_seed(seed))


def in_e4m3(x, scale=SCALE):
    return (decode(encode(x * scale, E4M3)) / scale).bfloat16()


def share_shown(masters, update):
    """How much of `update` the E4M3 weights show, on average."""
    moved = in_e4m3(masters + update).double() - in_e4m3(masters).double()
    return float(moved.mean() / update)


@pytest.mark.parametrize("update", [1e-5, 1e-4, -3e-4])
def test_an_update_that_is_less_than_half_an_ulp_shows_on_average(update):
    """Without the draw, no weight that comes in E4M3 would move, and too many of those that come in BF16."""
    for given in (in_e4m3(values()), values().bfloat16()):
        drawn = dithered(given, (1, 2), SCALE)
        # n of N weights move by an ulp of 2^-9 to 2^-8: the share's deviation is about sqrt(ulp / (N * update))
        assert abs(share_shown(drawn, update) - 1) < 5 * (2**-8 / (N * abs(update))) ** 0.5
    assert share_shown(in_e4m3(values()).float(), 1e-5) < 0.1


@pytest.mark.parametrize("spread", [0.02, 1e-5, 0.1])  # among subnormal numbers; up to the largest ones
def test_no_code_of_e4m3_moves(spread):
    given = in_e4m3(values(spread))
    drawn = dithered(given, (3,), SCALE)
    assert torch.equal(in_e4m3(drawn), given)
    assert ((drawn == given) == (given == 0)).float().mean() > 0.999  # each but zeros is drawn


def test_every_code_is_drawn_from_its_whole_cell():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[torch.isfinite(decode(codes)) & (decode(codes) != 0)]
    given = decode(codes).repeat(4096).bfloat16()
    drawn = dithered(given, (4,), torch.tensor(1.0)).view(4096, -1)
    numbers = torch.cat([decode(codes), torch.zeros(1)]).unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    for i, code in enumerate(decode(codes)):
        if code.abs() == 448:
            continue
        low, high = middles[middles < code].max(), middles[middles > code].min()
        cell = drawn[:, i]
        assert low <= cell.min() and cell.max() <= high and cell.max() - cell.min() > 0.99 * (high - low)
        assert abs(cell.mean() - (low + high) / 2) < 5 * (high - low) / 12**0.5 / 64


def test_each_round_moves_other_weights():
    """A model that is saved without masters after each round: errors of ten rounds add up as independent ones do, to
    10^0.5 times the error of one. If the same weights moved each time, it would be 10 times."""
    began = given = in_e4m3(values())
    errors = []
    for i in range(1, 11):
        given = in_e4m3(dithered(given, (8,), SCALE) + 3e-4)
        errors.append((given.double() - began.double() - i * 3e-4).square().mean().sqrt())
    assert 2.5 < errors[-1] / errors[0] < 4


def test_a_few_numbers_of_bf16_that_are_also_e4m3_keep_their_four_bits_more():
    given = values().bfloat16()
    drawn = dithered(given, (5,), SCALE)
    assert (drawn.bfloat16() == given).float().mean() > 0.99  # the others are powers of two
    assert (given == in_e4m3(given)).float().mean() > 0.03


def test_pieces_do_not_show(monkeypatch):
    for given in (values().bfloat16(), in_e4m3(values())):
        whole = dithered(given, (6,), SCALE)
        monkeypatch.setattr(dither, "_AT_ONCE", 1000)
        assert torch.equal(dithered(given, (6,), SCALE), whole)
        monkeypatch.undo()


def test_other_types_and_zeros_stay():
    given = values()
    assert dithered(given, (7,), SCALE) is given
    assert not dithered(torch.zeros(256, dtype=torch.bfloat16), (7,), SCALE).any()


def test_what_is_not_finite_stays():
    for given in (values().bfloat16(), in_e4m3(values())):
        odd = torch.tensor([float("nan"), float("inf"), float("-inf")]).bfloat16()
        drawn = dithered(torch.cat([odd, given]), (7,), SCALE)
        assert drawn[0].isnan() and torch.equal(drawn[1:3], odd[1:].float()) and drawn[3:].isfinite().all()


def whole(given, identity=(9,)):
    return dithered_in_bf16(given, identity, 0, given.numel())


def test_bf16_weights_show_an_update_at_once_on_average():
    """Half an ulp of these weights is some 4e-5; without the draw less than 0.1 of 1e-6 shows."""
    given = values().bfloat16()
    for update in (1e-6, -1e-5):
        moved = (whole(given) + update).bfloat16().double() - given.double()
        assert abs(moved.mean() / update - 1) < 5 * (2**-12 / (N * abs(update))) ** 0.5
        stood = (given.float() + update).bfloat16().double() - given.double()
        assert abs(update) > 1e-6 or stood.mean() / update < 0.1


def test_no_bf16_weight_moves_and_each_is_drawn_from_its_whole_cell():
    """All 65,536 codes: to nearest with ties to even as a cast rounds, and with ties away as a remainder is kept."""
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    drawn = whole(codes)
    for rounded in (drawn.bfloat16(), split_bf16(drawn)[0]):
        same = rounded.view(torch.int16) == codes.view(torch.int16)
        assert (same | codes.isnan()).all()
    stays = (codes == 0) | ~codes.isfinite()
    assert ((drawn == codes.float()) | codes.isnan())[stays].all() and torch.equal(drawn.signbit(), codes.signbit())
    assert (drawn != codes.float())[~stays].float().mean() > 0.999
    one = whole(torch.ones(1 << 20, dtype=torch.bfloat16))
    below, above = one[one < 1], one[one > 1]
    assert 1 - 2**-9 < below.min() < 1 - 0.999 * 2**-9 and 1 + 0.999 * 2**-8 < above.max() < 1 + 2**-8
    for half in (below, above):  # even in bits: as many numbers below a power of two as above it
        assert abs(half.numel() / one.numel() - 0.5) < 0.005
        assert abs((half.mean() - 1).abs() / (half - 1).abs().max() - 0.5) < 0.005


def test_each_round_moves_other_bf16_weights():
    """As test_each_round_moves_other_weights."""
    began = given = values().bfloat16()
    errors = []
    for i in range(1, 11):
        given = (whole(given, (8,)) + 1e-5).bfloat16()
        errors.append((given.double() - began.double() - i * 1e-5).square().mean().sqrt())
    assert 2.5 < errors[-1] / errors[0] < 4


def test_owners_of_a_part_draw_what_the_whole_has(monkeypatch):
    given = values().bfloat16()
    drawn = whole(given)
    assert not torch.equal(drawn, whole(given, (10,)))
    monkeypatch.setattr(dither, "_AT_ONCE", 1000)
    for first, stop in ((0, N), (128, 4992), (N - 384, N)):
        assert torch.equal(dithered_in_bf16(given, (9,), first, stop), drawn[first:stop])
