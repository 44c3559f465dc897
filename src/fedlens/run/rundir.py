"""The run directory: every file that a run writes. Reports and comparisons read nothing else."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from fedlens import __version__
from fedlens.base.errors import RunDirectoryError
from fedlens.base.shell_command import quoted_command
from fedlens.files import jsonl as lines
from fedlens.files.atomic_files import (
    fsync_directory,
    not_regular,
    refused,
    sweep,
    write_atomically,
)
from fedlens.files.full_disk import disk_full
from fedlens.files.lock import locked
from fedlens.files.text_files import read_json, read_toml_table
from fedlens.settings.config_source import with_new_names

FORMAT = 1
_FOLDERS = ("checkpoint", "states", "recordings", "journal")
_APPENDED = ("metrics.jsonl", "clients.jsonl")
_PLAIN_NAME = re.compile(r"[^/\\\x00-\x1f]+")
_SEARCH_DEPTH = 3
# What a run that ended before its first file leaves: its lock, and files of a server that gathered its sites.
_BEFORE_A_RUN = {
    ".lock",
    "serve.lock",
    "serve.json",
    "serve.log.jsonl",
    "answers.jsonl",
    "roster.json",
    "journal",
}


@dataclass(frozen=True)
class _Inside:
    """The path of a file or folder of the run directory, as an attribute of `RunDir`."""

    name: str

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """A run's directory. Make one with `RunDir.create` or `RunDir.open`.

    Nothing is kept open or in memory: each read goes to the disk, so the directory of a running experiment can be read.
    One process writes; it holds `lock` meanwhile.

    >>> import tempfile
    >>> run = RunDir.create(Path(tempfile.mkdtemp()) / "first", "digits", None)
    >>> run.write_config('name = "digits"')
    >>> with run.lock():
    ...     run.write_summary({"status": "finished", "test_loss": float("nan")})
    >>> run.read_summary()
    {'status': 'finished', 'test_loss': None}
    """

    path: Path

    config_path = _Inside("config.toml")
    environment_path = _Inside("environment.json")
    npz_path = _Inside("partition.npz")
    roster_path = _Inside("roster.json")
    metrics_path = _Inside("metrics.jsonl")
    clients_path = _Inside("clients.jsonl")
    participation_path = _Inside("participation.jsonl")
    checkpoint_path = _Inside("checkpoint")
    states_path = _Inside("states")
    recordings_path = _Inside("recordings")
    journal_path = _Inside("journal")
    private_path = _Inside("private.jsonl")
    model_path = _Inside("model.safetensors")
    best_path = _Inside("best.safetensors")
    evaluation_path = _Inside("evaluation.npz")
    examples_path = _Inside("examples.npz")
    held_out_path = _Inside("held_out.npz")
    labels_path = _Inside("labels_to_check.csv")
    initial_path = _Inside("initial.safetensors")
    summary_path = _Inside("summary.json")
    pretraining_path = _Inside("pretraining.json")
    client_tests_path = _Inside("client_tests.json")
    predictions_path = _Inside("predictions")
    report_path = _Inside("report.html")
    shared_path = _Inside("report-pseudonyms.html")
    pseudonyms_path = _Inside("pseudonyms.json")
    serve_path = _Inside("serve.json")
    serve_log_path = _Inside("serve.log.jsonl")
    answers_path = _Inside("answers.jsonl")

    @staticmethod
    def create(out: Path | None, name: str, run_id: str | None) -> RunDir:
        """A new, empty run directory: `out` where the user named one, else `runs/<name>/<run_id>`.

        `run_id` is made by `new_run_id` if it is None. Raises `RunDirectoryError` if the directory is not empty, if a
        file is in the way, if `name` cannot be a directory's name, or if the disk refuses.
        """
        if out is not None:
            return RunDir(_make(out.expanduser()))
        _check_name(name, "name")
        if run_id is not None:
            _check_name(run_id, "run id")
        while True:
            path = Path("runs") / name / (run_id or new_run_id())
            if run_id is not None or not path.exists():
                return RunDir(_make(path))

    @property
    def partition_path(self) -> Path:
        """The file of the partition: of the roster if the data are at sites."""
        return self.roster_path if self.roster_path.exists() else self.npz_path

    @classmethod
    def open(cls, path: Path) -> Self:
        """The run directory at `path`.

        Raises `RunDirectoryError` if it is not a run directory (and names the latest one below it), or if another
        version of fedlens wrote it in another format.
        """
        path = path.expanduser()
        run = cls(path)
        if not run.config_path.is_file():
            raise _not_a_run(path)
        environment = run.read_environment() or {}
        if environment.get("format", FORMAT) != FORMAT:
            by = environment.get("fedlens", "another version")
            raise RunDirectoryError(
                f"the run was written by fedlens {by} in format {environment['format']}, "
                f"and this is fedlens {__version__}, which reads format {FORMAT}",
                where=str(path),
                hint=f"use fedlens {by} for it",
            )
        return run

    @property
    def appended(self) -> list[Path]:
        """The files that get lines while the run trains."""
        return [self.path / name for name in _APPENDED]

    @property
    def run_id(self) -> str:
        """The id that sites know, if they computed the run; else the name of the directory."""
        return str((read_json(self.serve_path) or {}).get("run") or self.path.resolve().name)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Prevent other processes from writing to this run while the block or this process lasts.

        Raises `RunDirectoryError` if another process holds the lock, or if a file that is appended to is a link,
        a FIFO or a device, or a folder a link: a directory from somebody else may contain such entries.
        """
        with locked(self.path / ".lock", f"the run {self.path}"):
            self._refuse_planted()
            sweep(self.path)
            yield

    def _refuse_planted(self) -> None:
        """What is appended to, or removed from a folder, must not lie elsewhere. Other files are replaced whole."""
        for name in (*_APPENDED, *_FOLDERS):
            path = self.path / name
            with suppress(FileNotFoundError):
                mode = path.lstat().st_mode
                if not (stat.S_ISDIR(mode) if name in _FOLDERS else stat.S_ISREG(mode)):
                    raise not_regular(path)

    def write_config(self, text: str) -> None:
        """Write `config.toml` atomically."""
        write_atomically(self.config_path, text.encode())

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write `environment.json`, with the format of the run directory in it."""
        _write_json(self.environment_path, {"format": FORMAT, **environment}, named=False)

    def add_to_environment(self, **facts: Any) -> None:
        """Replaces facts in `environment.json`, if there is one."""
        environment = self.read_environment()
        if environment is not None:
            self.write_environment({**environment, **facts})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`; numbers that are not finite become null."""
        _write_json(self.summary_path, summary)

    def write_pretraining(self, settings: Mapping[str, Any]) -> None:
        """Write `pretraining.json`, the settings that `fedlens pretrain` was called with."""
        _write_json(self.pretraining_path, settings)

    def write_client_tests(self, tests: Mapping[str, Any]) -> None:
        """Write `client_tests.json`; see `fedlens.use.client_tests`."""
        _write_json(self.client_tests_path, tests)

    def sync(self, files: Iterable[str] = _APPENDED) -> None:
        """Wait until the lines of `files`, which are appended to, and the names of all files are on the disk.

        A checkpoint is saved only after that, so a run that can be resumed has all that it needs.
        """
        for name in files:
            lines.sync(self.path / name)
        fsync_directory(self.path)

    def truncate_metrics(self, after_round: int) -> int:
        """Drop the lines of `metrics.jsonl` after this round and a truncated last line; returns how many."""
        return lines.truncate(self.metrics_path, after_round)

    def truncate_clients(self, after_round: int) -> int:
        """Drop the lines of `clients.jsonl` after this round and a truncated last line; returns how many."""
        return lines.truncate(self.clients_path, after_round)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, oldest first, without a truncated last line."""
        return lines.read(self.metrics_path)

    def read_clients(self) -> list[dict[str, Any]]:
        """The lines of `clients.jsonl`, oldest first; none if they were not recorded."""
        return lines.read(self.clients_path)

    def stream_clients(self) -> Iterator[dict[str, Any]]:
        """The lines of `clients.jsonl` one by one: with many clients and rounds they may not fit in memory."""
        return lines.stream(self.clients_path)

    def read_participation(self) -> list[dict[str, Any]]:
        """The lines of `participation.jsonl`, oldest first; none if the data of the run are not at sites."""
        return lines.read(self.participation_path)

    def read_config(self) -> dict[str, Any]:
        """The settings in `config.toml`. Raises `RunDirectoryError` if it is missing or cannot be read."""
        return with_new_names(read_toml_table(self.config_path))

    def read_environment(self) -> dict[str, Any] | None:
        """The contents of `environment.json`, or None if the file is missing."""
        return read_json(self.environment_path)

    def read_pretraining(self) -> dict[str, Any] | None:
        """The contents of `pretraining.json`, or None if `fedlens pretrain` did not start the run."""
        return read_json(self.pretraining_path)

    def read_client_tests(self) -> dict[str, Any] | None:
        """The contents of `client_tests.json`, or None if the clients' own models were not tested."""
        return read_json(self.client_tests_path)

    def read_summary(self) -> dict[str, Any] | None:
        """The contents of `summary.json`, or None if the run has not ended or was killed."""
        return read_json(self.summary_path)


def file_names() -> set[str]:
    """The names of the files and folders of a run directory, without those of a user's observers."""
    return {entry.name for entry in vars(RunDir).values() if isinstance(entry, _Inside)}


def new_run_id() -> str:
    """The time in UTC and four random hexadecimal digits: `20261120-122105-a1b2`."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: non-finite numbers become None, array scalars become numbers.

    Raises `TypeError` for values that JSON cannot hold.

    >>> import numpy as np
    >>> plain({"loss": float("inf"), 3: (np.float32(0.5), Path("runs/a"))})
    {'loss': None, '3': [0.5, 'runs/a']}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # an array of one number, of numpy or torch, neither of which is imported here
        return plain(value.item())
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _check_name(name: str, what: str) -> None:
    if not _PLAIN_NAME.fullmatch(name) or name in (".", "..") or len(name.encode()) > 200:
        hint = "choose a short name without path separators, or name the directory with --out"
        raise RunDirectoryError(f"the {what} {name!r} cannot be a directory's name", hint=hint)


def _make(path: Path) -> Path:
    another = "name another directory with --out"
    try:
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(entry.name not in _BEFORE_A_RUN for entry in path.iterdir())
    except (FileExistsError, NotADirectoryError):
        what, hint = "a file has the path of the run directory", another
    except OSError as error:
        if disk_full(error):
            raise refused(error, "the run directory", path, f"or {another}") from error
        what, hint = f"the run directory cannot be created: {error.strerror}", another
    else:
        if not occupied and os.access(path, os.W_OK | os.X_OK):
            return path
        what, hint = "the run directory is not writable", another
        if occupied and (path / "config.toml").is_file():
            failed = (RunDir(path).read_summary() or {}).get("status") == "failed"
            what = f"the directory already contains a run{', which failed' if failed else ''}"
            anew = "to begin again move or delete it, else " if failed else ""
            hint = f"{anew}resume it ({quoted_command('resume', path)}), or {another}"
        elif occupied:
            what = "the run directory is not empty"
    raise RunDirectoryError(what, where=str(path), hint=hint)


def _not_a_run(path: Path) -> RunDirectoryError:
    if not path.exists():
        hint = "'runs' contains the runs of this directory" if Path("runs").is_dir() else None
        return RunDirectoryError("the directory does not exist", where=str(path), hint=hint)
    if not path.is_dir():
        hint = f"did you mean {path.parent}" if (path.parent / "config.toml").is_file() else None
        return RunDirectoryError("this is a file, not a run directory", where=str(path), hint=hint)
    below = list(runs_below(path, _SEARCH_DEPTH))
    hint = None
    if below:
        latest = max(below, key=lambda run: ((run / "config.toml").stat().st_mtime_ns, run.name))
        count = "the one run" if len(below) == 1 else f"the latest of {len(below)} runs"
        hint = f"{count} below it is {latest}"
        if federated := federated_beside(latest):
            hint = f"{federated} is a federated run of 'fedlens cost' below it"
    return RunDirectoryError("this is not a run directory: it has no config.toml", where=str(path), hint=hint)


def federated_beside(run: Path) -> Path | None:
    """The first federated run of the `fedlens cost` that made a run, which may be a baseline; None for other runs."""
    if not (run.parent / "cost.json").is_file():
        return None
    return min((path.parent for path in run.parent.glob("federated-seed*/config.toml")), default=None)


def runs_below(path: Path, depth: int) -> Iterator[Path]:
    """The run directories in a folder and in its folders, so many levels down, sorted by path.

    Links to folders and hidden folders are passed over, and so are folders that cannot be read, and those inside a run.
    """
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for folder in (path / name for name in names if not name.startswith(".")):
        if (folder / "config.toml").is_file():
            yield folder
        elif depth > 1:
            yield from runs_below(folder, depth - 1)


def _write_json(path: Path, content: Mapping[str, Any], named: bool = True) -> None:
    write_atomically(path, (json.dumps(plain(content), indent=2, allow_nan=False) + "\n").encode(), named)
