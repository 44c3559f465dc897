"""Datasets in Parquet files, in the layout that the Hugging Face hub publishes."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import ConfigError, RunFailed
from fedlens.data.datasets.mnist import fashion_mnist
from fedlens.data.formats.folder_check import check_folder, guess_format
from fedlens.data.formats.parquet import parquet
from tests.unit.data.formats.tables import LABEL, png, write_table
from tests.unit.data.pictures import pixels


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedlens" / "parquet"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Two shards of training images and one of test images, from two writers."""
    folder = tmp_path / "hub"
    for shard in range(2):
        name = f"data/train-0000{shard}-of-00002.parquet"
        write_table(folder / name, [0, 1, 1], first=3 * shard, writer=["w1", "w2", "w1"], age=[3, 4, 5])
    write_table(folder / "data/test-00000-of-00001.parquet", [1, 0], first=6, writer=["w1", "w2"], age=[6, 7])
    return folder


def read(folder: Path, **settings: Any) -> Any:
    return parquet(folder, False, 0, path=str(folder), **settings)


def findings(folder: Path, **settings: Any) -> list[str]:
    return [str(finding) for finding in check_folder(folder, "parquet", settings).findings]


def test_images_labels_splits_and_columns_are_those_of_the_files(hub: Path) -> None:
    data = read(hub, client_column="writer")
    assert data.classes == ("cat", "dog")
    assert data.train.targets.tolist() == [0, 1, 1, 0, 1, 1]
    assert data.test.targets.tolist() == [1, 0]
    images = np.stack([pixels(seed) for seed in range(6)]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(data.train.inputs.take(np.arange(6)), images)
    assert data.train.columns["client"].tolist() == ["w1", "w2", "w1"] * 2
    assert data.train.columns["age"].tolist() == [3, 4, 5, 3, 4, 5]


def test_columns_of_bytes_and_lists_are_left_out(tmp_path: Path) -> None:
    write_table(
        tmp_path / "train.parquet", [0, 1, 0], sound=[b"a"] * 3, embedding=[[1.0, 2.0]] * 3, age=[1, 2, 3]
    )
    assert list(read(tmp_path, test=0).train.columns) == ["age"]


def test_the_check_counts_and_guesses(hub: Path) -> None:
    assert guess_format(hub, {}).why == "data/test-00000-of-00001.parquet is a Parquet file"
    check = check_folder(hub, None, {"client_column": "writer"})
    assert check.findings == ()
    assert check.facts["classes"] == {"cat": 3, "dog": 5}
    assert check.facts["splits"] == {"test": 2, "train": 6}
    assert check.facts["clients"] == {"w1": 5, "w2": 3}
    assert check.dataset == {"name": "parquet", "path": str(hub), "client_column": "writer"}


def test_images_are_unpacked_once_and_again_when_a_file_changes(hub: Path, cache: Path) -> None:
    read(hub)
    (folder,) = cache.iterdir()
    first = folder / "data/test-00000-of-00001.parquet/000000000.png"
    state = first.stat().st_mtime_ns
    read(hub)
    assert first.stat().st_mtime_ns == state
    write_table(
        hub / "data/test-00000-of-00001.parquet", [0, 0, 1], first=7, writer=["w1"] * 3, age=[1, 2, 3]
    )
    assert len(read(hub).test) == 3
    assert len(list(cache.iterdir())) == 2
    assert not [name for name in os.listdir(cache) if name.startswith(".")]


def test_a_shard_of_another_page_layout_and_files_without_metadata(tmp_path: Path) -> None:
    """`default/train/0000.parquet` is how the hub converts; older files have no names of classes, or have texts."""
    write_table(tmp_path / "default/train/0000.parquet", [1, 0, 1], features={})
    write_table(tmp_path / "default/validation/0000.parquet", [1, 0], first=3, features={})
    data = read(tmp_path)
    assert (data.classes, len(data.train), len(data.test)) == (("0", "1"), 3, 2)
    write_table(tmp_path / "texts/all.parquet", ["ox", "ant", "ox", "ant", "ox"], features={})
    data = read(tmp_path / "texts")
    assert (data.classes, len(data.train), len(data.test)) == (("ant", "ox"), 4, 1)


def test_equal_names_of_classes_are_told_apart(tmp_path: Path) -> None:
    names = {"names": ["crane", "ox", "crane"], "_type": "ClassLabel"}
    write_table(tmp_path / "a.parquet", [0, 1, 2, 0, 1, 2], features={"label": names})
    assert read(tmp_path, test=0).classes == ("crane (0)", "ox", "crane (2)")


def test_jpeg_and_the_turn_of_a_photograph_are_as_in_a_folder(tmp_path: Path) -> None:
    content, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(pixels(0, 16, 8)).save(content, "JPEG", exif=turned)
    write_table(tmp_path / "train.parquet", [0, 1], images=[content.getvalue(), png(1)])
    check = check_folder(tmp_path, "parquet")
    assert check.findings == ()
    assert check.facts["sizes"]["largest"] == [16, 8]


def test_rows_without_an_image_or_a_class_are_problems_of_their_rows(tmp_path: Path) -> None:
    write_table(
        tmp_path / "train-0.parquet",
        [0, 1, None, 7, 0, 1],
        images=[png(0), None, png(2), png(3), b"no image", png(4)],
    )
    write_table(tmp_path / "test-0.parquet", [0, 1], first=5)
    said = findings(tmp_path)
    assert [
        text.rpartition("/train-0.parquet/")[2].partition(";")[0].partition(" (")[0] for text in said
    ] == [
        "000000001.png: the file is empty",
        "000000002.png: the cell 'label' is empty",
        "000000003.png: there is no class '7'",
        "000000004.png: not a readable image",
    ]
    assert len(read(tmp_path, on_error="skip").train) == 2


def test_an_image_in_two_published_splits_is_a_warning(tmp_path: Path) -> None:
    write_table(tmp_path / "train-0.parquet", [0, 1])
    write_table(tmp_path / "test-0.parquet", [1, 0], first=1)
    check = check_folder(tmp_path, "parquet")
    assert check.findings == ()
    assert any("1 image is in more than one split, a leak" in str(warning) for warning in check.warnings)


@pytest.mark.parametrize(
    ("columns", "features", "settings", "sentence"),
    [
        ({}, {"image": {"_type": "Audio"}}, {}, "no column has images; an image is a struct with a field bytes"),
        ({}, {}, {"image_column": "img"}, "there is no column 'img' of images, which data.dataset.image_column"),
        ({}, {}, {"label_column": "lable"}, "there is no column 'lable' of classes"),
        ({}, {}, {"client_column": "wirter"}, "there is no column 'wirter'"),
    ],
)  # fmt: skip
def test_columns_that_are_not_there(
    tmp_path: Path, columns: Any, features: Any, settings: Any, sentence: str
) -> None:
    write_table(tmp_path / "train.parquet", [0, 1], features=features, writer=["a", "b"])
    try:
        said = findings(tmp_path, **settings)
    except ConfigError as error:
        said = [str(error)]
    assert any(sentence in text for text in said), said


def test_several_columns_ask_for_the_setting(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write_table(tmp_path / "train.parquet", [0, 1, 0, 1])
    table = pq.read_table(path)
    fine, coarse = (table.column("label").cast(pa.int64()) for _ in range(2))
    table = table.append_column("thumbnail", table.column("image")).drop_columns("label")
    table = table.append_column("fine", fine).append_column("coarse", coarse)
    metadata = f'{{"info": {{"features": {{"fine": {LABEL}, "coarse": {LABEL}}}}}}}'.replace("'", '"')
    pq.write_table(table.replace_schema_metadata({"huggingface": metadata}), path)
    assert findings(tmp_path, label_column="fine") == [
        f'{path}: 2 columns have images: image, thumbnail; set data.dataset.image_column = "image".'
    ]
    assert findings(tmp_path, image_column="image") == [
        f'{path}: 2 columns have classes: fine, coarse; set data.dataset.label_column = "fine".'
    ]
    data = read(tmp_path, label_column="coarse", image_column="thumbnail", test=0)
    assert data.train.targets.tolist() == [0, 1, 0, 1]
    assert data.train.columns["fine"].tolist() == ["cat", "dog", "cat", "dog"]


def test_files_that_do_not_fit_are_named(tmp_path: Path, hub: Path) -> None:
    write_table(hub / "data/extra-00000-of-00001.parquet", [0], first=9, writer=["w"], age=[1])
    assert any("names no split, as those of others do" in text for text in findings(hub))
    write_table(hub / "other/train-00000-of-00001.parquet", [0], first=9)
    assert "the columns differ from those of data/extra" in findings(hub)[0]
    (tmp_path / "bad").mkdir()
    assert "the folder has no Parquet file" in findings(tmp_path / "bad")[0]
    (tmp_path / "bad" / "train.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "train.parquet: not a readable Parquet file" in findings(tmp_path / "bad")[0]


@pytest.mark.parametrize("first", [True, False])
def test_a_damaged_page_is_named_with_its_file(hub: Path, cache: Path, first: bool) -> None:
    """Of the images, which the first check unpacks, or of the other columns."""
    file = hub / "data/test-00000-of-00001.parquet"
    content = bytearray(file.read_bytes())
    at = 4 if first else content.rfind(b"w2") - 40
    content[at : at + 30] = b"\xff" * 30
    file.write_bytes(content)
    assert "test-00000-of-00001.parquet: not a readable Parquet file" in findings(hub)[0]
    assert not list(cache.glob("*"))


def test_another_process_may_be_faster(hub: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(hub)
    (done,) = cache.iterdir()
    away = done.with_name("away")
    done.rename(away)

    def late(target: Path) -> Path:
        away.rename(target)
        return target.with_name(".late")

    monkeypatch.setattr("fedlens.data.formats.parquet.temporary_beside", late)
    assert len(read(hub).train) == 6
    assert list(cache.iterdir()) == [done]


def test_metadata_of_strangers_is_no_error(tmp_path: Path) -> None:
    for metadata in (
        "[1]",
        '{"info": 3}',
        '{"info": {"features": [1]}}',
        "{",
        '{"info": {"features": {"label": 1}}}',
    ):
        import pyarrow.parquet as pq

        path = write_table(tmp_path / "train.parquet", [0, 1, 0])
        table = pq.read_table(path).replace_schema_metadata({"huggingface": metadata})
        pq.write_table(table, path)
        assert read(tmp_path, test=0).classes == ("0", "1")


def test_without_pyarrow_and_without_a_cache(hub: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("in the way")
    with pytest.raises(
        RunFailed, match=r"the images of the Parquet files could not be written.*XDG_CACHE_HOME"
    ):
        read(hub)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"Parquet files need pyarrow.*pip install 'fedlens\[pandas\]'"):
        read(hub)


@pytest.mark.real
def test_real_images_are_read_as_their_own_reader_reads_them(tmp_path: Path, real_data: Path) -> None:
    own = fashion_mnist(real_data, False, 0)
    rows = np.arange(200)
    pictures = np.asarray(own.train.inputs[rows])
    contents = []
    for picture in pictures:
        content = io.BytesIO()
        Image.fromarray(picture[0]).save(content, "PNG")
        contents.append(content.getvalue())
    label = {"label": {"names": list(own.classes), "_type": "ClassLabel"}}
    labels = [int(target) for target in own.train.targets[rows]]
    write_table(tmp_path / "train-0.parquet", labels, images=contents, features=label)
    data = read(tmp_path, test=0, channels=1)
    assert data.classes == own.classes
    np.testing.assert_array_equal(data.train.inputs.take(rows), pictures)
    assert data.train.targets.tolist() == labels
