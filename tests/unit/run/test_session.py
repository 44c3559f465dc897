"""Runs in a session share what they read, write the same files as without it, and notice files that change."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedlens
from fedlens import Experiment, resume
from fedlens.base.errors import ConfigError
from fedlens.data.dataset import Dataset
from fedlens.files.read_files import recorded_files, unchanged
from fedlens.run import session as session_module
from fedlens.run.session import Session
from tests.run_files import content

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 6}},
    "engine": "inline",
}
OTHER: dict[str, dict[str, Any]] = {
    "digits": {},
    "another seed": {"seed": 5},
    "another seed of the partition": {"seeds": {"partition": 7}},
    "another partition": {
        "data": {"dataset": "digits", "partition": {"name": "dirichlet", "alpha": 5.0, "clients": 6}}
    },
    "held out at clients": {
        "data": {**SETTINGS["data"], "validation": 0.2, "validation_from": "client"},
        "evaluation": {"clients": "all"},
    },
    "held out of all": {"data": {**SETTINGS["data"], "validation": 0.2}},
    "reassigned": {"data": {**SETTINGS["data"], "reassign": True}},
    "augmented": {"data": {**SETTINGS["data"], "augment": [{"name": "flip"}], "normalize": "unit"}},
    "seeded data": {
        "data": {"dataset": {"name": "synthetic", "train": 60, "test": 20}, "partition": SETTINGS["data"]["partition"]}
    },
}  # fmt: skip


def experiment(**more: Any) -> Experiment:
    return Experiment(**{**SETTINGS, **more})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of each dataset that is decoded in a session."""
    names: list[str] = []
    real = session_module.loaded

    def counted(dataset: Dataset, *rest: Any) -> Dataset:
        names.append(dataset.name)
        return real(dataset, *rest)

    monkeypatch.setattr(session_module, "loaded", counted)
    return names


def test_runs_in_a_session_write_the_files_of_runs_without_one(tmp_path: Path) -> None:
    session = Session()
    for at, more in enumerate(OTHER.values()):
        experiment(**more).run(tmp_path / f"alone{at}", report=False)
        for turn in range(2):  # the second takes all it can from the session
            experiment(**more).run(tmp_path / f"shared{at}{turn}", report=False, session=session)
            assert content(tmp_path / f"shared{at}{turn}") == content(tmp_path / f"alone{at}")


def test_a_run_resumed_in_a_session_is_that_of_an_unbroken_run(tmp_path: Path) -> None:
    session = Session()
    experiment().run(tmp_path / "whole", report=False)
    experiment().run(tmp_path / "broken", report=False, session=session, until=1)
    resume(tmp_path / "broken", report=False, session=session)
    names = ("metrics.jsonl", "summary.json", "environment.json", "model.safetensors", "partition.npz")
    whole, broken = content(tmp_path / "whole"), content(tmp_path / "broken")
    assert [whole[name] for name in names] == [broken[name] for name in names]


def test_data_are_read_once_for_all_seeds_and_again_where_they_depend_on_the_seed(
    tmp_path: Path, reads: list[str]
) -> None:
    session = Session()
    for seed in range(3):
        experiment(seed=seed).run(tmp_path / f"a{seed}", report=False, session=session)
    assert reads == ["digits"]
    for turn, seed in enumerate((0, 1, 0)):
        seeded = experiment(seed=seed, **OTHER["seeded data"])
        seeded.run(tmp_path / f"b{turn}", report=False, session=session)
    assert reads == ["digits", "synthetic", "synthetic"]
    assert len(session) == 3


def pictures(folder: Path, colour: int, number: int = 6) -> None:
    for start, split in ((0, "train"), (50, "test")):
        for k in range(number):
            path = folder / split / f"class{k % 2}" / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.RandomState(colour + start + k).randint(0, 255, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(path)


def test_images_that_change_during_a_session_are_read_again(tmp_path: Path, reads: list[str]) -> None:
    data = {
        "dataset": {"name": "image-folder", "path": str(tmp_path / "images"), "size": 8},
        "partition": {"name": "iid", "clients": 2},
    }
    session, digests = Session(), []
    pictures(tmp_path / "images", 0)
    for turn in range(6):
        if turn == 2:
            pictures(tmp_path / "images", 100)
        if turn == 4:
            pictures(tmp_path / "images", 100, number=8)
        run = experiment(data=data).run(tmp_path / f"run{turn}", report=False, session=session)
        environment = (run.directory / "environment.json").read_text(encoding="utf-8")
        digests.append(environment.partition("data_sha256")[2])
    assert len(reads) == 3
    assert [digests.index(digest) for digest in digests] == [0, 0, 2, 2, 4, 4]


def test_a_partition_from_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    session, file = Session(), tmp_path / "partition.npz"
    digests = []
    for turn, seed in enumerate((0, 0, 1)):
        drawn = experiment(seed=seed).run(tmp_path / f"source{turn}", report=False)
        file.write_bytes((drawn.directory / "partition.npz").read_bytes())
        data = {"dataset": "digits", "partition": {"name": "file", "path": str(file)}}
        run = experiment(data=data).run(tmp_path / f"run{turn}", report=False, session=session)
        digests.append(run.summary["partition"]["digest"])
        assert digests[-1] == drawn.summary["partition"]["digest"]
    assert digests[0] == digests[1] != digests[2]


def own(*, shade: int = 0) -> Dataset:
    CALLS.append(shade)
    images = np.full((12, 4, 4), shade, np.uint8)
    return fedlens.dataset(images, np.arange(12) % 2, images[:4], np.arange(4) % 2)


def own_seeded(seed: int) -> Dataset:
    CALLS.append(seed)
    images = np.random.RandomState(seed % 2**32).randint(0, 255, (12, 4, 4), np.uint8)
    return fedlens.dataset(images, np.arange(12) % 2, images[:4], np.arange(4) % 2)


CALLS: list[int] = []


def test_a_function_of_the_users_own_is_called_once_for_its_settings(tmp_path: Path) -> None:
    session = Session()
    CALLS.clear()
    for turn, (seed, shade) in enumerate([(0, 1), (1, 1), (0, 2), (0, 1)]):
        data = {"dataset": {"name": own, "shade": shade}, "partition": {"name": "iid", "clients": 2}}
        experiment(seed=seed, data=data).run(tmp_path / f"run{turn}", report=False, session=session)
    assert CALLS == [1, 2]


def test_a_function_that_takes_the_seed_is_called_for_each_seed(tmp_path: Path) -> None:
    session = Session()
    CALLS.clear()
    data = {"dataset": own_seeded, "partition": {"name": "iid", "clients": 2}}
    for turn, seed in enumerate((0, 1, 0, 1)):
        experiment(seed=seed, data=data).run(tmp_path / f"run{turn}", report=False, session=session)
    assert len(CALLS) == 2


def test_what_was_not_used_for_longest_is_dropped_beyond_the_memory(tmp_path: Path, reads: list[str]) -> None:
    def run(name: str, size: int, session: Session, seed: int = 0) -> None:
        dataset = {"name": "synthetic", "train": size, "test": 20}
        data = {"dataset": dataset, "partition": {"name": "iid", "clients": 2}}
        experiment(data=data, seeds={"data": 1, "partition": seed}).run(
            tmp_path / name, report=False, session=session
        )

    ample = Session()
    for at, size in enumerate((60, 80, 100)):
        run(f"a{at}", size, ample)
    tight = Session(memory=ample.nbytes - 1)
    for at, size in enumerate((60, 80, 60, 100, 60)):
        run(f"b{at}", size, tight)
        assert tight.nbytes <= tight.memory
    assert (len(ample), len(tight), len(reads)) == (3, 2, 6)  # 80 was dropped, 60 was not
    least = Session(memory=0)
    for at in range(3):
        run(f"c{at}", 60, least, seed=at)
    one = Session()
    run("d", 60, one)
    assert (len(least), least.nbytes) == (1, one.nbytes)  # the latest dataset with the latest partition


def test_a_negative_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory of a session is -1 bytes"):
        Session(memory=-1)


def test_files_that_are_read_in_a_block_are_recorded_and_files_written_are_not(tmp_path: Path) -> None:
    read, written, packed = tmp_path / "a", tmp_path / "b", tmp_path / "c.gz"
    read.write_bytes(b"1")
    with gzip.open(packed, "wb") as file:
        file.write(b"2")
    with recorded_files() as files:
        read.read_bytes()
        written.write_bytes(b"3")
        with gzip.open(packed) as file, recorded_files() as inner:
            file.read()
            list(tmp_path.iterdir())
        (tmp_path / "absent").exists()
    assert set(files) == {str(read), str(packed), str(tmp_path)}
    assert set(inner) == {str(tmp_path)}
    assert unchanged(files)
    (tmp_path / "new").touch()
    assert not unchanged(inner)


@pytest.mark.real
def test_the_published_images_are_read_once_in_a_session(
    tmp_path: Path, real_data: Path, reads: list[str]
) -> None:
    if not (real_data / "FashionMNIST" / "raw").is_dir():
        pytest.skip("no FashionMNIST/raw below FEDLENS_DATA")
    data = {**SETTINGS["data"], "dataset": "fashion-mnist"}
    settings = {
        "rounds": 1,
        "local": {"lr": 0.1, "steps": 1},
        "select": {"clients_per_round": 1},
        "data": data,
    }
    session = Session()
    experiment(**settings).run(tmp_path / "alone", report=False, data_dir=real_data)
    for turn in range(2):
        run = experiment(**settings).run(
            tmp_path / f"run{turn}", report=False, data_dir=real_data, session=session
        )
        assert content(run.directory) == content(tmp_path / "alone")
    assert reads == ["fashion-mnist"]
