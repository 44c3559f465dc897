"""Studies in Python: what `fedlens sweep` does, in three lines."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.core.errors import ConfigError, FedlensError
from fedlens.report.study_results import RunLine, StudyInfo, StudyResults, write_info
from fedlens.result import Metrics
from fedlens.studies.progress import SilentStudy, StudyProgress
from fedlens.studies.store import Store
from fedlens.studies.study_file import StudySource, read_study
from fedlens.studies.study_plan import StudyPlan

if TYPE_CHECKING:
    from fedlens.studies.jobs import Jobs
    from fedlens.studies.planned import PlannedRun

STUDY_FILE = "study.toml"


class StudyRuns(Metrics):
    """One dictionary per run."""


class StudyCells(Metrics):
    """One dictionary per cell: a method in a case."""


class StudyResult:
    """The results of a study, read from its folder on first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"StudyResult({str(self.directory)!r})"

    @cached_property
    def results(self) -> StudyResults:
        """The plan, and the line of each run."""
        return StudyResults.read(self.directory)

    @property
    def runs(self) -> StudyRuns:
        """One row per run: its method, case, point, seed, status and values."""
        from fedlens.report.study_frames import run_rows

        return StudyRuns(run_rows(self.results))

    @property
    def cells(self) -> StudyCells:
        """One row per cell: a method in a case, over its seeds."""
        from fedlens.report.study_frames import cell_rows

        return StudyCells(cell_rows(self.results))

    @property
    def failed(self) -> list[RunLine]:
        """The lines of the runs that failed, in the order of the plan."""
        return [line for line in self.results.lines.values() if line.status == "failed"]


class Study:
    """A study: the settings of a study file, as keyword arguments.

    Raises `ConfigError` if a setting is wrong, before anything starts.

    >>> import tempfile
    >>> study = Study(
    ...     base={"rounds": 2, "model": "linear", "local": {"lr": 0.1},
    ...           "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}},
    ...     seeds=[0, 1], grid={"local.lr": [0.1, 0.3]})
    >>> result = study.run(Path(tempfile.mkdtemp()) / "first", jobs=0, report=False)
    >>> len(result.runs), len(result.cells), result.failed
    (4, 2, [])
    """

    def __init__(self, **settings: Any) -> None:
        self._source = read_study(settings)
        self._file: Path | None = None

    @classmethod
    def load(
        cls,
        file: Path | str,
        scale: str | None = None,
        *,
        changes: Mapping[str, Any] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Study:
        """Loads a study file.

        Args:
            scale: one of the file's scales; by default the largest, "paper".
            changes: settings over those of the file's table `set`, by dotted key.
            seeds: instead of those of the file.
        """
        made = cls.__new__(cls)
        made._source = _changed(read_study(Path(file), scale), changes or {}, seeds)
        made._file = None if changes or seeds else Path(file)
        return made

    @property
    def name(self) -> str:
        """The name of the study."""
        return self._source.settings.name

    @property
    def folder(self) -> Path:
        """Where it is written unless another folder is named: `studies/<name>`, and the scale below it."""
        folder = Path("studies") / self.name
        return folder / self._source.places.scale if self._source.places.scale else folder

    def __repr__(self) -> str:
        return f"Study '{self.name}', {len(self._source.settings.seeds)} seeds"

    def plan(self) -> StudyPlan:
        """The plan: which runs are due, given the results so far."""
        return StudyPlan(self._source)

    def run(
        self,
        out: Path | str | None = None,
        *,
        jobs: int | None = None,
        data_dir: Path | str | None = None,
        download: bool = False,
        progress: StudyProgress | None = None,
        report: bool = True,
        accept_changes: bool = False,
        run_reports: bool = False,
        address: str | None = None,
    ) -> StudyResult:
        """Carries out all runs that are not finished, and writes tables, figures and the page.

        It prints nothing; pass a `fedlens.studies.progress.StudyProgress` to follow it. A run that fails is a row with
        its reason; the same call tries it again. The results do not depend on `jobs`.

        Args:
            out: the folder; default `Study.folder`. A study in it is continued.
            jobs: how many runs at once, each in a worker process; by default as many as cores and memory allow. 0
                carries the runs out in this process.
            download: download missing datasets.
            report: write tables, figures and the page.
            accept_changes: continue a study whose settings have changed since.
            run_reports: write the report.html of each run, too.
            address: of a Ray cluster whose nodes carry out the runs: `host:port`, "auto", or "local".

        Raises `FedlensError` if the settings or the data are wrong, if another process works on the folder, or if it
        has other runs; `StudyStopped` if the disk is full. `KeyboardInterrupt` (Ctrl-C) passes after all running runs
        are saved; the same call continues.
        """
        if jobs is not None and jobs < 0:
            raise ConfigError(f"the number of jobs is {jobs} (must be at least 0)", where="jobs")
        folder, listener = Path(out or self.folder).expanduser(), progress or SilentStudy()
        plan, store = self.plan(), Store(folder)
        with store.lock():
            self._write_file(folder)
            sweep(plan, store, partial(self._jobs, options, jobs, listener, address), listener)
        if report:
            write_outputs(folder)
        return StudyResult(folder)
