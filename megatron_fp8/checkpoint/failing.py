"""If one rank cannot read or write a checkpoint, only that rank prints a line; the other ranks end silently.

The others wait for the failed rank in a collective. With gloo it breaks when that rank ends ("Connection closed by
peer"); with NCCL it would last until the launcher ends them.  So the rank that fails first records it in the
rendezvous store.  Under torchrun the store is the agent's and outlives every rank.  Under srun rank 0 holds it: if the
store is gone, rank 0 has ended and has printed why, or its launcher says that it was killed.  If the store is there
without an entry, a broken collective is a network failure and keeps its traceback.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator

import torch.distributed as dist

from ..errors import UserError
from ..flags.told import PATIENCE

_KEY = "megatron_fp8/failed"  # holds the rank


@contextlib.contextmanager
def from_one_rank() -> Iterator[None]:
    """Wraps collective work that may raise a UserError on one rank."""
    try:
        yield
    except UserError:
        if dist.is_initialized() and dist.get_rank() and _failed() == 0:
            _end_quietly()  # rank 0 is about to print its line
        _say_failed()
        raise
    except RuntimeError:  # torch's, of a collective
        if _failed() not in (None, _rank()):
            _end_quietly()  # the failed rank has printed its line
        raise


def _end_quietly() -> None:
    """End with exit code 2, after the rank that has the line: the launcher reports the rank that ends first."""
    time.sleep(PATIENCE)
    sys.exit(2)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _say_failed() -> None:
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the store's process has ended
            _store().compare_set(_KEY, "", str(dist.get_rank()))


def _failed() -> int | None:
    """The rank that failed first; None if none is recorded."""
    if not dist.is_initialized():
        return None
    if _store_is_gone():
        return 0
    with contextlib.suppress(RuntimeError):
        if _store().check([_KEY]):
            return int(_store().get(_KEY))
    return None


def _store_is_gone() -> bool:
    """Whether rank 0 held the store and has ended.  A request to the store itself would print torch's frames."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or dist.get_rank() == 0:
        return False
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), PATIENCE).close()
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError):  # a failing network tells nothing; without an address the store is another one
        return False
    return False


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
