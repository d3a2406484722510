"""Runs Slurm on this machine for tests and trials: slurmctld, one slurmd per node and munged; no systemd, no database.

    python tools/local_slurm.py FOLDER 2 -- bash -c 'sinfo; sbatch --wait --nodes 2 job.sh'

Slurm's programs are the installed ones, or Debian's packages, unpacked into runs/slurm without installing.  They write
only under FOLDER.  It runs as root, or as the only user who submits jobs.  There is no sacct: use squeue and the logs.

The nodes are called 127.0.0.1, 127.0.0.2 and so on. Linux treats these as addresses of this machine, so tasks find one
another by their nodes' names. Each node has all cores of the machine, and all share its files.

KillWait is 5 s instead of 30, and credentials expire after 5 s, so that a requeued job waits for seconds instead of two
minutes. Otherwise a job sees the same signals and requeues as on a cluster.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNPACKED = ROOT / "runs/slurm/debian"
PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 liblua5.1-0 libjson-c5"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
_PATIENCE = 300  # seconds for a daemon to answer
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
{plugins}
PlugStackConfig={plugstack}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
JobRequeue=1
KillWait=5
InactiveLimit=0
SlurmdTimeout=60
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class Unavailable(Exception):
    """Slurm cannot run here; the text is one line that says why."""


def programs() -> Path:
    """The root folder of Slurm's programs: / or UNPACKED, which is made if needed.  Raises Unavailable."""
    names = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
    if all(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in names):
        return Path("/")
    if not (UNPACKED / "complete").exists():
        if not shutil.which("apt-get") or not shutil.which("dpkg"):
            raise Unavailable("slurmctld, slurmd and munged are not installed, and this is no Debian to fetch them")
        _unpack()
    return UNPACKED


def _unpack() -> None:
    shutil.rmtree(UNPACKED, ignore_errors=True)
    UNPACKED.mkdir(parents=True)
    download = ["apt-get", "download", "-qq", *PACKAGES.split()]
    done = None
    for command in (download, ["apt-get", "update", "-qq"], download):
        done = subprocess.run(command, cwd=UNPACKED, capture_output=True, text=True, timeout=300)
        if command is download and done.returncode == 0:
            break
    else:
        said = done.stderr.strip().splitlines() if done else []
        raise Unavailable(f"apt-get cannot download Slurm's packages: {said[-1] if said else 'no reason given'}")
    for package in UNPACKED.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=UNPACKED, check=True)
        package.unlink()
    (UNPACKED / "complete").touch()


@contextlib.contextmanager
def running(folder: Path, nodes: int = 1, plugin: str = "") -> Iterator[dict[str, str]]:
    """Start Slurm and yield the environment for its commands.  Raises Unavailable with the daemons' message.

    plugin: a SPANK plugin's file and options, if any.
    """
    root = programs()
    folder = folder.resolve()
    (folder / "state").mkdir(parents=True, exist_ok=True)
    names = [f"127.0.0.{number}" for number in range(1, nodes + 1)]
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    host = socket.gethostname().split(".")[0]
    values = {
        "host": host,
        "user": getpass.getuser(),
        "folder": folder,
        "plugins": "" if root == Path("/") else f"PluginDir={root / LIBRARIES / 'slurm-wlm'}",
        "plugstack": folder / "plugstack.conf",
        "controller_port": _free_port(),
        "nodes": "\n".join(
            f"NodeName={name} NodeHostname={host} Port={_free_port()} CPUs={os.cpu_count()} RealMemory=1000"
            for name in names
        ),
    }
    (folder / "plugstack.conf").write_text(f"required {plugin}\n" if plugin else "")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    environment = {
        **inherited,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{root / 'usr/bin'}:{root / 'usr/sbin'}:{os.environ['PATH']}:/usr/sbin",
    }
    if root != Path("/"):
        paths = [root / LIBRARIES, root / LIBRARIES / "slurm-wlm", os.environ.get("LD_LIBRARY_PATH")]
        environment["LD_LIBRARY_PATH"] = ":".join(str(path) for path in paths if path)
    with contextlib.ExitStack() as stack:
        for name, *options in (
            ("munged", "--force", "--num-threads=2", f"--key-file={key}", f"--socket={folder}/munge.socket",
             f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"),
            ("slurmctld", "-c"),
            *(("slurmd", "-N", name, "-d", _program(root, "slurmstepd")) for name in names),
        ):  # fmt: skip
            foreground = "--foreground" if name == "munged" else "-D"
            log = stack.enter_context((folder / f"{name}.out").open("a"))
            command = [_program(root, name), foreground, *options]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            stack.callback(_stop, process)
            if name == "munged":
                _wait(lambda: (folder / "munge.socket").exists(), "munged", process, folder)
        _wait(lambda: _state(environment) == ["idle"] * nodes, "a node", process, folder)
        try:
            yield environment
        finally:
            subprocess.run(["scancel", "--user", values["user"], "--signal=KILL", "--full"], env=environment,
                           capture_output=True, timeout=60)  # fmt: skip
            subprocess.run(["scancel", "--user", values["user"]], env=environment, capture_output=True, timeout=60)
            with contextlib.suppress(Unavailable):
                _wait(lambda: not _ask(environment, "squeue", "--noheader"), "an empty queue", process, folder)


def _program(root: Path, name: str) -> str:
    """A program's path. Debian names Slurm's daemons differently and links them only when it installs them."""
    for path in (root / f"usr/sbin/{name}", root / f"usr/sbin/{name}-wlm"):
        if path.exists():
            return str(path)
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        raise Unavailable(f"no {name} here")
    return found


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _ask(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout.strip()


def _state(environment: dict[str, str]) -> list[str]:
    return _ask(environment, "sinfo", "--noheader", "--Node", "--format=%T").split()


def _wait(there, what: str, process: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not there():
        if process.poll() is not None or time.monotonic() > deadline:
            logs = [path.read_text(errors="replace").strip() for path in folder.glob("*.log")]
            words = [line for log in logs for line in log.splitlines() if "error" in line or "fatal" in line]
            raise Unavailable(f"{what} does not come up: {words[-1] if words else 'without a message'}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    """Run a command while Slurm is up. Returns its exit code."""
    if len(sys.argv) < 5 or not sys.argv[2].isdecimal() or sys.argv[3] != "--":
        print("usage: python tools/local_slurm.py FOLDER NODES -- COMMAND", file=sys.stderr)
        return 2
    try:
        with running(Path(sys.argv[1]), int(sys.argv[2])) as environment:
            return subprocess.run(sys.argv[4:], env=environment).returncode
    except Unavailable as reason:
        print(f"local_slurm: {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
