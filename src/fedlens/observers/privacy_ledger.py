"""The ledger of a private run: what has been released, and what it has spent."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.core.driver import Tally
from fedlens.core.protocol import Answer, Ask, Payload, State
from fedlens.core.step_counts import Work
from fedlens.core.types import client_name, is_client
from fedlens.files import jsonl
from fedlens.privacy.guarantee import example_guarantee, guarantee
from fedlens.run.build import Built
from fedlens.run.observer import ObservedRun, Observer, Place


class PrivacyLedger(Observer):
    """Writes privacy.jsonl, a line a release, before anything of the round is written or sent.

    With `unit = "example"` it has a line for each client that was asked to train, whatever became of the reply.

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
        self._unsafe, self._ids = built.config.record.unsafe, built.partition.ids
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
        if release and any(event["relation"] != release["relation"] for event in self._events):
            raise RunDirectoryError(
                f"the releases so far have the relation '{self._events[-1]['relation']}' between data sets, those to "
                f"come '{release['relation']}', and the two have no common epsilon",
                where=str(path),
                hint="undo the change of select, or start a new run",
            )
        if release and any(event.get("order") != release.get("order") for event in self._events):
            raise RunDirectoryError(
                "the releases so far asked clients in another order than those to come, so no count knows how often "
                "each one was asked",
                where=str(path),
                hint="undo the change of select, seed or privacy.mechanism, or start a new run",
            )

    def answered(self, ask: Ask, answer: Answer, work: Work) -> None:
        """Writes what a client has released, if it adds noise itself; the disk has it before the round is written."""
        if self._path is None or ask.op != "train" or not is_client(answer.client):
            return
        if (release := self._algorithm.client_release(answer.client)) is not None:
            event = {"round": work.round, "client": client_name(answer.client, self._ids), **release}
            jsonl.append(self._path, [event])
            self._events.append(event)

    def released(self, round: int, state: State, tally: Tally) -> None:
        """Writes the releases of the round, and waits until the disk has them."""
        events = [event for event in self._algorithm.spent(state) if event["round"] == round]
        if self._path is not None and events:
            jsonl.append(self._path, events)
            self._events += events
        if self._path is not None:
            jsonl.sync(self._path)

    def evaluated(
        self, round: int, state: State, tally: Tally, metrics: Mapping[str, float]
    ) -> Mapping[str, float]:
        """The epsilon of all releases so far; none without noise."""
        if self._settings is None or not self._events:
            return {}
        spent = self.summary()["privacy"]["epsilon"]
        return {} if spent is None else {"epsilon": spent}

    def summary(self) -> Mapping[str, Any]:
        """The guarantee, as `privacy`."""
        if self._settings is None:
            return {}
        if self._settings.hides_clients:
            return {"privacy": guarantee(self._settings, self._events, self._unsafe)}
        events: dict[str, list[Mapping[str, Any]]] = {}
        for event in self._events:
            events.setdefault(event["client"], []).append(event)
        return {"privacy": example_guarantee(self._settings, events)}
