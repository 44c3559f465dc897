"""The settings of secure sums: what is refused before a run, what it says at its start, and what memory it needs."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.aggregate.secure import secagg as module
from fedlens.aggregate.secure.keys import Attempt, Member, Transcript
from fedlens.aggregate.secure.secagg_server import Masked
from fedlens.api import Experiment
from fedlens.base.errors import ConfigError
from fedlens.core.random import Secrets
from fedlens.run.build import build
from fedlens.run.journal_file import JournalFile
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan
from tests.unit.aggregate.secure.secagg_kit import SumFederation, in_hex

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "model": "linear",
    "aggregate": {"name": "secagg"},
    "select": {"clients_per_round": 4},
    "local": {"lr": 0.1, "batch_size": 20},
    "engine": "inline",
    "data": {
        "dataset": {"name": "synthetic", "shape": [1, 8, 8], "train": 120, "test": 20},
        "partition": {"name": "iid", "clients": 10},
    },
}


HELD_OUT = {"validation": 0.2, "validation_from": "client"}


def built(**changes: Any) -> Any:
    settings = {**SETTINGS, **changes}
    return build(plan(read_config(settings), Source(settings)), Path(), download=False)


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        ({"select": {"clients_per_round": 2}}, "select", "needs 3 clients"),
        ({"select": {"name": "by-size", "method": "replacement", "clients_per_round": 4}}, "select", "one vector"),
        ({"aggregate": {"name": "secagg", "threshold": 0.5}}, "aggregate.threshold", "greater than 0.5"),
        ({"aggregate": {"name": "secagg", "threshold": 1.1}}, "aggregate.threshold", "at most 1"),
        ({"aggregate": {"name": "secagg", "bits": 47}}, "aggregate.bits", "46"),
        ({"aggregate": {"name": "secagg", "range": {"weights": 1.0}}}, "aggregate.range", "no such field"),
        ({"algorithm": {"name": "scaffold"}}, "aggregate.range", "clients also send the field 'variate'"),
        ({"evaluation": {"clients": "all"}, "data": SETTINGS["data"] | HELD_OUT}, "evaluation", "sum"),
        ({"record": {"clients": True}}, "record.clients", "sum"),
    ],
)  # fmt: skip
def test_it_is_refused_before_the_run(changes: dict[str, Any], where: str, said: str) -> None:
    if "select" in changes and changes["select"].get("name") == "by-size":
        changes = {**changes, "aggregate": {"name": "secagg", "weighting": "uniform"}}
    with pytest.raises(ConfigError) as refused:
        built(**changes)
    assert (refused.value.where or "").startswith(where)
    assert said in str(refused.value)


def test_the_package_that_it_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"need the package cryptography.*fedlens\[secure\]"):
        built()


@pytest.mark.parametrize(
    ("cohort", "threshold", "said"),
    [
        (
            3,
            0.51,
            "3 clients need 3 of them to the end, so none may drop out.*while at most one of the others works with it",
        ),
        (4, 0.51, "4 clients need 3 .* so 1 may drop out.*while at most one of the others works with it"),
        (10, 0.67, "10 clients need 7 .* so 3 may drop out.*while at most 3 of the others work with it"),
        (10, 0.51, "10 clients need 6 .* so 4 may drop out.*while at most one of the others works with it"),
        (5, 0.51, "5 clients need 3 .* so 2 may drop out.*while none of the others works with it"),
    ],
)
def test_the_start_says_how_many_may_drop_out_and_collude(cohort: int, threshold: float, said: str) -> None:
    table = {"name": "secagg", "threshold": threshold}
    (note,) = built(select={"clients_per_round": cohort}, aggregate=table).algorithm.notes
    assert re.search(said, note)


def test_the_summary_says_that_a_simulation_protects_nothing(tmp_path: Path) -> None:
    result = Experiment(**SETTINGS).run(tmp_path / "run", report=False)
    assert any(
        "derive from its seed, so its masks protect nothing" in line for line in result.summary["disclosures"]
    )
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "run" / "journal").iterdir()}
    assert modes == {0o600}


def test_no_file_of_a_run_has_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[Any, bytes] = {}

    def token(self: Secrets, name: str, length: int = 32) -> bytes:
        return drawn.setdefault((self.simulation, name), original(self, name, length))

    original = Secrets.token
    monkeypatch.setattr(Secrets, "token", token)
    Experiment(**SETTINGS).run(tmp_path / "run", report=False)
    secrets = [secret for (_, name), secret in drawn.items() if not name.endswith(("/nonce", "/gcm"))]
    assert len(secrets) == 2 * 4 * 5  # rounds, clients, and five each
    logs = JournalFile(tmp_path / "run" / "journal")
    kept = in_hex([logs.log_of(client) for client in range(10)])
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            kept += " " + path.read_bytes().hex()
    assert len(kept) > 10_000
    assert not any(secret.hex() in kept for secret in secrets)


def test_opening_a_sum_needs_one_more_vector() -> None:
    words, clients = 1_000_000, tuple(range(10))
    members = {k: Member(bytes([k]) * 32, bytes([k + 100]) * 32, bytes(16)) for k in clients}
    attempt = Attempt("run", 1, 1, bytes(16), clients, bytes(32), bytes(32))
    transcript = Transcript(SumFederation().terms, attempt, members)
    seeds = {k: bytes([k]) * 32 for k in clients}
    masked = Masked(transcript, seeds, clients, np.zeros(words, np.uint32))
    tracemalloc.start()
    total = masked.opened(seeds)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total.nbytes <= peak < 1.2 * total.nbytes
