"""A folder of images: a folder for each class, or a table that says which class each image is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedlens.core.errors import ConfigError, nearest
from fedlens.data.diagnostics import Findings
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.cell_labels import as_setting, classes_in_cells, labels_of_cells
from fedlens.data.formats.clients import Described, describe, listed, table_path
from fedlens.data.formats.folder_listing import folders, image_names
from fedlens.data.formats.probe import probe_all
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import split_named


def scan(path: Path, settings: Mapping[str, Any], findings: Findings, *, full: bool) -> Scan:
    """What is in the folder `path`; everything that is wrong is added to `findings`."""
    names, others = image_names(path)
    first = _FirstFolders.of(path, settings.get("classes") or [])
    inner = [name.partition("/")[2] for name in names] if first.are_splits else names
    described = describe(names, settings, path, findings, inner=inner)
    found = Scan("image-folder", path, names, columns=described.columns, splits=described.splits)
    found.bad, found.notes = described.bad, described.notes
    if described.where is not None or settings.get("table") is None:
        if described.splits is None:
            found.notes += first.check(path, described.labels is not None, findings)
            if first.are_splits:
                splits = [split_named(name.partition("/")[0]) or "train" for name in names]
                found.splits = None if set(splits) == {"train"} else splits
        _label(found, described, inner, first.are_splits, settings, findings)
        _check_others(path, others, settings.get("table"), found, findings)
    sizes = probe_all(path, names, findings, full=full)
    found.bad.update(row for row, size in enumerate(sizes) if size is None)
    return found


@reader(scan, upright=True)
def image_folder(
    *,
    path: common.Folder,
    size: common.Size = 224,
    channels: common.Channels = 3,
    fit: common.Fit = "crop",
    classes: common.Classes = None,
    label_level: Annotated[
        int | None,
        Field(
            ge=1, description="folder that says the class, counted as client_level; by default 1, the first"
        ),
    ] = None,
) -> None:
    """Photographs in folders: `path/CLASS/*.jpg`, `path/SPLIT/CLASS/*.jpg`, or a table `path,label,client,split`.

    | what | where it is read |
    |---|---|
    | class | column `label` of the table: names, or whole numbers from 0 on; else the folder at `label_level` |
    | split | column `split` of the table; else the first folders, where all are named train, test or val; else a
    share `test` of the images is held out, of each class and client alike |
    | client | `client_column`, `client_level` or `client_pattern`; else column `client` of the table, if any |

    Levels of folders count below a folder of a split. Classes are sorted by name, or are `classes`, each of which
    must have images then. A photograph is turned as
    its EXIF tag says; see `fedlens.data.decoding.decode` for what else becomes of it. Mean and deviation are of
    1,000 training images at most (`fedlens.data.images.sample_moments`). Plays no part: `root`, `download`.

    Raises `ConfigError` where settings contradict each other, and `DataError` with all that is wrong with the
    files; see `fedlens data check`.
    """


@dataclass(frozen=True)
class _FirstFolders:
    """The folders in the folder of the data: those named train, test and so on, and the others.

    Args:
        named: those with the name of a split, which is no class that was given.
        others: the rest.
        are_splits: whether the ones are splits, and not classes of such names.
        deep: whether one of those named like a split holds folders, as a split of classes does.
    """

    named: tuple[str, ...]
    others: tuple[str, ...]
    are_splits: bool
    deep: bool

    @classmethod
    def of(cls, path: Path, given: Sequence[str]) -> _FirstFolders:
        """The folders in `path`, where the classes `given` are known."""
        found = folders(path)
        named = tuple(name for name in found if split_named(name) and name not in given)
        others = tuple(name for name in found if name not in named)
        splits = {split_named(name) for name in named}
        deep = any(folders(path / name) for name in named)
        return cls(named, others, bool(named) and (not others or len(splits) > 1), deep)

    def check(self, path: Path, labelled: bool, findings: Findings) -> list[str]:
        """What there is to note; adds to `findings` that some are splits, or may be, and others not.

        `labelled` says that a table has the classes, and no splits.
        """
        if not self.named or not self.others:
            return []
        mend = "move the others into a split, or elsewhere"
        if self.are_splits:
            what = f"the folders {listed(self.named)} are splits, and {listed(self.others)} not"
            findings.add(path, what, mend, example=False)
        elif self.deep:
            what = f"the folder {self.named[0]} has the name of a split, and {listed(self.others)} not"
            every = as_setting(sorted([*self.named, *self.others]))
            other = "say the split of each image in the table" if labelled else f"if all are classes, {every}"
            findings.add(path, what, f"{mend}; or {other}", example=False)
        elif not labelled:
            return [f"the folder {self.named[0]} is taken for a class: {listed(self.others)} is no split"]
        return []


def _label(
    found: Scan,
    described: Described,
    inner: Sequence[str],
    in_splits: bool,
    settings: Mapping[str, Any],
    findings: Findings,
) -> None:
    """The classes, and the class of each image: from the table where it has them, else from the folders."""
    given, level = settings.get("classes"), settings.get("label_level")
    if described.labels is not None and described.where is not None:
        if level is not None:
            what = "the table has a column 'label', so label_level has nothing to say"
            raise ConfigError(what, where="label_level", hint="leave one of them out")
        table = table_path(settings["table"], found.folder)
        found.classes = tuple(given or classes_in_cells(described.labels, table, findings))
        found.labels = labels_of_cells(described.labels, described.where, found.classes, found.bad, findings)
    else:
        texts = _labels_by_folder(inner, level or 1)
        if found.names and not any(texts):
            _add_unlabelled(found.folder, level or 1, settings.get("table"), findings)
            return
        found.classes = tuple(given or sorted(set(filter(None, texts))))
        _check_empty(found.folder, in_splits, level or 1, found.names, findings)
        found.labels = _labels_of_folders(texts, found, level or 1, findings)
    _check_classes(found, given, findings)


def _add_unlabelled(folder: Path, level: int, table: str | None, findings: Findings) -> None:
    """Adds to `findings` that no image at all has a class."""
    what, hint = f"no image lies {_deep(level)}", "make a folder for each class, or give a table with labels"
    if table is not None:
        what = f"there is no column 'label', and {what}"
        hint = "name the column of the classes 'label' in the first line"
    where = folder if table is None else f"{table_path(table, folder)}, line 1"
    findings.add(where, what, hint, example=False)


def _deep(level: int) -> str:
    return "in a folder of a class" if level == 1 else f"{level} folders deep"


def _labels_by_folder(inner: Sequence[str], level: int) -> list[str]:
    """The folder at `level` of each path, "" where there is none."""
    parts = [name.split("/")[:-1] for name in inner]
    return [part[level - 1] if level <= len(part) else "" for part in parts]


def _labels_of_folders(texts: Sequence[str], found: Scan, level: int, findings: Findings) -> list[int]:
    """The class of each image; -1 where there is none, and why is in `findings`."""
    places = {name: at for at, name in enumerate(found.classes)}
    for row, text in enumerate(texts):
        if text not in places and row not in found.bad:
            where = found.folder / found.names[row]
            if text:
                findings.add(where, f"there is no class '{text}'", nearest(text, found.classes))
            else:
                findings.add(where, f"the image does not lie {_deep(level)}", "move it to that of its class")
            found.bad.add(row)
    return [places.get(text, -1) for text in texts]


def _check_classes(found: Scan, given: Sequence[str] | None, findings: Findings) -> None:
    if given is not None and len(set(given)) < len(given):
        raise ConfigError("a name stands twice in 'classes'", where="classes", hint="remove one")
    used = set(found.labels or ())
    for at, name in enumerate(found.classes):
        if given is not None and at not in used and found.names:
            hint = "put some there, or take it out of data.dataset.classes"
            findings.add(found.folder, f"no image is of the class '{name}'", hint, example=False)
    folded: dict[str, str] = {}
    for name in found.classes:
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            found.notes.append(f"the classes '{other}' and '{name}' differ by upper and lower case only")


def _check_empty(path: Path, in_splits: bool, level: int, names: Sequence[str], findings: Findings) -> None:
    """Folders of classes without an image; where classes are further down, their class in no other one either."""
    below = level + in_splits
    holding = {tuple(name.split("/")[:below]) for name in names if name.count("/") >= below}
    split_and_class = {(parts[:in_splits], parts[-1]) for parts in holding}
    for parts in _folders_at(path, below):
        if parts not in holding and (parts[:in_splits], parts[-1]) not in split_and_class:
            hint = "put images there, or remove it"
            findings.add(path.joinpath(*parts), "the folder of a class has no image", hint)


def _folders_at(path: Path, level: int) -> list[tuple[str, ...]]:
    if level == 0:
        return [()]
    return [(name, *rest) for name in folders(path) for rest in _folders_at(path / name, level - 1)]


def _check_others(
    path: Path, others: Sequence[str], table: str | None, found: Scan, findings: Findings
) -> None:
    """Files that are no images: those beside the folders are left alone, those within them surprise."""
    own = None if table is None else table_path(table, path).resolve()
    for name in others:
        if "/" in name and (path / name).resolve() != own:
            hint = "move it elsewhere, or give it the ending of its format if it is an image"
            findings.add(path / name, "the file is not named as an image is", hint)
