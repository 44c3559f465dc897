"""Studies in Python: the same as `fedlens sweep`, and the files that a person looks at after one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import tomli_w

from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.files.atomic_files import make_folder, read_regular, write_atomically
from fedlens.files.full_disk import stopped_when_full
from fedlens.files.text_files import read_json
from fedlens.pages.study_page import write_study_page
from fedlens.result import Metrics
from fedlens.results.claims import ClaimVerdict, claim_verdicts
from fedlens.results.figures.study_figures import write_study_figures
from fedlens.results.frames import cell_rows, run_rows, to_pandas, write_frames
from fedlens.results.rows import Results, Row
from fedlens.results.tables import study_tables
from fedlens.run.session import Session
from fedlens.settings.config_source import Source, override
from fedlens.studies.carry_out import RunOptions, StudyStopped
from fedlens.studies.changed_study import refuse_changed
from fedlens.studies.estimate import StudyEstimate, estimate
from fedlens.studies.jobs import InProcess, Jobs, WorkerJobs, gpus_to_share, sweep, threads_of
from fedlens.studies.planned import DueRun
from fedlens.studies.progress import StudyProgress
from fedlens.studies.reproductions import COPY, study_command
from fedlens.studies.run_settings import worker_name
from fedlens.studies.store import StudyStore
from fedlens.studies.study_data import make_data
from fedlens.studies.study_file import read_study
from fedlens.studies.study_plan import StudyPlan
from fedlens.use.device_here import chosen_for

if TYPE_CHECKING:
    import pandas as pd

    from fedlens.settings.typed import StudyTables

_WRITTEN = "outputs.json"  # the SHA-256 of each file in `tables` and `figures`, by its path in the folder


class StudyRows(Metrics):
    """One dictionary per run of a study."""

    def to_pandas(self) -> pd.DataFrame:
        """A pandas table with one type a column. Raises `FedlensError` if pandas is not installed."""
        return to_pandas(self)


class StudyCellRows(StudyRows):
    """One dictionary per cell: a method in a case."""


class StudyResult:
    """The results of a study, read from its folder on first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"StudyResult({str(self.directory)!r})"

    @cached_property
    def results(self) -> Results:
        """The plan, and the line of each run."""
        return Results.read(self.directory)

    @property
    def runs(self) -> StudyRows:
        """One row per run: its method, case, point, seed, status and values."""
        return StudyRows(run_rows(self.results))

    @property
    def cells(self) -> StudyCellRows:
        """One row per cell: a method in a case, over its seeds."""
        return StudyCellRows(cell_rows(self.results))

    @property
    def verdicts(self) -> list[ClaimVerdict]:
        """Whether the results show each claim of the paper: the answer, and the numbers that it rests on."""
        return claim_verdicts(self.results)

    @property
    def page(self) -> Path:
        """The page with tables and figures."""
        return self.directory / "study.html"

    def write(self) -> list[Path]:
        """Writes tables, figures and the page anew, from study.json and results.jsonl alone; returns their paths."""
        return write_outputs(self.directory)

    @property
    def failed(self) -> list[Row]:
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

    def __init__(self, **settings: Unpack[StudyTables]) -> None:
        self._source = read_study(settings)
        self._changes: Sequence[str] = ()
        self._seeds: Sequence[int] | None = None

    @classmethod
    def load(
        cls,
        file: Path | str,
        scale: str | None = None,
        *,
        overrides: Sequence[str] = (),
        seeds: Sequence[int] | None = None,
    ) -> Study:
        """Loads a study file.

        Args:
            scale: one of the file's scales; by default the largest, "paper".
            overrides: settings such as `"rounds=10"` over those of the file's table `set`.
            seeds: seeds that replace those of the file.
        """
        changes = override(Source({}), overrides).values
        made = cls.__new__(cls)
        made._source = read_study(Path(file), scale, changes, seeds)
        made._changes, made._seeds = tuple(overrides), None if seeds is None else list(seeds)
        return made

    @property
    def name(self) -> str:
        """The name of the study."""
        return self._source.settings.name

    @property
    def folder(self) -> Path:
        """The default folder: `studies/<name>`, with a subfolder for the scale."""
        folder = Path("studies") / self.name
        return folder / self._source.places.scale if self._source.places.scale else folder

    def __repr__(self) -> str:
        return f"Study '{self.name}', {len(self._source.settings.seeds)} seeds"

    def plan(self) -> StudyPlan:
        """The plan: which runs are due, given the results so far. Raises `ConfigError` if a setting is wrong."""
        return self._plan

    @cached_property
    def _plan(self) -> StudyPlan:
        return StudyPlan.of(self._source)

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
        folder, listener = Path(out or self.folder).expanduser(), progress or StudyProgress()
        plan, store = self.plan().with_command(self._command(folder, data_dir)), StudyStore(folder)
        if address is None and (jobs is None or download):  # workers need not download the same files at once
            estimated = self.estimate(folder, jobs=jobs, data_dir=data_dir, download=download, timed=False)
            jobs = estimated.jobs if jobs is None else jobs
        stop = self._source.settings.stop
        options = RunOptions(
            store.runs,
            None if data_dir is None else Path(data_dir),
            download,
            run_reports,
            stop is not None and stop.diverged,
            self._source.settings.analyses,
        )
        with stopped_when_full(StudyStopped, "the study", folder), store.lock():
            for sentence in refuse_changed(folder, plan, accept_changes).sentences():
                listener.note(sentence)
            self._write_file(folder)
            make_data(plan, folder, data_dir=options.data_dir, download=download, say=listener.note)
            start = partial(started, options, jobs, address, listener)
            sweep(plan, store, start, listener, plan.refuse_unmeasured)
        result = StudyResult(folder)
        if report:
            with stopped_when_full(StudyStopped, "the study", folder):
                result.write()
        return result

    def estimate(
        self,
        out: Path | str | None = None,
        *,
        jobs: int | None = None,
        data_dir: Path | str | None = None,
        download: bool = False,
        timed: bool = True,
    ) -> StudyEstimate:
        """Estimates what is left of the study in `out`: runs, images, hours, disk and memory, by timed steps.

        See `fedlens.studies.estimate.estimate`.
        """
        folder = Path(out or self.folder).expanduser()
        root = None if data_dir is None else Path(data_dir)
        return estimate(self.plan(), folder, jobs=jobs, data_dir=root, download=download, timed=timed)

    def _command(self, folder: Path, data_dir: Path | str | None) -> str:
        """The command that makes the results in `folder` again."""
        places = self._source.places
        return study_command(
            places.path,
            places.scale,
            folder,
            self.folder,
            changes=self._changes,
            seeds=self._seeds,
            data_dir=data_dir,
        )

    def _write_file(self, folder: Path) -> None:
        """Writes study.toml: a copy of the study file, or the settings if they were given otherwise."""
        path = self._source.places.path
        if path is not None and not self._changes and self._seeds is None:
            content = path.read_bytes()
        else:
            content = tomli_w.dumps(writable(self._source.given)).encode()
        write_atomically(folder / COPY, content)


def started(
    options: RunOptions,
    jobs: int | None,
    address: str | None,
    progress: StudyProgress,
    due: Sequence[DueRun],
    session: Session | None = None,
) -> Jobs:
    """Starts the workers, or the connection to Ray, for runs like the due ones.

    Args:
        jobs: at once; 0 or None for this process, with this session.
        address: of a Ray cluster.
    """
    threads = max(threads_of(one.run) for one in due)
    if address is not None:
        from fedlens.studies.ray_jobs import RayJobs

        return RayJobs(options, threads, address, progress)
    words = f"{jobs} runs at once" if jobs and jobs > 1 else "one run after the other"
    for sentence in chosen_for([one.run.engine for one in due], words):
        progress.note(sentence)
    if not jobs:
        return InProcess(options, progress, session)
    free = gpus_to_share((one.run for one in due), jobs)
    return WorkerJobs(options, jobs, threads, progress, free)


def writable(value: Any) -> Any:
    """Settings as TOML can hold them: without None, and functions by the names that workers import them by."""
    if isinstance(value, Mapping):
        return {key: writable(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [writable(item) for item in value]
    return worker_name(value) if callable(value) else value


def write_outputs(folder: Path) -> list[Path]:
    """Writes the files of results of the study in `folder`, from study.json and results.jsonl alone; their paths.

    runs and cells (.csv, .parquet), cells.tex, tables/*.tex and *.csv, figures/* if matplotlib is installed, and the
    page study.html, the last. A table or a figure of an earlier call that the study does not ask for any more is
    removed, unless somebody edited it.

    Raises `DataError` if the folder has no study, `RunDirectoryError` if a file in it is damaged or a link,
    `RunFailed` if the disk refuses, and `ConfigError` if a table or figure that the study asks for is wrong.
    """
    # What would be refused is refused before anything is written.
    earlier = read_json(folder / _WRITTEN) or {}
    results = Results.read(folder)
    drawn = find_spec("matplotlib") is not None
    tables, *figures = [make_folder(folder / name) for name in ("tables", *["figures"] * drawn)]
    written = write_frames(results, folder)
    for table in study_tables(results):
        for suffix, text in (("tex", table.to_latex()), ("csv", table.to_csv())):
            path = tables / f"{table.name}.{suffix}"
            write_atomically(path, text.encode())
            written.append(path)
    for place in figures:
        written += write_study_figures(results, place)
    _remove_stale(folder, earlier, written, [path.name for path in (tables, *figures)])
    return [*written, write_study_page(folder)]


def _remove_stale(
    folder: Path, earlier: Mapping[str, str], written: Sequence[Path], made: Sequence[str]
) -> None:
    """Removes what an earlier call wrote into the folders `made` and this one did not; notes what was written.

    A file that is not as it was written, or that no call wrote, is a user's, and stays.
    """
    now = {path.relative_to(folder).as_posix(): _sha256(path) for path in written if path.parent != folder}
    for name, sha256 in earlier.items():
        path = folder / name
        if name in now or path.parent.parent != folder:
            continue
        if path.parent.name not in made:  # without matplotlib the figures stay as they are
            now[name] = sha256
        elif _sha256(path) == sha256:
            with suppress(OSError):  # it is only superfluous
                path.unlink()
    write_atomically(folder / _WRITTEN, (json.dumps(dict(sorted(now.items())), indent=1) + "\n").encode())


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except (OSError, RunDirectoryError):
        return None
