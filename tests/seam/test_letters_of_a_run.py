"""A run whose clients write to their neighbours before they train: what its files and its report say."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import Experiment
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.core.protocol import Ask, Client, Letter, Op, Outcome, Payload, Request
from fedlens.core.random import Rng
from fedlens.core.schema import Schema, TensorField
from fedlens.engines.auto import Auto
from fedlens.engines.default import Default
from fedlens.pages.run_page import efficiency
from fedlens.results.comparison import run_groups
from fedlens.results.run import read_run

FILE = str(Path(__file__))
N, ROUNDS = 4, 2
LETTER = Schema({"greeting": TensorField((-1,), torch.float32, most=80)})


def write(payload: Payload, client: Client, rng: Rng) -> Outcome:
    return Outcome(
        {},
        letters=[Letter((client.id + 1) % N, {"greeting": torch.rand(5, generator=rng.torch("greeting"))})],
    )


def read(payload: Payload, client: Client, rng: Rng) -> Outcome:
    (_, content), *_ = payload["letters"]
    return Outcome({}, {"heard": client.state.get("heard", 0.0) + content["greeting"].sum()})


@dataclass(frozen=True)
class Greeting(Averaging):
    asks_each_step = True

    @property
    def ops(self) -> Mapping[str, Op]:
        return {**super().ops, "write": write, "read": read}

    def round(self, state: Any, ctx: Any) -> Generator[Any, Any, Any]:
        requests = [Request(k) for k in range(N)]
        list((yield Ask("write", requests, letter=LETTER, counts=False)))
        list((yield Ask("read", requests[:-1], deliver=True, counts=False)))
        return (yield from super().round(state, ctx))


def greeting(parts: Parts) -> Greeting:
    plain = averaging(parts)
    return Greeting(**{each.name: getattr(plain, each.name) for each in fields(plain)})


def run(out: Path, engine: Any = "inline", **more: Any) -> Any:
    settings: dict[str, Any] = {
        "rounds": ROUNDS,
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": N}},
        "select": {"clients_per_round": 2},
        "model": "linear",
        "algorithm": {"name": f"{FILE}:greeting"},
        "local": {"lr": 0.1, "batch_size": 10},
        "engine": engine,
    }
    return Experiment(**{**settings, **more}).run(out, report=False)


def test_letters_are_in_the_metrics_the_totals_and_the_report(tmp_path: Path) -> None:
    run(tmp_path / "run")
    plain = run(tmp_path / "plain", algorithm="fedavg")
    made = read_run(tmp_path / "run")
    lines = [line for line in made.metrics if line["round"]]
    assert [(line["bytes_peer"], line["letters_dropped"], line["clients"]) for line in lines] == [
        (N * 20, 1, 2)
    ] * ROUNDS
    assert "bytes_peer" not in plain.metrics[-1]
    assert "bytes_peer" not in plain.summary["totals"]
    assert made.summary["totals"]["bytes_peer"] == ROUNDS * N * 20
    rows = dict(efficiency(made))
    assert rows["Sent a round between clients"] == "80 B"
    mine, other = (g.row for g in run_groups([made, read_run(tmp_path / "plain")], each=True))
    assert mine["bytes"] == other["bytes"] + ROUNDS * N * 20


@pytest.mark.nightly
def test_the_numbers_are_those_of_inline_on_processes(tmp_path: Path) -> None:
    here = run(tmp_path / "inline")
    there = run(tmp_path / "processes", {"name": "processes", "workers": 2})
    timeless = [[{**line, "seconds": 0, "elapsed": 0} for line in each.metrics] for each in (here, there)]
    assert json.dumps(timeless[0]) == json.dumps(timeless[1])


@pytest.mark.parametrize(("engine", "kind"), [("auto", Auto), ("default", Default)])
def test_nothing_is_sent_to_workers_for_an_algorithm_that_asks_each_step(
    engine: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    choose = kind.choose

    def noted(self: Any, work: Any) -> Any:
        told.append((work.cohort, work.images))
        return choose(self, work)

    monkeypatch.setattr(kind, "choose", noted)
    made = run(tmp_path / "run", {"name": engine, "device": "cpu"})
    assert (told, made.config["engine"]["name"]) == (
        [(None, 0.0)],
        engine if engine == "default" else "inline",
    )
