"""If one rank fails while others wait for it, only the failed rank prints a line."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from gloo_ranks import WHERE
from launch import RunFailed, forked

SCRIPT = """
import os, sys, torch.distributed as dist
from megatron_fp8.checkpoint import failing
from megatron_fp8.errors import UserError
from megatron_fp8.flags.usage import one_line_errors
failing.PATIENCE = 600  # the launcher ends them before that
dist.init_process_group("gloo")
dist.barrier()
fails, how = sys.argv[1].split(","), sys.argv[2]
with one_line_errors(), failing.from_one_rank():
    if os.environ["RANK"] in fails:
        raise UserError("the line") if how == "mistake" else ZeroDivisionError("a bug")
    dist.barrier()
    dist.barrier()
"""


def ended(folder, fails: str, how: str) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with pytest.raises(RunFailed) as failed:
        forked(3, [str(script), fails, how], folder / "log", timeout=300, env={"PYTHONPATH": WHERE})
    return failed.value.code, (folder / "log").read_text()


@pytest.mark.parametrize("fails", ["0", "0,1,2", pytest.param("1", marks=pytest.mark.slow)])  # 1 waits for 0
def test_a_mistake_of_some(tmp_path, fails):
    code, said = ended(tmp_path, fails, "mistake")
    assert code == 2 and said.count("megatron_fp8: the line") == 1 and "Traceback" not in said, said


def test_what_is_no_mistake_keeps_its_traceback(tmp_path):
    code, said = ended(tmp_path, "0", "bug")
    assert code == 1 and "megatron_fp8: " not in said, said
    assert "ZeroDivisionError: a bug" in said


WITHOUT = """
import os, sys
for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
    del os.environ[name]
os.environ |= {"WORLD_SIZE": "2", "RANK": sys.argv[3], "MASTER_PORT": sys.argv[4]}
"""
LATE = """
import time
def _failed(asks=failing._failed):
    time.sleep(2 * int(os.environ["RANK"] != "0"))  # meanwhile rank 0, which holds the store, has ended
    return asks()
failing._failed = _failed
failing.PATIENCE = 1
dist.init_process_group("gloo")
"""


@pytest.mark.parametrize("fails", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_ranks_that_no_torchrun_has_started(tmp_path, fails):
    """Ranks started by srun: the store ends with rank 0."""
    script = tmp_path / "script.py"
    script.write_text(WITHOUT + SCRIPT.replace('dist.init_process_group("gloo")\n', LATE))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def alone(rank: int) -> tuple[int, list[str]]:
        """Exit code and lines of a rank that is a run of its own."""
        command = [str(script), fails, "mistake", str(rank), str(port)]
        with pytest.raises(RunFailed) as failed:
            forked(1, command, tmp_path / f"log{rank}", timeout=300, env={"PYTHONPATH": WHERE})
        lines = (tmp_path / f"log{rank}").read_text().splitlines()
        return failed.value.code, [line for line in lines if not line.startswith("[ranks] ")]

    with ThreadPoolExecutor() as pool:
        ended = [*pool.map(alone, range(2))]
    assert ended == [(2, ["megatron_fp8: the line"] if str(rank) == fails else []) for rank in range(2)]
