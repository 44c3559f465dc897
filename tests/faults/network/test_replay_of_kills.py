"""A run over processes whose site is killed, is away for some rounds and returns: repeated in one place to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlens.analyses.replay import data_of_sites, replay
from tests.faults.network.real_federation import SITES, RealFederation, until

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("processes of a federation")]

ROUNDS = 60
ENGINE = {"name": "network", "min_sites": 2, "lost": 10.0, "patience": 600.0}


def test_a_run_with_a_killed_site_is_repeated(tmp_path: Path) -> None:
    """Whoever is lost for whichever reason on a slow machine is in the record, and so in the repetition."""
    more = {"rounds": ROUNDS, "max_skipped": ROUNDS, "engine": ENGINE, "record": {"clients": True}}
    federation = RealFederation(tmp_path, more)
    with federation.ending():
        federation.serve()
        for site in SITES:
            federation.start(site)
        until(lambda: federation.rounds() >= 3)
        federation.kill("ward-b")
        until(lambda: federation.rounds() >= 10)
        federation.start("ward-b")
        until(lambda: federation.code("server") is not None)
        assert federation.code("server") == 0, federation.said("server")
    lines = [json.loads(line) for line in (federation.run / "participation.jsonl").read_text().splitlines()]
    assert any("ward-b" in line["away"] for line in lines)
    assert any(client == "ward-b" for line in lines for _, _, client, _ in line["failed"])
    found = replay(federation.run, data_of_sites(federation.run, tmp_path))
    assert (found.rounds, found.difference) == (ROUNDS, None)
    assert found.failures > 0
