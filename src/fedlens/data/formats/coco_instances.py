"""One file of instances in COCO's JSON: images, annotations and categories."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from fedlens.data.diagnostics import Findings
from fedlens.data.formats.csv_table import inner_path
from fedlens.data.formats.objects import RawBox

_TABLES = ("images", "annotations", "categories")
_AGAIN = "export the file again"


@dataclass(frozen=True)
class CocoImage:
    """One entry of `images`: its id, its file, its size where it is stated, and whatever else stands there."""

    key: int | str
    file: str
    size: tuple[int, int] | None
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class CocoInstances:
    """What a file of instances says.

    Args:
        path: the file.
        images: in the order of the file, each id and each file once.
        categories: the name of each category, by its id, in the order of the ids.
        crowds: how many annotations are left out because they stand for a crowd (`iscrowd` is 1).
    """

    path: Path
    images: list[CocoImage]
    categories: dict[int, str]
    crowds: int = 0
    annotations: dict[int | str, list[Mapping[str, Any]]] = field(default_factory=dict, repr=False)

    def boxes(self, image: CocoImage, findings: Findings) -> Iterator[RawBox]:
        """The objects of one image; `bbox` is [x, y, width, height], counted from 0.

        An annotation whose `bbox` is not four numbers is a finding.
        """
        for annotation in self.annotations.get(image.key, ()):
            where = _annotation(self.path, annotation.get("id"))
            category, box = annotation.get("category_id"), annotation.get("bbox")
            if not isinstance(box, list) or len(box) != 4 or not all(map(_number, box)):
                what = "it has no 'bbox'" if box is None else f"its 'bbox' is {_shown(box)}"
                findings.add(where, f"{what}, and four numbers are wanted", "write [x, y, width, height]")
                continue
            x, y, width, height = map(float, box)
            key = category if isinstance(category, str) or _whole(category) else _shown(category)
            yield RawBox(where, key, (x, y, x + width, y + height), tuple(box))


def read_instances(path: Path, findings: Findings) -> CocoInstances | None:
    """What the file `path` says, in COCO's format of instances (cocodataset.org, "Data format").

    What is wrong in it is added to `findings`: no JSON (with line and column), a table that is missing, entries
    without an id or a file name, ids that stand there twice, annotations of images that are not in it. None
    where nothing can be made of the file. Category ids may skip numbers, as COCO's own do. Crowds are left out
    and counted: their boxes are around many objects.
    """
    content = read_json(path, findings)
    if content is None:
        return None
    if not isinstance(content, dict):
        what = f"the file holds {_kind(content)}, and an object with {', '.join(_TABLES)} is wanted"
        findings.add(path, what, _results(content) or _AGAIN, example=False)
        return None
    whole = len(findings)
    tables = {name: _table(content, name, path, findings) for name in _TABLES}
    if len(findings) > whole:
        return None
    categories = _categories(tables["categories"], path, findings)
    images = _images(tables["images"], path, findings)
    annotations, crowds = _annotations(tables["annotations"], {image.key for image in images}, path, findings)
    return CocoInstances(path, images, categories, crowds, annotations)


def read_json(path: Path, findings: Findings) -> Any:
    """The content of a JSON file; None, and a finding with the line and column, where it has none."""
    try:
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        what, where, hint = f"the file cannot be read: {error.strerror}", str(path), "see that it is there"
    except UnicodeDecodeError as error:
        where, hint = str(path), "save it in UTF-8"
        what = f"the file is not UTF-8: byte {error.start + 1} cannot be read"
    except json.JSONDecodeError as error:
        what, hint = f"the file is not JSON: {error.msg[0].lower()}{error.msg[1:]}", _AGAIN
        where = f"{path}, line {error.lineno}, column {error.colno}"
    except (RecursionError, ValueError):
        what, where, hint = "the JSON is nested too deeply, or has a number too long", str(path), _AGAIN
    findings.add(where, what, hint, example=False)
    return None


def _table(content: Mapping[str, Any], name: str, path: Path, findings: Findings) -> list[Mapping[str, Any]]:
    """The list `name`; entries that are no objects are findings."""
    if not isinstance(content.get(name), list):
        what = f"'{name}' is {_kind(content[name])}" if name in content else f"there is no '{name}'"
        hint = "it is a list in COCO's format of instances; " + _AGAIN
        findings.add(path, what, hint, example=False)
        return []
    entries: list[Mapping[str, Any]] = []
    for number, entry in enumerate(content[name], 1):
        if isinstance(entry, dict):
            entries.append(entry)
        else:
            findings.add(f"{path}, {name}, entry {number}", f"it is {_kind(entry)}, not an object", _AGAIN)
    return entries


def _categories(entries: list[Mapping[str, Any]], path: Path, findings: Findings) -> dict[int, str]:
    found: dict[int, str] = {}
    for number, entry in enumerate(entries, 1):
        key, name = entry.get("id"), entry.get("name")
        where = f"{path}, category {key if _whole(key) else f'number {number}'}"
        if not _whole(key):
            findings.add(where, f"its id is {_shown(key)}", "number the categories", example=False)
        elif not isinstance(name, str) or not name.strip():
            findings.add(where, "it has no name", "name it", example=False)
        elif key in found:
            what = f"the id stands there twice, for '{found[key]}' and '{name}'"
            findings.add(where, what, "give each category an id of its own", example=False)
        elif name in found.values():
            what = f"the name '{name}' stands there twice"
            findings.add(where, what, "give each category a name of its own", example=False)
        else:
            found[key] = name
    if not entries:
        findings.add(path, "there are no categories", "list the classes in it", example=False)
    return dict(sorted(found.items()))


def _images(entries: list[Mapping[str, Any]], path: Path, findings: Findings) -> list[CocoImage]:
    found: dict[int | str, CocoImage] = {}
    files: dict[str, int | str] = {}
    for number, entry in enumerate(entries, 1):
        key, file = entry.get("id"), entry.get("file_name")
        where = f"{path}, image {key if _key(key) else f'number {number}'}"
        if not _key(key):
            findings.add(where, f"its id is {_shown(key)}", "give each image a number as its id")
        elif not isinstance(file, str) or not file:
            findings.add(where, "it has no 'file_name'", "name its file, or remove it")
        elif "\0" in file or (inner := inner_path(file)) is None:
            what = f"its file '{file}' is not below the folder of images"
            findings.add(where, what, "name the file as it is seen from that folder")
        elif key in found:
            what = f"the id stands there twice, for {found[key].file} and {file}"
            findings.add(where, what, "give each image an id of its own, and its annotations too")
        elif inner in files:
            what = f"its file {file} is that of image {files[inner]} too"
            findings.add(where, what, "list each file once, with all of its annotations")
        else:
            width, height = entry.get("width"), entry.get("height")
            stated = (width, height) if _whole(width) and _whole(height) else None
            if stated is None and (width, height) != (None, None):
                what = f"its size is {_shown(width)} x {_shown(height)}"
                findings.add(where, what, "write width and height in pixels")
            found[key] = CocoImage(key, inner, stated, entry)
            files[inner] = key
    return list(found.values())


def _annotations(
    entries: list[Mapping[str, Any]], images: set[int | str], path: Path, findings: Findings
) -> tuple[dict[int | str, list[Mapping[str, Any]]], int]:
    """(by image, how many crowds were left out)."""
    found: dict[int | str, list[Mapping[str, Any]]] = {}
    ids = Counter(entry["id"] for entry in entries if _key(entry.get("id")))
    seen: set[int | str] = set()
    crowds = 0
    for number, entry in enumerate(entries, 1):
        key, image = entry.get("id"), entry.get("image_id")
        where = _annotation(path, key if _key(key) else f"number {number}")
        if not _key(key):
            findings.add(where, f"its id is {_shown(key)}", "give each annotation a number as its id")
        elif key in seen:
            hint = "give each annotation an id of its own"
            findings.add(where, f"the id stands there {ids[key]} times", hint)
        elif not _key(image) or image not in images:
            what = f"its image {_shown(image)} is not in the file"
            findings.add(where, what, "list the image, or remove the annotation")
        elif entry.get("iscrowd") in (1, True):
            crowds += 1
        else:
            found.setdefault(image, []).append(entry)
        if _key(key):
            seen.add(key)
    return found, crowds


def _annotation(path: Path, key: object) -> str:
    return f"{path}, annotation {key}"


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _key(value: object) -> TypeGuard[int | str]:
    return _whole(value) or isinstance(value, str)


def _number(value: object) -> bool:
    # A whole number of JSON may be larger than any float.
    return isinstance(value, float) or (_whole(value) and abs(value) < 2**63)


def _shown(value: object) -> str:
    text = "missing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", type(None): "nothing", bool: "true or false"}
    return names.get(type(value), "a number")


def _results(content: object) -> str | None:
    """What to do where the file is a list of detections, as models write it."""
    if isinstance(content, list) and content and isinstance(content[0], dict) and "score" in content[0]:
        return "it looks like the output of a model; give the file of the true annotations"
    return None
