"""A mistake that ranks meet without torchrun: rank 0 prints its line, once; a rank that alone meets one prints it."""

import os
import socket
import subprocess
import sys

import pytest
from gloo_ranks import WHERE

from megatron_fp8.flags import told

MISTAKE = """
import os, sys, time
from megatron_fp8.errors import UserError
from megatron_fp8.flags import told
from megatron_fp8.flags.usage import one_line_errors
told.PATIENCE = float(sys.argv[1])
fails, late = sys.argv[2].split(","), sys.argv[3]
with one_line_errors():
    if str(told.rank()) == late:
        time.sleep(1)
    if str(told.rank()) in fails:
        raise UserError(f"--lr x: no number{' on rank ' + str(told.rank()) if 'each' in fails else ''}")
    if "store" in fails:
        import torch.distributed as dist
        dist.init_process_group("gloo", timeout=__import__("datetime").timedelta(seconds=5))
"""


def ends(script: str, *words: str, ranks: int = 3, names=("RANK",), **variables: str) -> list[tuple[int, str]]:
    """(exit code, what it printed) of each rank, started without torchrun; `names` have its number."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    unset = ("TORCHELASTIC", "SLURM", "RANK", "WORLD_SIZE", "MASTER")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    env |= {"PYTHONPATH": WHERE, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env = {name: value for name, value in (env | variables).items() if value}
    started = [
        subprocess.Popen([sys.executable, "-c", script, *words], env=env | dict.fromkeys(names, str(rank)), text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        return [(one.wait(120), one.stdout.read()) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
            one.stdout.close()


@pytest.mark.parametrize("late", ["0", "2"])
def test_all_ranks_meet_it(late):
    """Whichever comes last. The long patience shows that no rank waits for its end."""
    assert ends(MISTAKE, "60", "0,1,2", late) == [(2, "megatron_fp8: --lr x: no number\n"), (2, ""), (2, "")]


def test_each_has_a_line_of_its_own():
    found = ends(MISTAKE, "60", "0,1,2,each", "")
    assert found == [(2, f"megatron_fp8: --lr x: no number on rank {rank}\n") for rank in range(3)]


def test_rank_0_does_not_meet_it():
    met = (2, "megatron_fp8: --lr x: no number\n")
    assert ends(MISTAKE, "1", "1,2", "") == [(0, ""), met, met]


@pytest.mark.slow
def test_rank_0_does_not_meet_it_and_waits_for_the_others():
    """It holds its store, which says nothing."""
    waiting, failed = ends(MISTAKE, "2", "1,store", "", ranks=2)
    assert failed == (2, "megatron_fp8: --lr x: no number\n") and waiting[0]


def test_without_rank_no_rank_of_srun_can_train():
    """Rank 0 says that, or what it has met before."""
    found = ends(MISTAKE, "0.1", "0,1,2", "", names=("SLURM_PROCID",), MASTER_ADDR="", WORLD_SIZE="")
    assert found == [(2, "megatron_fp8: --lr x: no number\n"), (2, ""), (2, "")]


GROUP = """
import os, sys, time
import torch.distributed as dist
from megatron_fp8.errors import UserError
from megatron_fp8.flags import told
from megatron_fp8.flags.usage import one_line_errors
told.PATIENCE = float(sys.argv[1])
dist.init_process_group("gloo")
dist.barrier()
with one_line_errors():
    if os.environ["RANK"] == "0":
        time.sleep(1)  # the other asks a store that still lives
    raise UserError("--lr x: no number")
"""


@pytest.mark.slow
def test_all_ranks_meet_it_when_they_have_a_group():
    assert ends(GROUP, "60", ranks=2) == [(2, "megatron_fp8: --lr x: no number\n"), (2, "")]


def test_torchrun_ends_the_others(monkeypatch):
    """None asks: its agent holds the store."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(told, "PATIENCE", 0)
    monkeypatch.setattr(told, "_asked", None)
    assert told.rank() == 1 and not told.is_told("a line")
