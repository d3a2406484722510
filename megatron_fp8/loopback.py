"""torchrun for one machine, whose store other machines cannot reach.

    python -m megatron_fp8.loopback --nproc-per-node N SCRIPT FLAGS...

torch's store listens on every interface, whatever address it is given, and obeys every process that connects. Here it
gets a socket that listens on 127.0.0.1, on a port chosen by the kernel. The rest is torchrun: `main` registers this
rendezvous and names it on torchrun's command line. gloo and NCCL get the loopback interface too.
"""

import os
import socket
import sys
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

_NAME = "loopback"
_HOST = "127.0.0.1"
_TIMEOUT = timedelta(minutes=10)
_INTERFACE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class Loopback(RendezvousHandler):
    """A rendezvous of one machine: the launcher has the store, and its ranks connect to it."""

    def __init__(self, parameters: RendezvousParameters):
        self._run = parameters.run_id
        listening = socket.create_server((_HOST, 0))
        self._port = listening.getsockname()[1]
        self._store = TCPStore(
            _HOST,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            master_listen_fd=listening.detach(),
        )

    def get_backend(self) -> str:
        return _NAME

    @property
    def use_agent_store(self) -> bool:
        return True  # the ranks connect to it

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run

    def shutdown(self) -> bool:
        return True


def main(words: list[str]) -> None:
    """Run torchrun with these command-line words."""
    rendezvous_handler_registry.register(_NAME, Loopback)
    os.environ.update(_INTERFACE)
    torchrun.main(["--rdzv-backend", _NAME, "--rdzv-endpoint", _HOST, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
