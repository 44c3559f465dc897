"""What a server keeps of finished runs, and for how long: `fedlens purge`, and the retention of a federation.

A purge removes checkpoints, states, recordings and the journal of a run. Its model, results and logs stay.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any

from fedlens.base.format import many
from fedlens.core.wire.terms import DEFAULT_DAYS
from fedlens.files.chained_log import ChainedLog, read_chained
from fedlens.files.lock import locked
from fedlens.files.text_files import read_json
from fedlens.identity.authority import day
from fedlens.identity.private_files import one_writer, write_private
from fedlens.run.rundir import RunDir
from fedlens.server.event_log import DAY
from fedlens.server.serve_record import ServeRecord

_FILE = "keep.json"


@dataclass(frozen=True)
class Removed:
    """What was removed of a run, and where its log says so.

    Attributes:
        files: how many, by folder of the run directory.
        bytes: of all of them.
        logged: the line in `answers.jsonl` of the run, in words; empty if it has none.
    """

    files: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    logged: str = ""

    def __str__(self) -> str:
        """In words.

        >>> str(Removed({"checkpoint": 2, "states": 1}, 5120)), str(Removed())
        ('checkpoint (2 files), states (1 file), 5,120 bytes', 'nothing was there')
        """
        folders = [f"{name} ({many(count, 'file')})" for name, count in self.files.items()]
        return ", ".join([*folders, f"{self.bytes:,} bytes"]) if folders else "nothing was there"


def removed_before(run: RunDir, kind: str, site: str | None = None) -> Removed | None:
    """What the first line of a kind, and of a site, in the log of a run's server says; None if there is none."""
    lines = read_chained(run.answers_path) if run.answers_path.exists() else ()
    for number, (line, head, _) in enumerate(lines, start=1):
        if (line.get("kind"), line.get("site")) == (kind, site):
            logged = f"{day(line['time'])}, line {number:,}, head {head.hex()}"
            return Removed(line.get("folders", {"files": line["files"]}), line["bytes"], logged)
    return None


class ServedRuns:
    """The runs that a federation has served, and for how many days they are kept, in `keep.json` of its folder.

    Args:
        federation: the folder.

    >>> import tempfile
    >>> kept = ServedRuns(Path(tempfile.mkdtemp()))
    >>> kept.keep(30)
    >>> kept.add(Path("/runs/wards/1"))
    >>> kept.days, kept.paths
    (30, [PosixPath('/runs/wards/1')])
    """

    def __init__(self, federation: Path) -> None:
        self._path = federation / _FILE

    @property
    def days(self) -> int:
        """Days after the last event of a run until it is purged."""
        return int(self._read()["days"])

    @property
    def paths(self) -> list[Path]:
        """The run directories, in the order in which they were first served."""
        return [Path(path) for path in self._read()["runs"]]

    def keep(self, days: int) -> None:
        """Sets the days."""
        self._change(lambda kept: {**kept, "days": days})

    def add(self, run: Path) -> None:
        """Adds a run directory."""
        self._change(lambda kept: {**kept, "runs": [*dict.fromkeys([*kept["runs"], str(run.resolve())])]})

    def _read(self) -> dict[str, Any]:
        return {"days": DEFAULT_DAYS, "runs": [], **(read_json(self._path) or {})}

    def _change(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        with one_writer(self._path.parent):
            write_private(self._path, json.dumps(change(self._read())).encode())

    def days_of(self, run: RunDir) -> int:
        """Days until a run is purged: never more than those of its terms, which the sites have approved."""
        record = ServeRecord.read(run)
        return self.days if record is None else min(self.days, record.keep_days)

    def due(self, now: float) -> list[RunDir]:
        """The runs that were not purged and whose log is older than the retention."""
        runs = [RunDir(path) for path in self.paths]
        logged = [run for run in runs if run.serve_log_path.exists() and purged_on(run) is None]
        return [run for run in logged if now - run.serve_log_path.stat().st_mtime > self.days_of(run) * DAY]


def purged_on(run: RunDir) -> str | None:
    """The day on which a run was purged, None if it was not."""
    day = (run.read_summary() or {}).get("purged")
    return None if day is None else str(day)


@contextmanager
def held(run: RunDir) -> Iterator[None]:
    """Keeps servers and other commands out of a run. Raises `RunDirectoryError` while a process writes it."""
    with ExitStack() as locks:
        if run.serve_path.exists():
            locks.enter_context(locked(run.path / "serve.lock", f"the run {run.path}"))
        locks.enter_context(run.lock())
        yield


def remove(
    run: RunDir, paths: Iterable[Path], kind: str, clock: Callable[[], float] = time, **facts: Any
) -> Removed:
    """Removes files and folders of a run that is `held`, with a line in the log of its server.

    The run is not resumed any more.
    """
    now = clock()
    # First: a run whose checkpoints are half gone must not be resumed.
    today = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d}"
    run.write_summary({**(run.read_summary() or {}), "purged": today, "withdrawn": facts.get("site")})
    present = [path for path in paths if path.exists()]
    files = [file for path in present for file in (path, *path.rglob("*")) if file.is_file()]
    folders = Counter(file.relative_to(run.path).parts[0] for file in files)
    removed = Removed(folders, sum(file.lstat().st_size for file in files))
    for path in present:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if run.serve_path.exists():
        with closing(ChainedLog(run.answers_path)) as log:
            sizes = {"files": len(files), "folders": folders, "bytes": removed.bytes}
            log.append({"kind": kind, "time": int(now), **sizes, **facts})
    return removed


def purge(run: RunDir, clock: Callable[[], float] = time) -> Removed:
    """Purges a run; see `remove`. Raises `RunDirectoryError` while a process writes it."""
    with held(run):
        folders = (run.checkpoint_path, run.states_path, run.recordings_path, run.journal_path)
        return remove(run, folders, "purged", clock)
