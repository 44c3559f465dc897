"""Links that leave the data folder, loops, pipes and devices: named, and never opened."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlens.base.errors import DataError
from fedlens.data.formats.file_safety import LinkCheck
from fedlens.data.formats.folder_check import check_folder
from tests.unit.data.formats.boxed import instances, picture, write_coco, write_voc, write_yolo
from tests.unit.data.pictures import pixels, write

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes and links of POSIX")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of five images, beside a folder that is not part of the data."""
    write(tmp_path / "outside" / "secret.png", pixels(99))
    for at in range(10):
        write(tmp_path / "data" / ("cat", "dog")[at % 2] / f"{at}.png", pixels(at))
    return tmp_path / "data"


def told(folder: Path, format: str = "image-folder", **settings: object) -> list[str]:
    """Every finding, with the folder called DATA and what is beside it OUTSIDE."""
    check = check_folder(folder, format, settings)
    outside = str(folder.resolve().parent / "outside")
    return [str(f).replace(str(folder), "DATA").replace(outside, "OUTSIDE") for f in check.findings]


COPY = "copy the file or folder into the data folder, or remove the link."


def test_a_link_out_of_the_folder_is_named_and_not_followed(folder: Path) -> None:
    (folder / "cat" / "a.png").symlink_to("../../outside/secret.png")
    (folder / "dog" / "more").symlink_to(folder.parent / "outside")
    (folder / "emu").symlink_to("../outside")
    assert told(folder) == [
        f"DATA/cat/a.png: the link leads out of the data folder, to OUTSIDE/secret.png; {COPY}",
        f"DATA/dog/more: the link leads out of the data folder, to OUTSIDE; {COPY}",
        f"DATA/emu: the link leads out of the data folder, to OUTSIDE; {COPY}",
    ]
    facts = check_folder(folder, "image-folder").facts
    assert (facts["images"], list(facts["classes"])) == (10, ["cat", "dog"])


def test_a_link_within_the_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "cat" / "again.png").symlink_to("0.png")
    (folder / "emu").symlink_to("dog")
    assert told(folder) == []
    assert check_folder(folder, "image-folder").facts["classes"] == {"cat": 6, "dog": 5, "emu": 5}
    (tmp_path / "here").symlink_to(folder)
    assert check_folder(tmp_path / "here", "image-folder").facts["images"] == 16


def test_loops_are_named(folder: Path) -> None:
    (folder / "cat" / "up").symlink_to("..")
    (folder / "dog" / "self").symlink_to("self")
    (folder / "a").symlink_to("cat")
    assert told(folder) == [
        "DATA/a/up: the link leads to a folder that it is in, a loop; remove the link.",
        "DATA/cat/up: the link leads to a folder that it is in, a loop; remove the link.",
        "DATA/dog/self: the link leads to itself; remove the link.",
    ]


def test_pipes_sockets_and_devices_are_named_and_not_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(folder / "cat" / "x.png")
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("cat/y.png")
        assert told(folder) == [
            "DATA/cat/x.png: it is a named pipe, not a file with data; remove it.",
            "DATA/cat/y.png: it is a socket, not a file with data; remove it.",
        ]
    (folder / "dog" / "zero.png").symlink_to("/dev/zero")
    assert "DATA/dog/zero.png: the link leads out of the data folder, to /dev/zero; " in "\n".join(
        told(folder)
    )


@pytest.mark.parametrize("place", ["inside", "given"])
def test_a_table_that_is_a_pipe_or_a_link_out_is_refused(folder: Path, place: str) -> None:
    os.mkfifo(folder / "t.csv")
    assert told(folder, "csv", table=str(folder / "t.csv")) == [
        "DATA/t.csv: it is a named pipe, not a file with data; remove it."
    ]
    (folder / "t.csv").unlink()
    lines = "".join(f"{('cat', 'dog')[at % 2]}/{at}.png,{at % 2}\n" for at in range(10))
    (folder.parent / "outside" / "t.csv").write_text(f"path,label\n{lines}")
    if place == "inside":
        (folder / "t.csv").symlink_to("../outside/t.csv")
        (only,) = told(folder, "csv")
        assert only.startswith("DATA/t.csv: the link leads out of the data folder, to OUTSIDE/t.csv; ")
    else:  # outside of the folder, the user named it
        assert told(folder, "csv", table=str(folder.parent / "outside" / "t.csv")) == []


def outside_of(folder: Path, name: str) -> None:
    """Replaces a file by a link to the same file beside the folder."""
    target = folder.parent / "outside" / Path(name).name
    target.parent.mkdir(exist_ok=True)
    (folder / name).replace(target)
    (folder / name).symlink_to(target)


def a_pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


@pytest.mark.parametrize("break_it", [outside_of, a_pipe])
@pytest.mark.parametrize(
    ("format", "writer", "name"),
    [
        ("coco-json", write_coco, "train.json"),
        ("coco-json", write_coco, "images/a.png"),
        ("voc-xml", write_voc, "Annotations/a.xml"),
        ("voc-xml", write_voc, "JPEGImages/a.png"),
        ("voc-xml", write_voc, "ImageSets/Main/train.txt"),
        ("yolo-txt", write_yolo, "labels/train/a.txt"),
        ("yolo-txt", write_yolo, "images/train/a.png"),
        ("yolo-txt", write_yolo, "classes.txt"),
    ],
)
def test_images_and_annotations_of_boxes_are_read_only_from_the_folder(
    tmp_path: Path,
    format: str,
    writer: Callable[[Path], Path],
    name: str,
    break_it: Callable[[Path, str], None],
) -> None:
    data = writer(tmp_path / "data")
    break_it(data, name)
    settings = {"annotations": {"train": "train.json", "test": "test.json"}} if format == "coco-json" else {}
    findings = told(data, format, **settings)
    if (name, break_it) == ("ImageSets/Main/train.txt", a_pipe):
        assert findings  # it is no list then: the images that only it has are missing in the split
        return
    what = "it is a named pipe" if break_it is a_pipe else "the link leads out of the data folder"
    assert any(finding.startswith(f"DATA/{name}: {what}") for finding in findings), findings


def test_a_folder_of_images_that_is_a_link_out_is_named_once(tmp_path: Path) -> None:
    data = write_coco(tmp_path / "data")
    (data / "images").rename(tmp_path / "outside")
    (data / "images").symlink_to("../outside")
    named = [finding for finding in told(data, "coco-json") if "link" in finding]
    assert named == [f"DATA/images: the link leads out of the data folder, to OUTSIDE; {COPY}"]


def test_masks_are_read_only_from_the_folder(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for k in range(4):
        write(data / "images" / f"{k}.png", pixels(k))
        write(data / "masks" / f"{k}.png", pixels(k, channels=1) % 2)
    outside_of(data, "masks/0.png")
    a_pipe(data, "masks/1.png")
    findings = told(data, "mask-folder", classes=["a", "b"])
    assert f"DATA/masks/0.png: the link leads out of the data folder, to OUTSIDE/0.png; {COPY}" in findings
    assert "DATA/masks/1.png: it is a named pipe, not a file with data; remove it." in findings
    (data / "masks").rename(tmp_path / "outside" / "masks")
    (data / "masks").symlink_to(tmp_path / "outside" / "masks")
    findings = told(data, "mask-folder", classes=["a", "b"])
    assert f"DATA/masks: the link leads out of the data folder, to OUTSIDE/masks; {COPY}" in findings


def test_a_folder_beside_the_data_may_be_named_in_a_setting(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split, names in (("train", "ab"), ("test", "cd")):
        for name in names:
            picture(tmp_path / "pictures" / f"{name}.png", name)
        (tmp_path / "data" / f"{split}.json").write_text(json.dumps(instances(list(names))))
    assert told(tmp_path / "data", "coco-json", images="../pictures") == []


def test_a_name_that_begins_like_the_folder_is_outside(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "database").mkdir()
    (tmp_path / "data" / "x").symlink_to("../database")
    with pytest.raises(DataError, match="leads out of the data folder"):
        LinkCheck(tmp_path / "data").refuse_outside("x/a.png")
    LinkCheck(tmp_path / "data").refuse_outside("y/a.png")
