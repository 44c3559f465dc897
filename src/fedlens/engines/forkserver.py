"""The process that workers are forked from: it has imported torch and done nothing else.

Workers start in milliseconds, also the one that replaces a worker that was killed, and none of them imports the
user's main module again. The whole group goes when this process is told to end or its driver is gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle


def main() -> None:
    """Forks one worker for each descriptor received, until end of file."""
    import torch  # noqa: F401  (this is what makes a fork cheap)

    from fedlens.engines import worker_main as worker

    control = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the driver
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no worker that dies stays as a zombie
    gc.freeze()
    with contextlib.suppress(EOFError, OSError):
        control.send_bytes(b"ready")
        while True:
            settings = pickle.loads(control.recv_bytes())
            fd = recv_handle(control)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                worker.main(Connection(fd), settings)
                os._exit(0)
            os.close(fd)
            control.send_bytes(str(pid).encode())
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
