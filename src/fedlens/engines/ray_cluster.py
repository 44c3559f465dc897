"""Reaching a Ray cluster, or starting one on this machine for as long as it is wanted."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlens.core.errors import ConfigError, RunFailed

PLACE = r"([^\s/:\[\]]+|\[[0-9a-fA-F:]+\]):\d+"  # host:port
_PATIENCE = 20.0  # seconds: Ray ends this very process when its cluster has not been there for sixty
_SHORT_PATH = 40  # characters: Ray lays sockets below its folder, whose whole path may have a hundred
# What Ray says on the terminal of things that are put right here, or told in one sentence.
_KNOWN = "A worker died or was killed|node with node id|Raylet is terminated"
# What a client of gRPC says first: that it speaks HTTP/2, and that it has no settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def found() -> Any:
    """The package `ray`. Raises `ConfigError` where it is not installed."""
    quiet = {} if "RAY_DEDUP_LOGS_SKIP_REGEX" in os.environ else {"RAY_DEDUP_LOGS_SKIP_REGEX": _KNOWN}
    try:
        with _set(quiet):  # read when it is first imported
            import ray
    except ImportError:
        raise ConfigError(
            "the engine 'ray' needs the package 'ray', which is not installed",
            where="engine.name",
            hint="pip install 'fedlens[ray]'",
        ) from None
    return ray


@dataclass
class _Ours:
    """The connection that fedlens made in this process; Ray allows one at a time, so engines share it."""

    address: str | None
    folder: str | None  # of a local Ray: its logs and sockets
    memory: int | None  # bytes of its object store, as asked for
    users: int = 0
    thread: int = field(default_factory=threading.get_ident)  # that made it
    ended: threading.Event = field(default_factory=threading.Event)


_ours: _Ours | None = None
_lock = threading.Lock()


class Cluster:
    """A connection to a cluster, until `close`. A connection that was there before is left as it is.

    Args:
        address: `host:port`, `auto` or `ray://host:port`; None starts Ray on this machine.
        cpus: of a local Ray.
        memory: bytes of a local Ray's object store; None leaves it to Ray.
        threads: of a computation in a local Ray's workers.
        timeout: seconds after which an address that does not answer is given up.

    Raises `ConfigError` where no cluster is reached, `RunFailed` where a local one does not start.
    """

    def __init__(
        self, address: str | None, cpus: int, memory: int | None, threads: int, timeout: float
    ) -> None:
        global _ours
        self._ray = ray = found()
        with _lock:
            if not ray.is_initialized():
                folder = _start(cpus, memory, threads) if address is None else None
                if address is not None:
                    _join(address, timeout)
                if _ours is not None:  # ended by somebody else
                    _ours.ended.set()
                _ours = _Ours(address, folder, memory)
            elif address not in (None, "auto", _ours.address if _ours else None, _gcs(ray)):
                raise ConfigError(
                    f"this process is connected to the Ray at {_gcs(ray)} already, and not to {address}",
                    where="engine.address",
                    hint="call ray.shutdown() first, or leave engine.address out to use that one",
                )
            elif memory is not None and (_ours is None or _ours.memory != memory):
                sys.stderr.write(
                    f"this process is on the Ray at {_gcs(ray)} already, and goes on with the object store that it "
                    f"has: engine.object_store = {memory // 2**20} says nothing here\n"
                )
            self._users = _ours
            if _ours is not None:
                _ours.users += 1
            self.local = _ours is not None and _ours.folder is not None
            self._node: _Pulse | None = None
            if _is_client(ray):
                # The cluster's own address need not be reachable from here; of a connection that somebody else made,
                # no more is known than whether it is there.
                self._place = _place(_ours.address) if _ours else None
                self._address = self._place or _gcs(ray)
            else:
                self._place = self._address = _gcs(ray)
                self._node = _own_node(ray)
            self._gone_since: float | None = None

    def __str__(self) -> str:
        return "the local Ray" if self.local else f"the Ray cluster at {self._address}"

    def room(self, cpus: float, gpus: float) -> int:
        """How many workers of this size the living nodes have room for, if nobody else is there."""
        total = 0
        for node in self._ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                fits = [has.get("CPU", 0.0) / cpus] + ([has.get("GPU", 0.0) / gpus] if gpus else [])
                total += math.floor(min(fits) + 1e-9)
        return total

    def came(self, promises: Sequence[Any], timeout: float) -> Any:
        """The first of these promises that is kept or broken within so many seconds; None where none is."""
        if not promises:
            time.sleep(timeout)  # Ray would come back at once
            return None
        came, _ = self._ray.wait(list(promises), num_returns=1, timeout=timeout)
        return came[0] if came else None

    def guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, which raises `RunFailed` where Ray Client has lost its connection, at whatever it was asked for."""

        @functools.wraps(call)
        def guarding(*arguments: Any) -> Any:
            try:
                return call(*arguments)
            except ConnectionError as error:
                raise self._gone(one_line(error)) from error

        return guarding

    def check(self, now: float) -> None:
        """Raises `RunFailed` where the cluster has not been there for some time; to be called every second or so."""
        self.check_node()
        if self._place is None:
            if not _is_client(self._ray):
                raise self._gone("the connection of Ray Client has ended")
            return
        with contextlib.suppress(OSError), _connected(self._place, 2.0):
            self._gone_since = None
            return
        self._gone_since = now if self._gone_since is None else self._gone_since
        if now - self._gone_since > _PATIENCE:
            raise self._gone(f"nothing has answered at {self._address} for {_PATIENCE:.0f} seconds")

    def check_node(self) -> None:
        """Raises `RunFailed` where the node is gone that this process belongs to; costs microseconds.

        To be called before anything is asked of Ray: it ends this process, without a word, where its node is gone.
        """
        if self._node is not None and not self._node.lives():
            raise self._gone("the node of this machine has ended")

    def _gone(self, why: str) -> RunFailed:
        return RunFailed(
            f"{self} is gone: {why}",
            hint="start it again, and go on with 'fedlens resume'; engine.name=processes runs without it",
        )

    def close(self) -> None:
        """Disconnects, and ends a local Ray, when the last engine is done with it. May be called twice."""
        global _ours
        with _lock:
            mine, self._users = self._users, None
            if self._node is not None:
                self._node.close()
            if mine is None:
                return
            mine.users -= 1
            if mine.users == 0 and mine is _ours:
                _ours = None
                with sigterm_kept():
                    self._ray.shutdown()
                mine.ended.set()
                if mine.folder is not None:
                    _remove(mine.folder)


def _remove(folder: str) -> None:
    """Deletes a folder; what is about to end may still be writing a last line there."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.1)


class Lasting:
    """Does something in the background, in a thread that stays as long as the Ray that it has started, if it has.

    A local Ray is ended by the operating system when the thread is that started it.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._done = threading.Event()
        self._failed: BaseException | None = None
        threading.Thread(target=self._run, args=[[work]], name="fedlens-ray", daemon=True).start()

    def result(self) -> BaseException | None:
        """Waits for it; what it raised."""
        self._done.wait()
        return self._failed

    def _run(self, work: list[Callable[[], None]]) -> None:
        try:
            work.pop()()  # the engine that it belongs to may go before the thread does
        except BaseException as error:
            self._failed = error
        ours = _ours
        self._done.set()
        if ours is not None and ours.thread == threading.get_ident():
            ours.ended.wait()


def _start(cpus: int, memory: int | None, threads: int) -> str:
    """Starts Ray on this machine, in a folder of its own."""
    ray = found()
    folder = tempfile.mkdtemp(prefix="fedlens-ray-")
    if len(folder) > _SHORT_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="fedlens-ray-", dir="/tmp")
    environment = {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's own 15 would have whatever else runs here go first
    }
    try:
        with _set(environment), sigterm_kept():
            ray.init(
                address="local",
                num_cpus=cpus,
                object_store_memory=memory,
                include_dashboard=False,
                _temp_dir=folder,
                **_QUIET,
            )
    except (Exception, SystemExit) as error:
        ray.shutdown()
        raise RunFailed(
            f"Ray did not start on this machine: {one_line(error)}", hint=f"its logs are below {folder}"
        ) from error
    return folder


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}


def _join(address: str, timeout: float) -> None:
    """Connects to a cluster that is there. Ray itself would try for minutes, and then end this process."""
    ray = found()
    place = _place(address)
    if place is not None:
        _knock(place, timeout)
    try:
        with _set({"RAY_USAGE_STATS_ENABLED": "0"}), sigterm_kept():
            ray.init(address=address, **_QUIET)
    except (Exception, SystemExit) as error:
        ray.shutdown()
        raise ConfigError(
            f"the Ray cluster '{address}' cannot be joined: {one_line(error)}",
            where="engine.address",
            hint="'ray start' makes this machine a part of it; leave engine.address out for a Ray of the run's own",
        ) from error


def _place(address: str | None) -> str | None:
    """The host:port of an address, where it has one; that of `auto` is the environment's to say, as it is with Ray."""
    named = os.environ.get("RAY_ADDRESS", "") if address in (None, "auto") else address
    found = re.fullmatch(rf"(?:ray://)?({PLACE})", named or "")
    return found[1] if found else None


def _knock(place: str, timeout: float) -> None:
    """Raises `ConfigError` where nothing answers as a Ray head does: in the protocol of gRPC, which is HTTP/2."""
    trouble = "it took the connection and said nothing that a Ray head says"
    try:
        with _connected(place, timeout) as peer:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            peer.sendall(_HELLO)
            answer = peer.recv(9)
            if len(answer) == 9 and answer[3] == 4:  # its settings
                return
    except TimeoutError:
        trouble = f"no answer within {timeout:g} seconds"
    except (OSError, ValueError) as error:
        trouble = one_line(error)
    raise ConfigError(
        f"no Ray cluster answers at {place}: {trouble}",
        where="engine.address",
        hint="'ray status' on the head says its address; leave engine.address out for a Ray of the run's own",
    )


def _connected(place: str, timeout: float) -> socket.socket:
    host, _, port = place.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout)


def _gcs(ray: Any) -> str:
    return str(ray.get_runtime_context().gcs_address)


class _Pulse:
    """A connection to a process of this machine, kept only to see when it closes."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._peer: socket.socket | None = None

    def lives(self) -> bool:
        """Whether the process is there."""
        try:
            while self._peer is not None and self._peer.recv(4096):
                pass
        except BlockingIOError:
            return True  # nothing new was said
        except OSError:
            pass
        self.close()  # it has ended, or does not keep a connection with who never says anything
        try:
            self._peer = _connected(self._place, 2.0)
            self._peer.setblocking(False)
        except ConnectionRefusedError:
            return False
        except OSError:
            pass  # too busy to answer
        return True

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None


def _own_node(ray: Any) -> _Pulse | None:
    """The node that this process belongs to."""
    own = ray.get_runtime_context().get_node_id()
    found = [node for node in ray.nodes() if node["NodeID"] == own]
    return _Pulse(f"{found[0]['NodeManagerAddress']}:{found[0]['NodeManagerPort']}") if found else None


def _is_client(ray: Any) -> bool:
    return bool(ray.util.client.ray.is_connected())


def one_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said[:300].rstrip(".")


@contextlib.contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for what is started inside."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself; what it does in this process is not Ray's to say.

    Only the main thread can take it back. What was connected in another thread is followed by an empty block in it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
