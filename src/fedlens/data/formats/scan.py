"""The contents of a user's folder, and the dataset made from it: the same for every format."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError
from fedlens.data.box_transforms import placed
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.check_command import check_command
from fedlens.data.formats.common_settings import height_width
from fedlens.data.formats.csv_table import CsvTable, table_path
from fedlens.data.formats.image_sizes import ImageSizes
from fedlens.data.formats.image_statistics import ImageStatistics, check_looks, medians
from fedlens.data.formats.leaks import check_contradictions, check_leaks, same_content
from fedlens.data.formats.name_checks import check_names, check_unicode
from fedlens.data.formats.probe import ImageHeader
from fedlens.data.formats.splits import check_splits, draw_test, draw_test_of_sets
from fedlens.data.images import MOMENTS_OF, ImageFiles, Paths, sample_moments


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


def examine(fill: Fill, settings: Mapping[str, Any], *, full: bool) -> Scan:
    """Reads the folder `settings["path"]`, and checks it as a whole: splits, leaks, classes.

    Problems of the data are in the findings. Raises `ConfigError` if settings contradict each other.
    """
    scan = Scan(Path(settings["path"]).expanduser(), settings, full=full)
    if not scan.folder.is_dir():
        what = "it is a file, not a folder" if scan.folder.exists() else "the folder does not exist"
        scan.findings.add_whole(
            scan.folder, what, "give the path of the folder, as seen from the current folder"
        )
        return scan
    fill(scan)
    _note_unlabelled(scan)
    _check_unicode(scan)
    if all(finding.example for finding in scan.findings):
        _check_whole(scan)
    _check_names(scan)
    if full:
        _check_labels(scan)
    return scan


def read(fill: Fill, settings: Mapping[str, Any], seed: int, changed: Mapping[str, Any]) -> Dataset:
    """The dataset in the folder `settings["path"]`; `changed` are the settings that are not the default.

    Besides the reader's own settings, `settings` has `path`, `size`, `fit`, `channels`, `test` and `on_error`.

    Raises `DataError` if the data have problems, unless `on_error` is "skip" and leaving out examples is enough.
    """
    scan = examine(fill, settings, full=False)
    skipped = scan.findings.settle(
        settings["on_error"],
        advice=f"this lists all: {check_command(scan.format, {**changed, 'path': scan.settings['path']})}",
    )
    return assemble(scan, seed, notes=skipped)


def assemble(scan: Scan, seed: int, *, notes: Sequence[str] = ()) -> Dataset:
    """The dataset of a scan, without the faulty rows.

    Images are scaled to the setting `size`, or else to the size that `ImageSizes.training` chooses, which a note says.
    Before it come the number of faulty rows, the warnings of names that look alike, and `notes`, on what is left out.

    If the data define no splits, the share `test` is drawn from all classes and clients alike
    (`splits.draw_test`); an image whose content is in the training part too stays there. With "train" and
    "validation" only, "validation" is the test split; with all three, it is left out. Boxes move with their pixels,
    as those of published sets do (`fedlens.data.box_transforms.placed`); the notes count those that the crop cuts
    away.

    Raises `DataError` if no example is left to train on or to test with.
    """
    settings = scan.settings
    train, test, corrections = _split(scan, seed)
    for rows, purpose in ((train, "to train on"), (test, "to test with")):
        if not len(rows):
            raise DataError(f"no example is left {purpose}", where=str(scan.folder))
    height, width, size_note, chosen = _training_size(scan)
    left_out = [f"left out {len(scan.bad):,} of {len(scan.names):,} images"] if scan.bad else []
    splits = []
    for split, rows in (("train", train), ("test", test)):
        paths = Paths.of([scan.names[row] for row in rows])
        form = (settings["channels"], height, width, settings["fit"])
        inputs = ImageFiles(scan.folder, paths, *form, upright=scan.upright)
        columns = {name: column[rows] for name, column in scan.columns.items()}
        targets, dropped = _targets(scan, rows, inputs, split)
        corrections += dropped
        splits.append(Examples(inputs, targets, columns))
    mean, std = sample_moments(splits[0].inputs)
    return Dataset(
        name=scan.format,
        train=splits[0],
        test=splits[1],
        classes=scan.classes,
        mean=mean,
        std=std,
        licence="your own",
        source=str(scan.folder),
        notes=(
            *left_out,
            *(str(finding) for finding in scan.findings.warnings if finding.alike),
            *notes,
            *size_note,
            *scan.notes,
            *corrections,
            *(str(finding) for finding in scan.findings.warnings if not finding.alike),
        ),
        on_error=settings["on_error"],
        seeded=scan.splits is None,
        chosen=chosen,
        moments_of=min(len(splits[0]), MOMENTS_OF),
    )


def _note_unlabelled(scan: Scan) -> None:
    count = sum(not scan.label_sets[row] for row in scan.rows()) if scan.label_sets and scan.classes else 0
    if count:
        images = "1 image has" if count == 1 else f"{count:,} images have"
        scan.notes.append(f"{images} no label, which counts as none of the classes")


def _check_unicode(scan: Scan) -> None:
    """Adds a problem for each class and client, and each value of a column, that no page could name."""
    check_unicode("class", scan.classes, scan.folder, scan.findings)
    for name, column in scan.columns.items():
        if column.dtype.kind == "U":
            kind = "client" if name == "client" else f"value of '{name}'"
            check_unicode(kind, dict.fromkeys(column.tolist()), scan.folder, scan.findings)


def _check_labels(scan: Scan) -> None:
    """Warns of images that occur with several labels; reads the files that have the size of another one."""
    labels, rows = scan.labels_of_rows(), scan.rows()
    if labels is None or not scan.classes:
        return
    texts = [
        ", ".join(scan.classes[label] for label in sorted(set(labels[row]))) or "no label" for row in rows
    ]
    clients = scan.columns["client"][rows].tolist() if "client" in scan.columns else None
    check_contradictions(scan.folder, [scan.names[row] for row in rows], texts, clients, scan.findings)


def _training_size(scan: Scan) -> tuple[int, int, list[str], dict[str, Any]]:
    """(height, width, notes, the setting `size` if it was chosen here)."""
    given, sizes = scan.settings["size"], scan.image_sizes()
    if sizes is None:
        return *height_width(given), [], {}
    training = sizes.training(given, scan.settings["fit"])
    notes = [] if training.note is None else [training.note]
    return training.height, training.width, notes, {"size": training.setting} if training.chosen else {}


def _check_names(scan: Scan) -> None:
    """Adds warnings for near names and small counts of classes and clients, and for clients that look different."""
    rows, counts = scan.rows(), {}
    labels = scan.labels_of_rows()
    if labels is not None:
        images = Counter(label for row in rows for label in set(labels[row]))
        counts["class"] = {name: images[label] for label, name in enumerate(scan.classes)}
    if "client" in scan.columns:
        counts["client"] = Counter(str(scan.columns["client"][row]) for row in rows)
    table = scan.settings.get("table")
    where = scan.folder if table is None else table_path(table, scan.folder)
    for kind, of_name in counts.items():
        check_names(kind, of_name, where, scan.findings, _lines_of_names(scan, kind))
    if "client" in counts:
        check_looks(scan.looks().get("client", {}), counts["client"], where, scan.findings)


def _lines_of_names(scan: Scan, kind: str) -> dict[str, list[int]]:
    """The lines of the table with each class or client; empty if the names are not from a table."""
    names: Sequence[Sequence[str]] | None = None
    if kind == "client":
        by_folder = any(scan.settings.get(key) is not None for key in ("client_level", "client_pattern"))
        names = None if by_folder else [[client] for client in scan.columns["client"].tolist()]
    elif scan.cells is not None and scan.label_sets is not None:
        names = [[scan.classes[label] for label in labels] for labels in scan.label_sets]
    elif scan.cells is not None:
        names = [[cell] for cell in scan.cells]
    lines: defaultdict[str, list[int]] = defaultdict(list)
    if names is not None and scan.lines:
        for row in scan.rows():
            if (line := scan.lines[row]) is not None:
                for name in names[row]:
                    lines[name].append(line)
    return lines


def _check_whole(scan: Scan) -> None:
    """Checks what shows only in the whole set: splits, leaks, and classes without examples."""
    rows, add = scan.rows(), scan.findings.add_whole
    if not rows and not len(scan.findings):
        add(scan.folder, "the folder has no images", "check the path and the format")
    if not rows:
        return
    splits = None if scan.splits is None else [scan.splits[row] for row in rows]
    if splits is not None and scan.splits is not None:
        emptied = sorted(set(scan.splits) - set(splits))
        for name in emptied:
            first = next(row for row in sorted(scan.bad) if scan.splits[row] == name)
            what = f"every image of the split '{name}' is faulty; the first is {scan.names[first]}"
            add(scan.folder, what, "repair them, or leave the split out")
        if not emptied:
            check_splits(splits, scan.folder, scan.findings)
        check_leaks(scan.folder, [scan.names[row] for row in rows], splits, scan.findings)
    all_labels = scan.label_sets if scan.labels is None else [(label,) for label in scan.labels]
    if all_labels is None:
        return
    labels = [all_labels[row] for row in rows]
    used = {label for of_image in labels for label in of_image}
    if not used and scan.settings.get("labels", True):
        add(scan.folder, "no image has a label", "write the classes of each image in the table")
    if len(used) == 1 and scan.labels is not None:
        what = f"there is only one class, '{scan.classes[min(used)]}'"
        add(scan.folder, what, "a classifier needs at least two; labels = false reads images without classes")
    if splits is not None and "train" in splits:
        pairs = zip(labels, splits, strict=True)
        trained = {label for of_image, split in pairs if split == "train" for label in of_image}
        for label in sorted(used - trained):
            what = f"the class '{scan.classes[label]}' has test examples but no training examples"
            add(scan.folder, what, "move some of them to the split 'train'")


def _split(scan: Scan, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """(training rows, test rows, notes)."""
    rows = np.array(scan.rows(), np.int64)
    if scan.splits is not None:
        train, test, validation = (
            rows[[scan.splits[row] == name for row in rows]] for name in ("train", "test", "validation")
        )
        if len(validation) and not len(test):
            return train, validation, ["the split 'validation' is the test data: there is no split 'test'"]
        count = f"the {len(validation):,} images of the split 'validation' are not used"
        unused = f"{count}; data.validation holds out training data"
        return train, test, [unused] if len(validation) else []
    clients = scan.columns["client"][rows] if "client" in scan.columns else None
    if scan.label_sets is not None:
        taken = draw_test_of_sets(_indicators(scan, rows), clients, scan.settings["test"], seed)
    else:
        labels = None if scan.labels is None else np.array(scan.labels)[rows]
        taken = draw_test(labels, clients, len(rows), scan.settings["test"], seed)
    names = [scan.names[row] for row in rows]
    twins = same_content(scan.folder, names, ["test" if drawn else "train" for drawn in taken])
    moved = [at for group in twins for at in group if taken[at]]
    taken[moved] = False
    stay = (
        "1 image drawn as test data stays"
        if len(moved) == 1
        else f"{len(moved):,} images drawn as test data stay"
    )
    notes = [f"{stay} in training, which has identical ones"] if moved else []
    return rows[~taken], rows[taken], notes


def _indicators(scan: Scan, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """uint8 [len(rows), classes]: 1 for each label of an image."""
    assert scan.label_sets is not None
    indicators = np.zeros((len(rows), len(scan.classes)), np.uint8)
    for at, row in enumerate(rows):
        indicators[at, list(scan.label_sets[row])] = 1
    return indicators


def _targets(
    scan: Scan, rows: NDArray[np.int64], inputs: ImageFiles, split: str
) -> tuple[Any, tuple[str, ...]]:
    """(targets of `rows`, notes on objects that are left out)."""
    if scan.labels is not None:
        return np.array(scan.labels, np.int64)[rows], ()
    if scan.label_sets is not None:
        return _indicators(scan, rows), ()
    if scan.masks is not None:
        paths = Paths.of([scan.masks[row] for row in rows])
        return ImageFiles(scan.folder, paths, 0, inputs.height, inputs.width, inputs.fit, scan.ids), ()
    assert scan.boxes is not None
    assert scan.sizes is not None
    sizes = np.array([scan.sizes[row] for row in rows])
    moved = placed(scan.boxes.take(rows), sizes, inputs.height, inputs.width, inputs.fit)
    return moved.boxes, moved.notes(split)
