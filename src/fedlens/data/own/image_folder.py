"""A folder of images: a folder for each class, or a table that says which class each image is of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedlens.core.errors import ConfigError, nearest
from fedlens.data.dataset import Dataset
from fedlens.data.findings import Findings
from fedlens.data.own import options
from fedlens.data.own.clients import describe, listed, table_path
from fedlens.data.own.files import folders, image_names
from fedlens.data.own.probe import probe_all
from fedlens.data.own.scan import Scan, read
from fedlens.data.own.splits import split_named


def image_folder(
    root: Path,
    download: bool,
    seed: int,
    *,
    path: options.Folder,
    size: options.Size = 224,
    channels: options.Channels = 3,
    fit: options.Fit = "crop",
    classes: options.Classes = None,
    label_level: Annotated[
        int | None,
        Field(
            ge=1, description="folder that says the class, counted as client_level; by default 1, the first"
        ),
    ] = None,
    test: options.Test = 0.2,
    table: options.TableFile = None,
    client_column: options.ClientColumn = None,
    client_level: options.ClientLevel = None,
    client_pattern: options.ClientPattern = None,
    on_error: options.OnError = "stop",
) -> Dataset:
    """Photographs in folders: `path/CLASS/*.jpg`, `path/SPLIT/CLASS/*.jpg`, or a table `path,label,client,split`.

    | what | where it is read |
    |---|---|
    | class | column `label` of the table: names, or whole numbers from 0 on; else the folder at `label_level` |
    | split | column `split` of the table; else the first folders, where they are named train, test or val; else a
    share `test` of the images is held out, of each class and client alike |
    | client | `client_column`, `client_level` or `client_pattern`; else column `client` of the table, if any |

    Levels of folders count below a folder of a split. Classes are sorted by name, or are `classes`, each of which
    must have images then. A photograph is turned as
    its EXIF tag says; see `fedlens.data.decoding.decode` for what else becomes of it. Mean and deviation are of
    1,000 training images at most (`fedlens.data.images.sample_moments`). Plays no part: `root`, `download`.

    Raises `ConfigError` where settings contradict each other, and `DataError` with all that is wrong with the
    files; see `fedlens data check`.
    """
    settings = {
        "path": path,
        "size": size,
        "channels": channels,
        "fit": fit,
        "classes": classes,
        "label_level": label_level,
        "test": test,
        "table": table,
        "client_column": client_column,
        "client_level": client_level,
        "client_pattern": client_pattern,
        "on_error": on_error,
    }
    return read(scan, settings, seed, upright=True)


def scan(path: Path, settings: Mapping[str, Any], findings: Findings, *, full: bool) -> Scan:
    """What is in the folder `path`; everything that is wrong is added to `findings`."""
    given: list[str] | None = settings.get("classes")
    names, others = image_names(path)
    in_splits = _first_folders_are_splits(path, given or [], findings)
    inner = [name.partition("/")[2] for name in names] if in_splits else names
    described = describe(names, settings, path, findings, inner=inner)
    found = Scan("image-folder", path, names, columns=described.columns, splits=described.splits)
    found.bad, found.notes = described.bad, described.notes
    if in_splits and described.splits is None:
        splits = [split_named(name.partition("/")[0]) or "train" for name in names]
        found.splits = None if set(splits) == {"train"} else splits
    level = settings.get("label_level")
    if described.labels is not None and described.where is not None:
        if level is not None:
            what = "the table has a column 'label', so label_level has nothing to say"
            raise ConfigError(what, where="label_level", hint="leave one of them out")
        texts, where = described.labels, described.where
        known = given or _classes_in_cells(texts, str(settings["table"]), findings)
    else:
        texts, where = _labels_by_folder(inner, level or 1), [str(path / name) for name in names]
        known = given or sorted(set(filter(None, texts)))
        _check_empty(path, in_splits, level or 1, names, findings)
    found.classes = tuple(known)
    found.labels = _numbered(texts, where, known, found.bad, findings, level or 1)
    _check_classes(found, given, findings)
    _check_others(path, others, settings.get("table"), found, findings)
    sizes = probe_all(path, names, findings, full=full)
    found.bad.update(row for row, size in enumerate(sizes) if size is None)
    return found


def _first_folders_are_splits(path: Path, given: Sequence[str], findings: Findings) -> bool:
    """Whether the folders in `path` are train, test and so on, and not classes of such names."""
    found = folders(path)
    named = {name: split for name in found if (split := split_named(name)) and name not in given}
    if not named or (len(named) < len(found) and len(set(named.values())) < 2):
        return False
    if len(named) < len(found):
        others = [name for name in found if name not in named]
        findings.add(
            path,
            f"the folders {listed(list(named))} are splits, and {listed(others)} not",
            "move the others into a split, or elsewhere",
            example=False,
        )
    return True


def _labels_by_folder(inner: Sequence[str], level: int) -> list[str]:
    """The folder at `level` of each path, "" where there is none."""
    parts = [name.split("/")[:-1] for name in inner]
    return [part[level - 1] if level <= len(part) else "" for part in parts]


def _classes_in_cells(texts: Sequence[str], table: str, findings: Findings) -> list[str]:
    """The classes that a column names: sorted names, or the whole numbers from 0 on."""
    different = set(filter(None, texts))
    if not all(re.fullmatch(r"-?[0-9]+", text) for text in different):
        return sorted(different)
    numbers = sorted({int(text) for text in different})
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers))
    hint = "number them from 0 on, or name every class in data.dataset.classes"
    if numbers and numbers[0] < 0:
        findings.add(table, f"the label {numbers[0]} is below 0", hint, example=False)
    elif missing:
        what = f"the labels skip {listed([str(number) for number in missing])}, and go up to {numbers[-1]}"
        findings.add(table, what, hint, example=False)
        return [str(number) for number in numbers]
    return [str(number) for number in range(len(numbers))]


def _numbered(
    texts: Sequence[str],
    where: Sequence[str],
    classes: Sequence[str],
    bad: set[int],
    findings: Findings,
    level: int,
) -> list[int]:
    """The class of each image; -1 where there is none, and why is in `findings`."""
    places = {name: at for at, name in enumerate(classes)}
    numbers = []
    for row, text in enumerate(texts):
        at = places.get(text)
        if at is None and text.isdecimal() and int(text) < len(classes):
            at = int(text)
        if at is None and row not in bad:
            if text:
                findings.add(where[row], f"there is no class '{text}'", nearest(text, classes))
            else:
                deep = "in no folder of a class" if level == 1 else f"less than {level} folders deep"
                findings.add(where[row], f"the image has no label, or lies {deep}", "say its class")
            bad.add(row)
        numbers.append(-1 if at is None else at)
    return numbers


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
