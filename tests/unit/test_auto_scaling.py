"""ScalingRule against closed forms: mu's start, and how it moves."""

import math

import pytest
import torch

from megatron_fp8.numerics.auto_scaling import AUTO, MODES, POST, PRE, ScalingRule

SIZES = (1, 2, 3, 8, 32, 1000)


def moved(rule: ScalingRule, mu: float, share: float) -> float:
    return rule.next(torch.tensor([mu]), torch.tensor([share])).item()


def test_the_defaults_are_the_papers():
    assert ScalingRule() == ScalingRule(AUTO, 1e-5, 1000, 0.5, None, 1)
    assert set(MODES) == {"auto", "pre", "post"}


@pytest.mark.parametrize("ranks", SIZES)
def test_the_start(ranks):
    assert ScalingRule(PRE).start(ranks) == 1 / ranks
    assert ScalingRule(POST).start(ranks) == 1
    assert ScalingRule(AUTO).start(ranks) == pytest.approx(1 / math.sqrt(ranks), rel=1e-15)
    assert ScalingRule(AUTO, initial=0.3).start(ranks) == 0.3
    assert ScalingRule(PRE, initial=0.3).start(ranks) == 1 / ranks  # only auto uses `initial`


@pytest.mark.parametrize("window", [1, 7, 1000])
def test_mu_doubles_in_a_window_without_saturation(window):
    rule, mu = ScalingRule(window=window), torch.tensor([0.25, 3.0])
    for _ in range(window):
        mu = rule.next(mu, torch.zeros(2))
    assert mu.tolist() == pytest.approx([0.5, 6.0], rel=window * 2**-23)


@pytest.mark.parametrize("interval", [1, 10, 250, 1000])
def test_the_speed_does_not_depend_on_the_interval(interval):
    rule, mu = ScalingRule(interval=interval), torch.ones(1)
    for _ in range(1000 // interval):
        mu = rule.next(mu, torch.zeros(1))
    assert mu.item() == pytest.approx(2, rel=1e-4)


def test_mu_shrinks_above_the_threshold_and_only_there():
    threshold = torch.tensor(1e-5)
    for share, factor in [
        (0.0, 2 ** (1 / 1000)),
        (torch.nextafter(threshold, torch.tensor(0.0)).item(), 2 ** (1 / 1000)),
        (threshold.item(), 2 ** (1 / 1000)),  # "more than"
        (torch.nextafter(threshold, torch.tensor(1.0)).item(), 0.5),
        (1.0, 0.5),
    ]:
        assert moved(ScalingRule(), 0.75, share) == pytest.approx(0.75 * factor, rel=2e-7), share
    assert moved(ScalingRule(threshold=0.1, backoff=0.25), 1.0, 0.2) == 0.25
    assert moved(ScalingRule(threshold=0.3, backoff=0.25), 1.0, 0.2) > 1


def test_every_tensor_moves_by_itself():
    share = torch.rand(500, generator=torch.Generator().manual_seed(1)) * 2e-5
    mu = torch.rand(500, generator=torch.Generator().manual_seed(2)) + 0.01
    kept = mu.clone()
    new = ScalingRule(window=10).next(mu, share)
    expected = [m / 2 if s > 1e-5 else m * 2**0.1 for m, s in zip(mu.tolist(), share.tolist(), strict=True)]
    assert new.tolist() == pytest.approx(expected, rel=2e-7)
    assert 100 < (new < mu).sum() < 400
    assert torch.equal(mu, kept) and new.dtype == torch.float32


def test_mu_settles_at_the_threshold():
    """If values saturate from mu = 1 on, mu ends up between 1/2 and 1, from either side."""
    rule = ScalingRule(window=100)
    for start in (1e-3, 50.0):
        mu, seen = start, []
        for _ in range(2000):
            mu = moved(rule, mu, 1.0 if mu > 1 else 0.0)
            seen.append(mu)
        last = seen[-500:]
        assert min(last) == pytest.approx(0.5, rel=0.01) and max(last) == pytest.approx(1, rel=0.01)
