"""Guesses the format of a folder of a user's own data from its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.data.formats.csv_table import table_path
from fedlens.data.formats.folder_listing import folders
from fedlens.data.formats.probe import FORMATS as IMAGE_ENDINGS

_HEAD = 1 << 16  # bytes of a file that are looked at
_FILES = 20  # of one kind that are looked at
_MOST = 1000  # files of all kinds that are looked at
_BOX = re.compile(rb"\s*\d+(?:\s+[-+.\deE]+){4}(?:\s|\Z)")  # not the text of a picture
_COCO_KEYS = (b'"images"', b'"annotations"', b'"categories"')


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


def _masks(folder: Path, settings: Mapping[str, Any]) -> str | None:
    names = [str(settings.get(kind, kind)) for kind in ("images", "masks")]
    return f"it has the folders {' and '.join(names)}" if all((folder / n).is_dir() for n in names) else None


_ANNOTATED: Mapping[str, Callable[[Path, Mapping[str, Any]], str | None]] = {
    "coco-json": _coco,
    "voc-xml": _voc,
    "yolo-txt": _yolo,
    "mask-folder": _masks,
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
