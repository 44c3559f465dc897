"""Reads a folder of a user: a dataset factory for each format, and what all formats share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError
from fedlens.data.boxes import placed
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.common_settings import check_command
from fedlens.data.formats.csv_table import table_path
from fedlens.data.formats.data_checks import (
    check_contradictions,
    check_leaks,
    check_names,
    check_unicode,
    same_content,
)
from fedlens.data.formats.probe import check_looks
from fedlens.data.formats.scan import Fill, Scan
from fedlens.data.formats.splits import check_splits, draw_test, draw_test_of_sets
from fedlens.data.images import MOMENTS_OF, ImageFiles, Paths, sample_moments


def _shared(
    *,
    test: common.Test = 0.2,
    table: common.TableFile = None,
    path_column: common.PathColumn = None,
    client_column: common.ClientColumn = None,
    client_level: common.ClientLevel = None,
    client_pattern: common.ClientPattern = None,
    on_error: common.OnError = "stop",
) -> None:
    """The settings that every format has, with the same defaults; they follow the format's own."""


def reader(fill: Fill) -> Callable[[Callable[..., None]], Callable[..., Dataset]]:
    """Turns a function that only declares settings into the dataset factory of a format.

    The factory takes `root`, `download` and `seed`, and as keywords the declared settings followed by the shared
    ones. It hands all settings to `read`. `registry.read_settings` and `inspect.signature` see the whole signature.

    Args:
        fill: completes the scan of a folder in this format.

    >>> from fedlens.data.formats.image_folder import image_folder
    >>> list(signature(image_folder).parameters)[:4], list(signature(image_folder).parameters)[-1]
    (['root', 'download', 'seed', 'path'], 'on_error')
    """

    def factory_of(declared: Callable[..., None]) -> Callable[..., Dataset]:
        @wraps(declared)
        def factory(root: Path, download: bool, seed: int, **values: Any) -> Dataset:
            bound = full_signature.bind(root, download, seed, **values)
            bound.apply_defaults()
            given = {key: value for key, value in bound.arguments.items() if key not in positional}
            changed = {key: value for key, value in given.items() if value != defaults[key]}
            return read(fill, given, seed, changed)

        positional = {name: Parameter(name, kind) for name in ("root", "download", "seed")}
        settings = [*signature(declared).parameters.values(), *signature(_shared).parameters.values()]
        defaults = {setting.name: setting.default for setting in settings}
        full_signature = Signature([*positional.values(), *settings], return_annotation=Dataset)
        hints = [get_type_hints(function, include_extras=True) for function in (declared, _shared)]
        factory.__annotations__ = {**hints[0], **hints[1], "return": Dataset}
        factory.__signature__ = full_signature  # type: ignore[attr-defined]  # read by `inspect.signature`
        return factory

    kind = Parameter.POSITIONAL_OR_KEYWORD
    return factory_of


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
    as those of published sets do (`fedlens.data.boxes.placed`); the notes count those that the crop cuts
    away. A share of 0 leaves the test split empty.

    Raises `DataError` if no example is left to train on, or to test with.
    """
    settings = scan.settings
    train, test, corrections = _split(scan, seed)
    for rows, purpose in ((train, "to train on"), (test, "to test with")):
        if not len(rows) and (settings["test"] or not len(train)):
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
        return *common.height_width(given), [], {}
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
        names = [scan.names[row] for row in rows]
        check_leaks(scan.folder, names, splits, scan.findings, scan.published)
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
    if not scan.settings["test"]:
        return rows, rows[:0], []
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
    sizes = np.array([scan.sizes[row] for row in rows], np.int64).reshape(-1, 2)
    moved = placed(scan.boxes.take(rows), sizes, inputs.height, inputs.width, inputs.fit)
    return moved.boxes, moved.notes(split)
