"""A server that forks runs for another process from modules that it has already imported.

A request is a line of JSON and two file descriptors:

    {"count": ranks, "command": [...], "env": {...}, "cwd": ..., "timeout": seconds}   with (output, ended)

The ranks print to `output`.  The server writes two lines to `ended`: the process id of the run's supervisor, to end the
run, and the exit code when all ranks have ended.  When the other side closes, the server and its runs end.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading

from megatron_fp8.tools.rehearsal import ranks


def serve(requests: socket.socket, gpus: bool) -> None:
    """Take requests until the other side closes. gpus: the ranks see this machine's."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that there is no CUDA
    ranks.warm_up(gpus=gpus)
    assert threading.active_count() == 1
    requests.sendall(b"ready\n")
    while True:
        text, (*descriptors,), _, _ = socket.recv_fds(requests, 1 << 20, 2)
        if not text:
            return
        request = json.loads(text)
        output, ended = descriptors
        _run(requests, ended, **request, output=output)
        os.close(output)
        os.close(ended)


@ranks.in_a_fork
def _run(requests: socket.socket, ended: int, **request) -> int:
    requests.close()
    os.write(ended, f"{os.getpid()}\n".encode())
    os.write(ended, f"{ranks.supervise(**request)}\n".encode())
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the other side, which then closes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for supervisors
    serve(socket.socket(fileno=int(sys.argv[1])), "--gpus" in sys.argv)
