"""COCO 2017: photographs of everyday scenes, with boxes around 80 kinds of objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.data.box_transforms import placed
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import damaged, locate, published, read_json
from fedlens.data.datasets.folders import check_present
from fedlens.data.datasets.picture_size import HowToFit, Size, size_of
from fedlens.data.images import Fit, ImageFiles, Paths

# All that is used. The rest, polygons above all, is thrown away while the file is read.
_USED = frozenset({"images", "annotations", "categories", "id", "name", "file_name", "width", "height"}) | {
    "image_id",
    "category_id",
    "bbox",
    "iscrowd",
}


@dataclass(frozen=True, eq=False)
class Instances:
    """The content of a file of instances, image by image in the order of the file.

    Args:
        ids: int64 [n], of the images; `files` their names, `sizes` int64 [n, 2] their width and height.
        given: the boxes in pixels of the files; a label is a position in `classes`.
        classes: the names of the categories in the order of their ids.
        crowds: how many boxes around crowds were left out.
    """

    ids: NDArray[np.int64]
    files: Paths
    sizes: NDArray[np.int64]
    given: Boxes
    classes: tuple[str, ...]
    crowds: int


def coco(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: Size = 640,
    fit: HowToFit = "pad",
    empty: Annotated[bool, Field(description="keep training images without objects")] = True,
) -> Dataset:
    """COCO 2017 for detection: 118,287 + 5,000 photographs, 80 classes; `seed` plays no part.

    Reads `root/coco/{annotations/instances_train2017.json, annotations/instances_val2017.json, train2017,
    val2017}`. The labels of the published test split are withheld, so val is the test data here. The category ids
    skip numbers (1 to 90); the classes are the 80 categories in the order of their ids.

    A published box [x, y, width, height] comes out as its edges [x, y, x + width, y + height], in pixels of the
    delivered image. Left out, and counted in `Dataset.notes`: boxes around crowds (`iscrowd`), which stand for no
    single object, and boxes without area. An image without objects stays as an example that has none, as YOLOv5
    in fedcv trains on it, unless `empty` is false; of the test split all images stay. Column `image`: the id of
    the image. There is no natural client.

    The JSON of the training split has 450 MB: reading takes some ten seconds and 1 GB.

    Raises `DataError` if files are missing or contradict each other; with `download` too, because no checksum
    of the archives is published.

    Source: Lin et al. 2014, Microsoft COCO.
    """
    lists = [f"coco/annotations/instances_{split}2017.json" for split in ("train", "val")]
    instances = [read_instances(path) for path in locate("coco", root, files=[tuple(lists)])]
    if instances[0].classes != instances[1].classes:
        raise damaged("the two files have different categories", root / "coco" / "annotations")
    to = size_of(size)
    train, train_notes = _examples(root, "train", instances[0], to, fit, empty)
    test, test_notes = _examples(root, "val", instances[1], to, fit, True)
    return published("coco", (train, test), instances[0].classes, notes=(*train_notes, *test_notes))


def _examples(
    root: Path, split: str, instances: Instances, size: tuple[int, int], fit: Fit, empty: bool
) -> tuple[Examples, tuple[str, ...]]:
    names = [f"coco/{split}2017/{instances.files[at]}" for at in range(len(instances.files))]
    check_present(root, names, str(root / "coco" / "annotations" / f"instances_{split}2017.json"))
    result = placed(instances.given, instances.sizes, *size, fit)
    images = ImageFiles(root, Paths.of(names), 3, *size, fit)
    examples = Examples(images, result.boxes, {"image": instances.ids})
    notes = list(result.notes(split))
    if instances.crowds:
        notes.append(f"{split}, boxes left out because they are around a crowd: {instances.crowds:,}")
    without = np.diff(result.boxes.offsets) == 0
    if without.any() and not empty:
        examples = examples.take(np.flatnonzero(~without))
        notes.append(f"{split}, images left out because they show no object: {int(without.sum()):,}")
    return examples, tuple(notes)


def read_instances(path: Path) -> Instances:
    """Reads a file of instances. Raises `DataError` if it is damaged or contradicts itself."""
    content = read_json(path, _used)
    try:
        return _arranged(content, path)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise damaged(f"it is not in COCO's format of instances: {reason}", path) from error


def _used(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if name in _USED}


def _arranged(content: Mapping[str, Any], path: Path) -> Instances:
    """The tables of the file as arrays, the boxes sorted by image; the order within an image stays."""
    images, categories = content["images"], sorted(content["categories"], key=lambda each: each["id"])
    ids = np.array([each["id"] for each in images], np.int64)
    objects = [each for each in content["annotations"] if not each.get("iscrowd", 0)]
    corners = np.array([each["bbox"] for each in objects], np.float64).reshape(-1, 4)
    if not np.isfinite(corners).all():
        raise ValueError("a box has a coordinate that is not finite")
    rows = _positions([each["image_id"] for each in objects], ids, "image", path)
    category_ids = np.array([each["id"] for each in categories])
    labels = _positions([each["category_id"] for each in objects], category_ids, "category", path)
    order = np.argsort(rows, kind="stable")
    offsets = np.searchsorted(rows[order], np.arange(len(ids) + 1))
    corners[:, 2:] += corners[:, :2]
    sizes = np.array([(each["width"], each["height"]) for each in images], np.int64).reshape(-1, 2)
    if len(ids) == 0 or sizes.min() < 1:
        raise ValueError("there are no images" if len(ids) == 0 else "an image has no width or height")
    return Instances(
        ids,
        Paths.of([each["file_name"] for each in images]),
        sizes,
        Boxes(corners[order].astype(np.float32), labels[order], offsets),
        tuple(each["name"] for each in categories),
        len(content["annotations"]) - len(objects),
    )


def _positions(wanted: list[Any], known: NDArray[np.int64], what: str, path: Path) -> NDArray[np.int64]:
    """int64 [m]: the position of each id of `wanted` in `known`. Raises `DataError` if one is not in it."""
    ids = np.array(wanted, np.int64)
    order = np.argsort(known, kind="stable")
    twice = np.flatnonzero(np.diff(known[order]) == 0)
    if len(twice):
        raise damaged(f"the {what} {known[order][twice[0]]} occurs twice", path)
    absent = ids[~np.isin(ids, known)]
    if len(absent):
        first = f"{len(absent):,} objects are of a {what} that is not in the file, the first is {absent[0]}"
        raise damaged(first, path)
    return order[np.searchsorted(known[order], ids)]
