"""A run over sites is repeated in one place, with everything that went wrong in it, to the bit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from fedlens import Experiment, resume
from fedlens.analyses.replay import replay
from fedlens.base.errors import RunDirectoryError
from fedlens.cli.main import app
from fedlens.core.engine_base import EngineBase
from fedlens.core.wire.census import CountedClient, SiteCensus
from fedlens.core.wire.message import Message
from fedlens.data.datasets.digits import digits
from fedlens.data.partition.roster import Roster
from fedlens.engines.network import NetworkEngine
from fedlens.run.build import Built, build
from fedlens.run.rundir import RunDir
from fedlens.server.serve_record import ServeRecord
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan_of
from fedlens.site.contract import site_part
from tests.seam.test_sites import SIMULATED, Sites, at_sites, form, simulated
from tests.unit.engines.loopback import LoopbackLink
from tests.unit.site.site_kit import RUN, opened, plan_at_server, write_images, write_site
from tests.unit.site.test_workplace import Connected
from tests.unit.site.test_workplace import at_sites as over_files


def what_goes_wrong(ask: Message) -> str | None:
    """Round 1 loses an answer, round 2 two of three, round 4 gets one too late, and one measurement is lost."""
    fields = ask.fields
    if fields.operation != "train":
        return "lost" if fields.round == 4 and fields.client == "s3" else None
    return {(1, 1): "lost", (2, 0): "forged", (2, 1): "lost", (4, 2): "late"}.get((fields.round, fields.slot))


def with_faults(sites: Sites, away: str = "") -> Callable[[EngineBase], Roster]:
    """Connects with the sites; that of `away` comes back when the next round is measured."""

    def connect(engine: EngineBase) -> Roster:
        roster = sites(engine)
        sites.link.away = {away} - {""}

        def fault(ask: Message) -> str | None:
            if ask.fields.operation != "train":
                sites.link.away = set()
            return what_goes_wrong(ask)

        sites.link.fault = fault
        return roster

    return connect


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def made() -> Built:
    return simulated()


@pytest.fixture(scope="module")
def run(made: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with lost and late answers, a skipped round and, after a restart, a site that is away."""
    path = tmp_path_factory.mktemp("sites") / "run"
    sites = Sites(made)
    few = {"name": "uniform", "clients_per_round": 3}
    settings = at_sites(made, rounds=5, max_skipped=1, record={"clients": True}, select=few)
    Experiment(**settings).run(path, connect=with_faults(sites), until=3)
    return resume(path, connect=with_faults(sites, "s1")).directory


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def edit(path: Path, round: int, **changes: Any) -> None:
    """Changes a line of a file of the run."""
    rows = [line | (changes if line["round"] == round else {}) for line in lines(path)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_bits_are_those_of_the_run(made: Built, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found = replay(run, lambda built: made.source)
    assert str(found) == "same bits in 5 rounds, with 5 failed requests and 1 skipped round"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_record_names_who_was_away_and_what_failed(run: Path) -> None:
    record = lines(run / "participation.jsonl")
    assert [line["round"] for line in record] == list(range(6))
    assert [line["away"] for line in record] == [[], [], [], [], ["s1"], []]
    failed = [[(exchange, slot) for exchange, slot, *_ in line["failed"]] for line in record]
    assert failed == [[], [(0, 1)], [(0, 0), (0, 1)], [], [(0, 2), (2, 3)], []]
    assert record[4]["failed"][1][2:] == ["s3", "the deadline passed"]
    assert record[2]["model"] == record[1]["model"] != record[3]["model"]
    assert "skipped" in lines(run / "metrics.jsonl")[2]


@pytest.mark.parametrize(
    ("round", "changes", "found"),
    [
        (1, {"failed": []}, "in round 1: "),  # the client replies this time
        (4, {"away": []}, "in round 4: "),  # other clients are drawn
        (2, {"failed": []}, "in round 2: "),  # the round is not skipped
        (3, {"model": "0" * 64}, "in round 3: model is "),
    ],
)
def test_another_record_is_another_run(
    made: Built, copy: Path, round: int, changes: dict[str, Any], found: str
) -> None:
    edit(copy / "participation.jsonl", round, **changes)
    difference = replay(copy, lambda built: made.source).difference
    assert difference is not None
    assert f"the first difference is {found}" in difference


def test_edited_numbers_are_named(made: Built, copy: Path) -> None:
    with (copy / "clients.jsonl").open("a") as file:
        file.write('{"round": 5, "client": "s9"}\n')
    assert "in round 5: it has 7 lines of clients, and had 8" in str(replay(copy, lambda built: made.source))
    edit(copy / "metrics.jsonl", 3, test_accuracy=2.0)
    assert "in round 3: test_accuracy is 0." in str(replay(copy, lambda built: made.source))
    edit(copy / "clients.jsonl", 1, examples=-1)
    assert "in round 1: examples of client 's" in str(replay(copy, lambda built: made.source))


def test_another_model_file_is_found(made: Built, copy: Path) -> None:
    model = load_file(copy / "model.safetensors")
    leaf = next(iter(model))
    save_file({**model, leaf: torch.nextafter(model[leaf], model[leaf] + 1)}, copy / "model.safetensors")
    assert "model.safetensors holds another model" in str(replay(copy, lambda built: made.source))


def test_other_data_are_other_bits(made: Built, run: Path) -> None:
    other = build(plan_of(Source({**SIMULATED, "seed": 4})), Path(), download=False)
    assert "the first difference is in round 0" in str(replay(run, lambda built: other.source))


def test_a_run_in_one_place_is_refused(tmp_path: Path) -> None:
    Experiment(**{**SIMULATED, "rounds": 1}).run(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="does not record who took part"):
        replay(tmp_path / "run", lambda built: built.source)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run over the files of two sites, which miss a round, and the folders of the sites."""
    root = tmp_path_factory.mktemp("served")
    train = digits(Path(), False, 0).train
    folders = {site: root / "sites" / site for site in ("a", "b")}
    for first, (site, folder) in enumerate(folders.items()):
        write_images(
            folder / "scans", train.inputs[first:400:2, 0], [str(t) for t in train.targets[first:400:2]]
        )
        write_site(folder, {"exclude": "gone.txt"})
        (folder / "gone.txt").write_text("0003.png\n" if site == "b" else "")
    settings = over_files(algorithm="scaffold", max_skipped=1)
    planned = plan_at_server(settings)
    roster, places = opened(planned, folders)
    connected = Connected(roster, dict(zip(folders, places, strict=True)))

    def connect(engine: EngineBase) -> Roster:
        connected(engine)
        assert isinstance(engine, NetworkEngine)
        link = engine._attached().link
        assert isinstance(link, LoopbackLink)
        link.fault = lambda ask: "lost" if (ask.fields.round, ask.fields.exchange) == (1, 0) else None
        return roster

    run = Experiment(**settings).run(root / "run", connect=connect).directory
    ServeRecord(RUN, 0, "", "", site_part(planned.config)).started(RunDir(run))
    return run, root / "sites"


def command(run: Path, sites: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["replay", str(run), "--data", str(sites), *more])


def test_the_command_reads_the_folders_of_the_sites(served: tuple[Path, Path]) -> None:
    run, sites = served
    before = {path: path.read_bytes() for path in sites.rglob("*") if path.is_file()}
    found = command(run, sites)
    assert (found.exit_code, found.stdout) == (
        0,
        "same bits in 2 rounds, with 2 failed requests and 1 skipped round\n",
    )
    assert {path: path.read_bytes() for path in sites.rglob("*") if path.is_file()} == before
    told = json.loads(command(run, sites, "--json").stdout)
    assert told == {"same": True, "rounds": 2, "failures": 2, "skipped": 1, "difference": None}


def test_the_command_fails_for_other_labels(served: tuple[Path, Path], tmp_path: Path) -> None:
    run, sites = served
    shutil.copytree(sites, tmp_path / "sites")
    table = tmp_path / "sites/a/scans/scans.csv"
    table.write_text(re.sub(r",[17]\b", lambda label: {",1": ",7", ",7": ",1"}[label[0]], table.read_text()))
    found = command(run, tmp_path / "sites")
    assert found.exit_code == 1, found.output
    assert "the first difference is in round " in found.stdout


def test_a_site_without_a_folder_and_one_with_fewer_images_are_named(
    served: tuple[Path, Path], tmp_path: Path
) -> None:
    run, sites = served
    shutil.copytree(sites, tmp_path / "sites")
    shutil.rmtree(tmp_path / "sites/a/approved")  # which images the run counted
    (tmp_path / "sites/a/gone.txt").write_text("0000.png\n")
    found = command(run, tmp_path / "sites")
    assert found.exit_code == 2
    assert "the server counts other examples of 'a' than this site" in " ".join(found.output.split())
    (tmp_path / "sites/a").rename(tmp_path / "sites/c")
    found = command(run, tmp_path / "sites")
    assert found.exit_code == 2
    assert "site.toml" in found.output


def test_a_run_that_no_server_made_is_refused(run: Path, tmp_path: Path) -> None:
    found = command(run, tmp_path)
    assert found.exit_code == 2
    assert "no serve.json" in " ".join(found.output.split())


def test_a_private_run_does_not_record_who_took_part(tmp_path: Path) -> None:
    data = {key: SIMULATED["data"][key] for key in ("dataset", "partition")}
    whole = build(plan_of(Source({**SIMULATED, "data": data, "evaluation": {}})), Path(), download=False)
    sizes = enumerate(whole.partition.sizes().tolist())
    roster = Roster.of(SiteCensus(f"s{k}", [CountedClient(f"s{k}", size)]) for k, size in sizes)
    settings = at_sites(
        whole,
        rounds=1,
        algorithm="fedavg",
        data={"dataset": form(whole)},
        evaluation={},
        privacy={"clip": 0.1, "noise_multiplier": 4.0, "delta": 1e-3},
        select={"name": "uniform", "clients_per_round": 3},
    )
    path = Experiment(**settings).run(tmp_path / "run", connect=Sites(whole, roster)).directory
    assert (path / "private.jsonl").exists()
    assert not (path / "participation.jsonl").exists()
    with pytest.raises(RunDirectoryError, match="without"):
        replay(path, lambda built: whole.source)
