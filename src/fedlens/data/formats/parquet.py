"""Images in Parquet files, in the layout of the datasets of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from PIL import Image
from pydantic import Field

from fedlens.base.errors import ConfigError, DataError, nearest
from fedlens.base.parse_text import parse_json
from fedlens.base.summary_text import listed
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.cell_labels import classes_in_cells, labels_of_cells
from fedlens.data.formats.clients import describe
from fedlens.data.formats.csv_table import LABEL_WORDS, as_setting, closest
from fedlens.data.formats.folder_listing import image_names
from fedlens.data.formats.probe import FORMATS, probe_all
from fedlens.data.formats.reader import reader
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import split_named
from fedlens.files.atomic_files import refused, temporary_beside
from fedlens.files.caches import user_cache

_ROWS = 64  # whose images are in memory at once
_ENDING = {name: ending for ending, name in reversed(FORMATS.items())}  # the usual one of each format


def fill(scan: Scan) -> None:
    """Completes the scan of a folder; problems are added to `scan.findings`."""
    scan.format, scan.upright = "parquet", True
    scan.findings.attempt(_complete, scan, example=False)


def _complete(scan: Scan) -> None:
    """Completes the scan. Raises `DataError` with the first problem of the whole set."""
    others = image_names(scan.folder, scan.folder, scan.findings)[1]
    files = [name for name in others if name.endswith(".parquet")]
    if not files:
        raise DataError("the folder has no Parquet file", where=str(scan.folder), hint="check the path")
    schemas, columns = zip(*(_read(scan.folder / name) for name in files), strict=True)
    for name, schema in zip(files, schemas, strict=True):
        if schema.names != schemas[0].names:
            what, hint = (
                f"the columns differ from those of {files[0]}",
                "give the folder of one configuration",
            )
            raise DataError(what, where=str(scan.folder / name), hint=hint)
    where, features, plain = scan.folder / files[0], _features(schemas[0].metadata), list(columns[0])
    images = [field.name for field in schemas[0] if _has_images(field, features)]
    image = _one_of(scan, where, "image_column", images, images)
    named = ["label"] if "label" in plain else [name for name in plain if _class_names(features, name)]
    label = _one_of(scan, where, "label_column", plain, named)
    splits = _splits(scan.folder, files, [len(of_file[label]) for of_file in columns])
    classes = {name: _class_names(features, name) for name in plain}
    cells = {name: _cells([v for part in columns for v in part[name]], classes[name]) for name in plain}
    scan.folder = _unpacked(scan.folder, files, image)
    scan.names = [f"{name}/{entry}" for name in files for entry in sorted(os.listdir(scan.folder / name))]
    scan.notes.append(f"the images of the Parquet files are unpacked to {scan.folder}")
    scan.settings = {key: value for key, value in scan.settings.items() if key != "label_column"}
    if not describe(scan, records={name: cells[name] for name in plain if name != label}):
        return
    scan.published = scan.splits is None  # else they are those of a table
    scan.splits = scan.splits or splits
    names = classes[label] if scan.cells is None else ()
    scan.cells = cells[label] if scan.cells is None else scan.cells
    scan.classes = names or tuple(classes_in_cells(scan.cells, where, scan.findings))
    scan.labels = labels_of_cells(scan)
    scan.headers = probe_all(scan.folder, scan.names, scan.findings, full=scan.full)
    scan.bad.update(row for row, header in enumerate(scan.headers) if header is None)


@reader(fill)
def parquet(
    *,
    path: common.Folder,
    size: common.Size = None,
    channels: common.Channels = 3,
    fit: common.Fit = "crop",
    image_column: Annotated[
        str | None, Field(min_length=1, description="column of the images, if several columns have images")
    ] = None,
    label_column: Annotated[
        str | None,
        Field(
            min_length=1,
            description="column of the class; by default label, or the only one whose classes have names",
        ),
    ] = None,
) -> None:
    """Photographs in Parquet files as the Hugging Face hub has them: `path/data/train-00000-of-00002.parquet`.

    | what | source |
    |---|---|
    | image | a column of structs whose field `bytes` is an image file |
    | class | a column of whole numbers or names; the names of numbers are those of `ClassLabel` in the schema |
    | split | the first word of the file's name, or its folder, if that is train, test or validation; else a share
    `test` is held out |
    | client | `client_column`, another column of the files; else the column `client`, if any |

    Needs the extra `pandas`. The images are unpacked once into the user's cache folder, where messages name them by
    file and row; the files are read again when they change. A row without an image, or with a label that is no class,
    is a problem of that row. Images are decoded as those of `image-folder`. `root` and `download` are not used.

    Raises `ConfigError` if settings contradict each other or pyarrow is not installed, and `DataError` with all
    problems of the files; see `fedlens data check`.
    """


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The Parquet file. Raises `DataError` if it cannot be read, and `ConfigError` if pyarrow is not installed."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        what, hint = (
            "Parquet files need pyarrow, which is not installed",
            "run: pip install 'fedlens[pandas]'",
        )
        raise ConfigError(what, hint=hint) from None
    try:
        yield ParquetFile(path)
    except (OSError, ValueError) as error:  # of which pyarrow's own errors are kinds
        hint = "fetch the file again; a file of Git LFS needs 'git lfs pull'"
        raise DataError(f"not a readable Parquet file: {error}", where=str(path), hint=hint) from error


def _read(path: Path) -> tuple[Any, dict[str, list[Any]]]:
    """The schema of a file, and its columns of numbers and texts."""
    with _opened(path) as file:
        fields = [field for field in file.schema_arrow if not field.type.num_fields]
        names = [field.name for field in fields if "binary" not in str(field.type)]
        table = file.read(columns=names)
        return file.schema_arrow, {name: table.column(name).to_pylist() for name in names}


def _features(metadata: Mapping[bytes, bytes] | None) -> dict[str, dict[str, Any]]:
    """What `datasets` wrote about each column, from the metadata of a schema; empty if it wrote nothing.

    >>> _features({b"huggingface": b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a"]}}}}'})
    {'label': {'_type': 'ClassLabel', 'names': ['a']}}
    """
    try:
        features = parse_json((metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (AttributeError, KeyError, TypeError, ValueError):  # files of other programs
        return {}


def _class_names(features: Mapping[str, Mapping[str, Any]], column: str) -> tuple[str, ...]:
    """The names of the classes of a column; equal names get their number, as the two cranes of ImageNet."""
    names = features.get(column, {}).get("names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    counts = Counter(names)
    return tuple(name if counts[name] == 1 else f"{name} ({at})" for at, name in enumerate(names))


def _has_images(field: Any, features: Mapping[str, Mapping[str, Any]]) -> bool:
    inner = [field.type.field(at).name for at in range(field.type.num_fields)]
    return "bytes" in inner and features.get(field.name, {}).get("_type", "Image") == "Image"


def _one_of(scan: Scan, where: Path, key: str, columns: Sequence[str], candidates: Sequence[str]) -> str:
    """The column that the setting `key` names among `columns`, or else the only candidate."""
    given, what = scan.settings.get(key), "images" if key == "image_column" else "classes"
    if given in columns or (len(candidates) == 1 and given is None):
        return str(given or candidates[0])
    best = next(iter(candidates), closest(columns, LABEL_WORDS))
    if given is not None:
        problem = f"there is no column '{given}' of {what}, which data.dataset.{key} names"
        hint = nearest(given, columns)
    else:
        count = f"{len(candidates)} columns have" if candidates else "no column has"
        problem = f"{count} {what}" + (f": {listed(candidates)}" if candidates else "")
        hint = f"set {as_setting(key, best)}" if best else "an image is a struct with a field bytes"
    raise DataError(problem, where=str(where), hint=hint)


def _cells(column: Sequence[Any], names: Sequence[str]) -> list[str]:
    """The values as the cells of a table: the names of classes, and "" for no value."""
    named = dict(enumerate(names))
    return ["" if value is None else named.get(value, str(value)) for value in column]


def _splits(folder: Path, files: Sequence[str], rows: Sequence[int]) -> list[str] | None:
    """The split of each row, by the names of the files; None if they name none."""
    splits = [_split_of(name) for name in files]
    if None in splits and any(splits):
        what = "the file's name names no split, as those of others do"
        hint = "name it train-..., test-... or validation-..., or move it elsewhere"
        raise DataError(what, where=str(folder / files[splits.index(None)]), hint=hint)
    if set(splits) <= {None, "train"}:
        return None
    return [split or "train" for split, count in zip(splits, rows, strict=True) for _ in range(count)]


def _split_of(name: str) -> str | None:
    """The split that the name of a file has, or that of its folder.

    >>> _split_of("data/train-00000-of-00002.parquet"), _split_of("default/test/0000.parquet"), _split_of("a.parquet")
    ('train', 'test', None)
    """
    *folders, file = name.split("/")
    return split_named(re.split(r"[-_.]", file)[0]) or split_named(folders[-1] if folders else "")


def _unpacked(folder: Path, files: Sequence[str], image: str) -> Path:
    """The folder in the user's cache with the image files of each Parquet file, in the order of its rows."""
    states = [(name, (folder / name).stat()) for name in files]
    of = [str(folder.resolve()), image, *((name, state.st_size, state.st_mtime_ns) for name, state in states)]
    target = user_cache("parquet") / hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]
    if target.is_dir():
        return target
    beside = temporary_beside(target)
    try:
        for name in files:
            _unpack(folder / name, image, beside / name)
        beside.rename(target)
    except OSError as error:
        if target.is_dir():  # another process was faster
            return target
        hint = "free some space, or set XDG_CACHE_HOME to another folder"
        raise refused(error, "the images of the Parquet files", target, hint) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def _unpack(file: Path, image: str, folder: Path) -> None:
    """Writes the image of each row into a file of its own; an empty file where there is none."""
    folder.mkdir(parents=True)
    for row, content in enumerate(_images(file, image)):
        (folder / f"{row:09d}{_ending(content)}").write_bytes(content)


def _images(file: Path, column: str) -> Iterator[bytes]:
    with _opened(file) as table:
        for batch in table.iter_batches(_ROWS, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield (value or {}).get("bytes") or b""


def _ending(content: bytes) -> str:
    """The usual ending of an image file with this content; of other contents, which the check refuses, .png."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            return _ENDING.get("JPEG" if image.format == "MPO" else str(image.format), ".png")
    except Exception:  # a damaged file can make a decoder raise any exception
        return ".png"
