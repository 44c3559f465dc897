"""What all readers of published datasets share: finding files, downloads, and errors that name the file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.catalogue import CATALOGUE, Archive, DatasetFacts
from fedlens.data.dataset import Examples
from fedlens.data.datasets import dataset_files as module
from fedlens.data.datasets.dataset_files import damaged, locate, published, read_json, reading
from fedlens.data.download import Resource

FILES = (("a/1.txt", "a/2.txt|a/2.gz"), ("b/1.bin", "b/2.bin"))
URL = "https://example.org/data/"
ARCHIVES = (
    Archive((f"{URL}1.txt",), "0" * 32, folder="a", gives="a/1*"),
    Archive((f"{URL}2.zip",), "0" * 32, folder="a", take="2.*", gives="a/2*"),
)
FACTS = DatasetFacts(
    "x", "classification", "x", "ask the author", "X-Set", labels=("0", "1"), files=FILES, archives=ARCHIVES
)


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> DatasetFacts:
    monkeypatch.setitem(CATALOGUE, "x", FACTS)
    return FACTS


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


@pytest.mark.usefixtures("facts")
def test_the_first_complete_set_gives_a_path_for_each_pattern(tmp_path: Path) -> None:
    touch(tmp_path, "b/1.bin", "b/2.bin", "a/1.txt")
    assert locate("x", tmp_path) == (tmp_path / "b/1.bin", tmp_path / "b/2.bin")
    touch(tmp_path, "a/2.gz")
    assert locate("x", tmp_path) == (tmp_path / "a/1.txt", tmp_path / "a/2.gz")


@pytest.mark.usefixtures("facts")
def test_missing_files_are_an_error_that_says_what_and_where_and_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(DataError) as absent:
        locate("x", tmp_path)
    assert str(absent.value) == (
        f"X-Set not found in {tmp_path}: looked for a/1.txt, a/2.txt or a/2.gz, or b/1.bin, b/2.bin; "
        "run again with --download to fetch them, or put the files there; "
        "--data-dir or the environment variable FEDLENS_DATA names another folder to look in."
    )
    touch(tmp_path, "b/2.bin")
    with pytest.raises(DataError, match=r"^X-Set is incomplete in .*: missing b/1\.bin; run again"):
        locate("x", tmp_path)
    with pytest.raises(DataError, match=r"--download does not fetch it: ask the author; --data-dir"):
        locate("x", tmp_path, True, [("b/3.bin",)])


@pytest.mark.usefixtures("facts")
def test_a_download_fetches_the_archives_that_give_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(resource: Resource, folder: Path) -> Path:
        asked.append((resource.name, folder))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / resource.name
        if path.suffix == ".zip":
            with zipfile.ZipFile(path, "w") as packed:
                packed.writestr("2.gz", "x")
                packed.writestr("readme", "x")
        else:
            path.write_text("x")
        return path

    monkeypatch.setattr(module, "fetch", fetch)
    touch(tmp_path, "a/1.txt")
    locate("x", tmp_path, True)
    locate("x", tmp_path, True)
    assert asked == [("2.zip", tmp_path / "a")]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["1.txt", "2.gz"]
    locate("x", tmp_path, True, [("c/a/1.txt|a/3.txt", "a/1.txt"), ("a/1.txt", "a/2.gz")])
    assert len(asked) == 1
    whole = locate("x", tmp_path / "other", True)
    assert (len(asked), whole) == (3, (tmp_path / "other/a/1.txt", tmp_path / "other/a/2.gz"))


def test_every_archive_gives_a_file_that_its_dataset_needs() -> None:
    from fnmatch import fnmatchcase

    settings = {
        "*evaluation*",
        "*data_256*",
        "*val_256*",
        "*data_large*",
        "*val_large*",
        "benchmark_RELEASE/*",
    }
    for facts in CATALOGUE.values():
        patterns = [pattern for patterns in facts.files for pattern in patterns]
        for archive in facts.archives:
            assert len(archive.md5) == 32
            assert archive.gives in settings or any(fnmatchcase(one, archive.gives) for one in patterns)


@pytest.mark.usefixtures("facts")
def test_mean_and_deviation_are_stated_or_those_of_the_training_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grey = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
    split = Examples(grey, np.array([0, 1]))
    data = published("x", (split, split))
    assert (data.classes, data.mean, data.std) == (("0", "1"), (0.5,), (0.5,))
    same = Examples(np.zeros((2, 1, 1, 1), np.uint8), np.array([0, 1]))
    assert published("x", (same, same), ("a", "b")).std == (1.0,)
    assert published("mnist", (split, split)).mean == (0.1307,)
    text = Examples(np.zeros((2, 3), np.int16), np.array([0, 1]))
    assert published("x", (text, text)).mean == ()
    assert published("mnist", (split, split)).licence == CATALOGUE["mnist"].licence


@pytest.mark.parametrize(
    ("content", "what", "place"),
    [
        (b"{", "it is not valid JSON: Expecting property name", ", line 1, column 2"),
        (b'{"a": \xff}', "it is not in UTF-8: byte 6 cannot be decoded", ""),
        (b"[" * 200_000, "it is nested more than 200 levels deep", ""),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, content: bytes, what: str, place: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=what) as caught:
        read_json(path)
    assert caught.value.what.startswith("the file cannot be read: ")
    assert (caught.value.where, caught.value.hint) == (f"{path}{place}", module.DAMAGED)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_json(tmp_path / "none.json")


def test_other_errors_are_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(KeyError), reading(tmp_path):
        raise KeyError("a fault of the program")


@pytest.mark.parametrize(
    ("file", "fetched"),
    [
        ("FashionMNIST/raw/train-images-idx3-ubyte", True),
        ("cifar-10-batches-bin/test_batch.bin", True),
        ("places365/categories_places365.txt", True),
        ("benchmark_RELEASE/dataset/train.txt", True),
        ("federated_vision_datasets/gld23k/mini_gld_test.csv", True),
        ("coco/annotations/instances_train2017.json", False),
        ("BCCD/Annotations/a.xml", False),
        ("imagenet/words.txt", False),
        ("inaturalist-2017/train2017.json", False),
        ("google-landmarks-v2/train_clean.csv", False),
    ],
)
def test_only_what_download_fetches_is_to_be_downloaded_again(file: str, fetched: bool) -> None:
    more = ", for example with --download" if fetched else ""
    assert damaged("x", Path("data", file)).hint == module.DAMAGED + more


def test_a_folder_is_not_called_a_damaged_file(tmp_path: Path) -> None:
    hint = "the folder is not the published one: remove it and download it again"
    assert damaged("x", tmp_path).hint == hint
    assert damaged("x", tmp_path, hint="unpack it").hint == "unpack it"


@pytest.mark.usefixtures("facts")
def test_a_download_that_lacks_a_file_does_not_ask_for_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "provide", lambda archive, folder: None)
    with pytest.raises(DataError, match="the downloaded archives do not have them: put the files") as caught:
        locate("x", tmp_path, True)
    assert "--download" not in str(caught.value)
