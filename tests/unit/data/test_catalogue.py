"""The records of all datasets, and whether their files are found."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

from fedlens.data.catalogue import CATALOGUE, DatasetFacts, presence
from fedlens.data.datasets.registry import DATASETS
from tests.unit.data.datasets import test_inaturalist, test_landmarks

MADE = {"digits", "fractals", "synthetic"}  # without files
# The datasets of the issue, and those that stood before.
NAMES = [
    "digits",
    "mnist",
    "fashion-mnist",
    "cifar10",
    "cifar100",
    "synthetic",
    "fractals",
    "emnist",
    "femnist",
    "omniglot",
    "tiny-imagenet",
    "inaturalist-2017",
    "inaturalist-user-120k",
    "inaturalist-geo-100",
    "inaturalist-geo-300",
    "inaturalist-geo-1k",
    "inaturalist-geo-3k",
    "inaturalist-geo-10k",
    "inaturalist-geo-30k",
    "landmarks-user-160k",
    "gld23k",
    "imagenet",
    "places365",
    "pascal-voc",
    "cityscapes",
    "camvid",
    "coco",
    "bccd",
    "shakespeare",
    "sent140",
    "penn-treebank",
    "image-folder",
    "mask-folder",
    "coco-json",
    "voc-xml",
    "yolo-txt",
    "parquet",
    "party-files",
    "sites",
]


def test_every_dataset_of_the_issue_has_a_record() -> None:
    assert sorted(CATALOGUE) == sorted(NAMES)
    assert all(name == record.name for name, record in CATALOGUE.items())


def test_the_registry_and_the_catalogue_have_the_same_names() -> None:
    assert set(CATALOGUE) == set(DATASETS)


@pytest.mark.parametrize("record", CATALOGUE.values(), ids=lambda record: record.name)
def test_a_record_is_in_order(record: DatasetFacts) -> None:
    assert record.task in ("classification", "segmentation", "detection", "language", "unlabelled")
    assert record.summary
    assert record.how
    assert not record.summary.endswith(".")
    for count in (record.train, record.test, record.classes, record.clients):
        assert count is None or count > 0
    assert record.clients is None or record.unit
    assert record.own or record.source
    assert record.own == (record.name in NAMES[-8:])
    assert bool(record.files) == (not record.own and record.name not in MADE)
    for pattern in [one for patterns in record.files for several in patterns for one in several.split("|")]:
        assert not Path(pattern).is_absolute()
        assert ".." not in pattern
        assert "**" not in pattern  # it would walk through millions of images


def test_the_numbers_are_the_published_ones() -> None:
    """hsu2020 section 4, TensorFlow Federated for the geographic populations, LEAF's page, the readme of the data."""
    counts = {
        name: (record.train, record.test, record.classes, record.clients)
        for name, record in CATALOGUE.items()
    }
    assert counts["inaturalist-2017"] == (579_184, 95_986, 5_089, None)
    assert counts["inaturalist-user-120k"] == (120_300, 35_641, 1_203, 9_275)
    geo = [counts[f"inaturalist-geo-{limit}"][3] for limit in ("100", "300", "1k", "3k", "10k", "30k")]
    assert geo == [3_607, 1_209, 369, 136, 39, 12]
    assert counts["landmarks-user-160k"] == (164_172, 19_526, 2_028, 1_262)
    assert counts["gld23k"] == (23_080, None, 203, 233)
    assert counts["fashion-mnist"] == counts["mnist"] == (60_000, 10_000, 10, None)
    assert counts["cifar10"][:3] == (50_000, 10_000, 10)
    assert counts["cifar100"][:3] == (50_000, 10_000, 100)
    assert counts["cityscapes"] == (2_975, 500, 19, 18)
    assert [counts[name][3] for name in ("femnist", "shakespeare", "sent140")] == [3_550, 1_129, 660_120]


def test_counts_and_terms_are_those_of_the_readers() -> None:
    told = {name: CATALOGUE[name].summary for name in ("femnist", "shakespeare", "sent140")}
    for name, count in (("femnist", "805,263"), ("shakespeare", "4.2 million"), ("sent140", "1,600,498")):
        assert count in told[name]
        assert count in " ".join((DATASETS.find(name).__doc__ or "").split())
    assert CATALOGUE["places365"].licence
    defaults = signature(DATASETS.find("synthetic")).parameters
    made = CATALOGUE["synthetic"]
    assert (made.train, made.test, made.classes) == tuple(
        defaults[name].default for name in ("train", "test", "classes")
    )


RECORD = DatasetFacts("x", "classification", "x", "x", files=(("a/*.bin", "b|c/d"), ("e/1", "e/2", "e/3")))


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def test_nothing_there(tmp_path: Path) -> None:
    found = presence(RECORD, tmp_path / "nowhere")
    assert (found.state, found.found, found.lacking) == ("absent", (), ("a/*.bin", "b|c/d"))


def test_one_whole_set_is_enough(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.bin", "e/1", "e/2", "e/3")
    found = presence(RECORD, tmp_path)
    assert (found.state, found.lacking) == ("here", ())
    assert found.found == (tmp_path / "e/1", tmp_path / "e/2", tmp_path / "e/3")


@pytest.mark.parametrize("name", ["b", "c/d"])
def test_one_of_several_patterns_is_enough(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "a/1.bin", name)
    assert presence(RECORD, tmp_path).found == (tmp_path / "a/1.bin", tmp_path / name)


def test_some_of_a_set_is_in_part(tmp_path: Path) -> None:
    touch(tmp_path, "e/1", "e/3")
    found = presence(RECORD, tmp_path)
    assert (found.state, found.lacking) == ("partly", ("e/2",))


def test_an_empty_folder_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "c" / "d").mkdir(parents=True)
    touch(tmp_path, "a/1.bin")
    assert presence(RECORD, tmp_path).state == "partly"
    touch(tmp_path, "c/d/file")
    assert presence(RECORD, tmp_path).state == "here"


def test_what_needs_no_files_is_said(tmp_path: Path) -> None:
    states = {name: presence(record, tmp_path).state for name, record in CATALOGUE.items()}
    assert {name for name, state in states.items() if state == "built in"} == MADE
    assert {name for name, state in states.items() if state == "your own"} == set(NAMES[-8:])
    assert all(states[name] == "absent" for name in NAMES[:-8] if name not in MADE)


def test_what_the_readers_read_is_found(tmp_path: Path) -> None:
    """The layouts that the tests of the readers write."""
    geo = [name for name in NAMES if name.startswith("inaturalist-")]
    test_inaturalist.write_metadata(tmp_path, inner="train_val2017")
    assert [presence(CATALOGUE[name], tmp_path).state for name in geo] == ["partly"] * 8
    test_inaturalist.write_images(tmp_path)
    assert [presence(CATALOGUE[name], tmp_path).state for name in geo] == ["here"] * 8
    lists = tmp_path / "lists"
    test_inaturalist.write_images(lists)
    test_inaturalist.write_lists(lists, "inaturalist-geo", "federated_train_geo_3k.csv")
    states = {name: presence(CATALOGUE[name], lists).state for name in geo}
    assert [name for name, state in states.items() if state == "here"] == ["inaturalist-geo-3k"]
    test_inaturalist.write_tff(lists)
    assert [presence(CATALOGUE[name], lists).state for name in geo] == ["partly", *["here"] * 7]
    for what in ("landmarks-user-160k", "gld23k"):
        test_landmarks.write_lists(tmp_path, what)
        assert presence(CATALOGUE[what], tmp_path).state == "partly"
    for number, layout in enumerate(("train/{0}/{1}/{2}/{id}.jpg", "images/{id}.jpg", "{id}.jpg")):
        root = tmp_path / f"layout{number}"
        test_landmarks.write_lists(root, "gld23k")
        test_landmarks.write_images(root, layout, test_landmarks.IDS)
        assert presence(CATALOGUE["gld23k"], root).state == "here"


def test_the_catalogue_imports_nothing_heavy() -> None:
    code = (
        "import sys; import fedlens.data.catalogue;"
        "raise SystemExit(any(name in sys.modules for name in ('numpy', 'torch', 'PIL', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
