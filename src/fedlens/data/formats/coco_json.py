"""Boxes in COCO's JSON: a folder of images, and one file of instances for all of them or for each split."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedlens.base.errors import ConfigError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.coco_instances import CocoImage, CocoInstances, read_instances
from fedlens.data.formats.detection import below, complete, read_sizes
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import split_named

_SPLIT_IN_NAME = re.compile(r"(?<![a-z])(train|test|val)(?:id|idation|ing)?(?![a-z])")

Files = str | dict[str, str] | None


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
    categories = _categories([part.content for part in parts], scan.findings)
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
    `fedlens.data.formats.objects.check_boxes` for boxes that do not fit. `root` and `download` are not used.

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


def _categories(contents: Sequence[CocoInstances], findings: Findings) -> dict[int, str]:
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
