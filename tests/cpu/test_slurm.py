"""`megatron-fp8 launch` on a real Slurm: a job that is stopped, requeued or stuck; its losses and its end."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import local_slurm
import pytest
from launch import ROOT, parse_step
from megatron_runs import TINY_GPT, script_path

from megatron_fp8.flags.command import flags_of

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(7200)]
STEPS, INTERVAL = 160, 45
TWO_NODES = ["--nodes", "2", "--tasks-per-node", "1"]  # as many tasks as the other jobs have on one node
PYXIS = os.environ.get("PYXIS", "")  # the plugin's file and its options
IMAGE = os.environ.get("PYXIS_IMAGE", "")  # a system in which this machine's Python runs
PATIENCE = 3000  # seconds; the cores may be shared
# Of scripts in place of a training: a checkpoint with a seal of seal.py's form.
SAVES = """
def saves(save, step):
    folder = save / f"iter_{step:07d}"
    folder.mkdir(exist_ok=True)
    for name in ("metadata.json", "integrity.json"):
        (folder / name).write_text('{"files": {"metadata.json": "%s"}}' % ("0" * 64))
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment for Slurm's commands."""
    try:
        with local_slurm.running(tmp_path_factory.mktemp("slurm"), nodes=2, plugin=PYXIS) as environment:
            yield {**environment, "PYTHONPATH": script_path(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    except local_slurm.Unavailable as reason:
        pytest.skip(f"needs a Slurm: {reason}")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The CPU tests' GPT, in a file."""
    lines = [f"  {flag}: {' '.join(values) or 'true'}" for flag, values in flags_of(TINY_GPT)]
    lines += [f"  --train-iters: {STEPS}", f"  --save-interval: {INTERVAL}", "  --use-distributed-optimizer: true"]
    path = tmp_path_factory.mktemp("files") / "tiny.yaml"
    keep = [line for line in lines if not line.startswith("  --train-iters: 10")]
    path.write_text("\n".join(["MODEL_ARGS:", *keep, "  --fp8-log-exact: true"]))
    return [str(path)]


class Job:
    """A submitted job."""

    def __init__(self, slurm, folder: Path, files, *options: str):
        self.slurm, self.folder = slurm, folder
        command = [sys.executable, "-m", "megatron_fp8.cli", "launch", *files, "--nodes", "1", "--gpus-per-node", "0",
                   "--tasks-per-node", "2", "--time", "30", "--level", "O3", "--folder", str(folder),
                   "--name", "tiny", "--submit", *options]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, env=slurm, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        self.number = re.search(r"^job (\d+)", done.stdout, re.M)[1]

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.slurm, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    @property
    def log(self) -> str:
        path = self.folder / f"log-{self.number}.txt"
        return path.read_text() if path.exists() else ""

    @property
    def steps(self):
        return [step for step in map(parse_step, self.log.splitlines()) if step]

    @property
    def notes(self) -> list[str]:
        return [line.split(" ", 2)[2] for line in self.log.splitlines() if line.startswith("[job] ")]

    @property
    def last(self) -> str:
        """Loss and gradient norm of the last step, with all their digits."""
        return [line.partition(": ")[2] for line in self.log.splitlines() if "exact lm loss" in line][-1]

    def until(self, there) -> None:
        deadline = time.monotonic() + PATIENCE
        while not there():
            assert time.monotonic() < deadline and self.state() not in ("COMPLETED", "FAILED"), self.log[-5000:]
            time.sleep(0.1)

    def state(self) -> str:
        return re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", self.number))[1]

    def end(self) -> tuple[str, int]:
        """(its state after it has ended, how often Slurm has restarted it)."""
        deadline = time.monotonic() + PATIENCE
        while (state := self.state()) not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
            assert time.monotonic() < deadline, self.log[-5000:]
            time.sleep(0.5)
        return state, int(re.search(r"Restarts=(\d+)", self.ask("scontrol", "show", "job", self.number))[1])


@pytest.fixture(scope="module")
def undisturbed(slurm, files, tmp_path_factory):
    job = Job(slurm, tmp_path_factory.mktemp("undisturbed"), files)
    assert job.end() == ("COMPLETED", 0), job.log[-5000:]
    assert job.notes[-1] == "done"
    return job


@pytest.mark.parametrize("options", [[], TWO_NODES], ids=["one node", "two nodes"])
def test_a_job_that_is_told_to_stop_comes_back_and_ends_as_if_it_had_not(slurm, files, undisturbed, tmp_path, options):
    job = Job(slurm, tmp_path, files, *options)
    job.until(lambda: len(job.steps) > INTERVAL // 2)
    job.ask("scancel", "--batch", "--signal=USR1", job.number)  # what --signal=B:USR1 sends before the time limit
    assert job.end() == ("COMPLETED", 1), job.log[-5000:]
    stopped = next(int(note.split()[5]) for note in job.notes if note.startswith("ended with code 0; step"))
    assert 0 < stopped < STEPS and stopped % INTERVAL
    assert [note.split(",")[0] for note in job.notes if note.startswith(("told", "requeued", "start", "done"))] == [
        f"start 0 on {job.notes[0].split()[3].rstrip(',')}",
        "told to stop: the tasks save and end",
        "requeued",
        f"start 1 on {job.notes[0].split()[3].rstrip(',')}",
        "done",
    ]
    assert f"from step {stopped} of {STEPS}" in job.log
    assert job.last == undisturbed.last
    of_one = {step.iteration: (step.loss, step.grad_norm) for step in undisturbed.steps}
    resumed = [step for step in job.steps if step.iteration > stopped + 2]  # stock logs a mean of the first two
    assert len(resumed) == STEPS - stopped - 2
    assert all((step.loss, step.grad_norm) == of_one[step.iteration] for step in resumed)


@pytest.mark.skipif(not (PYXIS and IMAGE), reason="needs pyxis, enroot and an image: docs/launch.md, Containers")
@pytest.mark.parametrize("disturb", ["told to stop", "requeued"])
def test_a_job_in_a_container_ends_as_one_without(slurm, files, undisturbed, tmp_path, disturb):
    """The container sees only the code's folder, the job's folder and the --mounts.  It runs on one node: two nodes of
    this machine would make one container twice."""
    cache = re.search(r"--data-cache-path: (.*)", Path(files[0]).read_text())[1]
    seen = {sys.base_prefix, sys.prefix, cache}
    options = ["--container", IMAGE, "--python", sys.executable, "--mounts", ",".join(f"{it}:{it}" for it in seen)]
    job = Job(slurm, tmp_path, files, *options)
    if disturb == "told to stop":
        job.until(lambda: len(job.steps) > INTERVAL // 2)
        job.ask("scancel", "--batch", "--signal=USR1", job.number)
    else:
        job.until(lambda: (tmp_path / f"checkpoints/iter_{INTERVAL:07d}/integrity.json").exists())
        job.ask("scontrol", "requeue", job.number)
    assert job.end() == ("COMPLETED", 1), job.log[-5000:]
    assert job.last == undisturbed.last


def test_a_bare_requeue_goes_back_to_the_last_save(slurm, files, undisturbed, tmp_path):
    job = Job(slurm, tmp_path, files)
    job.until(lambda: (tmp_path / f"checkpoints/iter_{INTERVAL:07d}/integrity.json").exists())
    job.until(lambda: job.steps[-1].iteration > INTERVAL + 5)
    job.ask("scontrol", "requeue", job.number)
    assert job.end() == ("COMPLETED", 1), job.log[-5000:]
    back = int(re.search(r"start 1 on \S+ from step (\d+)", job.log)[1])
    assert back >= INTERVAL and back % INTERVAL == 0
    assert job.last == undisturbed.last


def test_a_job_that_loses_a_node_goes_back_to_the_last_save(slurm, files, undisturbed, tmp_path):
    """The one on which its script runs; the node comes back by itself, since its slurmd lives."""
    job = Job(slurm, tmp_path, files, *TWO_NODES)
    job.until(lambda: (tmp_path / f"checkpoints/iter_{INTERVAL:07d}/integrity.json").exists())
    job.ask("scontrol", "update", "nodename=127.0.0.1", "state=down", "reason=test")
    assert job.end() == ("COMPLETED", 1), job.log[-5000:]
    back = int(re.search(r"start 1 on \S+ from step (\d+)", job.log)[1])
    assert back >= INTERVAL and back % INTERVAL == 0
    assert job.last == undisturbed.last


def test_tasks_of_two_nodes(slurm, files, tmp_path):
    """Each gets its variables although sbatch exports only the paths of Slurm's programs and libraries (a login shell
    may not find them). One is killed, and the other does not wait for ever; the job is requeued, and both get the
    signal to stop."""
    script = tmp_path / "pretrain_gpt_fp8.py"
    script.write_text(
        "import json, os, pathlib, signal, sys, time\n"
        "save = pathlib.Path(sys.argv[sys.argv.index('--save') + 1])\n"
        "rank, told = os.environ['RANK'], []\n"
        f"{SAVES}"
        "signal.signal(signal.SIGURG, lambda *_: told.append(1))\n"
        "first = os.environ.get('SLURM_RESTART_COUNT', '0') == '0'\n"
        "(save / f'{first}-{rank}.json').write_text(json.dumps(dict(os.environ)))\n"
        "if first and rank == '0':\n"
        f"    saves(save, {INTERVAL})\n"
        "while not told:\n"
        f"    if first and rank == '1' and (save / 'iter_{INTERVAL:07d}/integrity.json').exists():\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    time.sleep(0.1)\n"
        "(save / f'told-{rank}').touch()\n"
        "while rank == '0' and not (save / 'told-1').exists():\n"
        "    time.sleep(0.1)\n"
        "if rank == '0':\n"
        f"    saves(save, {STEPS})\n"
    )
    export = "--sbatch=--export=PATH,LD_LIBRARY_PATH"
    job = Job(slurm, tmp_path / "job", files, *TWO_NODES, "--script", str(script), export)
    save = tmp_path / "job/checkpoints"
    job.until(lambda: len(list(save.glob("False-*.json"))) == 2)
    job.ask("scancel", "--batch", "--signal=USR1", job.number)
    assert job.end() == ("COMPLETED", 1), job.log[-5000:]
    assert [re.sub(r", for \d+ minutes", "", note) for note in job.notes] == [
        f"start 0 on 127.0.0.[1-2], from step 0 of {STEPS}",
        f"ended with code 143; step {INTERVAL} of {STEPS} is saved",
        f"requeued, to resume from step {INTERVAL}",
        f"start 1 on 127.0.0.[1-2], from step {INTERVAL} of {STEPS}",
        "told to stop: the tasks save and end",
        f"ended with code 0; step {STEPS} of {STEPS} is saved",
        "done",
    ]
    given = [json.loads((save / f"False-{rank}.json").read_text()) for rank in (0, 1)]
    assert [[of[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] for of in given] == [
        ["0", "0", "2", "1"],
        ["1", "0", "2", "1"],
    ]
    assert [of["SLURMD_NODENAME"] for of in given] == ["127.0.0.1", "127.0.0.2"]
    assert {(of["MASTER_ADDR"], of["MASTER_PORT"]) for of in given} == {("127.0.0.1", given[0]["MASTER_PORT"])}


def test_a_job_that_saves_nothing_ends_as_failed(slurm, files, tmp_path):
    """Although it leaves a folder that looks like a checkpoint, twice."""
    script = tmp_path / "stuck.py"
    script.write_text(
        "import os, sys\n"
        "save = sys.argv[sys.argv.index('--save') + 1]\n"
        "os.makedirs(f'{save}/iter_0000007', exist_ok=True)\n"
        "open(f'{save}/iter_0000007/metadata.json', 'w').close()\n"
        "open(f'{save}/iter_0000007/unsealed', 'w').close()\n"
        "sys.exit(3)\n"
    )
    job = Job(slurm, tmp_path / "job", files, "--script", str(script))
    assert job.end() == ("FAILED", 2), job.log[-5000:]
    assert job.notes[-1] == "failed: 3 starts from step 0 saved no later step; submit it again when that is fixed"
    assert sum(f"; step 0 of {STEPS} is saved" in note for note in job.notes) == 3


def test_a_job_that_hangs_until_its_time_limit_comes_back(slurm, files, tmp_path):
    """Slurm does not requeue a job that its limit ends.  The task ignores signals, as if it waits for a lost rank."""
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "if os.environ.get('SLURM_RESTART_COUNT', '0') == '0':\n"
        "    time.sleep(3600)\n"
        f"{SAVES}"
        f"saves(pathlib.Path(sys.argv[sys.argv.index('--save') + 1]), {STEPS})\n"
    )
    job = Job(slurm, tmp_path / "job", files, "--script", str(script), "--time", "2")
    job.until(lambda: any(note.startswith("requeued") for note in job.notes))
    job.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")  # a busy machine's start takes minutes
    assert job.end() == ("COMPLETED", 1), job.log[-5000:]
    assert [note for note in job.notes if not note.startswith("start")] == [
        "told to stop: the tasks save and end",
        "the tasks have not ended in time: killed",
        f"ended with code 137; step 0 of {STEPS} is saved",
        "requeued, to resume from step 0",
        f"ended with code 0; step {STEPS} of {STEPS} is saved",
        "done",
    ]


def test_a_mistake_is_not_tried_again(slurm, files, tmp_path):
    """One of two tasks prints the line; the other is killed, and its exit code is the step's."""
    (tmp_path / "data.yaml").write_text("MODEL_ARGS:\n  --mock-data: false\n  --data-path: /nowhere/at_all\n")
    job = Job(slurm, tmp_path, [*files, str(tmp_path / "data.yaml")])
    assert job.end() == ("FAILED", 0), job.log[-5000:]
    assert job.notes[-1] == "a mistake in the command, see above: not requeued"
    assert "megatron_fp8: --data-path /nowhere/at_all" in job.log


def test_an_exit_file_ends_a_job_for_good(slurm, files, tmp_path):
    job = Job(slurm, tmp_path, files)
    job.until(lambda: len(job.steps) > 5)
    (tmp_path / "exit").touch()
    assert job.end() == ("COMPLETED", 0), job.log[-5000:]
    assert job.notes[-1] == f"{tmp_path}/exit is there: not requeued"
    assert any((tmp_path / "checkpoints").glob("iter_*/integrity.json"))


def test_one_job_at_a_time_trains_into_a_folder(slurm, files, tmp_path):
    """A second job is refused; a third takes over a lock as a killed first job would leave it."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "save = pathlib.Path(sys.argv[sys.argv.index('--save') + 1])\n"
        "(save / 'started').touch()\n"
        f"while not os.path.exists('{tmp_path}/go'): time.sleep(0.1)\n"
        f"{SAVES}"
        f"saves(save, {STEPS})\n"
    )
    beside = ["--script", str(script), "--tasks-per-node", "1", "--sbatch=--oversubscribe"]
    save = tmp_path / "job/checkpoints"
    first = Job(slurm, tmp_path / "job", files, *beside)
    first.until((save / "started").exists)
    second = Job(slurm, tmp_path / "job", files, *beside)
    assert second.end() == ("FAILED", 0), second.log
    assert second.notes == [f"not started: job {first.number} (RUNNING) holds {save}/lock: scancel {first.number}, "
                            "or train into another folder"]  # fmt: skip
    records = (save / "lock").readlink()
    first.ask("scancel", first.number)
    assert first.end() == ("CANCELLED", 0)
    deadline = time.monotonic() + PATIENCE
    while (save / "lock").is_symlink():  # the job's end removes it
        assert time.monotonic() < deadline, first.log
        time.sleep(0.1)
    (save / "lock").symlink_to(records)
    (tmp_path / "go").touch()
    third = Job(slurm, tmp_path / "job", files, *beside)
    assert third.end() == ("COMPLETED", 0), third.log[-5000:]
    assert third.notes[0] == f"job {first.number} left its lock and runs no more: taken over"
    assert third.notes[-1] == "done" and not (save / "lock").is_symlink()
    assert (records / "starts").read_text() == "start 0 from 0\n" and records.name == f"job-{first.number}"
    asked = ["scontrol", "--oneliner", "show", "job", "4000000"]  # Slurm's words for an unknown job
    assert "Invalid job id" in subprocess.run(asked, env=slurm, capture_output=True, text=True, timeout=60).stderr


def test_a_job_keeps_what_it_was(undisturbed):
    records = undisturbed.folder / f"job-{undisturbed.number}"
    assert "--fp8-level O3" in (records / "command.txt").read_text()
    assert "torch==" in (records / "packages.txt").read_text()
    assert "SLURM_JOB_ID=" in (records / "environment.txt").read_text()
    assert (records / "script.sbatch").read_text() == (undisturbed.folder / "tiny.sbatch").read_text()
    assert re.match(r"[0-9a-f]{40}\n", (records / "commit.txt").read_text())
    assert not os.path.exists(undisturbed.folder / "exit")
