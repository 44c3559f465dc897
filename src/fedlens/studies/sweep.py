"""The loop of a study: carries out the runs that are due until none is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fedlens.base.errors import RunFailed
from fedlens.results.row_of_run import failed_row
from fedlens.results.rows import Row, StudyInfo, write_info
from fedlens.studies.jobs import Jobs
from fedlens.studies.planned import DueRun, PlannedRun
from fedlens.studies.pretrained import pretraining_problem
from fedlens.studies.progress import StudyProgress
from fedlens.studies.store import StudyStore


class DuePlan(Protocol):
    """The due runs, given the results so far; a `fedlens.studies.study_plan.StudyPlan`."""

    @property
    def number_of_runs(self) -> Mapping[str, int]:
        """The number of runs, by role."""
        ...

    def due(self, lines: Mapping[str, Row]) -> Sequence[DueRun]:
        """The runs that must be carried out now; none when the study is complete."""
        ...

    def info(self, lines: Mapping[str, Row]) -> StudyInfo:
        """The content of study.json."""
        ...


def sweep(
    plan: DuePlan,
    store: StudyStore,
    start: Callable[[Sequence[DueRun]], Jobs],
    progress: StudyProgress,
    check: Callable[[Row], None] = lambda line: None,
) -> None:
    """Carries out all runs of a plan that are not finished, and adds their lines to the store.

    All due runs end before the plan is asked again. The order in which they end, and so the number of jobs, changes no
    result.

    Args:
        store: locked by this process.
        start: starts the workers, given the first due runs; called only if a run is due.
        check: raises an error for the line of a run that shows that the study cannot have results.

    Raises `RunDirectoryError` if a run directory was edited, `StudyStopped` if the study cannot continue, and passes
    `KeyboardInterrupt` after all running runs are saved.
    """
    if failed := store.drop_failed():
        progress.note(f"{failed} failed {'run is' if failed == 1 else 'runs are'} tried again")
    info = plan.info(store.lines)
    store.check((), (*info.pretrained, *info.entries))
    for line in store.lines.values():
        check(line)
    jobs: Jobs | None = None
    try:
        while due := plan.due(store.lines):
            store.check(one.run for one in due)
            info = plan.info(store.lines)
            write_info(store.folder, info)
            # The folder can have lines of an earlier plan.
            planned = {entry.digest for entry in (*info.pretrained, *info.entries)}
            done = sum(digest in planned for digest in store.lines)
            progress.runs_due(len(due), done, sum(plan.number_of_runs.values()))
            before = dict(store.lines)

            def ended(run: PlannedRun, line: Row) -> None:
                store.add(line)
                progress.run_ended(run, line)
                check(line)

            ready = []
            for one in due:
                problem = pretraining_problem(one.run, store.lines)
                if problem is None:
                    ready.append(one)
                else:
                    ended(one.run, failed_row(one.run.digest, one.run.directory, problem))
            if ready:
                jobs = jobs or start(ready)
                jobs.carry_out(ready, ended)
            if all(store.lines.get(one.run.digest) == before.get(one.run.digest) for one in due):
                names = ", ".join(one.run.key for one in due[:3])
                raise RunFailed(f"the plan of the study does not advance: {names} were due and are so again")
    finally:
        if jobs is not None:
            jobs.close()
    info = plan.info(store.lines)
    write_info(store.folder, info)
    store.settle(info)
