from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import ConfigError
from fedlens.data.formats.folder_check import guess_format
from tests.unit.data.formats.boxed import write_coco, write_voc, write_yolo
from tests.unit.data.pictures import write


def write_masks(folder: Path) -> None:
    for kind in ("images", "masks"):
        write(folder / kind / "a.png", 1)


def write_classes(folder: Path) -> None:
    write(folder / "cat" / "a.png", 1)
    (folder / "cat" / "notes.txt").write_text("no labels")
    (folder / "settings.json").write_text('{"tool": 1}')


def write_table(folder: Path) -> None:
    write_classes(folder)
    (folder / "scans.csv").write_text("path,label\n")


@pytest.mark.parametrize(
    ("writer", "format", "why"),
    [
        (write_coco, "coco-json", "test.json has lists of images and annotations"),
        (write_voc, "voc-xml", "Annotations/a.xml annotates an image"),
        (write_yolo, "yolo-txt", "labels/test/c.txt is in a folder of labels"),
        (write_masks, "mask-folder", "it has the folders images and masks"),
        (write_classes, "image-folder", "it has images in folders, such as cat"),
        (write_table, "csv", "there is a table, scans.csv"),
    ],
)
def test_the_format_is_guessed_from_the_files_with_the_reason(
    tmp_path: Path, writer: Any, format: str, why: str
) -> None:
    writer(tmp_path)
    guess = guess_format(tmp_path, {})
    assert (guess.format, guess.why) == (format, why)
    (tmp_path / "clients.csv").write_text("path,client\n")  # describes the images of any format
    if format not in ("csv", "image-folder"):
        assert guess_format(tmp_path, {"table": "clients.csv"}) == guess


def test_labels_beside_their_images_are_those_of_yolo(tmp_path: Path) -> None:
    write(tmp_path / "a.png", 1)
    (tmp_path / "a.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    assert guess_format(tmp_path, {}).why == "a.txt has a box, and the name of an image"


def test_texts_beside_images_are_no_boxes(tmp_path: Path) -> None:
    write_classes(tmp_path)
    (tmp_path / "cat" / "a.txt").write_text("3 cats on a sofa")
    assert guess_format(tmp_path, {}).format == "image-folder"


def test_files_of_several_formats_are_one_sentence_with_the_candidates(tmp_path: Path) -> None:
    write_coco(tmp_path)
    write_yolo(tmp_path)
    with pytest.raises(ConfigError) as caught:
        guess_format(tmp_path, {})
    assert str(caught.value) == (
        "the format is not clear: coco-json (test.json has lists of images and annotations), "
        f"yolo-txt (labels/test/c.txt is in a folder of labels) ({tmp_path}); choose one, e.g. --format coco-json."
    )


def test_a_folder_without_images_has_no_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no format fits: there are no annotations, no table"):
        guess_format(tmp_path, {})
