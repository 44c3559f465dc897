"""Processes of `fedlens` that are killed: forked from one that has imported everything, and runs no thread.

Reads orders as lines of JSON from standard input, and answers each with a line. An order is

- `listen`: a socket that every server gets, as systemd hands it over; the answer is its port;
- `start`: the name of a process, with its `args` and the folder `cwd`, and optionally `call`, the step of writing to
  disk (a sync, a rename) before which it is killed; `limit`, the largest file that it may write; `sent`, a file that
  gets what it sends before TLS encrypts it; `unpickled`, a file that gets what its unpicklers look up; `fetch`, whether
  it gets the socket;
- `poll`: the name of a process; the answer has its `code`, None while it runs, and what it said;
- `kill`: the name of a process.

At the end of its input it kills and awaits all processes that it started.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import fedlens.cli.serve
import fedlens.cli.site
import fedlens.engines.network
import fedlens.server.serve
import fedlens.site.start
from fedlens.identity import tls
from tests.faults import lives
from tests.faults.lives import dying_at

PRELOADED = (*lives.PRELOADED, fedlens.cli.serve, fedlens.cli.site, fedlens.server.serve, fedlens.site.start)


class Children:
    """The processes by their names."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        self.said: dict[str, Path] = {}
        self.listener: socket.socket | None = None

    def listen(self, order: dict[str, Any]) -> int:
        """Makes the socket of the servers."""
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        return int(self.listener.getsockname()[1])

    def start(self, order: dict[str, Any]) -> int:
        """Forks a process."""
        name = order["start"]
        assert self.poll({"poll": name})["code"] is not None or name not in self.pids, f"{name} runs already"
        self.said[name] = Path(order["cwd"]) / f"{name}.txt"
        self.said[name].touch()
        self.codes.pop(name, None)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with this process
            os.chdir(order["cwd"])
            for stream in (1, 2):
                os.dup2(os.open(self.said[name], os.O_WRONLY | os.O_APPEND), stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            self._live(order)
        self.pids[name] = pid
        return pid

    def _live(self, order: dict[str, Any]) -> None:
        if order.get("fetch"):
            assert self.listener is not None
            os.dup2(self.listener.fileno(), 3)
            os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
        if "sent" in order:
            record(Path(order["sent"]))
        if "unpickled" in order:
            watch(Path(order["unpickled"]))
        call = {"call": order["call"], "signal": "SIGKILL"} if order.get("call") else {}
        limit = {"limit": order["limit"]} if order.get("limit") else {}
        assert dying_at is lives.dying_at
        lives.live({"args": order["args"], **call, **limit})

    def poll(self, order: dict[str, Any]) -> dict[str, Any]:
        """How a process ended, and all that it said in its lives."""
        name = order["poll"]
        if name in self.pids and name not in self.codes:
            ended, status = os.waitpid(self.pids[name], os.WNOHANG)
            if ended:
                self.codes[name] = os.waitstatus_to_exitcode(status)
        said = self.said[name].read_text() if name in self.said else ""
        return {"code": self.codes.get(name), "said": said}

    def kill(self, order: dict[str, Any]) -> int:
        """Kills a process that runs, and waits for its end."""
        name = order["kill"]
        if self.poll({"poll": name})["code"] is None:
            os.kill(self.pids[name], signal.SIGKILL)
            self.codes[name] = os.waitstatus_to_exitcode(os.waitpid(self.pids[name], 0)[1])
        return self.codes[name]


def record(path: Path) -> None:
    """Appends to a file what this process gives to TLS: every message and body that it sends."""
    file, write = path.open("ab", buffering=0), ssl.SSLObject.write

    def recorded(self: ssl.SSLObject, data: Any) -> int:
        sent = write(self, data)
        file.write(memoryview(data).cast("B")[:sent])
        return sent

    tls.FederationContext.sslobject_class.write = recorded  # type: ignore[method-assign]


def watch(path: Path) -> None:
    """Appends to a file each class that an unpickler of this process looks up."""
    file = path.open("a", buffering=1)
    sys.addaudithook(lambda event, found: event == "pickle.find_class" and file.write(f"{found}\n"))


def main() -> None:
    children = Children()
    for line in sys.stdin:
        order = json.loads(line)
        verb = next(name for name in ("listen", "start", "poll", "kill") if name in order)
        print(json.dumps(getattr(children, verb)(order)), flush=True)  # noqa: T201
    for name in children.pids:
        children.kill({"kill": name})


if __name__ == "__main__":
    main()
