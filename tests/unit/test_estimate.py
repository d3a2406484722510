"""The output of `megatron-fp8 estimate` and `plan`, and their one-line errors."""

import argparse
import contextlib
import csv
import io
import json
import os
import re
from dataclasses import replace

import pytest

from megatron_fp8.errors import UserError
from megatron_fp8.flags import config
from megatron_fp8.flags.usage import one_line_usage_errors
from megatron_fp8.tools.perf import estimate, hardware, job_flags, memory, plan, step, validation
from megatron_fp8.tools.perf.memory import ranks_bytes

MODEL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
    "--position-embedding-type rope --disable-bias-linear --vocab-size 50304 --bf16 --use-distributed-optimizer "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 64"
)


def call(verb, capsys, before: str, flags: str = MODEL) -> tuple[int, str]:
    """(Exit code, output) of `megatron-fp8 VERB BEFORE -- FLAGS`."""
    parser = argparse.ArgumentParser()
    one_line_usage_errors(parser)
    verb.add_arguments(parser)
    code = verb.run(parser.parse_args([*before.split(), "--", *flags.split()]))
    return code, capsys.readouterr().out


def test_a_column_a_system_with_the_error_below(capsys):
    code, text = call(estimate, capsys, "--gpus 8 --hardware h100-80gb-sxm --tokens 1e11 --cap-gb 70")
    assert code == 0
    assert "H100 80 GB SXM, 8 GPUs: TP 1, PP 1, DP 8; micro-batch 2, global batch 64, sequence 2048" in text
    assert re.search(r"^ +stock BF16 +TE FP8 +O1 +O2 +O3$", text, re.M)
    for row in ("step, ms", "MFU of 1,979 (FP8)", "days for 1e+11 tokens", "peak memory", "GB: activations",
                "ms: optimizer", "gradients: linears", "largest micro-batch"):  # fmt: skip
        assert row in text
    assert re.search(r"Error on \d+ runs it was not fitted to .*: step \d\.\d% in the median", text)
    assert max(map(len, text[text.index("Error on") :].splitlines())) <= 100
    assert re.search(r"Megatron's own theory of stock BF16: \d\d\.\d GB of weights and optimizer, \d+\.\d of", text)
    assert "NO," in text  # Transformer Engine's does not fit 70 GB


WIDE = (
    MODEL + " --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --sequence-parallel "
    "--global-batch-size 1024 --micro-batch-size 4"
)


@pytest.mark.parametrize("level", ["", "--fp8-level O3"])
def test_the_table_fits_a_terminal(level, capsys):
    """With five systems and with three, several nodes, pipelines, and whether the job fits or not."""
    for cap in ("", " --cap-gb 2"):
        _, text = call(estimate, capsys, f"--gpus 128{cap}", f"{WIDE} {level}")
        assert "GB: tensor: reduce-scatters" in text and max(map(len, text.splitlines())) <= 100


def test_a_column_of_memory_is_of_one_stage(capsys):
    """The stage that is the fullest at its peak, which the table names. Here other stages hold more between steps."""
    flags = job_flags.parse(f"{WIDE} --untie-embeddings-and-output-weights --fp8-level O3".split())
    w = job_flags.workload(flags, 128)
    e = step.estimate(w, hardware.load("h200"))
    held = [sum(held.values()) / 1e9 for held, _ in step.stages(w)]
    assert e.stage == 0 and e.held == pytest.approx(held[0]) and max(held) > held[0]
    assert e.held == pytest.approx(sum(e.memory[kind] for kind in e.memory if kind in (
        "weight", "weight fp8 copy", "transpose scratch", "grad", "optimizer states", "buffers"
    )))  # fmt: skip
    _, text = call(estimate, capsys, "--gpus 128 --systems O3", f"{WIDE} --untie-embeddings-and-output-weights")
    assert re.search(r"^fullest stage, from 0 +0$", text, re.M)
    assert re.search(rf"^held between steps, GB +{e.held:.1f}$", text, re.M)


def test_buckets_are_cut_once_for_all_micro_batches(capsys, monkeypatch):
    """Ten micro-batches are tried for each system, twice, and to cut many layers takes seconds."""
    cuts = []

    def counted(job, cells, **more):
        cuts.append(job)
        return ranks_bytes(job, cells, **more)

    validation.runs()  # before counting: its estimates should not count
    step._first_ranks.cache_clear()
    monkeypatch.setattr(step, "ranks_bytes", counted)
    call(estimate, capsys, "--gpus 1 --cap-gb 1e6", f"{MODEL.replace('64', '512')} --fp8-level O3")
    assert 1 <= len(cuts) <= 3  # stock and Transformer Engine share one; O3's gradients are in FP8 or in BF16


def test_megatrons_theory_holds_as_much_as_ours():
    """It has as many weights and optimizer states. Its activations are those of layers with dropout."""
    flags = job_flags.parse(MODEL.split())
    w = job_flags.workload(flags, 8, "bf16")
    found = estimate.estimate(w, estimate.hardware.load("h200"))
    weights, activations = job_flags.megatrons_memory(flags, w)
    assert weights == pytest.approx(found.held, rel=0.03)
    assert activations == pytest.approx(found.memory["activations"], rel=0.15)


def test_json_and_csv_carry_the_same(capsys):
    _, text = call(estimate, capsys, "--gpus 8 --format json", MODEL + " --fp8-level O3")
    found = json.loads(text)
    assert [e["system"] for e in found["estimates"]] == ["bf16", "te", "O3"]
    assert found["error"]["runs"] >= 8
    _, text = call(estimate, capsys, "--gpus 8 --format csv", MODEL + " --fp8-level O3")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [float(row["step_ms"]) for row in rows] == [e["step_ms"] for e in found["estimates"]]
    o3 = found["estimates"][-1]
    assert o3["tokens_per_s_per_gpu"] == pytest.approx(64 * 2048 / 8 / o3["step_ms"] * 1e3, rel=1e-4)


def test_a_whole_command_gives_the_estimate_of_its_flags(capsys, monkeypatch):
    """Its launcher gives the GPUs, unless --gpus does, and sets variables; the script need not exist here."""
    monkeypatch.delenv("CHOSEN", raising=False)
    command = "CHOSEN=model/gpt-7b srun -N 2 torchrun --nnodes 2 --nproc-per-node 4 -m megatron_fp8 nowhere.py "
    for verb, asked in ((estimate, ""), (plan, "--top 1 ")):
        alone = call(verb, capsys, f"{asked}--gpus 8")
        assert alone[0] == 0 and call(verb, capsys, asked, command + MODEL) == alone
    assert "H200 141 GB SXM, 16 GPUs" in call(estimate, capsys, "--gpus 16", command + MODEL)[1]
    assert "H200 141 GB SXM, 1 GPUs" in call(estimate, capsys, "", f"python nowhere.py {MODEL}")[1]
    assert os.environ.get("CHOSEN") is None


def estimates(capsys, flags: str) -> tuple[dict[str, dict], str]:
    """({system: its estimate}, what stands on stderr)."""
    parser = argparse.ArgumentParser()
    estimate.add_arguments(parser)
    assert estimate.run(parser.parse_args(["--gpus", "8", "--format", "json", "--", *flags.split()])) == 0
    said = capsys.readouterr()
    return {e["system"]: e for e in json.loads(said.out)["estimates"]}, said.err


def test_weights_gathered_in_fp8_change_transformer_engines_column_alone(capsys):
    """A level says that it switches the flag off. Without E4M3 weights training refuses it, and so does this."""
    flags = f"{MODEL} --fp8-level O3"
    (without, _), (with_it, said) = (estimates(capsys, flags + more) for more in ("", " --fp8-param-gather"))
    assert with_it["O3"] == without["O3"] and with_it["bf16"] == without["bf16"]
    weights = sum(job_flags.workload(job_flags.parse(MODEL.split()), 8).job.linears())
    assert without["te"]["held_gb"] - with_it["te"]["held_gb"] == pytest.approx(2 * weights / 1e9, abs=1e-5)
    sent = "weights: linears inside"
    assert with_it["te"][sent] == without["te"][sent] / 2 == with_it["O3"][sent]
    assert said.startswith("[fp8] --fp8-param-gather: switched off: ") and said.count("\n") == 1
    own, _ = estimates(capsys, f"{MODEL} --fp8-format hybrid --fp8-param-gather")
    assert own["te"] == with_it["te"]
    assert "TE FP8 with --fp8-param-gather: " in call(estimate, capsys, "", flags + " --fp8-param-gather")[1]
    with pytest.raises(UserError, match="--fp8-param-gather: remove it, or use --fp8-level O3"):
        call(estimate, capsys, "", f"{MODEL} --fp8-level O1 --fp8-param-gather")


def test_gradients_of_stock_in_bf16_take_half_the_bytes(capsys):
    """The linears' at a level are its own."""
    flags = f"{MODEL} --fp8-level O3"
    (wide, _), (narrow, _) = (estimates(capsys, flags + more) for more in ("", " --grad-reduce-in-bf16"))
    for system in "bf16", "te":
        assert narrow[system]["gb grad"] == pytest.approx(wide[system]["gb grad"] / 2)
        for kind in "gradients: linears inside", "gradients: all else inside":
            assert narrow[system][kind] == wide[system][kind] / 2
    assert narrow["O3"]["gradients: linears inside"] == wide["O3"]["gradients: linears inside"]
    assert narrow["O3"]["gradients: all else inside"] == wide["O3"]["gradients: all else inside"] / 2
    given = job_flags.workload(job_flags.parse(MODEL.split()), 8).job
    others = sum(given.others(0))
    assert wide["O3"]["gb grad"] - narrow["O3"]["gb grad"] == pytest.approx(2 * others / 1e9, rel=1e-3)


def test_megatrons_help_is_shown(capsys):
    with pytest.raises(SystemExit) as end:
        call(estimate, capsys, "", "--help")
    assert end.value.code == 0 and "--tensor-model-parallel-size" in capsys.readouterr().out


def test_nothing_that_fits_is_exit_code_1(capsys):
    assert call(estimate, capsys, "--gpus 1 --cap-gb 20 --systems bf16 O3")[0] == 1
    code, text = call(plan, capsys, "--gpus 2 --cap-gb 20 --system bf16")
    assert code == 1 and "does not fit, " in text and "GB too much" in text


def test_flags_change_the_estimate():
    flags = job_flags.parse(f"{MODEL} --fp8-level O3 --fp8-master fp32 --recompute-granularity full "
                       "--recompute-method uniform --recompute-num-layers 1 --overlap-grad-reduce "
                       "--tensor-model-parallel-size 2 --sequence-parallel".split())  # fmt: skip
    w = job_flags.workload(flags, 8)
    assert w.system.name == "O3" and w.cells()["master"] == "fp32" and w.cells()["grad_accum"] == "bf16"
    assert (w.tensor, w.data, w.split, w.recompute) == (2, 4, 2, "full")
    assert w.overlap_reduce and not w.overlap_gather
    assert job_flags.workload(flags, 8, micro_batch_size=16).cells()["grad_accum"] == "fp8"
    head = job_flags.parse(f"{MODEL} --fp8-level O1 --fp8-lm-head --recompute-activations".split())
    assert job_flags.workload(head, 8).fp8_head and job_flags.workload(head, 8).recompute == "selective"
    chunks = job_flags.parse(f"{MODEL} --fp8-level O1 --fp8-loss-chunks 8".split())
    assert job_flags.workload(chunks, 8).loss_chunks == 8 and job_flags.workload(chunks, 8, "bf16").loss_chunks == 1
    stock = job_flags.workload(flags, 8, "bf16")
    assert stock.cells() is None and stock.job == w.job


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_a_frozen_base_makes_no_gradients_and_no_update(flags, capsys):
    """Of three products two are left, and of the head's; nothing is summed, stepped or sent over data parallelism."""
    flags, before = f"{MODEL} --fp8-level O3 {flags}", "--gpus 8 --format json"
    trained, frozen = (
        {row["system"]: row for row in json.loads(call(estimate, capsys, f"{before}{more}", flags)[1])["estimates"]}
        for more in ("", " --frozen-base")
    )
    assert trained.keys() == frozen.keys() == {"bf16", "te", "O3"}
    for name, row in frozen.items():
        whole = trained[name]
        apart = 0.01 if name == "bf16" else 0.05  # FP8's backward products are slower than its forward one
        assert row["ms linears"] / whole["ms linears"] == pytest.approx(2 / 3, abs=apart)
        assert row["ms LM head"] == pytest.approx(whole["ms LM head"] * 2 / 3)
        assert row["ms attention"] == whole["ms attention"]
        for gone in ("ms optimizer", "ms copies", "ms tables' gradients", "gb grad", "gb optimizer states"):
            assert gone in whole and gone not in row
        assert "gradients: linears sent" not in row and not any(key.startswith("weights: ") for key in row)
        assert row["gpu_ms"] < 0.85 * whole["gpu_ms"]
    job = job_flags.parse([*flags.split()])
    job.args.frozen_base = True
    w = job_flags.workload(job, 8, "O3")
    (rank,) = ranks_bytes(w.job, w.cells(), stages=[0], ranks=[0])
    held = (sum(rank.linears.values()) + sum(rank.others.values())) / 1e9
    assert frozen["O3"]["held_gb"] == pytest.approx(held + frozen["O3"]["gb buffers"])


def test_adapters_reference_is_the_frozen_base(capsys):
    """dpo_gpt_fp8.py with a frozen base: a second pass, and no second model."""
    flags, before = f"{MODEL} --fp8-level O3", "--gpus 8 --format json --systems O3 --frozen-base"
    tuned, alone = (
        json.loads(call(estimate, capsys, before, f"{script}{flags}")[1])["estimates"][0]
        for script in ("dpo_gpt_fp8.py ", "")
    )
    assert tuned["held_gb"] == alone["held_gb"] and tuned["ms reference's pass"] > 0.2 * alone["gpu_ms"]
    assert "ms reference's pass" not in alone


def test_dpo_s_reference_is_held_and_runs_forward():
    """Its bytes at O3 and in stock, and a third of a step's passes more, or little else."""
    flags = f"{MODEL} --fp8-level O3 --sft"
    alone, beside = (job_flags.parse([*script, *flags.split()]) for script in ([], ["dpo_gpt_fp8.py"]))
    for system, a_weight in (("O3", 1), ("bf16", 2)):
        one, two = (
            step.estimate(job_flags.workload(which, 8, system), hardware.load("h200")) for which in (alone, beside)
        )
        linears, others = memory.parameters(one.workload.job)
        assert two.held - one.held == pytest.approx((a_weight * linears + 2 * others) / 1e9)
        more, passes = two.parts["reference's pass"], one.parts["linears"] + one.parts["attention"]
        assert passes / 4 < more < passes / 2 and two.gpu_ms - one.gpu_ms == pytest.approx(more)


def test_tensor_parallel_traffic_in_fp8_is_counted():
    """--fp8-tp-gather and --fp8-tp-reduce-scatter, one direction or both: E4M3; sums have an exponent for each 128."""

    def sent(flags):
        flags = f"{MODEL} --tensor-model-parallel-size 8 --sequence-parallel {flags}"
        found = step.estimate(job_flags.workload(job_flags.parse(flags.split()), 8), hardware.load("h200")).traffic
        return found["tensor: gathers"].inside, found["tensor: reduce-scatters"].inside

    gathers, sums = sent("--fp8-level O3")
    assert sent("--fp8-level O2") == (pytest.approx(2 * gathers), sums)
    assert sent("--fp8-level O2 --fp8-tp-gather fp8") == (gathers, sums)
    one_way, both = (sent(f"--fp8-level O3 --fp8-tp-reduce-scatter {how}")[1] for how in ("forward", "fp8"))
    assert both == pytest.approx(sums * (1 + 1 / 128) / 2) and one_way == pytest.approx((sums + both) / 2)
    assert sent("--fp8-level O3 --fp8-gemm bf16") == (pytest.approx(2 * gathers), sums)

    def summed(flags):
        flags = f"{MODEL} --tensor-model-parallel-size 8 --fp8-level O3 {flags}"
        found = step.estimate(job_flags.workload(job_flags.parse(flags.split()), 8), hardware.load("h200")).traffic
        return found["tensor: sums"].inside

    assert summed("--fp8-tp-reduce-scatter fp8") == pytest.approx(summed("") * (1 + 1 / 128) / 2)


def test_other_weights_and_states_are_counted():
    """O3 with BF16 weights sends and updates like O2; O2 with FP32 states updates like O1."""

    def found(flags):
        e = step.estimate(job_flags.workload(job_flags.parse(f"{MODEL} {flags}".split()), 8), hardware.load("h200"))
        return e.traffic["weights: linears"].inside, e.parts["optimizer"]

    (sent_o1, o1), (sent_o2, o2), (sent_o3, o3) = (found(f"--fp8-level {level}") for level in ("O1", "O2", "O3"))
    assert sent_o1 == sent_o2 == 2 * sent_o3 and o3 < o2 < o1
    sent, ms = found("--fp8-level O3 --fp8-weight bf16")
    assert sent == sent_o2 and ms == pytest.approx(o2, rel=0.03)
    assert found("--fp8-level O2 --fp8-weight fp8")[0] == sent_o3
    fp32 = "--fp8-exp-avg fp32 --fp8-exp-avg-sq fp32 --fp8-master fp32"
    assert found(f"--fp8-level O2 {fp32}")[1] == pytest.approx(o1, rel=0.03)


def test_transformer_engine_may_be_elsewhere(capsys, monkeypatch):
    """With its attention; its context parallelism is modelled like a level's own."""
    absent = "--fp8-attention te: Transformer Engine is not installed"
    monkeypatch.setattr(config, "installed", lambda module: False)
    flags = f"{MODEL} --context-parallel-size 2 --fp8-level O3 --fp8-attention te"
    w = job_flags.workload(job_flags.parse(flags.split()), 8)
    assert (w.context, w.data, w.gpus) == (2, 4, 8)
    own = flags.replace("--fp8-attention te", "--attention-dropout 0")
    for verb, gpus in ((estimate, "--gpus 8"), (memory, "--gpus 8"), (plan, "--gpus 8 --top 1")):
        assert call(verb, capsys, gpus, flags)[0] == 0
        assert call(verb, capsys, gpus, own)[0] == 0
    args = job_flags.parse(MODEL.split()).args
    args.fp8_level, args.fp8_attention = "O3", "te"
    with pytest.raises(UserError, match=absent):  # a run here still reports it
        config.config_from_args(args)


def test_files_of_data_may_be_elsewhere():
    files = "--vocab-file /nowhere/vocab.json --merge-file /nowhere/merges.txt --data-args-path /nowhere/blend.txt"
    assert job_flags.parse([*MODEL.split(), *files.split()]).args.vocab_file == "/nowhere/vocab.json"


def test_no_file_or_folder_of_the_job_is_created(tmp_path, monkeypatch):
    """Neither the folder that it saves to nor its metrics file."""
    monkeypatch.setenv("MEGATRON_FP8_METRICS", str(tmp_path / "metrics.jsonl"))
    job_flags.parse(f"{MODEL} --fp8-level O3 --save {tmp_path / 'saved'} --save-interval 10".split())
    assert list(tmp_path.iterdir()) == []


def test_a_plan_ranks_layouts_and_says_why(capsys):
    asked, flags = "--gpus 16 --hardware h100-80gb-sxm", MODEL + " --fp8-level O3"
    code, text = call(plan, capsys, f"{asked} --top 4 --format markdown", flags)
    assert code == 0
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| TP")]
    assert len(rows) in (4, 5) and rows[0][-1] == "the fastest"
    speeds = [float(row[4].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert any("(as given)" in row[0] for row in rows)
    assert all(re.search(r"bubble|communication|recomputation|host|smaller", row[-1]) for row in rows[1:])
    assert all(float(row[7]) < 82 for row in rows)
    left_out = re.search(r"Slower layouts that fit and are not shown: (\d+) [(]--all shows every layout", text)
    of_all = call(plan, capsys, f"{asked} --all", flags)[1]
    fit = int(re.search(r"16 GPUs: (\d+) layouts fit", of_all)[1])
    assert len(rows) + int(left_out[1]) == fit == len(re.findall(r"^TP ", of_all, re.M)) and "not shown" not in of_all
    assert "CP" not in of_all
    shared = call(plan, capsys, f"{asked} --top 1", flags + " --context-parallel-size 8 --attention-dropout 0")[1]
    assert re.search(r"do not, all with CP 8, as given$", shared, re.M)
    _, in_json = call(plan, capsys, f"{asked} --top 4 --format json", flags)
    assert json.loads(in_json)["left_out"] == fit - 4


@pytest.mark.parametrize("given", ["", "--overlap-grad-reduce", "--overlap-grad-reduce --overlap-param-gather"])
def test_a_plan_says_which_flags_it_counts_with_and_the_job_lacks(given, capsys):
    """Without them a job is as slow as `estimate` says."""
    lacking = [flag for flag in ("--overlap-grad-reduce", "--overlap-param-gather") if flag not in given]
    flags = f"{MODEL} --fp8-level O3 {given}"
    text = call(plan, capsys, "--gpus 16 --top 1", flags)[1]
    assert bool(lacking) == ("Counted with " + " ".join(lacking) + ", which the flags lack: add them" in text)
    ours = json.loads(call(plan, capsys, "--gpus 16 --top 1 --format json", flags)[1])
    assert ours["added_flags"] == lacking
    best, layout = ours["layouts"][0], "--micro-batch-size {micro_batch} --tensor-model-parallel-size {tensor}"
    assert (best["pipeline"], best["recompute"]) == (1, "none")
    as_planned = f"{flags} {layout.format_map(best)} --sequence-parallel {' '.join(lacking)}"
    (said,) = json.loads(call(estimate, capsys, "--gpus 16 --systems O3 --format json", as_planned)[1])["estimates"]
    assert said["step_ms"] == best["step_ms"]


def test_a_plan_in_csv_says_beside_it_that_nothing_fits(capsys, monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    code, text = call(plan, capsys, "--gpus 1 --cap-gb 1 --format csv")
    assert code == 1 and not text.strip()
    first, last = said.getvalue().splitlines()
    assert re.fullmatch(r"megatron-fp8 plan: \d+ layouts to compare", first)
    assert re.match(r"megatron-fp8 plan: none of \d+ layouts fits; TP 1.*: does not fit: ", last)


def test_every_layout_is_tried_and_divides(capsys):
    flags = job_flags.parse(MODEL.split())
    from megatron_fp8.tools.perf import hardware

    found = plan.search(flags, 16, "bf16", hardware.load("h200"), None)
    assert len({c.layout for c in found}) == len(found) > 20
    for c in found:
        assert bool(c.best) != bool(c.lost)
        if c.best:
            w = c.best.workload
            assert w.gpus == 16 and w.tensor <= 8 and w.global_batch == 64
            assert c.best.room() >= 0
    assert any(c.lost.startswith("not divisible") for c in plan.search(
        job_flags.parse(MODEL.replace("batch-size 64", "batch-size 6").split()), 16, "bf16", hardware.load("h200"), None
    ))  # fmt: skip


EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 512 --disable-bias-linear --fp8-experts --moe-layer-freq [0]+[1]*31"


# Without a graph if attention is recomputed: its dropout would draw the same numbers in each replay.
GRAPHED = "--cuda-graph-impl full_iteration --attention-dropout 0.1"


@pytest.mark.parametrize("more", ["--recompute-activations", f"{EXPERTS} --keep-fp8-transpose-cache", GRAPHED])
def test_a_plan_finds_the_fastest_of_all_and_looks_at_each_layout_once(more, capsys, monkeypatch):
    """As a search through every micro-batch and recomputation does, with all stages of each. It says how far it is."""
    flags, on, cap = job_flags.parse(f"{MODEL} --fp8-level O3 {more}".split()), hardware.load("h200"), 9.0
    asked, stock = [], plan.job_flags.workload
    monkeypatch.setattr(plan.job_flags, "workload", lambda *given, **by: asked.append(given) or stock(*given, **by))
    monkeypatch.setattr(plan, "_SILENCE", -1)
    found = plan.search(flags, 16, "O3", on, cap)
    said = capsys.readouterr().err.splitlines()
    assert len(asked) <= 3 * len(found) + 1
    assert said[0] == f"megatron-fp8 plan: {len(found)} layouts to compare" and len(said) == len(found) + 1
    fits = 0
    for c in found:
        made = []
        for size in estimate.divisors(64):
            for recompute in (None, "selective", "full"):
                with contextlib.suppress(UserError):
                    w = replace(plan._workload(flags, 16, "O3", c.layout, recompute), micro_batch=size)
                    assert w.graphed == (more is GRAPHED and recompute != "selective")
                    e = step.estimate(w, on)
                    held = [sum(a.values()) + sum(b.values()) for a, b in step.stages(w)]
                    assert e.peak == pytest.approx(max(held) / 1e9, rel=1e-12) and e.stage == held.index(max(held))
                    made.append(e)
        made = [e for e in made if e.room(cap) >= 0]
        fits += bool(made)
        assert c.best == (max(made, key=lambda e: e.tokens_a_second) if made else None)
    assert 0 < fits < len(found)


PAPER = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
    "--position-embedding-type rope --disable-bias-linear --vocab-size 50304 --bf16 --use-distributed-optimizer "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 "
    "--global-batch-size 64"
)


def test_a_plan_tries_every_micro_batch():
    """A small model is fastest with a large one. Of a large model only the whole step's fits, with gradients in FP8."""
    small = job_flags.parse(f"{MODEL} --num-layers 12 --hidden-size 1024 --global-batch-size 1024".split())
    found = plan.search(small, 8, "O3", hardware.load("h200"), None)
    fastest = max((c.best for c in found if c.best), key=lambda e: e.tokens_a_second)
    assert fastest.workload.micro_batch > 16
    flags, h100 = job_flags.parse(PAPER.split()), hardware.load("h100-80gb-sxm")
    (layout,) = (c for c in plan.search(flags, 64, "O3", h100, None) if c.layout == plan.Layout(2, 4, 1))
    w = layout.best.workload
    assert (w.micro_batch, w.micro_batches, w.cells()["grad_accum"]) == (8, 1, "fp8")
    assert all(step.estimate(replace(w, micro_batch=size), h100).room() < 0 for size in (1, 2, 4))
    assert estimate.largest_micro_batch(replace(w, micro_batch=1), h100).workload == w


@pytest.mark.parametrize(
    "given, said",
    [
        ("--cpu-offloading-num-layers 2", "--cpu-offloading-num-layers 2"),
        ("--fine-grained-activation-offloading --offload-modules core_attn", "--fine-grained-activation-offloading"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1"),
        ("--hybrid-layer-pattern M*M*", "--hybrid-layer-pattern M*M*"),
        ("--window-size 128,0", "--window-size 128 0"),
        ("--optimizer sgd", "--optimizer sgd"),
        ("--fp16", "--fp16"),
        ("--use-precision-aware-optimizer", "--use-precision-aware-optimizer"),
        ("--fp8-level O3 --fp8-bf16-layers decoder.layers.*", "--fp8-bf16-layers decoder.layers.*"),
        ("--first-last-layers-bf16", "--first-last-layers-bf16"),
        ("--fp8-level O2 --fp8-emulate E8M3", "--fp8-emulate E8M3"),
        ("--fp8-emulate E8M3", "--fp8-emulate E8M3"),
        ("--fp8-level O3 --fp8-grad-reduce fp32", "--fp8-grad-reduce fp32"),
        ("--fp8-level O3 --attention-backend unfused", "--attention-backend unfused"),
        ("--attention-backend local", "--attention-backend local"),
        ("--fp8-level O1 --softmax-type off-by-one", "--softmax-type off-by-one"),
        ("--fp8-level O1 --reset-attention-mask", "--reset-attention-mask"),
        ("--fp8-level O1 --fp8-recipe tensorwise", "--fp8-recipe tensorwise"),
        ("--fp8-level O1 --no-fp8-wgrad", "--no-fp8-wgrad"),
        ("--quick-geglu", "--quick-geglu"),
        ("--fp8-level O3 --attention-output-gate", "--attention-output-gate"),
    ],
)
def test_what_is_not_modelled_is_refused(given, said):
    flags = job_flags.parse([*MODEL.split(), *given.split()])
    with pytest.raises(UserError, match=re.escape(f"{said}: not modelled; ")):
        job_flags.workload(flags, 8)


def test_all_that_is_not_modelled_is_said_at_once():
    given = "--window-size 128,0 --quick-geglu --mtp-num-layers 1 --account-for-loss-in-pipeline-split".split()
    with pytest.raises(UserError) as refused:
        job_flags.workload(job_flags.parse([*MODEL.split(), *given]), 8)
    flags = {line.split(" ")[0].rstrip(":") for line in str(refused.value).splitlines()}
    assert flags == {word for word in given if word.startswith("--")}


def test_a_value_at_its_default_is_not_refused():
    given = "--optimizer adam --cpu-offloading-num-layers 0 --mtp-num-layers 0 --attention-backend flash"
    flags = job_flags.parse(f"{MODEL} {given}".split())
    assert job_flags.workload(flags, 8) == job_flags.workload(job_flags.parse(MODEL.split()), 8)


@pytest.mark.parametrize(
    "verb, before, flags, message",
    [
        (estimate, "", MODEL.replace("--vocab-size 50304", ""), "--vocab-size is missing"),
        (estimate, "--gpus 3", MODEL + " --tensor-model-parallel-size 2", "--gpus 3: no multiple of"),
        (estimate, "--gpus 0", MODEL, "--gpus 0: use 1 or more"),
        (estimate, "--systems O4", MODEL, "--systems O4: no such system; use bf16, te"),
        (estimate, "", MODEL + " --num-experts 8 --expert-model-parallel-size 3", "-size 3: does not divide --num-exp"),
        (estimate, "", MODEL + " --no-such-flag", "unrecognized arguments: --no-such-flag"),
        (estimate, "--gpus 12", MODEL, "--global-batch-size 64: no multiple of"),
        (estimate, "", MODEL + " --recompute-granularity selective --recompute-modules moe", "moe: not modelled"),
        (estimate, "--gpus 2", MODEL.replace("--use-distributed-optimizer", ""), "add --use-distributed-optimizer"),
        (estimate, "--tokens inf", MODEL, "--tokens inf: use a number above 0"),
        (estimate, "--cap-gb inf", MODEL, "--cap-gb inf: use a number above 0"),
        (estimate, "", MODEL.replace("seq-length 2048", "seq-length -5"), "--seq-length -5: use 1 or more"),
        (estimate, "", MODEL + " --recompute-granularity full", "full: add --recompute-method uniform, or block"),
        (estimate, "", MODEL + " --tensor-model-parallel-size 0", "--tensor-model-parallel-size 0: use 1 or more"),
        (estimate, "", MODEL + " --global-batch-size 0", "--global-batch-size 0: use 1 or more"),
        (estimate, "", MODEL + " --num-virtual-stages-per-pipeline-rank 2", "2 virtual stages need 2 or more; change"),
        (estimate, "", MODEL + " --recompute-granularity full --recompute-method block", "add --recompute-num-layers"),
        (estimate, "", MODEL + " --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
         "--recompute-num-layers 2: not modelled with uniform; use 1"),
        (plan, "--gpus 8", MODEL + " --context-parallel-size 0", "--context-parallel-size 0: use 1 or more"),
        (plan, "--gpus 8", MODEL + " --context-parallel-size 3", "--gpus 8: no multiple of --context-parallel-size 3"),
        (plan, "--gpus 8 --system nope", MODEL, "--system nope: no such system; use bf16, te"),
        (plan, "--gpus 8", MODEL + " --account-for-loss-in-pipeline-split", "pipeline-split: not modelled; give a GPT"),
        (plan, "", MODEL, "--gpus is missing; give it, or put a command behind -- whose launcher says how many"),
        (plan, "--gpus 8", MODEL + " --group-query-attention --num-query-groups 3", "--num-query-groups 3: does not"),
        (plan, "--gpus 8", MODEL.replace("--use-distributed-optimizer", ""), "; add --use-distributed-optimizer"),
        (estimate, "", MODEL + " --fp8-level O1 --yaml-cfg run.yaml", "--yaml-cfg: its file replaces all flags"),
        (estimate, "", "torchrun --nnodes 4 " + MODEL, "torchrun: not a flag, and no script follows; put"),
        (estimate, "", MODEL.replace("--bf16", ""), "--bf16: missing, and FP32 is not modelled; add it"),
        (plan, "--gpus 8", MODEL.replace("--bf16", ""), "--bf16: missing, and FP32"),
        (estimate, "", MODEL.replace("--bf16", "--fp16"), "--fp16: not modelled; use --bf16 instead"),
        (plan, "--gpus 8 --top 0", MODEL, "--top 0: use 1 or more"),
        (plan, "--gpus 8", MODEL.replace("--global-batch-size 64", ""), "--global-batch-size is missing"),
    ],
)
def test_mistakes_are_said_in_one_line(verb, before, flags, message, capsys):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        call(verb, capsys, before, flags)
    assert "\n" not in str(error.value)
    assert not str(error.value).startswith(("estimate", "plan"))  # the other verb raises it too


def test_loss_chunks_have_few_logits_and_the_head_once_more():
    """A large vocabulary, whose logits are the peak: N parts hold a part and its gradient; a third more of the head."""
    flags = f"{MODEL} --fp8-level O3 --vocab-size 128000 --micro-batch-size 8"
    whole, parts = (
        step.estimate(job_flags.workload(job_flags.parse(f"{flags} {more}".split()), 8), hardware.load("h200"))
        for more in ("", "--fp8-loss-chunks 8")
    )
    assert whole.memory["logits"] == pytest.approx(8 * 2048 * 128000 * 2 / 1e9, rel=0.01)
    assert parts.peak < whole.peak - 0.5 * whole.memory["logits"]
    assert parts.parts["LM head"] == pytest.approx(4 / 3 * whole.parts["LM head"])
    split = f"{flags} --tensor-model-parallel-size 8 --sequence-parallel --fp8-loss-chunks"
    many, most = (
        step.estimate(job_flags.workload(job_flags.parse(f"{split} {n}".split()), 8), hardware.load("h200"))
        for n in (16, 64)
    )
    assert many.peak == most.peak  # a rank has 256 rows, and a part 16 or more
