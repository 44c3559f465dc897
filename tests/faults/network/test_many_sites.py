"""A hundred sites and a thousand, which answer without training, at one server over TLS."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fedlens import Experiment
from fedlens.core.engine_base import EngineBase
from fedlens.core.wire.census import CountedClient, SiteCensus
from fedlens.core.wire.message import Message
from fedlens.data.partition.roster import Roster
from fedlens.engines.links.connections import Limits
from fedlens.engines.links.post import Post
from fedlens.engines.network import NetworkEngine
from fedlens.server.sockets import allow_connections
from tests.light_sites import LightSites
from tests.link_kit import Federation


def resident() -> int:
    """The bytes of memory of this process."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


def settings(rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "algorithm": "fedavg",
        "model": "linear",
        "local": {"lr": 0.1, "steps": 1},
        "data": {
            "dataset": {
                "name": "sites",
                "classes": [str(digit) for digit in range(10)],
                "input_shape": [1, 8, 8],
                "mean": [0.3],
                "std": [0.4],
                "test": "digits",
            }
        },
        "evaluation": {"every": rounds},
        "engine": {"name": "network", "deadline": 3000.0, "lost": 600.0},
        "checkpoint": {"seconds": 3600},
    }


def run(tmp_path: Path, count: int, rounds: int) -> tuple[LightSites, dict[int, int], Path]:
    """A run over so many sites, and the memory at the first ask of each round."""
    allow_connections()
    # From one address come as many handshakes at once as else from all.
    federation = Federation(tmp_path, limits=Limits(anonymous_per_address=Limits.anonymous))
    memory: dict[int, int] = {}
    with federation.link() as link:
        sites = LightSites(federation, [federation.site(f"site-{number:04}") for number in range(count)])

        def seen(ask: Message) -> None:
            memory.setdefault(ask.fields.round, resident())

        def connect(engine: EngineBase) -> Roster:
            assert isinstance(engine, NetworkEngine)
            roster = Roster.of(SiteCensus(site.name, [CountedClient(site.name, 10)]) for site in sites.sites)
            engine.attach(Post(link, federation.key, federation.root, "run", 1), roster)
            return roster

        sites.seen = seen
        with sites.here(link):
            result = Experiment(**settings(rounds)).run(tmp_path / "run", connect=connect)
        assert {kind for kind, *_ in federation.notices} == {"address"}
        assert link.refused.total() == 0
    return sites, memory, result.directory


@pytest.mark.parametrize(
    "count", [100, pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
def test_all_sites_take_part_in_each_round(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # the keys of so many sites are for this test alone
    sites, _, directory = run(tmp_path, count, rounds=3)
    assert sites.answered == 3 * count
    lines = [json.loads(line) for line in (directory / "participation.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert not any(line["away"] or line["failed"] for line in lines)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_memory_is_flat_from_round_10_to_100(tmp_path: Path) -> None:
    _, memory, _ = run(tmp_path, 100, rounds=100)
    assert memory[100] - memory[10] < 4 * 2**20  # 9,000 asks with answers of 2.7 kB
