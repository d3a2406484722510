"""Sharpness: the closed form against L-BFGS-B and against its definition in 150 digits; the probe on small GPTs."""

import contextlib
import math
import sys

import mpmath
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig

from megatron_fp8.layers.attention import TorchAttention
from megatron_fp8.monitor import logit_sharpness as sharpness
from megatron_fp8.monitor.logit_sharpness import EPSILON, QUANTILES, Sharpness, Statistics, closed_form, lbfgsb
from megatron_fp8.monitor.sharpness_probe import LAST, SharpnessProbe, gather_rows

pytestmark = pytest.mark.usefixtures("fresh_random_data")
TO_THE_END = 20_000  # iterations
SHIFTS = {0.0: 0.162, -10.0: 0.090, -40.0: 0.719, 10.0: 0.371}  # {shift: phi in %} of the shift experiment
VOCABULARY, SEQUENCE, BATCH = 96, 16, 3


def of_row(z: torch.Tensor, target: int, epsilon: float = EPSILON) -> dict[str, float]:
    found = closed_form(z[None], torch.tensor([target]), epsilon)
    return {name: values.item() for name, values in found._asdict().items()}


def by_definition(z: torch.Tensor, target: int, epsilon: float = EPSILON) -> float:
    """phi at the corner of the box, as the difference of two losses, in 150 digits."""
    with mpmath.workdps(150):
        logits = [mpmath.mpf(value) for value in z.double().tolist()]

        def loss(values):
            return mpmath.log(mpmath.fsum(mpmath.exp(v) for v in values)) - values[target]

        bound = [mpmath.mpf(epsilon) * (abs(v) + 1) for v in logits]
        corner = [v - b if i == target else v + b for i, (v, b) in enumerate(zip(logits, bound, strict=True))]
        return float(100 * (loss(corner) - loss(logits)) / (1 + loss(logits)))


def edges() -> dict[str, tuple[torch.Tensor, int]]:
    normal = torch.randn(40, dtype=torch.float64)
    right, wrong, signed = (normal.clone() for _ in range(3))
    right[7] = normal.max() + 11
    wrong[7] = normal.max() + 30
    signed[:20] = -0.0
    return {
        "the right one dominates": (right, 7),
        "a wrong one dominates": (wrong, 3),
        "all zero": (torch.zeros(33, dtype=torch.float64), 32),
        "all equal": (torch.full((33,), -5.0, dtype=torch.float64), 0),
        "two": (torch.tensor([0.3, -1.2], dtype=torch.float64), 1),
        "far up": (normal + 3000, 39),
        "far down": (normal - 3000, 0),
        "zeros of both signs": (signed, 2),
        "bf16": ((normal * 3).bfloat16(), 5),
        "fp16": ((normal * 3).half(), 6),
        "tiny": (torch.full((10,), 1e-42), 6),
    }


class TestClosedForm:
    @pytest.mark.parametrize("vocabulary", [2, 7, 50, 333, 2000])
    @pytest.mark.parametrize("scale", [0.1, 0.5, 1.0, 2.0, 4.0])
    def test_is_what_lbfgsb_converges_to(self, vocabulary, scale):
        z = torch.randn(vocabulary, dtype=torch.float64) * scale
        target = int(torch.randint(vocabulary, ()))
        search = lbfgsb(z, target, iterations=TO_THE_END)
        assert search.converged
        assert of_row(z, target)["sharpness"] == pytest.approx(search.sharpness, rel=1e-6)

    @pytest.mark.parametrize("epsilon", [1e-3, 0.03])
    def test_with_another_epsilon(self, epsilon):
        z = torch.randn(200, dtype=torch.float64)
        search = lbfgsb(z, 20, epsilon, iterations=TO_THE_END)
        assert of_row(z, 20, epsilon)["sharpness"] == pytest.approx(search.sharpness, rel=1e-6)

    def test_at_the_size_of_a_real_vocabulary(self):
        z = torch.randn(32_000, dtype=torch.float64) / 2
        search = lbfgsb(z, 31_999, iterations=TO_THE_END)
        assert search.converged and search.iterations > 100
        assert of_row(z, 31_999)["sharpness"] == pytest.approx(search.sharpness, rel=1e-6)

    @pytest.mark.parametrize("name", edges())
    def test_an_edge_by_search_and_by_definition(self, name):
        z, target = edges()[name]
        exact = by_definition(z, target)
        assert lbfgsb(z, target, iterations=TO_THE_END).sharpness == pytest.approx(exact, rel=1e-6)
        assert of_row(z.double(), target)["sharpness"] == pytest.approx(exact, rel=1e-10)
        # far up, FP32 rounds the logits themselves: the definition takes them as rounded
        z = z.float()
        assert of_row(z, target)["sharpness"] == pytest.approx(by_definition(z, target), rel=2e-6)

    @pytest.mark.parametrize("gap", [25.0, 60.0, 200.0])
    def test_what_a_difference_of_losses_cannot_see(self, gap):
        z = torch.randn(30, dtype=torch.float64)
        z[4] = z.max() + gap
        exact = by_definition(z, 4)
        assert 0 < exact < 1e-8
        assert of_row(z, 4)["sharpness"] == pytest.approx(exact, rel=1e-9)
        if gap < 80:  # FP32 ends at 2^-149
            assert of_row(z.float(), 4)["sharpness"] == pytest.approx(by_definition(z.float(), 4), rel=1e-5)

    def test_nothing_in_the_box_is_higher(self):
        z, t = torch.randn(60, dtype=torch.float64) * 2, 11
        bound = EPSILON * (z.abs() + 1)
        d = (torch.rand(5000, 60, dtype=torch.float64) * 2 - 1).sign() * bound
        d[:2500] *= torch.rand(2500, 60, dtype=torch.float64)
        loss = torch.logsumexp(z, 0) - z[t]
        rise = 100 * (torch.logsumexp(z + d, 1) - (z + d)[:, t] - loss) / (1 + loss)
        assert rise.max() < of_row(z, t)["sharpness"]

    @pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
    @pytest.mark.parametrize("shift", [0.0, -40.0, 1000.0])
    def test_fp32_is_near_fp64(self, scale, shift):
        z = (torch.randn(50, 5003) * scale + shift).float()
        targets = torch.randint(5003, (50,))
        for name, ours, exact in zip(
            Sharpness._fields, closed_form(z, targets), closed_form(z.double(), targets), strict=True
        ):
            assert ours.dtype == torch.float32 and exact.dtype == torch.float64
            assert torch.allclose(ours.double(), exact, rtol=1e-5, atol=1e-6 * (name in ("loss", "log_z"))), name

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_portions_and_what_stands_beside(self, dtype, monkeypatch):
        z, targets = (torch.randn(37, 129) * 3 - 5).to(dtype), torch.randint(129, (37,))
        before = z.clone()
        whole = closed_form(z, targets)
        monkeypatch.setattr(sharpness, "AT_ONCE", 1000)
        for a, b in zip(whole, closed_form(z, targets), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(z, before)
        exact = z.double()
        assert torch.allclose(whole.log_z.double(), exact.logsumexp(1), rtol=1e-6)
        assert torch.allclose(whole.loss.double(), torch.nn.functional.cross_entropy(exact, targets, reduction="none"))
        centred = closed_form(exact - exact.mean(1, keepdim=True), targets)
        assert torch.allclose(whole.centred.double(), centred.sharpness, rtol=1e-5)
        assert torch.allclose(centred.centred, centred.sharpness, rtol=1e-12)

    def test_one_bad_row_stays_alone(self):
        z = torch.randn(6, 50)
        z[1, 3], z[2, 4], z[3, 5], z[4, 6] = math.nan, math.inf, -math.inf, 1e6
        good = closed_form(z[[0, 5]], torch.tensor([1, 2]))
        found = closed_form(z, torch.tensor([1, 9, 9, 9, 9, 2]))
        assert torch.equal(found.sharpness[[0, 5]], good.sharpness)
        assert not found.sharpness[1:5].isfinite().any()


class TestShift:
    """The shift experiment: loss 3.65, and 0.162, 0.090, 0.719, 0.371 % with 0, -10, -40, 10 added to the logits.

    Its logits are not recorded.  Normal logits with GPT-2's vocabulary, a loss of exactly 3.65, and the standard
    deviation that gives the first number, also give the other three.
    """

    def logits(self, normal: torch.Tensor, scale: float) -> torch.Tensor:
        z = normal * scale
        z[0] = -math.inf
        z[0] = z.logsumexp(0) - math.log(math.expm1(3.65))  # token 0 has probability e^-3.65
        return z

    def test_the_four_numbers(self):
        normal = torch.randn(50_257, dtype=torch.float64)
        low, high = 1.0, 3.0
        for _ in range(40):  # bisection
            middle = (low + high) / 2
            rises = of_row(self.logits(normal, middle), 0)["sharpness"] < 0.1617
            low, high = (middle, high) if rises else (low, middle)
        z = self.logits(normal, low)
        rows = torch.stack([z + shift for shift in SHIFTS])
        found = closed_form(rows, torch.zeros(4, dtype=torch.int64))
        assert found.loss.tolist() == pytest.approx([3.65] * 4, rel=1e-12)
        assert [round(phi, 3) for phi in found.sharpness.tolist()] == list(SHIFTS.values())
        assert found.centred.tolist() == pytest.approx([found.centred[0].item()] * 4, rel=1e-9)
        moved = found.log_z - found.log_z[0]
        assert moved.tolist() == pytest.approx(list(SHIFTS), abs=1e-9)
        fp32 = closed_form(rows.float(), torch.zeros(4, dtype=torch.int64))
        assert [round(phi, 3) for phi in fp32.sharpness.tolist()] == list(SHIFTS.values())


class TestSearch:
    @pytest.mark.parametrize("scale, least, most", [(1.0, 0.08, 0.3), (3.0, 0.02, 0.15), (5.0, 0.0, 0.06)])
    def test_ten_iterations_stop_short(self, scale, least, most):
        z = torch.randn(32_000, dtype=torch.float64) * scale
        search = lbfgsb(z, 5)
        assert search.iterations == 10 and not search.converged
        short = 1 - search.sharpness / of_row(z, 5)["sharpness"]
        assert least < short < most

    def test_a_logit_that_is_not_finite_gives_nan(self):
        for value in (math.nan, math.inf, -math.inf):
            search = lbfgsb(torch.tensor([1.0, value, 2.0]), 0)
            assert math.isnan(search.sharpness) and not search.converged

    def test_without_scipy(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "scipy.optimize", None)
        with pytest.raises(ValueError, match=r"needs the package scipy, which is not installed; pip install scipy$"):
            lbfgsb(torch.zeros(3), 0)


class TestStatistics:
    def test_against_sorting(self):
        values = torch.randn(2, 4001).mul(5).exp() * torch.tensor([[1.0], [-1e-20]])
        values[1, :1500] = values[0, :1500]
        values[1, 1500:1600] = 0
        found = Statistics(("a", "b"))
        for part in values.split(1000, 1):
            found.add(part)
        for row, (name, columns) in zip(values, found.summary().items(), strict=True):
            assert name in "ab" and columns["count"] == 4001 and columns["not_finite"] == 0
            assert columns["mean"] == pytest.approx(row.double().mean().item(), rel=1e-9)
            rising = row.sort().values
            for quantile, share in QUANTILES.items():
                exact = rising[max(1, math.ceil(share * 4001)) - 1].item()
                assert columns[quantile] == pytest.approx(exact, rel=2**-8)  # BF16 has 8 significant bits
                assert columns[quantile] == torch.tensor(exact).bfloat16().item()

    def test_parts_add_up(self):
        values = torch.randn(3, 500)
        valid = torch.rand(500) < 0.7
        values[0, ~valid] = math.nan
        parts, only = (Statistics(("a", "b", "c")) for _ in range(2))
        parts.add(values[:, :200], valid[:200])
        parts.add(values[:, 200:].double(), valid[200:])
        only.add(values[:, valid])
        assert torch.equal(parts.counts, only.counts)
        assert torch.allclose(parts.total, only.total, rtol=1e-12)
        assert only.summary()["a"]["count"] == valid.sum()

    def test_what_is_not_finite_is_counted_apart(self):
        found = Statistics(("a", "b"))
        found.add(torch.tensor([[1.0, math.nan, math.inf, -math.inf, 3.0], [math.nan] * 5]))
        summary = found.summary()
        assert (summary["a"]["count"], summary["a"]["not_finite"], summary["a"]["mean"]) == (2, 3, 2.0)
        assert (summary["a"]["min"], summary["a"]["median"], summary["a"]["max"]) == (1, 1, 3)
        assert (summary["b"]["count"], summary["b"]["not_finite"]) == (0, 5)
        assert all(math.isnan(summary["b"][column]) for column in ("mean", *QUANTILES))

    def test_every_bf16_value_has_its_counter(self):
        codes = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
        finite = codes[codes.isfinite()]
        found = Statistics(("a",))
        found.add(finite[None])
        assert found.counts.max() == 1 and found.counts[0, -1] == 0
        assert (found.summary()["a"]["min"], found.summary()["a"]["max"]) == (finite.min().item(), finite.max().item())


# --- the probe


def small_gpt(**settings) -> GPTModel:
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, normalization="RMSNorm",
        attention_dropout=0.0, hidden_dropout=0.1, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False, init_method_std=0.5, **settings,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    return GPTModel(config, spec, VOCABULARY, SEQUENCE, share_embeddings_and_output_weights=False)


def batches(count: int) -> list[dict[str, torch.Tensor | None]]:
    draw = torch.Generator().manual_seed(7)
    return [
        {
            "tokens": torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=draw),
            "labels": torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=draw),
            "loss_mask": (torch.rand(BATCH, SEQUENCE, generator=draw) < 0.8).float(),
            "position_ids": torch.arange(SEQUENCE).expand(BATCH, SEQUENCE),
            "attention_mask": None,
        }
        for _ in range(count)
    ]


def forward(model, batch, **targets) -> torch.Tensor:
    return model(batch["tokens"], batch["position_ids"], batch["attention_mask"], **targets)


def forward_loss(model, batch) -> torch.Tensor:
    return forward(model, batch, labels=batch["labels"], loss_mask=batch["loss_mask"])


def measure(model, given, iterations: int = 0) -> SharpnessProbe:
    """Evaluate the model on micro-batches under a probe."""
    model.eval()
    with SharpnessProbe([model], iterations) as probe, torch.no_grad():
        for batch in given:
            forward_loss(model, batch)
    return probe


@pytest.fixture(scope="module")
def group():
    """A process group of this process alone, and Megatron's groups in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield dist.group.WORLD
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def expected(model, given) -> Statistics:
    """Statistics of the logits that the model returns without labels."""
    found = Statistics(Sharpness._fields)
    model.eval()
    with torch.no_grad():
        for batch in given:
            values = closed_form(forward(model, batch).flatten(0, 1), batch["labels"].flatten())
            found.add(torch.stack(values)[:, batch["loss_mask"].flatten() > 0])
    return found


class TestProbe:
    @pytest.mark.parametrize("mup", [False, True])
    def test_of_a_model(self, group, mup):
        model = small_gpt(**({"use_mup": True, "mup_base_hidden_size": 8} if mup else {}))
        given = batches(3)
        probe = measure(model, given)
        assert probe.last is None
        truth = expected(model, given)
        assert torch.equal(probe.tokens.counts, truth.counts)
        assert torch.allclose(probe.tokens.total, truth.total, rtol=1e-6)
        summary = probe.tokens.summary()
        assert summary["sharpness"]["count"] == sum(int(batch["loss_mask"].sum()) for batch in given)
        losses = [forward_loss(model, batch)[batch["loss_mask"] > 0] for batch in given]
        assert summary["loss"]["mean"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)

    def test_last_tokens_by_both_methods(self, group):
        model, given = small_gpt(), batches(2)
        given[0]["loss_mask"][:, -1] = torch.tensor([1.0, 0.0, 1.0])
        given[1]["loss_mask"] = None
        probe = measure(model, given, iterations=TO_THE_END)
        summary = probe.last.summary()
        assert tuple(summary) == LAST and summary["lbfgsb"]["count"] == 5
        assert probe.last.total[0].item() == pytest.approx(probe.last.total[1].item(), rel=1e-5)
        model.eval()
        truth = 0.0
        for batch, rows in zip(given, ([0, 2], [0, 1, 2]), strict=True):
            z = forward(model, batch)[rows, -1].detach().double()
            truth += closed_form(z, batch["labels"][rows, -1]).sharpness.sum().item()
        assert probe.last.total[0].item() == pytest.approx(truth, rel=1e-5)

    def test_training_does_not_notice(self, group):
        model = small_gpt()
        (batch,) = batches(1)
        model_class_loss = GPTModel.compute_language_model_loss
        results, probe = [], SharpnessProbe([model])
        for context in (contextlib.nullcontext(), probe):
            with context:
                torch.manual_seed(3)
                model.zero_grad()
                loss = forward_loss(model, batch)
                loss.mean().backward()
                results.append([loss.detach(), *(param.grad.clone() for param in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert probe.tokens.summary()["loss"]["count"] == batch["loss_mask"].sum()
        assert model.compute_language_model_loss.__func__ is model_class_loss and not model._forward_pre_hooks
        forward_loss(model, batch)
        assert probe.tokens.summary()["loss"]["count"] == batch["loss_mask"].sum()

    def test_a_loss_of_the_models_own_is_put_back(self, group):
        """--logits-save-dir gives the model one."""
        model = small_gpt()
        (batch,) = batches(1)
        own = model.compute_language_model_loss = lambda labels, logits: 3 * logits.float().sum()
        with SharpnessProbe([model]) as probe:
            forward_loss(model, batch)
        assert probe.tokens.summary()["loss"]["count"] == batch["loss_mask"].sum()
        assert model.compute_language_model_loss is own

    def test_only_the_next_token(self, group):
        model = small_gpt()
        (batch,) = batches(1)
        with SharpnessProbe([model]) as probe:
            shifted = batch["labels"].roll(-1, 1)  # as in a layer for multi-token prediction
            model.compute_language_model_loss(shifted, torch.randn(SEQUENCE, BATCH, VOCABULARY))
            forward(model, batch)  # no labels
            assert probe.tokens.summary()["loss"]["count"] == 0
            for _ in range(2):
                forward_loss(model, batch)
        assert probe.tokens.summary()["loss"]["count"] == 2 * batch["loss_mask"].sum()

    def test_of_several_chunks_the_one_with_the_output_layer(self, group):
        first, last = small_gpt(), small_gpt()
        first.post_process = False
        with SharpnessProbe([first, last]) as probe:
            assert "compute_language_model_loss" not in vars(first) and not first._forward_pre_hooks
            forward_loss(last, batches(1)[0])
        assert probe.tokens.summary()["loss"]["count"] > 0
        with SharpnessProbe([first, torch.nn.Linear(2, 2)], 10) as probe:
            pass
        probe.reduce()
        assert probe.tokens is None and probe.last is None


# --- tensor parallelism: two processes, each with half of the vocabulary


def work(rank: int, ranks: int) -> dict:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    tp = parallel_state.get_tensor_model_parallel_group()
    found = {}
    for name, z, targets in cases(ranks):
        width = z.shape[1] // ranks
        shard = z[:, rank * width : (rank + 1) * width]
        found[name] = closed_form(shard, targets, group=tp)
        assert torch.equal(gather_rows(shard, tp), z)

    torch.manual_seed(5)
    model, given = small_gpt(tensor_model_parallel_size=ranks), batches(2)
    probe = measure(model, given, iterations=TO_THE_END)
    model.eval()
    with torch.no_grad():
        logits = [forward(model, batch) for batch in given]  # (b, s, V / ranks)
    found["model"] = (logits, probe.tokens.counts.clone(), probe.tokens.total.clone(), probe.last.total.clone())

    model.pg_collection.dp_cp_gtp_remat = dist.group.WORLD  # as if the two were data-parallel
    probe.reduce()
    found["reduced"] = (probe.tokens.counts, probe.tokens.total)
    return found


def cases(ranks: int):
    draw = torch.Generator().manual_seed(11)
    for name, dtype, shift in (("fp64", torch.float64, 0), ("fp32", torch.float32, 100), ("bf16", torch.bfloat16, -20)):
        z = torch.randn(41, ranks * 67, generator=draw, dtype=torch.float64) * 3 + shift
        yield name, z.to(dtype), torch.randint(ranks * 67, (41,), generator=draw)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_ranks(work, 2, tmp_path_factory.mktemp("sharpness"))


class TestShardedVocabulary:
    def test_is_that_of_the_whole(self, two_ranks):
        for name, z, targets in cases(2):
            whole = closed_form(z, targets)
            for found in two_ranks:
                for ours, theirs in zip(whole, found[name], strict=True):
                    assert ours.dtype == theirs.dtype
                    assert torch.allclose(ours, theirs, rtol=1e-12 if name == "fp64" else 3e-6)

    def test_of_a_model(self, two_ranks):
        (first, *statistics), (second, *others) = (found["model"] for found in two_ranks)
        assert all(torch.equal(a, b) for a, b in zip(statistics, others, strict=True))
        counts, total, last = statistics
        truth, of_last = Statistics(Sharpness._fields), 0.0
        for batch, left, right in zip(batches(2), first, second, strict=True):
            z = torch.cat([left, right], 2)
            values = closed_form(z.flatten(0, 1), batch["labels"].flatten())
            truth.add(torch.stack(values), batch["loss_mask"].flatten() > 0)
            of_last += (values.sharpness.view(BATCH, SEQUENCE) * batch["loss_mask"])[:, -1].sum().item()
        assert z.shape[2] == VOCABULARY
        assert torch.allclose(total, truth.total, rtol=1e-5)
        assert torch.equal(counts.sum(1), truth.counts.sum(1)) and counts[:, -1].sum() == 0
        assert last.tolist() == pytest.approx([of_last] * 2, rel=1e-5)

    def test_statistics_of_all_ranks(self, two_ranks):
        for found in two_ranks:
            (_, counts, total, _), (all_counts, all_total) = found["model"], found["reduced"]
            assert torch.equal(all_counts, 2 * counts)
            assert torch.allclose(all_total, 2 * total, rtol=1e-12)
