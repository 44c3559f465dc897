"""Calls all observers of a run, and writes their files."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fedlens.base.errors import ConfigError, FedlensError, told
from fedlens.core.driver import Tally
from fedlens.core.payload import encode
from fedlens.core.protocol import Answer, Ask, Payload, State, Steps
from fedlens.core.step_counts import Phase, Work
from fedlens.files import jsonl
from fedlens.files.atomic_files import not_regular
from fedlens.files.jsonl import LineDigest
from fedlens.run.build import Built
from fedlens.run.observer import ObservedRun, Observer, Place
from fedlens.run.progress import Listener
from fedlens.run.run_state import RunState
from fedlens.run.rundir import RunDir, plain

_T = TypeVar("_T")
_ROUND = re.compile(r"round-(\d{6,18})")


class Observers(Listener):
    """The observers of a run in their order. A hook is that of all of them; see `Observer` for what it is given.

    An error of an observer ends the run if it says so (`Observer.ends_run`). Otherwise it is reported as a problem, and
    the observer is not called again.

    Raises `ConfigError` if two have the same file, or the same part of the checkpoint.
    """

    def __init__(self, observers: Iterable[Observer], directory: RunDir) -> None:
        self._all = sorted(observers, key=lambda one: one.place)
        self._directory = directory
        for kind, names in (
            ("file", [one.file for one in self._all if one.file]),
            ("part_name", [one.part_name for one in self._all if one.part_name]),
        ):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ConfigError(f"two observers have the {kind} '{twice[0]}'", where="observe")
        self._digests: dict[str, LineDigest] = {}
        self._sort()

    def _sort(self) -> None:
        """Finds the observers of the hooks that are called for every answer."""
        self._at_work = [one for one in self._all if type(one).working is not Observer.working]
        self._at_answers = [one for one in self._all if type(one).answered is not Observer.answered]
        self._with_rows = [one for one in self._all if type(one).rows is not Observer.rows]

    def _each(
        self, hook: str, call: Callable[[Observer], _T], observers: Iterable[Observer] | None = None
    ) -> list[tuple[Observer, _T]]:
        """What `call` returns for each observer."""
        results = []
        for one in list(self._all if observers is None else observers):
            try:
                results.append((one, call(one)))
            except Exception as error:
                if one.ends_run:
                    raise
                self._leave_out(one, hook, error)
        return results

    def _leave_out(self, observer: Observer, hook: str, error: Exception) -> None:
        self._all.remove(observer)
        self._sort()
        reason = str(error) if isinstance(error, FedlensError) else told(error)
        name = type(observer).__name__
        self.problem(f"the observer {name} failed in `{hook}`, and the run continues without it: {reason}")

    def started(self, plan: dict[str, Any]) -> None:
        """See `Observer`."""
        self._each("started", lambda one: one.started(plan))

    def note(self, text: str) -> None:
        """See `Observer`."""
        self._each("note", lambda one: one.note(text))

    def problem(self, text: str) -> None:
        """See `Observer`."""
        self._each("problem", lambda one: one.problem(text))

    def working(self, work: Work) -> None:
        """See `Observer`."""
        self._each("working", lambda one: one.working(work), self._at_work)

    def finished(self, summary: dict[str, Any]) -> None:
        """See `Observer`."""
        self._each("finished", lambda one: one.finished(summary))

    def restore(self, parts: Mapping[str, Payload]) -> None:
        """Gives each observer its part of the checkpoint."""
        there = [one for one in self._all if parts.get(one.part_name) is not None]
        self._each("restore", lambda one: one.restore(parts[one.part_name]), there)

    def began(self, built: Built, round: int | None) -> None:
        """See `Observer`."""
        run = ObservedRun(built, self._directory, round, self.note, self.problem)
        self._digests = {path.name: LineDigest.of(path) for path in self._directory.appended}
        self._each("began", lambda one: one.began(run))

    def asks(self, steps: Steps, phase: Phase, round: int, state: State) -> Steps:
        """The asks of a phase as they pass all observers, the one at the lowest place first."""

        def passed(one: Observer) -> None:
            nonlocal steps
            if isinstance(steps, Generator):  # the driver refuses anything else
                steps = one.asks(steps, phase, round, state)

        self._each("asks", passed)
        return steps

    def answered(self, ask: Ask, answer: Answer, work: Work) -> None:
        """See `Observer`."""
        self._each("answered", lambda one: one.answered(ask, answer, work), self._at_answers)

    def released(self, round: int, state: State, tally: Tally) -> None:
        """See `Observer`."""
        self._each("released", lambda one: one.released(round, state, tally))

    def failed(self, round: int, tally: Tally) -> None:
        """See `Observer`."""
        self._each("failed", lambda one: one.failed(round, tally))

    def evaluated(
        self, round: int, state: State, tally: Tally, metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """The metrics that the observers add to those of the evaluation."""
        added: dict[str, float] = {}
        for _, more in self._each("evaluated", lambda one: one.evaluated(round, state, tally, metrics)):
            added |= more
        return added

    def round_done(self, state: State, tally: Tally, metrics: dict[str, Any], complete: bool) -> None:
        """Calls the observers before `Place.WRITE`, or if the round is complete those from there on."""
        some = [one for one in self._all if (one.place >= Place.WRITE) is complete]
        self._each("round_done", lambda one: one.round_done(state, tally, metrics), some)

    def rows(self, state: State, tally: Tally, metrics: dict[str, Any]) -> dict[str, list[Any]]:
        """The lines of a round by file, as a checkpoint can hold them."""

        def lines(one: Observer) -> list[Any]:
            rows = one.rows(state, tally, metrics)
            return [plain(row if "round" in row else {"round": metrics["round"], **row}) for row in rows]

        return {one.file: found for one, found in self._each("rows", lines, self._with_rows)}

    def parts(self) -> dict[str, Payload]:
        """The parts of the checkpoint, by name."""

        def part(one: Observer) -> Payload:
            found = one.part()
            if not one.ends_run:
                encode(found)  # an error names the observer now, and does not end the run at the next save
            return found

        having = [one for one in self._all if one.part_name]
        return {one.part_name: found for one, found in self._each("part", part, having)}

    def append(self, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Writes the lines of a complete round."""

        def written(one: Observer) -> None:
            if rows.get(one.file):
                content = jsonl.append(self._directory.path / one.file, rows[one.file])
                if one.file in self._digests:
                    self._digests[one.file].add(content)

        self._each("rows", written, self._with_rows)

    def digests(self) -> dict[str, Any]:
        """The digests of the lines so far, of the files that a resume compares."""
        return {name: digest.saved() for name, digest in self._digests.items()}

    def sync(self) -> None:
        """Waits until the lines are on the disk: a checkpoint is saved only after that."""
        self._directory.sync([one.file for one in self._with_rows])

    def saved(self, round: int, checkpoint: Path) -> None:
        """See `Observer`."""
        self._each("saved", lambda one: one.saved(round, checkpoint))

    def ended(self, metrics: Mapping[str, Any], states: Mapping[str, tuple[int, State]]) -> None:
        """See `Observer`."""
        self._each("ended", lambda one: one.ended(metrics, states))

    def summary(self) -> dict[str, Any]:
        """What the observers add to summary.json."""
        added: dict[str, Any] = {}
        for _, more in self._each("summary", lambda one: dict(one.summary())):
            added = {**more, **added}
        return added

    def rewind(self, run_state: RunState | None) -> None:
        """Makes the files end with the round of a checkpoint, or empty without one, as each observer declares."""
        round = -1 if run_state is None else run_state.round
        rows = {} if run_state is None else run_state.rows

        def cut(one: Observer) -> None:
            path = self._directory.path / one.file
            if path.is_symlink():
                raise not_regular(path)
            if one.resumed == "cut" and path.is_dir():
                _remove_rounds(path, round)
            elif one.resumed == "cut":
                jsonl.truncate(path, round - (one.file in rows))
                if rows.get(one.file):  # it may not be in the file yet
                    jsonl.append(path, rows[one.file])
            elif one in self._with_rows:
                jsonl.truncate(path, sys.maxsize)  # a line that a kill has cut

        self._each("rows", cut, [one for one in self._all if one.file])


def _remove_rounds(folder: Path, after: int) -> None:
    """Removes the folders of later rounds: settings may be edited before they are repeated."""
    for path in folder.iterdir():
        if (match := _ROUND.fullmatch(path.name)) and int(match[1]) > after:
            shutil.rmtree(path, ignore_errors=True)
