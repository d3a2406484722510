"""Hostile files where a job's script looks: none is run, followed or counted, and no log line is forged.

Each would make a file PROOF if a shell, sed or an arithmetic expression executed it.
"""

import contextlib
import os
import shutil

import pytest
from launch import ROOT
from slurm_jobs import SEAL, before_the_task, checkpoint, task

from megatron_fp8.tools.launch.script import last_saved

TRACKER = "latest_checkpointed_iteration.txt"
COMMANDS = [
    "a[$(touch PROOF)]",
    "$(touch PROOF)",
    "`touch PROOF`",
    "';touch PROOF;'",
    '";touch PROOF;"',
    "x/;1e touch PROOF #",
    "x\ntouch PROOF\n",
    "-e touch PROOF",
    "7 || touch PROOF",
    "0x7;touch PROOF",
    "%b\\x24(touch PROOF)",
    "\x1b]0;x\x07\r[job] done",
    "²",
    "9" * 20,
    os.fsdecode(b"\xff\xfe"),
    "",
]
NAMES = [command for command in COMMANDS if "/" not in command]
DONE = [("9" * 20, SEAL), ("0000099", ""), ("0000099", "{}"), ("00000099", SEAL), ("²000099", SEAL)]


@pytest.fixture(autouse=True)
def nothing_ran(tmp_path):
    yield
    assert not [path for path in tmp_path.rglob("*") if path.name == "PROOF"]


def files(folder, **contents):
    folder.mkdir(parents=True)
    for name, text in contents.items():
        (folder / f"{name}.json").write_text(text)


def begins(job) -> int:
    """The step that the script would resume from; it ends before it trains."""
    with contextlib.suppress(FileNotFoundError):
        (job.records / "starts").unlink()
    code, notes = job(more={"SLURM_JOB_END_TIME": "9"})
    assert code == 2 and notes[-1].startswith("not started: -"), notes
    return int((job.records / "starts").read_text().removeprefix("start 0 from "))


def test_a_lock_that_leads_anywhere(job):
    """A lock that names no job is refused, in one line; other text in its path is only a name."""
    checkpoint(job.save / "iter_0000009")
    for command in COMMANDS:
        (job.save / "lock").symlink_to(f"/r/{command}/job-6")
        assert job() == (0, ["job 6 left its lock and runs no more: taken over", "step 9 of 9 is saved: done"])
        (job.save / "lock").symlink_to(f"/r/job-{command}")
        code, notes = job()
        assert (code, len(notes)) == (2, 1) and notes[0].startswith(f"{job.save}/lock leads to /r/job-")
        assert (job.save / "lock").is_symlink()
        (job.save / "lock").unlink()


def test_a_lock_of_this_number_in_another_folder(job):
    job.save.mkdir(parents=True)
    (job.save / "lock").symlink_to("/elsewhere/job-7")
    assert job()[1] == [f"{job.save}/lock leads to /elsewhere/job-7, which is no other job's: if nothing trains there, "
                        "remove the lock"]  # fmt: skip


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_a_lock_of_another_users_job_that_slurm_does_not_show(job):
    """If jobs are private, Slurm says "invalid job id" for a running one."""
    job.save.mkdir(parents=True)
    (job.save / "lock").symlink_to("/r/job-6")
    os.chown(job.save / "lock", 12345, 12345, follow_symlinks=False)
    code, notes = job()
    assert code == 1 and notes[0].startswith("not started: job 6 (Slurm does not say its state;")
    (job.fake / "state-6").write_text("JobId=6 JobName=x JobState=COMPLETED Reason=None\n")
    assert job(step=9)[1][0] == "job 6 left its lock and runs no more: taken over"


@pytest.mark.parametrize("plant", ["link", "file", "folder"])
def test_the_name_to_which_a_lock_is_moved(job, tmp_path, plant):
    job.save.mkdir(parents=True)
    (tmp_path / "victim").write_text("whole")
    (job.save / "lock").symlink_to("/r/job-6")
    moved = job.save / "lock-7"
    {"link": lambda: moved.symlink_to(tmp_path / "victim"), "file": moved.touch, "folder": moved.mkdir}[plant]()
    code, _ = job(step=9)
    assert code == (2 if plant == "folder" else 0) and (tmp_path / "victim").read_text() == "whole"


def test_what_a_tracker_holds(job):
    checkpoint(job.save / "iter_0000003")
    for command in COMMANDS:
        (job.save / TRACKER).write_bytes(os.fsencode(command))
        assert (begins(job), last_saved(job.save)) == (3, 3), command


def test_a_tracker_that_is_none(job):
    checkpoint(job.save / "iter_0000003")
    checkpoint(job.save / "iter_0000005")
    tracker = job.save / TRACKER

    def huge():
        tracker.touch()
        os.truncate(tracker, 2**33)

    for plant in (
        lambda: os.mkfifo(tracker),
        lambda: tracker.symlink_to("/dev/zero"),
        huge,
        lambda: tracker.write_bytes(b"\xff\xfe3"),
        tracker.mkdir,
    ):
        tracker.unlink(missing_ok=True)
        plant()
        assert (begins(job), last_saved(job.save)) == (5, 5)
    tracker.rmdir()
    tracker.write_text("\n 3 \n")
    assert (begins(job), last_saved(job.save)) == (3, 3)


def test_a_tracker_that_names_no_checkpoint_is_no_progress(job):
    """Neither does an empty folder or an unfinished save."""
    for number in ["0000099", *(number for number, _ in DONE)]:
        (job.save / f"iter_{number}").mkdir(parents=True, exist_ok=True)
        (job.save / TRACKER).write_text(number)
        assert (begins(job), last_saved(job.save)) == (0, 0)


def test_what_is_no_sealed_checkpoint_is_no_finished_run(job):
    checkpoint(job.save / "iter_0000003")
    for name, seal in DONE:
        files(job.save / f"iter_{name}", metadata="{}", integrity=seal)
        assert (begins(job), last_saved(job.save)) == (3, 3)
        shutil.rmtree(job.save / f"iter_{name}")


def test_a_seal_without_its_checkpoint(job):
    files(job.save / "iter_0000099", integrity=SEAL)
    files(job.save / "iter_0000098", integrity=SEAL, metadata="")
    for number in (97, 96):
        files(job.save / f"iter_00000{number}", metadata="{}")
    os.mkfifo(job.save / "iter_0000097/integrity.json")
    (job.save / "iter_0000096/integrity.json").symlink_to("/dev/zero")
    (job.save / "iter_0000095").touch()
    (job.save / "iter_0000094").symlink_to("nowhere")
    assert (begins(job), last_saved(job.save)) == (0, 0)


def test_names_of_folders(job):
    checkpoint(job.save / "iter_0000003")
    for number, name in enumerate(name for name in NAMES if name):
        for other in (f"iter_{name}", f"{name}{number}"):
            checkpoint(job.save / other)
        (job.save / f"iter_{name}{number}").symlink_to("iter_0000003")
    assert (begins(job), last_saved(job.save)) == (3, 3)


NUMBERS = ["ITERATIONS", "MAX_RESTARTS", "MAX_STALLS", "WARNING", "SLURM_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_NNODES"]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_the_environment(job, name):
    """For the script that people submit by hand."""
    path = ROOT / "scripts/slurm/train.sbatch"
    given = {"ITERATIONS": "9", "FOLDER": str(job.save.parent), "SAVE": str(job.save)}
    for command in ("a[$(touch PROOF)]", "7 || touch PROOF", "x\ntouch PROOF\n", "²", "9" * 20):
        code, notes = job(path=path, more={**given, name: command})
        assert code == 2 and notes[-1].startswith(f"{name}=") and notes[-1].endswith(": set it to a whole number")


def test_numbers_of_a_tasks_environment(job):
    for command in COMMANDS[:3]:
        _, notes = job(more={"SLURM_NTASKS": command})
        assert notes[1] == f"SLURM_NTASKS={command}: not a whole number" and not (job.fake / "task.json").exists()
        shutil.rmtree(job.records)


WORDS = ["SLURM_JOB_END_TIME", "SLURM_CPUS_PER_TASK", "SLURM_JOB_NODELIST", "NEW", "CUDA_VISIBLE_DEVICES"]


def test_words_of_the_environment(job):
    for command in COMMANDS[:2]:
        job(more=dict.fromkeys(WORDS, command))
        assert task(job)[1]["NEW"] == command
        shutil.rmtree(job.save)
        shutil.rmtree(job.records)


def test_what_slurm_says(job):
    """For example a job's name, which any user chooses."""
    job.save.mkdir(parents=True)
    for command in COMMANDS[::2]:
        (job.save / "lock").symlink_to("/r/job-6")
        for of in (f"JobName={command} JobState=RUNNING", f"JobName=x JobState={command}"):
            (job.fake / "state-6").write_bytes(os.fsencode(f"JobId=6 {of} Reason=None\n"))
            assert job()[1][0].startswith("not started: job 6 (")
        (job.save / "lock").unlink()
    job(more={"FAKE_END": COMMANDS[0], "SLURM_JOB_END_TIME": COMMANDS[0]})
    (job.fake / "nvidia-smi").write_text('#!/bin/bash\necho "0000../../../../../$FAKE"\n')
    (job.fake / "numactl").write_text('#!/bin/bash\nexec "${@:3}"\n')
    for name in ("nvidia-smi", "numactl"):
        (job.fake / name).chmod(0o755)
    (job.fake / "numa_node").write_text("a[$(touch PROOF)]\n")
    assert job(step=9)[1][-1] == "done"


def test_values_of_a_file_of_flags(job):
    commands = [command for command in COMMANDS if command.isprintable() or "\n" in command]
    words = [word for command in commands for word in ("--x", command)]
    variables = {f"V{number}": command for number, command in enumerate(commands)}
    job(words=words, variables=variables, mounts="", first=words, more={"NEW": ""})
    said = task(job)[0]
    assert said[: len(words)] == words and said[len(words) + 2 :][: len(words)] == words


@pytest.mark.parametrize("plant", ["link", "dangling link", "file"])
def test_records_that_were_there_before(job, tmp_path, plant):
    """Through a link they would replace this user's files."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/command.txt").write_text("mine")
    job.records.parent.mkdir()
    if plant == "file":
        job.records.touch()
    else:
        job.records.symlink_to(tmp_path / ("home" if plant == "link" else "nowhere"))
    assert job() == (2, [f"{job.records}: another user has made it; use another FOLDER"])
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["command.txt"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_records_that_another_user_made(job, tmp_path):
    job.records.mkdir(parents=True)
    (job.records / "command.txt").symlink_to(tmp_path / "victim")
    os.chown(job.records, 12345, 12345)
    assert job()[0] == 2 and not (tmp_path / "victim").exists()


def test_records_are_this_users_alone_to_write(job):
    old = os.umask(0)
    try:
        job()
    finally:
        os.umask(old)
    assert job.records.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("plant", ["link", "open to all", "another user's"])
def test_a_folder_of_compiled_kernels_that_another_user_made(job, tmp_path, plant):
    """A task would load and run them."""
    folder = job.fake / f"megatron_fp8-{os.getuid()}"
    (tmp_path / "theirs").mkdir(mode=0o700)
    if plant == "link":
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.mkdir(mode=0o700)
        os.chmod(folder, 0o777 if plant == "open to all" else 0o700)
    if plant == "another user's":
        if os.getuid() != 0:
            pytest.skip("only root can play another user")
        os.chown(folder, 12345, 12345)
    _, notes = job()
    used = [task(job)[1][f"{name}_CACHE_DIR"] for name in ("TRITON", "TORCHINDUCTOR")]
    private = {os.path.dirname(path) for path in used}.pop()
    assert private.startswith(f"{folder}-") and [os.path.basename(path) for path in used] == ["triton", "inductor"]
    assert os.stat(private).st_mode & 0o777 == 0o700 and not os.path.islink(private)
    assert f"{folder} is not a folder that only this user can enter: kernels are compiled into a new one" in notes


def test_a_folder_of_compiled_kernels_is_kept_for_later_starts(job):
    caches = []
    for restarts, step in enumerate((5, 9)):
        job(step=step, restarts=restarts)
        caches.append(task(job)[1]["TRITON_CACHE_DIR"])
    assert caches[0] == caches[1] and os.stat(os.path.dirname(caches[0])).st_mode & 0o777 == 0o700


def faster_sleep(job):
    (job.fake / "sleep").write_text("#!/bin/bash\nexec /bin/sleep 0.1\n")
    (job.fake / "sleep").chmod(0o755)


def test_a_lock_that_is_removed_while_the_job_trains_is_made_again(job):
    faster_sleep(job)
    lock = f'"{job.save}/lock"'
    before_the_task(job, f"rm {lock}; until [[ -L {lock} ]]; do /bin/sleep 0.05; done")
    code, notes = job(step=9)
    assert code == 0 and f"{job.save}/lock was removed while this job trains: made again" in notes
    assert not (job.save / "lock").is_symlink()


def test_a_job_whose_lock_another_one_has_taken_is_killed_and_does_not_come_back(job):
    """It saves nothing more: two jobs that write one checkpoint destroy it."""
    faster_sleep(job)
    (job.fake / "scancel").write_text('#!/bin/bash\necho "$*" >>"$FAKE/scancel.log"; kill -KILL "$(cat "$FAKE/pid")"\n')
    until = 'until [[ -s "$FAKE/pid" ]]; do /bin/sleep 0.05; done'
    before_the_task(job, f'exec 2>/dev/null; ({until}; ln -sfn /r/job-8 "{job.save}/lock") &')
    code, notes = job(wait="yes")
    assert code == 1 and notes[1:] == [
        f"{job.save}/lock is another job's now: the tasks are killed, so that only one job trains there",
        "ended with code 137; step 0 of 9 is saved",
        f"another job trains into {job.save}: not requeued",
    ]
    assert (job.save / "lock").readlink().name == "job-8"
    assert (job.fake / "scancel.log").read_text().splitlines()[0] == "--signal=KILL 7.0"


def test_what_grep_takes_for_no_text_is_kept_too(job):
    job(more={"ODD": os.fsdecode(b"\xff\xfe"), "ODDER_TOKEN": "hidden", "DB": "postgres://me:a/hidden@there"})
    environment = (job.records / "environment.txt").read_bytes()
    assert b"ODD=\xff\xfe\n" in environment and b"SLURM_JOB_ID=7\n" in environment and b"hidden" not in environment


def test_a_folder_that_begins_with_a_dash(job, tmp_path):
    given = {"ITERATIONS": "9", "FOLDER": "-x", "SCRIPT": str(tmp_path / "pretrain_gpt_fp8.py"), "PYTHON": "python3"}
    code, _ = job(path=ROOT / "scripts/slurm/train.sbatch", more=given)
    assert code == 0 and (tmp_path / "-x/checkpoints/iter_0000005").is_dir()
