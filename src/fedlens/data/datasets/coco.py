"""COCO 2017: photographs of everyday scenes, with boxes around 80 kinds of objects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from fedlens.data.boxes import Boxes, placed
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import damaged, get_again, locate, published
from fedlens.data.datasets.folders import check_present
from fedlens.data.diagnostics import Findings
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.coco_json import CocoInstances, read_instances
from fedlens.data.images import Fit, ImageFiles, Paths


def coco(
    root: Path,
    download: bool,
    seed: int,
    *,
    size: common.GivenSize = 640,
    fit: common.Fit = "pad",
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

    The JSON of the training split has 450 MB, which are read in parts.

    Raises `DataError` if files are missing, or with all that contradicts itself in one; with `download` too, because no
    checksum of the archives is published.

    Source: Lin et al. 2014, Microsoft COCO.
    """
    lists = [f"coco/annotations/instances_{split}2017.json" for split in ("train", "val")]
    (train_file, train_boxes), (test_file, test_boxes) = map(
        read_published, locate("coco", root, files=[tuple(lists)])
    )
    if train_file.categories != test_file.categories:
        raise damaged("the two files have different categories", root / "coco" / "annotations")
    to = common.size_of(size)
    train, train_notes = _examples(root, "train", train_file, train_boxes, to, fit, empty)
    test, test_notes = _examples(root, "val", test_file, test_boxes, to, fit, True)
    classes = tuple(train_file.categories.values())
    return published("coco", (train, test), classes, notes=(*train_notes, *test_notes))


def _examples(
    root: Path, split: str, content: CocoInstances, given: Boxes, size: tuple[int, int], fit: Fit, empty: bool
) -> tuple[Examples, tuple[str, ...]]:
    names = [f"coco/{split}2017/{image.file}" for image in content.images]
    check_present(root, names, str(content.path))
    result = placed(given, np.array([image.size for image in content.images]), *size, fit)
    images = ImageFiles(root, Paths.of(names), 3, *size, fit)
    examples = Examples(images, result.boxes, {"image": np.array([image.key for image in content.images])})
    notes = list(result.notes(split))
    if content.crowds:
        notes.append(f"{split}, boxes left out because they are around a crowd: {content.crowds:,}")
    without = np.diff(result.boxes.offsets) == 0
    if without.any() and not empty:
        examples = examples.take(np.flatnonzero(~without))
        notes.append(f"{split}, images left out because they show no object: {int(without.sum()):,}")
    return examples, tuple(notes)


def read_published(path: Path) -> tuple[CocoInstances, Boxes]:
    """(content, boxes) of a file of instances; a label is the position of a category, boxes are in pixels of the files.

    Raises `DataError` with all problems of the file.
    """
    findings = Findings(remedy=get_again(path))
    content = read_instances(path, findings)
    if content is None:
        findings.settle(None)
    assert content is not None
    by_id: dict[str | int, int] = {key: label for label, key in enumerate(content.categories)}
    labels = content.objects.published_labels(by_id, findings)
    for image in content.images:
        if image.size is None or min(image.size) < 1:
            findings.add(f"{path}, image {image.key}", "it has no width or height")
    if not content.images:
        findings.add_whole(path, "there are no images")
    findings.settle(None)
    order = np.argsort(content.objects.rows, kind="stable")
    offsets = np.searchsorted(content.objects.rows[order], np.arange(len(content.images) + 1))
    return content, Boxes(content.objects.corners[order].astype(np.float32), labels[order], offsets)
