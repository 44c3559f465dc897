"""Keeps the finished runs of an incomplete study in docs/atlas, so that they outlive the scratch folder of the queue.

    python -m benchmarks.atlas_unfinished    # the number of kept runs of each study

    unfinished.jsonl    their lines, as in results.jsonl; at most 200 kB
    spent.json          what the study took so far

They are in the folder of the record to come, which replaces them. An unfinished study has no entry in record.toml.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from pathlib import Path

from benchmarks.atlas_record import MOST, record_folder, refuse_machine
from fedlens.base.format import many
from fedlens.results.rows import LINES, Row, read_lines, write_lines
from fedlens.studies.planned import PlannedRun
from fedlens.studies.progress import StudyProgress
from fedlens.studies.store import in_order
from fedlens.studies.study_plan import StudyPlan

UNFINISHED, SPENT = "unfinished.jsonl", "spent.json"
KEPT = (UNFINISHED, SPENT)
SECONDS = 600.0  # of finished runs that are lost at most


class KeptRuns:
    """The kept runs of a study.

    Args:
        folder: of the record to come.
        scratch: where the study runs.
    """

    def __init__(self, folder: Path, scratch: Path, plan: StudyPlan) -> None:
        self.folder, self.scratch, self.plan = folder, scratch, plan

    def restore(self) -> None:
        """Adds the kept runs to the scratch folder; without pre-trainings, whose models are not kept."""
        self._add(without={run.digest for run in self.plan.pretraining})
        if (self.folder / SPENT).is_file() and not (self.scratch / SPENT).exists():
            shutil.copy(self.folder / SPENT, self.scratch / SPENT)

    def complete(self) -> None:
        """Adds the kept pre-trainings that no run has needed again."""
        self._add()

    def keep(self) -> str:
        """Keeps the finished runs of the scratch folder, and returns a sentence on it.

        Raises `RecordRefused` if a line names the machine.
        """
        finished = finished_runs(_lines(self.folder / UNFINISHED) | _lines(self.scratch / LINES), self.plan)
        texts = [json.dumps(line.line) for line in finished]
        refuse_machine("\n".join(texts), f"{self.plan.name} at {self.plan.scale}")
        fit = sum(total <= MOST for total in accumulate(len(text) + 1 for text in texts))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_lines(self.folder / UNFINISHED, finished[:fit])
        shutil.copy(self.scratch / SPENT, self.folder / SPENT)
        return f"{fit} of {many(len(finished), 'finished run')} kept in docs/atlas"

    def _add(self, without: Collection[str] = ()) -> None:
        kept, here = _lines(self.folder / UNFINISHED), _lines(self.scratch / LINES)
        if lost := [kept[digest] for digest in kept.keys() - here.keys() - set(without)]:
            write_lines(self.scratch / LINES, [*here.values(), *lost])


def finished_runs(lines: Mapping[str, Row], plan: StudyPlan) -> list[Row]:
    """The lines of the finished runs of a plan, in its order."""
    info = plan.info(lines)
    planned = {entry.digest for entry in (*info.pretrained, *info.entries)}
    return [line for line in in_order(lines, info) if line.digest in planned and line.status == "finished"]


def number_kept(folder: Path, plan: StudyPlan) -> int:
    """The number of kept runs that the study still has."""
    return len(finished_runs(_lines(folder / UNFINISHED), plan))


def _lines(path: Path) -> dict[str, Row]:
    return {line.digest: line for line in read_lines(path)}


class KeepingProgress(StudyProgress):
    """Passes the progress of a study on, and calls `keep` after each 10 minutes of finished runs."""

    def __init__(self, listener: StudyProgress, keep: Callable[[], None]) -> None:
        self._listener, self._keep, self._seconds = listener, keep, 0.0
        self.note, self.runs_due = listener.note, listener.runs_due
        self.run_started, self.round_done = listener.run_started, listener.round_done

    def run_ended(self, run: PlannedRun, line: Row) -> None:
        """Receives the end of a run."""
        self._listener.run_ended(run, line)
        self._seconds += line.facts.get("seconds") or 0.0
        if line.status == "finished" and self._seconds >= SECONDS:
            self._seconds = 0.0
            self._keep()


def main() -> None:
    """Prints the number of kept runs of each unfinished study."""
    home = record_folder(Path(__file__).resolve().parents[1], "", "")
    for path in sorted(home.rglob(UNFINISHED)):
        print(f"{path.parent.relative_to(home)}: {many(len(_lines(path)), 'finished run')}")


if __name__ == "__main__":
    main()
