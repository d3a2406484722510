"""The file of a run's numbers: who writes it, how it is read, and how Megatron's log gets into it."""

import math
from types import SimpleNamespace

import pytest
import torch
from commands import error_of

from megatron_fp8 import cpu
from megatron_fp8.metrics import VARIABLE, Reader, begin, facts, record


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run.jsonl"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "run.jsonl"


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in (None, ""):
        monkeypatch.delenv(VARIABLE, raising=False) if value is None else monkeypatch.setenv(VARIABLE, value)
        assert not begin()
        record({"loss": 1.0}, 3)
    assert not list(tmp_path.iterdir())


def test_lines_are_read_as_they_are_written(file):
    reader = Reader(file)
    assert reader.read() == [] and begin() and reader.read() == []
    record({"loss": 1 / 3, "update-norm": 5e-324, "mtp_1 loss": math.inf}, 7)
    record({"linears_in_bf16": ["a.b"]})
    assert reader.read() == [(7, {"loss": 1 / 3, "update_norm": 5e-324, "mtp_1_loss": math.inf})]
    assert facts(file) == {"linears_in_bf16": ["a.b"]} and reader.read() == []
    with file.open("a") as half:
        half.write('{"step": 8, "lo')
        half.flush()
        assert reader.read() == []
        half.write('ss": NaN}\n{"step": 9')
    ((step, values),) = reader.read()
    assert step == 8 and math.isnan(values["loss"])
    begin()
    assert reader.read() == [] and file.read_text().count("\n") == 3  # the content stays, as for a resumed run


def test_the_last_rank_writes(file, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in "012":
        monkeypatch.setenv("RANK", rank)
        assert begin() and file.exists() == (rank == "2")
        record({"rank": int(rank)}, 1)
    assert Reader(file).read() == [(1, {"rank": 2})]


def test_a_file_that_cannot_be_made_is_one_line(file, monkeypatch):
    for name, reason in (("no/run.jsonl", "No such file or directory"), (".", "Is a directory")):
        monkeypatch.setenv(VARIABLE, name)
        assert error_of(begin) == f"{VARIABLE} {name}: {reason}; name a file in an existing folder"


@pytest.fixture
def megatron(file, monkeypatch):
    """Stand-ins that behave like the functions of Megatron that monitor/training_log.py wraps."""
    if cpu.needed():
        cpu.install()
    from megatron_fp8.monitor import training_log as logged

    args = SimpleNamespace(log_interval=1, multiple_validation_sets=False, validation_set_names=None)
    timer = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(logged, "get_args", lambda: args)
    monkeypatch.setattr(logged, "get_timers", lambda: lambda name: SimpleNamespace(active_time=lambda: timer.seconds))
    counts = ("advanced iterations", "skipped iterations", "nan iterations")
    printed = []

    def training_log(
        loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter, grad_norm,
        params_norm, num_zeros_in_grad, max_attention_logit, pg_collection=None, is_first_iteration=False,
    ):  # fmt: skip
        for name, more in zip(counts, (not skipped_iter, skipped_iter, 0), strict=True):
            total_loss_dict[name] = total_loss_dict.get(name, 0) + more
        for name, loss in loss_dict.items() if not skipped_iter else ():
            total_loss_dict[name] = total_loss_dict.get(name, torch.zeros(1)) + loss
        if "load_balancing_loss" in total_loss_dict:
            total_loss_dict["load_balancing_loss"] += torch.tensor(2.0)
        else:
            total_loss_dict["load_balancing_loss"] = torch.tensor(2.0)
        if iteration % args.log_interval == 0 or is_first_iteration:
            printed.append({n: float(x) for n, x in total_loss_dict.items()})
            for name in total_loss_dict if not is_first_iteration else ():
                total_loss_dict[name] = 0 if name in counts else torch.zeros(1)
        return "report memory"

    around = logged.Logged()
    log, totals = around.training_log(training_log), {}

    def step(iteration, loss, skipped=0, norm=0.5, first=False, **others):
        timer.seconds += 0.25
        losses = {"lm loss": torch.tensor([loss]), **{n: torch.tensor(x) for n, x in others.items()}}
        given = (1e-3, iteration, 1.0, True, skipped, norm, None, 7 if norm else None, 0)
        assert log(losses, totals, *given, is_first_iteration=first) == "report memory"

    yield SimpleNamespace(step=step, args=args, printed=printed, around=around, read=Reader(file).read, totals=totals)
    cpu.uninstall()


def test_an_iteration(megatron):
    loss = 5.0161709785461426  # in FP32; Megatron prints 5.016171E+00
    megatron.step(1, loss, first=True, auxiliary=0.5)
    assert megatron.read() == [(1, {
        "loss": float(torch.tensor(loss)), "auxiliary": 0.5, "load_balancing_loss": 2.0, "learning_rate": 1e-3,
        "grad_norm": 0.5, "loss_scale": 1.0, "num_zeros": 7.0, "number_of_skipped_iterations": 0,
        "elapsed_time_per_iteration_ms": 250.0,
    })]  # fmt: skip


def test_each_start_records_its_device(megatron, file):
    megatron.step(1, 5.0, first=True)
    megatron.step(2, 4.0)
    assert facts(file) == {"device": "cpu"} and file.read_text().count("device") == 1


def test_the_second_loss_is_its_own(megatron):
    """Megatron's is the mean of two, and so are the losses that only its sums have."""
    megatron.step(1, 5.0, first=True)
    megatron.step(2, 4.0, norm=torch.tensor(3.0))
    megatron.step(3, 3.0)
    assert [values["loss"] for _, values in megatron.read()] == [5, 4, 3]
    assert megatron.printed[1]["lm loss"] == 9 and megatron.printed[1]["load_balancing_loss"] == 4
    assert megatron.totals["lm loss"] == 0 and megatron.totals["advanced iterations"] == 0  # as without the wrapper


def test_an_interval_has_the_mean_of_the_steps_not_skipped(megatron):
    megatron.args.log_interval = 3
    for iteration, loss, skipped in ((1, 9.0, 0), (2, 8.0, 1), (3, 6.0, 0), (4, 5.0, 0), (5, 4.0, 0), (6, math.inf, 1)):
        megatron.step(iteration, loss, skipped, first=iteration == 1)
    for iteration in (7, 8, 9):
        megatron.step(iteration, 3.0, skipped=1, norm=None)
    lines = megatron.read()
    assert [step for step, _ in lines] == [1, 3, 6, 9]
    assert [values["loss"] for _, values in lines[:3]] == [9, 6, 4.5] and math.isnan(lines[3][1]["loss"])
    assert [values["number_of_skipped_iterations"] for _, values in lines] == [0, 1, 1, 3]
    assert all(values["elapsed_time_per_iteration_ms"] == 250 for _, values in lines)
    assert "grad_norm" not in lines[3][1] and "num_zeros" not in lines[3][1]


def test_evaluations(megatron):
    around, results = megatron.around, []
    evaluate = around.evaluate(lambda *args: results.pop(0))

    def stock(prefix, forward_step_func, data_iterator, model, iteration, config):
        for _ in range(len(results)):
            evaluate(config)

    run = around.evaluate_and_print_results(stock)

    def evaluated(prefix, *losses):
        for loss in losses:
            results.append((None if loss is None else {"lm loss": torch.tensor(loss)}, None, loss is None))
        run(prefix, None, None, None, 10, None)
        return megatron.read()

    assert evaluated("iteration 10", 2.5) == [(10, {"validation_loss": 2.5})]
    assert evaluated("iteration 10 on validation set", math.inf) == [(10, {"validation_loss": math.inf})]
    assert evaluated("iteration 10 on test set", 1.5) == [(10, {"test_loss": 1.5})]
    assert evaluated("iteration 10", None) == []  # Megatron's time limit had passed
    megatron.args.multiple_validation_sets = True
    numbered = [(10, {"validation_loss_0": 1.0}), (10, {"validation_loss_1": 2.0})]
    assert evaluated("iteration 10", 1.0, 2.0) == numbered
    megatron.args.validation_set_names = ["code", "news"]
    assert evaluated("iteration 10", 1.0, 2.0)[1] == (10, {"validation_loss_news": 2.0})


def test_the_signatures_are_megatrons():
    """For arguments read by name or position; the plugin checks the others when it wraps."""
    import inspect

    if cpu.needed():
        cpu.install()
    try:
        from megatron.training import training

        assert "is_first_iteration" in inspect.signature(training.training_log).parameters
        source = inspect.getsource(training.training_log)
        for name in ("advanced iterations", "skipped iterations", "nan iterations"):
            assert f"'{name}'" in source
        assert "on test set" in inspect.getsource(training.pretrain)
    finally:
        cpu.uninstall()


