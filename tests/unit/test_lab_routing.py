"""The report's section on routing: against sums by hand, and missing for runs without experts."""

import math
from contextlib import closing

import numpy as np
import pytest

from megatron_fp8.tools.lab.report import routing_section
from megatron_fp8.tools.lab.report.document import Table
from megatron_fp8.tools.lab.report.results import Results
from megatron_fp8.tools.lab.report.sections import sections
from megatron_fp8.tools.lab.sweep.plan_file import UNNAMED, SweepPlan
from megatron_fp8.tools.lab.sweep.rows import DONE
from megatron_fp8.tools.lab.sweep.store import Store

STEPS, EVERY, EXPERTS, LAYERS = 40, 4, 3, 2
TITLE = "Routing of tokens to experts"


def filled(path, loads: dict[tuple[str, int], np.ndarray], entropy: dict[tuple[str, int], float], start=0) -> None:
    """loads: {(arm, seed): (layers, experts)}; early steps have other values, which must not count. start: the step of
    the checkpoint that the runs began from."""
    arms = {arm: () for arm, _ in loads}
    seeds = tuple(sorted({seed for _, seed in loads}))
    with closing(Store(path, create=True)) as store:
        store.add(SweepPlan(("train.py", "--lr", "1e-3"), start + STEPS, seeds, arms, (1e-3,), {UNNAMED: ()}))
        while row := store.claim("version 1"):
            points = [(step, "loss", 3 - step / STEPS) for step in range(1, STEPS + 1)]
            for step in range(EVERY, STEPS + 1, EVERY):
                late = step > 0.75 * STEPS
                points += [(step, "router_entropy", entropy[row.arm, row.seed] if late else 9.0)]
                points += [(step, "load_entropy", 1.0)]
                for layer, experts in enumerate(loads[row.arm, row.seed]):
                    for e, load in enumerate(experts):
                        points.append((step, f"decoder.layers.{layer}.mlp.experts.{e}_load", load if late else e))
            store.write(row, [(start + step, name, value) for step, name, value in points])
            store.finish(row, DONE, 0)


@pytest.fixture(params=[0, 1000])
def results(tmp_path, request):
    rng = np.random.default_rng()
    runs = [(arm, seed) for arm in ("BF16", "O3") for seed in (1, 2)]
    loads = {run: rng.dirichlet(np.ones(EXPERTS), LAYERS) * EXPERTS for run in runs}
    entropy = {run: rng.uniform(0.5, 1.0) for run in runs}
    filled(tmp_path / "sweep.sqlite", loads, entropy, request.param)
    with closing(Store(tmp_path / "sweep.sqlite")) as store:
        yield Results(store), loads, entropy


def test_the_table_is_made_of_the_last_quarter(results):
    found, loads, entropy = results
    (table,) = [block for block in routing_section.routing(found).blocks if isinstance(block, Table)]
    base, other = table.rows
    assert base[0] == "BF16" and other[0] == "O3" and base[1] == other[1] == "2"
    gap = np.array([entropy["O3", seed] - entropy["BF16", seed] for seed in (1, 2)])
    assert float(base[2]) == pytest.approx((entropy["BF16", 1] + entropy["BF16", 2]) / 2, abs=1e-4)
    assert float(other[3]) == pytest.approx(gap.mean(), abs=1e-4)
    half = 12.7062 * gap.std(ddof=1) / math.sqrt(2)
    low, high = map(float, other[4].split(" .. "))
    assert (low, high) == pytest.approx((gap.mean() - half, gap.mean() + half), abs=1e-3)
    busiest, idlest, elsewhere = other[-3:]
    runs = [loads["O3", 1], loads["O3", 2]]
    assert float(busiest) == pytest.approx(np.mean([run.max(1) for run in runs]), abs=1e-3)
    assert float(idlest) == pytest.approx(np.mean([run.min(1) for run in runs]), abs=1e-3)
    shares = [np.abs(loads["O3", seed] - loads["BF16", seed]).sum(1) / EXPERTS / 2 for seed in (1, 2)]
    assert float(elsewhere.removesuffix(" %")) == pytest.approx(100 * np.mean(shares), abs=1e-2)
    assert base[-1] == "" and len(base) == len(other) == len(table.heads)


def test_all_tokens_on_another_expert_are_all_elsewhere(tmp_path):
    loads = {("BF16", 1): np.array([[3.0, 0, 0]]), ("O3", 1): np.array([[0, 0, 3.0]])}
    filled(tmp_path / "sweep.sqlite", loads, dict.fromkeys(loads, 1.0))
    with closing(Store(tmp_path / "sweep.sqlite")) as store:
        (base,), (other,) = (runs for _, runs in Results(store).cells())
    assert routing_section.elsewhere(base, other) == pytest.approx(1)
    assert routing_section.elsewhere(base, base) == 0


def test_arms_with_other_numbers_of_experts_are_not_compared_by_expert(tmp_path):
    loads = {("8", 1): np.ones((2, 8)), ("4", 1): np.ones((2, 4))}
    filled(tmp_path / "sweep.sqlite", loads, dict.fromkeys(loads, 1.0))
    with closing(Store(tmp_path / "sweep.sqlite")) as store:
        (table,) = [b for b in routing_section.routing(Results(store)).blocks if isinstance(b, Table)]
    assert table.rows[1][-1] == "-"


def test_the_section_is_there_with_experts_alone(results, tmp_path):
    assert TITLE in [section.title for section in sections(results[0])]
    with closing(Store(tmp_path / "dense.sqlite", create=True)) as store:
        store.add(SweepPlan(("train.py", "--lr", "1e-3"), STEPS, (1,), {"BF16": ()}, (1e-3,), {UNNAMED: ()}))
        row = store.claim("version 1")
        store.write(row, [(step, "loss", 3 - step / STEPS) for step in range(1, STEPS + 1)])
        store.finish(row, DONE, 0)
        assert TITLE not in [section.title for section in sections(Results(store))]
