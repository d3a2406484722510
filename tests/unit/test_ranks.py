"""tools/launch.py: ranks forked from a warm process start like fresh scripts, end together, and leave no process."""

import json
import os
import signal
import socket

import pytest
from lab_runs import gone, wait_for
from launch import RunFailed, forked, warm_server

SHOW = """
import json, os, subprocess, sys, time
def say(text):  # in one write, because other ranks write too
    os.write(1, f"{text}\\n".encode())
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OURS".split()
say(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:], "name": __name__, "path": sys.path[0],
                "torch": "torch" in sys.modules, **{name: os.environ.get(name) for name in names}}))
"""
WARM = "from megatron_fp8.tools.rehearsal import ranks\n"
HANG = "say(f\"child {subprocess.Popen(['sleep', '600']).pid}\")\ntime.sleep(600)\n"


@pytest.fixture
def run(tmp_path):
    def run(text: str, count: int = 3, timeout: float = 600, arguments=("--a", "1"), **env: str):
        script = tmp_path / "script.py"
        script.write_text(SHOW + text)
        return forked(count, [str(script), *arguments], tmp_path / "log", timeout=timeout, env=env)

    return run


def ranks_of(lines):
    return [json.loads(line) for line in lines if line.startswith("{")]


def wait_for_the_end_of(lines):
    """Wait until the ranks that printed their process ids, and their children, have ended."""
    children = [int(line.split()[1]) for line in lines if line.startswith("child ")]
    for pid in [rank["pid"] for rank in ranks_of(lines)] + children:
        wait_for(lambda pid=pid: gone(pid))


def test_a_rank_is_a_fresh_script_of_a_warm_process(run, tmp_path):
    found = sorted(ranks_of(run("", OURS="here")), key=lambda rank: int(rank["RANK"]))
    assert [rank["RANK"] for rank in found] == [rank["LOCAL_RANK"] for rank in found] == ["0", "1", "2"]
    assert len({rank["pid"] for rank in found} | {os.getpid()}) == 4
    for rank in found:
        assert rank["argv"] == ["--a", "1"] and rank["name"] == "__main__" and rank["path"] == str(tmp_path)
        assert rank["torch"] and rank["OURS"] == "here" and rank["WORLD_SIZE"] == rank["LOCAL_WORLD_SIZE"] == "3"
    assert all(rank["OURS"] is None for rank in ranks_of(run("")))  # an earlier run's variable is gone


def test_a_warm_process_is_warmed_up_once_more(run):
    """`warm_up` is idempotent. A second call once failed in Megatron's argument help, whose reader was replaced."""
    (line,) = run(f"{WARM}ranks.warm_up()\nsay('still warm')\n", count=1)[-1:]
    assert line == "still warm"


def test_what_a_warm_process_has_changed_in_megatron_is_put_back(run):
    """It has both rows, the second remembers, and `put_back` brings stock's functions again."""
    text = """
found = [getattr(find(row.owner), row.name) for row in ranks.HOOKS]
factory, asked = find(ranks.HOOKS[1].owner), find("megatron.core.transformer.TransformerConfig")
reader = factory.__new__(factory)
say(f"kept {reader._get_field_docstrings(asked) is reader._get_field_docstrings(asked)} {len(ranks.hooked)}")
ranks.hooked.put_back()
stock = [getattr(find(row.owner), row.name) for row in ranks.HOOKS]
say(f"stock {[function.__module__ for function in stock]} {found[0].func is stock[0]} {len(ranks.hooked)}")
say(f"kept {reader._get_field_docstrings(asked) is reader._get_field_docstrings(asked)}")
"""
    kept, stock, again = run(f"{WARM}from megatron_fp8.rebind import find\n{text}", count=1)[-3:]
    modules = ["megatron.core.dist_checkpointing.strategies.filesystem_async", "megatron.training.argument_utils"]
    modules.append("multiprocessing.process")
    assert (kept, stock, again) == ("kept True 3", f"stock {modules} True 0", "kept False")


def test_the_first_rank_that_fails_ends_the_others(run, tmp_path):
    with pytest.raises(RunFailed, match="rank 1 of 3 failed first, with exit code 7") as failure:
        run("if os.environ['RANK'] == '1':\n    sys.exit(7)\n" + HANG)
    assert failure.value.code == 7
    lines = (tmp_path / "log").read_text().splitlines()
    wait_for_the_end_of(lines)


def test_a_rank_that_hangs_is_ended(run, tmp_path):
    with pytest.raises(RunFailed, match=r"ended after 1 s; still running: ranks \[0, (1, )?2\]") as failure:
        run("if os.environ['RANK'] != '1':\n    import signal\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "    time.sleep(600)\n", timeout=1)  # fmt: skip
    assert failure.value.code == 124
    wait_for_the_end_of((tmp_path / "log").read_text().splitlines())


def test_a_ranks_children_end_with_it(run):
    """A child that is left would keep the run's output open, and its reader would wait."""
    lines = run("subprocess.Popen(['sleep', '600'])\n" + HANG.replace("time.sleep(600)\n", ""), count=1)
    assert sum(line.startswith("child ") for line in lines) == 1
    wait_for_the_end_of(lines)


CHILD = "say(f\"child {subprocess.Popen(['sleep', '600']).pid}\")\n"
WORKER = """
import multiprocessing
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
worker.start()
say(f"child {worker.pid}")
"""
WAIT = "while not os.path.exists('go'):\n    time.sleep(0.01)\n"
FILL = "while True:\n    os.write(1, b'x' * (1 << 16))\n"  # more than a pipe holds


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (CHILD + WAIT + "print('who reads this?', flush=True)\n", "its reader goes"),
        (CHILD + WAIT + FILL, "its reader stops reading, and ends it"),
        (WORKER + WAIT, "its supervisor is killed"),
    ],
    ids=["gone", "full", "killed"],
)
def test_no_process_is_left_of_a_run_that_nothing_waits_for(text, end, tmp_path):
    """`end`: what happens to the run."""
    (tmp_path / "script.py").write_text(SHOW + text)
    (output, written), (ended, ending) = os.pipe(), os.pipe()
    request = {"count": 3, "command": ["script.py"], "env": dict(os.environ), "cwd": str(tmp_path), "timeout": 600}
    socket.send_fds(warm_server(False), [json.dumps(request).encode()], [written, ending])
    os.close(written)
    os.close(ending)
    supervisor = int(os.read(ended, 100))
    with os.fdopen(output) as printed:
        lines = [printed.readline() for _ in range(6)]
        if end.endswith("ends it"):
            (tmp_path / "go").touch()
            wait_for(lambda: all(blocked(rank["pid"]) for rank in ranks_of(lines)))
            os.kill(supervisor, signal.SIGTERM)
            wait_for(lambda: gone(supervisor), 60)
    if end.endswith("killed"):
        os.kill(supervisor, signal.SIGKILL)
    else:
        (tmp_path / "go").touch()
    wait_for(lambda: gone(supervisor), 60)
    os.close(ended)
    assert len(ranks_of(lines)) == 3 == sum(line.startswith("child ") for line in lines)
    wait_for_the_end_of(lines)


def blocked(pid: int) -> bool:
    """Whether a process waits for room in a pipe."""
    with open(f"/proc/{pid}/wchan") as file:
        return "pipe_write" in file.read()


@pytest.mark.parametrize(
    ("text", "code", "shown"),
    [
        ("raise ValueError('the cause')", 1, "ValueError: the cause"),
        ("sys.exit('the cause')", 1, "the cause"),
        ("os.abort()", 134, "exit code 134"),
        ("import atexit; atexit.register(print, 'at exit'); sys.exit(3)", 3, "at exit"),
    ],
)
def test_how_a_script_ends(text, code, shown, run):
    with pytest.raises(RunFailed, match=shown) as failure:
        run(text, count=1)
    assert failure.value.code == code


def test_ranks_meet_at_their_launchers_store(run):
    lines = run(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([float(os.environ['RANK'])])\n"
        "dist.all_reduce(total)\n"
        "say(f'sum {total.item()}')\n"
        "dist.destroy_process_group()\n"
    )
    assert [line for line in lines if line.startswith("sum")] == ["sum 3.0"] * 3
