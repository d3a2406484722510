"""benchmarks/eight.py: its plan, its time, and its table of measured figures beside the estimate's; and a small run."""

import csv
import json
import sys

import pytest
import yaml
from launch import ROOT
from megatron_runs import start_forked

sys.path.insert(0, str(ROOT / "benchmarks"))
import eight
import train_step

from megatron_fp8.tools.perf import hardware, job_flags
from megatron_fp8.tools.perf.output import MIB

H100 = hardware.load("h100-80gb-sxm")
PROFILE = {"collectives": {"ReduceScatter": {"kernels": 3, "ms": 9.0, "exposed_ms": 4.25},
                           "AllGather": {"kernels": 3, "ms": 5.0, "exposed_ms": 1.5}}}  # fmt: skip


@pytest.mark.parametrize("gpus", eight.GPUS)
def test_as_many_layers_as_fit_every_system(gpus):
    """At the plan's largest micro-batch all systems leave 2 GB; with a layer more one of them does not."""
    largest = max(arm.micro_batch for arm in eight.PLAN if arm.layout == "175b")
    arms = [arm for arm in eight.PLAN if arm.layout == "175b" and arm.micro_batch == largest]
    assert {arm.system for arm in arms} >= {"O3-graph", "te-delayed-graph", "bf16"}
    layers = eight.LAYERS["175b"][gpus]

    def least_room(layers: int) -> float:
        found = [eight.predicted(eight.settings(arm, gpus, layers), H100) for arm in arms]
        return min(e.room() for e in found if e)

    assert least_room(layers) >= 2 > least_room(layers + 1)


@pytest.mark.parametrize("gpus", eight.GPUS)
def test_the_plan(gpus):
    """The arms that all claims need come first; each arm's flags are its shape's, its layout's and its system's."""
    first = [tuple(arm) for arm in eight.PLAN[:3]]
    assert first == [("175b", "O3-graph", 1), ("175b", "te-delayed-graph", 1), ("175b", "bf16", 1)]
    for arm in eight.PLAN:
        assert arm.system in train_step.SYSTEMS and eight.arm_of(str(arm)) == arm
        flags = eight.flags_of(eight.settings(arm, gpus))
        of = dict(word.split("=") for word in flags if "=" in word)
        split = {"175b": "--tensor-model-parallel-size", "qwen3-moe": "--expert-model-parallel-size"}
        if arm.layout in split:
            assert int(of[split[arm.layout]]) == gpus
        else:
            assert int(of["--tensor-model-parallel-size"]) == gpus // 2 and "--overlap-grad-reduce" in flags
        if (layers := eight.LAYERS.get(eight.LAYOUTS[arm.layout][0])) is not None:
            assert int(of["--num-layers"]) == layers[gpus]
        assert of["--micro-batch-size"] == str(arm.micro_batch) and of["--global-batch-size"] == "16"
        assert " ".join(flags).endswith(train_step.SYSTEMS[arm.system].flags)


@pytest.mark.parametrize(
    "words",
    ["--arms 175b:O3", "--arms 175b:O9:1", "--arms 7b:O3:1", "--arms 175b:O3:3", "--arms 175b:O3:0", "--nproc 3",
     "--iterations 11", "--hardware h200", "--gbs 3 --arms 175b:O3:2", "--nproc 1", "--nproc 1 --arms 175b-dp2:O3:1"],
)  # fmt: skip
def test_a_wrong_command_line_measures_nothing(words):
    with pytest.raises(SystemExit):
        eight.arguments(words.split())


def figures(ms: float, gb: float = 50.0) -> dict:
    return {"system": "", "te": "none", "mbs": 1, "ms": ms, "ms_min": ms, "ms_max": ms, "tflops": 500.0, "gb": gb,
            "gb_peak": gb + 2, "loss": 1.0, "seconds": 40.0, "profile": PROFILE}  # fmt: skip


@pytest.mark.parametrize("minutes, begun", [(9, 3), (3.1, 3), (2, 2), (1.9, 1), (0.5, 1)])
def test_no_arm_begins_that_would_end_too_late(minutes, begun, monkeypatch, capsys):
    """Each arm takes a minute here; the names of those that did not begin are printed, for another call."""
    clock, started = [100.0], []

    def measure(options, keep):
        started.append((options.systems, options.mbs, options.shape, options.extra))
        clock[0] += 60
        assert options.timeout <= 60 * minutes
        keep(figures(1.0) | {"system": options.systems[0]})
        return []

    monkeypatch.setattr(train_step, "measure", measure)
    monkeypatch.setattr(eight.time, "monotonic", lambda: clock[0])
    args = eight.arguments(f"--nproc 4 --minutes {minutes}".split())
    args.arms, kept = eight.PLAN[:3], []
    eight.measure(args, H100, 100.0, kept.append)
    assert len(started) == len(kept) == begun
    assert [row["system"] for row in kept] == [arm.system for arm in eight.PLAN[:begun]]
    flags = "--num-layers=7 --tensor-model-parallel-size=4 --sequence-parallel".split()
    assert started[0] == (["O3-graph"], {"O3-graph": 1}, "175b", flags)
    said = capsys.readouterr().out
    for arm in eight.PLAN[:3]:
        assert (f" {arm}" in said) == (arm in eight.PLAN[begun:3])


def test_an_arm_that_cannot_fit_is_not_tried(monkeypatch, capsys):
    """Transformer Engine's whole GPT-13B over two tensor-parallel ranks needs 103 GB of an H100's 82."""
    started = []
    monkeypatch.setattr(train_step, "measure", lambda options, keep: started.append(options.systems))
    args = eight.arguments("--nproc 4 --arms 13b-whole:O3-graph:2 13b-whole:te-delayed-graph:2".split())
    eight.measure(args, H100, eight.time.monotonic(), lambda row: None)
    assert started == [["O3-graph"]] and "13b-whole:te-delayed-graph:2: not tried" in capsys.readouterr().out
    eight.measure(args, hardware.load("h200"), eight.time.monotonic(), lambda row: None)
    assert started[1:] == [["O3-graph"], ["te-delayed-graph"]]


@pytest.mark.parametrize(("arm", "gpus", "gathers"), [
    ("qwen3-30b-a3b:O3-experts-graph:1", 2, True), ("qwen3-30b-a3b:O3-experts-grouped:1", 2, False),
    ("deepseek-v2-lite:O3-experts-graph:1", 1, False),
])  # fmt: skip
def test_a_graph_with_experts_on_several_gpus_gathers_tokens(arm, gpus, gathers):
    row = eight.settings(eight.arm_of(arm), gpus, batch=8)
    found = eight.predicted(row, hardware.load("h200"))
    assert found is not None and found.workload.picks == gathers
    assert found.workload.graphed == arm.split(":")[1].endswith("graph") and found.room() > 4


def test_what_a_graph_needs_beside_its_peak():
    """Of the whole Qwen3 as a graph on two H200s, from the lines with which it ended out of memory (383538b2): GiB that
    torch held with the graph's memory, and that were outside torch. It wanted 1.16 more, for a copy of a table's
    gradient, which is made no longer (engine/clip.py)."""
    gib = 2**30 / 1e9
    on = hardware.load("h200")
    found = eight.predicted(eight.settings(eight.arm_of("qwen3-30b-a3b:O3-experts-graph:1"), 2, batch=8), on)
    assert found.peak == pytest.approx(129.39 * gib, rel=0.01)
    (outside,) = found.of_graph.values()
    assert on.beside_allocator_gb + outside == pytest.approx(6.45 * gib, rel=0.01)
    left = on.memory_gb - (129.39 + 6.45) * gib  # if no fragment were unused
    assert 0 < left < found.room() < left + 1.2


@pytest.mark.parametrize("set_by_hand", [False, True])
def test_whole_models_have_expandable_segments(monkeypatch, set_by_hand):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if set_by_hand:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")

    def environment(name: str) -> dict[str, str]:
        arm = eight.arm_of(name)
        options = eight._options(eight.arguments([]), arm, eight.settings(arm, 2), 60)
        return train_step.command(arm.system, options)[1]

    for whole in "13b-whole:O3:1", "qwen3-30b-a3b:O3-experts-graph:1", "deepseek-v2-lite:O3-experts-graph:1":
        found = environment(whole)
        expected = "backend:native" if set_by_hand else "expandable_segments:True"
        assert (found["PYTORCH_CUDA_ALLOC_CONF"], found["NCCL_GRAPH_REGISTER"]) == (expected, "0")
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER"} & environment("175b:O3:1").keys()


def cells(page: str) -> dict[str, dict[str, str]]:
    """{arm: {column: cell}} of a Markdown table."""
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in page.splitlines() if "|" in line]
    head, _, *rest = lines
    return {line[0]: dict(zip(head, line, strict=False)) for line in rest}


def test_the_table_has_what_was_measured_beside_the_estimate(tmp_path):
    """Rows go through the file; of two of one arm the last counts, and of another GPU none."""
    plan = [eight.settings(arm, 4) for arm in eight.PLAN if arm.layout.startswith("175b")]
    path, stamp = str(tmp_path / "x.csv"), {"torch": "", "commit": "", "date": ""}
    times = {("O3-graph", 1): 700.0, ("te-delayed-graph", 1): 910.0, ("te-delayed", 1): 1000.0, ("bf16", 1): 1400.0,
             ("O3-graph", 2): 680.0}  # fmt: skip
    for gpu, factor in (("NVIDIA H100 80GB HBM3", 3.0), ("NVIDIA H100 80GB HBM3", 1.0), ("NVIDIA H200", 2.0)):
        for row in plan:
            if ms := times.get((row["system"], row["mbs"])):
                gb = 30.0 if row["system"] == "O3-graph" else 60.0
                own = train_step.flat(figures(factor * ms, gb) | {"system": row["system"], "mbs": row["mbs"]})
                train_step.append(path, train_step.COLUMNS, [stamp | {"gpu": gpu} | row | own])
    page = eight.table(eight.merged(plan, eight.known_rows(path, H100)), H100)
    found = cells(page)
    layouts = {"4": "TP 4", "2": "TP 2 DP 2"}
    assert list(found) == [f"{row['system']}, {layouts[row['shape'].partition('size=')[2][0]]}, MBS {row['mbs']}"
                           for row in plan]  # fmt: skip
    ours = found["O3-graph, TP 4, MBS 1"]
    e = eight.predicted(plan[0], H100)
    assert e and ours["ms"] == f"700.0 ({e.ms:.1f}, {e.ms / 700 - 1:+.1%})"
    assert ours["x TE's best"].split()[0] == "1.30" and ours["x BF16"].split()[0] == "2.00"
    assert ours["peak of BF16's"].split()[0] == format(32 / 62, ".2f")
    assert ours["tokens/s/GPU"].split()[0] == f"{16 * 2048 / 0.7 / 4:,.0f}"
    assert float(ours["GB after a step"].split()[0]) == pytest.approx(30e3 * MIB, abs=0.06)
    assert float(ours["peak GB"].split()[0]) == pytest.approx(32e3 * MIB, abs=0.06)
    assert ours["bare ms"].split()[0] == "6"  # 5.75
    assert found["te-delayed, TP 4, MBS 1"]["x TE's best"].split()[0] == "0.91"
    alone = found["O3-graph, TP 4, MBS 2"]["x TE's best"]  # no other arm of that micro-batch was measured
    assert alone.startswith("(") and found["bf16, TP 4, MBS 4"]["ms"].startswith("(")
    measured, estimated = [line for line in page.splitlines() if "the fastest of each" in line]
    assert "O3-graph, TP 4, MBS 2, 680.0 ms, 1.34 times te-delayed-graph, TP 4, MBS 1" in measured
    assert "O3-graph, TP 2 DP 2, MBS 4" in estimated  # the saved memory has room for it


def test_experts_have_an_estimate():
    """It is shown beside what was measured."""
    (row, *_) = (eight.settings(arm, 4) for arm in eight.PLAN if arm.layout == "qwen3-moe")
    e = eight.predicted(row, H100)
    assert "Nothing is measured" not in eight.table([row], H100)
    measured = row | train_step.flat(figures(500.0)) | {"system": row["system"], "mbs": row["mbs"]}
    (line,) = cells(eight.table([measured], H100)).values()
    assert line["ms"] == f"500.0 ({e.ms:.1f}, {e.ms / 500 - 1:+.1%})"
    assert line["tokens/s/GPU"].split()[0] == f"{16 * 4096 / 0.5 / 4:,.0f}"


@pytest.mark.parametrize("layout, gpus", [("qwen3-30b-a3b", 2), ("deepseek-v2-lite", 1)])
def test_a_whole_model_has_the_sizes_of_its_file(layout, gpus):
    """A shape repeats configs/model; its step is not profiled, and its gradients are in FP8."""
    row = eight.settings(eight.arm_of(f"{layout}:O3-experts-grouped:1"), gpus, batch=8)
    flags = eight.flags_of(row)
    model = yaml.safe_load((ROOT / f"configs/model/{layout}.yaml").read_text())["MODEL_ARGS"]
    of_file = [word for flag, value in model.items() for word in [flag, *([] if value is True else [str(value)])]]
    beside = ["--micro-batch-size=1", "--fp8-level=O3", "--bf16", "--mock-data"]
    ours, theirs = (vars(job_flags.parse(words).args) for words in (flags, of_file + beside))
    assert theirs.pop("vocab_size") == ours.pop("vocab_size") + 1  # the tokenizer's end mark
    for flag in model:
        if (name := flag.removeprefix("--").replace("-", "_")) in theirs:
            assert ours[name] == theirs[name], flag
    assert ours["fp8_grad_accum"] == "fp8" and ours["expert_model_parallel_size"] == gpus
    options = eight._options(eight.arguments([]), eight.arm_of(f"{layout}:O3-experts-grouped:1"), row, 60)
    assert train_step.command("O3-experts-grouped", options)[1]["PROFILE_STEP"] == "0"


@pytest.mark.slow
def test_a_small_run(tmp_path, monkeypatch, capsys):
    """Two ranks over gloo, ours beside stock's layers: rows in train_step.py's file format, and the table of them."""
    path = tmp_path / "x.csv"
    words = f"--nproc 2 --arms tiny:O3:2 tiny:bf16-local:2 --csv {path} --vocab-size 1000 --timeout 300"
    monkeypatch.setattr(sys, "argv", ["eight.py", *words.split()])
    start_forked(monkeypatch)
    eight.main()
    said = capsys.readouterr().out
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == train_step.COLUMNS and [row["system"] for row in rows] == ["O3", "bf16-local"], said
    for row in rows:
        assert row["nproc"] == "2" and float(row["ms"]) > 0 and "--tensor-model-parallel-size=2" in row["shape"]
    assert float(rows[0]["loss"]) == pytest.approx(float(rows[1]["loss"]), abs=0.1)  # the same model and data
    assert f"{float(rows[0]['ms']):.1f} (" in said.split("| arm")[1]
    train_step.check_columns(str(path), train_step.COLUMNS)
    assert json.loads(rows[0]["profile_collectives"]) is None  # a CPU has no profile
    known = eight.known_rows(str(path), H100)
    arm = eight.arm_of("tiny:O3:2")
    (found,) = eight.merged([eight.settings(arm, 2, extra=["--vocab-size", "1000"])], known)
    assert found["ms"] == rows[0]["ms"] and found["te"] == "none"


@pytest.mark.parametrize(("shape", "system", "bound", "error"), [
    ("deepseek-v2-lite", "O3-experts-grouped", "host", 0.010),  # which set the host's time
    ("deepseek-v2-lite", "O3-experts-graph", "gpu", -0.206),
    ("qwen3-30b-a3b", "O3-experts-grouped", "host", -0.148),
])  # fmt: skip
def test_whole_models_as_measured(shape, system, bound, error):
    """Rows of eight.csv, at a micro-batch of 4,096 tokens: the step, and memory within 1.5 %."""
    on = hardware.load("h200")
    rows = eight.known_rows(str(ROOT / "benchmarks/results/eight.csv"), on)
    (row,) = (row for row in rows if (row["shape"].split()[0], row["system"]) == (shape, system))
    found = eight.predicted(row, on)
    assert found is not None
    assert found.ms == getattr(found, f"{bound}_ms")
    assert found.ms / float(row["ms"]) - 1 == pytest.approx(error, abs=0.001)
    assert found.held == pytest.approx(float(row["gb"]) * 1e3 * MIB, rel=0.002)
    assert found.peak == pytest.approx(float(row["gb_peak"]) * 1e3 * MIB, rel=0.015)
