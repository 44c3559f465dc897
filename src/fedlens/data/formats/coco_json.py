"""Boxes in COCO's JSON: a folder of images, and one file of instances for all of them or for each split."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.coco_annotations import (
    Batches,
    CocoAnnotations,
    Key,
    is_key,
    is_whole,
    read_annotations,
    read_lists,
    shown,
)
from fedlens.data.formats.csv_table import inner_path
from fedlens.data.formats.detection import RawBoxes, below, complete, read_sizes
from fedlens.data.formats.file_safety import read_text, refuse_unsafe
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import split_named

_SPLIT_IN_NAME = re.compile(r"(?<![a-z])(train|test|val)(?:id|idation|ing)?(?![a-z])")

Files = str | dict[str, str] | None

Entry = Mapping[str, Any]

_LISTS: Mapping[str, Callable[[Batches], Any]] = {
    "images": lambda batches: [_slim(entry) for batch in batches for entry in batch],
    "annotations": read_annotations,
    "categories": lambda batches: [entry for batch in batches for entry in batch],
}
# COCO's own fields of an image; any other field becomes a column.
_NEEDED = ("id", "file_name", "width", "height")
_UNUSED = ("license", "flickr_url", "coco_url", "date_captured")
_AGAIN = "export the file again"


@dataclass(frozen=True)
class _Part:
    """One file of instances, its split, and the folder of its images."""

    split: str | None
    content: CocoInstances
    images: str


def fill(scan: Scan) -> None:
    """Completes the scan of a folder; problems are added to `scan.findings`."""
    scan.format = "coco-json"
    settings = scan.settings
    files = _files(scan.folder, settings["annotations"], scan.findings)
    parts = []
    for split, file in files.items():
        content = read_instances(file, scan.findings, scan.folder)
        if content is not None:
            folder = _image_folder(scan.folder, settings["images"], split, content)
            parts.append(_Part(split, content, folder))
    if len(parts) < len(files) or not parts:
        return
    categories = _shared_categories([part.content for part in parts], scan.findings)
    scan.classes = tuple(categories.values())
    rows = [(part, image) for part in parts for image in part.content.images]
    scan.names = [below(part.images, image.file) for part, image in rows]
    scan.image_folders = tuple(dict.fromkeys(part.images for part in parts))
    images = [image for _, image in rows]
    records = _records(images)
    if parts[0].split is not None:
        scan.splits = [split_named(part.split or "") or "train" for part, _ in rows]
        records.pop("split", None)
    if crowds := sum(part.content.crowds for part in parts):
        scan.notes.append(f"{crowds:,} annotations of crowds are left out")
    sources = [f"{part.content.path}, image {image.key}" for part, image in rows]
    read_sizes(scan, [image.size for image in images], sources)
    firsts = np.cumsum([0, *(len(part.content.images) for part in parts)])
    raw = [
        replace(part.content.objects, rows=part.content.objects.rows + first)
        for part, first in zip(parts, firsts[:-1], strict=True)
    ]
    labels: dict[str | int, int] = {key: label for label, key in enumerate(categories)}
    complete(scan, raw, labels, records=records, inner=[image.file for image in images])


@reader(fill)
def coco_json(
    *,
    path: common.Folder,
    annotations: Annotated[
        Files,
        Field(
            description="JSON file of instances below `path`, or a table of one for each split: "
            '{ train = "train.json", test = "test.json" }; by default the files in the folder'
        ),
    ] = None,
    images: Annotated[
        Files,
        Field(
            description="folder of the images below `path`, or a table of one for each split; by default the one "
            "with the first image"
        ),
    ] = None,
    size: common.Size = None,
    channels: common.Channels = 3,
    fit: common.Fit = "pad",
) -> None:
    """Boxes as COCO has them: JSON with `images`, `annotations` and `categories`, `bbox` as [x, y, width, height].

    | what | source |
    |---|---|
    | class | the categories of all files, in the order of their ids, which may skip numbers |
    | split | column `split` of the table; else the key in `annotations`, or train, val or test in a file's name;
    else a field `split` of the images; else a share `test` is held out |
    | client | `client_column` (a column of the table or a field of the images, such as "hospital"),
    `client_level` (of `file_name`) or `client_pattern`; else a column or field `client`, if any |

    Annotations with `iscrowd` are left out: their boxes are around many objects. See
    `fedlens.data.formats.detection.check_boxes` for boxes that do not fit. `root` and `download` are not used.

    Raises `ConfigError` if settings contradict each other, and `DataError` with all problems of the files; see
    `fedlens data check`.
    """


def _files(path: Path, given: Files, findings: Findings) -> dict[str | None, Path]:
    """The file of instances for each split, or one for None; empty, with a problem, if that is ambiguous."""
    if isinstance(given, str):
        return {None: path / given}
    if isinstance(given, dict):
        for name in given:
            if split_named(name) is None:
                hint = "use train, val or test"
                raise ConfigError(f"there is no split '{name}'", where="annotations", hint=hint)
        return {name: path / file for name, file in given.items()}
    files = sorted([*path.glob("*.json"), *path.glob("*/*.json")])
    instances = [file for file in files if file.name.startswith("instances")] or files
    if len(instances) == 1:
        return {None: instances[0]}
    by_split = {_split_of(file.relative_to(path)): file for file in instances}
    if len(by_split) == len(instances) and None not in by_split and by_split:
        return by_split
    names = ", ".join(file.relative_to(path).as_posix() for file in instances[:5])
    what = f"it is not clear which file has the annotations: {names}" if names else "there is no JSON file"
    findings.add_whole(path, what, "name it with the setting annotations, below the folder of your data")
    return {}


def _split_of(file: Path) -> str | None:
    """The split in a file's name, or else in its folder's."""
    matches = (_SPLIT_IN_NAME.search(part.lower()) for part in (file.stem, file.parent.name))
    return next((match[1] for match in matches if match), None)


def _image_folder(path: Path, given: Files, split: str | None, content: CocoInstances) -> str:
    """The folder of a file's images, below `path`."""
    if isinstance(given, str):
        return given
    if isinstance(given, dict):
        if split in given:
            return given[split]
        what = (
            f"there is no folder of images for '{split}'" if split else "images has a folder for each split"
        )
        raise ConfigError(what, where="images", hint="name the same splits in annotations and in images")
    parent = content.path.parent
    beside = parent.relative_to(path).as_posix() if parent.is_relative_to(path) else "."
    # COCO's own: annotations/instances_train2017.json, train2017/*.jpg.
    of_file = content.path.stem.removeprefix("instances_")
    candidates = [".", beside, "images", of_file, f"images/{of_file}", split or ".", f"images/{split}"]
    first = [image.file for image in content.images[:20]]
    return next((c for c in candidates if any(os.path.isfile(path / c / file) for file in first)), ".")


def _shared_categories(contents: Sequence[CocoInstances], findings: Findings) -> dict[int, str]:
    """The categories of all files by id; files that contradict each other are a problem."""
    categories: dict[int, str] = {}
    hint = "use the same ids in all files"
    for content in contents:
        for key, name in content.categories.items():
            if (other := categories.setdefault(key, name)) != name:
                what = f"category {key} is '{name}', and '{other}' in another file"
                findings.add_whole(content.path, what, hint)
    for name in sorted(name for name, count in Counter(categories.values()).items() if count > 1):
        where = " and ".join(str(content.path) for content in contents)
        findings.add_whole(where, f"the class '{name}' has another id in each", hint)
    return dict(sorted(categories.items()))


def _records(images: Sequence[CocoImage]) -> dict[str, list[Any]]:
    """The fields of the images beyond COCO's own, by name."""
    names = dict.fromkeys(name for image in images for name in image.fields)
    return {name: [image.fields.get(name) for image in images] for name in names}


@dataclass(frozen=True)
class CocoImage:
    """One entry of `images`: its id, its file, its size if it is stated, and its fields beyond COCO's own."""

    key: int | str
    file: str
    size: tuple[int, int] | None
    fields: Entry


@dataclass(frozen=True)
class CocoInstances:
    """The contents of a file of instances.

    Args:
        path: the file.
        images: in the order of the file, each id and each file once.
        categories: the name of each category, by its id, in the order of the ids.
        objects: the annotated objects; their rows are positions in `images`.
        crowds: how many annotations are left out because they annotate a crowd (`iscrowd` is 1).
    """

    path: Path
    images: list[CocoImage]
    categories: dict[int, str]
    objects: RawBoxes
    crowds: int = 0


@dataclass(frozen=True)
class _List:
    """What a list contains, and the number and kind of each entry that is not an object."""

    content: Any
    others: list[tuple[int, str]] = field(default_factory=list)


def read_instances(path: Path, findings: Findings, folder: Path | None = None) -> CocoInstances | None:
    """The contents of a file in COCO's format of instances (cocodataset.org, "Data format").

    Problems are added to `findings`: invalid JSON (with line and column), a missing list, entries without an id or a
    file name, ids that are used twice, annotations of images that are not in the file or without a box. None if the
    file cannot be used at all, as a link from within `folder` to a file outside. Category ids may skip numbers, as
    COCO's own do. Crowds are left out and counted: their boxes are around many objects. A box [x, y, width, height],
    counted from 0, is given by its edges.

    The file is read in parts: a million annotations take 60 MB.
    """
    content = findings.attempt(_read_object, path, folder, example=False)
    if content is None:
        return None
    lists = {name: _list(content, name, path, findings) for name in _LISTS}
    if any(found is None for found in lists.values()):
        return None
    categories = _categories(lists["categories"], path, findings)
    images = _images(lists["images"], path, findings)
    objects, crowds = _objects(lists["annotations"], images, path, findings)
    return CocoInstances(path, images, categories, objects, crowds)


def _objects(
    found: CocoAnnotations, images: Sequence[CocoImage], path: Path, findings: Findings
) -> tuple[RawBoxes, int]:
    """The objects of `images`, and the number of crowds; all other annotations are problems."""
    for place, what, hint in found.faults:
        findings.add(f"{path}, {place}", what, hint)
    rows_of_ids: dict[Key, int] = {image.key: row for row, image in enumerate(images)}
    rows = np.array([rows_of_ids.get(key, -1) for key in found.image_ids], np.int32)[found.images]
    repeated = found.repeated()
    for at, first in repeated.items():
        what = f"annotations number {found.numbers[first]} and {found.numbers[at]} both have this id"
        findings.add(f"{path}, {found.where(at)}", what, "give each annotation its own id")
    used = np.ones(len(found), bool)
    used[list(repeated)] = False
    for at in np.flatnonzero(used & (rows < 0)).tolist():
        key = found.image_ids[found.images[at]]
        what = f"its image {key[0] if isinstance(key, tuple) else shown(key)} is not in the file"
        findings.add(f"{path}, {found.where(at)}", what, "list the image, or remove the annotation")
    used &= rows >= 0
    crowds = int((used & found.crowds).sum())
    used &= ~found.crowds
    for at, text in found.malformed.items():
        if used[at]:
            what = "it has no 'bbox'" if text is None else f"its 'bbox' is {text}"
            hint = "write [x, y, width, height]"
            findings.add(f"{path}, {found.where(at)}", f"{what}, and needs four numbers", hint)
    used[list(found.malformed)] = False
    kept = np.flatnonzero(used)
    corners = found.boxes[kept]
    corners[:, 2:] += corners[:, :2]
    objects = RawBoxes(
        rows[kept],
        found.categories[kept],
        [key[0] if isinstance(key, tuple) else key for key in found.category_ids],
        corners,
        lambda at: f"{path}, {found.where(kept[at])}",
        lambda at: map(_plain, found.boxes[kept[at]].tolist()),
    )
    return objects, crowds


def _plain(number: float) -> float | int:
    """A whole number as it is written in most files, without a point."""
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _read_object(path: Path, folder: Path | None) -> Entry:
    """The JSON object in a file, its lists as `_List`.

    Raises `DataError`, with line and column if the JSON is invalid.
    """
    lists = {name: _with_others(read) for name, read in _LISTS.items()}
    try:
        refuse_unsafe(path, folder)
        with path.open(encoding="utf-8-sig") as file:
            return read_lists(file, lists)
    except (OSError, ValueError, RecursionError):
        text = read_text(path, folder)  # read as a whole, the first error has its line and column
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        what = f"the file is not valid JSON: {error.msg[0].lower()}{error.msg[1:]}"
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise DataError(what, where=where, hint=_AGAIN) from error
    except (RecursionError, ValueError) as error:
        what = "the JSON is nested too deeply, or has a number that is too long"
        raise DataError(what, where=str(path), hint=_AGAIN) from error
    if isinstance(content, dict):
        return {
            name: lists[name](iter([value])) if name in lists and isinstance(value, list) else value
            for name, value in content.items()
        }
    what = f"the file contains {_kind(content)}, not an object with {', '.join(_LISTS)}"
    hint = _AGAIN
    if isinstance(content, list) and content and isinstance(content[0], dict) and "score" in content[0]:
        hint = "it looks like the output of a model; give the file of the true annotations"
    raise DataError(what, where=str(path), hint=hint)


def _with_others(read: Callable[[Batches], Any]) -> Callable[[Batches], _List]:
    """`read` for lists in which some entries are not objects; they are left out, and listed."""

    def read_list(batches: Batches) -> _List:
        others, count = list[tuple[int, str]](), 0

        def objects() -> Batches:
            nonlocal count
            for batch in batches:
                if set(map(type, batch)) != {dict}:
                    pairs = enumerate(batch, count + 1)
                    others.extend(
                        (number, _kind(entry)) for number, entry in pairs if type(entry) is not dict
                    )
                yield [entry for entry in batch if type(entry) is dict]
                count += len(batch)

        return _List(read(objects()), others)

    return read_list


def _list(content: Entry, name: str, path: Path, findings: Findings) -> Any:
    """What the list `name` contains; entries that are not objects are problems."""
    found = content.get(name)
    if not isinstance(found, _List):
        what = f"'{name}' is {_kind(found)}" if name in content else f"there is no '{name}'"
        findings.add_whole(path, what, f"it is a list in COCO's format of instances; {_AGAIN}")
        return None
    add = findings.add_whole if name == "categories" else findings.add
    for number, kind in found.others:
        add(f"{path}, {name}, entry {number}", f"it is {kind}, not an object", _AGAIN)
    return found.content


def _slim(entry: Entry) -> Entry:
    """An entry of `images` without what no reader uses: there may be millions of them."""
    return {
        name: value
        for name, value in entry.items()
        if name in _NEEDED or (name not in _UNUSED and isinstance(value, str | int | float))
    }


def _identified(
    entries: Iterable[Entry],
    kind: str,
    naming: str,
    path: Path,
    add: Callable[..., None],
    valid: Callable[[object], bool],
    taken: Mapping[Any, str],
) -> Iterator[tuple[str, Any, str, Entry]]:
    """(place in the file, id, name, entry) of the entries with a valid id of their own; the others are problems.

    Args:
        naming: the field with the name of an entry, for messages.
        add: adds a problem to the findings.
        valid: whether a value is a valid id.
        taken: the names of the entries that the caller has accepted so far, by id.
    """
    for number, entry in enumerate(entries, 1):
        key, name = entry.get("id"), str(entry.get(naming, f"number {number}"))
        where = f"{path}, {kind} {key if valid(key) else f'number {number}'}"
        if not valid(key):
            add(where, f"its id is {shown(key)}", f"give each {kind} a number as its id")
        elif key in taken:
            add(where, f"{taken[key]} and {name} both have this id", f"give each {kind} its own id")
        else:
            yield where, key, name, entry


def _categories(entries: list[Entry], path: Path, findings: Findings) -> dict[int, str]:
    names: dict[int, str] = {}
    taken = set[str]()
    for where, key, name, entry in _identified(
        entries, "category", "name", path, findings.add_whole, is_whole, names
    ):
        if not isinstance(entry.get("name"), str) or not name.strip():
            findings.add_whole(where, "it has no name", "name it")
        elif name in taken:
            findings.add_whole(where, f"another category is named '{name}' too", "give each its own name")
        else:
            names[key] = name
            taken.add(name)
    if not entries:
        findings.add_whole(path, "there are no categories", "list the classes in it")
    return dict(sorted(names.items()))


def _images(entries: list[Entry], path: Path, findings: Findings) -> list[CocoImage]:
    images: dict[str, CocoImage] = {}
    files: dict[int | str, str] = {}
    for where, key, file, entry in _identified(
        entries, "image", "file_name", path, findings.add, is_key, files
    ):
        if not isinstance(entry.get("file_name"), str) or not file:
            findings.add(where, "it has no 'file_name'", "name its file, or remove it")
        elif not _is_path(file):
            what = f"its file '{ascii(file)[1:-1]}' has a character that no file name can have"
            findings.add(where, what, "write the name of the file in UTF-8")
        elif (inner := inner_path(file)) is None:
            what = f"its file '{file}' is not below the folder of images"
            findings.add(where, what, "name the file as seen from that folder")
        elif inner in images:
            what = f"its file {file} is the file of image {images[inner].key} too"
            findings.add(where, what, "list each file once, with all of its annotations")
        else:
            width, height = entry.get("width"), entry.get("height")
            stated = (width, height) if is_whole(width) and is_whole(height) else None
            if stated is None and (width, height) != (None, None):
                what = f"its size is {shown(width)} x {shown(height)}"
                findings.add(where, what, "write width and height in pixels")
            further = {name: value for name, value in entry.items() if name not in _NEEDED}
            files[key], images[inner] = file, CocoImage(key, inner, stated, further)
    return list(images.values())


def _is_path(name: str) -> bool:
    """Whether a file may have this name: it has no null character, and no lone surrogate."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return kinds.get(type(value), "a number")
