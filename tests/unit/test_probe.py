"""The probe of GEMMs: its numbers against FP64 oracles, through the real linear, and what it does not touch."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import MODEL, O1, error_of
from engine_parts import OneWeight

from megatron_fp8.flags.log import logs_update_norm
from megatron_fp8.flags.probe import ProbePlan, probe_from_args
from megatron_fp8.layers.linear import product
from megatron_fp8.layers.parcel import Parcel, plan
from megatron_fp8.monitor import probe
from megatron_fp8.monitor.probe import GEMMS, OPERANDS, Probe, compare, count_emulated, kurtosis, power_sums
from megatron_fp8.numerics.emulation import EmulatedFormat, emulate
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.numerics.scaling import compute_scale
from megatron_fp8.ops import reference
from megatron_fp8.run import Run


@pytest.fixture(autouse=True)
def small_portions(monkeypatch):
    monkeypatch.setattr(probe, "_AT_ONCE", 1000)  # so that every test adds several portions


def cast(x, fmt, shrink=1.0):
    scale = compute_scale(reference.amax(x), fmt) / shrink
    return ScaledTensor(reference.quantize(x, fmt, scale), scale.reciprocal())


def as_numpy(operand):
    if isinstance(operand, ScaledTensor):
        return operand.payload.float().double().numpy() * float(operand.scale_inv)
    return operand.double().numpy()


def oracle(read, exact):
    """error^2, signal^2 and dot product in FP64."""
    q, ref = (as_numpy(a) @ as_numpy(b) for a, b in (read, exact))
    return [np.sum((q - ref) ** 2), np.sum(ref**2), np.sum(q * ref)]


class TestCompare:
    @pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, None), (None, None)])
    @pytest.mark.parametrize("shape", [(1, 16, 1), (97, 48, 33), (320, 16, 7)])
    def test_against_fp64(self, formats, shape):
        m, k, n = shape
        exact = torch.randn(m, k).mul(2).exp().bfloat16(), torch.randn(k, n).mul(1e-6).bfloat16()
        read = tuple(cast(x, fmt) if fmt else x for x, fmt in zip(exact, formats, strict=True))
        assert compare(read, exact).numpy() == pytest.approx(oracle(read, exact), rel=1e-4)
        if formats == (None, None):
            assert compare(read, exact)[0] == 0

    def test_transposed_operands(self):
        dy, x = torch.randn(64, 48).bfloat16(), torch.randn(64, 33).bfloat16()
        read = ScaledTensor(cast(dy, E5M2).payload.t(), cast(dy, E5M2).scale_inv), cast(x, E4M3)
        assert compare(read, (dy.t(), x)).numpy() == pytest.approx(oracle(read, (dy.t(), x)), rel=1e-4)

    def test_tiny_numbers_do_not_underflow(self):
        """Gradients of 1e-22: squares of their products are far below FP32."""
        dy, x = torch.randn(64, 48).mul(1e-22).bfloat16(), torch.randn(48, 32).bfloat16()
        read = cast(dy, E5M2), cast(x, E4M3)
        error, signal, dot = compare(read, (dy, x)).tolist()
        assert 0.03 < math.sqrt(error / signal) < 0.09 and dot / signal == pytest.approx(1, abs=0.02)

    def test_zeros_and_infinity(self):
        x, w = torch.zeros(8, 16).bfloat16(), torch.randn(16, 8).bfloat16()
        found = probe.gemm_statistics(compare((cast(x, E4M3), cast(w, E4M3)), (x, w)).tolist())
        assert found == {"error": None, "gain": None}
        x[3, 4] = math.inf
        found = probe.gemm_statistics(compare((cast(x, E4M3), cast(w, E4M3)), (x, w)).tolist())
        assert found == {"error": None, "gain": None}

    def test_a_factor_is_gain_and_noise_is_not(self):
        x, w = torch.randn(64, 48).bfloat16(), torch.randn(48, 32).bfloat16()
        found = probe.gemm_statistics(compare((0.5 * x, w), (x, w)).tolist())
        assert found == {"error": pytest.approx(0.5), "gain": pytest.approx(0.5)}


class TestMoments:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_against_fp64(self, dtype):
        normal = torch.randn(37, 53)
        for x in (normal, torch.randn(5, 999).mul(3).exp(), 7 + normal, 1e-30 * normal):
            values = x.to(dtype)
            t = values.double().flatten().numpy()
            centred = t - t.mean()
            expected = np.mean(centred**4) / np.mean(centred**2) ** 2
            assert kurtosis(values.numel(), power_sums(values).tolist()) == pytest.approx(expected, rel=1e-6)

    def test_one_outlier_has_its_number_of_elements(self):
        x = torch.zeros(4096)
        x[77] = -3e38
        assert kurtosis(4096, power_sums(x).tolist()) == pytest.approx(4096 - 2 + 1 / 4095)

    def test_a_normal_distribution_has_three(self):
        assert kurtosis(10**6, power_sums(torch.randn(10**6)).tolist()) == pytest.approx(3, abs=0.05)

    def test_nothing_to_divide_by(self):
        for x in (torch.zeros(100), torch.full((100,), 0.1)):
            assert math.isnan(kurtosis(100, power_sums(x).tolist()))

    def test_what_is_not_finite_is_counted(self):
        x = torch.randn(50, 50)
        x[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
        sums = power_sums(x).tolist()
        assert sums[4] == 3 and math.isnan(kurtosis(2500, sums))


class TestCountEmulated:
    @pytest.mark.parametrize("name", ["E4M3", "E5M2", "E5M2:truncate", "E8M3", "E4M3:nearest:tensor", "E2M1:row"])
    def test_against_direct_counting(self, name):
        how = EmulatedFormat.parse(name)
        x = torch.randn(33, 65).mul(12).exp().bfloat16() * torch.randn(33, 65).sign().bfloat16()
        x[0, :4] = torch.tensor([0.0, math.inf, math.nan, how.format.max])
        read = emulate(x, how)
        counts = torch.zeros(3, dtype=torch.int64)
        count_emulated(x, read, how, counts)
        finite = x.isfinite()
        beyond = (finite & (x.double().abs() > how.format.max)).sum() if not how.scaled else 0
        assert counts.tolist() == [x.numel(), int(beyond), int(((x != 0) & (read == 0)).sum())]
        if name in ("E4M3", "E5M2", "E5M2:truncate"):
            assert counts[1] > 0 < counts[2]

    def test_unrounded_operands_neither_saturate_nor_underflow(self):
        counts = torch.zeros(3, dtype=torch.int64)
        x = torch.tensor([0.0, 1e-38, 3e38]).bfloat16()
        count_emulated(x, x, None, counts)
        assert counts.tolist() == [3, 0, 0]


class Linear(OneWeight):
    """The real linear, with a bucket of its weight (48, 32), and a probe's results for one micro-batch or more."""

    def __init__(self, group, emulate=None, storage="bf16", wgrad=True):
        self.group, self.values = group, torch.randn(48, 32).bfloat16()
        super().__init__(self.values, group, emulate, storage, wgrad)

    def pass_through(self, x, dy, needs_dx=True):
        """y, dx and the stored dW."""
        x = x.clone().requires_grad_(needs_dx)
        anchor = torch.zeros(0, requires_grad=True)
        call = plan(self.weight, None, False, False, training=True)
        y = product(x, anchor, Parcel(call))
        y.backward(dy)
        return y.detach(), x.grad, self.bucket.grads.dense().clone()

    def one_set(self):
        return SimpleNamespace(of=self.bucket.of, buckets=[self.bucket], linears=self.bucket.weights)

    def probe(self, *micro_batches, **options):
        looking = Probe([self.one_set()])
        self.events.subscribe(looking)
        results = [self.pass_through(*batch, **options) for batch in micro_batches]
        self.events.unsubscribe(looking)
        (found,) = looking.end().items()
        assert found[0] == "decoder.layers.2.mlp.linear_fc1"
        json.dumps(found[1], allow_nan=False)
        return found[1], results


def batch(rows=256):
    return torch.randn(rows, 32).bfloat16(), torch.randn(rows, 48).mul(1e-4).bfloat16()


class TestThroughTheLinear:
    @pytest.mark.parametrize(("emulate", "expected"), [("E8M3:truncate", 0.9195), ("E8M3", 0.9981), ("E8M7", 1.0)])
    def test_the_gain_of_a_rounding_is_the_derived_one(self, group, emulate, expected):
        found, _ = Linear(group, emulate).probe(batch(1024))
        for gemm in GEMMS:
            assert found[gemm]["gain"] == pytest.approx(expected, abs=0.01)  # six deviations, with 1,536 weights
        assert all(found[operand]["format"].startswith(emulate.split(":")[0]) for operand in OPERANDS)
        assert found["fprop"]["error"] == 0 if emulate == "E8M7" else found["fprop"]["error"] > 0.02

    def test_rounding_one_operand_reaches_the_gemms_that_read_it(self, group):
        found, _ = Linear(group, "gradient=E8M2:truncate").probe(batch())
        assert found["fprop"] == {"error": 0.0, "gain": 1.0}
        assert found["dgrad"]["gain"] < 0.95 > found["wgrad"]["gain"]
        assert [found[operand]["format"] for operand in OPERANDS] == ["BF16", "E8M2:truncate:none", "BF16"]

    @pytest.mark.parametrize("wgrad", [True, False])
    def test_fp8_against_fp64(self, group, wgrad):
        linear, batches = Linear(group, wgrad=wgrad), [batch(), batch(64)]
        found, _ = linear.probe(*batches)
        sums = np.zeros((3, 3))
        w = cast(linear.values, E4M3)
        for x, dy in batches:
            q, g = cast(x, E4M3), cast(dy, E5M2)
            w_t = ScaledTensor(w.payload.t(), w.scale_inv)
            g_t = ScaledTensor(g.payload.t(), g.scale_inv)
            sums[0] += oracle((q, w_t), (x, linear.values.t()))
            sums[1] += oracle((g, w), (dy, linear.values))
            sums[2] += oracle((g_t, q) if wgrad else (dy.t(), x), (dy.t(), x))
        for gemm, (noise, signal, dot) in zip(GEMMS, sums, strict=True):
            assert found[gemm]["error"] == pytest.approx(math.sqrt(noise / signal), rel=1e-4)
            assert found[gemm]["gain"] == pytest.approx(dot / signal, rel=1e-6)
        assert (found["wgrad"]["error"] == 0) == (not wgrad)
        for name, tensors, fmt in (
            ("activation", [x for x, _ in batches], E4M3),
            ("gradient", [dy for _, dy in batches], E5M2),
            ("weight", [linear.values], E4M3),
        ):
            whole, operand = torch.cat(tensors).double().numpy(), found[name]
            lost = sum(int(((t != 0) & (cast(t, fmt).payload.float() == 0)).sum()) for t in tensors)
            assert operand["underflow"] == lost / whole.size and operand["saturation"] == operand["not_finite"] == 0
            centred = whole - whole.mean()
            assert operand["kurtosis"] == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-6)
            assert operand["amax"] == np.abs(whole).max() and operand["format"] == fmt.name.upper()
            scales = [1 / float(cast(t, fmt).scale_inv) for t in tensors]
            assert [operand["scale_min"], operand["scale_max"]] == pytest.approx([min(scales), max(scales)])

    def test_saturated_and_lost_shares(self, group):
        x, dy = batch()
        x[:16] *= 2**20  # the scale fits these; the rest falls below it
        dy[5, 7] = math.inf
        found, _ = Linear(group).probe((x, dy))
        assert 0.9 < found["activation"]["underflow"] < 0.95 and found["activation"]["kurtosis"] > 30
        assert found["gradient"]["not_finite"] == 1 and found["gradient"]["amax"] is None
        assert found["fprop"]["error"] < 0.1 and found["dgrad"] == found["wgrad"] == {"error": None, "gain": None}

    @pytest.mark.parametrize("emulate", [None, "E4M3:stochastic:tensor"])
    @pytest.mark.parametrize("storage", ["bf16", "fp8"])
    def test_nothing_is_changed(self, group, emulate, storage):
        linear = Linear(group, emulate, storage if emulate is None else "bf16")
        batches = [batch(), batch()]
        _, probed = linear.probe(*batches)
        linear.bucket.begin_step(0)
        plain = [linear.pass_through(*each) for each in batches]
        for one, other in zip(probed, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    def test_a_stored_weight_is_compared_with_its_master(self, group):
        linear = Linear(group, storage="fp8")
        x, dy = batch()
        found, _ = linear.probe((x, dy))
        master = linear.bucket.masters()[: 48 * 32].view(48, 32).bfloat16()
        stored = linear.weight.stored
        assert not torch.equal(master, stored.dequantize(torch.bfloat16))
        read = cast(x, E4M3), ScaledTensor(stored.payload.t(), stored.scale_inv)
        noise, signal, _ = oracle(read, (x, master.t()))
        assert found["fprop"]["error"] == pytest.approx(math.sqrt(noise / signal), rel=1e-4)

    def test_a_gemm_that_is_not_computed_is_not_there(self, group):
        found, _ = Linear(group).probe(batch(), needs_dx=False)
        assert found["dgrad"] == {"error": None, "gain": None} and found["wgrad"]["error"] > 0.02

    def test_a_probe_without_a_pass_is_empty(self, group):
        found, _ = Linear(group).probe()
        assert found["fprop"] == {"error": None, "gain": None} and found["weight"] == {"format": ""}

    def test_linears_that_are_not_rounded_are_left_alone(self, group):
        linear = Linear(group)
        linear.weight.fp8 = False
        looking = Probe([linear.one_set()])
        linear.events.subscribe(looking)
        linear.pass_through(*batch())
        assert looking.end() == {}


class TestSteps:
    def test_only_the_plans_steps_are_probed(self, group, monkeypatch, tmp_path, capsys):
        linear, made = Linear(group), []
        chosen = ProbePlan(frozenset({2, 5}), str(tmp_path / "out"))
        engine = SimpleNamespace(sets=[linear.one_set()], events=linear.events)

        def step():
            made.append(bool(linear.events.forward))
            return linear.pass_through(*batch())

        for iteration in (1, 2, 3):
            monkeypatch.setattr(probe, "current_iteration", lambda iteration=iteration: iteration)
            assert len(probe.probe_step(chosen, engine, step)) == 3
        assert made == [False, True, False]
        (file,) = (tmp_path / "out").iterdir()
        written = json.loads(file.read_text())
        assert file.name == "step-2.json" and written["step"] == 2
        assert list(written["linears"]) == ["decoder.layers.2.mlp.linear_fc1"]
        line = capsys.readouterr().out
        assert line.startswith("[fp8] iteration 2: largest fprop error 3.") and "worst gain 0.99" in line

    def test_the_summary_names_the_worst(self):
        def linear(*errors):
            return {gemm: {"error": e, "gain": 1 - (e or 0)} for gemm, e in zip(GEMMS, errors, strict=True)}

        text = probe.summary({"a": linear(0.01, 0.3, None), "b": linear(0.02, 0.1, None)})
        assert text == "largest fprop error 2 % b; largest dgrad error 30 % a; worst gain 0.7 dgrad a"
        assert probe.summary({"a": linear(None, None, None)}) == "no GEMM was finite"
        assert probe.summary({}) == "no linear is FP8 or emulated"


class TestFlags:
    def test_plan(self, parse):
        args = parse(*O1, "--fp8-probe-step", "1,20", "--fp8-probe-dir", "out")
        assert probe_from_args(args, True) == ProbePlan(frozenset({1, 20}), "out")
        assert probe_from_args(parse(*O1), True) is None

    @pytest.mark.parametrize("steps", ["0", "1,", "x", "-3", "1.5"])
    def test_wrong_steps(self, parse, steps):
        words = f"--fp8-probe-step={steps}", "--fp8-probe-dir", "out"
        assert f"--fp8-probe-step {steps}: use steps from 1" in error_of(parse, *O1, *words)

    def test_one_without_the_other(self, parse):
        assert "add --fp8-probe-dir" in error_of(probe_from_args, parse(*O1, "--fp8-probe-step", "1"), True)
        nowhere = "--fp8-probe-step", "1", "--fp8-probe-dir", ""
        assert error_of(parse, *O1, *nowhere) == "--fp8-probe-dir '': an empty name; give one"
        assert "add --fp8-probe-step" in error_of(probe_from_args, parse(*O1, "--fp8-probe-dir", "x"), True)
        both = parse(*O1, "--fp8-probe-step", "1", "--fp8-probe-dir", "x")
        assert "no GEMM of this run is FP8" in error_of(probe_from_args, both, False)

    def test_a_folder_that_takes_no_file_ends_a_run_before_its_first_step(self, parse, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        line = f"--fp8-probe-dir {tmp_path}/file/x: Not a directory; name another folder"
        plan = ProbePlan(frozenset({1}), f"{tmp_path}/file/x")
        run = Run(parse(*MODEL), None, plan)
        assert error_of(run.flags_read) == line
        run.end()
        monkeypatch.setenv("RANK", "1")  # it writes nothing, and may lack the folder
        probe.make(plan.folder)

    @pytest.mark.parametrize("level", [[], ["--fp8-level", "O2"]], ids=["no level", "O2"])
    def test_update_norm(self, parse, level):
        assert not logs_update_norm(parse(*MODEL, *level))
        assert logs_update_norm(parse(*MODEL, *level, "--fp8-log-update-norm"))

    @pytest.mark.parametrize(
        "flags",
        ["--use-precision-aware-optimizer", "--optimizer-cpu-offload", "--optimizer lion", "--use-megatron-fsdp"],
    )
    def test_an_update_that_is_not_seen(self, parse, flags):
        args = parse(*MODEL, *flags.split(), "--fp8-log-update-norm")
        assert f"--fp8-log-update-norm with {flags}: " in error_of(logs_update_norm, args)
