"""The folder of a study: its lock, the lines of its runs, and the check of its run directories.

The file `planned.json` in a run directory has the run of the plan, and the digests of its files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.files import jsonl
from fedlens.files.atomic_files import (
    make_folder,
    open_unlinked,
    read_regular,
    refuse_link,
    refused,
    sweep,
    write_atomically,
)
from fedlens.files.lock import locked
from fedlens.files.text_files import read_json
from fedlens.results.rows import LINES, Row, StudyInfo, read_lines, write_lines
from fedlens.run.rundir import RunDir
from fedlens.settings.config import plain
from fedlens.settings.config_source import Source
from fedlens.settings.keys import changing, diff
from fedlens.studies.planned import PlannedRun, settings_in

_WRITTEN_BY_RUN = ("data.dataset.", "task.", "model.weights_sha256")
_PLANNED, _CONFIG, _METRICS = "planned.json", "config.toml", "metrics.jsonl"
_WORKING = ".working"  # locked by every process that carries out runs
_PATIENCE = 60.0  # seconds to wait for the workers of a killed study


class StudyStore:
    """The lines of a study in its folder, by digest.

    A line is appended when its run ends. A kill therefore loses at most the line of a run with a complete directory.

    >>> import tempfile
    >>> store = StudyStore(Path(tempfile.mkdtemp()))
    >>> store.add(Row("0f", "fedavg-seed0-0f", "finished", None, 2, "test_accuracy", {}))
    >>> StudyStore(store.folder).lines["0f"].rounds
    2
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines = self._read()

    def _read(self) -> dict[str, Row]:
        return {line.digest: line for line in read_lines(self.folder / LINES)}

    @property
    def runs(self) -> Path:
        """The folder of the run directories."""
        return self.folder / "runs"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other processes from carrying out the same study while the block lasts.

        Raises `RunDirectoryError` if another process does, or if the folder cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"the folder of the study cannot be created: {error.strerror}",
                where=str(self.folder),
                hint="name another folder with --out",
            ) from error
        make_folder(self.runs)
        with locked(self.folder / ".lock", f"the study {self.folder}"):
            sweep(self.folder)
            self._wait_for_workers()
            self.lines = self._read()
            if not _ends_with_a_line(self.folder / LINES):  # the next one would be lost with it
                write_lines(self.folder / LINES, self.lines.values())
            yield

    def _wait_for_workers(self) -> None:
        """Waits for the workers of a killed study, which end shortly after it."""
        until = time.monotonic() + _PATIENCE
        while not _free(self.folder / _WORKING):
            if time.monotonic() > until:
                raise RunDirectoryError(
                    "workers of an earlier sweep still write into this study",
                    where=str(self.folder),
                    hint="wait for them to end, or stop them",
                )
            time.sleep(0.05)

    def check(self, runs: Iterable[PlannedRun], entries: Iterable[Row] = ()) -> None:
        """Raises `RunDirectoryError` if the directory of a run holds another run, was edited by hand, or is a link."""
        planned = {run.directory: (run.digest, settings_in(run, self.runs)) for run in runs}
        others = {entry.run: (entry.digest, None) for entry in entries if entry.run not in planned}
        for name, (digest, settings) in {**planned, **others}.items():
            refuse_link(directory := self.runs / name)
            if directory.exists():
                check_directory(directory, digest, settings)

    def drop_failed(self) -> int:
        """Drops the lines of failed runs, which are repeated; returns their number."""
        failed = [digest for digest, line in self.lines.items() if line.status == "failed"]
        for digest in failed:
            del self.lines[digest]
        return len(failed)

    def add(self, line: Row) -> None:
        """Appends the line of a run that has ended. Raises `RunFailed` if the disk refuses."""
        self.lines.pop(line.digest, None)
        self.lines[line.digest] = line
        jsonl.append(self.folder / LINES, [line.line])

    def settle(self, info: StudyInfo) -> None:
        """Writes all lines anew, in the order of the plan; those of other plans come last, by name."""
        write_lines(self.folder / LINES, in_order(self.lines, info))


def in_order(lines: Mapping[str, Row], info: StudyInfo) -> list[Row]:
    """The lines in the order of the plan, whichever ended first; those that it does not name come last, by name."""
    planned = dict.fromkeys(entry.digest for entry in (*info.pretrained, *info.entries))
    others = sorted((line for line in lines.values() if line.digest not in planned), key=_name)
    return [*(lines[digest] for digest in planned if digest in lines), *others]


def _name(line: Row) -> tuple[str, str]:
    return line.run, line.digest


@contextmanager
def working(folder: Path) -> Iterator[None]:
    """Marks this process as a writer of run directories in `folder`, until the block or the process ends."""
    try:
        descriptor = open_unlinked(folder / _WORKING, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise refused(error, _WORKING, folder / _WORKING) from error
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _ends_with_a_line(path: Path) -> bool:
    """Whether the last line of a file is complete; true without a file."""
    try:
        return read_regular(path)[-1:] in (b"", b"\n")
    except FileNotFoundError:
        return True
    except OSError as error:
        raise RunDirectoryError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error


def _free(path: Path) -> bool:
    """Whether no process holds the lock at `path`."""
    try:
        descriptor = open_unlinked(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
    finally:
        os.close(descriptor)
    return True


def write_planned(planned: PlannedRun, directory: Path, ended: bool) -> None:
    """Writes which run `directory` holds, and the SHA-256 of config.toml; if it `ended`, of metrics.jsonl too.

    Does nothing before the run has written its config.toml. Raises `RunFailed` if the disk refuses.
    """
    if not (directory / _CONFIG).is_file():
        return
    names = (_CONFIG, _METRICS) if ended and (directory / _METRICS).is_file() else (_CONFIG,)
    content = {"digest": planned.digest, "sha256": {name: _sha256(directory / name) for name in names}}
    write_atomically(directory / _PLANNED, (json.dumps(content) + "\n").encode())


def check_directory(directory: Path, digest: str, settings: Mapping[str, Any] | None) -> None:
    """Raises `RunDirectoryError` if `directory` holds another run than this one, or if its files were edited by hand.

    Args:
        digest: of the planned run.
        settings: of the planned run; None if they are not known, and then a run that was killed at its start is not
            checked.
    """
    if not (directory / _CONFIG).is_file():
        if directory.is_dir() and any(entry.name != ".lock" for entry in directory.iterdir()):
            raise RunDirectoryError(
                "the directory of a run has files but no config.toml",
                where=str(directory),
                hint="move it away or delete it, and run the study again: it repeats the run",
            )
        return
    noted = _read(directory / _PLANNED)
    if noted is None:  # killed before it was written
        if different_settings(settings, directory):
            raise _refused("the run directory holds another run", settings, directory)
        return
    if noted["digest"] != digest:
        raise _refused("the run directory holds another run", settings, directory)
    for name, sha256 in noted["sha256"].items():
        path = directory / name
        if path.is_file() and _sha256(path) == sha256:
            continue
        if name == _CONFIG:
            raise _refused("config.toml of a run was edited", settings, directory)
        raise RunDirectoryError(
            f"{name} of a finished run was edited",
            where=str(path),
            hint="restore the file, or delete the run directory and run the study again: it repeats the run",
        )


def different_settings(settings: Mapping[str, Any] | None, directory: Path) -> list[tuple[str, Any, Any]]:
    """The settings in the config.toml of a run directory that differ from these: key, value there, value here.

    Settings that change no result, such as those of the engine, are left out. Empty if the settings are not known.
    """
    if settings is None:
        return []
    found, given = (
        changing(config, "experiment")
        for config in (RunDir.open(directory).read_config(), _resolved(settings))
    )
    # A run writes down what follows from data and files: the size of its images, its task, a digest.
    chosen = {key for key in found if key.startswith(_WRITTEN_BY_RUN)} - given.keys()
    different = (change for change in diff(found, given) if change[0] not in chosen)
    return sorted(different, key=itemgetter(0))


def _resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the run writes them into its config.toml."""
    import tomli_w

    from fedlens.settings.plan import plan_of

    return tomllib.loads(tomli_w.dumps(plain(plan_of(Source(dict(settings))).config)))


def _refused(what: str, settings: Mapping[str, Any] | None, directory: Path) -> RunDirectoryError:
    different = different_settings(settings, directory)
    shown = [
        f"{key} is {_shown(actual)} instead of {_shown(planned)}" for key, actual, planned in different[:3]
    ]
    more = f"; and {len(different) - 3} more" if len(different) > 3 else ""
    return RunDirectoryError(
        f"{what}{': ' if shown else ''}{'; '.join(shown)}{more}",
        where=str(directory / _CONFIG),
        hint="undo the edit, or delete the directory and run the study again: it repeats the run",
    )


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, default=str)


def _read(path: Path) -> dict[str, Any] | None:
    noted = read_json(path) or {}
    return noted if isinstance(noted.get("sha256"), dict) and "digest" in noted else None


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_regular(path)).hexdigest()
