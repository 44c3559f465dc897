from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from PIL import Image
from typer.testing import CliRunner

from fedlens.base.registry import read_settings
from fedlens.cli.main import app
from fedlens.data.dataset import Dataset
from fedlens.data.formats.folder_check import check_folder
from fedlens.data.formats.registry import FORMATS
from fedlens.data.formats.scan import ImageSizes
from tests.unit.data.formats.boxed import write_coco, write_voc, write_yolo
from tests.unit.data.pictures import pixels, write


def chosen(sizes: dict[tuple[int, int], int], given: Any = None) -> tuple[Any, str | None]:
    """The setting and the note."""
    training = ImageSizes(sizes, {"RGB": sum(sizes.values())}).training(given, "crop")
    return training.setting, training.note


def test_the_default_is_the_most_frequent_size_and_the_note_says_what_changes_it() -> None:
    said = "images: 32x32, the most frequent size of the files"
    change = "set data.dataset.size to change it"
    assert chosen({(32, 32): 9, (600, 600): 8}) == (32, f"{said}; {change}")
    assert chosen({(32, 32): 9, (20, 32): 3}) == (
        32,
        f"{said}; 3 of 12 are smaller and are enlarged; {change}",
    )


def test_of_two_sizes_as_frequent_the_smaller_is_taken_whatever_their_order() -> None:
    for sizes in ({(32, 32): 5, (28, 28): 5}, {(28, 28): 5, (32, 32): 5}):
        assert chosen(sizes)[0] == 28
    assert chosen({(4, 2): 1, (2, 4): 1})[0] == [4, 2]


@pytest.mark.parametrize(
    ("size", "setting"),
    [
        ((224, 224), 224),
        ((225, 225), 224),
        ((640, 480), [168, 224]),
        ((480, 640), [224, 168]),
        ((224, 100), [100, 224]),
        ((5000, 2), [1, 224]),
    ],
)
def test_a_longer_side_is_reduced_to_224_and_the_other_in_proportion(
    size: tuple[int, int], setting: Any
) -> None:
    found, note = chosen({size: 3})
    assert found == setting
    assert note is not None
    assert ("reduced to 224" in note) == (max(size) > 224)


def test_where_no_size_is_frequent_the_medians_are_taken() -> None:
    sizes = {(at, 100 - at): 1 for at in range(20, 61)} | {(3, 3): 2}
    found, note = chosen(sizes)
    assert found == [59, 39]  # the lower medians of 43 heights and widths
    assert note is not None
    assert note.startswith(
        "images: 39x59 (width x height), the median width and height of the files, which have 42 "
    )


def test_a_given_size_is_noted_only_if_it_enlarges() -> None:
    assert chosen({(32, 32): 9}, 32) == (32, None)
    assert chosen({(32, 32): 9, (64, 64): 1}, [16, 32]) == ([16, 32], None)
    assert chosen({(32, 32): 9, (64, 64): 1}, 64) == (
        64,
        "images: enlarged to 64x64 by data.dataset.size: 9 of 10 are smaller; "
        "the most frequent size of the files is 32x32",
    )


def write_masks(folder: Path) -> None:
    for k in range(4):
        write(folder / "images" / f"{k}.png", pixels(k, 12, 16))
        write(folder / "masks" / f"{k}.png", pixels(k, 12, 16, channels=1) % 2)


def write_classes(folder: Path) -> None:
    for at in range(6):
        write(folder / "ab"[at % 2] / f"{at}.png", pixels(at, 12, 16))


def write_table(folder: Path) -> None:
    write_classes(folder)
    (folder / "t.csv").write_text(
        "path,label\n" + "".join(f"{'ab'[k % 2]}/{k}.png,{k % 2}\n" for k in range(6))
    )


@pytest.mark.parametrize(
    ("format", "writer", "settings"),
    [
        ("image-folder", write_classes, {}),
        ("csv", write_table, {"table": "t.csv"}),
        ("mask-folder", write_masks, {"classes": ["a", "b"]}),
        ("coco-json", write_coco, {}),
        ("voc-xml", write_voc, {}),
        ("yolo-txt", write_yolo, {}),
    ],
)
def test_every_format_keeps_the_size_of_its_images(
    tmp_path: Path, format: str, writer: Callable[[Path], object], settings: dict[str, Any]
) -> None:
    writer(tmp_path)
    factory = FORMATS[format].reader()
    read = read_settings(factory, {"path": str(tmp_path), **settings}, "")
    dataset: Dataset = factory(Path(), False, 0, **read)
    assert dataset.input_shape == (3, 12, 16)
    assert dataset.chosen == {"size": [12, 16]}
    note = "images: 16x12 (width x height), the most frequent size of the files; set data.dataset.size to change it"
    assert dataset.notes[0] == note
    again: Dataset = factory(Path(), False, 0, **{**read, "size": (12, 16)})
    assert again.chosen == {}
    assert not any(note.startswith("images: ") for note in again.notes)
    facts = check_folder(tmp_path, format, settings).facts
    assert facts["training"] == {
        "width": 16,
        "height": 12,
        "channels": 3,
        "why": "the most frequent size of the files",
        "enlarged": 0,
    }
    assert facts["sizes"]["different"] == 1


def test_a_photograph_counts_as_it_is_turned(tmp_path: Path) -> None:
    write_classes(tmp_path)
    tag = Image.Exif()
    tag[0x0112] = 6
    for path in sorted(tmp_path.rglob("*.png")):
        write(path.with_suffix(".jpg"), pixels(int(path.stem), 12, 16), exif=tag)
        path.unlink()
    assert check_folder(tmp_path, "image-folder").facts["sizes"]["most_frequent"] == [12, 16]


def test_the_check_has_the_range_and_the_colours(tmp_path: Path) -> None:
    write_classes(tmp_path)
    write(tmp_path / "a" / "grey.png", pixels(9, 2, 3, channels=1))
    write(tmp_path / "b" / "large.png", pixels(9, 40, 30))
    write(tmp_path / "b" / "gone.png", pixels(9, 99, 99)).write_bytes(b"")
    assert check_folder(tmp_path, "image-folder").facts["sizes"] == {
        "smallest": [3, 2],
        "largest": [30, 40],
        "most_frequent": [16, 12],
        "most_frequent_images": 6,
        "different": 3,
        "colours": {"grey (L)": 1, "colour (RGB)": 7},
    }


def test_a_run_says_the_size_first_writes_it_down_and_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "own")
    toml = {
        "name": "own",
        "rounds": 1,
        "data": {
            "dataset": {"name": "image-folder", "path": "own"},
            "partition": {"name": "iid", "clients": 2},
        },
        "model": {"name": "linear"},
        "local": {"lr": 0.1},
        "engine": {"name": "inline"},
    }
    Path("own.toml").write_text(tomli_w.dumps(toml))
    words = ["--no-report", "--out"]
    done = CliRunner().invoke(app, ["run", "own.toml", *words, "first"])
    assert done.exit_code == 0, done.output
    notes = [
        line for line in done.output.splitlines() if line.startswith("note: ") and "decoding" not in line
    ]
    assert notes[0].startswith("note: images: 16x12 (width x height), the most frequent size of the files;")
    assert tomllib.loads(Path("first/config.toml").read_text())["data"]["dataset"]["size"] == [12, 16]
    # Larger images that come later do not change a run that is repeated.
    for at in range(9):
        write(tmp_path / "own" / "ab"[at % 2] / f"large{at}.png", pixels(at, 20, 20))
    done = CliRunner().invoke(app, ["run", "first/config.toml", *words, "again"])
    assert done.exit_code == 0, done.output
    assert tomllib.loads(Path("again/config.toml").read_text())["data"]["dataset"]["size"] == [12, 16]
