"""Boxes in COCO's JSON: a folder of images, and one file of instances for all of them or for each split."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedlens.core.errors import ConfigError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.coco_instances import CocoImage, CocoInstances, read_instances
from fedlens.data.formats.detection import below, detected, stored_sizes
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import split_named

# What COCO itself says of an image; anything else is of the user's own, and becomes a column.
_COCO_FIELDS = {"id", "file_name", "width", "height", "license", "flickr_url", "coco_url", "date_captured"}
_SPLIT_IN_NAME = re.compile(r"(?<![a-z])(train|test|val)(?:id|idation|ing)?(?![a-z])")

Files = str | dict[str, str] | None


@dataclass(frozen=True)
class _Part:
    """One file of instances, the split it is for, and the folder that its images are in."""

    split: str | None
    content: CocoInstances
    images: str


def scan(path: Path, settings: Mapping[str, Any], findings: Findings, *, full: bool) -> Scan:
    """What is in the folder `path`; everything that is wrong is added to `findings`."""
    found = Scan("coco-json", path)
    files = _files(path, settings["annotations"], findings)
    parts = []
    for split, file in files.items():
        content = read_instances(file, findings)
        if content is not None:
            parts.append(_Part(split, content, _image_folder(path, settings["images"], split, content)))
    if len(parts) < len(files) or not parts:
        return found
    categories = _categories([part.content for part in parts], findings)
    found.classes = tuple(categories.values())
    rows = [(part, image) for part in parts for image in part.content.images]
    found.names = [below(part.images, image.file) for part, image in rows]
    if parts[0].split is not None:
        found.splits = [split_named(part.split or "") or "train" for part, _ in rows]
    crowds = sum(part.content.crowds for part in parts)
    if crowds:
        found.notes.append(f"{crowds:,} annotations of crowds are left out")
    sources = [f"{part.content.path}, image {image.key}" for part, image in rows]
    found.sizes = stored_sizes(found, [image.size for _, image in rows], sources, findings, full=full)
    raw = [part.content.boxes(image, findings) for part, image in rows]
    labels: dict[str | int, int] = {key: at for at, key in enumerate(categories)}
    records = _records([image for _, image in rows])
    if found.splits is not None:
        records.pop("split", None)
    inner = [image.file for _, image in rows]
    return detected(found, raw, labels, settings, findings, records=records, inner=inner)


@reader(scan)
def coco_json(
    *,
    path: common.Folder,
    annotations: Annotated[
        Files,
        Field(
            description="JSON file of instances below `path`, or a table of one for each split: "
            '{ train = "train.json", test = "test.json" }; by default those that lie there'
        ),
    ] = None,
    images: Annotated[
        Files,
        Field(
            description="folder of the images below `path`, or a table of one for each split; by default where the "
            "first image is found"
        ),
    ] = None,
    size: common.Size = 512,
    channels: common.Channels = 3,
    fit: common.Fit = "pad",
) -> None:
    """Boxes as COCO has them: JSON with `images`, `annotations` and `categories`, `bbox` as [x, y, width, height].

    | what | where it is read |
    |---|---|
    | class | the categories of all files, in the order of their ids, which may skip numbers |
    | split | column `split` of the table; else the key in `annotations`, or train, val or test in a file's name;
    else a field `split` of the images; else a share `test` is held out |
    | client | `client_column` (a column of the table or a field of the images, such as "hospital"),
    `client_level` (of `file_name`) or `client_pattern`; else a column or field `client`, if any |

    Annotations with `iscrowd` are left out: their boxes are around many objects. See
    `fedlens.data.formats.objects.check_boxes` for what becomes of boxes that do not fit. Plays no part: `root`,
    `download`.

    Raises `ConfigError` where settings contradict each other, and `DataError` with all that is wrong with the
    files; see `fedlens data check`.
    """


def _files(path: Path, given: Files, findings: Findings) -> dict[str | None, Path]:
    """The file of instances for each split, or one for none; empty, and a finding, where it is not clear."""
    if isinstance(given, str):
        return {None: path / given}
    if isinstance(given, dict):
        for name in given:
            if split_named(name) is None:
                raise ConfigError(
                    f"there is no split '{name}'", where="annotations", hint="take train, val or test"
                )
        return {name: path / file for name, file in given.items()}
    lying = sorted([*path.glob("*.json"), *path.glob("*/*.json")])
    instances = [file for file in lying if file.name.startswith("instances")] or lying
    if len(instances) == 1:
        return {None: instances[0]}
    named = {_split_of(file.relative_to(path)): file for file in instances}
    if len(named) == len(instances) and None not in named and named:
        return named
    names = ", ".join(file.relative_to(path).as_posix() for file in instances[:5])
    what = f"it is not clear which file has the annotations: {names}" if names else "there is no JSON file"
    hint = "name it with the setting annotations, below the folder of your data"
    findings.add(path, what, hint, example=False)
    return {}


def _split_of(file: Path) -> str | None:
    """The split in a file's name, or else in its folder's."""
    for part in (file.stem, file.parent.name):
        if match := _SPLIT_IN_NAME.search(part.lower()):
            return match[1]
    return None


def _image_folder(path: Path, given: Files, split: str | None, content: CocoInstances) -> str:
    """The folder of a file's images, below `path`."""
    if isinstance(given, str):
        return given
    if isinstance(given, dict):
        if split not in given:
            what = (
                f"there is no folder of images for '{split}'"
                if split
                else "images has a folder for each split"
            )
            hint = "name the same splits in annotations and in images"
            raise ConfigError(what, where="images", hint=hint)
        return given[split]
    folder = content.path.parent
    beside = folder.relative_to(path).as_posix() if folder.is_relative_to(path) else "."
    # COCO's own: annotations/instances_train2017.json, train2017/*.jpg.
    own = content.path.stem.removeprefix("instances_")
    candidates = [".", beside, "images", own, f"images/{own}", split or ".", f"images/{split}"]
    first = [image.file for image in content.images[:20]]
    return next((c for c in candidates if any((path / c / file).is_file() for file in first)), ".")


def _categories(contents: Sequence[CocoInstances], findings: Findings) -> dict[int, str]:
    """The categories of all files by id; files that contradict each other are a finding."""
    found: dict[int, str] = {}
    for content in contents:
        for key, name in content.categories.items():
            if found.setdefault(key, name) != name:
                what = f"category {key} is '{name}', and '{found[key]}' in another file"
                findings.add(content.path, what, "number the classes alike in all files", example=False)
    names = list(found.values())
    for name in sorted({name for name in names if names.count(name) > 1}):
        where = " and ".join(str(content.path) for content in contents)
        what = f"the class '{name}' has another id in each"
        findings.add(where, what, "number the classes alike in all files", example=False)
    return dict(sorted(found.items()))


def _records(images: Sequence[CocoImage]) -> dict[str, list[Any]]:
    """What the entries of the images say beyond COCO's own fields, by name."""
    given = [{name: v for name, v in i.fields.items() if isinstance(v, str | int | float)} for i in images]
    names = dict.fromkeys(name for fields in given for name in fields if name not in _COCO_FIELDS)
    return {name: [fields.get(name) for fields in given] for name in names}
