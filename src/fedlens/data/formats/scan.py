"""The content of a user's folder, and the dataset made from it: the same for every format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedlens.core.errors import DataError
from fedlens.data.box_transforms import placed
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.common_settings import height_width
from fedlens.data.formats.leaks import check_leaks, same_content
from fedlens.data.formats.splits import check_splits, draw_test
from fedlens.data.images import Fit, ImageFiles, Paths, sample_moments


@dataclass
class Scan:
    """What is in a folder: a row an image, the faulty ones among them.

    Args:
        format: the format's name.
        folder: the folder of the data.
        names: [n], the file of each image below `folder`, with forward slashes.
        classes: the name of each class.
        labels: [n], the class of each image, where images are classified.
        masks: [n], the mask of each image below `folder`, where they have masks.
        ids: uint8 [256], what each id that is stored in a mask becomes.
        boxes: [n] of float32 [k, 4], left, top, right, bottom in pixels of the stored image.
        box_labels: [n] of int64 [k].
        sizes: [n], (width, height) of each stored image; needed with boxes.
        columns: [n] by name; `client` is whose an image is.
        splits: [n], "train", "test" or "validation", where the data say so.
        bad: the rows at fault, which are left out.
        notes: sentences on what was put right.
    """

    format: str
    folder: Path
    names: list[str] = field(default_factory=list)
    classes: tuple[str, ...] = ()
    labels: list[int] | None = None
    masks: list[str] | None = None
    ids: NDArray[np.uint8] | None = None
    boxes: list[NDArray[np.float32]] | None = None
    box_labels: list[NDArray[np.int64]] | None = None
    sizes: list[tuple[int, int] | None] | None = None
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    splits: list[str] | None = None
    bad: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def rows(self) -> list[int]:
        """The rows in which nothing is at fault."""
        return [row for row in range(len(self.names)) if row not in self.bad]

    def facts(self) -> dict[str, Any]:
        """What there is, in numbers, the faulty rows left out: for whoever checks a folder."""
        rows = self.rows()
        facts: dict[str, Any] = {"format": self.format, "images": len(rows), "left_out": len(self.bad)}
        if self.labels is not None:
            counted = Counter(self.labels[row] for row in rows)
            facts["classes"] = {name: counted[at] for at, name in enumerate(self.classes)}
        elif self.box_labels is not None:
            found = Counter(int(label) for row in rows for label in self.box_labels[row])
            facts["boxes"] = found.total()
            facts["classes"] = {name: found[at] for at, name in enumerate(self.classes)}
        else:
            facts["classes"] = list(self.classes)
        if self.splits is not None:
            facts["splits"] = dict(Counter(self.splits[row] for row in rows))
        if "client" in self.columns:
            facts["clients"] = dict(Counter(str(self.columns["client"][row]) for row in rows))
        facts["columns"] = [name for name in self.columns if name != "client"]
        facts["notes"] = list(self.notes)
        return facts


class Scanner(Protocol):
    """What each format's module offers as `scan`."""

    def __call__(self, path: Path, settings: Mapping[str, Any], findings: Findings, *, full: bool) -> Scan:
        """Reads all of it and adds what is wrong to `findings`; with `full`, every image is decoded."""
        ...


def examine(scan: Scanner, settings: Mapping[str, Any], *, full: bool) -> tuple[Scan, Findings]:
    """Reads the folder `settings["path"]`, and looks at the whole of it: splits, leaks, classes.

    Raises `ConfigError` where settings contradict each other; what is wrong with the data is in the findings.
    """
    findings = Findings()
    folder = Path(settings["path"]).expanduser()
    if not folder.is_dir():
        what = "there is no such folder" if not folder.exists() else "it is a file, not a folder"
        findings.add(folder, what, "give the path of the folder, seen from where you are", example=False)
        return Scan("", folder), findings
    found = scan(folder, settings, findings, full=full)
    if not any(not finding.example for finding in findings):
        _check_whole(found, findings)
    return found, findings


def read(scan: Scanner, settings: Mapping[str, Any], seed: int, *, upright: bool = False) -> Dataset:
    """The dataset in the folder `settings["path"]`: examined, settled and assembled.

    Besides the reader's own, `settings` has `path`, `size`, `fit`, `channels`, `test` and `on_error`.

    Raises `DataError` where something is wrong, unless `on_error` is "skip" and leaving examples out mends it.
    """
    found, findings = examine(scan, settings, full=False)
    skipped = findings.settle(
        settings["on_error"],
        advice=f"'fedlens data check {settings['path']} --format {found.format}' lists all of it",
    )
    return assemble(found, settings, seed, upright=upright, notes=skipped)


def assemble(
    scan: Scan, settings: Mapping[str, Any], seed: int, *, upright: bool = False, notes: Sequence[str] = ()
) -> Dataset:
    """The dataset of a scan, without the rows at fault.

    Where the data name no splits, the share `test` is drawn from all classes and clients alike
    (`splits.draw_test`); an image whose content stands in the training part too goes there. Where they name
    "train" and "validation" only, the latter is what is tested with; where all three, "validation" is left out.
    Boxes are moved to where their pixels land, as those of published sets are (`fedlens.data.box_transforms.placed`);
    how many the crop cuts away is in the notes.

    Raises `DataError` where no example to train on, or none to test with, is left.
    """
    train, test, said = _split(scan, settings["test"], seed)
    for rows, what in ((train, "to train on"), (test, "to test with")):
        if not len(rows):
            raise DataError(f"no example is left {what}", where=str(scan.folder))
    height, width = height_width(settings["size"])
    said += [f"left out {len(scan.bad):,} of {len(scan.names):,} images"] if scan.bad else []
    splits = []
    for split, rows in (("train", train), ("test", test)):
        paths = Paths.of([scan.names[row] for row in rows])
        fit: Fit = settings["fit"]
        inputs = ImageFiles(scan.folder, paths, settings["channels"], height, width, fit, upright=upright)
        columns = {name: column[rows] for name, column in scan.columns.items()}
        targets, gone = _targets(scan, rows, inputs, split)
        said += gone
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
        notes=(*scan.notes, *said, *notes),
        on_error=settings["on_error"],
        seeded=scan.splits is None,
    )


def _check_whole(scan: Scan, findings: Findings) -> None:
    """What only shows in all of it: splits, leaks, and classes without examples."""
    rows = scan.rows()
    if not rows and not len(findings):
        findings.add(scan.folder, "there are no images", "see to the path and the format", example=False)
    if not rows:
        return
    splits = None if scan.splits is None else [scan.splits[row] for row in rows]
    if splits is not None and scan.splits is not None:
        emptied = set(scan.splits) - set(splits)
        for name in sorted(emptied):
            first = next(row for row in sorted(scan.bad) if scan.splits[row] == name)
            what = f"every image of the split '{name}' is at fault, the first is {scan.names[first]}"
            findings.add(scan.folder, what, "mend them, or leave the split out", example=False)
        if not emptied:
            check_splits(splits, scan.folder, findings)
        check_leaks(scan.folder, [scan.names[row] for row in rows], splits, findings)
    if scan.labels is None:
        return
    labels = [scan.labels[row] for row in rows]
    if len(set(labels)) == 1:
        what = f"there is one class only, '{scan.classes[labels[0]]}'"
        findings.add(scan.folder, what, "a model needs two to tell apart", example=False)
    if splits is not None and "train" in splits:
        trained = {label for label, split in zip(labels, splits, strict=True) if split == "train"}
        for label in sorted(set(labels) - trained):
            what = f"the class '{scan.classes[label]}' has examples to test with, and none to train on"
            findings.add(scan.folder, what, "move some of them to the split 'train'", example=False)


def _split(scan: Scan, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """(rows to train on, rows to test with, what there is to say)."""
    rows = np.array(scan.rows(), np.int64)
    if scan.splits is not None:
        named = np.array([scan.splits[row] for row in rows], dtype=str)
        validation = rows[named == "validation"]
        test, said = rows[named == "test"], []
        if len(validation) and not len(test):
            test, said = (
                validation,
                ["what is tested with is the split 'validation': there is no split 'test'"],
            )
        elif len(validation):
            count = f"the {len(validation):,} images of the split 'validation' are not used"
            said = [f"{count}; data.validation holds out training data"]
        return rows[named == "train"], test, said
    labels = None if scan.labels is None else np.array(scan.labels)[rows]
    clients = scan.columns["client"][rows] if "client" in scan.columns else None
    taken = draw_test(labels, clients, len(rows), share, seed)
    names = [scan.names[row] for row in rows]
    twins = same_content(scan.folder, names, ["test" if one else "train" for one in taken])
    moved = [at for group in twins for at in group if taken[at]]
    taken[moved] = False
    said = [f"{len(moved):,} images stay in training, because others there are the same"] if moved else []
    return rows[~taken], rows[taken], said


def _targets(
    scan: Scan, rows: NDArray[np.int64], inputs: ImageFiles, split: str
) -> tuple[Any, tuple[str, ...]]:
    """(targets of `rows`, what had to go)."""
    if scan.labels is not None:
        return np.array(scan.labels, np.int64)[rows], ()
    if scan.masks is not None:
        paths = Paths.of([scan.masks[row] for row in rows])
        return ImageFiles(scan.folder, paths, 0, inputs.height, inputs.width, inputs.fit, scan.ids), ()
    assert scan.boxes is not None
    assert scan.box_labels is not None
    assert scan.sizes is not None
    boxes, labels = [scan.boxes[row].reshape(-1, 4) for row in rows], [scan.box_labels[row] for row in rows]
    offsets = np.cumsum([0, *map(len, boxes)], dtype=np.int64)
    given = Boxes(np.concatenate(boxes), np.concatenate(labels), offsets)
    sizes = np.array([scan.sizes[row] for row in rows])
    moved = placed(given, sizes, inputs.height, inputs.width, inputs.fit)
    return moved.boxes, moved.notes(split)
