"""A run over sites whose server, site, or all of them are killed, also while they write: it ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.network.real_federation import SITES, RealFederation, until
from tests.faults.run_kit import outcome

pytestmark = pytest.mark.xdist_group("processes of a federation")  # one process forks those of all tests
ALL = ("server", *SITES)


def results(run: Path) -> dict[str, Any]:
    """What another run of the same must share. Handles of states differ, since they are made with keys of the sites."""
    return {name: value for name, value in outcome(run).items() if name != "state"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a run that nothing disturbs."""
    federation = RealFederation(tmp_path_factory.mktemp("undisturbed"))
    with federation.ending():
        federation.serve()
        for site in SITES:
            federation.start(site)
        assert not federation.finish()
    return results(federation.run)


def started(folder: Path, **calls: int) -> RealFederation:
    """A federation whose processes die at so many steps of writing."""
    federation = RealFederation(folder)
    federation.serve(call=calls.get("server"))
    for site in SITES:
        federation.start(site, call=calls.get(site.replace("-", "_")))
    return federation


def test_a_server_and_a_site_that_die_while_they_write_and_then_all_go_on(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    federation = started(tmp_path, server=25, ward_b=15)
    with federation.ending():
        kills = federation.finish(again=15)
    assert kills == {"server": 2, "ward-a": 1, "ward-b": 2, "ward-c": 1}
    assert results(federation.run) == undisturbed


@pytest.mark.nightly
@pytest.mark.parametrize("victims", [("server",), ("ward-b",), ALL], ids=["server", "site", "all"])
def test_a_run_goes_on_after_a_kill(
    tmp_path: Path, undisturbed: dict[str, Any], victims: tuple[str, ...]
) -> None:
    federation = started(tmp_path)
    with federation.ending():
        until(lambda: federation.rounds() >= 1)
        for name in victims:
            federation.kill(name)
        assert federation.finish().keys() == set(victims)
    assert results(federation.run) == undisturbed


@pytest.mark.nightly
@pytest.mark.parametrize("victims", [("server",), ("ward-b",), ALL], ids=["server", "site", "all"])
@pytest.mark.parametrize("call", [*range(3, 60, 6), 70, 90, 120])
def test_a_run_goes_on_after_a_kill_at_each_step_of_writing(
    tmp_path: Path, undisturbed: dict[str, Any], victims: tuple[str, ...], call: int
) -> None:
    federation = started(tmp_path, **{name.replace("-", "_"): call for name in victims})
    with federation.ending():
        federation.finish()
    assert results(federation.run) == undisturbed


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["server", "ward-b"])
def test_a_run_goes_on_after_a_full_disk(tmp_path: Path, undisturbed: dict[str, Any], victim: str) -> None:
    """No file of the victim can have the size of an answer, 444 kB, until it is started again."""
    federation = RealFederation(tmp_path)
    with federation.ending():
        for name in ALL:
            how = {"limit": 300_000} if name == victim else {}
            federation.serve(**how) if name == "server" else federation.start(name, **how)
        if victim == "server":
            until(lambda: "the server answers 507" in federation.said("ward-a"))
        else:
            until(lambda: federation.code("server") is not None)  # which misses one of three sites
            assert "round 1, train for ward-b: disk" in federation.said(victim)
        for name in ALL:
            federation.kill(name)
            federation.serve() if name == "server" else federation.start(name)
        federation.finish()
    assert results(federation.run) == undisturbed
