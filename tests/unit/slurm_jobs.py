"""Fixtures that run a job's script without Slurm: fakes replace Slurm's commands, a few lines the training."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_fp8.tools.launch.script import Settings, write_script

# Slurm's commands: srun runs its command as the only task; a requeue ends the script, as Slurm would.
COMMANDS = {
    "srun": 'echo "$*" >"$FAKE/srun.log"; while [[ $1 != bash ]]; do shift; done; SLURM_PROCID=0 SLURM_LOCALID=0 "$@"',
    "scontrol": 'echo "$*" >>"$FAKE/scontrol.log"; case $1:$2 in *:hostnames) echo node1; echo node2;; --oneliner:*)'
    ' cat "$FAKE/state-$4" 2>/dev/null || case $4 in 7) echo "JobId=7 JobName=x EndTime=$FAKE_END Deadline=N/A";;'
    ' *) echo "slurm_load_jobs error: Invalid job id specified" >&2;; esac;;'
    " *) [[ ! -e $FAKE/state-7 ]] && kill -TERM $PPID;; esac",
    "scancel": 'echo "$*" >>"$FAKE/scancel.log"; kill -URG "$(cat "$FAKE/pid")"',
}
SEAL = json.dumps({"algorithm": "sha256", "files": {"metadata.json": "0" * 64}}, indent=2)  # seal.py's form
# A training that saves step FAKE_STEP as FAKE_SEAL says, and ends with FAKE_CODE; at URG, where it is to wait for that.
TRAIN = """
import json, os, signal, sys, time
env = os.environ
json.dump([sys.argv[1:], {n: env[n] for n in env if n in "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR "
           "MASTER_PORT NEW SHELLS TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR OMP_NUM_THREADS".split()}],
          open(env["FAKE"] + "/task.json", "w"))
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
for name in ("metadata.json", env["FAKE_SEAL"]):
    open(folder + "/" + name, "w").write(env["FAKE_CONTENT"])
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
    """Starts a job's script. Returns (exit code, its log lines)."""
    fake = tmp_path / "fake"
    fake.mkdir()
    for name, text in COMMANDS.items():
        (fake / name).write_text(f"#!/bin/bash\n{text}\n")
        (fake / name).chmod(0o755)

    def start(step=5, seal="integrity.json", code=0, restarts=0, wait="", more=None, path=None, **changes):
        path = path or write_script(settings(**changes))
        of_torch = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS"
        mine = {name: value for name, value in os.environ.items() if name not in of_torch}
        environment = {
            **mine, "PATH": f"{fake}:{os.environ['PATH']}", "FAKE": str(fake), "FAKE_STEP": str(step),
            "FAKE_SEAL": seal, "FAKE_CODE": str(code), "FAKE_WAIT": wait, "FAKE_END": "2099-01-01T00:00:00",
            "FAKE_CONTENT": SEAL, "TMPDIR": str(fake),
            "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), "SLURM_NNODES": "1", "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(tmp_path), "SHELLS": "shell",
            "SLURM_JOB_END_TIME": str(int(time.time()) + 7230), "MY_API_KEY": "hidden",
            "DB_PASS": "hidden", "SLURM_JWT": "hidden",
            "PROXY": "http://me:hidden@there", **(more or {}),
        }  # fmt: skip
        with (fake / "said").open("w") as said:  # a file: a process that still sleeps would keep a pipe open
            process = subprocess.Popen(["bash", str(path)], cwd=tmp_path, env=environment, stdout=said, stderr=said,
                                       start_new_session=True)  # fmt: skip
            try:
                code = process.wait(600)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        lines = (fake / "said").read_text(errors="surrogateescape").splitlines()
        assert all(line.startswith("[job] ") for line in lines), lines
        return code, [line.split(" ", 2)[2] for line in lines]

    start.fake, start.records, start.save = fake, tmp_path / "job/job-7", tmp_path / "job/save"
    return start


def checkpoint(folder):
    """Make a complete checkpoint."""
    folder.mkdir(parents=True)
    for name in ("metadata.json", "integrity.json"):
        (folder / name).write_text(SEAL)


def requeues(job) -> int:
    return (job.fake / "scontrol.log").read_text().count("requeue 7")


def before_the_task(job, text: str) -> None:
    """Lines for the fake srun."""
    (job.fake / "srun").write_text((job.fake / "srun").read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n{text}\n"))


def task(job):
    return json.loads((job.fake / "task.json").read_text())
