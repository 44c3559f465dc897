"""The table `data.parties`: what it accepts, what it refuses, and which algorithms may use it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fedlens.algorithms.registry import ALGORITHMS, refuse_other_data
from fedlens.api import Experiment
from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.data.vertical.feature_partition import FeaturePartition, load_partition
from fedlens.data.vertical.vertical_datasets import VerticalDatasets
from fedlens.pages.compare import compare
from fedlens.run.build import Built, build
from fedlens.run.run_description import check_same_data, data_digest, describe
from fedlens.run.rundir import RunDir
from fedlens.run.session import Session
from fedlens.settings.config import Config, plain, read_config
from fedlens.settings.config_source import Source, override, read_source
from fedlens.settings.plan import plan
from fedlens.studies.study_data import run_partition
from tests.unit.data.pictures import pixels, write
from tests.unit.data.vertical.tables import write_parties
from tests.unit.results.fake_run import make_run
from tools.reproduce_table import trained_images

PARTIES: dict[str, Any] = {"split": "quadrants", "overlap": 0.5, "labels_at": 3}


def settings(**data: Any) -> dict[str, Any]:
    dataset = {"name": "synthetic", "train": 60, "test": 20, "shape": [1, 4, 4]}
    given = {"dataset": dataset, "parties": PARTIES, **data}
    return {"rounds": 1, "model": "linear", "local": {"lr": 0.1}, "data": given}


@pytest.fixture
def fedavg_on_parties(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = dataclasses.replace(ALGORITHMS.entries["fedavg"], on_parties=True)
    monkeypatch.setitem(ALGORITHMS.entries, "fedavg", entry)


def built(*changes: str, session: Session | None = None) -> Built:
    source = override(Source(settings()), changes)
    return build(
        plan(read_config(source.values, source.locate), source), Path("nowhere"), False, session=session
    )


def test_the_table_takes_the_place_of_the_partition() -> None:
    config = read_config(settings())
    assert config.data.partition is None
    assert config.data.parties is not None
    assert config.data.parties.model_dump() == {**PARTIES, "files": None, "align": "psi"}
    written = plain(config)
    assert "partition" not in written["data"]
    assert Config.model_validate(written) == config == Config.model_validate(config.model_dump())


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({"partition": "iid"}, "[data.parties] takes the place of data.partition: leave one of them out"),
        (
            {"parties": {**PARTIES, "overlap": 0}},
            "'overlap' is 0, but must be greater than 0 (data.parties.overlap)",
        ),
        ({"parties": {**PARTIES, "overlap": 1.5}}, "'overlap' is 1.5, but must be at most 1"),
        (
            {"parties": {**PARTIES, "labels_at": 4}},
            "'labels_at' is 4, but must be at most 3, the last of 4 parties",
        ),
        ({"parties": {**PARTIES, "labels_at": -1}}, "'labels_at' is -1, but must be at least 0"),
        (
            {"parties": {"split": "rows:1"}},
            "'rows:K' or 'columns:K', K being at least 2 (data.parties.split)",
        ),
        ({"parties": {"split": "halfs"}}, "'split' is 'halfs', but must be 'quadrants', 'halves'"),
        ({"parties": {}}, "[data.parties] needs either split or files"),
        ({"parties": {**PARTIES, "files": ["a.csv", "b.csv"]}}, "[data.parties] needs either split or files"),
        (
            {"parties": {"files": ["a.csv", "b.csv"]}},
            "which take the place of data.dataset: leave one of them out",
        ),
        ({"parties": {"files": ["a.csv"]}, "dataset": {"name": "party-files"}}, "'files' is ['a.csv'], but"),
        ({"parties": {"files": []}, "dataset": {"name": "party-files"}}, "'files' is [], but"),
        (
            {"parties": {"files": "a.csv"}, "dataset": {"name": "party-files"}},
            "'files' is 'a.csv', but must be a list",
        ),
        (
            {"parties": {"files": ["a.csv", "b.csv"], "overlap": 0.5}, "dataset": {"name": "party-files"}},
            "remove labels_at and overlap",
        ),
        ({"parties": "quadrants"}, "'parties' is 'quadrants', but must be a table"),
        ({"parties": {**PARTIES, "align": "hash"}}, "'align' is 'hash', but must be 'psi' or 'ids'"),
        ({"parties": {**PARTIES, "overlaps": 1}}, "unknown setting 'overlaps'"),
        ({"parties": None}, "the setting 'partition' is missing"),
        ({"augment": "pad-crop-flip"}, "has no use for data.augment, which is for clients with whole images"),
        ({"validation": 0.2, "validation_from": "client"}, "has no use for data.validation_from"),
        ({"reassign": True}, "has no use for data.reassign"),
        ({"prefetch": 4}, "has no use for data.prefetch"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(data: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(settings(**data))
    assert what in str(caught.value)


def test_tables_of_parties_are_the_dataset_and_are_found_beside_the_experiment(
    tmp_path: Path, fedavg_on_parties: None
) -> None:
    tables = write_parties(tmp_path / "data")
    text = 'rounds = 1\nmodel = "linear"\nlocal = {lr = 0.1}\n[data]\nparties = '
    (tmp_path / "own.toml").write_text(f'{text}{{files = ["data/grey.csv", "data/colour.csv"]}}')
    source = read_source(str(tmp_path / "own.toml"))
    made = build(plan(read_config(source.values, source.locate), source), Path("nowhere"), False)
    written = plain(made.config)["data"]
    assert written["dataset"] == {"name": "party-files", "files": list(tables)}
    assert written["parties"] == {"files": list(tables), "labels_at": 0, "overlap": 1.0, "align": "psi"}
    assert plain(Config.model_validate(plain(made.config))) == plain(made.config)
    facts = made.federation.parties
    assert facts is not None
    assert (facts.labels_at, facts.shapes, facts.names) == (1, ((1, 8, 8), (3, 6, 10)), ("grey", "colour"))
    assert made.federation.held["@test"] == 2
    before = data_digest(made)
    write(tmp_path / "data/grey/3.png", pixels(99, 8, 8, 1))
    again = build(plan(read_config(source.values, source.locate), source), Path("nowhere"), False)
    assert again.partition.digest == made.partition.digest
    assert data_digest(again) != before


def test_an_algorithm_is_for_parties_or_for_clients_with_whole_images() -> None:
    for name, entry in ALGORITHMS.entries.items():
        with pytest.raises(ConfigError) as caught:
            refuse_other_data(name, parties=not entry.on_parties)
        assert "data.partition" in str(caught.value)
        refuse_other_data(name, parties=entry.on_parties)
    with pytest.raises(ConfigError, match=r"'mine\.py:own' trains clients that hold whole images"):
        refuse_other_data("mine.py:own", parties=True)
    with pytest.raises(ConfigError, match="'fedavg' trains clients that hold whole images, not parties"):
        built()


def test_the_hint_names_the_algorithm_for_parties(fedavg_on_parties: None) -> None:
    with pytest.raises(
        ConfigError, match=r"set .*algorithm.name = 'fedavg'.* or data.partition in its place"
    ):
        refuse_other_data("fedprox", parties=True)
    with pytest.raises(
        ConfigError, match=r"'fedavg' trains parties .* set data.parties = \{split = 'quadrants'\}"
    ):
        refuse_other_data("fedavg", parties=False)


def test_a_run_reads_the_parties_and_tells_the_algorithm_of_them(fedavg_on_parties: None) -> None:
    made = built("seeds.partition=5")
    assert isinstance(made.source, VerticalDatasets)
    assert isinstance(made.partition, FeaturePartition)
    assert made.program.data is made.source
    assert made.federation.sizes.tolist() == made.partition.sizes().tolist() == [38, 38, 37, 37]
    facts = made.federation.parties
    assert facts is not None
    assert (facts.shapes, facts.labels_at, facts.align) == (((1, 2, 2),) * 4, 3, "psi")
    assert made.source.data_of(3).has_labels
    assert made.partition.digest == built("seeds.partition=5").partition.digest
    assert made.partition.digest != built("seeds.partition=6").partition.digest


def test_runs_of_a_session_share_parties_of_the_same_settings_alone(fedavg_on_parties: None) -> None:
    session = Session()
    first, same = built(session=session), built(session=session)
    other = built("data.parties.overlap=0.8", session=session)
    assert first.partition is same.partition
    assert first.partition.digest == built().partition.digest != other.partition.digest
    assert session.nbytes > 0


def test_what_needs_whole_images_or_clients_with_classes_is_refused(fedavg_on_parties: None) -> None:
    with pytest.raises(ConfigError, match="the features of whole images cannot be kept"):
        built("model.cache_features=true", "model.freeze=body")
    with pytest.raises(ConfigError, match="have no classes of their own to count"):
        run_partition(settings(), root=Path("nowhere"))


def test_the_cost_of_a_study_counts_the_images_that_all_parties_have() -> None:
    assert trained_images(read_config(settings(dataset="fashion-mnist"))) == 30_000


def test_an_experiment_shows_its_parties() -> None:
    assert "split=quadrants" in repr(Experiment(**settings(), algorithm="fedavg"))


def test_a_run_keeps_its_parties_and_a_picture_only_if_it_keeps_images(
    tmp_path: Path, fedavg_on_parties: None
) -> None:
    for images, count in ((True, 1), (False, 0)):
        made = built(f"record.images={str(images).lower()}")
        directory = RunDir.create(tmp_path / str(images), "run", None)
        describe(directory, made, Path("nowhere"))
        kept = load_partition(directory.partition_path)
        assert isinstance(kept, FeaturePartition)
        assert (kept.digest, len(kept.pictures)) == (made.partition.digest, count)
        environment = directory.read_environment()
        assert environment is not None
        check_same_data(directory, made, environment)
        with pytest.raises(RunDirectoryError, match="the data now give a different partition"):
            check_same_data(directory, built("data.parties.labels_at=1"), environment)


def test_runs_are_compared_by_their_parties(tmp_path: Path) -> None:
    runs = []
    for overlap in (0.5, 0.8):
        data = {"dataset": "digits", "parties": {**PARTIES, "overlap": overlap}}
        runs.append(make_run(tmp_path, run_id=str(overlap), algorithm="vertical", config={"data": data}))
    rows = compare(runs)
    assert sorted(row["partition"] for row in rows) == [
        "parties split=quadrants overlap=0.5 labels_at=3",
        "parties split=quadrants overlap=0.8 labels_at=3",
    ]
