"""A job's script, with fakes instead of Slurm's commands (slurm_jobs.py).

tests/cpu/test_slurm.py runs it on a real Slurm; test_slurm_plants.py has hostile files.
"""

import json
import os
import re
import shutil
import subprocess
import time

import pytest
from launch import ROOT
from slurm_jobs import before_the_task, checkpoint, requeues, task

from megatron_fp8.tools.launch.script import write_script

SCRIPTS = sorted((ROOT / "scripts/slurm").iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script, settings):
    if not shutil.which("shellcheck"):
        pytest.skip("needs shellcheck (Debian's package of that name)")
    paths = [script] if script.suffix == ".sh" else [script, write_script(settings(first=["--load", "x"]))]
    for path in paths:
        done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_job_that_has_saved_is_requeued_until_it_is_done(job):
    assert job()[1][1:] == ["ended with code 0; step 5 of 9 is saved", "requeued, to resume from step 5"]
    assert requeues(job) == 1
    code, notes = job(step=9, restarts=1)
    assert (code, notes[0]) == (0, "start 1 on node[1-2], from step 5 of 9, for 105 minutes")
    assert notes[1:] == ["ended with code 0; step 9 of 9 is saved", "done"] and requeues(job) == 1
    assert job(restarts=2) == (0, ["step 9 of 9 is saved: done"])


@pytest.mark.parametrize(("code", "seal"), [(0, "metadata.json"), (1, "unsealed"), (137, "metadata.json")])
def test_only_whole_checkpoints_are_progress(job, code, seal):
    for restarts in (0, 1):
        assert job(code=code, seal=seal, restarts=restarts)[1][-1] == "requeued, to resume from step 0"
    failed = "failed: 3 starts from step 0 saved no later step; submit it again when that is fixed"
    ended, notes = job(code=code, seal=seal, restarts=2)
    assert ended == 1 and notes[1:] == [f"ended with code {code}; step 0 of 9 is saved", failed]
    assert job(restarts=3) == (1, [failed]) and requeues(job) == 2  # for any end of the third start


def test_a_sealed_checkpoint_with_a_save_under_way_is_none(job):
    job()
    (job.save / "iter_0000005/unsealed").touch()
    assert job(restarts=1, step=4, code=1)[1][0].startswith("start 1 on node[1-2], from step 0 of 9")


def test_a_copy_of_a_checkpoint_is_none(job):
    job()
    for copy in ("iter_0000005_20250101", "iter_0000005_good", "iter_0000005.bak", "iter_5_9"):
        shutil.copytree(job.save / "iter_0000005", job.save / copy)
    assert job(restarts=1, step=6)[1][-2:] == [
        "ended with code 0; step 6 of 9 is saved", "requeued, to resume from step 6"
    ]  # fmt: skip


def test_who_turns_the_tracker_back_goes_on_from_there(job):
    """As in loads.py."""
    job()
    checkpoint(job.save / "iter_0000003")
    (job.save / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert job(restarts=1)[1][0].startswith("start 1 on node[1-2], from step 3 of 9")
    (job.save / "latest_checkpointed_iteration.txt").write_text("4")  # there is no such checkpoint
    assert job(restarts=2)[1][0].startswith("start 2 on node[1-2], from step 5 of 9")


def test_stocks_checkpoints_count_by_its_tracker(job):
    job.save.mkdir(parents=True)
    (job.save / "latest_checkpointed_iteration.txt").write_text("5")
    assert job(seal="metadata.json")[1][-1] == "requeued, to resume from step 5"


def test_a_crash_after_a_save_is_requeued_and_a_mistake_is_not(job):
    assert job(code=1)[1][-1] == "requeued, to resume from step 5"
    ended, notes = job(code=2, restarts=1)
    assert ended == 2 and notes[-1] == "a mistake in the command, see above: not requeued"
    assert job(code=1, step=6, restarts=2)[1][-1] == "requeued, to resume from step 6"


def test_what_passes_is_no_mistake(job):
    """flags/usage.py writes that to the same file."""
    said = json.dumps({"message": {"extraInfo": {"passing": True}}})
    before_the_task(job, f"echo '{said}' >{job.records}/mistake.json")
    assert job(code=1, seal="metadata.json")[1][-1] == "requeued, to resume from step 0"


def test_what_hangs_does_not_end_the_job(job):
    """Slurm does not requeue a job that its time limit ends, so the step is killed before it."""
    (job.fake / "scancel").write_text('#!/bin/bash\necho "$*" >>"$FAKE/scancel.log"; kill -KILL "$(cat "$FAKE/pid")"\n')
    (job.fake / "sleep").write_text("#!/bin/bash\nexec /bin/sleep 0.1\n")
    (job.fake / "sleep").chmod(0o755)
    before_the_task(job, "exec 2>/dev/null")  # hide bash's message about a killed task
    # Two hours pass when the task starts.
    date = 'if [[ $1 == +%s && -e $FAKE/pid ]]; then echo $(($(/bin/date +%s) + 7200)); else exec /bin/date "$@"; fi'
    (job.fake / "date").write_text(f"#!/bin/bash\n{date}\n")
    (job.fake / "date").chmod(0o755)
    _, notes = job(wait="yes")
    assert notes[1:] == ["the tasks have not ended in time: killed",
                         "ended with code 137; step 0 of 9 is saved", "requeued, to resume from step 0"]  # fmt: skip
    assert (job.fake / "scancel.log").read_text() == "--signal=KILL 7.0\n"


def test_a_start_without_time_to_train(job):
    """For example sbatch --time=10: warned from its first second, each start would train one step."""
    code, notes = job(more={"SLURM_JOB_END_TIME": str(int(time.time()) + 590)})
    line = r"not started: 5\d\d seconds of its time are left, and it stops 600 seconds before their end; raise --time"
    assert code == 2 and re.fullmatch(line, notes[0])
    assert not (job.fake / "task.json").exists()


@pytest.mark.parametrize(
    ("state", "code", "note"),
    [
        ("PENDING", 143, "Slurm has requeued it by itself, as after a node failure"),
        ("COMPLETING", 143, "Slurm has requeued it by itself, as after a node failure"),
        ("RUNNING", 1, "Slurm does not requeue this job: submit it again"),
    ],
)
def test_a_requeue_that_slurm_refuses(job, state, code, note):
    (job.fake / "state-7").write_text(f"JobId=7 JobName=x JobState={state} Reason=None\n")
    ended, notes = job(code=1)
    assert (ended, notes[-2:]) == (code, ["requeued, to resume from step 5", note])


def test_restarts_have_a_cap(job):
    assert job(restarts=3)[0] == 1 and requeues(job) == 0


def test_an_exit_file(job):
    (job.save.parent).mkdir()
    (job.save.parent / "exit").touch()
    there = f"{job.save.parent}/exit is there"
    assert job() == (0, [f"{there}: not started; remove it to go on"])
    (job.save.parent / "exit").unlink()
    (job.save.parent / "exit").symlink_to(job.save / "iter_0000005")  # appears with the save
    assert job()[1][-1] == f"{there}: not requeued" and requeues(job) == 0


def test_a_warning_reaches_the_task(job, tmp_path):
    """A user sends USR2; Slurm sends USR1."""
    before_the_task(job, '(until [[ -e "$FAKE/pid" ]]; do sleep 0.1; done; kill -USR2 $PPID) &')
    _, notes = job(wait="yes")
    told = ["told to stop: the tasks save and end", "ended with code 0; step 5 of 9 is saved"]
    assert notes[1:] == [*told, "requeued, to resume from step 5"]
    assert "--signal=URG 7.0" in (job.fake / "scancel.log").read_text()


def test_what_a_task_is_given(job, tmp_path):
    job(first=["--load", "there", "--finetune"])
    words, variables = task(job)
    own = ["--exit-signal-handler", "--exit-signal", "SIGURG", "--exit-duration-in-mins"]
    flags = ["--lr", "1", "--bf16", "--data-path", "0.5", "a b", "--save", str(job.save)]
    assert words[:-1] == [*flags, "--load", "there", "--finetune", *own] and words[-1] in ("104", "105")
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "node1", "MASTER_PORT": "20049", "NEW": "it's {new}", "SHELLS": "shell"}
    caches = [variables.pop(f"{compiler}_CACHE_DIR") for compiler in ("TRITON", "TORCHINDUCTOR")]
    assert variables == ranks | place | {"OMP_NUM_THREADS": "1"}
    assert caches == [f"{job.fake}/megatron_fp8-{os.getuid()}/{name}" for name in ("triton", "inductor")]
    assert job(restarts=1, more={"TRITON_CACHE_DIR": "/mine"})[0] == 0 and task(job)[1]["TRITON_CACHE_DIR"] == "/mine"
    job(first=["--load", "there", "--finetune"], restarts=1, more={"SLURM_JOB_END_TIME": "", "FAKE_END": "Unknown"})
    assert task(job)[0] == [*flags, "--load", str(job.save), *own[:-1]]
    job(restarts=1, more={"SLURM_JOB_END_TIME": str(int(time.time()) + 655), "OMP_NUM_THREADS": "4"})
    assert task(job)[1]["OMP_NUM_THREADS"] == "4"
    assert task(job)[0][-1] == "8"  # four fifths of ten minutes


@pytest.mark.parametrize("allowed", [True, False])
def test_a_task_is_bound_to_memory_only_if_it_may_be(job, allowed):
    """numactl ends in an error in some containers, and outside of a job's own processors."""
    (job.fake / "numa_node").write_text("0\n")
    numactl = f'echo "${{@:1:2}}" >>"$FAKE/numactl.log"; {"" if allowed else "exit 1; "}exec "${{@:3}}"'
    for name, text in {"nvidia-smi": 'echo "0000../../../..$FAKE"', "numactl": numactl}.items():
        (job.fake / name).write_text(f"#!/bin/bash\n{text}\n")
        (job.fake / name).chmod(0o755)
    assert job()[1][1] == "ended with code 0; step 5 of 9 is saved"
    bound = (job.fake / "numactl.log").read_text().splitlines()
    assert bound == ["--cpunodebind=0 --membind=0"] * (2 if allowed else 1)


HELD = "not started: job 6 ({}) holds {}/lock: scancel 6, or train into another folder"


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("JobId=6 JobName=x UserId=me(1) JobState=RUNNING Reason=None", "RUNNING"),
        ("JobId=6 JobName=x JobState=COMPLETING Reason=None", "COMPLETING"),
        ("JobId=5 ArrayJobId=6 JobState=PENDING Reason=x\nJobId=6 ArrayJobId=6 JobState=RUNNING Reason=x", "RUNNING"),
        ("Unable to contact slurm controller", "Slurm does not say its state; if it has ended, remove the lock"),
    ],
)
def test_a_second_job_of_a_checkpoint_folder_is_refused(job, said, state):
    """Before it trains, and the start does not count."""
    job.save.mkdir(parents=True)
    (job.save / "lock").symlink_to(job.records.with_name("job-6"))
    (job.fake / "state-6").write_text(f"{said}\n")
    assert job() == (1, [HELD.format(state, job.save)])
    assert not (job.fake / "task.json").exists() and not (job.records / "starts").exists()
    assert (job.save / "lock").readlink() == job.records.with_name("job-6")


@pytest.mark.parametrize("state", ["", "PENDING", "FAILED", "COMPLETED", "CANCELLED", "NODE_FAIL", "TIMEOUT"])
def test_a_lock_of_a_job_that_runs_no_more_is_taken_over(job, state):
    job.save.mkdir(parents=True)
    (job.save / "lock").symlink_to(job.records.with_name("job-6"))
    if state:
        (job.fake / "state-6").write_text(f"JobId=6 JobName=x JobState={state} Reason=None\n")
    code, notes = job(step=9)
    assert (code, notes[0], notes[-1]) == (0, "job 6 left its lock and runs no more: taken over", "done")
    assert [path.name for path in job.save.iterdir()] == ["iter_0000009"]


def test_a_lock_is_held_while_the_tasks_run_and_no_longer(job):
    before_the_task(job, 'readlink "$FAKE/../job/save/lock" >"$FAKE/held"')
    (job.save / "lock").parent.mkdir(parents=True)
    (job.save / "lock").symlink_to(job.records)  # its own lock, from a killed start
    for restarts, step in enumerate((5, 9)):
        job(step=step, restarts=restarts)
        assert (job.fake / "held").read_text() == f"{job.records}\n"
        assert not (job.save / "lock").is_symlink()
    job(restarts=2)
    assert not (job.save / "lock").is_symlink()  # this start had nothing to do


def test_a_lock_that_another_job_takes_over_meanwhile_is_left_to_it(job):
    """Both jobs found job 6 ended; the other one, 8, was faster."""
    job.save.mkdir(parents=True)
    (job.save / "lock").symlink_to(job.records.with_name("job-6"))
    (job.fake / "state-8").write_text("JobId=8 JobName=x JobState=RUNNING Reason=None\n")
    faster = '[[ $* == *"job 6" ]] && ln -sfn "${FAKE%/*}/job/job-8" "${FAKE%/*}/job/save/lock"\n'
    scontrol = (job.fake / "scontrol").read_text()
    (job.fake / "scontrol").write_text(scontrol.replace("#!/bin/bash\n", f"#!/bin/bash\n{faster}"))
    assert job() == (1, [HELD.replace("6", "8").format("RUNNING", job.save)])
    assert [path.name for path in job.save.iterdir()] == ["lock"]
    assert (job.save / "lock").readlink().name == "job-8"


def test_a_lock_that_cannot_be_made(job):
    (job.save / "lock").mkdir(parents=True)
    assert job() == (2, [f"{job.save}/lock is not a job's: if nothing trains there, remove it"])
    (job.fake / "ln").write_text("#!/bin/bash\necho no room >&2; exit 1\n")
    (job.fake / "ln").chmod(0o755)
    (job.save / "lock").rmdir()
    assert job() == (2, ["no room"])


def test_two_jobs_of_one_script_keep_records_of_their_own(job):
    job(step=5, words=["--lr", "1"])
    kept = {path.name: path.read_bytes() for path in job.records.iterdir()}
    job(step=9, words=["--lr", "2"], more={"SLURM_JOB_ID": "8"})
    assert {path.name: path.read_bytes() for path in job.records.iterdir()} == kept
    assert "--lr 2" in (job.records.with_name("job-8") / "command.txt").read_text()


def test_another_script_gets_the_plugin(job, tmp_path):
    job(script=tmp_path / "pretrain_gpt.py", python="true")
    command = (job.records / "command.txt").read_text()
    assert command.startswith(f"true -u -m megatron_fp8 {tmp_path}/pretrain_gpt.py --lr 1 ")
    job(python="true", restarts=1)
    assert (job.records / "command.txt").read_text().startswith(f"true -u {tmp_path}/pretrain_gpt_fp8.py --lr 1 ")


def test_a_container(job, tmp_path):
    job(container="image.sqsh", mounts="/data:/data", more={"SLURM_CPUS_PER_TASK": "12"})
    given = (job.fake / "srun.log").read_text()
    assert "--container-image=image.sqsh" in given and "--no-container-mount-home" in given
    assert f",{job.save.parent}:{job.save.parent},{job.save}:{job.save},/data:/data " in given
    assert given.count("--container-mounts=") == 1 and "--cpus-per-task=12" in given
    (tmp_path / "image.sqsh").touch()  # pyxis looks for a bare name in a registry
    job(container="image.sqsh", more={"SLURM_CPUS_PER_TASK": "1"})
    given = (job.fake / "srun.log").read_text()
    assert f"--container-image={tmp_path}/image.sqsh" in given and "--cpus-per-task" not in given


def test_an_images_variables_do_not_come_before_the_jobs(job):
    """As pyxis sets them; sbatch's --export=NONE, which srun inherits, does not override them either."""
    before_the_task(job, 'export NEW=images SHELLS=images MASTER_PORT=61007')
    before_the_task(job, '[[ " $* " == *" --export=ALL "* ]] || exit 3')
    assert job()[1][1] == "ended with code 0; step 5 of 9 is saved"
    variables = task(job)[1]
    assert (variables["NEW"], variables["SHELLS"], variables["MASTER_PORT"]) == ("it's {new}", "shell", "20049")
    assert "it's {new}" not in (job.fake / "srun.log").read_text()  # other users may read that log


def test_the_network_between_nodes_is_named(job):
    """It is this start's: NCCL's log of an earlier start is gone."""
    job.records.mkdir(parents=True)
    (job.records / "nccl.txt").write_text("Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0\n")
    nccl = f'echo "Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0" >>"{job.records}/nccl.txt"'
    wait = 'until grep -q "that is TCP" "$FAKE/said"; do sleep 0.1; done'  # a job that ends at once would not log it
    before_the_task(job, f"{nccl}\n{wait}")
    (job.fake / "sleep").write_text("#!/bin/bash\nexec /bin/sleep 0.1\n")  # the script looks every 20 seconds
    (job.fake / "sleep").chmod(0o755)
    notes = job(more={"SLURM_NNODES": "2"})[1]
    assert "NCCL between nodes: via NET/Socket" in notes
    assert "that is TCP, several times slower than InfiniBand: see megatron-fp8 doctor" in notes


def test_what_a_job_was_is_kept_without_secrets(job):
    job()
    environment = (job.records / "environment.txt").read_text()
    assert "SLURM_JOB_ID=7" in environment and "hidden" not in environment
    assert "--data-path 0.5 a\\ b" in (job.records / "command.txt").read_text()
    assert (job.records / "script.sbatch").read_text() == (job.save.parent / "small.sbatch").read_text()
    assert re.search(r"^megatron-fp8 \d+\.\d+\.\d+$", (job.records / "commit.txt").read_text(), re.M)  # no git here
