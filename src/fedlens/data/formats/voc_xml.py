"""Boxes in the XML of Pascal VOC: one file an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fedlens.data.diagnostics import Findings
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.detection import below, by_stem, detected, folder_splits, numbered, stored_sizes
from fedlens.data.formats.folder_listing import folders, image_names
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.texts import read_text
from fedlens.data.formats.voc_annotation import VocAnnotation, read_annotation


@dataclass(frozen=True)
class _Row:
    """One image that is to be read: its name without ending, its split, and where it is listed."""

    stem: str
    split: str | None
    where: str


@dataclass(frozen=True)
class _Layout:
    """What lies where: the files of the images and of the annotations by their names without ending."""

    images: Path
    annotations: Path
    pictures: Mapping[str, list[str]]
    texts: Mapping[str, str]


def scan(path: Path, settings: Mapping[str, Any], findings: Findings, *, full: bool) -> Scan:
    """What is in the folder `path`; everything that is wrong is added to `findings`."""
    found = Scan("voc-xml", path)
    layout = _layout(path, settings, findings)
    if layout is None:
        return found
    rows = _listed(path / settings["lists"], settings["train_list"], findings)
    if rows is None:
        rows = [_Row(stem, None, str(path)) for stem in sorted({*layout.pictures, *layout.texts})]
    pairs = [(row, name) for row in rows if (name := _picture(row, layout, findings)) is not None]
    inner = [name for _, name in pairs]
    found.splits = [row.split for row, _ in pairs if row.split is not None] or None
    annotations = [_annotation(row, name, layout, settings["first_pixel"], findings) for row, name in pairs]
    found.names = [below(settings["images"], name) for name in inner]
    if found.splits is None:
        found.splits, inner = folder_splits(inner, path, findings)
    found.bad.update(row for row, one in enumerate(annotations) if one is None)
    stated = [None if one is None else one.size for one in annotations]
    sources = ["" if one is None else str(one.path) for one in annotations]
    found.sizes = stored_sizes(found, stated, sources, findings, full=full)
    there = [one for one in annotations if one is not None]
    found.classes = tuple(
        settings["classes"] or sorted({str(box.category) for one in there for box in one.objects})
    )
    if difficult := sum(one.difficult for one in there):
        found.notes.append(f"{difficult:,} objects are marked difficult, and kept")
    raw = [() if one is None else one.objects for one in annotations]
    return detected(found, raw, numbered(found.classes), settings, findings, inner=inner)


@reader(scan)
def voc_xml(
    *,
    path: common.Folder,
    images: Annotated[str, Field(description="folder of the images, below `path`")] = "JPEGImages",
    annotations: Annotated[str, Field(description="folder of the XML files, below `path`")] = "Annotations",
    lists: Annotated[
        str, Field(description="folder of train.txt, val.txt, test.txt, below `path`; it may be missing")
    ] = "ImageSets/Main",
    train_list: Annotated[
        Literal["train", "trainval"] | None,
        Field(
            description="list that is trained on; by default train.txt, or trainval.txt where that is missing"
        ),
    ] = None,
    first_pixel: Annotated[
        Literal[0, 1],
        Field(
            description="1: boxes count pixels from 1 and include the last, as VOC; 0: edges counted from 0"
        ),
    ] = 1,
    classes: common.Classes = None,
    size: common.Size = 512,
    channels: common.Channels = 3,
    fit: common.Fit = "pad",
) -> None:
    """Boxes as Pascal VOC has them: `path/JPEGImages/x.jpg`, `path/Annotations/x.xml`, lists in `ImageSets/Main`.

    An image and its XML file have the same name. With `images="."` and `annotations="."` they lie side by side.

    | what | where it is read |
    |---|---|
    | class | `<name>` of an object; sorted by name, or `classes`, which then are all there may be |
    | split | column `split` of the table; else the lists; else folders named train, test or val; else a share
    `test` is held out |
    | client | `client_column`, `client_level` (below the folder of images) or `client_pattern`; else column
    `client` of the table, if any |

    See `read_annotation` for how pixels are counted, and `fedlens.data.formats.objects.check_boxes` for what becomes
    of boxes that do not fit. Objects marked difficult are kept. Plays no part: `root`, `download`.

    Raises `ConfigError` where settings contradict each other, and `DataError` with all that is wrong with the
    files; see `fedlens data check`.
    """


def _layout(path: Path, settings: Mapping[str, Any], findings: Findings) -> _Layout | None:
    """The files there are; None, and findings, where a folder is not there."""
    whole = len(findings)
    for key in ("images", "annotations"):
        if not (path / settings[key]).is_dir():
            here = ", ".join(folders(path)) or "no folder"
            hint = f"name it with the setting {key}; there is {here}"
            findings.add(path, f"there is no folder '{settings[key]}' for the {key}", hint, example=False)
    if len(findings) > whole:
        return None
    images, annotations = path / settings["images"], path / settings["annotations"]
    _, others = image_names(annotations)
    texts = {name.rpartition(".")[0]: name for name in others if name.lower().endswith(".xml")}
    return _Layout(images, annotations, by_stem(image_names(images)[0]), texts)


def _listed(folder: Path, train: str | None, findings: Findings) -> list[_Row] | None:
    """The images that the lists in `folder` name; None where there are no lists."""
    if train is None:
        train = "train" if (folder / "train.txt").is_file() else "trainval"
    elif not (folder / f"{train}.txt").is_file():
        what = f"there is no list '{train}.txt'"
        findings.add(folder, what, "put it there, or leave train_list out", example=False)
    wanted = {"train": train, "test": "test"} | ({"validation": "val"} if train == "train" else {})
    lists = {split: folder / f"{name}.txt" for split, name in wanted.items()}
    if not any(file.is_file() for file in lists.values()):
        return None
    rows = []
    for split, file in lists.items():
        seen: dict[str, int] = {}
        text = (read_text(file, findings) or "") if file.is_file() else ""
        for number, line in enumerate(text.splitlines(), 1):
            stem, where = line.strip(), f"{file}, line {number}"
            if stem in seen:
                findings.add(where, f"'{stem}' stands in line {seen[stem]} too", "remove one of the lines")
            elif stem:
                seen[stem] = number
                rows.append(_Row(stem, split, where))
    return rows


def _picture(row: _Row, layout: _Layout, findings: Findings) -> str | None:
    """The image of a row, below the folder of images; None, and a finding, where there is not exactly one."""
    names = layout.pictures.get(row.stem, [])
    if len(names) == 1:
        return names[0]
    if len(names) > 1:
        what = f"{' and '.join(names)} are called alike, and one annotation cannot be of both"
        findings.add(layout.images, what, "rename or remove one of them")
    elif row.split is not None:
        what = f"there is no image '{row.stem}' in {layout.images.name}"
        findings.add(row.where, what, "put the image there, or remove the line")
    else:
        what = f"there is no image '{row.stem}' in {layout.images.name} that it belongs to"
        hint = "put the image there, or remove the annotation"
        findings.add(layout.annotations / layout.texts[row.stem], what, hint)
    return None


def _annotation(
    row: _Row, name: str, layout: _Layout, first_pixel: int, findings: Findings
) -> VocAnnotation | None:
    """What is said of the image `name`; None, and a finding, where that is nothing that can be used."""
    if row.stem not in layout.texts:
        what = f"the image has no '{row.stem}.xml' in {layout.annotations.name}"
        hint = "write one, without any <object> if it shows none, or remove the image"
        findings.add(layout.images / name, what, hint)
        return None
    found = read_annotation(layout.annotations / layout.texts[row.stem], findings, first_pixel)
    if found is None or not found.file:
        return found
    # Tools leave old names behind, which do no harm unless another image is called so.
    said = found.file.replace("\\", "/").rpartition("/")[2]
    other = "/".join([*row.stem.split("/")[:-1], said.rpartition(".")[0] or said])
    if other != row.stem and other in layout.pictures:
        what = f"<filename> says '{found.file}', which is another image than '{name}'"
        findings.add(found.path, what, "see which of the two its boxes are of, and name both files alike")
        return None
    return found
