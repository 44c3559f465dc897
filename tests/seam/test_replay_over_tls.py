"""A served run with failures, a skipped round and a site that comes back with other data is repeated to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedlens.analyses.replay import replay
from fedlens.core.wire.message import Message
from tests.unit.engines.loopback import Site
from tests.unit.server.serve_kit import Wards, _OneRow, write_experiment

FAIL = {(1, "ward-b"), (2, "ward-a"), (2, "ward-b")}


@dataclass
class Failing(Site):
    """Answers that it failed where it is to fail."""

    def answer(self, ask: Message, blobs: Mapping[bytes, bytes]) -> tuple[Message, bytes]:
        if ask.fields.operation == "train" and (ask.fields.round, self.name) in FAIL:
            return self.sealed(ask, {"outcome": "failure", "reason": "memory"}, b"")
        return super().answer(ask, blobs)


def test_a_served_run_is_repeated_with_its_failures(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    for row, (name, site) in enumerate(wards.sites.items()):
        site.site = Failing(name, wards.made.program, _OneRow(row), site.keys.identity())  # type: ignore[arg-type]
    write_experiment(wards.experiment, wards.made, rounds=4, max_skipped=1, record={"clients": True})

    def interrupt(round: int) -> None:
        if round == 3:
            raise KeyboardInterrupt

    with wards.at_work():
        wards.progress.each_round = interrupt
        with pytest.raises(KeyboardInterrupt):
            wards.serve()
    wards.progress.each_round = lambda round: None
    other = wards.sites["ward-c"]
    client = other.census.clients[0]
    other.census = replace(other.census, clients=[replace(client, examples=client.examples + 1)])
    other.on_ask = lambda ask: False
    with wards.at_work():
        run = wards.serve().directory
    assert other.refused == ["examples"]
    lines = [json.loads(line) for line in (run / "participation.jsonl").read_text().splitlines()]
    assert [line["away"] for line in lines] == [[], [], [], [], ["ward-c"]]
    trained = [[client for exchange, _, client, _ in line["failed"] if exchange == 0] for line in lines[1:]]
    assert trained == [["ward-b"], ["ward-a", "ward-b"], [], []]
    found = replay(run, lambda built: wards.made.source)
    # The fourth is the measurement of the site that is away.
    assert str(found) == "same bits in 4 rounds, with 4 failed requests and 1 skipped round"
