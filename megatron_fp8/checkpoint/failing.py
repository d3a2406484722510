"""One failure, one line: where one rank cannot read or write a checkpoint, the others leave the line to it.

They wait for it in a collective, which breaks as it ends (gloo: "Connection closed by peer"); NCCL's would last until
the launcher ends them.  So the rank that fails first says so in the store by which the ranks found each other.  Under
torchrun that is the agent's, and outlives every rank.  Ranks that srun started have it from rank 0: if it is gone, so
is rank 0, which has printed why, or its launcher says that it was killed.  With a store and no entry there a broken
collective is what it looks like, the network's failure, and keeps its traceback.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator

import torch.distributed as dist

from ..errors import UserError
from ..flags.usage import PATIENCE

_KEY = "megatron_fp8/failed"  # holds the rank


@contextlib.contextmanager
def from_one_rank() -> Iterator[None]:
    """Around what ranks do together, and what may be a UserError on one of them."""
    try:
        yield
    except UserError:
        if dist.is_initialized() and dist.get_rank() and _failed() == 0:
            _end_quietly()  # rank 0 is about to print its line
        _say_failed()
        raise
    except RuntimeError:  # torch's, of a collective
        if _failed() not in (None, _rank()):
            _end_quietly()  # it has printed its line
        raise


def _end_quietly() -> None:
    """Not before the rank that has the line: the launcher reports the one that ended first."""
    time.sleep(PATIENCE)
    sys.exit(2)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _say_failed() -> None:
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # its process has ended
            _store().compare_set(_KEY, "", str(dist.get_rank()))


def _failed() -> int | None:
    """The rank that failed first; None where no rank says so."""
    if not dist.is_initialized():
        return None
    if _store_is_gone():
        return 0
    with contextlib.suppress(RuntimeError):
        if _store().check([_KEY]):
            return int(_store().get(_KEY))
    return None


def _store_is_gone() -> bool:
    """Whether rank 0 held the store, and has ended.  Asking the store itself would print torch's frames."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or dist.get_rank() == 0:
        return False
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), PATIENCE).close()
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError):  # of a network that fails nothing is known; without an address ranks met elsewhere
        return False
    return False


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
