"""One round of an experiment with made-up images in this process: what clients would send, before any site is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedlens import __version__
from fedlens.algorithms.client_evaluation import in_totals
from fedlens.base.errors import RunFailed
from fedlens.core.driver import Driver
from fedlens.core.protocol import Answer, Ask, ClientStates, Program, Reply
from fedlens.core.random import Identity, Secrets
from fedlens.core.schema import Schema
from fedlens.core.step_counts import Work
from fedlens.core.traffic import Row
from fedlens.core.types import Payload, is_client
from fedlens.core.wire.census import ChannelSums, CountedClient, SiteCensus
from fedlens.core.wire.sent_fields import answer_fields
from fedlens.data.catalogue import data_directory
from fedlens.data.datasets.sites import blank_examples
from fedlens.data.partition.roster import Roster
from fedlens.data.sites import ExamplesHere
from fedlens.engines.executor import Executor, Item
from fedlens.engines.inline import Inline, inline
from fedlens.engines.links.post import answer_body
from fedlens.run.build import Built, build
from fedlens.run.round_context import round_context
from fedlens.settings.plan import Plan

IMAGES = 8
"""How many made-up images each client has."""
_CONTRACT = "0" * 64  # of a real one, algorithms read whether there is any
_SIGNATURE = 64  # bytes
_MOST_ROUNDS = 1000  # of a selection that may draw no client


@dataclass
class TrialRound:
    """What clients received and sent.

    Attributes:
        built: the experiment, as the server builds it.
        rows: those of `fedlens.core.traffic.Traffic`, by operation.
        fields: the names and shapes of what clients sent, by operation, as the logs of both sides have them.
        sent: the bytes of the largest body that a client sent, by operation.
        keeps: the names in the states that clients keep.
    """

    built: Built
    rows: Mapping[str, Row] = field(default_factory=dict)
    fields: dict[str, list[str]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()

    def census(self, site: str, sums_images: bool) -> SiteCensus:
        """What a site with one client, of its name, would tell before the first round."""
        channels, sums = self.built.client_data.dataset.info.input_shape[0], None
        if sums_images:
            sums = ChannelSums(IMAGES, 1000 * IMAGES, *[(0.123456789012345,) * channels] * 2)
        return SiteCensus(site, [CountedClient(site, IMAGES)], versions_here(), _CONTRACT, sums)

    def answered(self, ask: Ask, answer: Answer, work: Work) -> None:
        """Raises `RunFailed` if a client failed."""
        if is_client(answer.client) and not isinstance(answer, Reply):
            raise RunFailed(f"the operation '{ask.op}' fails with made-up images: {answer.reason}")

    def sends(self, op: str, reply: Reply) -> None:
        """Notes what a site would send. A client's log is left out, which stays at its site."""
        payload = {name: value for name, value in reply.payload.items() if name != "log"}
        size = len(answer_body(payload, reply.letters))
        if size >= self.sent.get(op, 0):
            self.fields[op], self.sent[op] = answer_fields(payload, reply.metrics, reply.letters), size


def versions_here() -> dict[str, str]:
    """The versions of what this process computes with, by name, as a census has them."""
    return {"fedlens": __version__, "torch": torch.__version__, "numpy": np.__version__}


class _MadeUpSites(Inline):
    """Runs each client in this process, signs as sites do, and notes each reply before replies are reduced."""

    def __init__(self, trial: TrialRound, clients: int) -> None:
        super().__init__()
        self._trial = trial
        self._identity = Identity(
            lambda message: bytes(_SIGNATURE),
            lambda client, message, signature: True,
            {row: str(row) for row in range(clients)},
        )

    def open(self, program: Program, states: ClientStates) -> None:
        """Receives the program, see `Inline.open`."""
        seed, identity = program.seed, self._identity
        super().open(replace(program, secrets=lambda client: Secrets((seed, client), identity)), states)
        self._executor = _Watched(self._executor.program, self._scratch, self._trial)


class _Watched(Executor):
    def __init__(self, program: Program, scratch: dict[Any, Any], trial: TrialRound) -> None:
        super().__init__(program, scratch)
        self._trial = trial

    def answer(self, op: str, shared: Payload, item: Item, expect: Schema) -> Answer:
        """See `Executor.answer`."""
        answer = super().answer(op, shared, item, expect)
        if isinstance(answer, Reply) and is_client(item.client):
            self._trial.sends(op, answer)
        return answer


def trial_round(planned: Plan, clients: int, at_site: bool = False, totals: bool = False) -> TrialRound:
    """Trains `clients` clients for one step each, and evaluates the model as the experiment says.

    With `at_site` the plan is the part of the experiment that sites get; with `totals` they send `Task.totals` alone,
    if the task has any. Raises `ConfigError` for what `fedlens serve`
    refuses, `DataError` if the server's test data are missing, and `RunFailed` if an operation fails.
    """
    config, local = planned.config, planned.config.local
    short = {"epochs": local.epochs and 1, "steps": local.steps and 1, "batch_size": "all", "stragglers": 0.0}
    config = config.model_copy(update={"local": local.model_copy(update=short)})
    total = clients * IMAGES
    data_dir = data_directory(None)
    blank = planned.chosen["data.dataset"](data_dir, False, 0)
    examples = blank_examples(blank.kind, total, len(blank.classes), blank.input_shape)
    if config.privacy is not None and config.privacy.column is not None:
        examples = replace(examples, columns={config.privacy.column: np.arange(total)})
    names = tuple(f"{row:06d}" for row in range(clients))
    ones = (1.0,) * blank.input_shape[0]
    moments = (ones, ones) if config.sums_moments else None
    each = np.full(clients, IMAGES)
    roster = Roster(names, names, each, np.zeros(clients, np.int64), _CONTRACT, moments, total)
    positions = {row: np.arange(row * IMAGES, (row + 1) * IMAGES) for row in range(clients)}
    here = ExamplesHere(replace(blank, train=examples), positions)
    trial = TrialRound(
        build(planned, data_dir, False, engine=inline(), roster=roster, here=here if at_site else None)
    )
    shortened, states = replace(planned, config=config), ClientStates()
    built = build(shortened, data_dir, False, engine=_MadeUpSites(trial, clients), roster=roster, here=here)
    driver = Driver(built.engine, states, trial.answered)
    trial.rows = driver.tally.traffic.rows
    sends_totals = totals and built.task.known_totals()
    built.engine.open(in_totals(built.program, built.task) if sends_totals else built.program, states)
    try:
        state = built.algorithm.init(built.model, built.federation)
        for number in range(1, _MOST_ROUNDS):
            state = driver.drive(built.algorithm.round(state, round_context(built, number)), number)
            if driver.tally.clients:
                break
        driver.drive(built.algorithm.evaluate(state, round_context(built, number)), number)
    finally:
        built.engine.close()
    trial.keeps = tuple(sorted({name for row in range(clients) for name in states.get(row)}))
    return trial
