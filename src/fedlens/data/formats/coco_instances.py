"""One file of instances in COCO's JSON: images, annotations and categories."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedlens.base.errors import DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.coco_annotations import (
    CocoAnnotations,
    Key,
    is_key,
    is_whole,
    read_annotations,
    shown,
)
from fedlens.data.formats.csv_table import inner_path
from fedlens.data.formats.json_lists import Batches, read_lists
from fedlens.data.formats.objects import RawBoxes
from fedlens.data.formats.texts import read_text, refuse_unsafe

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
