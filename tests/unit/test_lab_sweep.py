"""Sweeps: what they run and print, and that the way in which one is ended does not change its report."""

import argparse
import os
import re
import resource
import signal
import stat
import subprocess
import sys

import psutil
import pytest
from lab_runs import LAB, PLAN, ROOT, done, lab, reports, wait_for, write

from megatron_fp8 import processes
from megatron_fp8.cli import main
from megatron_fp8.tools.lab.sweep import main as sweep
from megatron_fp8.tools.lab.sweep.orphans import MARK
from megatron_fp8.tools.lab.sweep.plan_file import read_plan
from megatron_fp8.tools.lab.sweep.rows import DONE, FAILED, NOT_FINITE, WAITING
from megatron_fp8.tools.lab.sweep.store import Store


def states(folder):
    store = Store(folder / "sweep.sqlite")
    rows = store.runs()
    store.close()
    return rows


def begun(folder) -> list[int]:
    """The processes of the runs that have begun."""
    file = folder / "begun"
    return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []


def families(folder) -> list[psutil.Process]:
    """The live training processes of the runs that have begun."""
    found = []
    for pid in begun(folder):
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and "train.py" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def waiting(folder) -> int:
    """The number of runs that wait at the gate."""
    file = folder / "gate.waiting"
    return len(file.read_text().splitlines()) if file.exists() else 0


SWEEP = ("sweep", "plan.yaml", "--store", "sweep.sqlite")
SLOW = PLAN.replace("train.py", "train.py --begun begun --sleep 0.01").replace("steps: 100", "steps: 60")


def test_a_sweep_runs_everything_and_again_nothing(tmp_path):
    write(tmp_path, SLOW.replace("--sleep 0.01", ""))
    output = done(tmp_path, *SWEEP, "--jobs", "2")
    assert output.splitlines()[-1] == "6 done" and output.count(": done") == 6
    assert len(begun(tmp_path)) == 6
    for row in states(tmp_path):
        assert (row.state, row.attempt, row.exit_code) == (DONE, 1, 0)
    store = Store(tmp_path / "sweep.sqlite")
    series = store.series(1)
    store.close()
    assert series["loss"][0].tolist() == list(range(1, 61))
    assert series["sharpness"][0].tolist() == list(range(5, 61, 5))
    assert series["validation_loss"][0].tolist() == [60]
    logs = sorted((tmp_path / "sweep.runs").glob("*/log.txt"))
    assert len(logs) == 6 and logs[0].parent.name == "0001-BF16-0.1-data-1"
    assert done(tmp_path, *SWEEP) == "6 done\n"
    assert len(begun(tmp_path)) == 6


def test_a_sweep_takes_what_fits_into_its_minutes(tmp_path):
    """A run takes 0.6 s and more. The first is stopped in its middle and waits again; then none begins that would not
    end in time."""
    write(tmp_path, SLOW)
    output = done(tmp_path, *SWEEP, "--jobs", "1", "--minutes", "0.005")
    assert "stopping 1 runs; the same command continues" in output and "6 waiting" in output
    assert output.splitlines()[-1] == "the time is spent: the same command goes on"
    output = done(tmp_path, *SWEEP, "--jobs", "1", "--minutes", "0.05")
    ended = output.count(": done")
    assert ended < 6 and f"{6 - ended} waiting" in output and "spent" in output
    assert done(tmp_path, *SWEEP, "--minutes", "60").splitlines()[-1] == "6 done"


def test_an_arm_has_a_sweep_of_its_own(tmp_path):
    """Added to a plan that has run, and for an environment of its own: the others stay as they are."""
    write(tmp_path, SLOW)
    assert done(tmp_path, *SWEEP, "--arms", "BF16", "--jobs", "2").splitlines()[-1] == "3 done"
    write(tmp_path, f"{SLOW}  with blank: --gap 0.1\n")
    output = done(tmp_path, *SWEEP, "--jobs", "2", "--arms", "with blank", "BF16")
    assert output.count("with blank, seed") == 3 and output.splitlines()[-1] == "6 done"
    rows = states(tmp_path)
    assert [row.attempt for row in rows if row.arm == "BF16"] == [1, 1, 1]
    assert {row.state for row in rows if row.arm == "E8M3"} == {WAITING} and len(rows) == 9
    script = done(tmp_path, *SWEEP, "--slurm", "print", "--arms", "E8M3", "with blank")
    assert "#SBATCH --array=0-2" in script and script.endswith(" --jobs 1 --arms E8M3 'with blank'\n")
    assert done(tmp_path, *SWEEP).splitlines()[-1] == "9 done"


def test_flags_that_change_no_number_come_and_go(tmp_path):
    """A run gets them when it starts. They are no part of it: those that are done stay."""
    write(tmp_path, SLOW)
    assert done(tmp_path, *SWEEP, "--arms", "BF16").splitlines()[-1] == "3 done"
    write(tmp_path, f"{SLOW}faster:\n  BF16: --begun 'not again'\n  E8M3: --begun {{run}}/own\n")
    assert done(tmp_path, *SWEEP).splitlines()[-1] == "6 done"
    rows = states(tmp_path)
    assert len(begun(tmp_path)) == 3 and not (tmp_path / "not again").exists()
    assert len(list((tmp_path / "sweep.runs").glob("*-E8M3-*/own"))) == 3
    assert not any("own" in word for row in rows for word in row.command)
    assert {row.arm for row in rows if row.code.endswith(" --begun {run}/own")} == {"E8M3"}
    assert len({row.code for row in rows}) == 2
    write(tmp_path, SLOW)
    assert done(tmp_path, *SWEEP) == "6 done\n"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, str]:
    """The report of the sweep SLOW."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write(folder, SLOW.replace("--begun", "--gate gate --begun"))  # the same commands as the interrupted ones
    (folder / "gate").touch()
    done(folder, *SWEEP, "--jobs", "3")
    return reports(folder)


def function_of_the_curves(report: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in report.items() if not name.startswith("runs.")}


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_sweep_that_is_ended_in_the_middle_makes_the_same_report(tmp_path, number, undisturbed):
    cut = tmp_path
    write(cut, SLOW.replace("--begun", "--gate gate --begun"))
    process = lab(cut, *SWEEP, "--jobs", "2", start_new_session=True)
    wait_for(lambda: waiting(cut) == 2)
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=250)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert "running" in {row.state for row in states(cut)}
    else:
        assert process.returncode == 130 and "stopping 2 runs" in output
        assert families(cut) == []
        rows = states(cut)
        assert {row.state for row in rows} == {WAITING, DONE}
        store = Store(cut / "sweep.sqlite")
        assert all(not store.series(row.id) for row in rows if row.state == WAITING)
        store.close()
    was_done = {row.id for row in states(cut) if row.state == DONE}
    assert 0 < len(was_done) < 6
    (cut / "gate").touch()
    assert done(cut, *SWEEP, "--jobs", "1").endswith("6 done\n")
    assert families(cut) == []
    assert len(begun(cut)) == 8  # the two interrupted runs started over; the finished ones did not
    assert {row.attempt for row in states(cut) if row.id in was_done} == {1}
    again = function_of_the_curves(reports(cut))
    assert again == function_of_the_curves(undisturbed) and {"report.html", "report.md"} <= set(again)


def test_under_nohup_a_sweep_outlives_its_terminal(tmp_path):
    write(tmp_path, SLOW.replace("--begun", "--gate gate --begun"))
    process = lab(tmp_path, *SWEEP, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for(lambda: waiting(tmp_path))
    process.send_signal(signal.SIGHUP)
    (tmp_path / "gate").touch()
    assert process.communicate(timeout=250)[0].endswith("6 done\n") and process.returncode == 0


def test_a_reader_that_goes_away_is_no_fault_of_the_folder(tmp_path):
    """As `lab sweep ... | head -1`. What was running waits again."""
    write(tmp_path, SLOW)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command, pipe = [sys.executable, "-c", LAB, *SWEEP, "--jobs", "1"], subprocess.PIPE
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)
    assert ": done" in process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=250) and "mend" not in said and "BrokenPipeError" in said  # cli.main passes over it
    assert {row.state for row in states(tmp_path)} == {WAITING, DONE}


def test_what_a_killed_sweep_left_running_is_ended(tmp_path):
    write(tmp_path, PLAN.replace("train.py", "train.py --begun begun --gate gate").replace("seeds: 3", "seeds: [2]"))
    process = lab(tmp_path, *SWEEP, "--jobs", "2")
    wait_for(lambda: waiting(tmp_path) == 2)
    process.kill()
    process.communicate()
    assert len(families(tmp_path)) == 2  # they print nothing, so they do not notice
    left = families(tmp_path)
    again = lab(tmp_path, *SWEEP, "--jobs", "1")
    try:
        wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left))
        wait_for(lambda: waiting(tmp_path) == 3)
    finally:
        again.send_signal(signal.SIGINT)
        again.communicate(timeout=250)
    assert families(tmp_path) == []


def test_a_script_that_does_not_load_the_plugin_is_told(tmp_path):
    write(tmp_path, "{command: train.py --lr 0.1, steps: 3, seeds: 1, arms: {BF16: ''}}")
    (tmp_path / "train.py").write_text("for i in (1, 2, 3): print(f' iteration {i}/ 3 | lm loss: 5.0E+00 |')")
    output = done(tmp_path, *SWEEP, code=1)
    said = "FAILED: the command wrote no numbers: it does not load megatron_fp8; begin it with pretrain_gpt_fp8.py, or"
    assert said in output and [row.state for row in states(tmp_path)] == [FAILED]


def test_ends_of_runs(tmp_path):
    arms = "well: '', nan: --nan-at 7, failed: --fail-at 9 --log-interval x, early: --stop-at 20, mute: --stop-at 1"
    write(tmp_path, f"{{command: train.py --lr 0.1, steps: 30, seeds: 1, arms: {{{arms}}}}}")
    output = done(tmp_path, *SWEEP, "--jobs", "6", code=1)
    rows = {row.arm: row for row in states(tmp_path)}
    assert {arm: row.state for arm, row in rows.items()} == {
        "well": DONE,
        "nan": NOT_FINITE,
        **dict.fromkeys(("failed", "early", "mute"), FAILED),
    }
    assert rows["failed"].error.splitlines()[0] == "exit code 1, at step 8 of 30"
    assert rows["failed"].error.splitlines()[-1] == "the cause" and "step 8\n" in rows["failed"].error
    assert rows["early"].error.startswith("ended early, at step 19 of 30")
    assert rows["mute"].error.startswith("ended early, at step 0 of 30")
    assert "found NaN" in rows["nan"].error and rows["nan"].exit_code == 1
    assert "1 done, 3 failed, 1 not finite" in output and "failed, seed 1, learning rate 0.1, data: FAILED" in output
    # Repair the cause of the failures.
    text = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(re.sub(r"args.(fail|stop)_at", "-1", text))
    assert "3 failed" in done(tmp_path, *SWEEP, code=1)
    assert "4 done, 1 not finite" in done(tmp_path, *SWEEP, "--retry-failed")


def test_a_run_that_hangs_is_killed_and_has_failed(tmp_path):
    write(tmp_path, "{command: train.py --lr 0.1 --hang-at 5, steps: 30, seeds: 1, timeout: 3, arms: {a: ''}}")
    assert "1 failed" in done(tmp_path, *SWEEP, code=1)
    (row,) = states(tmp_path)
    assert row.state == FAILED and row.exit_code is None
    assert re.match("killed after 3 s, at step [0-4] of 30", row.error)  # a busy machine gets less far


def test_the_end_of_a_run_that_says_nothing_more_is_not_slept_over(tmp_path, monkeypatch):
    """Each run's end used to cost a second: waiting for output of no run, and then sleeping."""
    write(tmp_path, "{command: train.py --lr 0.1, steps: 3, seeds: 1, arms: {a: ''}}")
    script = tmp_path / "train.py"
    script.write_text(script.read_text() + "os.close(1)\nos.close(2)\ntime.sleep(0.3)\n")
    watched = []

    def select(reading, *others):
        watched.append(len(reading))
        return select_(reading, *others)

    select_ = sweep.select.select
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(processes, "LAUNCHER", (sys.executable,))
    monkeypatch.setattr(sweep.select, "select", select)
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    assert sweep.run(parser.parse_args([*SWEEP[1:], "--jobs", "1"])) == 0
    assert watched and 0 not in watched and [row.state for row in states(tmp_path)] == [DONE]


@pytest.mark.parametrize("full", ["store", "log"])
def test_a_full_disc_is_one_line_and_leaves_no_run_behind(tmp_path, full):
    """No file may grow beyond a limit, as on a full disk: the store with long curves, the log with many words."""
    words, steps = {"store": (1, 3000), "log": (100_000, 60)}[full]
    write(tmp_path, SLOW.replace("steps: 60", f"steps: {steps}"))
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace('print("step"', f'print("x" * {words}'))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000))

    process = lab(tmp_path, *SWEEP, "--jobs", "2", preexec_fn=limit)
    output, _ = process.communicate(timeout=250)
    file = "sweep.sqlite" if full == "store" else "sweep.runs"
    assert process.returncode == 2 and "Traceback" not in output, output
    assert re.search(rf"^megatron_fp8: \S*{file}: .+; mend that, and the same command continues$", output, re.MULTILINE)
    assert families(tmp_path) == []


def test_two_sweeps_share_a_store(tmp_path):
    write(tmp_path, SLOW.replace("--begun", "--gate gate --begun"))
    both = [lab(tmp_path, *SWEEP, "--jobs", "1") for _ in range(2)]
    wait_for(lambda: waiting(tmp_path) == 2)  # even if one began late
    (tmp_path / "gate").touch()
    outputs = [process.communicate(timeout=250)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [output.count(": done") > 0 for output in outputs] == [True, True]
    assert sum(output.count(": done") for output in outputs) == 6
    assert len(begun(tmp_path)) == 6


def test_how_much_is_left_is_said(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("megatron_fp8.tools.lab.sweep.progress.time.monotonic", lambda: now[0])
    with sweep.Progress() as progress:
        progress.update(400, 1000, "a")  # from an earlier session
        now[0] = 60.0
        progress.update(500, 1000, "4/10 runs")
        now[0] = 61.0
        progress.update(501, 1000, "not yet again")
        now[0] = 120.0
        progress.update(600, 2000, "6/20 runs")  # another sweep of the store has added runs
    # 100 steps in 60 s: 500 more take 300 s
    first, second = capsys.readouterr().out.splitlines()
    assert first == "4/10 runs; 50 % of the steps; about 5 min 00 s left"
    assert second == "6/20 runs; 30 % of the steps; about 14 min 00 s left"


def test_the_bar_of_a_terminal(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with sweep.Progress() as progress:
        progress.update(0, 100, "0/2 runs")
        progress.say("E8M3 [bold]: done")
        progress.update(50, 100, "1/2 runs")
    output = capsys.readouterr().out
    assert "1/2 runs" in output and "50%" in output and "E8M3 [bold]: done" in output


def test_places_fit_the_machine(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    assert [sweep._fitting(n) for n in (1, 4, 5, 64)] == [12, 3, 2, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert [sweep._fitting(n) for n in (1, 2, 3)] == [4, 2, 1]
    assert sweep._gpus(4) == ["4", "5", "6", "7"]
    with pytest.raises(ValueError, match="processes: 5: this machine has 4 GPUs; use fewer"):
        sweep._gpus(5)


def test_every_place_has_its_gpus(tmp_path):
    write(tmp_path)
    (tmp_path / "plan.yaml").write_text(PLAN + "processes: 2\n")
    store = Store(tmp_path / "s.sqlite", create=True)
    plan = read_plan(tmp_path / "plan.yaml")
    work = sweep._Sweep(store, plan, 5, ["0", "1", "2", "GPU-x"])
    given = [work._environment(place)["CUDA_VISIBLE_DEVICES"] for place in range(5)]
    assert given == ["0,1", "2,GPU-x", "0,1", "2,GPU-x", "0,1"]
    assert sweep._Sweep(store, plan, 5, [])._environment(3).keys() == {MARK}
    store.close()


def test_wrong_command_lines_are_one_line(tmp_path, monkeypatch, capsys):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)

    def said(*argv: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["lab", "sweep", *argv])
        assert ended.value.code == 2
        return "".join(capsys.readouterr())

    for argv, message in (
        (["none.yaml", "--store", "s"], "none.yaml: No such file or directory; give a plan file"),
        (["plan.yaml", "--store", "s", "--jobs", "0"], "--jobs 0: use 1 or more"),
        (["plan.yaml", "--store", "s", "--minutes", "0"], "--minutes 0: use a number above 0"),
        (["plan.yaml", "--store", "s", "--arms", "BF16", "O1"], "--arms O1: no arm of plan.yaml; it has BF16, E8M3"),
        (["plan.yaml", "--store", "s", "--minutes", "9", "--slurm", "print"], "no effect with --slurm; give the tasks"),
        (["plan.yaml", "--store", "s", "--sbatch", "-p x"], "has an effect only with --slurm"),
        (["plan.yaml", "--store", "s", "--slurm", "print", "--sbatch=-C 'a"], '--sbatch "-C \'a": a quote is not'),
        (["plan.yaml", "--store", "s", "--slurm", "print", "--sbatch=-p a\nb"], "on one line"),
        (["plan.yaml", "--store", 's"t', "--slurm", "print"], "Slurm allows no quote, backslash or line break"),
        (["plan.yaml"], "the following arguments are required: --store"),
        (["plan.yaml", "--store", "no/s.sqlite"], "no/s.sqlite: no such folder; make it, or name another file"),
    ):
        output = said(*argv)
        assert output.startswith("megatron_fp8: ") and output.count("\n") == 1 and message in output
    (tmp_path / "train.py").unlink()
    assert "train.py: no such script here" in said("plan.yaml", "--store", "s")


# Slurm.


def test_a_slurm_array_is_printed_and_its_tasks_do_the_work(tmp_path):
    write(tmp_path, SLOW)
    script = done(tmp_path, *SWEEP, "--slurm", "print", "--jobs", "3", "--sbatch", "--partition=a --gpus=1")
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    for option in ("--array=0-2", "--ntasks=1", f'--chdir="{tmp_path}"', "--partition=a --gpus=1"):
        assert f"#SBATCH {option}" in lines
    assert (tmp_path / "sweep.runs").is_dir()  # Slurm writes its files there
    command = f"-m megatron_fp8.cli lab sweep {tmp_path}/plan.yaml --store {tmp_path}/sweep.sqlite --jobs 1"
    assert lines[-1] == f"exec {sys.executable} {command}"
    argv = command.split()[3:]
    tasks = [lab(tmp_path, *argv) for _ in range(3)]
    outputs = [task.communicate(timeout=250)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], outputs
    assert len(begun(tmp_path)) == 6
    assert "nothing to submit" in done(tmp_path, *SWEEP, "--slurm", "print", code=2)


def test_a_slurm_array_where_names_have_blanks(tmp_path):
    folder = tmp_path / "100% a b"
    folder.mkdir()
    write(folder)
    words = ("sweep", "plan.yaml", "--store", "s t.sqlite", "--slurm", "print")
    lines = done(folder, *words, '--sbatch=--comment="a b" -p gpu').splitlines()
    output = f"{tmp_path}/100%% a b/s t.runs/slurm-%A_%a.txt"
    for option in ('--job-name="s t"', f'--chdir="{folder}"', f'--output="{output}"', '--comment="a b" -p gpu'):
        assert f"#SBATCH {option}" in lines
    assert (folder / "s t.runs").is_dir()


def test_a_slurm_array_is_submitted(tmp_path, monkeypatch):
    write(tmp_path)
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\ncat > {tmp_path}/submitted\necho Submitted batch job 7\n")
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no sbatch here; use --slurm print" in done(tmp_path, *SWEEP, "--slurm", "submit", code=2)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    assert done(tmp_path, *SWEEP, "--slurm", "submit") == "Submitted batch job 7\n"
    assert "#SBATCH --array=0-5" in (tmp_path / "submitted").read_text()
