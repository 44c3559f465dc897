"""A folder of images and a folder of masks, matched by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image, ImageOps
from pydantic import Field

from fedlens.core.errors import ConfigError, DataError
from fedlens.data.dataset import VOID
from fedlens.data.decoding import stored_ids
from fedlens.data.diagnostics import Findings
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.clients import describe, listed
from fedlens.data.formats.folder_listing import folders, image_names
from fedlens.data.formats.probe import probe_all
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import split_named
from fedlens.data.images import decode_threads

_SHOWN = 5  # ids that a sentence names


def scan(path: Path, settings: Mapping[str, Any], findings: Findings, *, full: bool) -> Scan:
    """What is in the folder `path`; everything that is wrong is added to `findings`. Masks are always decoded."""
    classes, void = tuple(settings["classes"]), int(settings.get("void", VOID))
    ids = _ids(classes, settings.get("ids"), void)
    folder_of = {what: str(settings.get(what, what)).strip("/") for what in ("images", "masks")}
    for what, name in folder_of.items():
        if not (path / name).is_dir():
            hint = f"make it, or name another with data.dataset.{what}"
            findings.add(path / name, f"there is no folder of {what}", hint, example=False)
            return Scan("mask-folder", path, classes=classes)
    matched, found_masks = _matched(path, folder_of, str(settings.get("suffix", "")), findings)
    names = [f"{folder_of['images']}/{name}" for name in matched]
    in_splits = _in_splits(path / folder_of["images"])
    inner = [name.partition("/")[2] for name in matched] if in_splits else matched
    described = describe(names, settings, path, findings, inner=inner)
    found = Scan("mask-folder", path, names, classes, masks=found_masks)
    found.columns, found.splits = described.columns, described.splits
    found.bad, found.notes = described.bad, described.notes
    if in_splits and found.splits is None:
        splits = [split_named(name.partition("/")[0]) or "train" for name in matched]
        found.splits = None if set(splits) == {"train"} else splits
    found.ids = np.full(256, VOID, np.uint8)
    found.ids[ids] = np.arange(len(classes))
    found.bad.update(row for row, mask in enumerate(found_masks) if not mask)
    _check_pairs(found, ids, void, findings, full)
    return found


@reader(scan)
def mask_folder(
    *,
    path: common.Folder,
    classes: Annotated[
        list[str],
        Field(min_length=2, max_length=255, description="names of the classes, in the order of `ids`"),
    ],
    ids: Annotated[
        list[Annotated[int, Field(ge=0, le=255)]] | None,
        Field(
            description="number that the masks have for each class; by default 0 for the first, then 1, ..."
        ),
    ] = None,
    size: common.Size = 256,
    channels: common.Channels = 3,
    fit: common.Fit = "crop",
    images: Annotated[str, Field(min_length=1, description="folder of the images, below `path`")] = "images",
    masks: Annotated[str, Field(min_length=1, description="folder of the masks, below `path`")] = "masks",
    suffix: Annotated[
        str, Field(description="what a mask's name has beyond its image's, before the ending: '_mask'")
    ] = "",
    void: Annotated[int, Field(ge=0, le=255, description="the id of pixels that count for nothing")] = VOID,
) -> None:
    """Images and masks of class ids: `path/images/x.jpg` with `path/masks/x.png`, or `.../train/x.jpg` in both.

    A mask is the file of the same folder and name below `masks`, with `suffix` and any ending. It has one
    channel; the number of a pixel (or its position in the palette) is the position of its class in `classes`,
    or that of `ids`, or `void`. Where 0 means that nobody looked, and classes are numbered from 1 on, that is
    `void=0, ids=[1, 2, 3]`. Masks are scaled by the nearest neighbour, and where `fit` fills up, they are void.

    The split is what the column `split` of a `table` says, else the first folder below `images` where these are
    named train, test or val, else a share `test` is held out, of each client alike. `client_level` counts
    folders below that; paths in a table count from `path`. Tags by which photographs are turned are not
    applied: a mask belongs to the pixels as they are stored. Mean and deviation are of 1,000 training images at
    most. Plays no part: `root`, `download`.

    Raises `ConfigError` where settings contradict each other, and `DataError` with all that is wrong with the
    files; see `fedlens data check`.
    """


def _ids(classes: Sequence[str], given: list[int] | None, void: int) -> list[int]:
    """The number that masks have for each class. Raises `ConfigError` where it says two things."""
    ids = list(range(len(classes))) if given is None else given
    if len(ids) != len(classes):
        what = f"there are {len(classes)} classes and {len(ids)} ids"
        raise ConfigError(what, where="ids", hint="give one for each class, in the order of classes")
    twice = next((at for at in ids if ids.count(at) > 1), None)
    if twice is not None:
        both = [f"'{name}'" for name, at in zip(classes, ids, strict=True) if at == twice]
        raise ConfigError(f"the id {twice} is {' and '.join(both)}", where="ids", hint="give each its own")
    if void in ids:
        what = f"the id {void} is void and the class '{classes[ids.index(void)]}' at once"
        hint = "take a number that is no class"
        if given is None:
            others = [at for at in range(len(ids) + 1) if at != void]
            hint += f", or say which the masks have for each class, as data.dataset.ids = {others}"
        raise ConfigError(what, where="void", hint=hint)
    return ids


def _matched(
    path: Path, folder_of: Mapping[str, str], suffix: str, findings: Findings
) -> tuple[list[str], list[str]]:
    """(images below their folder, the mask of each below `path` or ""): matched by folder and name."""
    images, others = image_names(path / folder_of["images"])
    masks, other_masks = image_names(path / folder_of["masks"])
    for folder, surprising in ((folder_of["images"], others), (folder_of["masks"], other_masks)):
        for name in surprising:
            hint = "move it elsewhere, or give it the ending of its format if it is an image"
            findings.add(path / folder / name, "the file is not named as an image is", hint)
    by_stem: dict[str, str] = {}
    for name in masks:
        stem = _stem(name)
        if not stem.endswith(suffix):
            what = f"the name of the mask does not end in '{suffix}'"
            findings.add(path / folder_of["masks"] / name, what, "rename it, or see to the setting suffix")
        elif (first := by_stem.setdefault(stem.removesuffix(suffix), name)) != name:
            what = f"the mask belongs to the same image as '{first}'"
            findings.add(path / folder_of["masks"] / name, what, "remove one of them")
    found, stems = [], set()
    for name in images:
        stem = _stem(name)
        if stem in stems:
            findings.add(
                path / folder_of["images"] / name,
                "another image has the same name but for the ending",
                "rename one",
            )
        elif stem not in by_stem:
            wanted = f"{folder_of['masks']}/{stem}{suffix}.png"
            findings.add(
                path / folder_of["images"] / name,
                f"the image has no mask '{wanted}'",
                "add it, or remove the image",
            )
        found.append(by_stem[stem] if stem in by_stem and stem not in stems else "")
        stems.add(stem)
    for stem, name in by_stem.items():
        if stem not in stems:
            what = f"the mask has no image '{folder_of['images']}/{stem}.*'"
            findings.add(path / folder_of["masks"] / name, what, "add it, or remove the mask")
    return images, [f"{folder_of['masks']}/{name}" if name else "" for name in found]


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _in_splits(folder: Path) -> bool:
    found = folders(folder)
    return bool(found) and all(split_named(name) for name in found)


def _check_pairs(found: Scan, ids: Sequence[int], void: int, findings: Findings, full: bool) -> None:
    """Opens images and masks, and looks at what has to fit: sizes, modes, ids."""
    assert found.masks is not None
    assert found.ids is not None
    sizes = probe_all(found.folder, found.names, findings, full=full)
    masked = [row for row, mask in enumerate(found.masks) if mask]
    mask_sizes = probe_all(found.folder, [found.masks[row] for row in masked], findings, mask=True)
    found.bad.update(row for row, size in enumerate(sizes) if size is None)
    pairs = [(row, size) for row, size in zip(masked, mask_sizes, strict=True)]
    found.bad.update(row for row, size in pairs if size is None)
    readable = [row for row, size in pairs if size is not None]

    def one(row: int) -> tuple[str, str] | None:
        return _wrong_ids(found, row, ids, void)

    with ThreadPoolExecutor(decode_threads()) as pool:
        for row, wrong in zip(readable, pool.map(one, readable), strict=True):
            if wrong is not None:
                found.bad.add(row)
                findings.add(found.folder / found.masks[row], *wrong)
    for row, mask_size in pairs:
        size = sizes[row]
        if size is None or mask_size is None or size == mask_size:
            continue
        found.bad.add(row)
        turned = size == mask_size[::-1] and _is_turned(found.folder / found.names[row])
        findings.add(
            found.folder / found.masks[row],
            f"the mask is {mask_size[0]}x{mask_size[1]}, and its image {size[0]}x{size[1]} pixels",
            "the image has a tag that turns it: save it turned" if turned else "export one of them again",
        )


def _wrong_ids(found: Scan, row: int, ids: Sequence[int], void: int) -> tuple[str, str] | None:
    """(what is wrong with the ids of a mask and in how many pixels, what to do), or None."""
    assert found.masks is not None
    try:
        with Image.open(found.folder / found.masks[row]) as image:
            counts = np.bincount(stored_ids(image).ravel(), minlength=256)
    except DataError as error:
        return error.what, error.hint or ""
    except Exception as error:  # a damaged file can bring a decoder to raise anything at all
        return f"the mask cannot be decoded: {error or type(error).__name__}", "copy or export it again"
    counts[[*ids, void]] = 0  # those are as they should be
    wrong: list[int] = np.flatnonzero(counts).tolist()
    if not wrong:
        return None
    told = [f"{at} in {counts[at]:,} pixels" for at in wrong[:_SHOWN]]
    rest = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    span = f"{ids[0]} .. {ids[-1]}"
    known = span if list(ids) == list(range(ids[0], ids[0] + len(ids))) else listed([str(at) for at in ids])
    what = f"the mask has ids that are no class ({known}) nor void ({void})"
    hint = "see to data.dataset.classes, ids and void, or write the mask anew"
    return f"{what}: {', '.join(told)}{rest}", hint


def _is_turned(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).size != image.size
    except Exception:  # it only serves a hint
        return False
