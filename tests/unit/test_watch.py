"""--fp8-on-spike: its flags, its verdict on a step, the linears that leave FP8 and return, and its state."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_parts import one_set
from test_config import O1, error_of

from megatron_fp8.engine.owned_weight import INPUT, OwnedWeight
from megatron_fp8.flags.config import config_from_args
from megatron_fp8.flags.watch import WatchPlan
from megatron_fp8.monitor import sharpness, watch, writers
from megatron_fp8.monitor.logit_sharpness import Statistics
from megatron_fp8.monitor.watch import MOST_SKIPS, Fallback, Watch
from megatron_fp8.monitor.writers import CASTS, Tally
from megatron_fp8.numerics import E4M3, E5M2, DelayedScaling


def test_flags(parse):
    assert config_from_args(parse(*O1)).watch is None
    assert config_from_args(parse(*O1, "--fp8-on-spike", "bf16-fallback")).watch == WatchPlan("bf16-fallback", 7.0, 128)
    flags = "--fp8-gemm bf16 --fp8-on-spike skip --fp8-spike-sigma 5.5 --fp8-spike-window 16".split()
    assert config_from_args(parse(*O1, *flags)).watch == WatchPlan("skip", 5.5, 16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp8-on-spike stop", "--fp8-on-spike stop: no such value; use log, skip or bf16-fallback"),
        ("--fp8-spike-sigma 7", "--fp8-spike-sigma 7.0: nothing is watched; add --fp8-on-spike log, or remove it"),
        ("--fp8-spike-window 64", "--fp8-spike-window 64: nothing is watched; add --fp8-on-spike log, or remove it"),
        ("--fp8-on-spike log --fp8-spike-sigma 0", "--fp8-spike-sigma 0: use a number above 0"),
        ("--fp8-on-spike log --fp8-spike-sigma nan", "--fp8-spike-sigma nan: use a number above 0"),
        ("--fp8-on-spike log --fp8-spike-window 15", "--fp8-spike-window 15: use 16 or more"),
        *(
            (
                f"{flags} --fp8-on-spike bf16-fallback",
                "--fp8-on-spike bf16-fallback: no linear of this run computes in FP8; use log or skip",
            )
            for flags in ("--fp8-gemm bf16", "--fp8-emulate E8M3")
        ),
    ],
)
def test_mistakes(flags, message, parse):
    assert error_of(lambda: config_from_args(parse(*O1, *flags.split()))) == message


class TestFallback:
    def test_a_linear_returns_after_calm_steps_on_end(self):
        fallback = Fallback(calm=3)
        fallback.spike(["a"])
        assert fallback.step() == fallback.step() == []
        fallback.spike([])
        assert fallback.out() == ["a"]
        assert [fallback.step() for _ in range(4)] == [[], [], ["a"], []]
        assert fallback.out() == []

    def test_each_linear_waits_twice_as_long_when_it_falls_again(self):
        fallback = Fallback(calm=2)
        for calm in (2, 4, 8):
            fallback.spike(["a"])
            assert fallback.waits("a") == calm
            assert [fallback.step() for _ in range(calm)] == [[]] * (calm - 1) + [["a"]]
        fallback.spike(["a", "b"])
        assert (fallback.waits("a"), fallback.waits("b")) == (16, 2)
        for _ in range(3):
            fallback.stays["a"][1] = 0
            fallback.spike(["a"])
            assert fallback.waits("a") == 16  # the most

    def test_calm_in_fp8_is_remembered_a_stay_for_a_doubling(self):
        fallback = Fallback(calm=2)
        for _ in range(3):
            fallback.spike(["a"])
            while fallback.out():
                fallback.step()
        stays = []
        for _ in range(8 + 4 + 2):
            fallback.step()
            stays.append(fallback.stays.get("a", [0])[0])
        assert stays == [3] * 7 + [2] * 4 + [1] * 2 + [0] and fallback.stays == {}

    def test_a_fall_without_a_clipped_cast_does_not_count(self):
        fallback = Fallback(calm=2)
        for clipped, calm in ((False, 2), (False, 2), (True, 2), (False, 2), (True, 4), (False, 4)):
            fallback.spike(["a"], clipped)
            assert fallback.waits("a") == fallback.stays["a"][1] == calm
            fallback.stays["a"][1] = 0

    def test_a_spike_while_it_is_out_prolongs_no_stay_beyond_calm_steps(self):
        fallback = Fallback(calm=4)
        fallback.stays["a"] = [3, 10, 0]  # 10 of 16 steps are left
        fallback.spike([])
        assert fallback.stays["a"] == [3, 10, 0]
        fallback.stays["a"][1] = 1
        fallback.spike([])
        assert fallback.stays["a"] == [3, 4, 0]

    def test_of_an_older_checkpoint(self):
        fallback = Fallback(calm=2)
        fallback.load({"a": [17, 100_000], "b": [1, 0], "c": [2, 3, 0]})
        assert fallback.stays == {"a": [4, 16, 0], "b": [1, 0, 0], "c": [2, 3, 0]}

    @pytest.mark.parametrize(
        ("alarms", "clipped", "most", "most_of_50_000"),  # docs/monitoring.md has the results
        [(1.5, True, 0.05, 0.1), (1.5, False, 0.05, 0.1), (9.9, True, 0.35, 0.7), (9.9, False, 0.16, 0.25)],
    )
    def test_false_alarms_keep_no_long_run_in_bf16(self, alarms, clipped, most, most_of_50_000):
        """300,000 steps with so many false alarms in 10,000; each takes the linear out if it is in FP8."""
        fallback, out = Fallback(calm=128), []
        for alarm in np.random.default_rng().random(300_000) < alarms / 1e4:
            if alarm:
                fallback.spike([] if fallback.out() else ["a"], clipped)
            else:
                fallback.step()
            out.append(bool(fallback.out()))
        shares = np.reshape(out, (6, -1)).mean(1)
        assert shares.mean() <= most and shares.max() <= most_of_50_000


class Run:
    """A watch over two linears, a and b, and their delayed scaling; `step` judges a loss and a gradient norm."""

    def __init__(self, action, group, monkeypatch, recipe="delayed", window=16):
        config = SimpleNamespace(gemm="fp8", weight="bf16", emulate=None, margin=0)
        self.scaling = DelayedScaling([E4M3, E5M2] * 2, 1, "most_recent", 0, "cpu") if recipe == "delayed" else None
        self.weights = [OwnedWeight(torch.nn.Parameter(torch.randn(16, 16).bfloat16()), config) for _ in "ab"]
        for i, weight in enumerate(self.weights):
            weight.path, weight.layer_number = f"decoder.layers.{'ab'[i]}", 1
            weight.casts.scaling, weight.casts.slots = self.scaling, (2 * i, 2 * i + 1)
        sets = [SimpleNamespace(of=one_set(group), scaling=self.scaling, linears=self.weights)]
        engine = SimpleNamespace(sets=sets, device=torch.device("cpu"))
        self.watch = Watch(WatchPlan(action, window=window), engine)
        self.iteration = 0
        monkeypatch.setattr(watch, "current_iteration", lambda: self.iteration)
        for name in ("get_tensorboard_writer", "get_wandb_writer"):
            monkeypatch.setattr(writers, name, lambda: None)

    def step(self, loss=None, norm=None, amaxes=(1.0, 1.0, 1.0, 1.0)):
        self.iteration += 1
        wave = 0.01 * (-1) ** self.iteration
        loss, norm = (1.0 + wave if value is None else value for value in (loss, norm))
        self.watch.begin_step()
        self.watch._loss += torch.tensor([3 * loss, 3.0], dtype=torch.float64)
        assert self.watch.see(torch.tensor([norm**2, 0.0])) == pytest.approx([norm**2, 0.0], nan_ok=True)
        assert (self.watch.loss, self.watch.norm) == pytest.approx((loss, norm), nan_ok=True)
        if self.scaling is not None:
            self.scaling.amax.copy_(torch.tensor(amaxes))
        applied = self.watch.judge()
        if self.scaling is not None and applied and math.isfinite(norm):
            self.scaling.update()
        return applied

    def calm(self, steps):
        return [self.step() for _ in range(steps)]

    @property
    def fp8(self):
        return [weight.fp8 for weight in self.weights]


@pytest.fixture
def run(group, monkeypatch):
    return lambda *args, **kwargs: Run(*args, group, monkeypatch, **kwargs)


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_log_only_logs(run, capsys):
    r = run("log")
    assert all(r.calm(20)) and lines(capsys) == []
    assert r.step(loss=2.0) and r.step(norm=math.nan) and r.step(loss=math.inf, norm=9.0) and r.fp8 == [True, True]
    first, second, third = lines(capsys)
    assert first.startswith("[fp8] iteration 21: loss spike 2, ") and first.endswith("through its last 16 (1.002)")
    assert second == "[fp8] iteration 22: gradient norm spike nan, not finite"
    assert third.startswith("[fp8] iteration 23: loss spike inf, not finite; gradient norm spike 9, ")
    assert r.watch.counts["fp8_spikes"] == 3


def test_skip_has_a_limit(run, capsys):
    r = run("skip", window=128)
    r.calm(20)
    assert not r.step(norm=5.0) and r.step() and not r.step(norm=5.0)
    assert [r.step(norm=10.0 ** (2 + i)) for i in range(MOST_SKIPS + 1)] == [False] * (MOST_SKIPS - 1) + [True, False]
    assert not any(r.step(norm=math.nan) for _ in range(2 * MOST_SKIPS))  # such a step is never made
    found = lines(capsys)
    assert found[0].endswith("; the step is skipped") and found[-1].endswith("nan, not finite; the step is skipped")
    assert found[MOST_SKIPS + 1].endswith(f"; the step is made, after {MOST_SKIPS} skipped in a row")
    assert r.watch.counts["fp8_skipped_spikes"] == 3 * MOST_SKIPS + 2


def test_what_clipped_falls_back_and_returns(run, capsys):
    r = run("bf16-fallback")
    r.calm(20)
    assert r.step(loss=2.0, amaxes=(1.0, 1.9, 1.0, 2.1)) and r.fp8 == [True, False]  # b's gradient: more than twice
    r.calm(15)
    assert r.fp8 == [True, False]
    r.calm(1)
    assert r.fp8 == [True, True]
    r.step(loss=3.0, amaxes=(1.0, 1.0, math.nan, 1.0))
    assert r.fp8 == [True, False]
    assert r.step(loss=50.0, amaxes=(1.0, 1.0, 99.0, 99.0))  # b is not cast now, so no cast clipped
    assert r.fp8 == [False, False]
    r.step(loss=1e4)
    fall, back, again, others, all_out = lines(capsys)
    assert fall.endswith("; to BF16 for 16 calm steps: decoder.layers.0.b")
    assert back == "[fp8] iteration 37: back to FP8: decoder.layers.0.b"
    assert again.endswith("; to BF16 for 32 calm steps: decoder.layers.0.b")
    assert others.endswith("; no cast clipped; to BF16 for 16 calm steps: decoder.layers.0.a")
    assert all_out.endswith("; all linears are in BF16")


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_without_evidence_all_fall_back(recipe, run, capsys):
    r = run("bf16-fallback", recipe=recipe)
    r.calm(20)
    r.step(norm=9.0)
    assert r.fp8 == [False, False]
    assert lines(capsys)[0].endswith("; no cast clipped; to BF16 for 16 calm steps: all 2 linears")


def test_no_linear_in_fp8_on_any_stage(group):
    for fp8 in ([False, False], [False, True]):
        weights = [SimpleNamespace(fp8=has, name=f"decoder.layers.{i}") for i, has in enumerate(fp8)]
        sets = [SimpleNamespace(of=one_set(group), scaling=None, linears=weights)]
        engine = SimpleNamespace(sets=sets, device=torch.device("cpu"))
        Watch(WatchPlan("skip"), engine)
        if any(fp8):
            Watch(WatchPlan("bf16-fallback"), engine)
        else:
            with pytest.raises(ValueError, match=r"^--fp8-on-spike bf16-fallback: no linear .*; use log or skip$"):
                Watch(WatchPlan("bf16-fallback"), engine)


def test_a_loss_that_climbs_slowly_is_told(run, capsys):
    r = run("bf16-fallback", window=32)
    r.calm(40)
    for i in range(100):
        assert r.step(loss=1.0 + 0.01 * i + 0.001 * (-1) ** i) and r.fp8 == [True, True]
    found = lines(capsys)
    assert 2 <= len(found) <= 7 and all(": loss rise 1." in line for line in found)
    assert r.watch.counts["fp8_rises"] == len(found) and r.watch.counts["fp8_spikes"] == 0


@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_clipped_is_beyond_so_many_times_what_the_scale_holds(fmt, margin, group):
    values = [0.0, 2.0**-140, 1.0, 2.0, 2.001, 3.0e38, math.inf, math.nan]
    scaling = DelayedScaling([fmt] * len(values), 1, "most_recent", margin, "cpu")
    scaling.amax.fill_(0.5 * 2.0**-margin)  # the step before; the scale can then hold 0.5
    scaling.update()
    scaling.amax.copy_(torch.tensor(values))
    expected = [False, False, False, False, True, True, True, True]
    assert scaling.clipped(4.0).tolist() == scaling.clipped(4.0, group).tolist() == expected
    assert scaling.clipped(1.0).tolist() == [False, False, *[True] * 6]
    assert scaling.amax[2] == 1.0  # read, not changed


def test_a_linear_out_of_fp8_keeps_its_scale_up_to_date(run):
    weight = run("bf16-fallback").weights[1]
    weight.casts.follow(INPUT, torch.tensor([[1.0, -7.0]]))
    weight.casts.follow(INPUT, torch.tensor([[3.0, 0.0]]))
    assert weight.casts.scaling.amax.tolist() == [0.0, 0.0, 7.0, 0.0]
    weight.casts.scaling = None  # tensorwise, or always in BF16
    weight.casts.follow(INPUT, torch.ones(1, 2))


def test_no_loss_is_no_spike(run, capsys):
    r = run("log")
    r.watch.begin_step()
    r.watch.see(torch.tensor([4.0]))
    assert r.watch.loss is None and r.watch.judge() and lines(capsys) == []


def test_the_model_adds_up_its_loss(run):
    r = run("log")

    class Model(torch.nn.Module):
        post_process = True

        def forward(self, tokens, labels=None, loss_mask=None):
            return tokens

    model = Model()
    r.watch.attach(model)
    r.watch.attach(SimpleNamespace(post_process=False))  # another pipeline stage
    losses, mask = torch.rand(2, 8), (torch.rand(2, 8) > 0.5).float()
    model(losses, labels=losses, loss_mask=mask)
    model(losses, labels=losses)
    model(losses)  # returns no loss
    model.eval()
    model(losses, labels=losses, loss_mask=mask)
    total = (losses * mask).double().sum() + losses.double().sum()
    assert r.watch._loss.tolist() == pytest.approx([total.item(), mask.sum().item() + 16])


def test_observed_numbers(run, capsys):
    r = run("log", window=32)
    for i in range(1, 61):
        r.watch.observe("activation_underflows%", i, 0.1 * 2 ** (i / 20))
        r.watch.observe_on_last("sharpness", i, 0.1 * 2 ** (i / 20))
    r.watch.observe_on_last("sharpness", 100, 5.0)
    r.watch.observe_on_last("sharpness", 200, None)
    *rises, spike = lines(capsys)
    assert rises and all(": activation_underflows% rise 0." in line and ", from 0." in line for line in rises)
    assert spike.startswith("[fp8] iteration 100: sharpness spike 5, ")
    assert r.watch.counts["fp8_rises"] == len(rises) and r.watch.counts["fp8_spikes"] == 1


def test_sharpness_of_no_position_is_not_watched(monkeypatch):
    """The mean of a micro-batch that is all masked is NaN. So is the mean of NaNs, but that is a spike."""
    watched = []
    monkeypatch.setattr(sharpness, "current_iteration", lambda: 10)
    monkeypatch.setattr(sharpness, "is_last_rank", lambda: True)
    monkeypatch.setattr(sharpness, "log", lambda summary, iteration: None)
    spy = SimpleNamespace(observe_on_last=lambda name, iteration, mean: watched.append(mean))

    def sees(tokens):
        class Probe(contextlib.nullcontext):
            def __enter__(self):
                return SimpleNamespace(tokens=tokens, reduce=lambda: None)

        monkeypatch.setattr(sharpness, "SharpnessProbe", lambda chunks: Probe())
        sharpness.watch_step(SimpleNamespace(interval=10), [], spy, lambda: None)

    for values in ([], [math.nan], [0.25, math.inf]):
        tokens = Statistics(("sharpness",))
        tokens.add(torch.tensor([values]))
        sees(tokens)
    sees(None)
    assert watched[0] is watched[3] is None and math.isnan(watched[1]) and watched[2] == 0.25


def test_shares_of_casts(run, capsys):
    r = run("log")
    for i in range(1, 31):
        overflows = 0 if i < 30 else 50
        casts = [[100_000.0, overflows, 0.0], *[[0.0] * 3] * (len(CASTS) - 1)]
        tally = Tally(casts, [[1.0, 1.0, -1.0]] * len(CASTS), [0.0] * 4)
        r.watch.observe_casts({"a": tally, "b": tally}, i)
    (line,) = lines(capsys)
    assert line.startswith("[fp8] iteration 30: activation_overflows% spike 0.05, ")


def test_the_counts_go_to_the_writers(run, monkeypatch):
    r = run("bf16-fallback")
    written, logged = {}, []
    writer = SimpleNamespace(add_scalar=lambda name, value, step: written.update({(name, step): value}))
    monkeypatch.setattr(writers, "get_tensorboard_writer", lambda: writer)
    wandb = SimpleNamespace(log=lambda values, step: logged.append((values, step)))
    monkeypatch.setattr(writers, "get_wandb_writer", lambda: wandb)
    r.calm(20)
    assert written == {} and logged == []
    r.step(loss=2.0)
    counts = {"fp8/spikes": 1, "fp8/rises": 0, "fp8/skipped_spikes": 0, "fp8/linears_in_bf16": 2}
    assert written == {(name, 21): count for name, count in counts.items()} and logged == [(counts, 21)]


def test_a_restored_watch_continues(run, capsys):
    def begin():
        r = run("bf16-fallback")
        r.calm(20)
        r.step(loss=2.0, amaxes=(9.0, 1.0, 1.0, 1.0))
        r.calm(5)
        r.watch.observe("sharpness", 1, 1.0)
        return r

    def go_on(r):
        r.calm(9)
        r.step(norm=4.0)
        r.calm(40)
        return r.fp8, lines(capsys)

    state = begin().watch.state_dict()
    whole = begin()
    lines(capsys)
    expected = go_on(whole)
    rest = run("bf16-fallback")
    rest.iteration = 26
    rest.calm(1)
    rest.iteration = 26
    rest.watch.load_state_dict(state)
    assert rest.fp8 == [False, True]
    assert go_on(rest) == expected and rest.watch.state_dict().keys() == state.keys()
    assert rest.watch.counts == whole.watch.counts

    logging = run("log")
    logging.watch.load_state_dict(state)
    assert logging.fp8 == [True, True]
