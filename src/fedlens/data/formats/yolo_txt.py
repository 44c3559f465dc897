"""Boxes in YOLO's text files: one file an image, one line an object."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.core.errors import DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.clients import listed
from fedlens.data.formats.detection import by_stem, detected, folder_splits, numbered, stored_sizes
from fedlens.data.formats.folder_listing import image_names
from fedlens.data.formats.objects import RawBox
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.texts import read_text
from fedlens.data.formats.yolo_names import LISTS, find_names

_NO_LABELS = {"train.txt", "val.txt", "valid.txt", "test.txt"}  # lists of images, as darknet has them
_LINE = "class cx cy width height"


def scan(path: Path, settings: Mapping[str, Any], findings: Findings, *, full: bool) -> Scan:
    """What is in the folder `path`; everything that is wrong is added to `findings`."""
    found = Scan("yolo-txt", path)
    images, others = image_names(path)
    found.names = _each_once(images, path, findings)
    places = [label_file(name) for name in found.names]
    texts = {name for name in others if name.lower().endswith(".txt")}
    unlabelled = [name for name, place in zip(found.names, places, strict=True) if place not in texts]
    if found.names and len(unlabelled) == len(found.names):
        what = f"no image has a file of labels; '{places[0]}' would be that of '{found.names[0]}'"
        findings.add(path, what, "put the labels there", example=False)
        return found
    if unlabelled:
        found.notes.append(
            f"{len(unlabelled):,} images have no file of labels, and show no object: {listed(unlabelled)}"
        )
    _check_orphans(sorted(texts.difference(map(label_file, images))), path, findings)
    found.sizes = stored_sizes(found, [None] * len(found.names), found.names, findings, full=full)
    raw = [
        read_labels(path / place, *size, findings) if size is not None and place in texts else []
        for place, size in zip(places, found.sizes, strict=True)
    ]
    found.bad.update(row for row, boxes in enumerate(raw) if boxes is None)
    there = [boxes or [] for boxes in raw]
    names, labels = _classes(path, settings["classes"], there, findings)
    found.classes = tuple(names)
    found.splits, inner = folder_splits(found.names, path, findings)
    inner = [name.removeprefix("images/") for name in inner]
    return detected(found, there, labels, settings, findings, inner=inner)


@reader(scan)
def yolo_txt(
    *,
    path: common.Folder,
    classes: common.Classes = None,
    size: common.Size = 512,
    channels: common.Channels = 3,
    fit: common.Fit = "pad",
) -> None:
    """Boxes as YOLO has them: `path/images/train/x.jpg` and `path/labels/train/x.txt`, `class cx cy w h` a line.

    | what | where it is read |
    |---|---|
    | labels of an image | the file of its name ending in .txt, in the folder where `labels` stands for the last
    `images` in its path; beside the image where its path has no `images`. None: the image shows no object |
    | class | its number is a position in `classes`; else in classes.txt, obj.names or the `names` of data.yaml;
    else the classes are called by their numbers, of which none may be skipped |
    | split | column `split` of the table; else folders named train, test or val (`train/images/x.jpg` does too);
    else a share `test` is held out |
    | client | `client_column`, `client_level` (counted without `images` and the split) or `client_pattern`; else
    column `client` of the table, if any |

    See `fedlens.data.formats.objects.check_boxes` for what becomes of boxes that do not fit. Plays no part: `root`,
    `download`.

    Raises `ConfigError` where settings contradict each other, and `DataError` with all that is wrong with the
    files; see `fedlens data check`.
    """


def label_file(image: str) -> str:
    """Where the labels of an image are.

    >>> label_file("images/train/a.jpg"), label_file("train/images/a.b.png"), label_file("a.jpg")
    ('labels/train/a.txt', 'train/labels/a.b.txt', 'a.txt')
    """
    *folders, file = image.split("/")
    if "images" in folders:
        folders[len(folders) - 1 - folders[::-1].index("images")] = "labels"
    return "/".join([*folders, f"{file.rpartition('.')[0]}.txt"])


def _each_once(names: list[str], path: Path, findings: Findings) -> list[str]:
    """The images that do not share a file of labels with another; those that do are a finding."""
    alike = [files for files in by_stem(names).values() if len(files) > 1]
    for files in alike:
        what = f"{' and '.join(files)} are called alike, and one file of labels cannot be of both"
        findings.add(path, what, "rename or remove one of them")
    shared = {name for files in alike for name in files}
    return [name for name in names if name not in shared]


def _check_orphans(texts: Sequence[str], path: Path, findings: Findings) -> None:
    """Files of labels that no image belongs to."""
    for name in texts:
        *folders, file = name.split("/")
        other = (
            name in LISTS or file == "classes.txt" or file in _NO_LABELS or file.lower().startswith("readme")
        )
        if not other and "labels" in folders:
            hint = "put the image there, or remove the labels"
            findings.add(path / name, "there is no image that these labels belong to", hint)


def _classes(
    path: Path, given: list[str] | None, raw: Sequence[Sequence[RawBox]], findings: Findings
) -> tuple[list[str], dict[str | int, int]]:
    """(names of the classes, label of each number): given, in a file, or else the numbers that occur."""
    names = given
    try:
        if names is None and (found := find_names(path)) is not None:
            names = found[0]
    except DataError as error:
        findings.add(error.where, error.what, error.hint, example=False)
    if names is not None:
        return names, {number: number for number in numbered(names).values()}
    used = sorted({int(box.category) for boxes in raw for box in boxes})
    if used and used[-1] >= len(used):
        missing = next(at for at, number in enumerate(used) if at != number)
        what = f"the labels skip {missing}, and go up to {used[-1]}"
        hint = "number the classes from 0 on, or name them all with the setting classes, or in classes.txt"
        findings.add(path, what, hint, example=False)
    return [str(number) for number in used], {number: at for at, number in enumerate(used)}


def read_labels(path: Path, width: int, height: int, findings: Findings) -> list[RawBox] | None:
    """The objects in the file `path`, of an image of `width` x `height` pixels.

    A line is `class cx cy w h`: the number of the class from 0 on, the middle of the box, and its size, all as
    shares of the image's width and height. As edges in pixels: left = (cx - w/2) width, right = (cx + w/2)
    width, and top and bottom likewise. An empty file is an image without objects. A line of another form is a
    finding. None where the file cannot be read.
    """
    text = read_text(path, findings)
    if text is None:
        return None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        where, words = f"{path}, line {number}", line.split()
        if not words:
            continue
        fault = _fault(words)
        if fault is not None:
            findings.add(where, *fault)
            continue
        cx, cy, w, h = map(float, words[1:])
        corners = ((cx - w / 2) * width, (cy - h / 2) * height, (cx + w / 2) * width, (cy + h / 2) * height)
        found.append(RawBox(where, int(words[0]), corners, tuple(words[1:])))
    return found


def _fault(words: list[str]) -> tuple[str, str] | None:
    """(what, hint) of a line that is not an object."""
    if len(words) != 5:
        what = f"it has {len(words)} value{'s' * (len(words) != 1)}, and 5 are wanted: {_LINE}"
        if len(words) == 6:
            return what, "take the sixth away; a model's output has its confidence there"
        if len(words) > 6 and len(words) % 2:
            return what, "it looks like the outline of a mask; export boxes, not segments"
        return what, "correct the line, or remove it"
    if not re.fullmatch("[0-9]{1,9}", words[0]):
        return (
            f"its class is '{words[0]}', and a number from 0 on is wanted",
            "correct it, or remove the line",
        )
    for word in words[1:]:
        try:
            number = float(word)
        except ValueError:
            return f"'{word}' is not a number", "correct it, or remove the line"
        if math.isfinite(number) and abs(number) > 2:
            hint = "divide by the width or the height of the image"
            return f"'{word}' is not a share of the image; it looks like pixels", hint
    return None
