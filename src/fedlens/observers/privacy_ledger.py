"""The ledger of a private run: what has been released, and what it has spent."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.core.driver import Tally
from fedlens.core.protocol import Payload, State
from fedlens.files import jsonl
from fedlens.privacy.accounting import epsilons
from fedlens.privacy.guarantee import guarantee
from fedlens.run.build import Built
from fedlens.run.observer import ObservedRun, Observer, Place


class PrivacyLedger(Observer):
    """Writes privacy.jsonl, a line a release, before anything of the round is written or sent.

    A resumed run never cuts the file: a round that is repeated draws new clients and new noise, and its first release
    counts too. Adds `epsilon` to the metrics of an evaluation, and the guarantee to summary.json.
    """

    place = Place.MEASURE
    file = "privacy.jsonl"
    resumed = "keep"
    part_name = "privacy"
    ends_run = True

    def __init__(self, built: Built) -> None:
        self._algorithm, self._settings = built.algorithm, built.config.privacy
        self._unsafe = built.config.record.unsafe
        self._path: Path | None = None
        self._events: list[Mapping[str, Any]] = []
        self._known = 0  # releases at the checkpoint

    def restore(self, part: Payload) -> None:
        """Takes the number of releases at a checkpoint."""
        self._known = part.get("releases", 0)

    def part(self) -> Payload:
        """The number of releases."""
        return {"releases": len(self._events)} if self._events else {}

    def began(self, run: ObservedRun) -> None:
        """Reads the releases so far. Raises `RunDirectoryError` if some of them are missing."""
        if self._settings is None:
            return
        path = self._path = run.directory.path / self.file
        jsonl.truncate(path, sys.maxsize)  # a line that a power cut has cut was not released yet
        self._events = [*jsonl.read(path)]
        if len(self._events) < self._known:
            raise RunDirectoryError(
                f"{self.file} has {len(self._events):,} releases, and the checkpoint knows of {self._known:,}",
                where=str(path),
                hint="put the file back: what was released stays spent",
            )
        release = self._algorithm.release or {}
        if any(event["relation"] != release["relation"] for event in self._events):
            raise RunDirectoryError(
                f"the releases so far have the relation '{self._events[-1]['relation']}' between data sets, those to "
                f"come '{release['relation']}', and the two have no common epsilon",
                where=str(path),
                hint="undo the change of select, or start a new run",
            )

    def released(self, round: int, state: State, tally: Tally) -> None:
        """Writes the releases of the round, and waits until the disk has them."""
        events = [event for event in self._algorithm.spent(state) if event["round"] == round]
        if self._path is not None and events:
            jsonl.append(self._path, events)
            jsonl.sync(self._path)
            self._events += events

    def evaluated(
        self, round: int, state: State, tally: Tally, metrics: Mapping[str, float]
    ) -> Mapping[str, float]:
        """The epsilon of all releases so far; none without noise."""
        if self._settings is None or not self._events:
            return {}
        spent = epsilons(self._events, self._settings.delta).best
        return {"epsilon": spent} if math.isfinite(spent) else {}

    def summary(self) -> Mapping[str, Any]:
        """The guarantee, as `privacy`."""
        if self._settings is None:
            return {}
        return {"privacy": guarantee(self._settings, self._events, self._unsafe)}
