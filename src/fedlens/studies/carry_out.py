"""Carries out one run of a study in this process: starts or resumes it, and returns its line of results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.api import Experiment, resume
from fedlens.base.errors import FedlensError, RunFailed, told
from fedlens.base.interrupts import from_code
from fedlens.files.atomic_files import make_folder
from fedlens.files.full_disk import disk_full, stopped_when_full
from fedlens.results.rows import Row
from fedlens.results.run import Run
from fedlens.settings.own_files import refuse_edited
from fedlens.studies.line import failed_row, row_of_run
from fedlens.studies.planned import DueRun, PlannedRun
from fedlens.studies.planned_file import write_planned
from fedlens.studies.pretrained import settings_in
from fedlens.studies.pretrained_cache import keep_cached, take_cached
from fedlens.studies.progress import EachRound, StudyProgress
from fedlens.studies.run_analyses import analyzed, records
from fedlens.studies.stop_diverged import StopDiverged, refuse_diverged

if TYPE_CHECKING:
    from fedlens.run.session import Session


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
    """

    runs: Path
    data_dir: Path | None = None
    download: bool = False
    reports: bool = False
    stop_diverged: bool = False
    analyses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


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
        line = row_of_run(Run.open(directory), run)
        if line.status != "finished":
            return line
        if run.role == "pretrain":
            keep_cached(run, directory)
        if run.role == "final" and options.analyses and records(run):
            return replace(line, analyses=analyzed(directory, options.analyses, options.data_dir))
        return line
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not from_code(error):
            raise
        if isinstance(error, Exception) and disk_full(error):
            with stopped_when_full(StudyStopped, "the study", directory):
                raise
        return line_of_failure(run, directory, _reason(error))


def _start_or_resume(
    due: DueRun, directory: Path, options: RunOptions, session: Session, listener: StudyProgress
) -> None:
    run = due.run
    progress = _Planned(run, listener, directory)
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


class _Planned(EachRound):
    """Also writes planned.json when the run starts."""

    def __init__(self, run: PlannedRun, listener: StudyProgress, directory: Path) -> None:
        super().__init__(run, listener)
        self._directory = directory

    def started(self, plan: dict[str, Any]) -> None:
        """Called when config.toml exists."""
        super().started(plan)
        write_planned(self._run, self._directory, ended=False)


def line_of_failure(run: PlannedRun, directory: Path, reason: str) -> Row:
    """Returns the line of a failed run, with its measurements so far.

    The reason has no path of the run directory, so that the line does not depend on the folder of the study.
    """
    reason = reason.replace(str(directory), run.directory)
    try:
        line = row_of_run(Run.open(directory), run)
    except Exception:  # it has no measurements, or its files caused the failure
        return failed_row(reason, run)
    return replace(line, status="failed", reason=reason)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, FedlensError) else told(error)
