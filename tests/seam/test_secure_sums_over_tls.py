"""Secure sums over TLS: the bits of the same sum without masks, whoever drops out, and when the server is killed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedlens.aggregate.secure.secagg_server import KEYS, MASKED, SHARES, UNMASK
from fedlens.base.errors import RoundRefused
from fedlens.core.driver import Driver
from fedlens.core.protocol import Answer, Ask, ClientStates, Failure, RoundContext
from fedlens.core.random import Rng
from fedlens.core.states import AT_SITE, Journal
from fedlens.engines.inline import inline
from fedlens.identity.file_cipher import FileCipher
from fedlens.run.build import Built, build
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan_of
from fedlens.site.client_logs import LOGS, ClientLogs
from tests.agent_kit import SitesOverTls
from tests.seam.test_sites_over_tls import over
from tests.unit.engines.test_network import roster_of, same

STEPS = (KEYS, SHARES, MASKED, UNMASK)
ROUNDS = 5
Before = Callable[[Ask, int], None]
"""Called with each ask and its round, before it is sent."""


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


class Told:
    """An engine that tells of its asks before it sends them, and loses the answers of some clients."""

    def __init__(self, engine: Any, before: Before, lost: Callable[[str, int, Any], bool]) -> None:
        self.engine, self.before, self.lost = engine, before, lost

    def open(self, *given: Any) -> None:
        self.engine.open(*given)

    def close(self) -> None:
        self.engine.close()

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        self.before(ask, round)
        for answer in self.engine.answer(ask, round, exchange):
            lost = self.lost(ask.op, round, answer.client)
            yield Failure(answer.id, answer.client, "lost") if lost else answer


def trained(
    built: Built,
    driver: Driver,
    state: Any = None,
    rounds: Any = (1, 2, 3),
    before: Before = lambda ask, round: None,
    lost: Callable[[str, int, Any], bool] = lambda op, round, client: False,
) -> Any:
    """The state after these rounds. As in a run, sites are told of the states in the checkpoint of each."""
    engine: Any = driver.engine
    driver.engine = Told(engine, before, lost)
    try:
        for round in rounds:
            state = built.algorithm.init(built.model, built.federation) if state is None else state
            context = RoundContext(
                round, ROUNDS, built.federation, Rng((0, "round", round)), journal=driver.journal
            )
            state = driver.drive(built.algorithm.round(state, context), round)
            driver.journal.saved(round)
            kept = driver.states.snapshot().items()
            engine.keep({client: [state[AT_SITE]] for client, state in kept if AT_SITE in state})
    finally:
        driver.engine = engine
    return state


def expected(algorithm: str = "fedavg", **how: Any) -> tuple[Any, ClientStates]:
    """The final state of the sum without masks, and the states of the clients."""
    built, engine, states = made("quantized", algorithm), inline(device="cpu"), ClientStates()
    engine.open(built.program, states)
    state = trained(built, Driver(engine, states), **how)
    engine.close()
    return state, states


def sites_of(built: Built, folder: Path) -> SitesOverTls:
    return SitesOverTls(folder, built.program, roster_of(built), built.algorithm.takes)


def test_it_is_the_sum_without_masks_to_the_bit(tmp_path: Path) -> None:
    built, states = made("secagg", "scaffold"), ClientStates()
    sites = sites_of(built, tmp_path)
    with sites.serving() as (link, post), sites.working():
        sites.gather(link)
        with over(built, sites, post, states) as driver:
            driver.journal = Journal("run")
            state = trained(built, driver)
            sites.goodbye(link)
    assert not driver.tally.failures, sites.lines
    plain, its_states = expected("scaffold")
    assert same(state, plain)
    assert states.snapshot().keys() == its_states.snapshot().keys()
    assert all(AT_SITE in kept for kept in states.snapshot().values())
    assert not any(driver.journal.log_of(client) for client in range(4))
    for name, keys in sites.keys.items():  # the shares that opened the last sum are gone
        logs = ClientLogs(tmp_path / "sites" / name / LOGS, FileCipher(keys.identity()))
        entry = logs.get("run", name)["runs"]["run"]
        assert (entry["step"], entry.get("answer")) == ("unmasked", None)


def test_whoever_drops_out_the_others_are_summed(tmp_path: Path) -> None:
    """A client leaves before each step, one of them in a site that restarts. With two of four gone none is summed."""
    built, states = made("secagg"), ClientStates()
    sites = sites_of(built, tmp_path)

    def before(ask: Ask, round: int) -> None:
        if round == 3 and ask.op == MASKED:  # a restart: secrets of an attempt are in memory alone
            sites.proposed["s2"].opened[-1].program.secrets_of(2).forget("")

    def lost(op: str, round: int, client: Any) -> bool:
        gone = {1: (KEYS, 0), 2: (SHARES, 1), 4: (UNMASK, 3)}.get(round, ("", -1))
        return (op, client) == gone or (round == 5 and op == MASKED and client < 2)

    with sites.serving() as (link, post), sites.working():
        sites.gather(link)
        with over(built, sites, post, states) as driver:
            driver.journal = Journal("run")
            state = trained(built, driver, None, (1, 2, 3, 4), before, lost)
            with pytest.raises(RoundRefused, match="and 3 must last"):
                trained(built, driver, state, (5,), before, lost)
            sites.goodbye(link)

    untrained = {1: 0, 2: 1, 3: 2}
    plain, _ = expected(rounds=(1, 2, 3, 4), lost=lambda op, round, client: untrained.get(round) == client)
    assert same(state, plain)
    told = (tmp_path / "sites" / "s2" / "log" / "site.jsonl").read_text()
    assert "has no secrets of this attempt" in told


class Killed(Exception):
    """The server is gone."""


@pytest.mark.parametrize(
    "step", [*(pytest.param(step, marks=pytest.mark.nightly) for step in STEPS[:3]), UNMASK]
)
def test_a_killed_server_goes_on_to_the_same_bits(step: str, tmp_path: Path) -> None:
    """The server ends before it sends an ask of round 2; another one continues, and the sites have gone on."""
    built, states, journal = made("secagg", "scaffold"), ClientStates(), Journal("run")
    sites, state = sites_of(built, tmp_path), None

    def before(ask: Ask, round: int) -> None:
        if (ask.op, round) == (step, 2):
            raise Killed

    with ExitStack() as server:
        link, post = server.enter_context(sites.serving())
        with sites.working():
            sites.gather(link)
            with over(built, sites, post, states) as driver:
                driver.journal = journal
                state = trained(built, driver, rounds=(1,))
                with pytest.raises(Killed):
                    trained(built, driver, state, (2,), before)
            server.close()
            link, post = server.enter_context(sites.serving(2, sites.federation.port))
            sites.gather(link, 2)
            with over(built, sites, post, states) as driver:
                driver.journal = journal
                state = trained(built, driver, state, (2, 3))
                sites.goodbye(link, attempt=2)
    assert not driver.tally.failures, sites.lines
    assert same(state, expected("scaffold")[0])
