"""In place of torchrun: a run forked from the warm process of the test that started this one.

    DOOR RANKS COMMAND ...   DOOR: the name that megatron_runs.start_forked gives
"""

import json
import os
import signal
import socket
import sys

door, ranks, *command = sys.argv[1:]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until there is somebody to tell
ended, ending = os.pipe()
request = {"count": int(ranks), "command": command, "env": dict(os.environ), "cwd": os.getcwd(), "timeout": 600}
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(f"\0{door}")
    socket.send_fds(connection, [json.dumps(request).encode()], [1, ending])
os.close(ending)
with os.fdopen(ended) as result:
    supervisor = int(result.readline())
    signal.signal(signal.SIGTERM, lambda *_: os.kill(supervisor, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    sys.exit(int(result.readline()))
