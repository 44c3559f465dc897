"""A page under pseudonyms has no name of a site or a client, wherever the files of the run have it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens import Experiment
from fedlens.core.wire.census import CountedClient, SiteCensus
from fedlens.data.partition.roster import Roster
from fedlens.results.pseudonyms import PseudonymRun
from fedlens.run.rundir import RunDir
from tests.unit.cli.commands import ran, refused
from tests.unit.engines.loopback import Site
from tests.unit.server.serve_kit import Wards, _OneRow, write_experiment

NAMES = ("bonn", "bonn-eye", "celle")


def in_page(path: Path) -> list[str]:
    """The names in the text of a page, its scripts, data and attributes included."""
    return [name for name in NAMES if name in path.read_text().lower()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run over three sites, of which one fails; its notes and its command name sites."""
    wards = Wards(tmp_path_factory.mktemp("wards"), names=NAMES)
    write_experiment(wards.experiment, wards.made, rounds=1, record={"clients": True})
    ward = wards.sites["celle"]
    ward.site = Site("celle", wards.made.program, _OneRow(2), ward.keys.identity(), takes=lambda op: None)  # type: ignore[arg-type]
    with wards.at_work():
        run = RunDir(wards.serve().directory)
    summary, environment = run.read_summary() or {}, run.read_environment() or {}
    sentence = {"since": 1, "until": 1, "sentence": "the site 'bonn-eye' and bonn's", "try": "revoke celle"}
    run.write_summary({**summary, "warnings": [sentence], "notes": ["bonn was away"]})
    run.write_environment({**environment, "command": ["fedlens", "serve", "--out", "runs/celle/bonn-eye.1"]})
    return run


def test_no_name_of_a_site_is_in_the_page(run: RunDir) -> None:
    assert in_page(Path(ran("report", run.path).strip())) == list(NAMES)
    page = Path(ran("report", run.path, "--pseudonyms").strip())
    assert page == run.path / "report-pseudonyms.html"
    assert in_page(page) == []
    kept = json.loads(run.pseudonyms_path.read_text())
    assert kept.keys() == set(NAMES)
    assert sorted(kept.values()) == ["site 1", "site 2", "site 3"]
    text = page.read_text()
    assert all(text.count(name) > 2 for name in kept.values())
    assert f"the site &#39;{kept['bonn-eye']}&#39; and {kept['bonn']}&#39;s" in text
    assert re.search(rf"{kept['celle']}.{{0,80}}the site gives no reply", text, re.DOTALL)
    assert run.pseudonyms_path.stat().st_mode & 0o777 == 0o600
    before = page.read_bytes()
    ran("report", run.path, "--pseudonyms")
    assert page.read_bytes() == before  # the numbers stay


def test_clients_are_counted_within_their_site(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"a": {"a/x": 1, "a/y": 2, "a/z": 3}, "b": {"b": 4}}
    censuses = [
        SiteCensus(site, [CountedClient(*each) for each in own.items()]) for site, own in sizes.items()
    ]
    Roster.of(censuses).save(tmp_path / "roster.json")
    orders = set()
    for _ in range(40):
        run = PseudonymRun(tmp_path)
        hidden, names = run.partition, run.pseudonyms
        for name, size in {**sizes["a"], **sizes["b"]}.items():
            assert hidden.examples[hidden.row(names[name])] == size
            assert hidden.sites[hidden.row(names[name])] == names[name[0]]
        assert {name.rpartition("/")[0] for name in names.values()} == {"", names["a"]}
        orders.add(tuple(np.asarray(hidden.examples).tolist()))
        run.pseudonyms_path.unlink()
    assert len(orders) > 1  # an order by name would tell the names


def test_names_are_found_in_any_case_and_not_inside_words(tmp_path: Path) -> None:
    names = ("test", "ward-c", "Straße")
    Roster.of([SiteCensus(name, [CountedClient(name, 1)]) for name in names]).save(tmp_path / "roster.json")
    run = PseudonymRun(tmp_path)
    test, ward, street = (run.pseudonyms[name] for name in names)
    note = "Test, WARD-C's and Ward-C/1 in Straße: test_accuracy, my_test, latest"
    RunDir(tmp_path).write_summary({"notes": [note]})
    hidden = f"{test}, {ward}'s and {ward}/1 in {street}: test_accuracy, my_test, latest"
    assert (run.read_summary() or {})["notes"] == [hidden]


def test_a_run_without_sites_is_a_sentence(tmp_path: Path) -> None:
    data = {"dataset": "digits", "partition": {"name": "iid", "clients": 2}}
    made = Experiment(rounds=1, model="linear", local={"steps": 1, "lr": 0.1}, data=data)
    directory = made.run(tmp_path / "run", report=False).directory
    assert "no sites of a federation" in refused("report", directory, "--pseudonyms")
