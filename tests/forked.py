"""Programs in a process of their own that has imported torch already: see the fixture `forked`."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from fedlens.engines.worker_pool import Worker, WorkerPool


class Lasting(WorkerPool):
    """Makes the workers of one engine after the other: that it imports torch is paid once, not at each start."""

    def worker(self, *arguments: Any, module: str = "tests.warm_worker", **more: Any) -> Worker:
        """A worker that has imported more than torch."""
        return super().worker(*arguments, module=module, **more)

    def close(self) -> None:
        """Stays; the workers end when their engine closes its connections to them."""

    def end(self) -> None:
        """Ends what has stayed."""
        super().close()


def run(pool: WorkerPool, code: str, *arguments: object, **variables: str) -> str:
    """How the program ended: "passed", a traceback, or by which signal."""
    worker = pool.worker(module=__name__)
    worker.send(code, [str(argument) for argument in arguments], variables)
    try:
        return str(pickle.loads(worker.connection.recv_bytes()))
    except EOFError:
        return pool.ending(worker.pid)
    finally:
        worker.close()


def main(connection: Connection, settings: object) -> None:
    """Runs a program, as `python -c` does."""
    code, arguments, variables = pickle.loads(connection.recv_bytes())
    sys.argv = ["-c", *arguments]
    os.environ |= variables
    try:
        exec(compile(code, "program", "exec"), {"__name__": "__main__"})
        ended = "passed"
    except BaseException:
        ended = traceback.format_exc()
    connection.send_bytes(pickle.dumps(ended))
