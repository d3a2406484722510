"""A step's statistics: counts against direct computation, SNR against its closed form, nothing on other steps."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_parts import Known, parts_of
from test_statistics import direct_counts

from megatron_fp8.comm.shared import SharedScale
from megatron_fp8.engine.bucket import Bucket
from megatron_fp8.engine.events import Events
from megatron_fp8.engine.owned_weight import GRAD, INPUT, OwnedWeight
from megatron_fp8.engine.reductions import Local, Shared
from megatron_fp8.flags.emulate import linear_name
from megatron_fp8.metrics import VARIABLE, Reader
from megatron_fp8.monitor import collect, update_norm
from megatron_fp8.monitor import writers as write
from megatron_fp8.monitor.collect import Monitor
from megatron_fp8.monitor.writers import CASTS, Tally, decibels, layer_name, summary, together
from megatron_fp8.numerics.auto_scaling import ScalingRule
from megatron_fp8.numerics.blocks import BLOCK, block_scales
from megatron_fp8.numerics.formats import E4M3, E5M2, decode
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.numerics.scaling import compute_scale
from megatron_fp8.ops import count_cast, reference

NONE = [[0.0] * 3] * len(CASTS), [[-math.inf] * 3] * len(CASTS), [0.0] * 4


class TestTally:
    def test_the_snr_is_that_of_its_definition(self):
        assert decibels(100.0, 1.0) == pytest.approx(20.0)
        assert decibels(2.0, 1.0) == pytest.approx(3.0103, abs=1e-4)
        assert decibels(1.0, 0.0) == math.inf
        for signal, noise in [(math.nan, 1.0), (1.0, math.nan), (1.0, math.inf), (math.inf, math.inf)]:
            assert decibels(signal, noise) == -math.inf

    def test_what_was_not_cast_is_not_named(self):
        assert Tally(*NONE).statistics() == {}
        casts = [[200.0, 1.0, 3.0], *NONE[0][1:]]
        extremes = [[5.0, 0.5, -0.25], *NONE[1][1:]]
        assert Tally(casts, extremes, [1000.0, 10.0, 4.0, 0.04], 0.5).statistics() == {
            "activation_overflows%": 0.5,
            "activation_underflows%": 1.5,
            "activation_cur_amax": 5.0,
            "activation_scale_inv_min": 0.25,
            "activation_scale_inv_max": 0.5,
            "wgrad_reduced_saturations%": 1.0,
            "wgrad_reduced_snr_db": pytest.approx(20.0),
            "wgrad_mu": 0.5,
        }

    def test_together(self):
        first = Tally([[10.0, 1.0, 0.0]] * 4, [[2.0, 0.5, -0.1]] * 4, [0.0, 0.0, 8.0, 1.0], mu=1.0)
        other = Tally([[90.0, 0.0, 5.0]] * 4, [[1.0, 0.7, -0.3]] * 4, [0.0, 0.0, 2.0, 0.0], mu=0.5)
        found = together([first, other]).statistics()
        assert found["wgrad_overflows%"] == 1.0 and found["wgrad_underflows%"] == 5.0
        assert found["gradient_cur_amax"] == 2.0
        assert (found["weight_scale_inv_min"], found["weight_scale_inv_max"]) == (0.1, 0.7)
        assert found["wgrad_reduced_snr_db"] == pytest.approx(10.0) and "wgrad_mu" not in found

    def test_names(self):
        name = linear_name("decoder.layers.mlp.linear_fc1", 13)
        assert name == "decoder.layers.12.mlp.linear_fc1" and layer_name(name) == "decoder.layers.12"

    def test_the_summary_names_the_worst(self):
        text = summary(
            {
                "a_gradient_overflows%": 0.0,
                "a_weight_underflows%": 1.0,
                "b_weight_underflows%": 2.0,
                "a_wgrad_reduced_snr_db": 30.0,
                "b_wgrad_reduced_snr_db": -math.inf,
            }
        )
        assert text == "most overflows 0 %; most underflows 2 % b_weight; lowest SNR -inf dB b"


class Setup:
    """One bucket of two weights, (48, 32) and (16, 16), in a group of one, watched at iterations 2, 4, ..."""

    def __init__(self, group, monkeypatch, storage="fp8", wire="block", snr=True):
        config = SimpleNamespace(
            gemm="fp8", forward_format=E4M3, grad_format=E5M2, margin=0, log_interval=2, log_grad_snr=snr,
            grad_reduce=wire, grad_accum=storage, partition="even", weight="bf16", exp_avg="fp32", exp_avg_sq="fp32",
            master="fp32", emulate=None, seed=1,
        )  # fmt: skip
        params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((48, 32), (16, 16))]
        self.weights = [OwnedWeight(param, config) for param in params]
        for i, weight in enumerate(self.weights):
            weight.path, weight.layer_number = f"decoder.layers.linear_{i}", 1
        reduction = Local()
        if wire == "shared":
            sizes = [w.param.numel() for w in self.weights]
            reduction = Shared(SharedScale(ScalingRule("post"), sizes, group, group, False, "cpu"), self.weights)
        self.events = Events()
        parts = parts_of(group, config, reduction=reduction, events=self.events)
        self.bucket, self.shared = Bucket(self.weights, parts), reduction.shared
        linears = self.bucket.weights
        sets = [SimpleNamespace(of=parts.of, buckets=[self.bucket], linears=linears, frozen=[], reduction=reduction)]
        self.monitor = Monitor(config, sets, self.events)
        self.events.subscribe(self.monitor)
        self.written, self.counted = [], 0
        monkeypatch.setattr(collect, "write", lambda tallies, iteration: self.written.append(tallies))
        monkeypatch.setattr(collect, "current_iteration", lambda: self.iteration)
        monkeypatch.setattr(collect, "count_cast", self.count)

    def count(self, *args):
        self.counted += 1
        return count_cast(*args)

    def step(self, iteration, gradients):
        """Train `iteration` with `gradients[i]` of each weight in micro-batch i. Returns the reduced gradient."""
        self.iteration = iteration
        self.bucket.begin_step(iteration)
        self.monitor.begin_step()
        for micro_batch in gradients:
            for weight, gradient in zip(self.weights, micro_batch, strict=True):
                weight.take_gradient(Known(gradient))
        self.bucket.launch()
        self.bucket.land()
        reduced = self.bucket.reduced.look().clone()
        self.monitor.end_step()
        return reduced

    def tally(self, i=0):
        (tallies,) = self.written
        return tallies[f"decoder.layers.0.linear_{i}"]


def random_gradients(micro_batches=5):
    return [[torch.randn(shape).mul(4).exp() for shape in ((48, 32), (16, 16))] for _ in range(micro_batches)]


class TestMonitor:
    @pytest.mark.parametrize("storage", ["fp32", "bf16", "fp8"])
    @pytest.mark.parametrize("wire", ["block", "shared"])
    def test_a_watched_step_has_the_gradients_of_one_that_is_not(self, group, monkeypatch, storage, wire):
        setup, gradients = Setup(group, monkeypatch, storage, wire), random_gradients()
        reduced = setup.step(2, gradients)
        unwatched = Setup(group, monkeypatch, storage, wire)
        unwatched.monitor.interval = 3
        assert torch.equal(reduced, unwatched.step(2, gradients))
        assert setup.counted > 0 == unwatched.counted and len(setup.written) == 1 and unwatched.written == []

    def test_off_the_steps_that_log_nothing_runs(self, group, monkeypatch):
        setup = Setup(group, monkeypatch)
        for iteration in (1, 2, 3):
            before = setup.counted
            setup.step(iteration, random_gradients(2))
            assert setup.counted - before == (2 + 2 * 2 if iteration == 2 else 0)
            assert setup.monitor.counts is None
            assert not setup.events.cast + setup.events.gradient + setup.events.reducing
        assert len(setup.written) == 1

    def test_a_step_that_never_ended_leaves_no_watch(self, group, monkeypatch):
        setup = Setup(group, monkeypatch)
        setup.iteration = 2
        setup.monitor.begin_step()
        assert len(setup.events.cast) == len(setup.events.gradient) == len(setup.events.reducing) == 1
        setup.step(3, random_gradients(1))
        assert not setup.events.cast + setup.events.gradient + setup.events.reducing and setup.written == []

    def test_blocks_of_zeros_do_not_set_the_smallest_scale(self, group, monkeypatch):
        setup, gradients = Setup(group, monkeypatch), random_gradients(1)
        gradients[0][0].view(-1)[:BLOCK], gradients[0][1][:] = 0, 0
        setup.step(2, gradients)
        scales = block_scales(reference.quantize_blocks(gradients[0][0].bfloat16().flatten()).exponents)[1:]
        assert setup.tally(0).extremes[CASTS.index("wgrad")][1:] == [scales.max(), -scales.min()]
        found = setup.tally(1).statistics()
        assert found["wgrad_cur_amax"] == 0 and "wgrad_scale_inv_min" not in found

    def test_fp8_storage_is_counted_at_every_addition(self, group, monkeypatch):
        setup, gradients = Setup(group, monkeypatch), random_gradients()
        setup.step(2, gradients)
        twin = Setup(group, monkeypatch)  # the same noise: repeats the additions, with a look after each
        twin.bucket.begin_step(2)
        sink, underflows, extremes = twin.weights[0].sink, 0, []
        stored = torch.zeros(48 * 32)
        for gradient, _ in gradients:
            wanted = stored.double() + gradient.bfloat16().flatten().double()
            sink.take(Known(gradient))
            blocks = sink.store.read(sink.start, 48 * 32)
            stored = blocks.dequantize()
            underflows += int(((wanted != 0) & (stored == 0)).sum())
            extremes.append((float(wanted.abs().max().float()), block_scales(blocks.exponents)))
        tally = setup.tally()
        assert underflows > 0 and tally.casts[CASTS.index("wgrad")] == [5 * 48 * 32, 0, underflows]
        amax, largest, smallest = tally.extremes[CASTS.index("wgrad")]
        assert amax == pytest.approx(max(a for a, _ in extremes))
        assert largest == max(s.max() for _, s in extremes) and -smallest == min(s.min() for _, s in extremes)
        signal = sum(g for g, _ in gradients)
        noise = stored.view(48, 32) - signal
        expected = 10 * math.log10(signal.double().square().sum() / noise.double().square().sum())
        assert tally.statistics()["wgrad_reduced_snr_db"] == pytest.approx(expected, abs=1e-3)
        assert expected > 10  # a single large element may be rounded by little

    def test_a_known_error_has_the_known_snr(self, group, monkeypatch):
        """Every element is off by 2^-8 of itself: 20 log10(2^8) dB."""
        setup = Setup(group, monkeypatch, storage="bf16")
        setup.step(2, [[torch.full(shape, 1 + 2.0**-8) for shape in ((48, 32), (16, 16))]])  # a tie, to even: 1
        expected = 20 * math.log10(2**8 + 1)
        assert setup.tally().statistics()["wgrad_reduced_snr_db"] == pytest.approx(expected, abs=1e-4)

    def test_fp32_storage_and_nothing_sent_is_without_noise(self, group, monkeypatch):
        setup = Setup(group, monkeypatch, storage="fp32")
        setup.step(2, random_gradients())
        found = setup.tally().statistics()
        assert found["wgrad_reduced_snr_db"] == math.inf and "wgrad_overflows%" not in found

    def test_without_the_flag_there_is_no_snr(self, group, monkeypatch):
        setup = Setup(group, monkeypatch, snr=False)
        setup.step(2, random_gradients())
        assert not any("snr" in name for name in setup.tally().statistics())

    def test_weights_are_counted_once(self, group, monkeypatch):
        setup = Setup(group, monkeypatch)
        weight = setup.weights[0].param.detach()
        scale = float(compute_scale(weight.abs().max().float(), E4M3))
        setup.step(2, random_gradients())
        tally = setup.tally()
        assert tally.casts[CASTS.index("weight")] == [weight.numel(), *direct_counts(weight, E4M3, scale)]
        amax, largest, smallest = tally.extremes[CASTS.index("weight")]
        assert amax == weight.abs().max() and largest == -smallest == pytest.approx(1 / scale)

    def test_the_shared_scale_is_counted_before_and_after_the_sum(self, group, monkeypatch):
        setup, gradients = Setup(group, monkeypatch, "fp32", "shared"), random_gradients(1)
        setup.shared.mu = setup.shared.mu * torch.tensor([4.0, 1.0])  # a mu that clips the first weight
        setup.step(2, gradients)
        for i in range(2):
            values = gradients[0][i]
            scale = float(compute_scale(values.max(), E4M3) * setup.shared.mu[i])
            tally, elements = setup.tally(i), values.numel()
            assert tally.casts[CASTS.index("wgrad")] == [elements, *direct_counts(values, E4M3, scale)]
            payload = decode(reference.quantize(values, E4M3, torch.tensor(scale)))
            assert tally.reduced[:2] == [elements, int((payload.abs() == 448).sum())]
            assert tally.mu == setup.shared.mu[i]
        assert setup.tally(0).casts[CASTS.index("wgrad")][1] > 0 == setup.tally(1).casts[CASTS.index("wgrad")][1]

    def test_nan_and_infinity_neither_saturate_nor_vanish(self, group, monkeypatch):
        setup, gradients = Setup(group, monkeypatch), random_gradients(2)
        for gradient, bad in zip(gradients[1], (math.nan, math.inf), strict=True):
            gradient.fill_(1.0)[3, 5] = bad
        gradients[0] = [torch.ones_like(g) for g in gradients[0]]
        setup.step(2, gradients)
        for i in range(2):
            found = setup.tally(i).statistics()
            assert found["wgrad_overflows%"] == 0.0 and found["wgrad_reduced_snr_db"] == -math.inf
            assert found["wgrad_cur_amax"] == math.inf  # ranks could lose a NaN: see all_reduce_largest

    def test_activations_and_gradients_are_counted_while_training_only(self, group, monkeypatch):
        setup = Setup(group, monkeypatch)
        setup.iteration = 2
        setup.monitor.begin_step()
        weight = setup.weights[0]
        x, dy = torch.randn(33, 32).bfloat16(), torch.randn(33, 48).mul(9).exp().bfloat16()
        for role, tensor in ((INPUT, x), (GRAD, dy)):
            weight.cast(tensor, role, columns=True, training=False)
            weight.cast(tensor, role, columns=False, training=True)
            weight.cast(tensor, role, columns=True, rows=False, training=True)  # rows are made to be counted
        weight.take_gradient(Known(torch.ones(48, 32)))
        setup.bucket.launch()
        setup.bucket.land()
        setup.monitor.end_step()
        for role, tensor, fmt in ((INPUT, x, E4M3), (GRAD, dy, E5M2)):
            scale = float(compute_scale(tensor.abs().max().float(), fmt))
            overflows, underflows = direct_counts(tensor, fmt, scale)
            assert setup.tally().casts[role] == [2 * tensor.numel(), 2 * overflows, 2 * underflows]
        assert setup.tally().casts[GRAD][2] > 0

    def test_a_delayed_scale_that_is_too_large_overflows(self, group, monkeypatch):
        setup = Setup(group, monkeypatch)
        setup.iteration = 2
        setup.monitor.begin_step()
        x = torch.randn(64, 32).bfloat16()
        scale = torch.tensor(448.0)  # for an amax of 1
        payload = reference.quantize(x, E4M3, scale)
        setup.monitor.counts.cast(setup.weights[0], INPUT, x, ScaledTensor(payload, scale.reciprocal()))
        setup.monitor.end_step()
        beyond = int((x.abs() > 1).sum())
        assert beyond > 100 and setup.tally().casts[INPUT][:2] == [x.numel(), beyond]


@pytest.fixture
def writers(monkeypatch):
    """Stand-ins for TensorBoard and W&B: {(tag, step): value}, and what W&B was given."""
    scalars, logs = {}, []
    writer = SimpleNamespace(add_scalar=lambda name, value, step: scalars.update({(name, step): value}))
    wandb = SimpleNamespace(log=lambda values, step: logs.append((values, step)))
    monkeypatch.setattr(write, "get_tensorboard_writer", lambda: writer)
    monkeypatch.setattr(write, "get_wandb_writer", lambda: wandb)
    return scalars, logs


def test_every_rank_prints_and_writes_what_is_its_own(group, monkeypatch, capsys, writers):
    scalars, logs = writers
    tally = Tally([[100.0, 0.0, 2.0], *NONE[0][1:]], NONE[1], NONE[2])
    write.write({"decoder.layers.3.mlp.linear_fc1": tally, "decoder.layers.3.mlp.linear_fc2": tally}, 100)
    for place in ("decoder.layers.3.mlp.linear_fc1", "decoder.layers.3"):
        assert scalars[f"fp8-activation_underflows%/{place}", 100] == 2.0
    assert scalars["fp8/activation_underflows%", 100] == scalars["fp8/activation_underflows%_most", 100] == 2.0
    assert logs == [({name: value for (name, _), value in scalars.items()}, 100)]
    line = "[fp8] iteration 100: most overflows 0 %; most underflows 2 % decoder.layers.3.mlp.linear_fc1_activation\n"
    assert capsys.readouterr().out == line
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(write, "get_tensorboard_writer", lambda: None)
    monkeypatch.setattr(write, "get_wandb_writer", lambda: None)
    write.write({"decoder.layers.3.mlp.linear_fc1": tally}, 200)
    assert capsys.readouterr().out == "" and len(logs) == 1


LINEARS = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"
STATISTICS = [f"{tensor}_{s}" for tensor in CASTS for s in ("cur_amax", "overflows%", "underflows%", "scale_inv_min",
              "scale_inv_max")] + ["wgrad_reduced_saturations%", "wgrad_reduced_snr_db"]  # fmt: skip


def test_the_tags_of_two_layers_are_grouped_and_the_models_come_first(group, writers, tmp_path, monkeypatch):
    """A viewer used to show one list of 189; programs still read the old names."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run.jsonl"))
    places = [f"decoder.layers.{i}.{linear}" for i in range(2) for linear in LINEARS]
    tallies = {place: Tally([[100.0 * i, i, 1.0]] * 4, [[float(i), 0.5, -0.1]] * 4, [10.0, 1.0, 8.0, i])
               for i, place in enumerate(places, 1)}  # fmt: skip
    write.write(tallies, 100)
    write.write_scalars({"update-norm": 1.0, "fp8_spikes": 0}, 100)
    scalars, logs = writers
    tags = [tag for tag, _ in scalars]
    groups = {}
    for tag in tags:
        groups.setdefault(tag.partition("/")[0], set()).add(tag.partition("/")[2])
    worst = {f"{s}_most" for s in STATISTICS if s.endswith(("overflows%", "underflows%", "saturations%"))}
    model = {*STATISTICS, *worst, "wgrad_reduced_snr_db_least", "update-norm", "spikes"}
    assert groups.pop("fp8") == model
    assert groups == {f"fp8-{s}": {*places, "decoder.layers.0", "decoder.layers.1"} for s in STATISTICS}
    # viewers sort groups by the name before the first slash, and numbers in it by value
    assert min(tags, key=lambda tag: tag.partition("/")[0]).startswith("fp8/")
    assert [tag for values, _ in logs for tag in values] == tags
    assert scalars["fp8/weight_underflows%", 100] == pytest.approx(100 * 8 / 3600)  # over all elements together
    assert scalars["fp8/weight_underflows%_most", 100] == 1 and scalars["fp8/weight_cur_amax", 100] == 8
    assert scalars["fp8/wgrad_reduced_snr_db_least", 100] == 0
    file = {name: value for _, values in Reader(tmp_path / "run.jsonl").read() for name, value in values.items()}
    layers = {*places, "decoder.layers.0", "decoder.layers.1"}
    names = {f"{place}_{s}" for place in layers for s in STATISTICS} | {f"model_{s}" for s in model}
    assert file.keys() == names - {"model_update-norm", "model_spikes"} | {"update_norm", "fp8_spikes"}


def test_the_update_norm_is_said_once(monkeypatch, capsys):
    scalars = []
    monkeypatch.setattr(update_norm, "write_scalars", lambda *given: scalars.append(given))
    squares = torch.tensor([0.01, 400.0], dtype=torch.float64)
    for last in (True, False):
        monkeypatch.setattr(update_norm, "is_last_rank", lambda last=last: last)
        update_norm.log(squares, 7)
    assert scalars == [({"update-norm": pytest.approx(0.1), "update-ratio": pytest.approx(0.005)}, 7)]
    assert capsys.readouterr().out == "[fp8] iteration 7: update norm 0.1; update ratio 0.005\n"
