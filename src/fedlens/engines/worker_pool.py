"""Local workers from the driver's side: starts them, talks to them, replaces those that die."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch

from fedlens.base.errors import RunFailed
from fedlens.base.registry import user_files
from fedlens.engines.shared_memory import LARGE, Region, unpack

_SERVES = "fedlens.engines.worker_main"
_REGIONS = 64  # of the replies of one worker, in use at once


class WorkerPool:
    """Starts workers by forking them from a process that has imported torch and done nothing else."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the import of torch in the background; the first worker waits for it."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                "OMP_NUM_THREADS": str(self.threads),
                "MKL_NUM_THREADS": str(self.threads),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fedlens.engines.forkserver", str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
                start_new_session=True,  # its group is ended as one, and Ctrl-C does not reach it
            )
        self._control = Connection(ours.detach())
        self._ready = False

    def worker(
        self,
        device: str = "cpu",
        group: int = 1,
        cores: int = 1,
        again: bool = True,
        module: str = _SERVES,
    ) -> Worker:
        """A new worker on this device, ready for a program. It decodes images in at most `cores` threads.

        The process that forks workers is restarted once if it was killed.

        Args:
            module: whose `main(connection, settings)` the worker runs.
        """
        self.start()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                if not self._ready:
                    self._control.recv_bytes()
                    self._ready = True
                settings = {"threads": self.threads, "path": list(sys.path), "files": user_files()}
                settings |= {"device": device, "group": group, "cores": cores, "module": module}
                self._control.send_bytes(pickle.dumps(settings))
                send_handle(self._control, theirs.fileno(), os.getpid())
                pid = int(self._control.recv_bytes())
                return Worker(Connection(ours.detach()), pid, device)
            except (EOFError, OSError) as error:
                self.close()
                if not again:
                    raise RunFailed(
                        "the process that starts local workers failed twice",
                        hint="its last output is above; engine.name=inline runs without it",
                    ) from error
        return self.worker(device, group, cores, again=False, module=module)

    def ending(self, pid: int) -> str:
        """How a worker ended, in words."""
        try:
            self._control.send_bytes(pickle.dumps(pid))
            status = self._control.recv_bytes()
        except (EOFError, OSError):
            return "ended"
        return ended(None if status == b"None" else int(status))

    @property
    def started(self) -> bool:
        """Whether a worker can be started without waiting for the import."""
        return self._ready or (self._process is not None and self._control.poll())

    def close(self) -> None:
        """Ends all workers and waits until the process group has ended."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()
        self._process = None


def ended(code: int | None) -> str:
    """An exit code in words.

    >>> ended(3), ended(-11), ended(None)
    ('ended with exit code 3', 'was killed by SIGSEGV', 'ended')
    """
    if code is None or code >= 0:
        return "ended" if code is None else f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # Linux ends a process this way when memory runs out; users and schedulers may, too.
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class Worker:
    """One local worker, as the driver sees it."""

    def __init__(self, connection: Connection, pid: int, device: str) -> None:
        self.connection = connection
        self.pid = pid
        self.device = device
        self.since = 0.0  # when it began its first task (monotonic seconds)
        self.tasks: list[int] = []
        self.knows_regions: set[int] = set()
        self.knows_asks: set[int] = set()
        self.forget: list[int] = []
        self._freed: list[int] = []
        self._replies: dict[int, Region] = {}

    def send(self, *message: Any) -> None:
        """Sends a message. Raises `OSError` if the worker is gone."""
        self.connection.send_bytes(pickle.dumps(message))

    def show(self, region: Region | None) -> int | None:
        """Makes a region of the driver known to the worker; returns the number that messages use for it."""
        if region is None:
            return None
        if region.number not in self.knows_regions:
            self.send("region", region.number, region.size)
            send_handle(self.connection, region.fd, self.pid)
            self.knows_regions.add(region.number)
        return region.number

    def task(
        self, number: int, ask: int, envelope: bytes, region: Region | None, alone: bool = False
    ) -> None:
        """Sends a task, with the worker's regions and asks that are not used any more."""
        shown = self.show(region)
        freed, self._freed = self._freed, []
        forget, self.forget = self.forget, []
        self.knows_asks.difference_update(forget)
        if not self.tasks:
            self.since = time.monotonic()
        self.tasks.append(number)
        self.send("task", number, ask, envelope, shown, freed, forget, alone)

    def tell_freed(self) -> None:
        """Reports free large regions at once: otherwise the worker would create a new one for its next reply.

        Not called where a region becomes free, which may be in the middle of another message.
        """
        if any(self._replies[region].size >= LARGE for region in self._freed):
            freed, self._freed = self._freed, []
            with contextlib.suppress(OSError):  # the worker is gone, which is noticed when its answer is read
                self.send("freed", freed)

    def receive(self) -> tuple[int, Any]:
        """The number of a finished task and its answers. Raises `EOFError` if the worker is gone."""
        kind, *rest = pickle.loads(self.connection.recv_bytes())
        if kind == "broken":
            failure: RunFailed = rest[0]
            raise failure
        number, envelope, region, size, used = rest
        if size:
            fd = recv_handle(self.connection)
            self._replies[region] = Region(size, fd, region)
            self._replies[region].close()  # the mapping keeps the memory
        self.tasks.remove(number)
        self.since = time.monotonic()
        if region is None:
            return number, unpack(envelope, memoryview(b""))
        view = self._replies[region].view(freed=lambda: self._freed.append(region))
        if len(self._replies) > _REGIONS:
            # Each region costs a file descriptor. If very many replies are kept, they are copied to memory that torch
            # aligns like its own tensors: the last bits of some sums depend on it.
            aligned: Any = torch.frombuffer(view, dtype=torch.uint8, count=used).clone().numpy()
            view = memoryview(aligned)
        return number, unpack(envelope, view)

    def close(self) -> None:
        """Closes the connection, after which the worker ends."""
        self.connection.close()


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError):
        return False
    return True
