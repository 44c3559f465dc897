"""Other libraries, each in a virtual environment of its own and driven by a script there.

The scripts and the pinned versions lie in `benchmarks/peers` of a checkout, and in the package of an install.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from fedlens.benchmark import limit
from fedlens.benchmark.arrangements import Arrangement, arrangements, in_one
from fedlens.benchmark.limit import Workload
from fedlens.core.errors import ConfigError, RunFailed, nearest

INSTALL_SECONDS = 3600.0  # of one environment: gigabytes, on a slow line
START_SECONDS = 600.0  # from the script's start until it is ready
ROUND_SECONDS = 900.0
END_SECONDS = 30.0  # to end by itself
_LOOK = 0.2  # between two looks at whether it is still there


@dataclass(frozen=True)
class Peer:
    """Another library: what is installed for it, and what drives it."""

    name: str
    title: str
    version: str
    requirements: tuple[str, ...]
    driver: Path
    several: bool  # whether its driver can spread a cohort over processes
    channels_last: bool = False  # whether its interface lets a user choose the memory layout

    def ways(self, cores: int) -> list[Arrangement]:
        """The arrangements that are tried, on so many cores: those that fedlens and the limit have."""
        return arrangements(cores) if self.several else in_one(cores)


def scripts() -> Path:
    """Where the peers' scripts are."""
    here = Path(__file__)
    for place in (here.parent / "peers", here.parents[3] / "benchmarks" / "peers"):
        if (place / "peers.toml").is_file():
            return place
    raise ConfigError(
        "the scripts that drive the peers are not here",
        where=str(here.parent / "peers"),
        hint="install fedlens again",
    )


def known_peers() -> list[Peer]:
    """All that there are scripts for."""
    home = scripts()
    tables: dict[str, dict[str, Any]] = tomllib.loads((home / "peers.toml").read_text(encoding="utf-8"))
    return [
        Peer(
            name,
            table["title"],
            table["version"],
            tuple(table["requirements"]),
            home / table["driver"],
            table["several"],
            table["channels_last"],
        )
        for name, table in tables.items()
    ]


def chosen(names: Sequence[str] | None) -> list[Peer]:
    """Those of these names; all where none is named. Raises `ConfigError` for one that there is no script for."""
    known = {peer.name: peer for peer in known_peers()}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"there is no peer '{name}'", where="--peer", hint=nearest(name, known))
    return [known[name] for name in dict.fromkeys(names or known)]


def usual_directory() -> Path:
    """Where the peers' environments lie unless the user says where."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedlens" / "peers"


def torch_version() -> str:
    """The release of PyTorch that peers get: this one's, without the mark of its build."""
    return version("torch").partition("+")[0]


def installed(peer: Peer, directory: Path, say: Callable[[str], None] = lambda sentence: None) -> Path:
    """The Python of a peer's environment, which is made the first time. Raises `RunFailed` where it cannot be."""
    home = directory / f"{peer.name}-{peer.version}-torch-{torch_version()}"
    if not (home / "installed.json").is_file():
        say(f"installing {peer.title} and PyTorch into {home}: a large download, once")
    command = [sys.executable, str(scripts() / "install.py"), str(home), f"torch=={torch_version()}"]
    try:
        done = subprocess.run(
            [*command, *peer.requirements], capture_output=True, text=True, timeout=INSTALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"it was not installed within {INSTALL_SECONDS / 60:.0f} minutes") from None
    if done.returncode:
        raise RunFailed(f"it cannot be installed: {last_words(done.stderr)}")
    return Path(done.stdout.strip())


class PeerProcess:
    """A peer as a candidate: a process that trains a round for every line it is sent; `said` is its last answer.

    Between its rounds the process is stopped (not those that it started), for there are peers that poll while they
    wait. Raises `RunFailed` where the peer ends, says nothing in time, or says something else than how long its round
    took.
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
        self.said: dict[str, Any] = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        arrangement = ["--processes", str(way.processes), "--threads", str(way.threads)]
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
            self.about = {"versions": self.said.get("versions", {})}
            self._signal("SIGSTOP")
        except BaseException:
            self.close()
            raise

    def round(self) -> float:
        """One round; its seconds, as the peer's own process measured them."""
        self._signal("SIGCONT")
        try:
            with suppress(BrokenPipeError):  # it has ended: the answer says why
                print("round", file=self._input, flush=True)
            return float(self._answer(self._seconds, "seconds", "finish a round"))
        finally:
            self._signal("SIGSTOP")

    def close(self) -> None:
        """Lets it end, and ends it and all that it started where it does not."""
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
            self._patience = 0.0  # what hangs does not end by itself either
            raise RunFailed(f"it did not {what} within {seconds:g} s")
        if line is None:
            raise RunFailed(f"it ended with code {self._process.returncode}: {self._last_words()}")
        try:
            self.said = json.loads(line)
            return self.said[key]
        except (ValueError, KeyError, TypeError):
            raise RunFailed(f"it said '{line.strip()[:200]}' where '{key}' was expected") from None

    def _next_line(self, deadline: float) -> str | None:
        """The next line, or None at the deadline or when the process has ended, whoever else holds its output."""
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


def as_argument(workload: Workload) -> str:
    """A workload as the drivers read it from their command line."""
    return json.dumps({**vars(workload), "model": workload.model.__name__})


def last_words(errors: str) -> str:
    """The line of what was written to standard error that says what went wrong: its last that names an error.

    >>> last_words("Traceback (most recent call last):\\n  ...\\nValueError: no\\n\\nwarning: too long")
    'ValueError: no'
    >>> last_words("one\\ntwo\\n")
    'two'
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", errors)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(ERROR\b|[\w.]*(Error|Exception|Exit|Interrupt)\b)", line)]
    return ([*lines[-1:], *named[-1:]] or ["it said nothing"])[-1][:300]


def _environment(threads: int) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {"FEDLENS_LIMIT": str(Path(limit.__file__).resolve()), "OMP_NUM_THREADS": str(threads)}
