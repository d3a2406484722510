"""Child processes: their output is read, and all of them end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from lab_runs import gone, wait_for
from launch import ROOT

from megatron_fp8 import processes
from megatron_fp8.processes import TorchRun, identity, last_words, living, stop


@pytest.mark.slow  # test_launch.py's run that fails shows its own words, through another door
def test_torchrun_starts_every_process_and_reports_its_failure(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "said = f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n\"\n"
        "os.write(1, said.encode())\n"  # in one write, so that the other rank's output does not get in between
        "if os.environ['RANK'] == '0':\n"
        "    open(sys.argv[2], 'w').close()\n"
        "    time.sleep(600)\n"
        "while not os.path.exists(sys.argv[2]):\n"
        "    time.sleep(0.05)\n"
        "sys.exit('the cause')\n"
    )
    run = TorchRun(("train.py", "--to", "begun"), 2, tmp_path / "logs/log.txt", {}, folder=tmp_path)
    try:
        while run.poll() is None:
            run.wait()
            run.lines()
        run.lines()
        assert run.poll() == 1 and run.silent
        assert "the cause" in run.end() and "ChildFailedError" not in run.end()
    finally:
        run.close()
    log = (tmp_path / "logs/log.txt").read_text()
    for rank in (0, 1):
        assert f"rank {rank} of 2 ['--to', 'begun']" in log
    assert "ChildFailedError" in log


def test_a_run_listens_on_the_loopback_interface_alone(tmp_path):
    """torch's store would listen on all interfaces, and gloo on that of the host's name."""
    (tmp_path / "train.py").write_text(
        "import os, time, torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "open(f'up{dist.get_rank()}', 'w').close()\n"
        "while not os.path.exists('seen'):\n"
        "    time.sleep(0.05)\n"
    )
    abroad = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}  # a user's settings for a cluster
    run = TorchRun(("train.py",), 1, tmp_path / "log.txt", abroad, folder=tmp_path)
    try:
        wait_for(lambda: run.poll() is not None or (tmp_path / "up0").exists())
        assert run.poll() is None, run.lines()
        launcher = psutil.Process(run._process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        found = {process.pid: listening(process) for process in family}
        (tmp_path / "seen").touch()
        while run.poll() is None:
            run.wait()
            run.lines()
        assert run.poll() == 0
    finally:
        run.close()
    assert len(found[launcher.pid]) == 1 and sum(map(len, found.values())) >= 2  # the store; gloo in the rank
    assert {address for addresses in found.values() for address in addresses} == {"0100007F"}  # 127.0.0.1, in hex


def listening(process: psutil.Process) -> list[str]:
    """The addresses at which a process listens, in the notation of /proc/net/tcp and tcp6."""
    sockets = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")}
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                addresses.append(fields[1].partition(":")[0])
    return addresses


def test_a_run_is_stopped_with_all_its_processes(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log.txt"
    run = TorchRun((str(script),), 1, log, {})

    def started():
        run.lines()
        return "child" in log.read_text()

    wait_for(started)
    child = psutil.Process(int(log.read_text().split("child ")[1].split()[0]))
    family = [child, *child.parents()[:2]]  # with the script and torchrun
    monkeypatch.setattr(processes, "_PATIENCE", 1)
    run.close()
    for process in family:
        wait_for(lambda process=process: gone(process.pid))


def test_a_zombie_is_not_waited_for(monkeypatch):
    """If a container's first process reaps no zombies, each run of a killed sweep would cost twice ten seconds."""
    parent = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    killed = []
    monkeypatch.setattr(processes, "_PATIENCE", 5)
    monkeypatch.setattr(psutil.Process, "kill", lambda process: killed.append(process.pid))
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as unaware:
        try:
            child = psutil.Process(int(unaware.stdout.readline()))
            stop(child)
            assert child.status() == psutil.STATUS_ZOMBIE and not killed
        finally:
            unaware.kill()


def test_all_lines_except_the_last_are_complete(tmp_path, monkeypatch):
    """However the output is cut into reads."""
    monkeypatch.setattr(processes, "LAUNCHER", (sys.executable,))
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "for i, text in enumerate(['on', 'e\\ntwo\\r\\n', '\\n', 'thr', 'ee']):\n"
        "    os.write(1, text.encode())\n"
        "    while not os.path.exists(f'read{i}'):\n"
        "        time.sleep(0.01)\n"
    )
    run, log, read, size = TorchRun(("train.py",), 1, tmp_path / "log.txt", {}, tmp_path), tmp_path / "log.txt", [], 0
    for i, (more, expected) in enumerate([(2, []), (7, ["one", "two"]), (1, [""]), (3, []), (2, [])]):
        size, read = size + more, []
        while log.stat().st_size < size:
            run.wait()
            read += run.lines()
        assert read == expected
        (tmp_path / f"read{i}").touch()
    read = []
    while not run.silent:
        run.wait()
        read += run.lines()
    run.close()
    assert read == ["three"] and run.end() == "one\ntwo\n\nthree"


def test_reading_a_run_that_prints_without_end_returns(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LAUNCHER", (sys.executable,))
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    run, reads = TorchRun(("train.py",), 1, tmp_path / "log.txt", {}, tmp_path), 0

    def read(descriptor, count):
        nonlocal reads
        reads += 1
        assert reads < 1000
        return b"more\n" * (count // 5)

    with monkeypatch.context() as patch:
        patch.setattr(processes.os, "read", read)
        assert set(run.lines()) == {"more"} and set(run.lines()) == {"more"} and not run.silent
    run.close()


def test_last_words_are_the_commands_own():
    lines = [*map(str, range(40)), "E0101 torch/distributed/elastic/multiprocessing/api.py:874] failed", "Error: ..."]
    assert last_words(lines).split("\n") == [*map(str, range(15, 40))]
    assert last_words(["a", "b"]) == "a\nb" and last_words([]) == ""


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with processes.ended_like_ctrl_c():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is not signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_is_not_confused_with_a_later_one():
    with subprocess.Popen(["sleep", "60"]) as process:
        known = identity(process.pid)
        assert living(known).pid == process.pid
        assert living(f"{process.pid}:1000.00") is None
        process.kill()
    for past in (known, "", None, "x:y"):
        assert living(past) is None


PARENT = """
import multiprocessing.process, os, time
from megatron_fp8.processes import end_children_with_parent

def wait_for_work(queue):
    queue.put(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    base = multiprocessing.process.BaseProcess
    base.start = end_children_with_parent(base.start)
    kept = []
    for mode in "spawn", "fork", "forkserver":
        context = multiprocessing.get_context(mode)
        manager = context.Manager()  # like Megatron's for the results of a save
        queue = manager.Queue()
        kept.append((manager, queue))
        context.Process(target=wait_for_work, args=(queue,)).start()  # like its writer between two saves
        folder = os.path.dirname(manager._address)
        print(manager._process.pid, queue.get(), folder, flush=True)
    time.sleep(600)
"""


def test_children_of_a_killed_process_end(tmp_path):
    """Managers and workers of each start method, the fork server and the tracker end; managers' folders are removed."""
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, "parent.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        try:
            said = [parent.stdout.readline().split() for _ in range(3)]
            family = psutil.Process(parent.pid).children(recursive=True)
            folders = [Path(folder) for *_, folder in said]
            assert {int(pid) for *pids, _ in said for pid in pids} < {child.pid for child in family}
            assert len(family) == 8 and all(folder.is_dir() for folder in folders)
        finally:
            parent.kill()
    for child in family:
        wait_for(lambda child=child: gone(child.pid))
    assert not any(folder.exists() for folder in folders)
