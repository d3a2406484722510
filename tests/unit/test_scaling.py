"""compute_scale and DelayedScaling: the scales' values, and that zeros, infinities and NaN do not spoil them."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from exact import INF, NAN, same
from gloo_ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp8.numerics import E4M3, E5M2, DelayedScaling, compute_scale
from megatron_fp8.ops import reference

positive = st.floats(width=32, min_value=2.0**-149, allow_nan=False, allow_infinity=False)


def delayed(slots=2, history_len=4, algo="most_recent", margin=0, formats=None) -> DelayedScaling:
    return DelayedScaling(formats or [E4M3] * slots, history_len, algo, margin, "cpu")


def step(state: DelayedScaling, *amaxes: float) -> list[float]:
    for i, amax in enumerate(amaxes):
        state.record(i, torch.tensor(amax))
    state.update()
    return state.scale.tolist()


@settings(max_examples=300, deadline=None)
@given(positive, st.sampled_from([E4M3, E5M2]), st.integers(-3, 8))
def test_scale_is_the_correctly_rounded_quotient_within_its_bounds(amax, fmt, margin):
    scale = compute_scale(torch.tensor(amax), fmt, margin)
    assert scale.dtype == torch.float32 and scale.shape == ()
    exact = Fraction(fmt.max) / Fraction(amax) / Fraction(2) ** margin
    exact = min(max(exact, Fraction(2) ** -126), Fraction(2) ** 126)
    assert same(scale, torch.tensor(float(exact), dtype=torch.float64).float())


@settings(max_examples=200, deadline=None)
@given(positive, st.sampled_from([E4M3, E5M2]), st.integers(-100, 100))
def test_neither_scale_nor_its_inverse_is_ever_infinite_or_denormal(amax, fmt, margin):
    scale = compute_scale(torch.tensor(amax), fmt, margin)
    for value in (scale.item(), scale.reciprocal().item()):
        assert 2.0**-126 <= value <= 2.0**126


@pytest.mark.parametrize("amax", [0.0, -0.0, INF, NAN])
def test_an_amax_that_says_nothing_keeps_the_previous_scale(amax):
    amax = torch.tensor([amax, 7.0])
    assert compute_scale(amax, E4M3).tolist() == [1.0, 64.0]
    assert compute_scale(amax, E4M3, previous=torch.tensor([5.0, 6.0])).tolist() == [5.0, 64.0]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_a_just_in_time_scale_never_hides_the_non_finite(bad, fmt):
    x = torch.tensor([1.0, bad, -1e30])
    payload = reference.quantize(x, fmt, compute_scale(reference.amax(x), fmt)).float()
    assert payload.isfinite().tolist() == [True, False, True]


def test_the_result_is_a_new_tensor():
    previous = torch.tensor(3.0)
    scale = compute_scale(torch.tensor(0.0), E4M3, previous=previous)
    previous.fill_(9)
    assert scale.item() == 3


def test_margin_halves_the_scale():
    amax = torch.tensor([3.7, 1e-3])
    assert same(compute_scale(amax, E5M2, margin=1) * 2, compute_scale(amax, E5M2))
    states = [delayed(margin=margin) for margin in (0, 3)]
    first, second = (step(state, 3.7, 1e-3) for state in states)
    assert [a / b for a, b in zip(first, second, strict=True)] == [8.0, 8.0]


def test_each_slot_has_its_format():
    state = delayed(formats=[E4M3, E5M2])
    assert step(state, 2.0, 2.0) == [224.0, 28672.0]


def test_most_recent_follows_the_newest_step():
    state = delayed(slots=1)
    assert [step(state, amax)[0] for amax in (7.0, 14.0, 3.5)] == [64.0, 32.0, 128.0]
    assert state.amax_history[:, 0].tolist() == [3.5, 14.0, 7.0, 0.0]


def test_max_follows_the_largest_of_the_history_and_forgets():
    state = delayed(slots=1, history_len=3, algo="max")
    scales = [step(state, amax)[0] for amax in (7.0, 14.0, 3.5, 7.0, 1.75)]
    assert scales == [64.0, 32.0, 32.0, 32.0, 64.0]
    assert state.amax_history[:, 0].tolist() == [1.75, 7.0, 3.5]


def test_history_of_one_step():
    for algo in ("most_recent", "max"):
        state = delayed(slots=1, history_len=1, algo=algo)
        assert [step(state, amax)[0] for amax in (7.0, 14.0, 3.5)] == [64.0, 32.0, 128.0]


def test_a_step_takes_the_maximum_over_its_micro_batches_and_starts_again():
    state = delayed()
    for amax in (1.0, 7.0, 2.0):
        state.record(1, torch.tensor(amax))
    assert state.amax.tolist() == [0.0, 7.0]
    state.update()
    assert state.scale.tolist() == [1.0, 64.0]
    assert state.amax.tolist() == [0.0, 0.0]


def test_a_kernel_may_write_the_running_maximum_itself():
    state = delayed()
    reference.quantize(torch.tensor([[3.0, -14.0]]), E4M3, torch.tensor(1.0), amax_out=state.amax[1])
    reference.quantize(torch.tensor([[5.0, 1.0]]), E4M3, torch.tensor(1.0), amax_out=state.amax[1])
    state.update()
    assert state.scale.tolist() == [1.0, 32.0]


def test_a_slot_without_an_amax_in_the_first_step_takes_the_smallest_scale_of_its_kind():
    """It had 1, with which an expert's first tokens had no gradient if they came in the second step."""
    state = DelayedScaling([E4M3, E5M2] * 3, 4, "most_recent", 0, "cpu", kinds=2)
    smallest = [32.0, 57344 * 2.0**19]
    assert step(state, 7.0, 2.0**-20, 14.0, 2.0**-19) == [64.0, 57344 * 2.0**20, *smallest, *smallest]
    assert step(state, 3.5, 0.0, 3.5, 0.0, 0.0, 2.0**-21)[2:] == [128.0, 57344 * 2.0**19, 32.0, 57344 * 2.0**21]
    none = DelayedScaling([E4M3, E5M2] * 2, 4, "max", 0, "cpu", kinds=2)
    assert step(none, 7.0, 0.0, 0.0, NAN) == [64.0, 1.0, 64.0, 1.0]


def scales_of_two_ranks(rank, _):
    state = DelayedScaling([E4M3, E5M2] * 2, 4, "max", 0, "cpu", kinds=2, others=dist.group.WORLD)
    found = [step(state, *((7.0, 2.0**-20, 14.0, 0.0) if rank == 0 else [0.0] * 4))]
    found.append(step(state, 7.0, 2.0**-20) if rank else state.scale.tolist())  # a later step is each rank's own
    state.load(state.amax_history, state.scale, warm=rank == 0)
    return found, state.warm


def test_a_rank_without_an_amax_in_the_first_step_takes_the_smallest_scale_of_the_others(tmp_path):
    """If none of a rank's experts had a token, all of its scales were 1."""
    large, small, grad = 64.0, 32.0, 57344 * 2.0**20
    (first, one), (second, other) = run_ranks(scales_of_two_ranks, 2, tmp_path)
    assert first == [[large, grad, small, grad]] * 2
    assert second == [[small, grad, small, grad], [large, grad, small, grad]]
    assert one is other is False  # or the next first update would wait for a rank that makes none


@pytest.mark.parametrize("algo", ["most_recent", "max"])
def test_zero_amax_keeps_the_scale(algo):
    state = delayed(slots=1, history_len=2, algo=algo)
    step(state, 7.0)
    assert [step(state, 0.0)[0] for _ in range(3)] == [64.0] * 3
    assert step(state, 14.0) == [32.0]


@pytest.mark.parametrize("algo", ["most_recent", "max"])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_non_finite_step_is_kept_within_the_step_and_poisons_nothing_after(algo, bad):
    state = delayed(algo=algo)
    step(state, 7.0, 7.0)
    for amax in (1.0, bad, 2.0):  # a later amax does not hide it
        state.record(0, torch.tensor(amax))
    assert not state.amax[0].isfinite()
    state.record(1, torch.tensor(14.0))
    state.update()
    assert state.scale.tolist() == [64.0, 32.0]
    assert state.amax_history.isfinite().all()
    assert state.amax.tolist() == [0.0, 0.0]
    assert step(state, 14.0, 14.0) == [32.0, 32.0]


def test_a_non_finite_first_step_leaves_the_scale_of_one():
    state = delayed(slots=1)
    assert step(state, NAN) == [1.0]
    assert step(state, 7.0) == [64.0]


def test_a_captured_scale_is_not_overwritten():
    state = delayed()
    step(state, 7.0, 14.0)
    captured = [state.slot_scale(0), state.slot_scale(1)]
    assert captured[0].shape == ()
    step(state, 1.0, 1.0)
    captured.append(state.slot_scale(0))
    state.load(torch.zeros(4, 2), torch.ones(2), warm=False)
    assert [scale.item() for scale in captured] == [64.0, 32.0, 448.0]
    assert state.slot_scale(0).item() == 1.0


def test_warm_from_the_first_update():
    state = delayed()
    state.record(0, torch.tensor(1.0))
    assert state.warm is False
    state.update()
    assert state.warm is True


def test_one_reduction_of_every_slot_over_the_group(monkeypatch):
    calls = []

    def all_reduce(tensor, op, group, async_op):
        assert not async_op
        calls.append((tensor.clone(), op, group))
        tensor.copy_(torch.maximum(tensor, torch.tensor([1.0, 14.0, 1.0])))  # the other rank's amax

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    state = delayed(slots=3)
    for i, amax in enumerate((7.0, 7.0, NAN)):
        state.record(i, torch.tensor(amax))
    state.update(group="the group")
    (sent, op, group), *more = calls
    assert not more
    assert (op, group) == (dist.ReduceOp.MAX, "the group")
    assert sent.tolist() == [7.0, 7.0, INF]  # NaN is sent as infinity: a reduction could drop it on one rank only
    assert state.scale.tolist() == [64.0, 32.0, 1.0]


def test_nothing_is_read_by_the_host():
    with FakeTensorMode():  # raises if code reads a value
        state = delayed(algo="max")
        for _ in range(2):
            state.record(0, reference.amax(torch.ones(3, 3)))
            state.update()
        assert compute_scale(state.amax, E4M3, previous=state.slot_scale(1)).shape == (2,)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            state.slot_scale(0).item()


@pytest.mark.parametrize("algo", ["most_recent", "max"])
def test_state_round_trip_continues_bit_for_bit(algo):
    amaxes = torch.rand(10, 2, generator=torch.Generator().manual_seed(3)).tolist()
    straight, saved = delayed(algo=algo), delayed(algo=algo)
    for row in amaxes[:5]:
        step(straight, *row), step(saved, *row)
    history, scale, warm = saved.amax_history, saved.scale, saved.warm
    step(saved, 100.0, 100.0)  # does not write to the saved tensors
    resumed = delayed(algo=algo)
    resumed.record(0, torch.tensor(1000.0))  # belongs to a step that `load` abandons
    resumed.load(history, scale, warm)
    assert resumed.warm is True
    assert [float(resumed.slot(i)[1]) for i in range(2)] == straight.scale.reciprocal().tolist()
    for row in amaxes[5:]:
        assert step(resumed, *row) == step(straight, *row)
    assert same(resumed.amax_history, straight.amax_history)
