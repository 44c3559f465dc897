"""A folder of images and a folder of masks, matched by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.summary_text import listed
from fedlens.base.threads import map_threads
from fedlens.core.dataset_info import VOID
from fedlens.data.decoding import QUARTER_TURNS, orientation_of, stored_ids
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.clients import describe
from fedlens.data.formats.folder_listing import add_misnamed, folders, image_names, stem
from fedlens.data.formats.probe import probe_all, stored_sizes
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import split_named, splits_of_folders

_NAMED = 5  # ids that a sentence lists


def fill(scan: Scan) -> None:
    """Completes the scan of a folder; problems are added to `scan.findings`. Masks are always decoded."""
    scan.format = "mask-folder"
    scan.classes, void = tuple(scan.settings["classes"]), int(scan.settings.get("void", VOID))
    ids = _ids(scan.classes, scan.settings.get("ids"), void)
    folder_of = {kind: str(scan.settings.get(kind, kind)).strip("/") for kind in ("images", "masks")}
    for kind, folder in folder_of.items():
        if not (scan.folder / folder).is_dir():
            hint = f"make it, or name another with data.dataset.{kind}"
            scan.findings.add_whole(scan.folder / folder, f"the folder of {kind} does not exist", hint)
            return
    scan.image_folders = (folder_of["images"],)
    images = _match(scan, folder_of["images"], folder_of["masks"], str(scan.settings.get("suffix", "")))
    first_folders = folders(scan.folder / folder_of["images"], scan.folder)
    in_splits = bool(first_folders) and all(map(split_named, first_folders))
    without_mask, scan.bad = scan.bad, set()  # so that `describe` lists the problems of these images too
    describe(scan, inner=[name.partition("/")[2] for name in images] if in_splits else images)
    scan.bad |= without_mask
    if in_splits and scan.splits is None:
        scan.splits = splits_of_folders(images)
    scan.ids = np.full(256, VOID, np.uint8)
    scan.ids[ids] = np.arange(len(scan.classes))
    _check_pairs(scan, ids, void)


@reader(fill)
def mask_folder(
    *,
    path: common.Folder,
    classes: Annotated[
        list[str],
        Field(min_length=2, max_length=255, description="names of the classes, in the order of `ids`"),
    ],
    ids: Annotated[
        list[Annotated[int, Field(ge=0, le=255)]] | None,
        Field(description="id of each class in the masks; by default 0 for the first, then 1, ..."),
    ] = None,
    size: common.Size = None,
    channels: common.Channels = 3,
    fit: common.Fit = "crop",
    images: Annotated[str, Field(min_length=1, description="folder of the images, below `path`")] = "images",
    masks: Annotated[str, Field(min_length=1, description="folder of the masks, below `path`")] = "masks",
    suffix: Annotated[
        str, Field(description="what a mask's name adds to its image's before the ending, such as '_mask'")
    ] = "",
    void: Annotated[int, Field(ge=0, le=255, description="id of pixels without a class")] = VOID,
) -> None:
    """Images and masks of class ids: `path/images/x.jpg` with `path/masks/x.png`, or `.../train/x.jpg` in both.

    A mask is the file of the same folder and name below `masks`, with `suffix` and any ending. It has one channel.
    The value of a pixel (or its position in the palette) is the position of its class in `classes`, or that of
    `ids`, or `void`. If 0 means unlabelled and classes are numbered from 1 on, set `void=0, ids=[1, 2, 3]`. Masks are
    scaled by the nearest neighbour; pixels that `fit` adds are void.

    The split is the column `split` of a `table`; else the first folder below `images`, if all are named train, test
    or val; else a share `test` is held out, of each client alike. `client_level` counts folders below that; paths
    in a table start at `path`. EXIF tags that turn photographs are not applied: a mask belongs to the pixels as they
    are stored. Mean and deviation are of at most 1,000 training images. `root` and `download` are not used.

    Raises `ConfigError` if settings contradict each other, and `DataError` with all problems of the files; see
    `fedlens data check`.
    """


def _ids(classes: Sequence[str], given: list[int] | None, void: int) -> list[int]:
    """The id of each class in the masks. Raises `ConfigError` if an id has two meanings."""
    ids = list(range(len(classes))) if given is None else given
    if len(ids) != len(classes):
        what = f"there are {len(classes)} classes and {len(ids)} ids"
        raise ConfigError(what, where="ids", hint="give one id for each class, in the order of classes")
    for value in ids:
        users = [f"'{name}'" for name, used in zip(classes, ids, strict=True) if used == value]
        if len(users) > 1:
            raise ConfigError(
                f"the id {value} is {' and '.join(users)}", where="ids", hint="give each its own"
            )
    if void in ids:
        what = f"the id {void} is both void and the class '{classes[ids.index(void)]}'"
        hint = "take a number that is no class"
        if given is None:
            others = [value for value in range(len(ids) + 1) if value != void]
            hint += f", or give the id of each class in the masks, such as data.dataset.ids = {others}"
        raise ConfigError(what, where="void", hint=hint)
    return ids


def _match(scan: Scan, images: str, masks: str, suffix: str) -> list[str]:
    """Sets the images and their masks, matched by folder and name; returns the images below their folder.

    An image without a mask of its own is faulty.
    """
    names, other_files = image_names(scan.folder / images, scan.folder, scan.findings)
    mask_names, other_masks = image_names(scan.folder / masks, scan.folder, scan.findings)
    add_misnamed(scan.folder / images, other_files, scan.findings)
    add_misnamed(scan.folder / masks, other_masks, scan.findings)
    mask_of: dict[str, str] = {}
    for name in mask_names:
        where, mask_stem = scan.folder / masks / name, stem(name)
        if not mask_stem.endswith(suffix):
            what = f"the name of the mask does not end in '{suffix}'"
            scan.findings.add(where, what, "rename it, or change the setting suffix")
        elif (first := mask_of.setdefault(mask_stem.removesuffix(suffix), name)) != name:
            what = f"the mask belongs to the same image as '{first}'"
            scan.findings.add(where, what, "remove one of them")
    scan.names, scan.masks, stems = [f"{images}/{name}" for name in names], [], set()
    for row, name in enumerate(names):
        where, image_stem = scan.folder / images / name, stem(name)
        mask = mask_of.get(image_stem, "")
        if image_stem in stems:
            mask = ""
            scan.reject(row, where, "another image has the same name apart from the ending", "rename one")
        elif not mask:
            what = f"the image has no mask '{masks}/{image_stem}{suffix}.png'"
            scan.reject(row, where, what, "add it, or remove the image")
        scan.masks.append(mask and f"{masks}/{mask}")
        stems.add(image_stem)
    for mask_stem, name in mask_of.items():
        if mask_stem not in stems:
            what = f"the mask has no image '{images}/{mask_stem}.*'"
            scan.findings.add(scan.folder / masks / name, what, "add it, or remove the mask")
    return names


def _check_pairs(scan: Scan, ids: Sequence[int], void: int) -> None:
    """Opens images and masks, and compares their sizes, modes and ids."""
    assert scan.masks is not None
    masks = scan.masks
    scan.headers = probe_all(scan.folder, scan.names, scan.findings, full=scan.full)
    sizes = stored_sizes(scan.headers)
    with_mask = [row for row, mask in enumerate(masks) if mask]
    mask_names = [masks[row] for row in with_mask]
    mask_headers = probe_all(scan.folder, mask_names, scan.findings, mask=True)
    mask_sizes = dict(zip(with_mask, stored_sizes(mask_headers), strict=True))
    scan.bad.update(row for row in range(len(masks)) if sizes[row] is None or mask_sizes.get(row) is None)
    readable = [row for row, size in mask_sizes.items() if size is not None]
    found_counts = list(map_threads(lambda row: _counts(scan.folder / masks[row]), readable))
    usual = _usual_unknown([found for found in found_counts if not isinstance(found, tuple)], ids, void)
    pixels: dict[int, NDArray[np.int64]] = {}
    for row, found in zip(readable, found_counts, strict=True):
        problem = found if isinstance(found, tuple) else _unknown_ids(found, ids, void, usual)
        if problem is not None:
            scan.bad.add(row)
            scan.findings.add(scan.folder / masks[row], *problem)
        elif not isinstance(found, tuple):
            pixels[row] = found[[*ids, void]]
    for row in readable:
        size, mask_size = sizes[row], mask_sizes[row]
        if size is None or mask_size is None or size == mask_size:
            continue
        what = f"the mask is {mask_size[0]}x{mask_size[1]}, and its image {size[0]}x{size[1]} pixels"
        turned = orientation_of(scan.folder / scan.names[row]) in QUARTER_TURNS and size == mask_size[::-1]
        hint = "the image has a tag that turns it: save it turned" if turned else "export one of them again"
        scan.bad.add(row)
        scan.findings.add(scan.folder / masks[row], what, hint)
    _check_pixels(scan, {row: counts for row, counts in pixels.items() if row not in scan.bad})


def _check_pixels(scan: Scan, pixels: Mapping[int, NDArray[np.int64]]) -> None:
    """Sets the pixels of each class; warns of masks of the background alone, and of classes without a pixel."""
    assert scan.masks is not None
    if not pixels:
        return
    total = np.sum(list(pixels.values()), axis=0)
    counted = (*scan.classes, "no class" if "void" in scan.classes else "void")
    scan.pixels = {name: int(count) for name, count in zip(counted, total, strict=True)}
    first, masks = scan.classes[0], [(scan.masks[row], counts) for row, counts in pixels.items()]
    alone = [name for name, counts in masks if counts[0] and not counts[1:-1].any()]
    void = [name for name, counts in masks if not counts[:-1].any()]
    for names, what in ((alone, f"no class but '{first}'"), (void, "no class, only void")):
        if names:
            number = "1 mask shows" if len(names) == 1 else f"{len(names):,} of {len(masks):,} masks show"
            hint = "check that their objects were drawn; a mask may be empty on purpose"
            scan.findings.warn(scan.folder, f"{number} {what}: {listed(names)}", hint)
    if absent := [name for name, count in zip(scan.classes, total[:-1], strict=True) if not count]:
        what = "no mask has a pixel of " + ", ".join(f"'{name}'" for name in absent[:_NAMED])
        more = f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
        scan.findings.warn(scan.folder, f"{what}{more}", "check data.dataset.classes and ids")


def _counts(path: Path) -> NDArray[np.int64] | tuple[str, str]:
    """int64 [256], the pixels of each id in a mask; (problem, hint) if it cannot be read."""
    try:
        with Image.open(path) as image:
            counts: NDArray[np.int64] = np.bincount(stored_ids(image).ravel(), minlength=256)
            return counts
    except DataError as error:
        return error.what, error.hint or ""
    except Exception as error:  # a damaged file can make a decoder raise any exception
        return f"the mask cannot be decoded: {error or type(error).__name__}", "copy or export it again"


def _usual_unknown(counts: Sequence[NDArray[np.int64]], ids: Sequence[int], void: int) -> int | None:
    """The id without a class that most masks have, if none has void: it likely is void. None if there is none."""
    if len(counts) < 2 or any(each[void] for each in counts):
        return None
    masks = np.sum([each > 0 for each in counts], axis=0)
    masks[list(ids)] = 0
    return int(masks.argmax()) if 2 * masks.max() > len(counts) else None


def _unknown_ids(
    counts: NDArray[np.int64], ids: Sequence[int], void: int, usual: int | None
) -> tuple[str, str] | None:
    """(problem, hint) if a mask has ids that are no class and not void; `usual` is that of `_usual_unknown`."""
    wrong = [int(value) for value in np.flatnonzero(counts) if value not in (*ids, void)]
    if not wrong:
        return None
    shown = [f"{value} in {counts[value]:,} pixels" for value in wrong[:_NAMED]]
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    span = f"{ids[0]} .. {ids[-1]}"
    known = span if list(ids) == list(range(ids[0], ids[0] + len(ids))) else listed([str(i) for i in ids])
    what = f"the mask has ids that are neither a class ({known}) nor void ({void}): {', '.join(shown)}{more}"
    if usual in wrong:
        return (
            what,
            f"most masks have {usual}: set data.dataset.void = {usual} if it means no class, or name its class",
        )
    return what, "check data.dataset.classes, ids and void, or write the mask again"
