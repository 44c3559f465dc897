"""Connections to a Ray cluster, or to a Ray that is started on this machine for a run."""

from __future__ import annotations

import contextlib
import fcntl
import logging
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError, RunFailed

HOST_AND_PORT = r"([^\s/:\[\]]+|\[[0-9a-fA-F:]+\]):\d+"
NO_RAY_CLIENT = (
    "through Ray Client (ray://) all tensors cross one connection, and the run ends when it breaks: run "
    "fedlens on a machine of the cluster with engine.address=auto, or submit it with "
    "'ray job submit --address=http://HEAD:8265 -- fedlens run ...'"
)
_PATIENCE = 20.0  # seconds without the head; after 60, Ray ends this process
_SHORT_PATH = 40  # characters: Ray keeps sockets in its folder, whose paths have at most about 100
_REMOVALS = 600  # attempts to delete a folder, 0.1 s apart: on a busy machine Ray's processes end slowly
_PREFIX = "fedlens-ray-"
_OWNER = "fedlens-owner"  # a file in a local Ray's folder, locked by the process that started it
# Messages of Ray about events that this engine handles or reports itself.
_REPORTED_HERE = (
    "A worker died or was killed|node with node id|Raylet is terminated|infinite retries remaining"
)
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}


def import_ray() -> Any:
    """The package `ray`. Raises `ConfigError` if it is not installed."""
    quiet = {} if "RAY_DEDUP_LOGS_SKIP_REGEX" in os.environ else {"RAY_DEDUP_LOGS_SKIP_REGEX": _REPORTED_HERE}
    try:
        with _kept(quiet):  # Ray reads it at the first import
            import ray
    except ImportError:
        raise ConfigError(
            "the engine 'ray' needs the package 'ray', which is not installed",
            where="engine.name",
            hint="pip install 'fedlens[ray]'",
        ) from None
    return ray


@dataclass(eq=False)
class Cluster:
    """A connection to a cluster. Ray allows one per process, so engines share it; each calls `close` once.

    Args:
        requested: the address in the settings.
        memory: bytes of a local Ray's object store, as requested.
        folder: of a local Ray, and the descriptor of its locked file.
        joined: whether `connect` made the connection. One that existed before is not closed.
    """

    requested: str | None
    memory: int | None = None
    folder: tuple[str, int] | None = None
    joined: bool = True
    users: int = 0

    def __post_init__(self) -> None:
        self._ray = import_ray()
        context = self._ray.get_runtime_context()
        self.address = str(context.gcs_address)  # of the head
        node = context.get_node_id()
        self._node = socket.socket(socket.AF_UNIX)
        self._node.connect(next(n["RayletSocketName"] for n in self._ray.nodes() if n["NodeID"] == node))
        self._node.setblocking(False)
        self._answered = time.monotonic()  # when the head last answered

    def __str__(self) -> str:
        return "the local Ray" if self.local else f"the Ray cluster at {self.address}"

    @property
    def local(self) -> bool:
        """Whether this Ray was started for the run."""
        return self.folder is not None

    def room(self, needs: Mapping[str, float]) -> int:
        """How many workers fit on the live nodes if nothing else runs there.

        Args:
            needs: CPUs and GPUs of one worker, by Ray's names.
        """
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(int(min(node.get(kind, 0.0) / n for kind, n in needs.items()) + 1e-9) for node in nodes)

    def check(self, now: float) -> None:
        """Raises `RunFailed` if the cluster has not answered for some time. Call it about every second.

        Args:
            now: monotonic seconds.
        """
        self.check_node()
        try:
            _connected(self.address, 2.0).close()
            self._answered = now
        except (
            OSError
        ) as error:  # one refused or late answer is accepted: a busy head, a restart, the network
            if now - self._answered > _PATIENCE:
                why = f"{self.address} has not answered for {_PATIENCE:.0f} seconds"
                raise self._gone(why) from error

    def check_node(self) -> None:
        """Raises `RunFailed` if the Ray node of this machine has ended.

        Call it before each call to Ray, which ends this process without a message if the node is gone. It checks a
        connection that stays open and sends nothing, so it takes microseconds.
        """
        try:
            ended = self._node.recv(1) == b""
        except BlockingIOError:  # open, and nothing to read
            ended = False
        except ConnectionResetError:
            ended = True
        if ended:
            raise self._gone("the Ray node of this machine has stopped")

    def _gone(self, why: str) -> RunFailed:
        return RunFailed(
            f"{self} is no longer available: {why}",
            hint="restart it, then resume the run; engine.name=processes runs without it",
        )

    def close(self) -> None:
        """Disconnects after the last engine, and ends a local Ray."""
        global _shared
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            self._node.close()
            if self is _shared:
                _shared = None
                if self.joined:
                    with _kept({}):
                        self._ray.shutdown()
            if self.folder is not None:
                _remove(self.folder[0])
                os.close(self.folder[1])


_shared: Cluster | None = None
_lock = threading.Lock()


def connect(address: str | None, cpus: int, memory: int | None, threads: int, timeout: float) -> Cluster:
    """Joins a cluster, starts a local Ray, or shares the connection of this process.

    Args:
        address: `host:port` or `auto`; None starts Ray on this machine.
        cpus: of a local Ray.
        memory: bytes of a local Ray's object store; None leaves it to Ray.
        threads: of one computation in a local Ray's workers.
        timeout: seconds to wait for an address to answer.

    Raises `ConfigError` if no cluster is reached, `RunFailed` if a local one does not start.
    """
    global _shared
    ray = import_ray()
    with _lock:
        if not ray.is_initialized():
            if address is not None:
                _join(address, timeout)
            folder = _start(cpus, memory, threads) if address is None else None
            try:
                _shared = Cluster(address, memory, folder)
            except (
                OSError,
                StopIteration,
            ) as error:  # the node of this process is not listed, or does not answer
                ray.shutdown()
                if folder is not None:
                    _remove(folder[0])
                    os.close(folder[1])
                raise RunFailed(
                    f"Ray runs, but its node on this machine does not answer: {one_line(error) or 'it is not listed'}",
                    hint="try again, or run without Ray: engine.name=inline",
                ) from error
        elif ray.util.client.ray.is_connected():
            raise ConfigError("this process is connected through Ray Client", hint=NO_RAY_CLIENT)
        else:
            _shared = _shared or Cluster(None, joined=False)
            if address not in (None, "auto", _shared.requested, _shared.address):
                raise ConfigError(
                    f"this process is already connected to Ray at {_shared.address}, not to {address}",
                    where="engine.address",
                    hint="call ray.shutdown() first, or leave engine.address out to use that one",
                )
            if memory not in (None, _shared.memory):
                sys.stderr.write(
                    f"this process already uses Ray at {_shared.address}: engine.object_store is ignored\n"
                )
        _shared.users += 1
        return _shared


# -- a local Ray ------------------------------------------------------------------------------------------------------


def _start(cpus: int, memory: int | None, threads: int) -> tuple[str, int]:
    """Starts Ray on this machine, in a new folder; see `make_folder`."""
    ray = import_ray()
    sweep()
    folder, lock = make_folder()
    environment = {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # with Ray's default of 15, everything else on this machine has priority
    }
    try:
        with _kept(environment):
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
            f"Ray did not start on this machine: {one_line(error)}", hint=f"its logs are in {folder}"
        ) from error
    return folder, lock


def make_folder() -> tuple[str, int]:
    """A new folder for a Ray of this process, and the descriptor of its owner file, locked by this process."""
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    if len(folder) > _SHORT_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
    lock = os.open(Path(folder, "new"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(Path(folder, "new"), Path(folder, _OWNER))  # from now on `sweep` sees the file
    return folder, lock


def sweep() -> None:
    """Deletes the folders of local Rays whose runs were killed.

    Ray's processes end with the run that started them, but their folder stays if it was killed. Folders without the
    owner's file were made by others and are kept, and so are those whose owner still holds the lock.
    """
    for parent in {tempfile.gettempdir(), "/tmp"}:
        for marker in Path(parent).glob(f"{_PREFIX}*/{_OWNER}"):
            with contextlib.suppress(OSError):
                ours = marker.parent.lstat().st_uid == os.getuid()
                if not ours or not stat.S_ISREG(marker.lstat().st_mode):
                    continue  # another user's, or a file that blocks when it is opened
                with marker.open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(str(marker.parent))


def _remove(folder: str) -> None:
    """Deletes a folder. Retries for a while, because processes that are ending may still write there."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.1)


# -- a running cluster ------------------------------------------------------------------------------------------------


def _join(address: str, timeout: float) -> None:
    """Connects to a running cluster. Ray itself tries for minutes, and then exits."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if named.startswith("ray://"):
        raise ConfigError(f"RAY_ADDRESS is {named}", where="engine.address", hint=NO_RAY_CLIENT)
    if re.fullmatch(HOST_AND_PORT, named):
        _check_health(named, timeout)
    ray = import_ray()
    try:
        with _kept({"RAY_USAGE_STATS_ENABLED": "0"}):
            ray.init(address=address, **_QUIET)
    except (Exception, SystemExit) as error:
        ray.shutdown()
        raise ConfigError(
            f"the Ray cluster '{address}' cannot be joined: {one_line(error)}",
            where="engine.address",
            hint="add this machine to the cluster with 'ray start', or leave engine.address out for a local Ray",
        ) from error


def _check_health(place: str, timeout: float) -> None:
    """Raises `ConfigError` if no Ray head answers in time, by running `ray health-check`."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", place]
    command.append("--skip-version-check")  # `ray.init` reports other versions better
    trouble = "the server at this address is not the head of a Ray cluster"
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
        hint="run 'ray status' on the head to see its address, or leave engine.address out for a local Ray",
    )


def _connected(place: str, timeout: float) -> socket.socket:
    host, _, port = place.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout)


# -- small things -----------------------------------------------------------------------------------------------------


def one_line(error: BaseException) -> str:
    """The message of an exception, in one line."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message[:300].rstrip(".")


@contextlib.contextmanager
def _kept(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables in the block, then restores them and the SIGTERM handler that Ray replaces."""
    before = {name: os.environ.get(name) for name in variables}
    handler = signal.getsignal(signal.SIGTERM)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if threading.current_thread() is threading.main_thread():  # in another thread Ray replaces no handler
            signal.signal(signal.SIGTERM, handler)
