"""Which rank prints the line of a mistake that several ranks meet.

All ranks read the same command, so all of them meet a mistake in it. Rank 0 prints the line. The others wait for
PATIENCE seconds, in which torchrun ends them. srun ends them only if it was told to (--kill-on-bad-exit). So, without
torchrun, rank 0 prints its line and then answers for a while at MASTER_ADDR:MASTER_PORT, the place of its rendezvous
store. Another rank asks there:

    rank 0's answer, of the same line     the line has been printed: end without it
    rank 0's answer, of another line      print
    something else: rank 0's store        print, if it is still there after PATIENCE
    no connection, with a process group   rank 0 held the store and has ended, with a line or a traceback: end without
    no connection, no process group yet   print after PATIENCE: better twice than not at all
"""

import contextlib
import hashlib
import os
import socket
import sys
import time

PATIENCE = 10  # seconds
_EVERY = 0.2  # seconds between two questions
_NAME = b"megatron_fp8 "


def rank() -> int:
    """This process's rank, of the launcher's variables; 0 without a launcher."""
    given = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return int(given) if given.isdecimal() else 0


def is_told(line: str) -> bool:
    """Whether rank 0 prints this line, so that another rank need not. A rank that torchrun ends does not return."""
    if _by_torchrun() or _place() is None:
        time.sleep(PATIENCE)
        # Without RANK no rank of srun can train: rank 0 says so, or has met something before.
        return "RANK" not in os.environ and not _by_torchrun()
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            answer = _asked()
        except ConnectionRefusedError:
            if _has_group():
                return True
        except OSError:  # the network fails, or a store does not answer
            pass
        else:
            if answer.startswith(_NAME):
                return answer == _answer(line)
        time.sleep(_EVERY)
    return False


def tell(line: str) -> None:
    """Rank 0 has printed its line: answer all other ranks, for PATIENCE seconds at most."""
    others = int(os.environ.get("WORLD_SIZE") or "1") - 1
    place = _place()
    if others < 1 or place is None or _by_torchrun():
        return
    with contextlib.suppress(OSError):  # the place is taken, by this rank's own store
        family, _, _, _, address = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family, backlog=others) as server:
            end = time.monotonic() + PATIENCE
            while others and (left := end - time.monotonic()) > 0:
                server.settimeout(left)
                connection, _ = server.accept()
                with connection:
                    connection.sendall(_answer(line))
                others -= 1


def _asked() -> bytes:
    """What is said at rank 0's place. Raises OSError, of a store too, which says nothing by itself."""
    place = _place()
    assert place is not None
    with socket.create_connection(place, timeout=1) as connection:
        return connection.recv(len(_answer("")), socket.MSG_WAITALL)


def _answer(line: str) -> bytes:
    return _NAME + hashlib.sha256(line.encode()).digest()


def _by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _place() -> tuple[str, int] | None:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return (address, int(port)) if address and port.isdecimal() and int(port) < 1 << 16 else None


def _has_group() -> bool:
    """Whether torch's process group was made; nothing that was not imported has made one."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
