"""`megatron-fp8 compare`: three forms of runs, equality, exit codes."""

import argparse
import inspect
import json
import math
import re
import struct
from collections import Counter
from pathlib import Path

import pytest

from megatron_fp8 import cpu
from megatron_fp8.errors import UserError
from megatron_fp8.tools.palette import COLOURS, looks
from megatron_fp8.tools.perf import compare
from megatron_fp8.tools.perf.runs import read

LOSSES = {1: 11.658123456, 2: 10.51234567, 3: 9.9574444, 4: 9.105}


def metrics(path, losses=LOSSES, norm=1.5, ms=100.0, device="a GPU"):
    lines = [json.dumps({"step": step, "loss": loss, "grad_norm": norm * step, "elapsed_time_per_iteration_ms": ms,
                         "number_of_skipped_iterations": 0}) for step, loss in losses.items()]  # fmt: skip
    path.write_text("\n".join([json.dumps({"linears_in_bf16": []}), json.dumps({"device": device}), *lines]) + "\n")
    return str(path)


def line(step, loss, norm=1.5, skipped=0):
    """As megatron-core 0.19.2 prints it: without a loss that is NaN, without the norm of a skipped step."""
    return (
        f" [2026-11-22 10:00:00.0] iteration {step:8d}/{4:8d} | consumed samples: {16 * step:12d} | elapsed time per "
        f"iteration (ms): 200.0 | throughput per GPU (TFLOP/s/GPU): 800.1 | learning rate: 1.000000E-04 | global batch "
        f"size:    16 |{f' lm loss: {loss:.6E} |' if loss >= 0 else ''} loss scale: 1.0 |"
        f"{f' grad norm: {norm * step:.3f} |' if norm else ''} number of skipped iterations: {skipped:3d} | number of "
        "nan iterations:   0 |"
    )


START = "[before the start of training step] datetime: 2026-11-25 14:05:02.975937 "


def log(path, losses=LOSSES, norm=1.5, interval=1, head="", cut=0):
    """As training_log prints single losses: after the first line no new mean begins. cut: lines missing at the top."""
    steps, since, lines = list(losses), [], []
    for step in steps:
        since.append(losses[step])
        if step == steps[0] or step % interval == 0:
            lines.append(line(step, sum(since) / len(since), norm))
            since = since if step == steps[0] else []
    memory = "memory (MB) | allocated: 1000.00 | max allocated: 2000.00 | reserved: 1"
    lines.insert(1, f"[Rank 0] (after 1 iterations) {memory}")
    path.write_text("\n".join([head, START, *lines][cut:]) + "\n")
    return str(path)


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def part(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensorboard(folder, losses=LOSSES, evaluations=()):
    """Events as SummaryWriter.add_scalar writes them: TFRecords of Event(2: step, 5: (1: (1: tag, 2: value)))."""
    folder.mkdir()
    content = b""
    scalars = [("lm loss", step, loss) for step, loss in losses.items()]
    for tag, step, loss in scalars + [("-".join(["lm loss validation", *e[2:]]), *e[:2]) for e in evaluations]:
        value = part(1, tag.encode()) + b"\x15" + struct.pack("<f", loss)
        other = part(1, f"{tag} vs samples".encode()) + b"\x15" + struct.pack("<f", 0.0)
        event = b"\x09" + struct.pack("<d", 1.7e9) + b"\x10" + varint(step) + part(5, part(1, value) + part(1, other))
        content += struct.pack("<Q", len(event)) + b"crc1" + event + b"crc2"
    (folder / "events.out.tfevents.1.host").write_bytes(content + b"\x20\0\0")  # with a record that was cut off
    return str(folder)


def call(capsys, *argv: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    code = compare.run(parser.parse_args(argv))
    return code, capsys.readouterr().out


def test_three_forms_say_the_same(tmp_path, capsys):
    runs = [metrics(tmp_path / "a.jsonl"), log(tmp_path / "b.log"), tensorboard(tmp_path / "c")]
    assert [read(run).form for run in runs] == ["metrics", "log", "tensorboard"]
    for run in runs:
        assert list(read(run).series("loss")) == [1, 2, 3, 4]
    assert read(runs[0]).series("loss") == LOSSES
    code, text = call(capsys, *runs, "--assert-equal")
    assert code == 0 and text.count("not compared") == 1
    assert "b.log: loss at step 2 not compared: either it or a.jsonl's is a mean with earlier steps in it" in text
    code, text = call(capsys, *runs, "--format", "csv")
    assert code == 0 and "1.0 / 2.1" in text and ",200.0," in text and ",0.500" in text


def test_what_a_log_does_not_print_is_nan(tmp_path, capsys):
    lines = [line(1, 9.0), line(2, 8.0), line(3, math.nan), line(4, 0.0, norm=None, skipped=1), line(5, math.inf)]
    (tmp_path / "a.log").write_text("\n".join([*lines, line(6, math.nan)]))
    run = read(str(tmp_path / "a.log"))
    nan = math.nan
    assert list(run.series("loss")) == [1, 2, 3, 4, 5, 6]
    assert [*run.series("loss").values()] == pytest.approx([9.0, 8.0, nan, nan, math.inf, nan], nan_ok=True)
    assert run.series("number_of_skipped_iterations") == {1: 0, 2: 0, 3: 0, 4: 1, 5: 0, 6: 0}
    sound = log(tmp_path / "b.log", dict.fromkeys(range(1, 7), 8.0))
    code, text = call(capsys, sound, str(tmp_path / "a.log"), "--tolerance", "0.5")
    assert code == 1 and re.search(r"last loss +8\.0+ +nan", text) and re.search(r"skipped +0 +1\n", text)


def test_a_mean_of_several_steps_is_nan_where_all_were_skipped(tmp_path):
    """--log-interval 2 with the first two steps skipped: no loss was summed yet, and none is printed."""
    lines = [line(1, math.nan, None, 1), line(2, math.nan, None, 2), line(4, 6.0, skipped=1), line(6, 0.0, None, 2)]
    (tmp_path / "a.log").write_text("\n".join([*lines, line(8, 0.0), line(10, 5.0)[:-40], line(12, 5.0)[:230]]))
    losses = read(str(tmp_path / "a.log")).series("loss")
    assert math.isnan(losses.pop(1)) and math.isnan(losses.pop(2)) and math.isnan(losses.pop(6))
    assert losses == {4: 6.0, 8: 0.0, 10: 5.0}  # a true 0; from lines that were cut off, the whole values


def test_a_step_that_was_made_again_is_nan_if_it_was_the_second_time(tmp_path):
    (tmp_path / "a.log").write_text("\n".join([line(1, 9.0), line(2, 8.0), line(2, math.nan)]))
    assert math.isnan(read(str(tmp_path / "a.log")).series("loss")[2])


def test_megatrons_source_prints_these_lines():
    if cpu.needed():
        cpu.install()
    try:
        from megatron.training import training

        source = inspect.getsource(training.training_log)
        assert "if avg >= 0.0:\n" in source and "max(1, total_loss_dict[advanced_iters_key])" in source
        assert "log_string += ' number of skipped iterations: {:3d} |'" in source
        assert "should_reset = not is_first_iteration" in source
        assert "f' validation{suffix} loss at {prefix} | '" in inspect.getsource(training.evaluate_and_print_results)
        assert "print_datetime('before the start of training step')" in inspect.getsource(training)
        assert "'{} validation{}'.format(key, suffix)" in inspect.getsource(training.evaluate_and_print_results)
        source = inspect.getsource(training.pretrain)
        assert 0 < source.index("{iteration} on validation set'") < source.index("{iteration} on test set'")
    finally:
        cpu.uninstall()


def test_the_test_sets_loss_is_not_the_validation_loss(tmp_path):
    evaluated = " validation loss at iteration {} | lm loss value: {:.6E} | lm loss PPL: 1.000000E+01 | "
    lines = [evaluated.format("2", 5.0), evaluated.format("4", 4.0), evaluated.format("4 on validation set", 4.5)]
    (tmp_path / "a.log").write_text("\n".join([line(4, 3.0), *lines, evaluated.format("4 on test set", 7.0)]))
    run = read(str(tmp_path / "a.log"))
    assert run.series("validation_loss") == {2: 5.0, 4: 4.5} and run.series("test_loss") == {4: 7.0}
    board = read(tensorboard(tmp_path / "c", evaluations=[(2, 5.0), (4, 4.5), (4, 7.0)]))
    assert board.series("validation_loss") == {2: 5.0, 4: 4.5}
    (tmp_path / "b.log").write_text("\n".join([line(4, 3.0), evaluated.format("4", math.nan)]))
    assert math.isnan(read(str(tmp_path / "b.log")).series("validation_loss")[4])


SETS = {2: (5.0, 6.0), 4: (4.5, 5.5)}  # a step's validation losses


def test_each_validation_set_is_compared(tmp_path, capsys):
    """--multiple-validation-sets, with and without --validation-set-names; the test sets' losses stay apart."""
    evaluated = " validation-{} loss at iteration {} | lm loss value: {:.6E} | lm loss PPL: 1.000000E+01 | "
    for first, second in (("web", "my-code"), ("0", "1")):
        named = [(name, step, loss) for step, (a, b) in SETS.items() for name, loss in ((first, a), (second, b))]
        lines = [evaluated.format(*one) for one in named] + [evaluated.format("web", "4 on test set", 7.0)]
        (tmp_path / "a.log").write_text("\n".join([line(4, 3.0), *lines]))
        records = [{"step": 4, "loss": 3.0}] + [
            {"step": step, f"validation_loss_{name.replace('-', '_')}": loss} for name, step, loss in named
        ]
        (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
        board = tensorboard(tmp_path / f"board-{first}", {4: 3.0}, [(step, loss, name) for name, step, loss in named])
        runs = [str(tmp_path / "a.log"), str(tmp_path / "b.jsonl"), board]
        for run in map(read, runs):
            assert run.series(f"validation_loss_{first}") == {2: 5.0, 4: 4.5}
            assert run.series(f"validation_loss_{second.replace('-', '_')}") == {2: 6.0, 4: 5.5}
            assert run.validations() == sorted(f"validation_loss_{n.replace('-', '_')}" for n in (first, second))
        code, text = call(capsys, *runs, "--assert-equal")
        assert code == 0 and re.search(rf"validation {first} +4\.500000 +4\.500000 +4\.500000", text)
        assert call(capsys, runs[1], "--export-result", str(tmp_path / "kept"))[0] == 0
        records[-1][f"validation_loss_{second.replace('-', '_')}"] = 5.6
        (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
        for other in (["--import-result", str(tmp_path / "kept")], runs[:1]):
            code, text = call(capsys, runs[1], *other, "--assert-equal")
            assert code == 1 and "differs at 1 steps, first at step 4" in text


LONG = {step: 9 - step / 8 + 1e-3 * (step * 7 % 5) for step in range(1, 13)}


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("last", [3, 4, 6, 7])
@pytest.mark.parametrize("form", ["apart", "one log", "grep", "metrics"])
def test_a_bit_exact_resume_is_equal(tmp_path, capsys, interval, last, form):
    """A run of 12 steps beside one that was resumed after step `last`: its own lines only, or appended to the first's.
    """
    after = {step: loss for step, loss in LONG.items() if step > last}
    if form == "metrics":
        lines = {}
        for name, steps in (("whole", LONG), ("resumed", after)):
            means, since = {}, []
            for step, loss in steps.items():
                since.append(loss)
                if step % interval == 0 or step == min(steps):
                    means[step], since = sum(since) / len(since), []
            lines[name] = metrics(tmp_path / f"{name}.jsonl", means)
        whole, resumed = lines.values()
    else:
        whole = log(tmp_path / "whole.log", LONG, interval=interval)
        resumed = log(tmp_path / "resumed.log", after, interval=interval, cut=2 * (form == "grep"))
    if form == "one log":
        before = log(tmp_path / "before.log", {s: loss for s, loss in LONG.items() if s <= last}, interval=interval)
        both = Path(before).read_text() + Path(resumed).read_text()
        Path(resumed).write_text(both)
    span = [] if form == "one log" else ["--steps", f"{last + interval - last % interval}:"]
    code, text = call(capsys, whole, resumed, "--assert-equal", *span)
    assert code == 0 and text.endswith("equal\n"), text
    kept = [line for line in text.splitlines() if "not compared" in line]
    assert len(kept) <= 1 and all(re.search(r"at step (\d+(, \d+){0,2}) not", line) for line in kept)
    # any other difference is reported
    other = {**LONG, 12: LONG[12] + 1e-3}
    changed = log(tmp_path / "changed.log", other, interval=interval)
    code, text = call(capsys, changed, resumed, "--assert-equal", *span)
    assert code == 1 and "loss differs at 1 steps, first at step 12" in text


def test_lost_lines_are_missing_steps(tmp_path, capsys):
    whole, lossy = log(tmp_path / "a.log", LONG), tmp_path / "b.log"
    lossy.write_text(re.sub(r".*iteration +[78]/.*\n", "", Path(whole).read_text()))
    code, text = call(capsys, whole, str(lossy), "--assert-equal")
    assert code == 1 and "loss at steps 7, 8 in one of the two only" in text


def test_a_line_warns_of_times_on_a_cpu(tmp_path, capsys):
    note = "trained on a CPU, which emulates FP8; its times do not tell how fast a GPU is"
    gpu, cpu_run = metrics(tmp_path / "gpu.jsonl"), metrics(tmp_path / "cpu.jsonl", device="cpu")
    for words in ("[fp8] no CUDA device: --distributed-backend nccl -> gloo", "  distributed_backend ....... gloo"):
        assert f"b.log: {note}" in call(capsys, gpu, log(tmp_path / "b.log", head=words))[1]
    assert f"cpu.jsonl: {note}" in call(capsys, gpu, cpu_run)[1]
    assert note not in call(capsys, gpu, log(tmp_path / "b.log", head="  distributed_backend ....... nccl"))[1]


def test_runs_of_one_name_are_told_apart(tmp_path, capsys):
    (tmp_path / "x").mkdir()
    one, other = metrics(tmp_path / "a.jsonl"), metrics(tmp_path / "x/a.jsonl")
    head = call(capsys, one, other, "--format", "csv")[1].splitlines()
    assert [line.split(",")[0] for line in head[1:]] == [one, other]
    again = call(capsys, one, one, "--format", "csv")[1].splitlines()
    assert [line.split(",")[0] for line in again[1:]] == ["a.jsonl", "a.jsonl (2)"]
    with pytest.raises(UserError, match="A: two runs have this name; give each its own, as NAME="):
        call(capsys, f"A={one}", f"A={other}")


def test_the_last_digit_counts(tmp_path, capsys):
    one = metrics(tmp_path / "a.jsonl")
    other = metrics(tmp_path / "b.jsonl", {**LOSSES, 3: LOSSES[3] + 1e-14, 4: 9.1051})
    assert call(capsys, one, one, "--assert-equal")[0] == 0
    code, text = call(capsys, one, other, "--assert-equal")
    assert code == 1
    assert f"b.jsonl: loss differs at 2 steps, first at step 3: 9.9574444 and {LOSSES[3] + 1e-14!r}" in text
    assert call(capsys, one, other, "--assert-equal", "--steps", ":2")[0] == 0
    rough = log(tmp_path / "b.log", {**LOSSES, 3: LOSSES[3] + 1e-14})
    assert call(capsys, one, rough, "--assert-equal")[0] == 0  # a log does not have this digit
    assert call(capsys, one, log(tmp_path / "c.log", {**LOSSES, 4: 9.10501}), "--assert-equal")[0] == 1


def test_norms_and_missing_steps_count_too(tmp_path, capsys):
    one = metrics(tmp_path / "a.jsonl")
    code, text = call(capsys, one, metrics(tmp_path / "b.jsonl", norm=1.6), "--assert-equal")
    assert code == 1 and "grad_norm differs at 4 steps" in text
    short = metrics(tmp_path / "c.jsonl", {step: LOSSES[step] for step in (1, 2)})
    code, text = call(capsys, one, short, "--assert-equal")
    assert code == 1 and "loss at steps 3, 4 in one of the two only" in text
    apart = metrics(tmp_path / "d.jsonl", {7: 1.0})
    code, text = call(capsys, one, apart)
    assert code == 1 and "d.jsonl: no step in common with a.jsonl" in text


def test_means_are_not_compared_with_single_steps(tmp_path, capsys):
    """--log-interval 2 logs the first step, as always, and then every second one."""
    every = {step: 9 - step / 8 for step in range(1, 13)}
    means = {1: every[1]} | {step: (every[step - 1] + every[step]) / 2 for step in range(2, 13, 2)}
    single, seldom = tensorboard(tmp_path / "c", every), tensorboard(tmp_path / "d", {4: every[4], 8: every[8]})
    for rough in (log(tmp_path / "b.log", means), metrics(tmp_path / "b.jsonl", means)):
        name = rough.rpartition("/")[2]
        code, text = call(capsys, rough, single)
        assert code == 0 and f"\nc: its losses are of single steps, {name}'s are means of 2 steps\n" in text
        code, text = call(capsys, single, rough, "--format", "csv")
        assert code == 0 and text.endswith(f"\n# {name}: its losses are means of 2 steps, c's are of single steps\n")
        for verdict in (["--assert-equal"], ["--tolerance", "1"]):
            for other in (single, seldom, metrics(tmp_path / "a.jsonl", every)):
                with pytest.raises(UserError, match=r"of single steps, .*; log all at one --log-interval"):
                    call(capsys, rough, other, *verdict)
            assert call(capsys, rough, rough, *verdict)[0] == 0
    whole = metrics(tmp_path / "a.jsonl", every)
    for one, other in ((whole, single), (whole, seldom), (single, seldom)):
        code, text = call(capsys, one, other, "--tolerance", "1e-6")
        assert code == 0 and text.startswith(call(capsys, one, other)[1]) and "within --tolerance" in text
    assert call(capsys, seldom, "--export-result", str(tmp_path / "kept"))[0] == 0  # the file does not say the interval
    assert call(capsys, seldom, "--import-result", str(tmp_path / "kept"), "--assert-equal")[0] == 0


def test_tolerance(tmp_path, capsys):
    one, other = metrics(tmp_path / "a.jsonl"), metrics(tmp_path / "b.jsonl", {**LOSSES, 4: 9.105 * 1.001})
    code, text = call(capsys, one, other, "--tolerance", "2e-3")
    assert code == 0 and "losses differ by 1.000e-03, within --tolerance 0.002" in text
    code, text = call(capsys, one, other, "--tolerance", "5e-4")
    assert code == 1 and "losses differ by 1.000e-03, more than --tolerance 0.0005" in text
    bad = metrics(tmp_path / "c.jsonl", {**LOSSES, 4: float("nan")})
    assert call(capsys, one, bad, "--tolerance", "1")[0] == 1
    assert call(capsys, bad, bad, "--assert-equal")[0] == 0


def test_a_verdict_is_a_comment_of_csv(tmp_path, capsys):
    one = metrics(tmp_path / "a.jsonl")
    _, text = call(capsys, one, one, "--assert-equal", "--format", "csv")
    assert text.splitlines()[-1] == "# equal"


@pytest.mark.parametrize("name", ["expected.jsonl", "expected.txt", "expected"])
def test_a_result_is_exported_and_compared_with_later(tmp_path, capsys, name):
    one, file = metrics(tmp_path / "a.jsonl"), str(tmp_path / name)
    assert call(capsys, one, "--export-result", file)[0] == 0
    assert call(capsys, one, "--import-result", file, "--assert-equal") [0] == 0
    other = metrics(tmp_path / "b.jsonl", {**LOSSES, 2: 1.0})
    assert call(capsys, other, "--import-result", file, "--assert-equal")[0] == 1


def test_names_and_a_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    one, file = metrics(tmp_path / "a.jsonl"), tmp_path / "loss.svg"
    _, text = call(capsys, f"O0={one}", f"O3={one}", "--figure", str(file))
    lines = text.splitlines()
    assert lines[0].split() == ["run", "O0", "O3"] and "x faster" in lines[-1] and lines[-1].endswith("1.000")
    assert max(map(len, lines)) <= 100  # transposed, and without columns that no run has
    assert not any(line.startswith("validation") for line in lines)
    assert file.stat().st_size > 1000


def test_the_figure_has_the_levels_colours_a_title_and_a_zero_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = [metrics(tmp_path / f"{name}.jsonl", {s: loss + i for s, loss in LOSSES.items()})
            for i, name in enumerate(("O0", "O3", "other"))]  # fmt: skip
    call(capsys, *runs, "--figure", str(tmp_path / "loss.svg"))
    svg = (tmp_path / "loss.svg").read_text()
    assert "Training loss less that of O0.jsonl" in svg
    # in both panels and the legend; O0 also as the lower panel's zero line
    strokes = Counter(re.findall(r"stroke: (#[0-9a-f]{6}); stroke-(?:width: 1;|linecap)", svg))
    used = [looks(["O0", "O3", "other"])[name]["color"] for name in ("O0", "O3", "other")]
    assert used[0] == COLOURS["O0"] and used[1] == COLOURS["O3"]
    assert all(svg.count(f"stroke: {colour}") >= 3 for colour in used), strokes
    assert "#1f77b4" not in svg and "#ff7f0e" not in svg  # matplotlib's default colours, which mean nothing here


def test_the_half_written_last_line_of_a_killed_run_is_left_out(tmp_path, capsys):
    whole = tmp_path / "a.jsonl"
    metrics(whole)
    killed = tmp_path / "killed.jsonl"
    killed.write_text(whole.read_text() + '{"step": 99, "lo')
    assert call(capsys, str(whole), str(killed), "--assert-equal")[0] == 0


@pytest.mark.parametrize(
    "argv, message",
    [
        (("no.jsonl",), "no.jsonl: no such run"),
        (("",), "'': no such run"),
        (("EMPTY",), "no step with a loss"),
        (("BROKEN",), "line 1 is not the JSON object of a step; give a file that MEGATRON"),
        (("HUGE",), "line 1 is not the JSON object of a step"),
        (("ENDLESS",), "line 1 is not the JSON object of a step"),
        (("LONG",), "there is no step with a loss in it"),
        (("WORD",), "line 1 is not the JSON object of a step; give a file that MEGATRON"),
        (("BYTES",), "line 1 is not the JSON object of a step; give a file that MEGATRON"),
        (("EVENTS",), "damaged, or not a file of TensorBoard"),
        (("ONE", "--assert-equal"), "there is one run; give another"),
        (("ONE", "ONE", "--steps", "1-2"), "--steps 1-2: use A:B"),
        (("ONE", "ONE", "--steps", "9:"), "--steps 9:: a.jsonl has no loss there"),
        (("ONE", "ONE", "--tolerance", "-1"), "--tolerance -1.0: use 0 or more"),
        (("ONE", "--export-result", "/no/such/file"), "--export-result /no/such/file: No such file"),
        (("ONE", "ONE", "--figure", "loss"), "--figure loss: the name has no ending; name a .svg, .png or .pdf"),
    ],
)
def test_mistakes_are_said_in_one_line(tmp_path, capsys, argv, message):
    (tmp_path / "empty.log").write_text("nothing here\n")
    (tmp_path / "broken.jsonl").write_text("nothing here\n")
    (tmp_path / "word.jsonl").write_text('{"step": "one", "loss": 3.0}\n')
    (tmp_path / "huge.jsonl").write_text(f'{{"step": 1, "loss": 1{"0" * 400}}}\n')
    (tmp_path / "endless.jsonl").write_text('{"step": 1e999, "loss": 1.0}\n')
    (tmp_path / "long.log").write_text(line(4, 3.0).replace("4/", f"{'4' * 5000}/"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\n")
    (tmp_path / "events.out.tfevents.1").write_bytes(b"\x05".ljust(12, b"\0") + b"\xff" * 5 + bytes(4))
    files = {"ONE": metrics(tmp_path / "a.jsonl"), "EMPTY": str(tmp_path / "empty.log"),
             "HUGE": str(tmp_path / "huge.jsonl"), "ENDLESS": str(tmp_path / "endless.jsonl"),
             "LONG": str(tmp_path / "long.log"),
             "BROKEN": str(tmp_path / "broken.jsonl"), "WORD": str(tmp_path / "word.jsonl"),
             "BYTES": str(tmp_path / "bytes.jsonl"), "EVENTS": str(tmp_path / "events.out.tfevents.1")}  # fmt: skip
    with pytest.raises(UserError, match=re.escape(message)) as error:
        call(capsys, *(files.get(word, word) for word in argv))
    assert "\n" not in str(error.value) and not capsys.readouterr().out


def test_one_name_for_two_runs_is_refused(tmp_path):
    path = metrics(tmp_path / "x.jsonl")
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    with pytest.raises(UserError, match=r"^A: two runs have this name; give each its own, as NAME=x.jsonl$"):
        compare.run(parser.parse_args([f"A={path}", f"A={path}"]))
    assert compare.run(parser.parse_args([path, path])) == 0
    with pytest.raises(UserError, match=r"^--steps 9{20}:: use A:B"):
        compare.run(parser.parse_args([path, "--steps", "9" * 20 + ":"]))
