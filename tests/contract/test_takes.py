"""What each algorithm asks of clients is what it says that a site may be asked, and no more."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.core.algorithm_base import AlgorithmBase
from fedlens.core.driver import Driver
from fedlens.core.protocol import Answer, Ask, ClientStates, Payload, RoundContext
from fedlens.core.random import Rng
from fedlens.core.types import is_client
from fedlens.engines.inline import Inline, inline
from fedlens.run.build import Built, build
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan_of
from tests.contract.contract_kit import (
    ALGORITHMS,
    CHOSEN,
    HELD_OUT,
    LOCAL,
    PARTITION_OF,
    nightly_but,
    settings,
)
from tests.unit.engines.test_network import Federation, same, trained

# Whose operations sites refuse: docs/engines.md says why. `centralized` asks no client.
NOT_AT_SITES = {"fedma", "splitfed", "split-relay", "vertical", "centralized"}
REFUSED = {row for row, table in ALGORITHMS.items() if table["name"] in NOT_AT_SITES}
MEASURED = {"evaluation": {"clients": "all"}}
UNIFORM = {"select": {"fraction": 1.0}}
PRIVATE = {"noise_multiplier": 0.1, "delta": 1e-5, "noise": "seeded"}
# Settings that add fields, or operations.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "stragglers": ("fedprox", {"local": LOCAL | {"epochs": 3, "stragglers": 0.5}}),
    "schedule": ("fedavg", {"local": LOCAL | {"lr_schedule": "cosine", "lr_change": "step"}}),
    "tuned-by-step": ("finetune", {"local": LOCAL | {"lr_schedule": "linear", "lr_change": "step"}}),
    "warm-up": ("dsgd", {"local": LOCAL | {"lr_warmup": 1, "lr_change": "step"}, **MEASURED}),
    "measured": ("scaffold", MEASURED),
    "two-rules": ("fedavg", {"client": ["control-variate", {"name": "reweighted", "target": "population"}]}),
    "population-before-gradients": ("feddane", {"client": {"name": "reweighted", "target": "population"}}),
    "adaptive-clip": ("fedavg", {"privacy": PRIVATE | {"clip": "adaptive"}, "model": "mlp", **UNIFORM}),
    "quantized": ("fedavg", {"aggregate": {"name": "quantized", "bits": 20}}),
    "secure-sum": ("fedavg", {"aggregate": {"name": "secagg", "bits": 20}}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ALGORITHMS} | MORE
IN_CI = {
    *CHOSEN,
    "fedgkt",
    "mime-adam",
    "stragglers",
    "schedule",
    "population-before-gradients",
    "secure-sum",
}


def made(name: str) -> Built:
    algorithm, changes = CASES[name]
    given = settings(
        algorithm, PARTITION_OF[algorithm], **{"rounds": 2, "engine": "inline", "record": {}, **changes}
    )
    if "privacy" in changes:
        given["data"] = given["data"] | {"normalize": "half"}
    if changes.get("evaluation"):
        given["data"] = given["data"] | HELD_OUT
    return build(plan_of(Source(given)), Path(), download=False)


class Watched(Inline):
    """Keeps what clients are asked."""

    def __init__(self, engine: Inline) -> None:
        super().__init__(**{name: vars(engine)[name] for name in ("threads", "computing")})
        self.asked: list[tuple[str, Payload]] = []

    def answer(self, ask: Ask, round: int, exchange: int, first: int = 0) -> Generator[Answer, None, None]:
        clients = [request for request in ask.requests if is_client(request.client)]
        self.asked += [
            (ask.op, {n: v for n, v in {**ask.shared, **request.payload}.items() if n != "log"})
            for request in clients  # each site adds the log of its client itself
        ]
        return super().answer(ask, round, exchange, first)


def asked(built: Built) -> list[tuple[str, Payload]]:
    """What clients are asked in two rounds and their evaluations."""
    engine, states, algorithm = Watched(inline(device="cpu")), ClientStates(), built.algorithm
    engine.open(built.program, states)
    driver, state = Driver(engine, states), algorithm.init(built.model, built.federation)
    for round in (1, 2):
        ctx = RoundContext(round, 2, built.federation, Rng((0, "round", round)))
        state = driver.drive(algorithm.round(state, ctx), round)
        driver.drive(algorithm.evaluate(state, ctx), round)
    engine.close()
    return engine.asked


def ask_fault(algorithm: AlgorithmBase, op: str, payload: Payload) -> str | None:
    schema = algorithm.takes(op)
    return "refused" if schema is None else schema.fault(payload)


def others(value: Any) -> Iterator[Any]:
    """Values that a field of such a value must not have."""
    if isinstance(value, torch.Tensor):
        if value.numel() and value.is_floating_point():
            yield torch.full_like(value, math.nan)
        yield value[None]
        yield value.double() if value.dtype != torch.float64 else value.float()
        yield 1.0
    elif isinstance(value, Mapping):
        yield {**value, "another": 1}
        yield list(value)
        for name, item in value.items():
            if name == "run":  # any text of 128 characters
                yield {**value, name: ""}
                yield {**value, name: "a" * 129}
                continue
            yield {other: value[other] for other in value if other != name}
            yield from ({**value, name: other} for other in others(item))
    elif isinstance(value, list | tuple):
        yield {}
        yield [*value, 1.5]
        if value:
            yield [value[0]] * 2000
        for at in range(min(len(value), 2)):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in others(value[at]))
    elif isinstance(value, str):
        yield from ("", value + "2", "@test", 1)
    elif isinstance(value, bytes):
        yield from ("text", value + bytes(2000), *([b""] if value else []))
    else:
        assert isinstance(value, int | float)
        yield from (math.nan, math.inf, -math.inf, -5, -1e-3, "1", True, None, [value])
        if isinstance(value, int):
            yield from (value + 0.5, 2**53, 10**400)


@pytest.mark.parametrize("name", nightly_but(IN_CI, CASES))
def test_clients_are_asked_what_the_algorithm_takes(name: str) -> None:
    built = made(name)
    algorithm = built.algorithm
    every = asked(built)
    assert every or name == "centralized"
    assert set(algorithm.ops) >= {op for op, _ in every}
    assert algorithm.takes("evaluate") is algorithm.takes("no-operation") is None
    taken = {op for op in algorithm.ops if algorithm.takes(op) is not None}
    if CASES[name][0] in REFUSED:
        assert not taken
        return
    faults = {ask_fault(algorithm, op, payload) for op, payload in every}
    assert faults == {None}
    # Every operation of clients is asked here, and one example of each form of its payload is changed.
    forms = {(op, *sorted(payload)): (op, payload) for op, payload in every}
    assert {op for op, *_ in forms} == taken
    for op, payload in forms.values():
        refuse_others(algorithm, op, payload)


@pytest.mark.parametrize(
    "name", nightly_but({"fedgkt", "dsgd", "secure-sum"}, [name for name in CASES if name not in REFUSED])
)
def test_the_bits_of_a_run_over_sites_that_hold_asks_to_the_schemas_are_those_of_a_simulation(
    name: str,
) -> None:
    built = made(name)
    engine, states = inline(device="cpu"), ClientStates()
    engine.open(built.program, states)
    expected = trained(built, Driver(engine, states), rounds=2)
    engine.close()
    network = Federation(built, computing=engine.computing)
    found = trained(built, network.driver, rounds=2)
    assert not network.driver.tally.failures
    assert same(found[0], expected[0])
    assert found[1] == expected[1]
    network.engine.close()


def refuse_others(algorithm: AlgorithmBase, op: str, payload: Payload) -> None:
    """A payload with one field missing, added or changed."""
    schema = algorithm.takes(op)
    assert schema is not None
    for name in payload:
        assert name in schema.optional or ask_fault(
            algorithm, op, {n: v for n, v in payload.items() if n != name}
        )
        for other in others(payload[name]):
            assert ask_fault(algorithm, op, {**payload, name: other}), (op, name, other)
    for extra in ("start", "stop", "also", "positions", "varied", "log", "letters", "work", "schedule"):
        if extra not in payload and extra not in schema.optional:
            assert ask_fault(algorithm, op, {**payload, extra: 1}), (op, extra)
