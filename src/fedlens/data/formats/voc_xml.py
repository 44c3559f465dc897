"""Boxes in the XML of Pascal VOC, one file an image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fedlens.base.errors import DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.detection import (
    RawBox,
    RawBoxes,
    add_same_stem,
    below,
    by_stem,
    complete,
    folder_splits,
    read_sizes,
)
from fedlens.data.formats.file_safety import read_bytes, read_text
from fedlens.data.formats.folder_listing import folders, image_names, stem
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import label_of_class

_SIDES = ("xmin", "ymin", "xmax", "ymax")

Element = Any  # of lxml, which has no types


@dataclass(frozen=True)
class _Listing:
    """One image that is to be read: its name without ending, the line that lists it, and its split."""

    stem: str
    where: str
    split: str | None = None


@dataclass(frozen=True)
class _Layout:
    """The folders of the images and of the annotations, and their files by name without ending."""

    images: Path
    annotations: Path
    image_files: Mapping[str, list[str]]
    xml_files: Mapping[str, str]


def fill(scan: Scan) -> None:
    """Completes the scan of a folder; problems are added to `scan.findings`."""
    scan.format = "voc-xml"
    settings, findings = scan.settings, scan.findings
    layout = _layout(scan)
    if layout is None:
        return
    listings = _listings(scan, scan.folder / settings["lists"], settings["train_list"])
    if listings is None:
        stems = sorted({*layout.image_files, *layout.xml_files})
        listings = [_Listing(stem, str(scan.folder)) for stem in stems]
    pairs = [(each, image) for each in listings if (image := _image(each, layout, findings)) is not None]
    inner = [image for _, image in pairs]
    scan.image_folders = (settings["images"],)
    scan.names = [below(settings["images"], image) for image in inner]
    scan.splits = [listing.split for listing, _ in pairs if listing.split is not None] or None
    annotations = [_annotation(*pair, layout, settings["first_pixel"], findings) for pair in pairs]
    if scan.splits is None:
        scan.splits, inner = folder_splits(inner, scan.folder, findings)
    scan.bad.update(row for row, annotation in enumerate(annotations) if annotation is None)
    sources = ["" if annotation is None else str(annotation.path) for annotation in annotations]
    read_sizes(scan, [annotation.size if annotation else None for annotation in annotations], sources)
    usable = [annotation for annotation in annotations if annotation is not None]
    categories = {str(box.category) for annotation in usable for box in annotation.objects}
    scan.classes = tuple(settings["classes"] or sorted(categories))
    if difficult := sum(annotation.difficult for annotation in usable):
        scan.notes.append(f"{difficult:,} objects are marked difficult, and kept")
    raw = [annotation.objects if annotation else () for annotation in annotations]
    complete(scan, [RawBoxes.of(raw)], label_of_class(scan.classes), inner=inner)


@reader(fill)
def voc_xml(
    *,
    path: common.Folder,
    images: Annotated[str, Field(description="folder of the images, below `path`")] = "JPEGImages",
    annotations: Annotated[str, Field(description="folder of the XML files, below `path`")] = "Annotations",
    lists: Annotated[
        str, Field(description="folder of train.txt, val.txt, test.txt, below `path`, if any")
    ] = "ImageSets/Main",
    train_list: Annotated[
        Literal["train", "trainval"] | None,
        Field(description="list of the training images; by default train.txt, or else trainval.txt"),
    ] = None,
    first_pixel: Annotated[
        Literal[0, 1],
        Field(description="1: boxes count pixels from 1 and include the last (VOC); 0: edges counted from 0"),
    ] = 1,
    classes: common.Classes = None,
    size: common.Size = None,
    channels: common.Channels = 3,
    fit: common.Fit = "pad",
) -> None:
    """Boxes as Pascal VOC has them: `path/JPEGImages/x.jpg`, `path/Annotations/x.xml`, lists in `ImageSets/Main`.

    An image and its XML file have the same name. With `images="."` and `annotations="."` both are in one folder.

    | what | source |
    |---|---|
    | class | `<name>` of an object; sorted by name, or `classes`, which then lists all that may occur |
    | split | column `split` of the table; else the lists; else folders named train, test or val; else a share
    `test` is held out |
    | client | `client_column`, `client_level` (below the folder of images) or `client_pattern`; else column
    `client` of the table, if any |

    See `read_annotation` for how pixels are counted, and `fedlens.data.formats.detection.check_boxes` for boxes that do
    not fit. Objects marked difficult are kept. `root` and `download` are not used.

    Raises `ConfigError` if settings contradict each other, and `DataError` with all problems of the files; see
    `fedlens data check`.
    """


def _layout(scan: Scan) -> _Layout | None:
    """The files of both folders; None, with problems, if a folder does not exist."""
    paths = {key: scan.folder / scan.settings[key] for key in ("images", "annotations")}
    missing = [key for key, path in paths.items() if not path.is_dir()]
    for key in missing:
        inner = ", ".join(folders(scan.folder, scan.folder))
        hint = (
            f"name it with the setting {key}; {f'its folders are: {inner}' if inner else 'it has no folders'}"
        )
        scan.findings.add_whole(scan.folder, f"there is no folder '{scan.settings[key]}' for the {key}", hint)
    if missing:
        return None
    image_files, other_files = image_names(paths["images"], scan.folder, scan.findings)
    # Both may be in one folder, whose problems are reported once.
    if paths["annotations"].resolve() != paths["images"].resolve():
        _, other_files = image_names(paths["annotations"], scan.folder, scan.findings)
    xml_files = {stem(name): name for name in other_files if name.lower().endswith(".xml")}
    return _Layout(**paths, image_files=by_stem(image_files), xml_files=xml_files)


def _listings(scan: Scan, folder: Path, train: str | None) -> list[_Listing] | None:
    """The images that the lists in `folder` name; None if there are no lists."""
    findings = scan.findings
    if train is None:
        train = "train" if (folder / "train.txt").is_file() else "trainval"
    elif not (folder / f"{train}.txt").is_file():
        what = f"there is no list '{train}.txt'"
        findings.add_whole(folder, what, "add it, or leave train_list out")
    names = {"train": train, "test": "test"} | ({"validation": "val"} if train == "train" else {})
    files = {split: folder / f"{name}.txt" for split, name in names.items()}
    files = {split: file for split, file in files.items() if file.is_file()}
    listings = []
    for split, file in files.items():
        listings += [_Listing(*each, split) for each in read_list(file, findings, scan.folder)]
    return listings if files else None


def read_list(path: Path, findings: Findings, folder: Path | None = None) -> list[tuple[str, str]]:
    """(name, file and line) of each image in a list, one a line; a name that occurs a second time is a problem."""
    first_lines: dict[str, int] = {}
    for number, line in enumerate((findings.attempt(read_text, path, folder) or "").splitlines(), 1):
        name = line.strip()
        if name and (first := first_lines.setdefault(name, number)) != number:
            what = f"'{name}' is in line {first} too"
            findings.add(f"{path}, line {number}", what, "remove one of the lines")
    return [(name, f"{path}, line {line}") for name, line in first_lines.items() if name]


def _image(listing: _Listing, layout: _Layout, findings: Findings) -> str | None:
    """The image of a listing, below the folder of images; None, and a problem, if there is not exactly one."""
    names = layout.image_files.get(listing.stem, [])
    if len(names) == 1:
        return names[0]
    if len(names) > 1:
        add_same_stem(layout.images, names, findings)
    elif listing.split is not None:
        what = f"there is no image '{listing.stem}' in {layout.images.name}"
        findings.add(listing.where, what, "add the image, or remove the line")
    else:
        where = layout.annotations / layout.xml_files[listing.stem]
        what = f"the annotation has no image '{listing.stem}' in {layout.images.name}"
        findings.add(where, what, "add the image, or remove the annotation")
    return None


def _annotation(
    listing: _Listing, image: str, layout: _Layout, first_pixel: int, findings: Findings
) -> VocAnnotation | None:
    """The annotation of an image; None, and a problem, if it is missing or cannot be used."""
    if listing.stem not in layout.xml_files:
        what = f"the image has no '{listing.stem}.xml' in {layout.annotations.name}"
        hint = "write one, without any <object> if it shows none, or remove the image"
        findings.add(layout.images / image, what, hint)
        return None
    path = layout.annotations / layout.xml_files[listing.stem]
    annotation = read_annotation(path, findings, first_pixel)
    if annotation is None or not annotation.file:
        return annotation
    # Tools leave old names behind, which is harmless unless another image has that name.
    file = annotation.file.replace("\\", "/").rpartition("/")[2]
    other = "/".join([*listing.stem.split("/")[:-1], file.rpartition(".")[0] or file])
    if other != listing.stem and other in layout.image_files:
        what = f"<filename> is '{annotation.file}', which is another image than '{image}'"
        findings.add(path, what, "check which of the two the boxes belong to, and give both files one name")
        return None
    return annotation


@dataclass(frozen=True)
class VocAnnotation:
    """The contents of one file: the file name and size of the image that it states, and its objects.

    `difficult` counts those that are marked as difficult, kept or left out.
    """

    path: Path
    file: str | None
    size: tuple[int, int] | None
    objects: tuple[RawBox, ...]
    difficult: int


def read_annotation(
    path: Path, findings: Findings, first_pixel: int = 1, *, difficult: bool = True, sized: bool = False
) -> VocAnnotation | None:
    """The contents of the file `path`; None, and a problem, if it is not such an XML file.

    Objects marked as difficult are left out unless `difficult`, and a file without <size> is a problem if `sized`.
    An object of VOC may have parts (head, hand, foot) with boxes of their own, which are not read.

    VOC counts pixels from 1 and includes the last one: a box around all of a 640 x 480 image is 1, 1, 640, 480. As
    edges counted from 0 (left, top, right, bottom) that is xmin - 1, ymin - 1, xmax, ymax: 0, 0, 640, 480. With
    `first_pixel` 0 the numbers are such edges already and stay as they are.

    xmax = xmin would be an object one pixel wide in VOC's way of counting. In all data that we have seen it is a slip
    of the mouse (BCCD has two), so it is read as a box without area.
    """
    root = findings.attempt(read_xml, path)
    if root is None:
        return None
    if root.tag != "annotation":
        what = f"the root element is <{root.tag}>, not <annotation>"
        findings.add(f"{path}, line {root.sourceline}", what, "export it in the format of Pascal VOC")
        return None
    objects, marked = [], 0
    for entry in root.findall("object"):
        box = findings.attempt(_object, entry, path, first_pixel)
        if box is not None:
            is_marked = text_of(entry, "difficult") == "1"
            marked += is_marked
            if difficult or not is_marked:
                objects.append(box)
    size = findings.attempt(_size, root, path, sized)
    return VocAnnotation(path, text_of(root, "filename"), size, tuple(objects), marked)


def _object(entry: Element, path: Path, first_pixel: int) -> RawBox:
    """One object. Raises `DataError` if its name or box is missing or wrong."""
    where = f"{path}, line {entry.sourceline}"
    name, box = text_of(entry, "name"), entry.find("bndbox")
    if not name:
        raise DataError("the object has no <name>", where=where, hint="name its class, or remove the object")
    if box is None:
        hint = "draw its box, or remove the object"
        raise DataError(f"the object '{name}' has no <bndbox>", where=where, hint=hint)
    hint = "correct the number, or remove the object"
    xmin, ymin, xmax, ymax = (_number(box, side, path, hint) for side in _SIDES)
    away = first_pixel if xmax > xmin and ymax > ymin else 0
    written = tuple(text_of(box, side) for side in _SIDES)
    return RawBox(f"{path}, line {box.sourceline}", name, (xmin - away, ymin - away, xmax, ymax), written)


def _size(root: Element, path: Path, needed: bool) -> tuple[int, int] | None:
    """(width, height), if the file states them. Raises `DataError` if they are not whole numbers of pixels."""
    size = root.find("size")
    if size is None:
        if needed:
            raise DataError("it does not state the <size> of its image", where=str(path), hint="state it")
        return None
    hint = "write the pixels of the image, or remove <size>"
    width, height = (_number(size, side, path, hint, least=1) for side in ("width", "height"))
    return int(width), int(height)


def _number(parent: Element, tag: str, path: Path, hint: str, least: int | None = None) -> float:
    """The number in the child `tag`; with `least`, a whole number from there on. Raises `DataError` if it is none."""
    text = text_of(parent, tag)
    if text is None:
        raise DataError(f"<{tag}> is missing", where=f"{path}, line {parent.sourceline}", hint=hint)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isfinite(number) and (least is None or (number >= least and number == int(number))):
        return number
    wanted = "a number" if least is None else f"a whole number from {least} on"
    where = f"{path}, line {parent.find(tag).sourceline}"
    raise DataError(f"<{tag}> is '{text}', not {wanted}", where=where, hint=hint)


def parse_xml(content: bytes, where: str) -> Element:
    """The root element of an XML file, an `lxml.etree` element without comments.

    A document type declaration is refused: annotations have none, and its entities let a file of a few lines expand
    to gigabytes, or read another file. Raises `DataError` with the line of the error if the XML is invalid.

    >>> root = parse_xml(b"<a>\\n<b> 5 </b></a>", "a.xml")
    >>> root.tag, text_of(root, "b"), root.find("b").sourceline
    ('a', '5', 2)
    """
    from lxml import etree  # here, because only VOC's formats need it

    if not content.strip():
        raise DataError("the file is empty", where=where, hint="write it again, or remove it")
    parser = etree.XMLParser(
        resolve_entities=False, load_dtd=False, no_network=True, remove_comments=True, remove_pis=True
    )
    try:
        root = etree.fromstring(content, parser)
    except etree.XMLSyntaxError as error:
        if b"<!DOCTYPE" in content:  # the likely cause of other errors, such as endless entities
            raise _declaration(content, where) from error
        first = parser.error_log[0]
        what = f"the XML is invalid: {first.message.strip()} (column {first.column})"
        place = f"{where}, line {first.line}"
        raise DataError(what, where=place, hint="write the file again, in UTF-8") from error
    if root.getroottree().docinfo.doctype:
        raise _declaration(content, where)
    for element in root.iter("*"):  # some tools write a namespace before the names
        if element.tag[0] == "{":
            element.tag = etree.QName(element).localname
    return root


def _declaration(content: bytes, where: str) -> DataError:
    line = content[: max(content.find(b"<!DOCTYPE"), 0)].count(b"\n") + 1
    what = "it has a document type declaration (<!DOCTYPE>), which is not allowed"
    return DataError(what, where=f"{where}, line {line}", hint="remove the declaration")


def read_xml(path: Path) -> Element:
    """The root element of the file `path`; see `parse_xml`."""
    return parse_xml(read_bytes(path), str(path))


def text_of(element: Element, tag: str) -> str | None:
    """The text of the first child called `tag`, without spaces around it; None if there is no such child."""
    text: str | None = element.findtext(tag)
    return None if text is None else text.strip()
