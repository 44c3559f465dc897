"""A user's own data with everything in them that goes wrong: each fault is named, where it is, and what to do.

Every case goes three ways: `fedlens data check` lists it and exits with 1; `fedlens run` stops before it starts,
exits with 2 and leaves nothing; and where leaving out what is at fault would do, `on_error = "skip"` goes on and
says what it skipped.
"""

# ruff: noqa: E501 (a table of sentences as they are printed)

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import typer
from PIL import Image
from typer.testing import CliRunner

from fedlens.base.registry import read_settings
from fedlens.cli.data_check import check
from fedlens.cli.main import app
from fedlens.data.dataset import Dataset
from fedlens.data.formats.registry import FORMATS
from tests.unit.data.formats.boxed import (
    OBJECTS,
    SPLITS,
    instances,
    picture,
    write_coco,
    write_voc,
    write_yolo,
)
from tests.unit.data.pictures import pixels, write

data = typer.Typer()
data.command("check")(check)
data.command("other")(lambda: None)
runner = CliRunner()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything is seen from here, so that the data are called `own` in every sentence."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# The data before anything is broken: cat/0.png to cat/5.png, dog/0.png to dog/5.png; and what a table says of them.

OWN = Path("own")
NAMES = [f"{name}/{k}.png" for name in ("cat", "dog") for k in range(6)]


def folders() -> None:
    for at, name in enumerate(NAMES):
        write(OWN / name, pixels(at))


def row(at: int) -> dict[str, str]:
    return {
        "path": NAMES[at],
        "label": NAMES[at][:3],
        "client": ("mercy", "north")[at % 2],
        "split": "test" if at % 6 > 3 else "train",
    }


def table(*columns: str, **cells: Callable[[int], str]) -> list[str]:
    """The lines of a table with these columns; `cells` are those of columns that say something else."""
    lines = [",".join(columns)]
    for at in range(len(NAMES)):
        known = row(at)
        lines.append(",".join(cells[name](at) if name in cells else known[name] for name in columns))
    return lines


def write_table(lines: Iterable[str], encoding: str = "utf-8") -> None:
    (OWN / "table.csv").write_bytes(("\n".join(lines) + "\n").encode(encoding))


def at_line(number: int, text: str) -> Callable[[int], str]:
    """What a column says in one line of the table; elsewhere it goes on as it was."""
    return lambda at: text if at == number - 2 else row(at)["client"]


@dataclass(frozen=True)
class Case:
    """Something that is wrong: what writes it, in which format, and the whole of what has to be said of it."""

    name: str
    format: str
    write: Callable[[], object]
    said: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    skips: bool = True  # leaving out what is at fault would do
    lost: int = 1  # how many of the images go then

    def __str__(self) -> str:
        return self.name


def image(name: str, break_it: Callable[[Path], object], *said: str) -> Case:
    """One image of a folder of classes that is broken."""

    def build() -> None:
        folders()
        break_it(OWN / "cat" / "1.png")

    return Case(name, "image-folder", build, list(said))


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def as_jpeg(path: Path) -> Path:
    path.unlink()
    return write(path.with_suffix(".jpg"), pixels(0, 64, 64))


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.png")


def cmyk(path: Path) -> None:
    path.unlink()
    Image.fromarray(pixels(0)).convert("CMYK").save(path.with_suffix(".jpg"))


def deep(path: Path) -> None:
    write(path, pixels(0, channels=1).astype(np.uint16) * 256)


def animated(path: Path) -> None:
    path.unlink()
    frames = [Image.fromarray(pixels(seed)) for seed in range(3)]
    frames[0].save(path.with_suffix(".gif"), save_all=True, append_images=frames[1:])


def wrongly_named(path: Path) -> None:
    Image.fromarray(pixels(0)).save(path, format="JPEG")


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no image": (lambda path: path.write_bytes(bytes(range(200))), "own/cat/1.png: not a readable image; convert it to PNG or JPEG, or remove it."),
    "a link to nothing": (link, "own/cat/1.png: the file does not exist; check its name, upper and lower case too."),
    "a web page": (lambda path: path.write_text("<!doctype html>"), "own/cat/1.png: the file is a web page or other text, not an image; fetch or copy the image again."),
    "a PNG cut off": (cut, "own/cat/1.png: the image cannot be decoded: image file is truncated; copy or export it again."),
    "a JPEG cut off": (lambda path: cut(as_jpeg(path)), "own/cat/1.jpg: the image cannot be decoded: image file is truncated; copy or export it again."),
    "zero bytes": (lambda path: path.write_bytes(b""), "own/cat/1.png: the file is empty (0 bytes); copy or export it again."),
    "wrongly named": (wrongly_named, "own/cat/1.png: the file name ends in .png, and the file is a JPEG; rename it to end in .jpg."),
    "CMYK": (cmyk, "own/cat/1.jpg: the colours of the image are CMYK, for print; convert it to RGB."),
    "16 bits": (deep, "own/cat/1.png: the image has 16 bits per channel, and at most 8 are supported; convert it to 8 bits with the range of brightness that matters."),
    "animated": (animated, "own/cat/1.gif: the image has 3 frames; save one of them, as PNG."),
}  # fmt: skip


IMAGES = [image(name, break_it, said) for name, (break_it, said) in BREAKS.items()]


def csv(name: str, lines: Callable[[], list[str]], *said: str, **more: Any) -> Case:
    """A table of the images that is at fault."""
    encoding = more.pop("encoding", "utf-8")

    def build() -> None:
        folders()
        write_table(lines(), encoding)

    return Case(name, "csv", build, list(said), {"table": "table.csv"} | more.pop("settings", {}), **more)


def both(line: int, **changes: str) -> Callable[[], list[str]]:
    """The whole table, but for some cells of one line."""

    def lines() -> list[str]:
        told = {
            name: (lambda at, name=name: changes[name] if at == line - 2 else row(at)[name])
            for name in changes
        }
        return table("path", "label", "client", "split", **told)

    return lines


def places(at: int, *, lat: str = "52.5", line: int = 5) -> str:
    return lat if at == line - 2 else f"{40 + at}.5"


TABLES = [
    csv("a column is missing", lambda: ["file,label", *table("path", "label")[1:]],
        "own/table.csv, line 1: there is no column 'path'; did you mean 'file'? Rename it to 'path', or set data.dataset.path_column = \"file\".", skips=False),
    csv("an empty label", both(3, label=""), "own/table.csv, line 3: the cell 'label' is empty; write the class of the image."),
    csv("a label NaN", both(3, label="NaN"), "own/table.csv, line 3: the cell 'label' is 'NaN', which stands for a missing value; write the class of the image."),
    csv("a client NA", both(3, client="NA"), "own/table.csv, line 3: the cell 'client' is 'NA', which stands for a missing value; write the client of the image."),
    csv("an empty client", both(3, client=""), "own/table.csv, line 3: the cell 'client' is empty; write the client of the image."),
    csv("an empty path", lambda: [*both(2)(), ",cat,mercy,train"], "own/table.csv, line 14: the path is empty; write it as seen from own.", lost=0),
    csv("a cell too few", lambda: [*both(2)(), "cat/9.png,cat"], "own/table.csv, line 14: the line has 2 cells, and the first line has 4; quote cells that contain commas.", lost=0),
    csv("a file that does not exist", lambda: [*both(2)(), "cat/9.png,cat,mercy,train"], "own/table.csv, line 14: the file 'cat/9.png' does not exist; remove the line.", lost=0),
    csv("an image twice", lambda: [*both(2)(), "cat/1.png,dog,north,train"], "own/table.csv, line 14: 'cat/1.png' is in line 3 too, with other cells; remove one of the lines."),
    csv("no such split", both(4, split="trian"), "own/table.csv, line 4: there is no split 'trian'; write train, test or validation."),
    csv("another encoding", lambda: [*both(2)()[:-1], "dog/5.png,dog,Zürich,test"],
        "own/table.csv, line 13: the byte 0xfc is not UTF-8; the encoding is probably Windows-1252 (Latin-1); save it as UTF-8, in a spreadsheet or by: iconv -f WINDOWS-1252 -t UTF-8 table.csv > new.csv.", encoding="cp1252", skips=False),
    csv("UTF-16", both(2), "own/table.csv: the encoding of the table is UTF-16, but must be UTF-8; save it as UTF-8, in a spreadsheet or by: iconv -f UTF-16 -t UTF-8 table.csv > new.csv.", encoding="utf-16", skips=False),
    csv("one client", lambda: table("path", "label", "client", client=lambda at: "mercy"),
        "own: all 12 examples belong to one client, 'mercy'; take another column, level or pattern; without any of them, a partition makes the clients.", skips=False),
    csv("labels that skip numbers", lambda: table("path", "label", label=lambda at: str(2 * (at // 6))),
        'own/table.csv: the labels skip 1, and go up to 2; number them from 0 on, or take them as names: data.dataset.classes = ["0", "2"].', skips=False),
    csv("labels that are not whole", lambda: table("path", "label", label=lambda at: f"{at // 6}.0"),
        'own/table.csv: the labels are numbers, but not whole ones: 0.0, 1.0; number them from 0 on, or take them as names: data.dataset.classes = ["0.0", "1.0"].', skips=False),
    csv("a latitude off the sphere", lambda: table("path", "label", "lat", "lon", lat=lambda at: places(at, lat="95"), lon=lambda at: "13.4"),
        "own/table.csv, line 5: 'lat' is 95.0, which is not a coordinate in degrees; write degrees from -90 to 90."),
    csv("a latitude of another name", lambda: table("path", "label", "Latitude", "lng", Latitude=lambda at: places(at, lat="95"), lng=lambda at: "13.4"),
        "own/table.csv, line 5: 'Latitude' is 95.0, which is not a coordinate in degrees; write degrees from -90 to 90."),
    csv("a longitude that is missing", lambda: table("path", "label", "lat", "lon", lat=lambda at: "52.5", lon=lambda at: places(at, lat="")),
        "own/table.csv, line 5: 'lon' is missing; write degrees from -180 to 180."),
]  # fmt: skip


def leak() -> None:
    for split, names in (("train", NAMES[:3] + NAMES[6:9]), ("test", NAMES[3:6] + NAMES[9:])):
        for name in names:
            write(OWN / split / name, pixels(NAMES.index(name)))
    write(OWN / "test" / "cat" / "9.png", pixels(0))
    write(OWN / "test" / "dog" / "9.png", pixels(7))


def beside_a_split() -> None:
    for at, name in enumerate(NAMES):
        write(OWN / "train" / name, pixels(at))
    write(OWN / "extra" / "cat" / "0.png", pixels(20))


LEAKS = [
    Case("a folder beside a split", "image-folder", beside_a_split,
         ['own: the folder train has the name of a split, but extra not; move the others into a split, or elsewhere; or if all are classes, data.dataset.classes = ["extra", "train"].'], skips=False),
    Case("splits that overlap", "image-folder", leak,
         ["own: 2 images are in more than one split, a leak: 'train/cat/0.png' (train) is the same as 'test/cat/9.png' (test), 'train/dog/1.png' (train) is the same as 'test/dog/9.png' (test); keep each in one split only."], skips=False),
    Case("lists that overlap", "voc-xml", lambda: (write_voc(OWN), (OWN / "ImageSets/Main/test.txt").write_text("c\nd\na\n")),
         ["own: 1 image is in more than one split, a leak: 'JPEGImages/a.png' (train) is in test too; keep each in one split only."], skips=False),
]  # fmt: skip


def masks(change: Callable[[], object]) -> Callable[[], None]:
    def build() -> None:
        for k in range(6):
            write(OWN / "images" / f"{k}.png", pixels(k))
            write(OWN / "masks" / f"{k}.png", pixels(k, channels=1) % 2)
        change()

    return build


def three_ids() -> None:
    ids = np.zeros((8, 8), np.uint8)
    ids[0, :3], ids[1, 0], ids[7] = 2, 9, 255
    write(OWN / "masks" / "3.png", ids)


MASKS = [
    Case("a mask of another size", "mask-folder", masks(lambda: write(OWN / "masks" / "3.png", np.zeros((8, 6), np.uint8))),
         ["own/masks/3.png: the mask is 6x8, and its image 8x8 pixels; export one of them again."]),
    Case("ids that are no class", "mask-folder", masks(three_ids),
         ["own/masks/3.png: the mask has ids that are neither a class (0 .. 1) nor void (255): 2 in 3 pixels, 9 in 1 pixels; check data.dataset.classes, ids and void, or write the mask again."]),
    Case("a mask in colour", "mask-folder", masks(lambda: write(OWN / "masks" / "3.png", pixels(3))),
         ["own/masks/3.png: the mask is in colour (RGB), and needs one class id per pixel; write ids instead of colours, as a PNG with one channel of 8 bits."]),
    Case("a mask that is missing", "mask-folder", masks(lambda: (OWN / "masks" / "3.png").unlink()),
         ["own/images/3.png: the image has no mask 'masks/3.png'; add it, or remove the image."]),
]  # fmt: skip

# The same four faults in each format: outside, partly outside, no area, and a class that is not known.
# `d.png` is 16 x 12 pixels.
BAD = [("cat", (20, 2, 25, 5)), ("dog", (10, 2, 19, 5)), ("cat", (3, 2, 3, 5)), ("emu", (1, 2, 3, 5))]


def coco_boxes() -> None:
    write_coco(OWN)
    content = instances(SPLITS["test"], {**OBJECTS, "d": []})
    for at, (name, (left, top, right, bottom)) in enumerate(BAD):
        box, category = [left, top, right - left, bottom - top], {"cat": 3, "dog": 7, "emu": 9}[name]
        content["annotations"].append({"id": 200 + at, "image_id": 11, "category_id": category, "bbox": box})
    (OWN / "test.json").write_text(json.dumps(content))


def voc_boxes() -> None:
    write_voc(OWN, {**OBJECTS, "d": BAD})  # type: ignore[dict-item]


def yolo_boxes() -> None:
    write_yolo(OWN)
    lines = [
        f"{('cat', 'dog', 'emu').index(name)} {(left + right) / 32} {(top + bottom) / 24} {(right - left) / 16} {(bottom - top) / 12}"
        for name, (left, top, right, bottom) in BAD
    ]
    (OWN / "labels" / "test" / "d.txt").write_text("\n".join(lines))


def duplicate_ids() -> None:
    def change(content: dict[str, Any]) -> None:
        content["annotations"][1]["id"] = 100
        content["images"].append({"id": 10, "file_name": "e.png", "width": 16, "height": 12})

    write_coco(OWN, change)
    picture(OWN / "images" / "e.png", "e")


def renumber_duplicates(content: dict[str, Any]) -> None:
    content["categories"].append({"id": 3, "name": "emu"})


AGAIN, CORRECT = "draw it again, or remove the object", "correct it, or remove the object"
EDGE = "correct it, or skip errors to cut it off at the edge"
BOXES = [
    Case("COCO boxes", "coco-json", coco_boxes, [
        f"own/test.json, annotation 200: its box 20, 2, 5, 3 is outside the image of 16x12; {CORRECT}.",
        f"own/test.json, annotation 201: its box 10, 2, 9, 3 extends 3 pixels beyond the image of 16x12; {EDGE}.",
        f"own/test.json, annotation 202: its box 3, 2, 0, 3 has no area; {AGAIN}.",
        "own/test.json, annotation 203: its class 9 is unknown; known: 3, 7.",
    ]),
    Case("VOC boxes", "voc-xml", voc_boxes, [
        f"own/Annotations/d.xml, line 7: its box 21, 3, 25, 5 is outside the image of 16x12; {CORRECT}.",
        f"own/Annotations/d.xml, line 12: its box 11, 3, 19, 5 extends 3 pixels beyond the image of 16x12; {EDGE}.",
        f"own/Annotations/d.xml, line 17: its box 4, 3, 3, 5 has no area; {AGAIN}.",
        "own/Annotations/d.xml, line 22: its class 'emu' is unknown; known: cat, dog.",
    ], {"classes": ["cat", "dog"]}),
    Case("YOLO boxes", "yolo-txt", yolo_boxes, [
        f"own/labels/test/d.txt, line 1: its box 1.40625, 0.2916666666666667, 0.3125, 0.25 is outside the image of 16x12; {CORRECT}.",
        f"own/labels/test/d.txt, line 2: its box 0.90625, 0.2916666666666667, 0.5625, 0.25 extends 3 pixels beyond the image of 16x12; {EDGE}.",
        f"own/labels/test/d.txt, line 3: its box 0.1875, 0.2916666666666667, 0.0, 0.25 has no area; {AGAIN}.",
        "own/labels/test/d.txt, line 4: its class 2 is unknown; known: 0, 1.",
    ]),
    Case("ids that stand there twice", "coco-json", duplicate_ids, [
        "own/train.json, annotation 100: annotations number 1 and 2 both have this id; give each annotation its own id.",
        "own/train.json, image 10: a.png and e.png both have this id; give each image its own id.",
    ]),
    Case("classes with one id", "coco-json", lambda: write_coco(OWN, renumber_duplicates),
         ["own/train.json, category 3: cat and emu both have this id; give each category its own id."], skips=False),
    Case("no JSON", "coco-json", lambda: (write_coco(OWN), (OWN / "train.json").write_text("{\n  'images': []}")),
         ["own/train.json, line 2, column 3: the file is not valid JSON: expecting property name enclosed in double quotes; export the file again."], skips=False),
    Case("no XML", "voc-xml", lambda: (write_voc(OWN), (OWN / "Annotations/d.xml").write_text("<annotation>\n<object>\n")),
         ["own/Annotations/d.xml, line 3: the XML is invalid: Premature end of data in tag object line 2 (column 1); write the file again, in UTF-8."]),
    Case("no line of labels", "yolo-txt", lambda: (write_yolo(OWN), (OWN / "labels/test/d.txt").write_text("0 0.5 0.5 0.1\n0 0.5 0.5 0.1 0.1\n")),
         ["own/labels/test/d.txt, line 1: it has 4 values, and needs 5: class cx cy width height; correct the line, or remove it."]),
    Case("labels of boxes that skip numbers", "yolo-txt", lambda: (write_yolo(OWN), (OWN / "classes.txt").unlink(), (OWN / "labels/test/d.txt").write_text("3 0.5 0.5 0.1 0.1\n")),
         ["own: the labels skip 2, and go up to 3; number the classes from 0 on, or name them all with the setting classes, or in classes.txt."], skips=False),
]  # fmt: skip

CASES = [*IMAGES, *TABLES, *LEAKS, *MASKS, *BOXES]


def settings(case: Case, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"path": "own", "size": 8, **case.settings, **more}
    if case.format == "mask-folder":
        given["classes"] = ["ground", "tree"]
    return given


def plain(text: str) -> str:
    """What is said, without a number that depends on the library that decodes."""
    return re.sub(r" \([0-9]+ bytes not processed\)", "", text)


def run(case: Case, **more: Any) -> Any:
    """`fedlens run` of one round of a linear model on the data."""
    name = "image-folder" if case.format == "csv" else case.format
    toml = {
        "name": "own",
        "rounds": 1,
        "data": {
            "dataset": {"name": name, **settings(case, **more)},
            "partition": {"name": "iid", "clients": 2},
        },
        "model": {"name": "linear"},
        "local": {"lr": 0.1},
    }
    Path("own.toml").write_text(tomli_w.dumps(toml))
    return runner.invoke(app, ["run", "own.toml", "--out", "out"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_check_lists_it_with_its_place_and_what_to_do(case: Case) -> None:
    case.write()
    words = [
        word
        for name, value in settings(case).items()
        if name != "path"
        for word in ("--set", f"{name}={value}")
    ]
    answer = runner.invoke(data, ["check", "own", "--format", case.format, *words])
    assert answer.exit_code == 1, answer.output
    listed, _, summary = answer.stdout.partition("\n\n")
    assert sorted(plain(listed).splitlines()) == sorted(case.said)
    assert "problem" in summary.splitlines()[-1]
    assert ("the whole dataset and must be fixed first" in summary) == (not case.skips)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_stops_before_it_starts(case: Case) -> None:
    case.write()
    answer = run(case)
    assert answer.exit_code == 2, answer.output
    assert answer.stderr.startswith("error: ")
    assert "Traceback" not in answer.stderr
    for sentence in case.said:
        where, _, what = sentence.partition(": ")
        assert where in answer.stderr
        assert what.partition(";")[0].rstrip(".") in plain(answer.stderr)
    assert not Path("out").exists()


@pytest.mark.parametrize("case", [case for case in CASES if not case.skips], ids=str)
def test_what_is_wrong_with_the_whole_is_not_skipped(case: Case) -> None:
    case.write()
    answer = run(case, on_error="skip")
    assert answer.exit_code == 2, answer.output
    assert not Path("out").exists()


@pytest.mark.parametrize("case", [case for case in CASES if case.skips], ids=str)
def test_what_may_be_left_out_is_skipped_and_said(case: Case, here: Path) -> None:
    case.write()
    entry = FORMATS[case.format]
    chosen = read_settings(entry.reader(), settings(case, on_error="skip"), "")
    read: Dataset = entry.reader()(Path("."), False, 0, **chosen)
    skipped = [
        plain(note.removeprefix("skipped ").replace(f"{here}/", ""))
        for note in read.notes
        if note.startswith("skipped ")
    ]
    assert sorted(skipped) == sorted(case.said)
    assert len(read.train) > 0
    assert len(read.test) > 0
    if read.kind == "classification":
        assert len(read.train) + len(read.test) == len(NAMES) - case.lost


@pytest.mark.parametrize("name", ["zero bytes", "an empty client"])
def test_a_run_that_skips_goes_on_and_says_so(name: str, here: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    case.write()
    answer = run(case, on_error="skip")
    assert answer.exit_code == 0, answer.output
    assert f"skipped {here}/{case.said[0]}" in answer.output.replace("\n", " ").replace("  ", " ")
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["status"] == "finished"
    assert len((Path("out") / "metrics.jsonl").read_text().splitlines()) == 2


def test_several_faults_are_told_at_once() -> None:
    folders()
    said = []
    for at, name in enumerate(["no image", "a PNG cut off", "zero bytes", "CMYK", "16 bits"]):
        break_it, sentence = BREAKS[name]
        break_it(OWN / "cat" / f"{at}.png")
        said.append(sentence.replace("cat/1.", f"cat/{at}."))
    answer = runner.invoke(data, ["check", "own", "--format", "image-folder"])
    assert answer.stdout.partition("\n\n")[0].splitlines() == said
    answer = run(Case("", "image-folder", folders, said))
    assert answer.exit_code == 2
    assert "5 problems in the data" in answer.stderr
    assert all(sentence in answer.stderr for sentence in said)


@pytest.mark.parametrize(
    ("encoding", "delimiter", "notes"),
    [
        ("utf-8", ",", []),
        ("utf-8-sig", ",", ["table.csv begins with a byte-order mark"]),
        ("utf-8", ";", ["table.csv is separated by semicolons"]),
        ("utf-8-sig", "\t", ["table.csv is separated by tabs", "table.csv begins with a byte-order mark"]),
    ],
)
def test_a_byte_order_mark_and_other_delimiters_are_no_fault_but_noted(
    encoding: str, delimiter: str, notes: list[str]
) -> None:
    folders()
    lines = table("path", "label", "client", "split", client=lambda at: ("Zürich", "Genève")[at % 2])
    write_table([line.replace(",", delimiter) for line in lines], encoding)
    words = ["check", "own", "--format", "csv", "--set", "table=table.csv", "--json"]
    answer = runner.invoke(data, words)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["clients"] == {"Zürich": 6, "Genève": 6}
    assert found["splits"] == {"train": 8, "test": 4}
    assert found["notes"] == notes


def test_nothing_is_said_of_data_in_order() -> None:
    folders()
    answer = run(Case("", "image-folder", folders, []))
    assert answer.exit_code == 0, answer.output
    assert "skipped" not in answer.output
