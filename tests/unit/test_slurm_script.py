"""`megatron-fp8 launch`: what it writes, and what the script does, with Slurm's commands played by others.

On a real Slurm: tests/cpu/test_slurm.py.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from commands import error_of
from launch import ROOT

from megatron_fp8.cli import main
from megatron_fp8.launch import main as launch_main
from megatron_fp8.launch.script import Settings, seconds, steps_of, write_script

SCRIPTS = sorted((ROOT / "scripts/slurm").iterdir())
# Slurm's commands: srun runs its command as the only task; a requeue ends the script, as Slurm would.
COMMANDS = {
    "srun": 'echo "$*" >"$FAKE/srun.log"; while [[ $1 != bash ]]; do shift; done; SLURM_PROCID=0 SLURM_LOCALID=0 "$@"',
    "scontrol": 'echo "$*" >>"$FAKE/scontrol.log"; case $1:$2 in *:hostnames) echo node1; echo node2;; --oneliner:*)'
    ' cat "$FAKE/state-$4" || echo "slurm_load_jobs error: Invalid job id specified" >&2;;'
    " *:job) echo ' StartTime=x EndTime='$FAKE_END;; *) [[ ! -e $FAKE/state-7 ]] && kill -TERM $PPID;; esac",
    "scancel": 'echo "$*" >>"$FAKE/scancel.log"; kill -URG "$(cat "$FAKE/pid")"',
}
# A training that saves step FAKE_STEP as FAKE_SEAL says, and ends with FAKE_CODE; at URG, where it is to wait for that.
TRAIN = """
import json, os, signal, sys, time
env = os.environ
json.dump([sys.argv[1:], {n: env[n] for n in env if n in "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR "
           "MASTER_PORT NEW SHELLS TRITON_CACHE_DIR".split()}], open(env["FAKE"] + "/task.json", "w"))
if env.get("FAKE_WAIT"):
    told = []
    signal.signal(signal.SIGURG, lambda *_: told.append(1))
    open(env["FAKE"] + "/pid", "w").write(str(os.getpid()))
    while not told:
        time.sleep(0.05)
if env["FAKE_CODE"] == "2":  # as flags/usage.py
    open(env["TORCHELASTIC_ERROR_FILE"], "w").close()
folder = sys.argv[sys.argv.index("--save") + 1] + "/iter_%07d" % int(env["FAKE_STEP"])
os.makedirs(folder, exist_ok=True)
open(folder + "/" + env["FAKE_SEAL"], "w").close()
sys.exit(int(env["FAKE_CODE"]))
"""


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "pretrain_gpt_fp8.py").write_text(TRAIN)

    def settings(**changes):
        of_a_job = {
            "name": "small", "nodes": 1, "tasks_per_node": 2, "gpus_per_node": 2, "time": "1:00:00",
            "folder": tmp_path / "job", "save": tmp_path / "job/save", "steps": 9, "first": [],
            "words": ["--lr", "1", "--bf16", "--data-path", "0.5", "a b"],
            "variables": {"NEW": "it's {new}", "SHELLS": "1"},
            "script": tmp_path / "pretrain_gpt_fp8.py", "python": sys.executable, "container": "",
            "mounts": "", "sbatch": "", "max_restarts": 3,
        }  # fmt: skip
        return Settings(**{**of_a_job, **changes})

    return settings


@pytest.fixture
def job(settings, tmp_path):
    """Starts a job's script: (exit code, what it noted)."""
    fake = tmp_path / "fake"
    fake.mkdir()
    for name, text in COMMANDS.items():
        (fake / name).write_text(f"#!/bin/bash\n{text}\n")
        (fake / name).chmod(0o755)

    def start(step=5, seal="integrity.json", code=0, restarts=0, wait="", more=None, **changes):
        script = write_script(settings(**changes))
        environment = {
            **os.environ, "PATH": f"{fake}:{os.environ['PATH']}", "FAKE": str(fake), "FAKE_STEP": str(step),
            "FAKE_SEAL": seal, "FAKE_CODE": str(code), "FAKE_WAIT": wait, "FAKE_END": "2099-01-01T00:00:00",
            "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), "SLURM_NNODES": "1", "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(tmp_path), "SHELLS": "shell",
            "SLURM_JOB_END_TIME": str(int(time.time()) + 7230), "MY_API_KEY": "hidden",
            "DB_PASS": "hidden", "SLURM_JWT": "hidden",
            "PROXY": "http://me:hidden@there", **(more or {}),
        }  # fmt: skip
        with (fake / "said").open("w") as said:  # a file: what sleeps when the script ends would hold a pipe open
            process = subprocess.Popen(["bash", str(script)], cwd=tmp_path, env=environment, stdout=said, stderr=said,
                                       start_new_session=True)  # fmt: skip
            try:
                code = process.wait(600)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        lines = (fake / "said").read_text().splitlines()
        assert all(line.startswith("[job] ") for line in lines), lines
        return code, [line.split(" ", 2)[2] for line in lines]

    start.fake, start.records, start.save = fake, tmp_path / "job/job-7", tmp_path / "job/save"
    return start


def requeues(job) -> int:
    return (job.fake / "scontrol.log").read_text().count("requeue 7")


def before_the_task(job, text: str) -> None:
    """Lines for the fake srun."""
    (job.fake / "srun").write_text((job.fake / "srun").read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n{text}\n"))


def task(job):
    return json.loads((job.fake / "task.json").read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script, settings):
    if not shutil.which("shellcheck"):
        pytest.skip("needs shellcheck (Debian's package of that name)")
    paths = [script] if script.suffix == ".sh" else [script, write_script(settings(first=["--load", "x"]))]
    for path in paths:
        done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_job_that_has_saved_is_requeued_until_it_is_done(job):
    assert job()[1][1:] == ["ended with code 0; step 5 of 9 is saved", "requeued, to go on from step 5"]
    assert requeues(job) == 1
    code, notes = job(step=9, restarts=1)
    assert (code, notes[0]) == (0, "start 1 on node[1-2], from step 5 of 9, for 105 minutes")
    assert notes[1:] == ["ended with code 0; step 9 of 9 is saved", "done"] and requeues(job) == 1
    assert job(restarts=2) == (0, ["step 9 of 9 is saved: done"])


@pytest.mark.parametrize(("code", "seal"), [(0, "metadata.json"), (1, "unsealed"), (137, "metadata.json")])
def test_only_whole_checkpoints_are_progress(job, code, seal):
    for restarts in (0, 1):
        assert job(code=code, seal=seal, restarts=restarts)[1][-1] == "requeued, to go on from step 0"
    failed = "started 3 times from step 0, and saved nothing: failed"
    ended, notes = job(code=code, seal=seal, restarts=2)
    assert ended == 1 and notes[1:] == [f"ended with code {code}; step 0 of 9 is saved", failed]
    assert job(restarts=3) == (1, [failed]) and requeues(job) == 2  # however the third start ended


def test_a_sealed_checkpoint_with_a_save_under_way_is_none(job):
    job()
    (job.save / "iter_0000005/unsealed").touch()
    assert job(restarts=1, step=4, code=1)[1][0].startswith("start 1 on node[1-2], from step 0 of 9")


@pytest.mark.parametrize("copy", ["iter_0000005_20250101", "iter_0000005_good", "iter_0000005.bak", "iter_5_9"])
def test_a_copy_of_a_checkpoint_is_none(job, copy):
    job()
    shutil.copytree(job.save / "iter_0000005", job.save / copy)
    assert job(restarts=1, step=6)[1][-2:] == [
        "ended with code 0; step 6 of 9 is saved", "requeued, to go on from step 6"
    ]  # fmt: skip


def test_who_turns_the_tracker_back_goes_on_from_there(job):
    """As loads.py does."""
    job()
    (job.save / "iter_0000003").mkdir()
    (job.save / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert job(restarts=1)[1][0].startswith("start 1 on node[1-2], from step 3 of 9")
    (job.save / "latest_checkpointed_iteration.txt").write_text("4")  # which is not there
    assert job(restarts=2)[1][0].startswith("start 2 on node[1-2], from step 5 of 9")


def test_stocks_checkpoints_count_by_its_tracker(job):
    job.save.mkdir(parents=True)
    (job.save / "latest_checkpointed_iteration.txt").write_text("5")
    assert job(seal="metadata.json")[1][-1] == "requeued, to go on from step 5"


def test_a_crash_after_a_save_is_requeued_and_a_mistake_is_not(job):
    assert job(code=1)[1][-1] == "requeued, to go on from step 5"
    ended, notes = job(code=2, restarts=1)
    assert ended == 2 and notes[-1] == "a mistake in the command, see above: not requeued"
    assert job(code=1, step=6, restarts=2)[1][-1] == "requeued, to go on from step 6"


def test_what_passes_is_no_mistake(job):
    """flags/usage.py says so in the same file."""
    said = json.dumps({"message": {"extraInfo": {"passing": True}}})
    before_the_task(job, f"echo '{said}' >{job.records}/mistake.json")
    assert job(code=1, seal="metadata.json")[1][-1] == "requeued, to go on from step 0"


def test_what_hangs_does_not_end_the_job(job):
    """Slurm does not bring back a job that its time limit ends: the step is killed before."""
    (job.fake / "scancel").write_text('#!/bin/bash\necho "$*" >>"$FAKE/scancel.log"; kill -KILL "$(cat "$FAKE/pid")"\n')
    (job.fake / "sleep").write_text("#!/bin/bash\nexec /bin/sleep 0.1\n")
    (job.fake / "sleep").chmod(0o755)
    before_the_task(job, "exec 2>/dev/null")  # what bash says of a task that was killed
    # Two hours pass as the task begins.
    date = 'if [[ $1 == +%s && -e $FAKE/pid ]]; then echo $(($(/bin/date +%s) + 7200)); else exec /bin/date "$@"; fi'
    (job.fake / "date").write_text(f"#!/bin/bash\n{date}\n")
    (job.fake / "date").chmod(0o755)
    _, notes = job(wait="yes")
    assert notes[1:] == ["the tasks have not ended: killed, for the time is over",
                         "ended with code 137; step 0 of 9 is saved", "requeued, to go on from step 0"]  # fmt: skip
    assert (job.fake / "scancel.log").read_text() == "--signal=KILL 7.0\n"


def test_a_start_without_time_to_train(job):
    """Of sbatch --time=10, say: told to stop from its first second, each start would train one step."""
    code, notes = job(more={"SLURM_JOB_END_TIME": str(int(time.time()) + 590)})
    assert code == 2 and re.fullmatch(
        r"not started: 5\d\d seconds are left, and 600 before the end it would be told to stop", notes[0]
    )
    assert not (job.fake / "task.json").exists()


@pytest.mark.parametrize(
    ("state", "code", "note"),
    [
        ("PENDING", 143, "Slurm has requeued it by itself, as it does when a node fails"),
        ("COMPLETING", 143, "Slurm has requeued it by itself, as it does when a node fails"),
        ("RUNNING", 1, "Slurm does not requeue this job: submit it again"),
    ],
)
def test_a_requeue_that_slurm_refuses(job, state, code, note):
    (job.fake / "state-7").write_text(f"JobId=7 JobName=x JobState={state} Reason=None\n")
    ended, notes = job(code=1)
    assert (ended, notes[-2:]) == (code, ["requeued, to go on from step 5", note])


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
    """A user's, by USR2; Slurm's own is USR1."""
    before_the_task(job, '(until [[ -e "$FAKE/pid" ]]; do sleep 0.1; done; kill -USR2 $PPID) &')
    _, notes = job(wait="yes")
    told = ["told to stop: the tasks save and end", "ended with code 0; step 5 of 9 is saved"]
    assert notes[1:] == [*told, "requeued, to go on from step 5"]
    assert "--signal=URG 7.0" in (job.fake / "scancel.log").read_text()


def test_what_a_task_is_given(job, tmp_path):
    job(first=["--load", "there", "--finetune"])
    words, variables = task(job)
    own = ["--exit-signal-handler", "--exit-signal", "SIGURG", "--exit-duration-in-mins"]
    flags = ["--lr", "1", "--bf16", "--data-path", "0.5", "a b", "--save", str(job.save)]
    assert words[:-1] == [*flags, "--load", "there", "--finetune", *own] and words[-1] in ("104", "105")
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "node1", "MASTER_PORT": "20049", "NEW": "it's {new}", "SHELLS": "shell"}
    cache = variables.pop("TRITON_CACHE_DIR")
    assert variables == ranks | place and cache.startswith("/tmp/")
    job(first=["--load", "there", "--finetune"], restarts=1, more={"SLURM_JOB_END_TIME": "", "FAKE_END": "Unknown"})
    assert task(job)[0] == [*flags, "--load", str(job.save), *own[:-1]]
    job(restarts=1, more={"SLURM_JOB_END_TIME": str(int(time.time()) + 655)})
    assert task(job)[0][-1] == "8"  # of ten minutes four fifths


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
    """Before it trains, and without a start that would count."""
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
    (job.save / "lock").symlink_to(job.records)  # its own, of a start that was killed
    for restarts, step in enumerate((5, 9)):
        job(step=step, restarts=restarts)
        assert (job.fake / "held").read_text() == f"{job.records}\n"
        assert not (job.save / "lock").is_symlink()
    job(restarts=2)
    assert not (job.save / "lock").is_symlink()  # of a start that had nothing to do


def test_a_lock_that_another_job_takes_over_meanwhile_is_left_to_it(job):
    """Both found job 6 gone; the other one, 8, was faster."""
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
    code, notes = job()
    assert code == 2 and notes[0].endswith(f"'{job.save}/lock': File exists")


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
    """As pyxis sets them; and sbatch's --export=NONE, which srun takes over, does not come before them either."""
    before_the_task(job, 'export NEW=images SHELLS=images MASTER_PORT=61007')
    before_the_task(job, '[[ " $* " == *" --export=ALL "* ]] || exit 3')
    assert job()[1][1] == "ended with code 0; step 5 of 9 is saved"
    variables = task(job)[1]
    assert (variables["NEW"], variables["SHELLS"], variables["MASTER_PORT"]) == ("it's {new}", "shell", "20049")
    assert "it's {new}" not in (job.fake / "srun.log").read_text()  # where others may read it


def test_the_network_between_nodes_is_named(job):
    """That of this start: what NCCL said in an earlier one is gone."""
    job.records.mkdir(parents=True)
    (job.records / "nccl.txt").write_text("Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0\n")
    nccl = f'echo "Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0" >>"{job.records}/nccl.txt"'
    wait = 'until grep -q "that is TCP" "$FAKE/said"; do sleep 0.1; done'  # a job that ended at once would not say it
    before_the_task(job, f"{nccl}\n{wait}")
    (job.fake / "sleep").write_text("#!/bin/bash\nexec /bin/sleep 0.1\n")  # it looks every 20 seconds
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


# --- what is written


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_main, "_check", lambda *_: True)
    flags = "--train-iters: 20, --save-interval: 5, --load: there, --finetune: true, --swiglu: true, --fp8-level: O1"
    (tmp_path / "one.yaml").write_text(f"ENV_VARS: {{NEW: 1, TOP: $WHERE}}\nMODEL_ARGS: {{{flags}}}")
    monkeypatch.setenv("WHERE", "here")

    def launch(*words):
        code = 0
        try:
            code = main(["launch", "one.yaml", "--nodes", "2", *words])
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return launch


def test_launch_writes_a_script(launch, tmp_path):
    (tmp_path / "site.env").write_text("# a comment\nNCCL_X=a\nexport NCCL_Y='b c' # why\n")
    code, said = launch("--level", "O3", "--flags=--lr 3", "--cluster", "site.env", "--sbatch=--account='a b' -p gpu")
    assert code == 0 and said.splitlines()[-1] == f"submit it: sbatch {tmp_path}/runs/one/one.sbatch"
    text = (tmp_path / "runs/one/one.sbatch").read_text()
    head = text[: text.index("\n#\n")].splitlines()
    assert head[0] == "#!/bin/bash" and all(line.startswith("#SBATCH ") for line in head[1:])
    for option in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--signal=B:USR1@600", "--requeue",
                   "--open-mode=append", "--exclusive", "--mem=0", "--wait-all-nodes=1", "--account='a b' -p gpu",
                   f'--output="{tmp_path}/runs/one/log-%j.txt"'):  # fmt: skip
        assert f"#SBATCH {option}" in head, option
    assert "ITERATIONS=20\n" in text and "FIRST=(--load there --finetune)\n" in text
    flags = ("--train-iters 20", "--save-interval 5", "--swiglu", "--lr 3", "--fp8-level O3")
    assert "\nset -- \\\n    " + " \\\n    ".join(flags) + "\n" in text
    for line in ("NEW=${NEW-1}", "TOP=${TOP-here}", "NCCL_X=${NCCL_X-a}", "NCCL_Y=${NCCL_Y-'b c'}"):
        assert f"\nexport {line}\n" in text
    assert text.endswith((ROOT / "scripts/slurm/train.sbatch").read_text().partition("# <<< settings")[2])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--nodes 0", "--nodes 0: use 1 or more"),
        ("--gpus-per-node 0", "--gpus-per-node 0: add --tasks-per-node N"),
        ("--gpus-per-node 0 --tasks-per-node 0", "--tasks-per-node 0: use 1 or more"),
        ("--time 1x", "--time 1x: use minutes, HH:MM:SS or D-HH:MM:SS"),
        ("--cluster nowhere", "--cluster nowhere: no such file, nor is one of that name shipped; give its path"),
        ("--cluster infinibad", "did you mean infiniband?"),
        ("--cluster wrong.env", "wrong.env:1: two words: write NAME=VALUE"),
        ("--cluster bytes.env", "--cluster bytes.env: no text file; write lines NAME=VALUE"),
        ("--cluster shell.env", "shell.env:2: A=/x:$A: taken letter for letter; write it out, or set it in the shell"),
        ("--script nothing.py", "--script nothing.py: no such script; give its path"),
        ("--flags=--exit-signal=SIGTERM", "--exit-signal: the job's script sets it"),
        ("--flags='", "--flags ': No closing quotation; close it"),
        ("--flags=other.yaml", "--flags 'other.yaml': flags begin with a dash"),
        ("--cluster=", "--cluster '': an empty value"),
        ("--name a/b", "--name a/b: use letters"),
        ("--name ..", "--name ..: use letters, digits, '.', '_' and '-', and more than dots"),
        ("--gpus-per-node -1", "--gpus-per-node -1: use 0 or more"),
        ("--tasks-per-node 4", "--tasks-per-node 4: one a GPU; remove it, or add --gpus-per-node 0"),
        ("--steps 10", "--steps 10: the flags say 20; remove it, or change --train-iters or --train-samples"),
        ("--mounts A:B", "--mounts A:B: no container is there; add --container, or remove it"),
        ("--flags=--train-iters=0", "--train-iters 0: use 1 or more"),
        ("--folder one.yaml", "one.yaml: File exists; use another"),
        ("--folder one.yaml/x", "one.yaml/x: Not a directory; use another"),
        ('--folder a"b', "Slurm takes no quote, backslash or line break; use another"),
        ("--container image --folder at-12:30", "at-12:30: --container mounts it, and takes no ',' or ':' in it; use"),
        ("--container image --flags=--save=a,b", "/a,b: --container mounts it, and takes no ',' or ':' in it; use"),
        ("--partition gpu", '--partition gpu: an option of sbatch\'s; write --sbatch="--partition=gpu", with all'),
        ("-A me", '-A me: an option of sbatch\'s; write --sbatch="--account=me", with'),
        ("--qos=high", '--qos high: an option of sbatch\'s; write --sbatch="--qos=high", with'),
        ("--gres gpu:8", 'write --sbatch="--gres=gpu:8", with'),
        ("--constraint h100&ib", 'write --sbatch="--constraint=h100&ib", with'),
        ("--exclusive", '--exclusive: an option of sbatch\'s; write --sbatch="--exclusive", with'),
        ("--submit", "--submit: no sbatch here; on a node that has it: sbatch "),
        ("--sbatch=--time=10", "--time=10: the job's script is written for another; use --time of launch"),
        ("--sbatch=-N4", "--sbatch -N4: the job's script is written for another; use --nodes of launch"),
        ("--sbatch=--signal=B:USR1@60", "--signal=B:USR1@60: the job's script is written for another; remove it"),
        ("--cluster remark.env", "remark.env:1: HCA=mlx5   which adapters: one value; quote it, or put # before a"),
        ("--flags=--save=had --flags=--load=had --flags=--ckpt-step=3", "/had has step 5 too, and a job goes on from"),
    ],
)
def test_a_mistake_is_one_line(launch, tmp_path, monkeypatch, words, line):
    (tmp_path / "bytes.env").write_bytes(b"\xff\xfe")
    (tmp_path / "wrong.env").write_text("two words\n")
    (tmp_path / "shell.env").write_text("B=1\nA=/x:$A\n")
    (tmp_path / "remark.env").write_text("HCA=mlx5   which adapters\n")
    (tmp_path / "had/iter_0000005").mkdir(parents=True)
    (tmp_path / "had/iter_0000005/integrity.json").touch()
    monkeypatch.setenv("PATH", "/nowhere")
    code, said = launch(*words.split())
    assert code == 2 and line in said.splitlines()[-1] and said.splitlines()[-1].startswith("megatron_fp8: ")


def test_a_folder_with_a_blank_and_a_percent_sign(launch, tmp_path, monkeypatch):
    """Its lines can be pasted, and Slurm fills in nothing but the log's own %j."""
    path = f"{tmp_path}/a %j b/one.sbatch"
    assert launch("--folder", "a %j b")[1].splitlines()[-1] == f"submit it: sbatch '{path}'"
    assert f'#SBATCH --output="{tmp_path}/a %%j b/log-%j.txt"\n' in (tmp_path / "a %j b/one.sbatch").read_text()
    monkeypatch.setenv("PATH", "/nowhere")
    assert launch("--folder", "a %j b", "--submit")[1].endswith(f"on a node that has it: sbatch '{path}'\n")
    monkeypatch.setattr(launch_main, "_submit", lambda path: "12")
    line = f"job 12; its log: '{tmp_path}/a %j b/log-JOB.txt'; to stop it for good: touch '{tmp_path}/a %j b/exit'"
    assert launch("--folder", "a %j b", "--submit")[1].splitlines()[-1] == line


def test_options_given_twice_both_count(launch, tmp_path):
    (tmp_path / "a.env").write_text("A=1\n")
    words = "--flags=--lr=3 --flags=--seed=7 --sbatch=--partition=gpu --sbatch=--qos=high --mounts=/a:/a --mounts=/b:/b"
    assert launch(*words.split(), "--container", "x", "--cluster", "a.env", "--cluster", "infiniband")[0] == 0
    text = (tmp_path / "runs/one/one.sbatch").read_text()
    for line in ("#SBATCH --partition=gpu --qos=high", "MOUNTS=/a:/a,/b:/b", "    --lr 3 \\", "    --seed 7",
                 "export A=${A-1}", "export NCCL_DEBUG=${NCCL_DEBUG-WARN}"):  # fmt: skip
        assert f"\n{line}\n" in text, line


@pytest.mark.parametrize("name", ["infiniband", "ethernet"])
def test_every_line_of_a_shipped_cluster_may_be_taken(launch, tmp_path, name):
    text = (ROOT / f"configs/cluster/{name}.env").read_text()
    assert re.subn(r"(?m)^# (?=[A-Z_]+=)", "", text)[1] > 2
    (tmp_path / "mine.env").write_text(re.sub(r"(?m)^# (?=[A-Z_]+=)", "", text))
    assert launch("--cluster", "mine.env")[0] == 0
    script = (tmp_path / "runs/one/one.sbatch").read_text()
    assert all(" " not in value for value in re.findall(r"(?m)^export (?:NCCL|GLOO)_\w+=(.*)", script))


def test_flags_of_a_first_start_in_a_folder_that_has_a_checkpoint(launch, tmp_path):
    assert "note: --load there" not in launch("--flags=--save=had")[1]
    (tmp_path / "had/iter_0000005").mkdir(parents=True)
    (tmp_path / "had/iter_0000005/integrity.json").touch()
    note = "note: --load there --finetune: of a first start alone; this job goes on from step 5, "
    note += f"which {tmp_path}/had has"
    assert note in launch("--flags=--save=had")[1].splitlines()
    (tmp_path / "had/iter_0000005/unsealed").touch()
    assert "note: --load there" not in launch("--flags=--save=had")[1]


def test_an_option_of_sbatchs_with_a_space_is_quoted(launch):
    assert "write --sbatch=\"--comment='two words'\", with" in launch("--comment", "two words")[1]


def test_launchs_own_short_forms_stay(launch):
    """Of which sbatch's options, though launch knows some of them, are none."""
    assert "--nodes 0: use 1 or more" in launch("--node=0")[1]


@pytest.mark.parametrize("flags", ["--save", "--save=", "--save ''", "--save a b"])
def test_one_folder_of_saves(launch, flags):
    code, said = launch(f"--flags={flags}")
    assert code == 2 and "--save" in said and "use one folder, or remove it" in said


def test_submit(launch, tmp_path, monkeypatch):
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    for text, code, line in (
        ('[[ $1 == --parsable ]] && echo "12;cluster"', 0, f"job 12; its log: {tmp_path}/runs/one/log-JOB.txt"),
        ("echo 'no such partition' >&2; exit 1", 2, "megatron_fp8: --submit: sbatch: no such partition; see "),
    ):
        sbatch.write_text(f"#!/bin/bash\n{text}\n")
        sbatch.chmod(0o755)
        found, said = launch("--submit")
        assert found == code and said.splitlines()[-1].startswith(line)


def test_a_job_that_is_submitted_in_a_job_inherits_nothing_of_it(launch, tmp_path, monkeypatch):
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/bash\nenv >{tmp_path}/given; echo 12\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", "there")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    for inside, left in ((False, {"SLURM_CONF=there", "SLURM_CPUS_PER_TASK=1"}), (True, {"SLURM_CONF=there"})):
        if inside:
            monkeypatch.setenv("SLURM_JOB_ID", "11")
        assert launch("--submit")[0] == 0
        assert {line for line in (tmp_path / "given").read_text().splitlines() if line.startswith("SLURM_")} == left


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--lr-warm-samples 1", "on 16 ranks: unrecognized arguments: --lr-warm-samples 1, did you mean --lr-warmup-"),
        pytest.param("--global-batch-size 7", "on 16 ranks: ", marks=pytest.mark.slow),
    ],
)
def test_flags_that_megatron_would_refuse_are_refused_here(tmp_path, flags, line):
    files = ["model/gpt-125m", "layout/gpt-125m-8gpus", "recipe/pretrain", "recipe/gpt-125m", "recipe/mock-data"]
    command = [sys.executable, "-m", "megatron_fp8.cli", "launch", *files, "--nodes", "2", f"--flags={flags}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and said.startswith(f"megatron_fp8: {line}"), done.stderr
    assert not (tmp_path / "runs").exists()


def test_time_and_steps():
    times = {"90": 5400, "30:10": 1810, "2:00:00": 7200, "1-12": 129600, "1-12:30": 131400, "1-00:00:09": 86409}
    assert {time: seconds(time) for time in times} == times
    assert steps_of({"--train-iters": ["7"]}) == steps_of({"--train-iters": ["7"]}, 7) == steps_of({}, 7) == 7
    assert steps_of({"--train-samples": ["100"], "--global-batch-size": ["32"]}) == 3
    assert error_of(steps_of, {}).startswith("--train-iters: missing; give it, or --train-samples")
    assert error_of(steps_of, {"--train-iters": ["x"]}) == "--train-iters x: use a whole number"
    assert re.match(r"--time 0:30: use a minute", error_of(seconds, "0:30"))
