"""Small experiments to profile."""

from __future__ import annotations

from pathlib import Path

from fedlens.core.protocol import Ask, RoundContext
from fedlens.core.random import Rng
from fedlens.run.build import Built, build
from fedlens.settings.config import read_config
from fedlens.settings.config_source import read_source
from fedlens.settings.plan import plan

SMALL = ["select.clients_per_round=3", "local.epochs=1", "rounds=3"]


def built(*overrides: str) -> Built:
    """The digits, three clients a round, one epoch, three rounds; and what is set on top."""
    source = read_source(
        "digits", overrides if "algorithm.name=centralized" in overrides else [*SMALL, *overrides]
    )
    return build(plan(read_config(source.values, source.locate), source), Path("/nowhere"), False)


def first_ask(experiment: Built) -> Ask:
    """What the algorithm asks of its clients in the first round."""
    state = experiment.algorithm.init(experiment.model, experiment.federation)
    ask = next(experiment.algorithm.round(state, RoundContext(1, 3, experiment.federation, Rng((0,)))))
    assert isinstance(ask, Ask)
    return ask
