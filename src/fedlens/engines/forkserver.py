"""The process that workers are forked from: it has imported torch and done nothing else.

So workers, including replacements, start in milliseconds, and none of them imports the user's main module again. All
processes of the group end when this process is told to end or when its driver is gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

_TRIES, _PAUSE = 200, 0.01  # a worker's connection is closed shortly before its process has ended


def main() -> None:
    """Forks one worker for each descriptor received, and answers how a worker ended, until end of file."""
    import torch  # noqa: F401  (this is what makes a fork cheap)

    import fedlens.engines.worker_main  # noqa: F401

    control = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the driver
    gc.freeze()
    with contextlib.suppress(EOFError, OSError):
        control.send_bytes(b"ready")
        while True:
            settings = pickle.loads(control.recv_bytes())
            if isinstance(settings, int):
                control.send_bytes(str(_status(settings)).encode())
                continue
            _reap()
            worker = importlib.import_module(settings["module"])  # before the fork, which shares it
            fd = recv_handle(control)
            pid = os.fork()
            if pid == 0:
                control.close()
                worker.main(Connection(fd), settings)
                os._exit(0)
            os.close(fd)
            control.send_bytes(str(pid).encode())
    os.killpg(os.getpgrp(), signal.SIGKILL)


_ended: dict[int, int] = {}  # the exit codes of workers, negative for signals, until they are asked for


def _reap() -> None:
    """Collects workers that have ended, so that none remains a zombie."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _ended[pid] = os.waitstatus_to_exitcode(status)


def _status(pid: int) -> int | None:
    """The exit code of a worker that has ended or is about to; None if it is running."""
    for _ in range(_TRIES):
        _reap()
        if pid in _ended:
            return _ended.pop(pid)
        time.sleep(_PAUSE)
    return None


if __name__ == "__main__":
    main()
