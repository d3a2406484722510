"""Start many ranks of a Megatron script on one machine, as forks of a process that has imported all.

To import torch and Megatron costs each process four seconds and 600 MB. Here it is done once:

    warm process   imports, nothing else: no thread, no process group, no random number
     └ supervisor  a fork for each run: hosts the ranks' store, waits for them, ends them together
        ├ rank 0   a fork: its own environment, arguments and __main__, then the script as `python SCRIPT` runs it
        ├ rank 1   ...

The ranks share all pages that none of them writes, so 32 ranks of a tiny model take some 3 GB and start within seconds.
A rank's environment is torchrun's. The supervisor hosts the store, on a port that no other process can take. If a rank
fails, the others are ended, as under torchrun. All ranks end with their supervisor, and it ends with the warm process.
What a rank has started ends with it: the supervisor ends its process group. If that is killed, the kernel kills the
ranks, and processes that they started through multiprocessing see that their parent has ended.

Three differences from a cold start: environment variables read while torch is imported are those of the warm process;
so is the seed of Python's hashes; and the process in which Megatron queues the results of a save is forked too.
"""

import argparse
import atexit
import contextlib
import ctypes
import functools
import gc
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

from ...rebind import Hook, Rebound, When

TIMED_OUT = 124  # the exit code of a run that took too long, like that of timeout(1)
_SIGNAL_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_PATIENCE = 5.0  # seconds between SIGTERM and SIGKILL for the other ranks

_WARM = When("in a warm process")
HOOKS = (  # rows of the table of hooks
    Hook(
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        *("get_write_results_queue", "tools.rehearsal.ranks.by_fork", "mp_mode", _WARM),
        "Forks the process of a save's results: Megatron spawns it, and it would import everything again.",
    ),
    Hook(
        "megatron.training.argument_utils.ArgumentGroupFactory",
        *("_get_field_docstrings", "tools.rehearsal.ranks.read_once", "self src_cfg_class", _WARM),
        "Reads the help in source files once for all ranks; to read it twice is a third of a tiny run's start.",
    ),
    Hook(
        *("multiprocessing.process.BaseProcess", "start", "processes.end_children_with_parent", "self", _WARM),
        "Ends a rank's children when it is killed, at every level and without checkpoints too.",
    ),
)
hooked = Rebound()  # what `warm_up` has put there; `hooked.put_back()` undoes it


def warm_up(folder: str | None = None, *, gpus: bool = False) -> None:
    """Import what a training run imports. Idempotent.

    folder: put first on sys.path, as Python does with a script's own folder; it may be a Megatron checkout.
    gpus: the ranks see this machine's GPUs. Else they are hidden from this process for good. A process that has used a
        GPU must not fork, so this one only counts them.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a pool of threads would not survive the fork
    if gpus:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch.cuda.is_available() does not start the driver
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
        for package in ("transformer_engine", "apex", "flash_attn"):  # their kernels need a GPU, so hide the packages
            sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    from ...flags.usage import hide_missing_package_warnings

    hide_missing_package_warnings()
    from ... import cpu

    if not gpus:
        cpu.install()
    import megatron.core.datasets.blended_megatron_dataset_builder
    import megatron.core.datasets.gpt_dataset
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.core.models.mimo.optimizer
    import megatron.core.tokenizers.text
    import megatron.core.tokenizers.utils.build_tokenizer
    import megatron.training.argument_utils
    import megatron.training.checkpointing
    import megatron.training.training  # noqa: F401
    from megatron.training import arguments

    from ... import plugin  # noqa: F401
    from ...checkpoint import convert, failing, loads, saves  # noqa: F401
    from ...engine import as_found, build, gain_lines, report  # noqa: F401
    from ...layers import cross_entropy, model  # noqa: F401
    from ...monitor import collect, loss_checks, watch  # noqa: F401

    if not hooked:
        hooked.put(HOOKS)
        arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))  # so that its help is read
    gc.collect()
    gc.freeze()  # the collector never touches existing objects again, so their pages stay shared
    atexit.register(gc.unfreeze)  # Triton 3.9 reports on stderr what is left at the end


def by_fork(stock: Callable) -> Callable:
    """get_write_results_queue, its process forked."""
    return functools.partial(stock, mp_mode="fork")


def read_once(stock: Callable) -> Callable:
    """_get_field_docstrings, which remembers {class: {field: help}}."""
    known: dict[type, dict[str, str]] = {}

    @functools.wraps(stock)
    def read(self, src_cfg_class):
        if src_cfg_class not in known:
            known[src_cfg_class] = stock(self, src_cfg_class)
        return known[src_cfg_class]

    return read


def supervise(
    count: int,
    command: Sequence[str],
    *,
    output: int,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> int:
    """Run `count` ranks of a command, in a fork of a warm process that does nothing else. Exit codes: see `wait`.

    A SIGTERM ends the run. So does an error here: with it no process may stay behind.

    Args:
        command: a script and its arguments, or -m, a module and its arguments.
        output: file descriptor for the ranks' output; it stays open here.
        timeout: seconds, after which the run is ended.
        env: the ranks' whole environment, apart from a launcher's variables; None: that of this process.
    """
    os.setpgid(0, 0)  # a Ctrl-C at the terminal goes to the launching process only
    env = dict(os.environ if env is None else env)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    supervisor = os.getpid()
    ranks: dict[int, int] = {}  # {process: rank}
    for rank in range(count):
        process = os.fork()
        if process == 0:
            listening.close()
            _end_with(supervisor, signal.SIGKILL)
            _be_rank(list(command), output, env | _launcher_variables(rank, count, port), cwd)
        with contextlib.suppress(OSError):  # it has done so itself, or it has ended
            os.setpgid(process, process)  # here too: `_signal` must reach a rank that has not come so far
        ranks[process] = rank
    signal.signal(signal.SIGTERM, lambda *_: _signal(ranks, signal.SIGKILL))
    import torch.distributed as dist

    try:
        # The ranks wait for this store. Its threads start here, after the last fork.
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listening.detach(),
        )
        code = _wait_for(ranks, output, time.monotonic() + timeout, timeout)
        del store
    finally:
        _signal(ranks, signal.SIGKILL)
    return code


def in_a_fork[**P](run: Callable[P, int]) -> Callable[P, int]:
    """`run` in a fork of this process, which ends with its result, or by SIGTERM with this process; returns its pid."""

    @functools.wraps(run)
    def start(*args: P.args, **kwargs: P.kwargs) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        fork = os.fork()
        if fork == 0:
            code = 1
            try:
                for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                    signal.signal(name, signal.SIG_DFL)
                _end_with(parent, signal.SIGTERM)  # not SIGKILL: only a supervisor can end what its ranks have started
                code = run(*args, **kwargs)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return fork

    return start


launch = in_a_fork(supervise)  # returns its pid, for `wait` and `end`


def wait(supervisor: int) -> int:
    """The exit code of a launched run: 0, that of the first rank to fail (128 + signal), or TIMED_OUT."""
    return _exit_code(os.waitpid(supervisor, 0)[1])


def end(supervisor: int) -> None:
    """End a launched run if it still runs, with all processes that its ranks have started."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(supervisor, signal.SIGTERM)
        wait(supervisor)


def _wait_for(ranks: dict[int, int], output: int, deadline: float, timeout: float) -> int:
    """Wait for all ranks. When the first fails, or at the deadline, end the others."""
    count, code = len(ranks), 0
    ended_at = None  # when the others were asked to end
    while ranks:
        for process in list(ranks):
            found, status = os.waitpid(process, os.WNOHANG)
            if not found:
                continue
            rank, failed = ranks.pop(process), _exit_code(status)
            _signal((process,), signal.SIGKILL)  # kill the processes that it started and left
            if failed and not code:
                code = failed
                _say(output, f"rank {rank} of {count} failed first, with exit code {failed}")
        now = time.monotonic()
        if not code and now > deadline:
            code = TIMED_OUT
            _say(output, f"ended after {timeout:.0f} s; still running: ranks {sorted(ranks.values())}")
        if code and ended_at is None:
            ended_at = now
            _signal(ranks, signal.SIGTERM)
        if ended_at is not None and now > ended_at + _PATIENCE:
            _signal(ranks, signal.SIGKILL)
        time.sleep(0.02)
    return code


def _be_rank(command: list[str], output: int, env: dict[str, str], cwd: str | None) -> None:
    """In a forked process: become this rank of the command. Does not return."""
    code = 1
    try:
        os.setpgid(0, 0)  # so that the processes it starts end with it
        for inherited in weakref.finalize._registry.values():  # type: ignore[attr-defined]
            inherited.atexit = False  # a temporary folder of the warm process must not be deleted here
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (sys.stdout, sys.stderr):
            # Write whole lines, even with PYTHONUNBUFFERED: other ranks write to the same output.
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
            # Spawned processes look for the script there.
            multiprocessing.process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
        sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
        code = _run(command)
        threading._shutdown()  # type: ignore[attr-defined]  # join threads first, as at the end of any Python process
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = code or 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(command: list[str]) -> int:
    """Do what `python COMMAND` does. Returns its exit code."""
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _launcher_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",  # the machine's own name may not resolve
    }


def _end_with(parent: int, number: int) -> None:
    """Make the kernel send this process signal `number` when its parent ends."""
    ctypes.CDLL(None).prctl(_SIGNAL_WITH_PARENT, number)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _signal(ranks: Iterable[int], number: int) -> None:
    for process in list(ranks):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, number)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _say(output: int, line: str) -> None:
    """Nothing, if its reader has gone, or has read nothing for a second: no line may keep a run from ending."""
    with contextlib.suppress(BrokenPipeError):
        if select.select([], [output], [], 1)[1]:  # it has room for a line
            os.write(output, f"[ranks] {line}\n".encode())
