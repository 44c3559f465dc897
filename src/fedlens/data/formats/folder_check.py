"""Checks a folder of a user's own data, whose format it recognizes, and reports every problem at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.data.diagnostics import Finding, Findings, unique
from fedlens.data.formats.csv_table import client_column, image_column, read_csv, table_path, typed
from fedlens.data.formats.folder_listing import folders
from fedlens.data.formats.probe import FORMATS as IMAGE_ENDINGS
from fedlens.data.formats.reader import examine
from fedlens.data.formats.registry import find_format
from fedlens.data.formats.scan import Scan

_HEAD = 1 << 16  # bytes of a file that are looked at
_FILES = 20  # of one kind that are looked at
_MOST = 1000  # files of all kinds that are looked at
_BOX = re.compile(rb"\s*\d+(?:\s+[-+.\deE]+){4}(?:\s|\Z)")  # not the text of a picture
_COCO_KEYS = (b'"images"', b'"annotations"', b'"categories"')


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Args:
        facts: counts of images, classes and so on; see `fedlens.data.formats.scan.Scan.facts`.
        findings: the problems that stop a run: first those of the whole set, then those of examples, each sorted by
            file, then line.
        warnings: what is likely a mistake, but stops no run.
        dataset: the table `data.dataset` of an experiment that reads the same data, but for examples with problems; of
            several parties, the table `data.parties`.
        guessed: why the format was chosen; empty if it was given.
    """

    facts: Mapping[str, Any]
    findings: tuple[Finding, ...]
    warnings: tuple[Finding, ...] = ()
    dataset: Mapping[str, Any] = field(default_factory=dict)
    guessed: str = ""

    @property
    def hardly_any_left(self) -> bool:
        """Whether so many images have problems that leaving them out is no advice: three quarters, or all but one."""
        left, bad = self.facts["images"], self.facts["left_out"]
        return bool(bad) and (left < 2 or bad >= 3 * left)

    @property
    def ready(self) -> Mapping[str, Any] | None:
        """The table `data.dataset` with which a run starts; None if the problems stop every run.

        These are problems of the whole dataset, or of so many examples that too few images, or no boxes, remain.
        """
        if any(not finding.example or "parties" in self.facts for finding in self.findings):
            return None
        if self.findings and (self.facts["images"] < 2 or self.facts.get("boxes") == 0):
            return None
        return {**self.dataset, "on_error": "skip"} if self.findings else self.dataset


def check_folder(folder: Path, format: str | None = None, settings: Mapping[str, Any] | None = None) -> Check:
    """Reads the whole of `folder`, in a format of `fedlens.data.formats.registry.FORMATS`, and decodes every image.

    Without a format it is guessed (`guess_format`). `settings` are those of the dataset of that name. With the format
    `csv` the table may be left out if the folder has only one.

    Raises `ConfigError` if the format or a setting is wrong, or the format cannot be guessed. Problems of the data
    are in the result.

    >>> import tempfile
    >>> check = check_folder(Path(tempfile.mkdtemp()), "image-folder")
    >>> [finding.what for finding in check.findings]
    ['the folder has no images']
    """
    given, guessed = {"path": str(folder), **(settings or {})}, ""
    if format is None:
        guess = guess_format(folder, given) if folder.is_dir() else Guess("image-folder", "")
        format, guessed = guess.format, guess.why
    entry = find_format(format)
    if format == "csv" and "table" not in given and folder.is_dir():
        given["table"] = _only_table(folder)
    # Paths stay as given, so that findings name files as the user sees them.
    paths = {key: given[key] for key in ("path", "table") if key in given}
    scan = examine(
        entry.fill(), read_settings(entry.reader(), given, "", "--set {}".format) | paths, full=True
    )
    findings = unique(sorted(scan.findings, key=lambda finding: (finding.example, natural(finding.where))))
    if scan.described and "client" not in scan.columns and given.get("client_column") is None:
        scan.findings.warn(
            folder,
            "no client is named, so the partition has to make clients, as iid does",
            _client_hint(scan),
        )
    facts = {**scan.facts(), "format": format}
    return Check(
        facts, tuple(findings), tuple(scan.findings.warnings), {"name": scan.format, **given}, guessed
    )


def own_dataset(folder: Path, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the settings of the dataset in a folder of a user's own data, in the format that its files have.

    Raises `ConfigError` if no format fits, or several do.
    """
    given = {"path": str(folder), **settings}
    name = guess_format(folder, given).format
    if name != "csv":
        return name, given
    return "image-folder", given if "table" in given else {**given, "table": _only_table(folder)}


def _client_hint(scan: Scan) -> str:
    """How to name the clients, with the column that may do so, of the table or of one that is not used yet."""
    column = client_column(scan.columns)
    setting = "" if column is None else f"client_column={column}"
    if not setting and scan.settings.get("table") is None:
        setting = next(filter(None, map(_clients_of_table, sorted(scan.folder.glob("*.csv")))), "")
    example = f", such as {setting}" if setting else ""
    return f"name a column of the table (client_column{example}), a folder (client_level) or a client_pattern"


def _clients_of_table(path: Path) -> str:
    """The settings with which a table of images names the clients; empty if it does not."""
    table = read_csv(path, Findings(), path.parent)
    images = None if table is None else image_column(table)
    if table is None or images is None:
        return ""
    others = {
        name: typed(table.column(name)) for name in table.columns if name not in (images, "label", "split")
    }
    column = client_column(others)
    if column is None:
        return ""
    given = {"table": path.name, "client_column": column} | (
        {} if images == "path" else {"path_column": images}
    )
    return " ".join(f"{key}={value}" for key, value in given.items())


def natural(text: str) -> tuple[tuple[str, int], ...]:
    """A key by which line 10 comes after line 9.

    >>> sorted(["a, line 10", "a, line 9"], key=natural)
    ['a, line 9', 'a, line 10']
    """
    return tuple((word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", text))


def _only_table(folder: Path) -> str:
    tables = sorted(path.name for path in folder.glob("*.csv"))
    if len(tables) != 1:
        what = f"the folder has {len(tables)} files ending in .csv" if tables else "the folder has no table"
        hint = "name the table with --set table=FILE"
        raise ConfigError(what, where=str(folder), hint=hint)
    return str(folder / tables[0])


@dataclass(frozen=True)
class Guess:
    """A format by its name in `registry.FORMATS`, and the reason, as the rest of a sentence."""

    format: str
    why: str


def guess_format(folder: Path, settings: Mapping[str, Any]) -> Guess:
    """The format that the files in `folder` have, of those with annotations or else of images alone.

    Files of annotations count before a table, which may describe the images of any format.

    Raises `ConfigError` if files of several formats of annotations are there, or of none.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "masks").mkdir(), (folder / "images").mkdir()
    (None, None)
    >>> guess_format(folder, {})
    Guess(format='mask-folder', why='it has the folders images and masks')
    """
    found = [Guess(name, why) for name, look in _ANNOTATED.items() if (why := look(folder, settings))]
    if len(found) == 1:
        return found[0]
    if found:
        candidates = ", ".join(f"{guess.format} ({guess.why})" for guess in found)
        what = f"the format is not clear: {candidates}"
        raise ConfigError(what, where=str(folder), hint=f"choose one, e.g. --format {found[0].format}")
    table = settings.get("table")
    tables = [table] if table is not None else sorted(path.name for path in folder.glob("*.csv"))
    if tables:
        return Guess("csv", f"there is a table, {table_path(tables[0], folder).name}")
    image = next((name for name in folders(folder, folder) if _has_image(folder / name)), None)
    if image is not None:
        return Guess("image-folder", f"it has images in folders, such as {image}")
    what = "no format fits: there are no annotations, no table and no folders of images"
    raise ConfigError(what, where=str(folder), hint="name the format with --format, or another folder")


def _coco(folder: Path, settings: Mapping[str, Any]) -> str | None:
    for path in _files(folder, "*.json", "*/*.json"):
        head = _head(path)
        if head.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{") and any(key in head for key in _COCO_KEYS):
            return f"{path.relative_to(folder).as_posix()} has lists of images and annotations"
    return None


def _voc(folder: Path, settings: Mapping[str, Any]) -> str | None:
    for path in _files(folder, "*.xml", "*/*.xml", f"{settings.get('annotations', 'Annotations')}/**/*.xml"):
        if b"<annotation" in _head(path):
            return f"{path.relative_to(folder).as_posix()} annotates an image"
    return None


def _yolo(folder: Path, settings: Mapping[str, Any]) -> str | None:
    for path in _files(folder, "labels/**/*.txt", "*/labels/**/*.txt"):
        return f"{path.relative_to(folder).as_posix()} is in a folder of labels"
    files = list(islice(folder.rglob("*"), _MOST))
    images = {path.with_suffix("") for path in files if path.suffix.lower() in IMAGE_ENDINGS}
    beside = [path for path in files if path.suffix == ".txt" and path.with_suffix("") in images]
    text = next((path for path in beside[:_FILES] if _BOX.match(_head(path))), None)
    return (
        None if text is None else f"{text.relative_to(folder).as_posix()} has a box, and the name of an image"
    )


def _parquet(folder: Path, settings: Mapping[str, Any]) -> str | None:
    for path in _files(folder, "*.parquet", "*/*.parquet", "*/*/*.parquet"):
        return f"{path.relative_to(folder).as_posix()} is a Parquet file"
    return None


def _masks(folder: Path, settings: Mapping[str, Any]) -> str | None:
    names = [str(settings.get(kind, kind)) for kind in ("images", "masks")]
    return f"it has the folders {' and '.join(names)}" if all((folder / n).is_dir() for n in names) else None


_ANNOTATED: Mapping[str, Callable[[Path, Mapping[str, Any]], str | None]] = {
    "coco-json": _coco,
    "voc-xml": _voc,
    "yolo-txt": _yolo,
    "mask-folder": _masks,
    "parquet": _parquet,
}


def _files(folder: Path, *patterns: str) -> Iterator[Path]:
    """The first regular files that each pattern matches, sorted among these."""
    for pattern in patterns:
        yield from sorted(path for path in islice(folder.glob(pattern), _FILES) if path.is_file())


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError:
        return b""


def _has_image(folder: Path) -> bool:
    return any(path.suffix.lower() in IMAGE_ENDINGS for path in islice(folder.rglob("*"), _MOST))
