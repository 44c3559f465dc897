"""One round of an experiment with made-up images in this process: what clients would send, before any site is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fedlens.base.errors import RunFailed
from fedlens.base.format import many
from fedlens.core.driver import Driver
from fedlens.core.protocol import Answer, Ask, ClientStates, Reply
from fedlens.core.schema import LETTER, AskedField, TensorField, TreeField, nbytes
from fedlens.core.step_counts import Work
from fedlens.core.traffic import Row
from fedlens.core.types import is_client
from fedlens.data.catalogue import data_directory
from fedlens.data.datasets.sites import blank_examples
from fedlens.data.partition.roster import Roster
from fedlens.data.sites import ExamplesHere
from fedlens.engines.inline import inline
from fedlens.run.build import Built, build
from fedlens.run.round_context import round_context
from fedlens.settings.plan import Plan

IMAGES = 8
"""How many made-up images each client has."""
_CONTRACT = "0" * 64  # of a real one, algorithms read whether there is any
_SHOWN = 8  # tensors of a tree that are named
_MOST_ROUNDS = 1000  # of a selection that may draw no client


@dataclass
class TrialRound:
    """What clients received and sent.

    Attributes:
        built: the experiment, as the server builds it.
        rows: those of `fedlens.core.traffic.Traffic`, by operation.
        shapes: of each field that clients sent, by operation and name.
        metrics: the names of the metrics that clients sent, by operation.
        sent: the bytes of the largest reply, by operation.
        keeps: the names in the states that clients keep.
    """

    built: Built
    rows: Mapping[str, Row] = field(default_factory=dict)
    shapes: dict[str, dict[str, str]] = field(default_factory=dict)
    metrics: dict[str, set[str]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()

    def answered(self, ask: Ask, answer: Answer, work: Work) -> None:
        """Notes the shapes and the bytes of a reply."""
        if not is_client(answer.client):
            return
        if not isinstance(answer, Reply):
            raise RunFailed(f"the operation '{ask.op}' fails with made-up images: {answer.reason}")
        fields = dict(ask.expect.fields or {})
        if ask.expect.letter is not None:
            fields |= {LETTER + name: each for name, each in (ask.expect.letter.fields or {}).items()}
        if ask.logged and (row := self.rows.get(ask.op)):  # a log stays at its client, and is in these bytes
            row["up"].pop("log", None)
            row["bytes_up"] = 0
        shapes = {name: shape_of(each) for name, each in fields.items()}
        self.shapes.setdefault(ask.op, {}).update({name: shape for name, shape in shapes.items() if shape})
        self.metrics.setdefault(ask.op, set()).update(answer.metrics)
        self.sent[ask.op] = max(self.sent.get(ask.op, 0), answer.nbytes + nbytes(dict(answer.metrics)))


def shape_of(expected: AskedField) -> str:
    """The shape of a field in words, with n for a free extent; "" of a number.

    >>> import torch
    >>> shape_of(TensorField((-1, 64), torch.float32))
    'n × 64'
    """
    if isinstance(expected, TensorField):
        return " × ".join("n" if n < 0 else str(n) for n in expected.shape)
    if not isinstance(expected, TreeField):
        return ""
    leaves = [f"{name} {'×'.join(map(str, shape)) or 1}" for name, (shape, _) in expected.leaves.items()]
    more = len(leaves) - _SHOWN
    return ", ".join([*leaves[:_SHOWN], *([f"and {many(more, 'more tensor')}"] if more > 0 else [])])


def trial_round(planned: Plan, clients: int, at_site: bool = False) -> TrialRound:
    """Trains `clients` clients for one step each, and evaluates the model as the experiment says.

    With `at_site` the plan is the part of the experiment that sites get. Raises `ConfigError` for what `fedlens serve`
    refuses, `DataError` if the server's test data are missing, and `RunFailed` if an operation fails.
    """
    config, local = planned.config, planned.config.local
    short = {"epochs": local.epochs and 1, "steps": local.steps and 1, "batch_size": "all", "stragglers": 0.0}
    config = config.model_copy(update={"local": local.model_copy(update=short)})
    total = clients * IMAGES
    data_dir = data_directory(None)
    blank = planned.chosen["data.dataset"](data_dir, False, 0)
    examples = blank_examples(blank.kind, total, len(blank.classes), blank.input_shape)
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
    built = build(shortened, data_dir, False, engine=inline(), roster=roster, here=here)
    driver = Driver(built.engine, states, trial.answered)
    trial.rows = driver.tally.traffic.rows
    built.engine.open(built.program, states)
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
