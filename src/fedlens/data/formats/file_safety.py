"""Reads files of text safely: links that leave the data folder, pipes and devices are never opened."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from fedlens.base.errors import DataError

_SPECIAL = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
LINK_HINT = "copy the file or folder into the data folder, or remove the link"


def read_bytes(path: Path, folder: Path | None = None) -> bytes:
    """The contents of a file.

    Raises `DataError` if it cannot be read, is a pipe, a socket or a device, or is a link from within `folder` to a
    file outside.
    """
    try:
        refuse_unsafe(path, folder)
        return path.read_bytes()
    except OSError as error:
        what, hint = f"the file cannot be read: {error.strerror}", "check its path and its permissions"
        raise DataError(what, where=str(path), hint=hint) from error


def refuse_unsafe(path: Path, folder: Path | None = None) -> None:
    """Raises `DataError` for a pipe, a socket, a device, and a link from within `folder` to a file outside.

    Raises `OSError` if the file cannot be found.
    """
    if folder is not None:
        refuse_link_out(path, folder)
    kind = special_file(path.stat().st_mode)
    if kind is not None:
        raise DataError(f"it is {kind}, not a file with data", where=str(path), hint="remove it")


def read_text(path: Path, folder: Path | None = None) -> str:
    """The text of a UTF-8 file, without a byte-order mark. Raises `DataError` as `read_bytes` does."""
    try:
        return read_bytes(path, folder).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"the file is not UTF-8: byte {error.start + 1} cannot be read"
        raise DataError(what, where=str(path), hint="save it in UTF-8") from None


def special_file(mode: int) -> str | None:
    """The kind of a file that is not made of stored bytes, from `st_mode`; None for files, folders and links.

    Reading such a file may never end.

    >>> special_file(stat.S_IFIFO), special_file(stat.S_IFREG)
    ('a named pipe', None)
    """
    return next((kind for holds, kind in _SPECIAL if holds(mode)), None)


@dataclass(frozen=True)
class LinkCheck:
    """Tells whether a path below a folder leads out of it by a link.

    The folders of the paths are resolved once each, so a path costs one system call.

    Args:
        root: the folder.
    """

    root: Path
    resolved: dict[str, str] = field(default_factory=dict, repr=False)

    def refuse_outside(self, name: str) -> None:
        """Raises `DataError` if `name`, with forward slashes, is or passes a link that leads out."""
        base = self._real("")
        folder, _, file = name.rpartition("/")
        path = os.path.join(self._real(folder), file)
        target = os.path.realpath(path) if os.path.islink(path) else path
        # Without a link, a name such as ../x is what the user wrote.
        if is_below(target, base) or target == os.path.normpath(os.path.join(base, name)):
            return
        # The link itself may be one of the folders that the name passes.
        parts = name.split("/")
        links = ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
        link = next(path for path in links if not is_below(os.path.realpath(os.path.join(base, path)), base))
        what = f"the link leads out of the data folder, to {os.path.realpath(os.path.join(base, link))}"
        raise DataError(what, where=str(self.root / link), hint=LINK_HINT)

    def _real(self, folder: str) -> str:
        if folder not in self.resolved:
            self.resolved[folder] = os.path.realpath(os.path.join(self.root, folder))
        return self.resolved[folder]


def refuse_link_out(path: Path, folder: Path) -> None:
    """Raises `DataError` if `path` lies in `folder` and is a link that leads out of it."""
    inner = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
    if inner.partition(os.sep)[0] != os.pardir:
        LinkCheck(folder).refuse_outside(inner.replace(os.sep, "/"))


def is_below(path: str, folder: str) -> bool:
    """Whether an absolute path is `folder` or below it.

    >>> is_below("/data/a.png", "/data"), is_below("/database/a.png", "/data")
    (True, False)
    """
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
