"""Joins a Ray cluster, or starts Ray on this machine for as long as a run needs it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.core.errors import ConfigError, RunFailed

HOST_AND_PORT = r"([^\s/:\[\]]+|\[[0-9a-fA-F:]+\]):\d+"
NO_RAY_CLIENT = (
    "through Ray Client (ray://) every tensor would cross one connection, and the run would end when it breaks: run "
    "fedlens on a machine of the cluster with engine.address=auto, or submit it with "
    "'ray job submit --address=http://HEAD:8265 -- fedlens run ...'"
)
_PATIENCE = 20.0  # seconds without the head; after 60, Ray itself would end this process
_SHORT_PATH = (
    40  # characters: Ray keeps sockets in its folder, and the path of a socket has about 100 at most
)
_PREFIX = "fedlens-ray-"
_OWNER = (
    "fedlens-owner"  # a file in a local Ray's folder, locked as long as the process lives that started it
)
# Messages of Ray about what this engine repairs, or reports in a sentence of its own.
_REPORTED_HERE = "A worker died or was killed|node with node id|Raylet is terminated"
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}


def import_ray() -> Any:
    """The package `ray`. Raises `ConfigError` where it is not installed."""
    quiet = {} if "RAY_DEDUP_LOGS_SKIP_REGEX" in os.environ else {"RAY_DEDUP_LOGS_SKIP_REGEX": _REPORTED_HERE}
    try:
        with _environment(quiet):  # Ray reads it at the first import
            import ray
    except ImportError:
        raise ConfigError(
            "the engine 'ray' needs the package 'ray', which is not installed",
            where="engine.name",
            hint="pip install 'fedlens[ray]'",
        ) from None
    return ray


@dataclass
class _Connection:
    """A connection that this module made. Ray allows one in a process, so engines share it."""

    address: str | None
    folder: tuple[str, int] | None  # of a local Ray, for logs and sockets, and its locked file
    memory: int | None  # bytes of its object store, as requested
    users: int = 0


_shared: _Connection | None = None
_lock = threading.Lock()


class Cluster:
    """A connection to a cluster, until `close`. One that existed before is left as it is.

    Args:
        address: `host:port` or `auto`; None starts Ray on this machine.
        cpus: of a local Ray.
        memory: bytes of a local Ray's object store; None leaves it to Ray.
        threads: of one computation in a local Ray's workers.
        timeout: seconds to wait for an address to answer.

    Raises `ConfigError` where no cluster is reached, `RunFailed` where a local one does not start.
    """

    def __init__(
        self, address: str | None, cpus: int, memory: int | None, threads: int, timeout: float
    ) -> None:
        global _shared
        self._ray = ray = import_ray()
        with _lock:
            if not ray.is_initialized():
                folder = _start(cpus, memory, threads) if address is None else None
                if address is not None:
                    _join(address, timeout)
                _shared = _Connection(address, folder, memory)
            elif ray.util.client.ray.is_connected():
                raise ConfigError("this process is connected through Ray Client", hint=NO_RAY_CLIENT)
            elif address not in (None, "auto", _shared.address if _shared else None, _head(ray)):
                raise ConfigError(
                    f"this process is connected to the Ray at {_head(ray)} already, and not to {address}",
                    where="engine.address",
                    hint="call ray.shutdown() first, or leave engine.address out to use that one",
                )
            elif memory is not None and (_shared is None or _shared.memory != memory):
                sys.stderr.write(
                    f"this process uses the Ray at {_head(ray)} already, with the object store that it has: "
                    f"engine.object_store = {memory // 2**20} is ignored\n"
                )
            self._connection = _shared
            if _shared is not None:
                _shared.users += 1
            self.local = _shared is not None and _shared.folder is not None
            self._address, self._node = _head(ray), _own_node(ray)
            self._gone_since: float | None = None

    def __str__(self) -> str:
        return "the local Ray" if self.local else f"the Ray cluster at {self._address}"

    def room(self, cpus: float, gpus: float) -> int:
        """How many workers of this size fit on the living nodes when nothing else runs there."""
        total = 0
        for node in self._ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                fits = [has.get("CPU", 0.0) / cpus] + ([has.get("GPU", 0.0) / gpus] if gpus else [])
                total += math.floor(min(fits) + 1e-9)
        return total

    def first(self, promises: Sequence[Any], timeout: float) -> Any:
        """The first of these promises that is fulfilled or broken in this many seconds, or None."""
        if not promises:
            time.sleep(timeout)  # Ray would return at once
            return None
        ready, _ = self._ray.wait(list(promises), num_returns=1, timeout=timeout)
        return ready[0] if ready else None

    def check(self, now: float) -> None:
        """Raises `RunFailed` where the cluster has been gone for some time; call it about every second."""
        self.check_node()
        with contextlib.suppress(OSError), _connected(self._address, 2.0):
            self._gone_since = None
            return
        self._gone_since = now if self._gone_since is None else self._gone_since
        if now - self._gone_since > _PATIENCE:
            raise self._gone(f"nothing has answered at {self._address} for {_PATIENCE:.0f} seconds")

    def check_node(self) -> None:
        """Raises `RunFailed` where the node of this process is gone.

        Call it before asking anything of Ray, which ends this process without a message where its node is gone.
        """
        if self._node is None:
            return
        try:
            _connected(self._node, 2.0).close()
        except ConnectionRefusedError:
            raise self._gone("the node of this machine has ended") from None
        except OSError:
            pass  # too busy to answer

    def _gone(self, why: str) -> RunFailed:
        return RunFailed(
            f"{self} is gone: {why}",
            hint="start it again, and continue with 'fedlens resume'; engine.name=processes runs without it",
        )

    def close(self) -> None:
        """Disconnects after the last engine, and ends a local Ray. May be called twice."""
        global _shared
        with _lock:
            connection, self._connection = self._connection, None
            if connection is None:
                return
            connection.users -= 1
            if connection.users == 0 and connection is _shared:
                _shared = None
                with sigterm_kept():
                    self._ray.shutdown()
                if connection.folder is not None:
                    _remove(connection.folder[0])
                    os.close(connection.folder[1])


# -- a Ray of the run's own -------------------------------------------------------------------------------------------


def _start(cpus: int, memory: int | None, threads: int) -> tuple[str, int]:
    """Starts Ray on this machine, and returns the folder that was made for it, with its lock."""
    ray = import_ray()
    sweep()
    folder, lock = make_folder()
    environment = {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # with Ray's default of 15, everything else on this machine goes first
    }
    try:
        with _environment(environment), sigterm_kept():
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
        os.close(lock)
        raise RunFailed(
            f"Ray did not start on this machine: {one_line(error)}", hint=f"its logs are below {folder}"
        ) from error
    return folder, lock


def make_folder() -> tuple[str, int]:
    """A folder for a Ray of this process, and the locked file in it that marks its owner as alive."""
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    if len(folder) > _SHORT_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
    lock = os.open(Path(folder, "new"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(
        Path(folder, "new"), Path(folder, _OWNER)
    )  # `sweep` sees the file when it is locked, not before
    return folder, lock


def sweep() -> None:
    """Deletes the folders of local Rays whose runs were killed.

    Ray's processes end with the run that started them, however it ends; their folder stays. A folder without the
    owner's file was not made here and is left alone, and so is one whose owner still holds the lock.
    """
    for parent in {tempfile.gettempdir(), "/tmp"}:
        for marker in Path(parent).glob(f"{_PREFIX}*/{_OWNER}"):
            with contextlib.suppress(OSError):
                ours = marker.parent.lstat().st_uid == os.getuid()
                if not ours or not stat.S_ISREG(marker.lstat().st_mode):
                    continue  # another user's, or something that would block when it is opened
                with marker.open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(str(marker.parent))


def _remove(folder: str) -> None:
    """Deletes a folder; processes that are about to end may still write there."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.1)


# -- a cluster that runs already --------------------------------------------------------------------------------------


def _join(address: str, timeout: float) -> None:
    """Connects to a running cluster. Ray itself would try for minutes, and then end this process."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if named.startswith("ray://"):
        raise ConfigError(f"RAY_ADDRESS is {named}", where="engine.address", hint=NO_RAY_CLIENT)
    if re.fullmatch(HOST_AND_PORT, named):
        _check_health(named, timeout)
    ray = import_ray()
    try:
        with _environment({"RAY_USAGE_STATS_ENABLED": "0"}), sigterm_kept():
            ray.init(address=address, **_QUIET)
    except (Exception, SystemExit) as error:
        ray.shutdown()
        raise ConfigError(
            f"the Ray cluster '{address}' cannot be joined: {one_line(error)}",
            where="engine.address",
            hint="'ray start' makes this machine a part of it; leave engine.address out for a Ray of the run's own",
        ) from error


def _check_health(place: str, timeout: float) -> None:
    """Raises `ConfigError` where no Ray head answers in time, as `ray health-check` sees it."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", place]
    command.append("--skip-version-check")  # Ray says more of another version when it is joined
    trouble = "what listens there is not the head of a Ray cluster"
    try:
        _connected(place, timeout).close()
        if subprocess.run(command, capture_output=True, timeout=timeout).returncode == 0:
            return
    except (TimeoutError, subprocess.TimeoutExpired):
        trouble = f"no answer within {timeout:g} seconds"
    except OSError as error:
        trouble = one_line(error)
    raise ConfigError(
        f"no Ray cluster answers at {place}: {trouble}",
        where="engine.address",
        hint="'ray status' on the head says its address; leave engine.address out for a Ray of the run's own",
    )


def _connected(place: str, timeout: float) -> socket.socket:
    host, _, port = place.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout)


def _head(ray: Any) -> str:
    return str(ray.get_runtime_context().gcs_address)


def _own_node(ray: Any) -> str | None:
    """The host:port of the node that this process belongs to."""
    own = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["NodeID"] == own]
    return f"{nodes[0]['NodeManagerAddress']}:{nodes[0]['NodeManagerPort']}" if nodes else None


# -- small things -----------------------------------------------------------------------------------------------------


def one_line(error: BaseException) -> str:
    """The message of an exception, in one line."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message[:300].rstrip(".")


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
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
    """Puts back this process's handler of SIGTERM, which Ray replaces.

    Only the main thread can do so. After a connection made in another thread, it enters an empty block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
