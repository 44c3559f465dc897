"""Boxes in YOLO's text files, one file an image and one line an object, and the names of their classes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedlens.base.errors import DataError
from fedlens.base.summary_text import listed
from fedlens.data.diagnostics import Findings
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.cell_labels import skipped
from fedlens.data.formats.detection import (
    RawBox,
    RawBoxes,
    add_same_stem,
    by_stem,
    complete,
    folder_splits,
    read_sizes,
)
from fedlens.data.formats.file_safety import read_text
from fedlens.data.formats.folder_listing import image_names
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import label_of_class

if TYPE_CHECKING:
    import yaml

_IMAGE_LISTS = {"train.txt", "val.txt", "valid.txt", "test.txt"}  # of darknet; not files of labels
_LINE = "class cx cy width height"

LISTS = ("classes.txt", "labels/classes.txt", "obj.names", "data/obj.names")
YAMLS = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")

_HINT = 'write them as a list, names: ["cat", "dog"], or give the setting classes'


def fill(scan: Scan) -> None:
    """Completes the scan of a folder; problems are added to `scan.findings`."""
    scan.format = "yolo-txt"
    folder, findings = scan.folder, scan.findings
    images, others = image_names(folder, folder, findings)
    for names in by_stem(images).values():
        if len(names) > 1:
            add_same_stem(folder, names, findings)
        else:
            scan.names += names
    scan.image_folders = tuple(dict.fromkeys(name.rpartition("/")[0] for name in scan.names))
    label_files = [label_file(name) for name in scan.names]
    texts = {name for name in others if name.lower().endswith(".txt")}
    unlabelled = [name for name, file in zip(scan.names, label_files, strict=True) if file not in texts]
    if scan.names and len(unlabelled) == len(scan.names):
        what = f"no image has a file of labels; that of '{scan.names[0]}' would be '{label_files[0]}'"
        findings.add_whole(folder, what, "move the labels there")
        return
    if unlabelled:
        count = f"{len(unlabelled):,} images have no file of labels, and are read as images without objects"
        scan.notes.append(f"{count}: {listed(unlabelled)}")
    _check_orphans(sorted(texts.difference(map(label_file, images))), scan)
    sizes = read_sizes(scan, [None] * len(scan.names), scan.names)
    raw = [
        read_labels(folder / file, *size, findings) if size is not None and file in texts else []
        for file, size in zip(label_files, sizes, strict=True)
    ]
    scan.bad.update(row for row, boxes in enumerate(raw) if boxes is None)
    boxes_of_images = [boxes or [] for boxes in raw]
    labels = _classes(scan, boxes_of_images)
    scan.splits, inner = folder_splits(scan.names, folder, findings)
    complete(
        scan, [RawBoxes.of(boxes_of_images)], labels, inner=[name.removeprefix("images/") for name in inner]
    )


@reader(fill)
def yolo_txt(
    *,
    path: common.Folder,
    classes: common.Classes = None,
    size: common.Size = None,
    channels: common.Channels = 3,
    fit: common.Fit = "pad",
) -> None:
    """Boxes in YOLO's form: `path/images/train/x.jpg` and `path/labels/train/x.txt`, `class cx cy w h` a line.

    | what | source |
    |---|---|
    | labels of an image | the file of its name ending in .txt, in the folder with `labels` in place of the last
    `images` in its path; beside the image if its path has no `images`. Without it, the image has no objects |
    | class | its number is a position in `classes`; else in classes.txt, obj.names or the `names` of data.yaml;
    else the classes are named by their numbers, which may not skip any |
    | split | column `split` of the table; else folders named train, test or val (`train/images/x.jpg` too);
    else a share `test` is held out |
    | client | `client_column`, `client_level` (counted without `images` and the split) or `client_pattern`; else
    column `client` of the table, if any |

    See `fedlens.data.formats.detection.check_boxes` for boxes that do not fit. `root` and `download` are not used.

    Raises `ConfigError` if settings contradict each other, and `DataError` with all problems of the files; see
    `fedlens data check`.
    """


def label_file(image: str) -> str:
    """The file with the labels of an image.

    >>> label_file("images/train/a.jpg"), label_file("train/images/a.b.png"), label_file("a.jpg")
    ('labels/train/a.txt', 'train/labels/a.b.txt', 'a.txt')
    """
    *folders, file = image.split("/")
    if "images" in folders:
        folders[len(folders) - 1 - folders[::-1].index("images")] = "labels"
    return "/".join([*folders, f"{file.rpartition('.')[0]}.txt"])


def _check_orphans(texts: Sequence[str], scan: Scan) -> None:
    """Adds files of labels without an image as problems."""
    for name in texts:
        *folders, file = name.split("/")
        other = name in LISTS or file in {"classes.txt", *_IMAGE_LISTS} or file.lower().startswith("readme")
        if not other and "labels" in folders:
            hint = "add the image, or remove the labels"
            scan.findings.add(scan.folder / name, "the labels have no image", hint)


def _classes(scan: Scan, raw: Sequence[Sequence[RawBox]]) -> dict[str | int, int]:
    """Sets the classes: given, in a file, or else the numbers that occur. Returns the label of each number."""
    names = scan.settings["classes"]
    if names is None:
        names = scan.findings.attempt(find_names, scan.folder, example=False)
    if names is not None:
        scan.classes = tuple(names)
        return {label: label for label in label_of_class(names).values()}
    used = sorted({int(box.category) for boxes in raw for box in boxes})
    if used and used[-1] >= len(used):
        hint = "number the classes from 0 on, or name them all with the setting classes, or in classes.txt"
        scan.findings.add_whole(scan.folder, skipped(used), hint)
    scan.classes = tuple(map(str, used))
    return {number: label for label, number in enumerate(used)}


def read_labels(path: Path, width: int, height: int, findings: Findings) -> list[RawBox] | None:
    """The objects in the file `path`, of an image of `width` x `height` pixels.

    A line is `class cx cy w h`: the number of the class from 0 on, the centre of the box, and its size, all as
    shares of the image's width and height. As edges in pixels: left = (cx - w/2) width, right = (cx + w/2)
    width, and top and bottom likewise. An empty file is an image without objects. A line of another form is a
    problem. None if the file cannot be read.
    """
    text = findings.attempt(read_text, path)
    if text is None:
        return None
    boxes = []
    for number, line in enumerate(text.splitlines(), 1):
        where, words = f"{path}, line {number}", line.split()
        if words and (problem := _problem(words)) is not None:
            findings.add(where, *problem)
        elif words:
            cx, cy, w, h = map(float, words[1:])
            x, y = (
                ((cx - w / 2) * width, (cx + w / 2) * width),
                ((cy - h / 2) * height, (cy + h / 2) * height),
            )
            boxes.append(RawBox(where, int(words[0]), (x[0], y[0], x[1], y[1]), tuple(words[1:])))
    return boxes


def _problem(words: list[str]) -> tuple[str, str] | None:
    """(problem, hint) of a line that is not an object."""
    hint = "correct the line, or remove it"
    if len(words) != 5:
        if len(words) == 6:
            hint = "remove the sixth; the output of a model has its confidence there"
        elif len(words) > 6 and len(words) % 2:
            hint = "it looks like the outline of a mask; export boxes, not segments"
        return f"it has {len(words)} value{'s' * (len(words) != 1)}, and needs 5: {_LINE}", hint
    if not re.fullmatch("[0-9]{1,9}", words[0]):
        return f"its class is '{words[0]}', not a number from 0 on", hint
    for word in words[1:]:
        try:
            number = float(word)
        except ValueError:
            return f"'{word}' is not a number", hint
        if math.isfinite(number) and abs(number) > 2:
            hint = "divide by the width or the height of the image"
            return f"'{word}' is not a share of the image; it looks like pixels", hint
    return None


def find_names(folder: Path) -> list[str] | None:
    """The class names in the order of their numbers; None if `folder` has no file with them.

    Raises `DataError` if the file cannot be read.
    """
    for name in (*LISTS, *YAMLS):
        path = folder / name
        if path.is_file():
            text = read_text(path, folder)
            return yaml_names(text, str(path)) if name in YAMLS else _lines(text, path)
    return None


def _lines(text: str, path: Path) -> list[str]:
    names = [line.strip() for line in text.rstrip().splitlines()]
    for number, name in enumerate(names, 1):
        if not name:
            hint = "name the class, or remove the line; the lines are numbered from 0"
            raise DataError("the line is empty", where=f"{path}, line {number}", hint=hint)
    return _distinct(names, str(path))


def yaml_names(text: str, where: str) -> list[str]:
    """The class names in the text of a data.yaml: a list, or names numbered from 0.

    Names are taken as they are written: `yes` and `1.0` are strings. No object is constructed from the file.

    Raises `DataError` with the line if the YAML is invalid or `names` is neither form.

    >>> yaml_names("nc: 2\\nnames: ['cat', dog]  # in order", "data.yaml")
    ['cat', 'dog']
    >>> yaml_names("names:\\n  0: cat\\n  1: dog\\n", "data.yaml")
    ['cat', 'dog']
    """
    import yaml  # here, because only this format needs it

    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:  # recursion: many brackets
        problem, line = str(error).partition("\n")[0], ""
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            problem, line = str(error.problem), f", line {error.problem_mark.line + 1}"
        raise DataError(f"the YAML is invalid: {problem}", where=f"{where}{line}", hint=_HINT) from error
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    for key, value in entries:
        if key.value == "names":
            names = [node.value for node in _in_order(value)]
            # A name of several lines, or a list in place of a name, is a slip.
            if not names or not all(isinstance(name, str) and name and name.isprintable() for name in names):
                place = f"{where}, line {key.start_mark.line + 1}"
                raise DataError("the names of the classes cannot be read", where=place, hint=_HINT)
            return _distinct(names, where)
    raise DataError("there is no key 'names'", where=where, hint=_HINT)


def _in_order(names: yaml.Node) -> list[yaml.Node]:
    """The nodes of the names; empty unless they are a list, or numbered from 0 without gaps."""
    import yaml

    if isinstance(names, yaml.SequenceNode):
        return list(names.value)
    if not isinstance(names, yaml.MappingNode):
        return []
    numbered = {key.value: value for key, value in names.value if isinstance(key, yaml.ScalarNode)}
    nodes = [numbered.get(str(number)) for number in range(len(names.value))]
    return [node for node in nodes if node is not None] if None not in nodes else []


def _distinct(names: list[str], where: str) -> list[str]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        hint = "give each class its own name"
        raise DataError(f"two classes are named '{twice}'", where=where, hint=hint)
    return names
