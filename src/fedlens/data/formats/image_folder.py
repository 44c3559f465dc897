"""A folder of images: a folder for each class, or a table with the class of each image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.summary_text import listed
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.cell_labels import (
    as_setting,
    classes_in_cells,
    label_sets,
    labels_of_cells,
    names_in_cells,
    warn_of_separators,
)
from fedlens.data.formats.clients import describe, label_column
from fedlens.data.formats.csv_table import LABEL_WORDS, CsvTable, closest, image_column, table_path
from fedlens.data.formats.csv_table import as_setting as column_setting
from fedlens.data.formats.folder_listing import add_misnamed, folders, image_names
from fedlens.data.formats.probe import probe_all
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import label_of_class, split_named, splits_of_folders


def fill(scan: Scan) -> None:
    """Completes the scan of a folder; problems are added to `scan.findings`."""
    scan.format, scan.upright = "image-folder", True
    scan.names, others = image_names(scan.folder, scan.folder, scan.findings)
    first = _FirstFolders.of(scan.folder, scan.settings.get("classes") or [])
    inner = [name.partition("/")[2] for name in scan.names] if first.are_splits else scan.names
    if describe(scan, inner=inner):
        if scan.splits is None:
            first.check(scan)
            scan.splits = splits_of_folders(scan.names) if first.are_splits else None
        _label(scan, inner, first.are_splits)
        table = scan.settings.get("table")
        table_file = None if table is None else table_path(table, scan.folder).resolve()
        # Files beside the folders of the classes do no harm; those within may be images.
        inside = [name for name in others if "/" in name and (scan.folder / name).resolve() != table_file]
        add_misnamed(scan.folder, inside, scan.findings)
    elif scan.table is not None and _needs_label_column(scan):
        _add_no_label_column(scan, scan.table)
    scan.headers = probe_all(scan.folder, scan.names, scan.findings, full=scan.full)
    scan.bad.update(row for row, header in enumerate(scan.headers) if header is None)


@reader(fill)
def image_folder(
    *,
    path: common.Folder,
    size: common.Size = None,
    channels: common.Channels = 3,
    fit: common.Fit = "crop",
    classes: common.Classes = None,
    label_column: Annotated[
        str | None,
        Field(min_length=1, description="column of the table with the class of an image; by default label"),
    ] = None,
    label_level: Annotated[
        int | None,
        Field(
            ge=1,
            description="folder of the class, counted as client_level is; by default 1 if there is no table",
        ),
    ] = None,
    labels: Annotated[
        bool,
        Field(
            description="false: the images have no classes, for self-supervised tasks; they may lie in any folders"
        ),
    ] = True,
    separator: Annotated[
        str | None,
        Field(
            min_length=1,
            description="for images of several classes (multi-label): what separates the names in a label, such as ;",
        ),
    ] = None,
) -> None:
    """Photographs in folders: `path/CLASS/*.jpg`, `path/SPLIT/CLASS/*.jpg`, or a table `path,label,client,split`.

    | what | source |
    |---|---|
    | class | column `label_column` of the table, by default `label`: names, or whole numbers from 0 on; else the
    folder at `label_level`, which has to be set if there is a table |
    | split | column `split` of the table; else the first folders, if all are named train, test or val; else a
    share `test` of the images is held out, of each class and client alike |
    | client | `client_column`, `client_level` or `client_pattern`; else column `client` of the table, if any |

    With `labels = false` the images have no classes, whatever folders they are in, for self-supervised tasks.

    With `separator` every image has any number of classes (multi-label): a cell names several, `cat;dog`, or is empty
    where the image shows none. The name of a folder is split in the same way. White space around a name is removed, and
    a repeated name counts once. The share `test` is then drawn by each image's rarest class, and client.

    Levels of folders count below a folder of a split. Classes are sorted by name, or are `classes`, each of which
    then needs images. A photograph is turned as its EXIF tag says; see `fedlens.data.decoding.decode` for the other
    steps. Mean and deviation are of at most 1,000 training images (`fedlens.data.images.sample_moments`). `root` and
    `download` are not used.

    Raises `ConfigError` if settings contradict each other, and `DataError` with all problems of the files; see
    `fedlens data check`.
    """


@dataclass(frozen=True)
class _FirstFolders:
    """The folders in the data folder: those named train, test and so on, and the others.

    Args:
        named: those with the name of a split that is not the name of a given class.
        others: the rest.
        are_splits: whether `named` are splits, and not classes of such names.
        deep: whether one of `named` contains folders, as a split of classes does.
    """

    named: tuple[str, ...]
    others: tuple[str, ...]
    are_splits: bool
    deep: bool

    @classmethod
    def of(cls, path: Path, classes: Sequence[str]) -> _FirstFolders:
        """The folders in `path`; `classes` are the given ones."""
        names = folders(path, path)
        named = tuple(name for name in names if split_named(name) and name not in classes)
        others = tuple(name for name in names if name not in named)
        several = len({split_named(name) for name in named}) > 1
        deep = any(folders(path / name, path) for name in named)
        return cls(named, others, bool(named) and (not others or several), deep)

    def check(self, scan: Scan) -> None:
        """Adds a problem if only some of the folders are splits, or may be; the table gives no splits."""
        if not self.named or not self.others:
            return
        hint = "move the others into a split, or elsewhere"
        labelled = scan.cells is not None
        if self.are_splits:
            what = f"the folders {listed(self.named)} are splits, but {listed(self.others)} not"
            scan.findings.add_whole(scan.folder, what, hint)
        elif self.deep:
            what = f"the folder {self.named[0]} has the name of a split, but {listed(self.others)} not"
            every = as_setting(sorted([*self.named, *self.others]))
            other = (
                "write the split of each image in the table" if labelled else f"if all are classes, {every}"
            )
            scan.findings.add_whole(scan.folder, what, f"{hint}; or {other}")
        elif not labelled:
            scan.notes.append(
                f"the folder {self.named[0]} is read as a class, because {listed(self.others)} is not a split"
            )


def _label(scan: Scan, inner: Sequence[str], in_splits: bool) -> None:
    """Sets the classes, and the label of each image: from the table if it has them, else from the folders."""
    classes, level = scan.settings.get("classes"), scan.settings.get("label_level")
    separator = scan.settings.get("separator")
    if not scan.settings.get("labels", True):
        _leave_unlabelled(scan)
        return
    if scan.table is not None and _needs_label_column(scan):
        best = _add_no_label_column(scan, scan.table)
        if best is None or scan.columns[best].dtype.kind != "U":
            return
        # The names in that column are checked too.
        scan.settings = {**scan.settings, "label_column": best}
        scan.cells = scan.columns[best].tolist()
    if scan.cells is not None:
        if level is not None:
            what = f"the table has a column '{label_column(scan)}', so label_level has no effect"
            raise ConfigError(what, where="label_level", hint="leave one of them out")
        table = table_path(scan.settings["table"], scan.folder)
        if separator is not None:
            names = names_in_cells(scan, scan.cells, separator)
            texts = [name for of_row in names for name in of_row]
            scan.classes = tuple(classes or classes_in_cells(texts, table, scan.findings))
            scan.label_sets = label_sets(scan, names)
        else:
            scan.classes = tuple(classes or classes_in_cells(scan.cells, table, scan.findings))
            scan.labels = labels_of_cells(scan)
            warn_of_separators(scan, table)
    elif scan.table is not None and level is None:
        return  # `describe` reports that the column which label_column names does not exist
    else:
        level = level or 1
        parents = [name.split("/")[:-1] for name in inner]
        class_names = [parts[level - 1] if level <= len(parts) else "" for parts in parents]
        if scan.names and not any(class_names):
            _add_unlabelled(scan, level)
            return
        _check_empty(scan, in_splits, level)
        if separator is not None:
            names = names_in_cells(scan, class_names, separator)
            scan.classes = tuple(classes or sorted({name for of_row in names for name in of_row}))
            _check_depth(scan, class_names, level)
            scan.label_sets = label_sets(scan, names)
        else:
            scan.classes = tuple(classes or sorted(set(filter(None, class_names))))
            scan.labels = _labels_of_folders(scan, class_names, level)
    _check_classes(scan, classes)


def _leave_unlabelled(scan: Scan) -> None:
    """Gives no image a class. Raises `ConfigError` for a single image, which cannot be split or compared."""
    for name in ("classes", "label_column", "label_level", "separator"):
        if scan.settings.get(name) is not None:
            raise ConfigError(
                f"labels is false, so {name} has no effect", where=name, hint="leave one of them out"
            )
    if len(scan.names) == 1:
        raise ConfigError(
            f"the folder has one image, {scan.names[0]}, and training without labels compares images",
            where="path",
            hint="name a folder with more images",
        )
    scan.label_sets = [()] * len(scan.names)


def _add_unlabelled(scan: Scan, level: int) -> None:
    """Adds the problem that no image has a class."""
    what, hint = f"no image is {_depth(level)}", "make a folder for each class, or give a table with labels"
    scan.findings.add_whole(scan.folder, what, hint)


def _needs_label_column(scan: Scan) -> bool:
    """Whether the classes are looked for in the column `label` of a table that has none."""
    named = scan.settings.get("label_column") or scan.settings.get("label_level")
    return scan.table is not None and named is None and "label" not in scan.table.columns


def _add_no_label_column(scan: Scan, table: CsvTable) -> str | None:
    """Adds the problem that the table has no column with the classes; returns the column that may be it."""
    path_column = scan.settings.get("path_column") or "path"
    others = {"client", scan.settings.get("client_column"), "split", path_column, image_column(table)}
    columns = [name for name in table.columns if name not in others]
    best = closest(columns, LABEL_WORDS)
    folders_hint = "data.dataset.label_level = 1 takes the classes from the first folder instead"
    if best is not None:
        setting = column_setting("label_column", best)
        hint = f"did you mean '{best}'? Rename it to 'label', or set {setting}; {folders_hint}"
    elif columns:
        hint = (
            f"set data.dataset.label_column to the one of the classes, of {listed(columns)}; {folders_hint}"
        )
    else:
        hint = f"add it; {folders_hint}"
    scan.findings.add_whole(f"{table.path}, line 1", "there is no column 'label'", hint)
    return best


def _depth(level: int) -> str:
    return "in a folder of a class" if level == 1 else f"{level} folders deep"


def _labels_of_folders(scan: Scan, class_names: Sequence[str], level: int) -> list[int]:
    """The label of each image; -1 if it has none, which is a problem."""
    labels = label_of_class(scan.classes)
    for row, name in enumerate(class_names):
        if name not in labels:
            problem = f"there is no class '{name}'", nearest(name, scan.classes)
            if not name:
                problem = f"the image is not {_depth(level)}", "move it to the folder of its class"
            scan.reject(row, scan.folder / scan.names[row], *problem)
    return [labels.get(name, -1) for name in class_names]


def _check_depth(scan: Scan, class_names: Sequence[str], level: int) -> None:
    """Adds a problem for each image that is not in a folder of classes."""
    for row, name in enumerate(class_names):
        if not name:
            hint = "move it to the folder of its classes"
            scan.reject(row, scan.folder / scan.names[row], f"the image is not {_depth(level)}", hint)


def _check_classes(scan: Scan, given: Sequence[str] | None) -> None:
    if given is not None:
        used = {label for labels in scan.labels_of_rows() or () for label in labels}
        for label, name in enumerate(scan.classes):
            if label not in used and scan.names:
                hint = "add some, or remove it from data.dataset.classes"
                scan.findings.add_whole(scan.folder, f"no image has the class '{name}'", hint)


def _check_empty(scan: Scan, in_splits: bool, level: int) -> None:
    """Adds folders of classes without an image as problems, unless their class has images in another folder."""
    depth = level + in_splits
    used = {tuple(name.split("/")[:depth]) for name in scan.names if name.count("/") >= depth}
    split_and_class = {(parts[:in_splits], parts[-1]) for parts in used}
    for parts in _folders_at(scan.folder, depth, scan.folder):
        if parts not in used and (parts[:in_splits], parts[-1]) not in split_and_class:
            where = scan.folder.joinpath(*parts)
            scan.findings.add(where, "the folder of a class has no image", "add images, or remove it")


def _folders_at(path: Path, level: int, root: Path) -> list[tuple[str, ...]]:
    if level == 0:
        return [()]
    return [
        (name, *inner) for name in folders(path, root) for inner in _folders_at(path / name, level - 1, root)
    ]
