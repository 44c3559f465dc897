"""Sites over TLS, with their logs and states on disk: the bits of a simulation, also through restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedlens.core.driver import Driver
from fedlens.core.protocol import ClientStates, RoundContext
from fedlens.core.random import Rng
from fedlens.core.wire.census import CountedClient, SiteCensus
from fedlens.data.partition.roster import Roster
from fedlens.engines.devices import Computing
from fedlens.engines.inline import inline
from fedlens.engines.links.post import Post
from fedlens.engines.network import NetworkEngine, Waits
from fedlens.run.build import Built
from tests.agent_kit import SitesOverTls
from tests.unit.engines.test_network import built, roster_of, same, trained


@contextmanager
def over(made: Built, sites: SitesOverTls, post: Post, states: ClientStates) -> Iterator[Driver]:
    engine = NetworkEngine(Waits(deadline=600.0, patience=60.0), max_share=1.0, computing=Computing("cpu"))
    engine.attach(post, sites.roster)
    engine.open(made.program, states)
    try:
        yield Driver(engine, states)
    finally:
        engine.close()


def simulated(made: Built, rounds: int = 3) -> tuple[Any, list[Any], Driver]:
    engine, states = inline(device="cpu"), ClientStates()
    engine.open(made.program, states)
    driver = Driver(engine, states)
    state, metrics = trained(made, driver, rounds)
    engine.close()
    return state, metrics, driver


def shared_sites(made: Built) -> Roster:
    """Two sites with two clients each."""
    sizes = [int(n) for n in made.partition.sizes()]
    return Roster.of(
        SiteCensus(f"s{k}", [CountedClient(f"s{k}/{i}", sizes[2 * k + i]) for i in range(2)])
        for k in range(2)
    )


@pytest.mark.parametrize(("algorithm", "roster"), [("fedavg", roster_of), ("scaffold", shared_sites)])
def test_the_bits_are_those_of_a_simulation(
    algorithm: str, roster: Callable[[Built], Roster], tmp_path: Path
) -> None:
    made = built(algorithm)
    expected, metrics, simulation = simulated(made)
    sites = SitesOverTls(tmp_path, made.program, roster(made), made.algorithm.takes)
    with ExitStack() as held:
        link, post = held.enter_context(sites.serving())
        held.enter_context(sites.working())
        told = sites.gather(link)
        assert sorted(one.site for one in told) == sites.names
        with over(made, sites, post, states := ClientStates()) as driver:
            found, measured = trained(made, driver)
            assert same(found, expected)
            assert measured == metrics
            assert driver.tally.sums == simulation.tally.sums
            assert not driver.tally.failures
            sites.goodbye(link)
            held.pop_all().close()  # the agents end before the link does
    assert states.snapshot().keys() == simulation.states.snapshot().keys()
    assert all("at-site" in state for state in states.snapshot().values())
    assert len([line for line in sites.lines if ": reply, " in line]) == sum(
        (tmp_path / "sites" / name / "log" / "asked.jsonl").read_text().count('"decision":"answered"')
        for name in sites.names
    )


def test_a_run_goes_on_with_other_processes_on_both_sides(tmp_path: Path) -> None:
    """Server and sites stop after a round, and the same folders go on: the bits of a run without a stop."""
    made = built("scaffold")
    expected, *_ = simulated(made)
    sites = SitesOverTls(tmp_path, made.program, roster_of(made), made.algorithm.takes)
    states, state = ClientStates(), made.algorithm.init(made.model, made.federation)
    for attempt in (1, 2, 3):
        with ExitStack() as held:
            link, post = held.enter_context(sites.serving(attempt))
            held.enter_context(sites.working())
            sites.gather(link, attempt)
            with over(made, sites, post, states) as driver:
                context = RoundContext(attempt, 3, made.federation, Rng((0, "round", attempt)))
                state = driver.drive(made.algorithm.round(state, context), attempt)
                assert not driver.tally.failures
                sites.goodbye(link, "stopped", attempt)
                held.pop_all().close()
    assert same(state, expected)
