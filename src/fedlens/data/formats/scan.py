"""The contents of a user's folder, whatever its format: what a format's `fill` completes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.data.boxes import Boxes
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.csv_table import CsvTable
from fedlens.data.formats.image_sizes import ImageSizes
from fedlens.data.formats.image_statistics import ImageStatistics, medians
from fedlens.data.formats.probe import ImageHeader


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
