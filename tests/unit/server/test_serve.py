"""A server runs an experiment at its sites, with the numbers of a simulation, and resumes it."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from fedlens import Experiment
from fedlens.base.errors import ConfigError, FedlensError, RunDirectoryError, RunFailed
from fedlens.core.wire.message import Message
from fedlens.data.partition.roster import Roster
from fedlens.files.chained_log import read_chained
from fedlens.files.lock import locked
from fedlens.run.rundir import RunDir
from fedlens.server import sockets
from fedlens.server.census_link import CensusLink
from fedlens.server.retention import ServedRuns
from fedlens.server.serve import Served, plan_at_sites, serve
from fedlens.server.serve_record import ServeRecord
from fedlens.settings.config_source import read_source
from tests.unit.identity.federation_kit import federation_in
from tests.unit.server.serve_kit import (
    NAMES,
    SIMULATED,
    Followed,
    Wards,
    events,
    write_experiment,
)

TIMES = ("seconds", "elapsed")


def lines(directory: Path) -> list[dict[str, Any]]:
    """The metrics without times, and without those of held-out examples in one place, which a server lacks."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in TIMES and not k.startswith("validation_")} for row in rows
    ]


def same_as_simulated(directory: Path, folder: Path) -> None:
    expected = Experiment(**SIMULATED).run(folder / "expected", report=False)
    assert lines(directory) == lines(expected.directory)
    one, other = (load_file(path / "model.safetensors") for path in (directory, expected.directory))
    assert all(torch.equal(one[leaf], other[leaf]) for leaf in other)


def test_a_served_run_is_that_of_a_simulation(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    ServedRuns(wards.federation.registry.folder).keep(90)
    with wards.at_work():
        result = wards.serve()
    same_as_simulated(result.directory, tmp_path)
    record = ServeRecord.read(RunDir(result.directory))
    assert record is not None
    assert record.keep_days == 90
    assert {name: site.outcome for name, site in wards.sites.items()} == dict.fromkeys(NAMES, "finished")
    assert [site.rows for site in wards.sites.values()] == [{name: row} for row, name in enumerate(NAMES)]
    kinds = [event["event"] for event in events(result.directory)]
    assert kinds.count("census") == 3
    assert kinds[-1] == "ended"
    assert "frozen" in kinds


def test_an_interrupted_run_is_resumed_by_the_same_command(tmp_path: Path) -> None:
    wards = Wards(tmp_path)

    def interrupt(round: int) -> None:
        if round == 2:
            raise KeyboardInterrupt

    with wards.at_work():
        wards.progress.each_round = interrupt
        with pytest.raises(KeyboardInterrupt):
            wards.serve()
        assert not any(site.outcome for site in wards.sites.values())
        wards.progress.each_round = lambda round: None
        result = wards.serve(bind=f"127.0.0.1:{wards.sites['ward-a'].keys.port}")
    same_as_simulated(result.directory, tmp_path)
    assert [site.attempts for site in wards.sites.values()] == [[1, 2]] * 3
    assert [e["outcome"] for e in events(result.directory) if e["event"] == "ended"] == [
        "interrupted",
        "finished",
    ]
    asked = [ask for site in wards.sites.values() for ask in site.asked]
    assert len({ask.fields.run for ask in asked}) == 1
    path = result.directory / "answers.jsonl"
    logged = list(read_chained(path))  # one chain over both starts
    assert {ask.fields.head for ask in asked} <= {bytes(32), *(head for _, head, _ in logged)}
    taken = {values["ask"] for values, _, _ in logged if values.get("decision") == "taken"}
    assert taken <= {ask.digest.hex() for ask in asked}
    assert len(taken) >= 3 * 6  # three rounds of three clients, each trained and measured
    assert sorted(v["of"] for v, _, _ in logged if v.get("kind") == "certificate") == ["server", *NAMES]
    assert path.stat().st_mode & 0o777 == 0o600
    assert {ask.fields.attempt for ask in asked} == {1, 2}


def test_a_server_killed_before_the_settings_starts_the_same_run_again(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    with wards.at_work():
        result = wards.serve()
    run = RunDir.open(result.directory)
    record = ServeRecord.read(run)
    assert record is not None
    # As a SIGKILL leaves it between the roster and the settings.
    kept = (run.serve_path, run.serve_log_path, run.answers_path, run.roster_path, run.environment_path)
    for path in run.path.iterdir():
        if path not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run.path / ".config.toml.0123456789abcdef.tmp").touch()
    roster = run.roster_path.read_bytes()
    for site in wards.sites.values():
        site.outcome = site.site = None
    with wards.at_work():
        again = wards.serve()
    assert run.roster_path.read_bytes() == roster
    after = ServeRecord.read(run)
    assert after is not None
    assert (after.run, after.attempt) == (record.run, 2)
    same_as_simulated(again.directory, tmp_path)


def test_a_server_killed_before_the_run_is_described_describes_it(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    with wards.at_work():
        result = wards.serve()
    run = RunDir.open(result.directory)
    kept = (run.serve_path, run.answers_path, run.roster_path, run.config_path)
    for path in run.path.iterdir():
        if path not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run.write_environment({})  # as it is until the data are described
    for site in wards.sites.values():
        site.outcome = site.site = None
    with wards.at_work():
        again = wards.serve()
    assert "data_sha256" in (run.read_environment() or {})
    same_as_simulated(again.directory, tmp_path)


def test_the_roster_is_on_the_disk_before_a_site_is_told_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wards = Wards(tmp_path)
    frozen: list[bool] = []
    freeze = CensusLink.freeze
    monkeypatch.setattr(
        CensusLink,
        "freeze",
        lambda self, roster: (
            frozen.append((tmp_path / "run" / "roster.json").exists()),
            freeze(self, roster),
        ),
    )
    with wards.at_work():
        wards.serve(changes=["rounds=1"])
    assert frozen == [True]


def test_the_unfinished_run_of_an_experiment_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wards = Wards(tmp_path)

    def interrupt(round: int) -> None:
        raise KeyboardInterrupt

    with wards.at_work():
        wards.progress.each_round = interrupt
        with pytest.raises(KeyboardInterrupt):
            wards.serve(out=None)
        wards.progress.each_round = lambda round: None
        first = wards.progress.directory
        assert first.parent == Path("runs/wards")
        result = wards.serve(out=None, bind=f"127.0.0.1:{wards.sites['ward-a'].keys.port}")
    assert Path(result.directory) == first


def test_a_site_that_changed_or_came_too_late_is_told_so(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    late = wards.sites["ward-c"]
    more = wards.sites["ward-b"]

    def interrupt(round: int) -> None:
        if round == 1:
            raise KeyboardInterrupt

    with wards.at_work("ward-a", "ward-b"):
        wards.progress.each_round = interrupt
        with pytest.raises(KeyboardInterrupt):
            wards.serve(sites=2)
    assert sorted(set(Roster.load(tmp_path / "run" / "roster.json").sites)) == ["ward-a", "ward-b"]
    wards.progress.each_round = lambda round: None
    client = more.census.clients[0]
    more.census = replace(more.census, clients=[replace(client, examples=client.examples + 1)])
    waits = {"min_sites": 2, "patience": 2.0, "max_share": 1.0, "name": "network"}
    write_experiment(wards.experiment, wards.made, engine=waits)
    with wards.at_work(), pytest.raises(RunDirectoryError, match="another experiment"):
        wards.serve()
    write_experiment(wards.experiment, wards.made)
    settings = (tmp_path / "run" / "config.toml").read_text()
    (tmp_path / "run" / "config.toml").write_text(settings.replace("patience = 60.0", "patience = 2.0"))
    with wards.at_work(), pytest.raises(RunFailed, match="1 of 2 sites are there"):
        wards.serve()
    assert late.refused[-1] == "roster"
    assert late.rows == {}
    assert more.refused == ["examples"]
    assert more.rows == {}
    assert not late.asked
    states = {row.name: (row.state, row.note) for row in wards.progress.rows}
    assert states["ward-b"] == ("refused", "examples")
    assert {site.outcome for site in wards.sites.values()} == {"stopped"}


def test_patience_ends_the_wait_for_sites(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    wards.sites["ward-c"].census = replace(wards.sites["ward-c"].census, contract="ab" * 32)
    waits = {"name": "network", "patience": 3.0, "max_share": 1.0}
    write_experiment(wards.experiment, wards.made, engine=waits, rounds=1)
    with wards.at_work():
        wards.serve()
    assert sorted(Roster.load(tmp_path / "run" / "roster.json").sites) == ["ward-a", "ward-b"]
    assert wards.sites["ward-c"].refused == ["contract", "contract"]
    assert wards.sites["ward-c"].outcome == "finished"  # with --once it would wait for ever
    with pytest.raises(
        RunFailed, match=r"0 of 3 accepted sites have answered, and the run needs 3: waited 0.1 s"
    ):
        wards.serve(changes=["engine.patience=0.1"], out=tmp_path / "other", sites=3)


def test_a_round_is_repeated_without_a_site_that_was_revoked_and_dropped(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    leaver, other = wards.sites["ward-a"], wards.sites["ward-b"]

    def answers(ask: Message) -> bool:
        """Once the other site has answered in round 2, it is revoked; this one never answers that ask."""
        if ask.fields.round == 2 and ask.fields.attempt == 1 and leaver.answered(2):
            wards.federation.registry.revoke("ward-a", drop=True)
            return False
        return True

    other.on_ask = answers
    with wards.at_work():
        result = wards.serve()
    record = ServeRecord.read(RunDir.open(result.directory))
    assert record is not None
    assert record.attempt == 2
    assert [e["round"] for e in events(result.directory) if e["event"] == "dropped"] == [2]
    clients = [json.loads(line) for line in (result.directory / "clients.jsonl").read_text().splitlines()]
    trained = {(row["round"], row["client"]) for row in clients if row.get("status", "ok") == "ok"}
    assert (1, "ward-a") in trained
    assert (2, "ward-a") not in trained
    assert (2, "ward-b") in trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"changes": ["local.lr=-1"]}, "local.lr"),
        ({"changes": ["local.lrr=1"]}, "lrr"),
        ({"federation": "nowhere"}, "nowhere"),
        ({"federation": "empty"}, "no site, and no open invitation"),
        ({"bind": "127.0.0.1"}, "write HOST:PORT"),
        ({"sites": 1}, "a round needs 2 sites, and 1 are to be enough"),
        ({"changes": ["aggregate.name='secagg'"]}, "evaluation.clients measures the model at each"),
    ],
)
def test_what_cannot_be_served_binds_no_port(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[object] = []
    monkeypatch.setattr(sockets, "listen", lambda *address: bound.append(address) or [])
    wards = Wards(tmp_path)
    (tmp_path / "other").mkdir()
    federation_in(tmp_path / "other")
    folders = {"nowhere": tmp_path / "nowhere", "empty": tmp_path / "other" / "hospitals"}
    how = {"changes": (), "bind": None, **options}
    federation = folders.get(how.pop("federation", ""), wards.federation.registry.folder)
    served = Served(str(wards.experiment), federation, out=tmp_path / "run", **how)
    with pytest.raises(FedlensError, match=message):
        serve(served, Followed())
    assert not bound
    assert not (tmp_path / "run").exists()


def test_secure_sums_need_test_images_before_a_port_is_bound(tmp_path: Path) -> None:
    changes = ["algorithm='fedavg'", "aggregate.name='secagg'", "evaluation.clients='none'"]
    source = read_source(str(Wards(tmp_path).experiment), changes)
    plan_at_sites(source)
    del source.values["data"]["dataset"]["test"]
    with pytest.raises(
        ConfigError, match=r"nothing measures the model.*evaluation.clients\); set data.dataset.test"
    ):
        plan_at_sites(source)


def test_a_directory_without_a_roster_is_free_for_other_settings(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    records = []
    for changes in (["engine.patience=0.01"], ["engine.patience=0.02"], ["engine.patience=0.02"]):
        with pytest.raises(RunFailed):
            wards.serve(changes=changes)
        records.append(ServeRecord.read(RunDir(tmp_path / "run")))
    first, second, third = records
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.run != second.run
    assert (second.run, second.attempt, third.attempt) == (third.run, 1, 2)
    file = tmp_path / "run" / "serve.json"
    file.write_text(file.read_text().replace('"attempt": 2', '"attempt": "2"'))
    with pytest.raises(RunDirectoryError, match="damaged"):
        wards.serve(changes=["engine.patience=0.02"])


def test_a_run_of_another_federation_is_not_resumed(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    with wards.at_work():
        wards.serve()
    record = ServeRecord.read(RunDir(tmp_path / "run"))
    assert record is not None
    replace(record, root="ab" * 32).started(RunDir(tmp_path / "run"))
    with pytest.raises(RunDirectoryError, match="another federation"):
        wards.serve()


def test_a_busy_port_and_a_run_in_use_are_refused(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at port {port} of 127.0.0.1"):
            wards.serve(bind=f"127.0.0.1:{port}")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run" / "serve.lock", "the run"), pytest.raises(RunDirectoryError, match="in use"):
        wards.serve()


def test_an_experiment_without_sites_is_for_another_command(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    wards.experiment.write_text(tomli_w.dumps(SIMULATED))
    with pytest.raises(ConfigError, match="not at sites"):
        wards.serve()
