"""The studies of gradient error and accumulation, small: their arithmetic, and the facts that they should show."""

import csv
import itertools
import sys

import pytest
import torch
from launch import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import grad_accumulation
import grad_error
from grad_accumulation import STORAGES, add_nearest, add_stochastic
from grad_error import MODES, gaussian, highest_mu, shared_mean, student, study

N = 1 << 12
ONE = torch.tensor(1.0)


def small(kind):
    return lambda ranks, draw: kind(ranks, draw, N)


@pytest.fixture(scope="module")
def found():
    """{(kind, ranks): study's result}"""
    sizes = (4, 16, 64, 256)
    return {(kind.__name__, ranks): study(small(kind), ranks, 2) for kind in (gaussian, student) for ranks in sizes}


@pytest.mark.parametrize("kind", ["gaussian", "student"])
def test_block_rounds_once_whatever_the_number_of_ranks(found, kind):
    for ranks in (4, 16, 64, 256):
        assert 0.02 < found[kind, ranks]["block"]["relative_error"] <= grad_error.LARGEST_BLOCK_ERROR
    twice = found[kind, 64]["two-level"]["relative_error"] / found[kind, 64]["block"]["relative_error"]
    assert twice == pytest.approx(2**0.5, rel=0.1)  # two independent roundings


def test_the_ring_rounds_more_as_ranks_grow(found):
    errors = [found["gaussian", ranks]["auto"]["relative_error"] for ranks in (4, 16, 64, 256)]
    assert all(1.5 < b / a < 2.5 for a, b in itertools.pairwise(errors))  # about the root of the ranks


def test_post_overflows_more_as_ranks_grow_and_pre_does_not(found):
    post = [found["gaussian", ranks]["post"]["overflow"] for ranks in (4, 16, 64)]
    assert 0.01 < post[0] < post[1] < post[2]
    for kind, ranks in found:
        assert found[kind, ranks]["pre"]["overflow"] == 0
        assert found[kind, ranks]["auto, highest mu"]["overflow"] <= grad_error.SATURATED


def test_pre_underflows_more_as_ranks_grow():
    """Elements of different sizes underflow. Exact cancellation, which gives zeros too, is as common with post."""
    sizes = torch.randn(N, generator=torch.Generator().manual_seed(0)).mul_(2).exp_()
    lost = [study(lambda ranks, draw: gaussian(ranks, draw, N) * sizes, ranks, 1) for ranks in (4, 32, 256)]
    extra = [found["pre"]["underflow"] - found["post"]["underflow"] for found in lost]
    assert extra[0] < extra[1] < extra[2] and extra[2] > 0.05
    assert all(found["block"]["underflow"] < 0.01 for found in lost)


def test_block_sums_scale_each_block():
    """E4M3 has neither 2^-30 nor 2^30, and one scale for the tensor could not serve both blocks."""
    blocks = torch.cat([torch.full((128,), 2.0**-30), torch.full((128,), 2.0**30)])
    gradients = blocks * torch.arange(1.0, 17.0)[:, None]
    assert torch.equal(grad_error.block_sum(gradients), blocks * 136)
    assert torch.equal(grad_error.two_level_sum(gradients), blocks * (36 + 96))  # 36 + 100: a tie


def test_shared_mean_where_nothing_rounds():
    gradients = torch.tensor([[448.0, 2.0, -8.0, 0.0], [0.0, 2.0, -24.0, 0.0]])
    mean, overflow = shared_mean(gradients, ONE, 0.5)
    assert mean.tolist() == [224.0, 2.0, -16.0, 0.0] and overflow == 0


def test_shared_mean_counts_what_saturates_and_loses_what_is_small():
    gradients = torch.tensor([[448.0, 2.0**-9, -448.0, 1.0], [32.0, 2.0**-9, -448.0, 1.0]])
    mean, overflow = shared_mean(gradients, ONE, 1.0)
    assert mean.tolist() == [224.0, 2.0**-9, -224.0, 1.0] and overflow == 0.5
    mean, overflow = shared_mean(gradients, ONE, 0.25)
    assert mean.tolist() == [240.0, 0.0, -448.0, 1.0] and overflow == 0
    measured = grad_error.measure(mean, gradients.sum(0, dtype=torch.float64) / 2, overflow)
    assert measured["underflow"] == 0.25


def test_the_rule_for_mu_runs_below_the_highest_mu():
    """The paper's rule itself, with steps of 2^(1/20) instead of 2^(1/1000), and new data at each step."""
    ranks, n = 4, 1 << 17

    def data(step):
        gradients = gaussian(ranks, step, n)
        return gradients, grad_error.compute_scale(gradients.abs().amax(), grad_error.E4M3)

    draws, scales = zip(*(data(step) for step in range(4)), strict=True)
    top = highest_mu(list(draws), list(scales))
    mu, run = ranks**-0.5, []
    for step in range(80):
        overflow = shared_mean(*data(100 + step), mu)[1]
        mu = mu / 2 if overflow > grad_error.SATURATED else mu * 2 ** (1 / 20)
        run.append(mu)
    settled = run[40:]
    assert top / 2**1.5 < min(settled) < top / 2**0.5  # it falls back by a factor of 2 ...
    assert top / 2**0.5 < max(settled) < top * 2**0.5  # ... from about the top


def test_resample_takes_each_micro_batch_once():
    micro_batches = torch.arange(16.0)[:, None].expand(16, 4)
    first, second = (grad_error.resample(micro_batches, 8, draw)[:, 0].tolist() for draw in (0, 1))
    assert len(set(first)) == 8 and first != second
    assert sorted(grad_error.resample(micro_batches, 16, 0)[:, 0].tolist()) == list(range(16))


COUNTS = [1, 8, 64, 128]


def rows_of(gradients, seeds=8):
    rows = grad_accumulation.study(gradients, COUNTS, seeds)
    return {(row["storage"], row["micro_batches"]): row for row in rows}


def test_stochastic_rounding_has_no_bias_where_nearest_stalls():
    rows = rows_of(gaussian(1, 0, N).expand(128, N))
    stochastic = rows["fp8 stochastic", 128]
    first = rows["fp8 stochastic", 1]["bias"] / 128  # the first rounds to nearest, so all seeds share its bias
    assert abs(stochastic["bias"] - first) < 4 * stochastic["bias_standard_error"] < 0.02
    assert rows["fp8 nearest", 128]["bias"] < -0.7
    assert rows["fp32", 128]["relative_error"] < 1e-6
    assert 0.01 < rows["bf16", 128]["relative_error"] < 0.1


@pytest.mark.parametrize("kind", ["gaussian", "identical"])
def test_the_error_of_stochastic_rounding_is_the_predicted(kind):
    rows = rows_of(gaussian(1, 1, N).expand(128, N) if kind == "identical" else gaussian(128, 1, N), 4)
    for count in COUNTS:
        row = rows["fp8 stochastic", count]
        assert row["relative_error"] == pytest.approx(row["predicted"], rel=0.05)
        assert row["relative_error"] == pytest.approx(grad_accumulation.CLOSED_FORMS[kind](count), rel=0.05)
    ratio = rows["fp8 stochastic", 64]["noise_ratio"]
    if kind == "identical":
        assert ratio == ""
    else:  # the noise of the sum is the sum
        assert ratio == pytest.approx(rows["fp8 stochastic", 64]["relative_error"], rel=0.05)


def test_predicted_by_hand():
    """1 + 1 + 0.5, with ulps 1/8, 1/4, 1/4. The second and third are whole numbers of ulps; 0.0625 is not."""
    gradients = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.5, 0.0], [0.0625, 0.0]])
    first = (1 / 8) ** 2 / 12
    last = first + 0.25 * 0.75 * (1 / 4) ** 2
    expected = [first**0.5, first**0.5 / 2, first**0.5 / 2.5, last**0.5 / 2.5625]
    assert grad_accumulation.predicted(gradients, gradients.double().cumsum(0)) == pytest.approx(expected)


def test_storages_hold_what_fits_exactly():
    gradients = torch.full((3, 2048), 2.0)
    for name, add in STORAGES.items():
        sums = grad_accumulation.run(add, gradients, [1, 2, 3])
        for count, stored in sums.items():
            assert stored.dtype == torch.float32
            torch.testing.assert_close(stored, torch.full((2048,), 2.0 * count), rtol=1e-6, atol=0, msg=name)


def test_seeds_decide_the_stochastic_storage_and_nothing_else():
    gradients = gaussian(8, 2, N)
    same = [grad_accumulation.run(add_stochastic, gradients, [8], seed)[8] for seed in (1, 1, 2)]
    assert torch.equal(same[0], same[1]) and not torch.equal(same[0], same[2])
    same = [grad_accumulation.run(add_nearest, gradients, [8], seed)[8] for seed in (1, 2)]
    assert torch.equal(*same)


def test_tables_csv_and_figures_are_written(found, tmp_path, capsys, monkeypatch):
    rows = [
        {"kind": kind, "tensor": "", "ranks": ranks, "mode": mode} | measures | {"commit": "0"}
        for (kind, ranks), modes in found.items()
        for mode, measures in modes.items()
    ]
    grad_error.print_table(rows)
    grad_error.write_csv(tmp_path / "error.csv", rows)
    with (tmp_path / "error.csv").open() as file:
        read = list(csv.DictReader(file))
    assert len(read) == len(rows) and {row["mode"] for row in read} == set(MODES)
    monkeypatch.setattr(grad_accumulation, "COUNTS", COUNTS)
    sums = [{"kind": "gaussian"} | row for row in grad_accumulation.study(gaussian(128, 0, 2048), COUNTS, 2)]
    grad_accumulation.print_table(sums)
    assert "| 256 |" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    grad_error.plot(rows, tmp_path / "error.svg")
    grad_accumulation.plot(sums, tmp_path / "sums.svg")
    assert all("<svg" in (tmp_path / name).read_text() for name in ("error.svg", "sums.svg"))
