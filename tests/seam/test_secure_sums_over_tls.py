"""Secure sums over TLS: the bits of the same sum without masks, in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedlens.core.driver import Driver
from fedlens.core.protocol import ClientStates, RoundContext
from fedlens.core.random import Rng
from fedlens.core.states import Journal
from fedlens.engines.inline import inline
from fedlens.run.build import Built, build
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan_of
from tests.agent_kit import SitesOverTls
from tests.seam.test_sites_over_tls import over
from tests.unit.engines.test_network import roster_of, same

ROUNDS = 3


@cache
def made(aggregate: str, algorithm: str = "fedavg") -> Built:
    settings = {
        "rounds": ROUNDS,
        "algorithm": algorithm,
        "aggregate": {"name": aggregate, "bits": 20, "range": 64.0},
        "model": "mlp",
        "local": {"lr": 0.1, "steps": 2, "batch_size": 8},
        "data": {
            "dataset": "digits",
            "partition": {"name": "dirichlet-classwise", "clients": 4, "alpha": 1.0},
        },
        "engine": {"name": "inline", "device": "cpu"},
    }
    return build(plan_of(Source(settings)), Path(), download=False)


def trained(built: Built, driver: Driver, journal: Journal, rounds: int = ROUNDS) -> Any:
    state = built.algorithm.init(built.model, built.federation)
    for round in range(1, rounds + 1):
        context = RoundContext(round, rounds, built.federation, Rng((0, "round", round)), journal=journal)
        state = driver.drive(built.algorithm.round(state, context), round)
    return state


@cache
def expected(algorithm: str = "fedavg") -> tuple[Any, ClientStates]:
    """The final state of the sum without masks, and the states of the clients."""
    built, engine, states = made("quantized", algorithm), inline(device="cpu"), ClientStates()
    engine.open(built.program, states)
    state = trained(built, Driver(engine, states), Journal())
    engine.close()
    return state, states


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_it_is_the_sum_without_masks_to_the_bit(algorithm: str, tmp_path: Path) -> None:
    built, journal, states = made("secagg", algorithm), Journal("run"), ClientStates()
    sites = SitesOverTls(tmp_path, built.program, roster_of(built), built.algorithm.takes)
    with sites.serving() as (link, post), sites.working():
        sites.gather(link)
        with over(built, sites, post, states) as driver:
            driver.journal = journal
            state = trained(built, driver, journal)
            sites.goodbye(link)
    assert not driver.tally.failures, sites.lines
    plain, its_states = expected(algorithm)
    assert same(state, plain)
    assert states.snapshot().keys() == its_states.snapshot().keys()
    assert all("at-site" in kept for kept in states.snapshot().values())
    assert not any(journal.log_of(client) for client in range(4))
