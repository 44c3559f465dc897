"""The lines of participation.jsonl: who was away or failed in each round over sites, and the model's digest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fedlens.core.driver import Tally
from fedlens.core.protocol import Answer, Ask, Failure, State
from fedlens.core.step_counts import Work
from fedlens.core.tree import digest
from fedlens.core.types import client_name, is_client
from fedlens.run.build import Built
from fedlens.run.observer import Observer, Place


class Participation(Observer):
    """Writes participation.jsonl, from which `fedlens replay` repeats a run over sites in one place.

    A line has `away`, the clients that could not be asked when the round began; `failed`, a list [exchange, slot,
    client, reason] for each request without an accepted answer, in the order of the slots, those of the evaluation
    included; and `model`, the SHA-256 of the server's model after the round (`fedlens.core.tree.digest`).
    """

    place = Place.WRITE
    file = "participation.jsonl"
    ends_run = True

    def __init__(self, built: Built) -> None:
        self._algorithm, self._ids = built.algorithm, built.partition.ids
        self._name = partial(client_name, ids=built.partition.ids)
        self._failed: dict[int, list[list[Any]]] = {}  # by round

    def answered(self, ask: Ask, answer: Answer, work: Work) -> None:
        """Keeps a failure. What the algorithm refuses is no failure of the site, and repeats itself."""
        if isinstance(answer, Failure) and is_client(answer.client):
            round, exchange, slot = answer.id
            failed = [exchange, slot, self._name(answer.client), answer.reason]
            self._failed.setdefault(round, []).append(failed)

    def rows(self, state: State, tally: Tally, metrics: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The line of the round."""
        here = range(len(self._ids)) if tally.available is None else tally.available
        away = sorted(set(range(len(self._ids))) - set(here))
        failed = self._failed.pop(metrics["round"], [])
        model = digest(self._algorithm.model(state)[1])
        return [{"away": [self._name(client) for client in away], "failed": failed, "model": model}]
