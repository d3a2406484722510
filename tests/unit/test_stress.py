"""megatron-fp8 lab stress: what is planted, how it is judged, the store, and the page."""

import contextlib
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from launch import ROOT

from megatron_fp8 import cli
from megatron_fp8.errors import UserError
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.tools.stress import (
    accumulation,
    drawing,
    every,
    jumps,
    late_state,
    network,
    outliers,
    small_rates,
    sums,
)
from megatron_fp8.tools.stress.every import SUITE
from megatron_fp8.tools.stress.main import NAMES, _names, _seeds
from megatron_fp8.tools.stress.page import lines
from megatron_fp8.tools.stress.store import COLUMNS, Part, append, read, taken
from megatron_fp8.tools.stress.suite import JUDGED, Found, Point, Stress, gain_and_error, judged, verdicts, worst


def points(stress: str, seed: int, found) -> list[Point]:
    return [Point(stress, seed, one, "here", "now") for one in found]


def test_the_suite_is_what_the_verb_offers():
    assert tuple(stress.name for stress in SUITE) == NAMES
    assert all(stress.limits and "Judged" in stress.plant for stress in SUITE)


@pytest.mark.parametrize(
    "values, word",
    [
        ([0.5], "below"),
        ([2.0], "above"),
        ([0.1, 0.11, 0.12], "robust"),
        ([3.0, 3.1], "fragile"),
        ([1.1, 300.0, 20.0], "fragile"),  # a wide interval, but every seed
        ([1.1, 300.0], "open"),
        ([0.9, 1.1, 0.2], "open"),
        ([0.1, 0.2, math.inf], "open"),
        ([math.inf] * 3, "fragile"),
        ([math.nan], "above"),
    ],
)
def test_a_verdict_needs_an_interval_or_every_seed(values, word):
    assert judged("arm", "case", values, 1.0).word == word


def test_an_arm_is_as_good_as_its_worst_case():
    cases = {"a": ([0.1, 0.11], 1.0), "b": ([3.0, 3.1], 1.0), "c": ([1.0], math.nan)}
    found = [judged("arm", case, *numbers) for case, numbers in cases.items()]
    assert [verdict.word for verdict in found] == ["robust", "fragile", ""] and worst(found) == found[1]
    assert worst(found[:1]) == found[0] and worst(found[2:]) is None
    larger = judged("arm", "d", [4.0, 4.1], 1.0)
    assert worst([*found, larger]) == worst([larger, *found]) == larger


def test_the_store_gives_back_what_was_appended(tmp_path):
    path = tmp_path / "new" / "a.csv"
    assert read(path) == []
    value = random.random()
    first = points("S1", 3, [Found("O3, margin 2", "case, with a comma", 1e-6, JUDGED, float(f"{value:.6g}"))])
    second = points("S2", 4, [Found("BF16", "c", 64.0, "loss", math.inf)])
    append(path, first)
    append(path, second)
    assert read(path) == first + second
    path.write_text(path.read_text() + "S1,x,arm\n")
    with pytest.raises(UserError, match="line 4 is damaged"):
        read(path)
    path.write_text("a,b\n")
    with pytest.raises(UserError, match="not a stress store's"):
        read(path)
    assert len(COLUMNS) == 9


HOLDS = """
import sys
from pathlib import Path
from megatron_fp8.tools.stress.every import SUITE
from megatron_fp8.tools.stress.store import Part, taken

with taken(Path(sys.argv[1]), Part(SUITE[7], 2, "c")) as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""


def test_a_stress_with_cases_is_stored_case_by_case(tmp_path, monkeypatch, capsys):
    """A case that the store has is not measured again, nor one that another process measures; the rest is kept if one
    ends in an error."""
    made, store = [], tmp_path / "new" / "a.csv"

    def measure(seed, case):
        made.append((seed, case))
        yield Found("O3", case, math.nan, JUDGED, 0.1)
        assert case != "d"

    made_up = Stress("S8", "", "", dict.fromkeys("abcd", 1.0), "%", measure, lambda points: None, cases=tuple("abcd"))
    monkeypatch.setattr(every, "suite", lambda points, late=None: (made_up,))
    monkeypatch.setattr(network, "alone", contextlib.nullcontext)
    monkeypatch.setattr(network, "device_name", lambda: "here")
    append(store, points("S8", 1, [Found("O3", case, math.nan, JUDGED, 0.1) for case in "abcd"]))
    append(store, points("S8", 2, [Found("O3", "a", math.nan, JUDGED, 0.1)]))
    command = ["lab", "stress", "--only", "S8", "--seeds", "1,2", "--store", str(store)]
    holder = [sys.executable, "-W", "ignore", "-c", HOLDS, str(store)]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout.readline() == "True\n"
        assert cli.main(command) == 1 and made == [(2, "b"), (2, "d")]
        assert "S8 seed 2, d: ended in an error; the others go on" in capsys.readouterr().out
        other.kill()  # what it had is free again
    made.clear()
    assert cli.main(command) == 1 and made == [(2, "c"), (2, "d")]
    assert "S8 seed 2, c: 1 numbers in 0 s" in capsys.readouterr().out
    found = sorted((point.seed, point.found.case) for point in read(store))
    assert found == [(1, "a"), (1, "b"), (1, "c"), (1, "d"), (2, "a"), (2, "b"), (2, "c")]


@pytest.mark.parametrize("text, seeds", [("3", [3]), ("1,3", [1, 3]), ("2-4,3,9", [2, 3, 4, 9])])
def test_seeds(text, seeds):
    assert _seeds(text) == seeds


@pytest.mark.parametrize(
    "words, line",
    [
        (["--only", "S2,S9"], "--only S2,S9: no stress S9; use S1, S2, S3, S4, S5, S6, S7, S8"),
        (["--seeds", "4-1"], "--seeds 4-1: use a seed, several (1,3), or a range (1-4)"),
        (["--seeds", "x"], "--seeds x: use a seed"),
        (["--minutes", "-1"], "--minutes -1: use 0 or more"),
        (["--store", "/"], "--store /: is a folder; name a file"),
    ],
)
def test_a_mistake_is_one_line(words, line, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["lab", "stress", "--store", str(tmp_path / "a.csv"), *words])
    found = capsys.readouterr().err
    assert line in found and found.count("\n") == 1


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    said = r"--store .*file/a.csv: a.csv.lock, beside it, cannot be written: "
    with pytest.raises(UserError, match=said), taken(tmp_path / "file/a.csv", Part(SUITE[0], 1)):
        pass


def test_names():
    assert _names("s1, S7") == {"S1", "S7"} and _names(None) == set(NAMES)


def test_only_the_page(tmp_path, capsys):
    """From numbers in a store: verdicts over seeds, a picture and a table a stress."""
    store = tmp_path / "stress.csv"
    for seed, high in ((1, 40.0), (2, 41.0)):
        found = [Found(arm, "gain", 64, quantity, value) for arm, value in (("O3", 0.1 * seed), ("ring", high))
                 for quantity in ("sum", JUDGED)]  # fmt: skip
        append(store, points("S6", seed, found))
    assert cli.main(["lab", "stress", "--store", str(store), "--minutes", "0", "--out", str(tmp_path / "page")]) == 0
    assert "S6 Sums of gradients: robust: O3; fragile: ring" in capsys.readouterr().out
    page = (tmp_path / "page/stress.md").read_text()
    assert "| ring | gain | 2 | 40.5 | 34.1 .. 46.9 | 1 | fragile |" in page and "Measured on here; now." in page
    assert (tmp_path / "page/figures/s6.svg").stat().st_size > 1000
    assert "<svg" in (tmp_path / "page/stress.html").read_text()


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("scipy", "matplotlib"):
            raise ImportError(name)

sys.meta_path.insert(0, Missing())
from megatron_fp8 import cli
sys.exit(cli.main(["lab", "stress", *sys.argv[1:]]))
"""


@pytest.mark.slow  # eight seconds
def test_to_measure_needs_no_package_of_the_lab(tmp_path):
    """No verdict is given without scipy, but nothing is lost; a page is refused before anything is measured."""

    def stress(*words):
        command = [sys.executable, "-W", "ignore", "-c", WITHOUT, "--store", str(tmp_path / "a.csv"), *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    refused = stress("--only", "S6", "--out", str(tmp_path / "page"))
    missing = "needs the package scipy, which is not installed; pip install scipy"
    assert refused.returncode == 2 and f"--out {tmp_path / 'page'}: {missing}, or leave it out" in refused.stderr
    assert not (tmp_path / "a.csv").exists()
    done = stress("--only", "S6")
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "a.csv")
    assert {point.stress for point in found} == {"S6"}
    assert f"a.csv: {len(found)} numbers; their verdict {missing}; then --minutes 0\n" in done.stdout


def test_machines_do_not_mix(tmp_path, capsys):
    append(tmp_path / "a.csv", points("S6", 1, [Found("O3", "gain", 64, JUDGED, 0.1)]))
    with pytest.raises(SystemExit):
        cli.main(["lab", "stress", "--only", "S6", "--store", str(tmp_path / "a.csv")])
    assert "a.csv: has numbers of here; take another on this machine" in capsys.readouterr().err


def test_masters_that_lose_small_updates_are_found(monkeypatch):
    """S1: FP32 and remainders go the whole way, 16 bits and fewer do not; by their ulps, not by luck."""
    monkeypatch.setattr(small_rates, "STEPS", 30)
    found = list(small_rates.measure(random.randrange(1000)))
    lost = {(one.arm, one.at): one.value for one in found if one.quantity == JUDGED}
    for rate in small_rates.JUDGED_RATES:
        assert lost["O1", rate] == 0 and lost["O2", rate] < 0.01 and lost["O3", rate] < 1
        assert lost["FP8 master", rate] > 95
    assert lost["O2 as FP8-LM", 5e-7] > 80 > lost["O2 as FP8-LM", 1e-5] and lost["BF16 master", 2e-6] > 80
    words = {verdict.arm: verdict.word for verdict in verdicts(SUITE[0], points("S1", 1, found))}
    assert words["O3"] == "below" and words["BF16 master"] == "above"
    assert "above: O2 as FP8-LM, BF16 master, FP8 master" in lines(SUITE, points("S1", 1, found))[0]


def test_sums_that_stall_are_found():
    """S6: a sum to nearest in FP8 loses a third of 64 gradients; ours lose less than one in a hundred."""
    gains = {one.arm: one.value for one in sums.measure(random.randrange(1000)) if one.quantity == JUDGED}
    assert gains["FP8 to nearest"] > 10 and gains["FP8-LM's ring"] > 10 and gains["FP32"] < 1e-4
    assert all(gains[arm] < 1 for arm in ("BF16", "O1 to O3: wire", "O1 to O3: storage in FP8"))


def test_a_jump_is_clipped_by_a_delayed_scale_without_a_margin():
    """Four elements of every eighth batch are four times the largest before."""
    noise = torch.Generator().manual_seed(random.randrange(1000))
    inputs = [torch.randn(256, 128, generator=noise) for _ in range(2 * jumps.PERIOD)]
    weight = torch.randn(64, 128, generator=noise)
    worst_of = jumps.errors(inputs, weight, 4.0)
    own = worst_of["O3, tensorwise"]
    assert own < 4 and worst_of["O3"] > 2 * own and worst_of["O3, margin 3"] < 1.5 * own
    calm = jumps.errors([inputs[0]] * 9, weight, 1.0)
    assert max(calm.values()) < 1.1 * calm["O3, tensorwise"]  # the same batch again: nothing to clip


@pytest.mark.parametrize("k", [1536, 4096])
def test_emulated_sums_err_as_a_gpus(k):
    """S7's emulated register beside the H200 of the store: half as much error again at most, or two thirds."""
    store = read(ROOT / "benchmarks/results/lab/stress.csv")
    found = [point.found for point in store if point.stress == "S7"]
    fast = [one for one in found if "fast" in one.arm and one.quantity == "error" and one.at == k]
    for case in ("without a mean", "one with a mean", "with a mean"):
        x, y = torch.randn(2, 32, k)
        x = x if case == "without a mean" else x.abs()
        y = y.abs() if case == "with a mean" else y
        a, b = (accumulation._cast(t, E4M3) for t in (x, y))
        exact = accumulation._exact(a, b)
        error = 100 * float((accumulation._emulated(a, b) - exact).norm() / exact.norm())
        measured = [one.value for one in fast if one.case == case]
        assert len(measured) == 4 and 2 / 3 < error / (sum(measured) / 4) < 3 / 2
    one = accumulation._cast(torch.randn(16, 32), E4M3)  # a part of the sum: nothing is cut but the smallest products
    exact = accumulation._exact(one, one)
    assert float((accumulation._emulated(one, one) - exact).norm() / exact.norm()) < 2**-10


def test_a_late_state_is_read_from_a_folder(tmp_path, capsys):
    """Three layers of a made-up model, one channel of which is an outlier that a delayed scale clips by chance."""
    from safetensors.torch import save_file

    noise = torch.Generator().manual_seed(random.randrange(1000))
    tensors = {}
    for layer in range(12):
        shapes = {"mlp.gate_proj": (32, 16), "mlp.up_proj": (32, 16), "mlp.down_proj": (16, 32)}
        for part, shape in shapes.items():
            tensors[f"model.layers.{layer}.{part}.weight"] = torch.randn(shape, generator=noise)
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors")
    assert list(late_state.layers(tmp_path)) == [f"width 16, layer {layer} of 12" for layer in (2, 5, 10)]
    found = list(late_state.measure(tmp_path, random.randrange(1000)))
    jump = {(one.arm, one.case): one.value for one in found if one.case.endswith("jump of 4")}
    assert all(jump["O3", case] > 2 * jump["O3, margin 3", case] for _, case in jump)
    of = late_state.stress(tmp_path, points("S3-late", 1, found))
    assert set(of.limits.values()) == {5.0, 10.0} and len(of.limits) == 6
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SystemExit):
        cli.main(["lab", "stress", "--store", str(tmp_path / "a.csv"), "--late", str(tmp_path)])
    assert f"--late {tmp_path}: no model of Llama's form" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(UserError, match=r"model\.safetensors: damaged, or not a safetensors file: "):
        late_state.layers(tmp_path)


def test_the_rating_is_where_the_gap_is_one_per_cent():
    """A gap that grows as k^2: 0.01 % at 64, so 1 % at 640."""
    found = [Found("O3", "norm", k, "gap", 0.01 * (k / 64) ** 2) for k in (1.0, 64.0, 1024.0, 4096.0)]
    found += [Found("BF16", "norm", k, "gap", 0.0) for k in (1.0, 64.0, 1024.0)]
    rated = outliers.ratings(points("S2", 1, found))
    assert rated["O3", "norm"] == pytest.approx(640) and math.isnan(rated["BF16", "norm"])
    (shown,) = outliers.rating_table(points("S2", 1, found))
    assert shown.rows == [["O3", "-", "640"], ["BF16", "-", "-"]]


def test_gain_and_error():
    g = torch.randn(64, dtype=torch.float64)
    gain, error = gain_and_error([0.9 * g, g], [g, g])
    assert gain == pytest.approx(0.95) and error == pytest.approx(0.1 / math.sqrt(2))


@pytest.mark.parametrize("kind", ["bars", "curves"])
def test_a_seed_that_fell_is_seen_in_the_picture(kind, monkeypatch):
    """The mean of the seeds that were left used to lie below the limit."""
    from matplotlib.figure import Figure

    from megatron_fp8.tools.lab.report import plots

    found = []
    monkeypatch.setattr(plots, "picture", lambda *a, **k: found.append(a))
    values = {"O1": (0.1, 0.2), "O3": (0.1, math.inf)}
    points = [
        Point("S8", seed, Found(arm, "usual", at, JUDGED, value if at == 2 else 0.1), "", "")
        for arm, of in values.items()
        for seed, value in enumerate(of)
        for at in (1, 2, 4)
    ]
    if kind == "bars":
        drawing.bars("s8", [point for point in points if point.found.at == 2], JUDGED, "%", "", {"usual": 0.5})
    else:
        drawing.curves("s8", points, JUDGED, ["usual"], "k", "%", "")
    axes = Figure().subplots(1, 1, squeeze=False)
    found[0][4](axes)
    lines = axes[0][0].get_lines()
    if kind == "bars":
        assert [list(line.get_xdata()) for line in lines if line.get_marker() == "x"] == [[1]]
        bare = [line for line in lines if len(line.get_xdata()) == 2 and line.get_marker() == "None"]
        assert [line.get_ydata()[0] for line in bare] == [pytest.approx(0.15), 0.5]  # a mean and the limit
    else:
        assert [round(float(y), 2) for y in lines[0].get_ydata()] == [0.1, 0.15, 0.1]
        assert [math.isfinite(y) for y in lines[1].get_ydata()] == [True, False, True]
