"""Runs other libraries, each with a script in its own virtual environment.

The scripts and the pinned versions are in `benchmarks/peers`.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from fedlens.base.errors import ConfigError, RunFailed, nearest
from fedlens.benchmark import limit
from fedlens.benchmark.arrangements import Arrangement, arrangements, in_one, trial
from fedlens.benchmark.interleave import Measurement, failure_recorded, fastest
from fedlens.benchmark.limit import Workload
from fedlens.benchmark.speed import Others, Say, about, layouts
from fedlens.files.caches import user_cache

SCRIPTS = Path(__file__).with_name("peers")
INSTALL_SECONDS = 3600.0  # of one environment: gigabytes, on a slow line
START_SECONDS = 600.0  # from the start of the script until it is ready
ROUND_SECONDS = 900.0
END_SECONDS = 30.0  # until it ends by itself
_LOOK = 0.2  # between two checks whether the process still runs


@dataclass(frozen=True)
class Peer:
    """Another library: its requirements, and the script that drives it.

    Attributes:
        several: whether its driver can distribute a cohort over processes, or over threads that train a client each.
        channels_last: whether its interface lets a user choose the memory layout.
        pythons: versions of Python in the order in which they are tried, with commas between; empty for this one.
        mode: what the driver's `--mode` gets; peers of one name share their environment.
    """

    name: str
    title: str
    version: str
    requirements: tuple[str, ...]
    driver: Path
    several: bool
    channels_last: bool = False
    pythons: str = ""
    mode: str = ""

    def ways(self, cores: int) -> list[Arrangement]:
        """The arrangements to try on this many cores: those that fedlens and the limit try."""
        return arrangements(cores) if self.several else in_one(cores)


def known_peers() -> list[Peer]:
    """All peers that have a script."""
    tables: dict[str, dict[str, Any]] = tomllib.loads((SCRIPTS / "peers.toml").read_text(encoding="utf-8"))
    peers: list[Peer] = []
    for name, table in tables.items():
        table |= {"driver": SCRIPTS / table["driver"], "requirements": tuple(table["requirements"])}
        for mode in table.pop("modes", [""]):
            title = f"{table['title']}, {mode}" if mode else table["title"]
            peers.append(Peer(name, **{**table, "title": title, "mode": mode}))
    return peers


def chosen(names: Sequence[str] | None) -> list[Peer]:
    """The peers of these names, or all. Raises `ConfigError` for a name without a script."""
    peers = known_peers()
    known = dict.fromkeys(peer.name for peer in peers)
    for name in names or ():
        if name not in known:
            raise ConfigError(f"unknown peer '{name}'", where="--peer", hint=nearest(name, known))
    return [peer for name in dict.fromkeys(names or known) for peer in peers if peer.name == name]


def usual_directory() -> Path:
    """The default directory of the environments of peers."""
    return user_cache("peers")


def torch_version() -> str:
    """The release of PyTorch that peers get: the installed one, without the build suffix."""
    return version("torch").partition("+")[0]


def installed(peer: Peer, directory: Path, say: Say = lambda sentence: None) -> Path:
    """The Python of a peer's environment, which is created the first time. Raises `RunFailed` where that fails."""
    home = directory / f"{peer.name}-{peer.version}-torch-{torch_version()}"
    if not (home / "installed.json").is_file():
        say(f"installing {peer.title} and PyTorch into {home}: a large download, once")
    pythons = [f"--pythons={peer.pythons}"] if peer.pythons else []
    command = [
        sys.executable,
        str(SCRIPTS / "install.py"),
        *pythons,
        str(home),
        f"torch=={torch_version()}",
    ]
    try:
        done = subprocess.run(
            [*command, *peer.requirements], capture_output=True, text=True, timeout=INSTALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"the installation did not end within {INSTALL_SECONDS / 60:.0f} minutes") from None
    if done.returncode:
        raise RunFailed(f"the installation failed: {last_words(done.stderr)}")
    return Path(done.stdout.strip())


class PeerProcess:
    """A peer as a candidate: a process that trains a round for every line it receives; `reply` is its last answer.

    Between its rounds the process is stopped (not its own children), because some peers poll while they wait. Raises
    `RunFailed` where the peer ends, does not answer in time, or answers with anything but the seconds of its round.
    """

    def __init__(
        self,
        peer: Peer,
        python: Path,
        workload: Workload,
        way: Arrangement,
        start_seconds: float = START_SECONDS,
        round_seconds: float = ROUND_SECONDS,
    ) -> None:
        self._seconds = round_seconds
        self._patience = END_SECONDS
        self.reply: dict[str, Any] = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        arrangement = ["--processes", str(way.processes), "--threads", str(way.threads)]
        arrangement += ["--mode", peer.mode] if peer.mode else []
        self._process = subprocess.Popen(
            [str(python), str(peer.driver), as_argument(workload), *arrangement],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(way.threads),
            cwd=tempfile.gettempdir(),
            start_new_session=True,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[str] = self._process.stdin
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        try:
            self._answer(start_seconds, "ready", "start")
            self.about = {"versions": self.reply.get("versions", {})}
            self._signal("SIGSTOP")
        except BaseException:
            self.close()
            raise

    def round(self) -> float:
        """Runs one round and returns its seconds, as the peer's own process measured them."""
        self._signal("SIGCONT")
        try:
            with suppress(BrokenPipeError):  # it has ended, and reading the answer gives the reason
                print("round", file=self._input, flush=True)
            return float(self._answer(self._seconds, "seconds", "finish a round"))
        finally:
            self._signal("SIGSTOP")

    def close(self) -> None:
        """Lets the process end; kills it and its children where it does not."""
        self._signal("SIGCONT")
        with suppress(OSError):
            self._input.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._patience)
        with suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        self._reader.join(END_SECONDS)
        self._errors.close()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put(line)

    def _answer(self, seconds: float, key: str, what: str) -> Any:
        line = self._next_line(time.monotonic() + seconds)
        if line is None and self._process.poll() is None:
            self._patience = 0.0  # a process that hangs does not end by itself either
            raise RunFailed(f"it did not {what} within {seconds:g} s")
        if line is None:
            raise RunFailed(f"it ended with code {self._process.returncode}: {self._last_words()}")
        try:
            self.reply = json.loads(line)
            return self.reply[key]
        except (ValueError, KeyError, TypeError):
            raise RunFailed(f"it wrote '{line.strip()[:200]}' in place of '{key}'") from None

    def _next_line(self, deadline: float) -> str | None:
        """The next line, or None at the deadline or when the process has ended, although a child holds its output."""
        while True:
            ended = self._process.poll() is not None
            with suppress(queue.Empty):
                return self._lines.get(timeout=_LOOK)
            if ended or time.monotonic() > deadline:
                return None

    def _last_words(self) -> str:
        self._errors.seek(0)
        return last_words(self._errors.read().decode(errors="replace"))

    def _signal(self, name: str) -> None:
        if hasattr(signal, name) and self._process.poll() is None:
            self._process.send_signal(getattr(signal, name))


def candidates(peers: Sequence[Peer], directory: Path) -> Others:
    """The measurements of these peers, whose environments are in `directory`.

    A peer runs as documented and, for convolutions, also with channels last where its interface allows it.
    """

    def of(workload: Workload, cores: int, say: Say) -> list[Measurement]:
        tried = layouts(workload)
        return [
            _measurement(each, peer, directory, cores, say)
            for peer in peers
            for each in (tried if peer.channels_last else tried[:1])
        ]

    return of


def _measurement(workload: Workload, peer: Peer, directory: Path, cores: int, say: Say) -> Measurement:
    def start(way: Arrangement) -> PeerProcess:
        return PeerProcess(peer, python, small, way)

    small = trial(workload)
    title = f"{peer.title}, channels last" if workload.channels_last else peer.title
    measurement = Measurement(title, "peer", lambda: PeerProcess(peer, python, workload, way))
    with failure_recorded(measurement):
        python = installed(peer, directory, say)
        ways = peer.ways(cores)
        if len(ways) > 1:
            say(f"{workload.name}: arranging {title}")
        way = fastest(ways, start)
        requirements = {"requirements": list(peer.requirements), "torch": torch_version()}
        measurement.about = {**about(workload, way), "peer": peer.title, **requirements}
    return measurement


def as_argument(workload: Workload) -> str:
    """A workload as an argument of the drivers' command line."""
    return json.dumps({**vars(workload), "model": workload.model.__name__})


def last_words(errors: str) -> str:
    """The last line on standard error that names an error, else the last line.

    >>> last_words("Traceback (most recent call last):\\n  ...\\nValueError: no\\n\\nwarning: too long")
    'ValueError: no'
    >>> last_words("one\\ntwo\\n")
    'two'
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", errors)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(ERROR\b|[\w.]*(Error|Exception|Exit|Interrupt)\b)", line)]
    return ([*lines[-1:], *named[-1:]] or ["no message"])[-1][:300]


def _environment(threads: int) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {"FEDLENS_LIMIT": str(Path(limit.__file__).resolve()), "OMP_NUM_THREADS": str(threads)}
