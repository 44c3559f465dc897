"""Carries out the runs of a study as tasks of a Ray cluster: `fedlens sweep --engine ray`."""

from __future__ import annotations

import io
import os
import pickle
import secrets
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.base.errors import ConfigError, FedlensError, RunFailed, told
from fedlens.base.interrupts import postponed
from fedlens.base.threads import share_cores, usable_cores
from fedlens.engines.ray_cluster import connect, import_ray, one_line
from fedlens.engines.ray_worker import Source, actor_class, load_source, user_sources
from fedlens.files.atomic_files import replacing_folder
from fedlens.files.full_disk import CONTINUE
from fedlens.results.rows import Row
from fedlens.studies.carry_out import RunOptions, StudyStopped, carry_out, line_of_failure
from fedlens.studies.jobs import SAVING, TICK, TRIES, Ended
from fedlens.studies.planned import DueRun
from fedlens.studies.progress import StudyProgress
from fedlens.studies.store import working

if TYPE_CHECKING:
    from fedlens.run.session import Session

LOCAL = "local"  # the address of a Ray that is started here
_STORE = 256 * 2**20  # bytes of its object store
_TIMEOUT = 60.0  # seconds until an address must answer


@dataclass(frozen=True)
class RayTask:
    """The message to a node for one run.

    Attributes:
        options: `runs` is the folder of the driver.
        marker: the name and the text of a file beside `runs`: a node that reads it shares the folder.
        home: the current directory of the driver, which relative paths in settings start at.
        threads: of the run.
    """

    due: DueRun
    options: RunOptions
    marker: tuple[str, str]
    home: str
    threads: int
    sources: Sequence[Source]


@dataclass(frozen=True)
class RayAnswer:
    """The answer of a node: the line or the error, and the run directory if the folder is not shared."""

    line: Row | None
    stopped: StudyStopped | None
    archive: bytes | None


class RayJobs:
    """Carries out runs on the nodes of a Ray cluster.

    A node that sees the folder of the study writes run directories there. Any other sends them back when they end.

    Args:
        options: of all runs; `data_dir` is looked for on each node.
        threads: of a run, and the CPUs that Ray reserves for it.
        address: `host:port`, "auto", or `LOCAL`.

    Raises `ConfigError` if Ray is not installed or no cluster answers.
    """

    def __init__(
        self, options: RunOptions, threads: int, address: str, progress: StudyProgress | None = None
    ) -> None:
        self._options = replace(options, runs=options.runs.resolve())
        self._threads, self._progress = threads, progress or StudyProgress()
        self._ray = import_ray()
        local = address == LOCAL
        self._cluster = connect(
            None if local else address, usable_cores(), _STORE if local else None, threads, _TIMEOUT
        )
        self._versions = actor_class().versions()
        self._function = self._ray.remote(_task_function()).options(num_cpus=threads, max_retries=0)
        self._pending: dict[Any, DueRun] = {}
        self._marker = self._options.study / f".shared-{secrets.token_hex(8)}"
        self._text = secrets.token_hex(16)

    def carry_out(self, due: Sequence[DueRun], ended: Ended) -> None:
        """See `fedlens.studies.jobs.Jobs.carry_out`."""
        deaths = Counter[str]()
        self._marker.write_text(self._text)
        try:
            for one in due:
                self._submit(one)
            checked = time.monotonic()
            while self._pending:
                self._cluster.check_node()
                done, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=TICK)
                for promise in done:
                    with postponed():
                        self._take(promise, deaths, ended)
                if time.monotonic() - checked > TICK:
                    checked = time.monotonic()
                    self._cluster.check(checked)
        except (KeyboardInterrupt, FedlensError):
            self._interrupt(ended)
            raise
        finally:
            self._marker.unlink(missing_ok=True)

    def _submit(self, due: DueRun) -> None:
        directory = self._options.runs / due.run.directory
        # In a dictionary: a node fetches it only if it does not share the folder.
        sent = [directory] if (directory / "config.toml").is_file() else []
        if due.run.start is not None and not sent:  # a run that has begun has its initial weights
            sent = [self._options.runs / due.run.start.directory]
        folders = {folder.name: self._ray.put(packed(folder)) for folder in sent}
        marker = (self._marker.name, self._text)
        task = RayTask(due, self._options, marker, os.getcwd(), self._threads, user_sources())
        # As bytes: the versions are compared before they are read.
        self._pending[self._function.remote(pickle.dumps(task), folders, self._versions)] = due
        self._progress.run_started(due.run)

    def _take(self, promise: Any, deaths: Counter[str], ended: Ended) -> None:
        """Handles the answer of a task, or the loss of its worker."""
        due = self._pending.pop(promise)
        try:
            answer: RayAnswer | dict[str, str] = self._ray.get(promise)
        except self._ray.exceptions.RayTaskError as error:
            raise RunFailed(
                f"a task of {self._cluster} failed: {told(error.cause)}",
                hint="run the study without --engine ray to see whether it fails here too",
            ) from error
        except self._ray.exceptions.RayError as error:
            deaths[due.run.digest] += 1
            why = f"its worker on {self._cluster} was lost: {one_line(error)}"
            if deaths[due.run.digest] < TRIES:
                self._progress.note(f"{due.run.key}: {why}; the run is repeated once")
                self._submit(due)
                return
            directory = self._options.runs / due.run.directory
            ended(due.run, line_of_failure(due.run, directory, why))
            return
        if isinstance(answer, dict):
            raise self._other_versions(answer)
        self._keep(due, answer)
        if answer.stopped is not None:
            raise answer.stopped
        if answer.line is None:
            raise KeyboardInterrupt
        ended(due.run, answer.line)

    def _other_versions(self, theirs: dict[str, str]) -> ConfigError:
        different = [name for name, version in self._versions.items() if theirs[name] != version]
        remote = ", ".join(f"{name} {theirs[name]}" if theirs[name] else f"no {name}" for name in different)
        local = ", ".join(f"{name} {self._versions[name]}" for name in different)
        return ConfigError(
            f"a worker on {self._cluster} has {remote}, but this process has {local}",
            where="--address",
            hint="install the same versions on every node, where 'ray start' finds them, and restart Ray there",
        )

    def _interrupt(self, ended: Ended) -> None:
        """Cancels all tasks. Running ones save their last complete round; nodes without the folder send it back."""
        until = time.monotonic() + SAVING
        with suppress(Exception):  # the cluster may be gone, and the first error is more useful
            for promise in self._pending:
                self._ray.cancel(promise, force=False)
            while self._pending and time.monotonic() < until:
                done, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=TICK)
                for promise in done:
                    due = self._pending.pop(promise)
                    with suppress(self._ray.exceptions.RayError):  # it had not started
                        answer = self._ray.get(promise)
                        if isinstance(answer, RayAnswer):
                            self._keep(due, answer)
                            if answer.line is not None:
                                ended(due.run, answer.line)

    def _keep(self, due: DueRun, answer: RayAnswer) -> None:
        """Writes the run directory that a node sent back."""
        if answer.archive is not None:
            unpack(answer.archive, self._options.runs / due.run.directory)

    def close(self) -> None:
        """Disconnects from the cluster, or ends the local Ray."""
        self._cluster.close()


def _task_function() -> Callable[..., Any]:
    """The function of a task. Made in a function it travels by value, so other versions of fedlens are noticed."""
    versions_here = actor_class().versions

    def task(task: bytes, folders: dict[str, Any], versions: dict[str, str]) -> Any:
        here = versions_here()
        if here != versions:
            return here
        from fedlens.studies.ray_jobs import answered

        return answered(task, folders)

    return task


_sessions: list[Any] = []  # of this process: Ray carries out many tasks in one


def answered(pickled: bytes, folders: Mapping[str, Any]) -> RayAnswer:
    """Carries out a task on the node where this process runs.

    Args:
        folders: references to the archives of run directories by name: that of the run if it has begun before, or else
            that of its pre-training.
    """
    import torch

    from fedlens.run.session import Session

    task: RayTask = pickle.loads(pickled)
    torch.set_num_threads(task.threads)
    share_cores(task.threads)
    if os.path.isdir(task.home):
        os.chdir(task.home)
    for source in task.sources:
        load_source(*source)
    if not _sessions:
        _sessions.append(Session())
    if shared(task):
        with working(task.options.study):
            return _carried_out(task, task.options, _sessions[0], False)
    with tempfile.TemporaryDirectory(prefix="fedlens-run-") as folder:
        options = replace(task.options, runs=Path(folder, "runs"))
        options.runs.mkdir()
        for name, archive in folders.items():
            unpack(import_ray().get(archive), options.runs / name)
        return _carried_out(task, options, _sessions[0], True)


def _carried_out(task: RayTask, options: RunOptions, session: Session, archive: bool) -> RayAnswer:
    line, stopped = None, None
    with suppress(KeyboardInterrupt):  # the driver cancelled the task; the run is saved
        try:
            line = carry_out(task.due, options, session, StudyProgress())
        except StudyStopped as error:
            stopped = error
    directory = options.runs / task.due.run.directory
    return RayAnswer(line, stopped, packed(directory) if archive and directory.is_dir() else None)


def shared(task: RayTask) -> bool:
    """Whether this node shares the folder of the study: it has the marker file of the driver."""
    name, text = task.marker
    try:
        return (task.options.study / name).read_text() == text
    except OSError:
        return False


def packed(directory: Path) -> bytes:
    """A run directory as an archive, without its lock."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(directory.rglob("*")):
            if path.name != ".lock":
                archive.add(path, path.relative_to(directory).as_posix(), recursive=False)
    return buffer.getvalue()


def unpack(archive: bytes, directory: Path) -> None:
    """Replaces a run directory by the one in an archive. Raises `StudyStopped` if the disk refuses.

    >>> source, copy = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp()) / "run"
    >>> _ = (source / "config.toml").write_text("rounds = 2")
    >>> unpack(packed(source), copy)
    >>> (copy / "config.toml").read_text()
    'rounds = 2'
    """
    try:
        with replacing_folder(directory) as beside, tarfile.open(fileobj=io.BytesIO(archive)) as files:
            beside.mkdir()
            files.extractall(beside, filter="data")
    except OSError as error:
        raise StudyStopped(
            f"the study stopped: a run directory cannot be written: {error.strerror or error}",
            where=str(directory),
            hint=f"check the disk, {CONTINUE}",
        ) from error
