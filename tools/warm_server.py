"""Launches runs for another process, which is not warm itself: a request is a line of JSON and two descriptors.

    {"count": ranks, "command": [...], "env": {...}, "cwd": ..., "timeout": seconds}   with (output, ended)

Everything that the ranks print goes to `output`.  `ended` is written two lines: the number of the run's supervisor, to
end it by, and the exit code when all have ended.  The server ends when the other side closes, and its runs with it.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading

from megatron_fp8.tools.rehearsal import ranks


def serve(requests: socket.socket) -> None:
    """Take requests until the other side closes."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # that there is no CUDA is no news here
    ranks.warm_up()
    assert threading.active_count() == 1
    requests.sendall(b"ready\n")
    while True:
        text, (*descriptors,), _, _ = socket.recv_fds(requests, 1 << 20, 2)
        if not text:
            return
        request = json.loads(text)
        output, ended = descriptors
        if os.fork() == 0:
            requests.close()
            os.write(ended, f"{os.getpid()}\n".encode())
            os.write(ended, f"{ranks.supervise(**request, output=output)}\n".encode())
            os._exit(0)
        os.close(output)
        os.close(ended)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the other side, which then closes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    serve(socket.socket(fileno=int(sys.argv[1])))
