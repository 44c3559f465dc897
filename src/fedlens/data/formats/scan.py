"""The contents of a user's folder, whatever its format, and the size that its images are trained at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.data.boxes import Boxes
from fedlens.data.decoding import Fit, placement
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.common_settings import height_width
from fedlens.data.formats.csv_table import CsvTable
from fedlens.data.formats.probe import ImageHeader, ImageStatistics, medians

LARGEST = 224  # pixels of the longer side, if the user names no size
_FREQUENT = 0.1  # the share of the images from which the most frequent size stands for all of them
_MODES = {
    "RGB": "colour (RGB)",
    "RGBA": "colour (RGBA)",
    "P": "palette (P)",
    "L": "grey (L)",
    "LA": "grey (LA)",
    "1": "black and white (1)",
}

Size = tuple[int, int]
"""(width, height) in pixels."""


@dataclass(frozen=True)
class TrainingSize:
    """The size that every image is scaled to.

    Args:
        height, width: in pixels.
        why: where the size comes from, as the rest of a sentence.
        note: a sentence for the user; None if there is nothing to say.
        chosen: whether it was chosen here, because the user named none.
        enlarged: the number of images that are smaller and are enlarged.
    """

    height: int
    width: int
    why: str
    note: str | None
    chosen: bool
    enlarged: int

    @property
    def setting(self) -> int | list[int]:
        """The value of the setting `size`: a number, or [height, width]."""
        return self.height if self.height == self.width else [self.height, self.width]


@dataclass(frozen=True)
class ImageSizes:
    """The sizes of the images as they are delivered, and their modes, with the number of images of each."""

    sizes: Mapping[Size, int]
    modes: Mapping[str, int]

    @classmethod
    def of(cls, headers: Iterable[ImageHeader], upright: bool) -> ImageSizes:
        """The sizes in the headers; with `upright`, after the EXIF tags have turned photographs.

        >>> ImageSizes.of([ImageHeader(4, 2, "L"), ImageHeader(2, 4, "RGB", turned=True)], upright=True)
        ImageSizes(sizes=Counter({(4, 2): 2}), modes=Counter({'L': 1, 'RGB': 1}))
        """
        headers = list(headers)
        delivered = (header.size[::-1] if upright and header.turned else header.size for header in headers)
        return cls(Counter(delivered), Counter(header.mode for header in headers))

    @property
    def count(self) -> int:
        """The number of images."""
        return sum(self.sizes.values())

    @property
    def most_frequent(self) -> Size:
        """The most frequent size; of several, the one with the fewest pixels, and then the narrowest."""
        return min(self.sizes, key=lambda size: (-self.sizes[size], size[0] * size[1], size[0]))

    def training(self, given: Any, fit: Fit) -> TrainingSize:
        """The size to train at: `given`, the setting `size`, or else the most frequent one.

        If fewer than a tenth of the images have the most frequent size, it is the median width and the median height.
        A side above 224 pixels is reduced to 224, and the other one in proportion, so images are reduced but, apart
        from those smaller than most, never enlarged.

        >>> sizes = ImageSizes({(640, 480): 9, (32, 32): 1}, {"RGB": 10})
        >>> chosen = sizes.training(None, "crop")
        >>> chosen.setting, chosen.why
        ([168, 224], 'the most frequent size of the files, 640x480, reduced to 224 pixels on the longer side')
        """
        if given is not None:
            height, width = height_width(given)
            smaller = self._enlarged(width, height, fit)
            common = shown(self.most_frequent)
            note = (
                f"images: enlarged to {shown((width, height))} by data.dataset.size: {smaller:,} of {self.count:,} "
                f"are smaller; the most frequent size of the files is {common}"
            )
            return TrainingSize(height, width, "data.dataset.size", note if smaller else None, False, smaller)
        width, height = self.most_frequent
        why = "the most frequent size of the files"
        if self.sizes[width, height] < _FREQUENT * self.count:
            width, height = (self._median(side) for side in (0, 1))
            why = f"the median width and height of the files, which have {len(self.sizes):,} sizes"
        if max(width, height) > LARGEST:
            longer = max(width, height)
            why += f", {shown((width, height))}, reduced to {LARGEST} pixels on the longer side"
            width, height = (
                max(1, (2 * side * LARGEST + longer) // (2 * longer)) for side in (width, height)
            )
        smaller = self._enlarged(width, height, fit)
        more = f"; {smaller:,} of {self.count:,} are smaller and are enlarged" if smaller else ""
        of_both = "" if width == height else " (width x height)"
        size = f"{shown((width, height))}{of_both}"
        note = f"images: {size}, {why}{more}; set data.dataset.size to change it"
        return TrainingSize(height, width, why, note, True, smaller)

    def facts(self) -> dict[str, Any]:
        """For `data check`: the smallest, largest and most frequent size as [width, height], and the modes."""
        by_area = sorted(self.sizes, key=lambda size: (size[0] * size[1], size[0]))
        return {
            "smallest": list(by_area[0]),
            "largest": list(by_area[-1]),
            "most_frequent": list(self.most_frequent),
            "most_frequent_images": self.sizes[self.most_frequent],
            "different": len(self.sizes),
            "colours": {_MODES.get(mode, mode): self.modes[mode] for mode in sorted(self.modes)},
        }

    def _median(self, side: int) -> int:
        """The lower median width (0) or height (1) of the images."""
        counts: Counter[int] = Counter()
        for size, number in self.sizes.items():
            counts[size[side]] += number
        passed, half = 0, (self.count + 1) // 2
        for value in sorted(counts):
            passed += counts[value]
            if passed >= half:
                return value
        raise ValueError("there are no images")

    def _enlarged(self, width: int, height: int, fit: Fit) -> int:
        """How many images are scaled up to fit width x height."""
        scales = {size: placement(*size, width, height, fit)[:2] for size in self.sizes}
        return sum(self.sizes[size] for size, scale in scales.items() if max(scale) > 1)


def shown(size: Iterable[int]) -> str:
    """A size as text.

    >>> shown((640, 480))
    '640x480'
    """
    return "x".join(map(str, size))


@dataclass
class Scan:
    """The contents of a folder, one row per image, faulty ones included. A format's `fill` completes it.

    Args:
        folder: the folder of the data.
        settings: the reader's settings.
        findings: all problems of the data.
        full: whether every image is decoded, not only opened.
        format: the format's name.
        names: [n], the file of each image below `folder`, with forward slashes.
        image_folders: the folders below `folder` that the annotations' paths start at, where those of a table may
            start too.
        classes: the name of each class.
        labels: [n], the class of each image, if images are classified.
        label_sets: [n], the classes of each image, ascending, if images have any number of classes (multi-label).
        masks: [n], the mask of each image below `folder`, if they have masks.
        ids: uint8 [256], the class of each id stored in a mask.
        pixels: the number of pixels of each class in the masks, and of void.
        boxes: the objects of the n images, in pixels of the stored image.
        sizes: [n], (width, height) of each stored image; needed with boxes.
        headers: [n], what the header of each image states; None if the image is faulty.
        upright: whether photographs are turned as their EXIF tag says.
        columns: [n] by name; `client` assigns each image to a client.
        splits: [n], "train", "test" or "validation", if the data define splits.
        published: whether the splits are those of a publication, which the user does not change.
        cells: [n], the table's column `label`, if it has one.
        sources: [n], the line of the table that describes each image; without a table, the file of the image.
        table: the table that describes the images, if there is one and it can be read.
        lines: [n], the line of the table that describes each image; empty without a table.
        described: whether the table and the paths have been read for columns, splits and clients.
        bad: the faulty rows, which are left out.
        notes: sentences on what was corrected.
    """

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
    full: bool = False
    format: str = ""
    names: list[str] = field(default_factory=list)
    image_folders: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    labels: list[int] | None = None
    label_sets: list[tuple[int, ...]] | None = None
    masks: list[str] | None = None
    ids: NDArray[np.uint8] | None = None
    pixels: dict[str, int] | None = None
    boxes: Boxes | None = None
    sizes: list[tuple[int, int] | None] | None = None
    headers: list[ImageHeader | None] = field(default_factory=list)
    upright: bool = False
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    splits: list[str] | None = None
    published: bool = False
    cells: list[str] | None = None
    sources: list[str] = field(default_factory=list)
    table: CsvTable | None = None
    lines: list[int | None] = field(default_factory=list)
    described: bool = False
    bad: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def rows(self) -> list[int]:
        """The rows without a fault."""
        return [row for row in range(len(self.names)) if row not in self.bad]

    def reject(self, row: int, where: object, what: str, hint: str | None = None) -> None:
        """Adds a problem of one row, which is left out; does nothing if the row is faulty already."""
        if row not in self.bad:
            self.findings.add(where, what, hint)
            self.bad.add(row)

    def labels_of_rows(self) -> Sequence[Iterable[int]] | None:
        """[n], the classes of each image, once for each label or box; None if the images have masks."""
        if self.labels is not None:
            return [(label,) for label in self.labels]
        if self.boxes is not None:
            return [self.boxes.labels_of(row).tolist() for row in range(len(self.boxes))]
        return self.label_sets

    def image_sizes(self) -> ImageSizes | None:
        """The sizes of the images without a fault; None if no header was read."""
        headers = [self.headers[row] for row in self.rows()] if self.headers else []
        usable = [header for header in headers if header is not None]
        return ImageSizes.of(usable, self.upright) if usable else None

    def looks(self) -> dict[str, dict[str, ImageStatistics]]:
        """The median brightness, contrast and sharpness of each "class" and "client"; empty unless `full`."""
        rows = self.rows()
        headers = [self.headers[row] for row in rows] if self.headers else []
        statistics = [None if header is None else header.statistics for header in headers]
        if not any(statistics):
            return {}
        looks = {}
        if self.labels is not None:
            looks["class"] = medians(statistics, [self.classes[self.labels[row]] for row in rows])
        if "client" in self.columns:
            looks["client"] = medians(statistics, [str(self.columns["client"][row]) for row in rows])
        return looks

    def facts(self) -> dict[str, Any]:
        """Counts of images, classes, boxes, splits and clients, and the sizes, without the faulty rows."""
        rows = self.rows()
        facts: dict[str, Any] = {"format": self.format, "images": len(rows), "left_out": len(self.bad)}
        if (sizes := self.image_sizes()) is not None:
            training = sizes.training(self.settings.get("size"), self.settings.get("fit", "crop"))
            facts["sizes"] = sizes.facts()
            facts["training"] = {
                "width": training.width,
                "height": training.height,
                "channels": self.settings.get("channels", 3),
                "why": training.why,
                "enlarged": training.enlarged,
            }
        facts["classes"] = list(self.classes)
        labels = self.labels_of_rows()
        if labels is not None:
            counts = Counter(label for row in rows for label in labels[row])
            if self.boxes is not None:
                facts["boxes"] = counts.total()
            if self.label_sets is not None and self.classes:
                facts["labels"] = counts.total()
                facts["without_label"] = sum(not self.label_sets[row] for row in rows)
            facts["classes"] = {name: counts[label] for label, name in enumerate(self.classes)}
        if self.pixels is not None:
            facts["pixels"] = dict(self.pixels)
        if self.splits is not None:
            facts["splits"] = dict(Counter(self.splits[row] for row in rows))
        if "client" in self.columns:
            facts["clients"] = dict(Counter(str(self.columns["client"][row]) for row in rows))
        if looks := self.looks():
            facts["looks"] = {
                kind: {name: one._asdict() for name, one in of_name.items()}
                for kind, of_name in looks.items()
            }
        facts["columns"] = [name for name in self.columns if name != "client"]
        facts["notes"] = list(self.notes)
        return facts


Fill = Callable[[Scan], None]
"""What each format's module offers as `fill`: reads all of `scan.folder`, and adds problems to `scan.findings`."""
