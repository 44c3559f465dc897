"""Carries out one run of a study in this process: starts or resumes it, and returns its line of results.

A run whose loss diverges is stopped, to save the cost of its other rounds. A finished pre-training is kept in the cache
folder of the user, so that several studies share one. Analyses of final runs are made here too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens import __version__
from fedlens.analyses.analyze import FOLDER, analyze, file_name, read_index
from fedlens.api import Experiment, resume
from fedlens.base.errors import FedlensError, RunFailed, told
from fedlens.base.interrupts import from_code
from fedlens.core.step_counts import Work
from fedlens.files import jsonl
from fedlens.files.atomic_files import make_folder, replacing_folder
from fedlens.files.caches import user_cache
from fedlens.files.full_disk import disk_full, stopped_when_full
from fedlens.observers.divergence import COLLAPSE, Divergence, Extremes
from fedlens.results.rows import Row, failed_row, rounded, row_of_run
from fedlens.results.run import Run
from fedlens.run.build import build, data_directory
from fedlens.run.observer import Listening
from fedlens.run.progress import Progress, ProgressBase
from fedlens.run.run_description import data_digest
from fedlens.run.rundir import RunDir
from fedlens.settings.config_source import Source
from fedlens.settings.own_files import refuse_edited
from fedlens.settings.plan import plan_of
from fedlens.studies.planned import DueRun, PlannedRun, settings_in
from fedlens.studies.progress import StudyProgress
from fedlens.studies.store import write_planned
from fedlens.studies.tuning import DIVERGED

if TYPE_CHECKING:
    from fedlens.core.driver import Tally
    from fedlens.core.protocol import State
    from fedlens.run.session import Session

Rows = Sequence[Mapping[str, Any]]
_LEFT_OUT = shutil.ignore_patterns("checkpoint*", "states", "recordings", "images", ".*")  # of the cache


@dataclass(frozen=True)
class RunOptions:
    """What all runs of a study share.

    Attributes:
        runs: the folder with a directory for each run.
        data_dir: where datasets are; None for the default.
        download: download missing datasets.
        reports: write the report.html of each run.
        stop_diverged: end a run whose loss has diverged; it counts as failed.
        analyses: of final runs that recorded local models or updates, with their settings by name.
        after: what is done with each run when it has finished; what it returns is the reason in the run's line.
        folder: of the study; None for the parent of `runs`.
    """

    runs: Path
    data_dir: Path | None = None
    download: bool = False
    reports: bool = False
    stop_diverged: bool = False
    analyses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    after: Callable[[PlannedRun, Path, Session], str | None] | None = None
    folder: Path | None = None

    @property
    def study(self) -> Path:
        """The folder of the study."""
        return self.runs.parent if self.folder is None else self.folder


class StudyStopped(RunFailed):
    """The study cannot continue, for example because the disk is full."""


def carry_out(due: DueRun, options: RunOptions, session: Session, listener: StudyProgress) -> Row:
    """Starts the run or resumes it, up to its round `until`, and returns its line.

    A run that fails is a line with the status "failed" and the reason. Raises `StudyStopped` if the disk is full, and
    `KeyboardInterrupt` after the last complete round is saved.
    """
    run, directory = due.run, options.runs / due.run.directory
    try:
        refuse_edited(run.files)
        make_folder(directory)
        _start_or_resume(due, directory, options, session, listener)
        if options.stop_diverged:
            refuse_diverged(directory)
        write_planned(run, directory, ended=True)
        line = row_of_run(Run.open(directory), run.digest, run.directory)
        if line.status != "finished":
            return line
        if run.role == "pretrain":
            keep_cached(run, directory)
        if options.after is not None:
            line = replace(line, reason=options.after(run, directory, session))
        if run.role == "final" and options.analyses and records(run):
            return replace(line, analyses=analyzed(directory, options.analyses, options.data_dir))
        return line
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not from_code(error):
            raise
        if isinstance(error, Exception) and disk_full(error):
            with stopped_when_full(StudyStopped, "the study", directory):
                raise
        return line_of_failure(run, directory, reason_of(error))


def _start_or_resume(
    due: DueRun, directory: Path, options: RunOptions, session: Session, listener: StudyProgress
) -> None:
    run = due.run
    progress = _Rounds(run, listener, directory)
    shared: dict[str, Any] = {
        "data_dir": options.data_dir,
        "progress": StopDiverged(progress) if options.stop_diverged else progress,
        "report": options.reports,
        "session": session,
        "until": due.until,
    }
    begun = (directory / "config.toml").is_file()
    if not begun and run.role == "pretrain" and take_cached(run, directory, options.data_dir, session):
        return
    if begun:
        write_planned(run, directory, ended=False)
        resume(directory, **shared)
    else:
        settings = settings_in(run, options.runs)
        Experiment(**settings).run(directory, download=options.download, **shared)


class _Rounds(ProgressBase):
    """Reports the rounds of a run, and writes planned.json when the run starts."""

    def __init__(self, run: PlannedRun, listener: StudyProgress, directory: Path) -> None:
        self._run, self._listener, self._directory = run, listener, directory
        self._rounds = 0

    def started(self, plan: dict[str, Any]) -> None:
        """Called before the first round, when config.toml exists."""
        self._rounds = int(plan["rounds"])
        write_planned(self._run, self._directory, ended=False)

    def round_done(self, metrics: dict[str, Any]) -> None:
        """Reports the round."""
        self._listener.round_done(self._run, int(metrics["round"]), self._rounds)


def line_of_failure(run: PlannedRun, directory: Path, reason: str) -> Row:
    """Returns the line of a failed run, with its measurements so far.

    The reason has no path of the run directory, so that the line does not depend on the folder of the study.
    """
    reason = reason.replace(str(directory), run.directory)
    try:
        line = row_of_run(Run.open(directory), run.digest, run.directory)
    except Exception:  # it has no measurements, or its files caused the failure
        return failed_row(run.digest, run.directory, reason)
    return replace(line, status="failed", reason=reason)


def reason_of(error: BaseException) -> str:
    """The reason in the line of a run that failed with this error."""
    return str(error) if isinstance(error, FedlensError) else told(error)


KINDS = ("loss-not-finite", "loss-jump", COLLAPSE)  # of `fedlens.observers.divergence`


class RunDiverged(RunFailed):
    """A run that was stopped because its loss diverged; its study counts it as failed."""


class StopDiverged(Listening):
    """A listener that ends a run when its loss is not finite, or stays at 100 times its earlier level or above.

    It also ends a self-supervised run whose embeddings have collapsed, as the run itself does unless it is resumed.

    The limits are those of the warnings of every run, see `fedlens.observers.divergence`. Interruptions do
    not change the round after which the run ends. All calls are passed on to `listener`.

    >>> stop = StopDiverged()
    >>> stop.take([{"round": 0, "test_loss": 2.3}])
    >>> try:
    ...     for round in (1, 2, 3):
    ...         stop.take([{"round": round, "test_loss": 900.0}])
    ...         stop.refuse()
    ... except RunDiverged as error:
    ...     print(error)
    diverged in round 3: The test loss has been more than 100 times the lowest value before (2.3) since round 1: ...
    """

    def __init__(self, listener: Progress | None = None) -> None:
        super().__init__(listener or ProgressBase())
        self._divergence = Divergence(rounds=1, lr=1.0)
        self._why: str | None = None

    def started(self, plan: dict[str, Any]) -> None:
        """Reads the earlier rounds of the run, and passes the call on."""
        advice = plan.get("collapse_advice")
        self._divergence = Divergence(rounds=plan.get("rounds", 1), lr=1.0, collapse_advice=advice)
        self.take(Run.open(Path(plan["directory"])).metrics)
        super().started(plan)

    def working(self, work: Work) -> None:
        """Passes the call on. Raises `RunDiverged` if the rounds before the start have diverged already."""
        super().working(work)
        self.refuse()

    def round_done(self, state: State, tally: Tally, metrics: dict[str, Any]) -> None:
        """Passes the call on. Raises `RunDiverged` if the loss has diverged in this round."""
        super().round_done(state, tally, metrics)
        self.take([metrics])
        self.refuse()

    def take(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Checks lines of metrics.jsonl."""
        for line in lines:
            for warning in self._divergence.after(line, Extremes()):
                if warning["kind"] in KINDS and self._why is None:
                    self._why = f"{DIVERGED} {line['round']}: {warning['sentence']}"

    def refuse(self) -> None:
        """Raises `RunDiverged` if the loss has diverged in the lines so far."""
        if self._why is not None:
            raise RunDiverged(self._why)


def refuse_diverged(directory: Path) -> None:
    """Raises `RunDiverged` if the loss of a paused or finished run has diverged.

    A run without further rounds is not trained, so no listener is called.
    """
    run, stop = Run.open(directory), StopDiverged()
    stop.take(run.metrics)
    stop.refuse()
    for warning in run.summary.get("warnings", ()):
        if warning["kind"] == COLLAPSE:
            raise RunDiverged(f"{DIVERGED} {warning['until']}: {warning['sentence']}")


def cached_folder(run: PlannedRun) -> Path:
    """The folder of a pre-training in the cache: by the digest of its settings, and by the version of fedlens."""
    return user_cache("pretrained") / f"{run.digest}-{__version__}"


def take_cached(run: PlannedRun, directory: Path, data_dir: Path | None, session: Session) -> bool:
    """Copies a finished pre-training from the cache into its run directory; false if the cache has none.

    The images and labels must be those that it was trained on: another content of the data folder, or another sampler
    of images, makes another pre-training.
    """
    folder = cached_folder(run)
    if not (folder / "model.safetensors").is_file():
        return False
    with suppress(FedlensError, OSError, shutil.Error):  # then it is trained
        found, digest = Run.open(folder), _digest(run.settings, data_dir, session)
        if found.status != "finished" or found.environment.get("data_sha256") != digest:
            return False
        with replacing_folder(directory) as beside:
            shutil.copytree(folder, beside)
        return True
    return False


def keep_cached(run: PlannedRun, directory: Path) -> None:
    """Copies a finished pre-training into the cache. A cache that cannot be written costs a training later."""
    with suppress(OSError, shutil.Error), replacing_folder(cached_folder(run)) as beside:
        shutil.copytree(directory, beside, ignore=_LEFT_OUT)


def _digest(settings: Mapping[str, Any], data_dir: Path | None, session: Session) -> str:
    """SHA-256 of the images and labels that the settings name."""
    built = build(plan_of(Source(dict(settings))), data_directory(data_dir), False, session=session)
    with closing(built.engine):
        return data_digest(built)


def records(run: PlannedRun) -> bool:
    """Whether a run records local models or updates."""
    table = run.settings.get("record")
    return isinstance(table, Mapping) and (bool(table.get("local_models")) or bool(table.get("updates")))


def analyzed(
    directory: Path, analyses: Mapping[str, Mapping[str, Any]], data_dir: Path | None
) -> dict[str, Rows]:
    """The rows of the analyses of a finished run. Its recordings are removed afterwards.

    The rows are written into the run directory before, so a study that is killed in between reads them there.

    Raises `FedlensError` if an analysis fails.
    """
    folder = directory / FOLDER
    made = read_index(folder)
    missing = [name for name in analyses if name not in made]
    if missing:
        analyze(directory, missing, settings={name: analyses[name] for name in missing}, data_dir=data_dir)
    rows: dict[str, Rows] = {
        name: _kept(jsonl.read(folder / f"{file_name(name)}.jsonl")) for name in analyses
    }
    shutil.rmtree(RunDir(directory).recordings_path, ignore_errors=True)
    return rows


def _kept(rows: Rows) -> list[dict[str, Any]]:
    """The rows without their lists over clients, with the digits that a line has."""
    return [{key: _rounded(value) for key, value in row.items() if not _over_clients(value)} for row in rows]


def _over_clients(value: Any) -> bool:
    """Whether a value is a list of tables, one for each client."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and "client" in item for item in value)
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return rounded(value)
