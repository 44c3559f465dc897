"""One file of instances in COCO's JSON: images, annotations and categories."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from fedlens.core.errors import DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.csv_table import inner_path
from fedlens.data.formats.objects import RawBox
from fedlens.data.formats.texts import read_text

Entry = Mapping[str, Any]

_LISTS = ("images", "annotations", "categories")
_AGAIN = "export the file again"


@dataclass(frozen=True)
class CocoImage:
    """One entry of `images`: its id, its file, its size if it is stated, and all of its fields."""

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
        crowds: how many annotations are left out because they annotate a crowd (`iscrowd` is 1).
        annotations: of each image, by its id.
    """

    path: Path
    images: list[CocoImage]
    categories: dict[int, str]
    crowds: int = 0
    annotations: dict[int | str, list[Entry]] = field(default_factory=dict, repr=False)

    def boxes(self, image: CocoImage, findings: Findings) -> Iterator[RawBox]:
        """The objects of one image; `bbox` is [x, y, width, height], counted from 0.

        An annotation whose `bbox` is not four numbers is a problem.
        """
        for annotation in self.annotations.get(image.key, ()):
            where = f"{self.path}, annotation {annotation.get('id')}"
            category, box = annotation.get("category_id"), annotation.get("bbox")
            if not isinstance(box, list) or len(box) != 4 or not all(map(_number, box)):
                what = "it has no 'bbox'" if box is None else f"its 'bbox' is {_shown(box)}"
                findings.add(where, f"{what}, and needs four numbers", "write [x, y, width, height]")
                continue
            x, y, width, height = map(float, box)
            key = category if _key(category) else _shown(category)
            yield RawBox(where, key, (x, y, x + width, y + height), tuple(box))


def read_instances(path: Path, findings: Findings, folder: Path | None = None) -> CocoInstances | None:
    """The contents of a file in COCO's format of instances (cocodataset.org, "Data format").

    Problems are added to `findings`: invalid JSON (with line and column), a missing list, entries without an id or a
    file name, ids that are used twice, annotations of images that are not in the file. None if the file cannot be
    used at all, as a link from within `folder` to a file outside. Category ids may skip numbers, as COCO's own do.
    Crowds are left out and counted: their boxes are around many objects.
    """
    before = len(findings)
    content = findings.attempt(_read_object, path, folder, example=False)
    if content is None:
        return None
    lists = {name: _list(content, name, path, findings) for name in _LISTS}
    if len(findings) > before:
        return None
    categories = _categories(lists["categories"], path, findings)
    images = _images(lists["images"], path, findings)
    annotations: dict[int | str, list[Entry]] = {image.key: [] for image in images}
    crowds, numbers = 0, dict[int | str, str]()
    for where, key, number, entry in _identified(
        lists["annotations"], "annotation", "", path, findings.add, _key, numbers
    ):
        numbers[key], image = number, entry.get("image_id")
        if not _key(image) or image not in annotations:
            what = f"its image {_shown(image)} is not in the file"
            findings.add(where, what, "list the image, or remove the annotation")
        elif entry.get("iscrowd") in (1, True):
            crowds += 1
        else:
            annotations[image].append(entry)
    return CocoInstances(path, images, categories, crowds, annotations)


def _read_object(path: Path, folder: Path | None) -> Entry:
    """The JSON object in a file. Raises `DataError`, with line and column if the JSON is invalid."""
    text = read_text(path, folder)
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
        return content
    what = f"the file contains {_kind(content)}, not an object with {', '.join(_LISTS)}"
    hint = _AGAIN
    if isinstance(content, list) and content and isinstance(content[0], dict) and "score" in content[0]:
        hint = "it looks like the output of a model; give the file of the true annotations"
    raise DataError(what, where=str(path), hint=hint)


def _list(content: Entry, name: str, path: Path, findings: Findings) -> list[Entry]:
    """The list `name`; entries that are not objects are problems."""
    entries = content.get(name)
    if not isinstance(entries, list):
        what = f"'{name}' is {_kind(entries)}" if name in content else f"there is no '{name}'"
        findings.add_whole(path, what, f"it is a list in COCO's format of instances; {_AGAIN}")
        return []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            findings.add(f"{path}, {name}, entry {number}", f"it is {_kind(entry)}, not an object", _AGAIN)
    return [entry for entry in entries if isinstance(entry, dict)]


def _identified(
    entries: Sequence[Entry],
    kind: str,
    naming: str,
    path: Path,
    add: Callable[..., None],
    valid: Callable[[object], bool],
    taken: Mapping[Any, str],
) -> Iterator[tuple[str, Any, str, Entry]]:
    """(place in the file, id, name, entry) of the entries with a valid id of their own; the others are problems.

    Args:
        naming: the field with the name of an entry, for messages; if empty, its name is its number.
        add: adds a problem to the findings.
        valid: whether a value is a valid id.
        taken: the names of the entries that the caller has accepted so far, by id.
    """
    for number, entry in enumerate(entries, 1):
        key, name = entry.get("id"), str(entry.get(naming, f"number {number}") if naming else number)
        where = f"{path}, {kind} {key if valid(key) else f'number {number}'}"
        if not valid(key):
            add(where, f"its id is {_shown(key)}", f"give each {kind} a number as its id")
        elif key in taken:
            both = f"{taken[key]} and {name}" if naming else f"{kind}s number {taken[key]} and {name}"
            add(where, f"{both} both have this id", f"give each {kind} its own id")
        else:
            yield where, key, name, entry


def _categories(entries: list[Entry], path: Path, findings: Findings) -> dict[int, str]:
    names: dict[int, str] = {}
    for where, key, name, entry in _identified(
        entries, "category", "name", path, findings.add_whole, _whole, names
    ):
        if not isinstance(entry.get("name"), str) or not name.strip():
            findings.add_whole(where, "it has no name", "name it")
        elif name in names.values():
            findings.add_whole(where, f"another category is named '{name}' too", "give each its own name")
        else:
            names[key] = name
    if not entries:
        findings.add_whole(path, "there are no categories", "list the classes in it")
    return dict(sorted(names.items()))


def _images(entries: list[Entry], path: Path, findings: Findings) -> list[CocoImage]:
    images: dict[str, CocoImage] = {}
    files: dict[int | str, str] = {}
    for where, key, file, entry in _identified(
        entries, "image", "file_name", path, findings.add, _key, files
    ):
        if not isinstance(entry.get("file_name"), str) or not file:
            findings.add(where, "it has no 'file_name'", "name its file, or remove it")
        elif "\0" in file or (inner := inner_path(file)) is None:
            what = f"its file '{file}' is not below the folder of images"
            findings.add(where, what, "name the file as seen from that folder")
        elif inner in images:
            what = f"its file {file} is the file of image {images[inner].key} too"
            findings.add(where, what, "list each file once, with all of its annotations")
        else:
            width, height = entry.get("width"), entry.get("height")
            stated = (width, height) if _whole(width) and _whole(height) else None
            if stated is None and (width, height) != (None, None):
                what = f"its size is {_shown(width)} x {_shown(height)}"
                findings.add(where, what, "write width and height in pixels")
            files[key], images[inner] = file, CocoImage(key, inner, stated, entry)
    return list(images.values())


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _key(value: object) -> TypeGuard[int | str]:
    return _whole(value) or isinstance(value, str)


def _number(value: object) -> bool:
    # A whole number in JSON may be larger than any float.
    return isinstance(value, float) or (_whole(value) and abs(value) < 2**63)


def _shown(value: object) -> str:
    text = "missing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return kinds.get(type(value), "a number")
